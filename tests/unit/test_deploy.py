"""Files of docker/ and deploy/: they can be read, and name options, settings, metrics and paths that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.machine import haproxy, haproxy_program, needs
from tests.support.serve_parser import serve_parser
from tests.unit.test_docs import check_weir, variables
from vllm_weir.cli.serve import HELP, prepare
from vllm_weir.server import metrics, store

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
PAGE = (ROOT / "docs/guides/deploy.md").read_text()
YAML = {path.name: yaml.safe_load(path.read_text()) for path in DEPLOY.glob("*.yaml")}


def serve_options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--weir-")}


def check_serve(options: list[str]) -> Any:
    """Return what vLLM's parser makes of a server's command line; Weir's own options are checked and taken out."""
    return serve_parser().parse_args(["serve", *prepare(options, {})])


def check_environment(names: list[str]) -> None:
    assert {name for name in names if name.startswith("WEIR_")} <= variables()


def test_every_file_is_on_the_page() -> None:
    names = {path.name for path in DEPLOY.iterdir()} | {"Dockerfile"}
    assert names == {Path(link).name for link in re.findall(r"\.\./\.\./((?:deploy|docker)/[\w.-]+)", PAGE)}


def test_the_image_installs_what_there_is() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    asked = [set(found.split(",")) for found in re.findall(r"whl\)\[([\w,]+)\]", DOCKERFILE)]
    assert len(asked) == 2 and all(each <= extras and "s3" in each for each in asked)
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.M)
    assert stages == ["wheel", "cpu", "cuda"]
    for stage in stages[1:]:
        text = DOCKERFILE.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
        assert 'ENTRYPOINT ["weir", "serve"]' in text and "\nUSER weir\n" in text
        assert "VLLM_PLUGINS=weir" in text and "localhost:8000/health" in text


def test_compose() -> None:
    services: dict[str, Any] = YAML["compose.yaml"]["services"]
    for name in ("one", "two"):
        server = services[name]
        assert serve_options(server["command"]) == {store.OPTION} <= serve_options(HELP.split())
        assert check_serve(server["command"]).served_model_name == ["demo"]
        assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
        check_environment(list(server["environment"]))
        [folder] = {volume.partition(":")[2] for volume in server["volumes"]}
        assert server["command"][server["command"].index(store.OPTION) + 1] == folder
    config = (DEPLOY / "haproxy.cfg").read_text()
    assert set(re.findall(r"^  server \w+ (\w+):8000$", config, re.M)) == {"one", "two"}
    assert services["proxy"]["volumes"][0].partition(":")[0] == "./haproxy.cfg"


@needs(haproxy)
def test_the_proxy_takes_its_configuration(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(re.sub(r" (one|two):8000", " 127.0.0.1:8000", (DEPLOY / "haproxy.cfg").read_text()))
    done = subprocess.run([str(haproxy_program()), "-c", "-f", str(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_charts() -> None:
    [stack] = YAML["production-stack.yaml"]["servingEngineSpec"]["modelSpec"]
    check_environment([one["name"] for one in stack["env"]])
    assert {"VLLM_PLUGINS", "WEIR_SERVE_STORE"} <= {one["name"] for one in stack["env"]}
    # The chart writes `--max-model-len` for `maxModelLen`.
    given = {
        re.sub("[A-Z]", lambda found: f"-{found[0].lower()}", key): value for key, value in stack["vllmConfig"].items()
    }
    more = given.pop("extra-args")
    parsed = check_serve([stack["modelURL"], *(f"--{key}={value}" for key, value in given.items()), *more])
    assert parsed.max_model_len == 8192 and parsed.served_model_name == ["llama8b"]
    [server] = YAML["llm-d.yaml"]["decode"]["containers"]
    assert server["modelCommand"] == "custom" and server["command"] == ["weir", "serve"]
    assert serve_options(server["args"]) <= serve_options(HELP.split())
    check_environment([one["name"] for one in server["env"]])
    assert check_serve(server["args"]).model_tag == YAML["llm-d.yaml"]["modelArtifacts"]["name"]
    assert f"--port={server['ports'][0]['containerPort']}" in server["args"]


@pytest.mark.parametrize("name", ["extract.sbatch", "extract.sky.yaml"])
def test_commands_of_big_runs(name: str) -> None:
    script = YAML[name]["run"] if name.endswith("yaml") else (DEPLOY / name).read_text()
    assert subprocess.run([shutil.which("bash") or "bash", "-n"], input=script, text=True).returncode == 0
    [command] = [line.strip().removeprefix("srun ") for line in script.splitlines() if " weir extract " in f" {line}"]
    check_weir(shlex.split(command)[1:], name)


def test_parts_of_a_dataset_are_kept_apart() -> None:
    """By the name without its last ending, of which parts may have several."""
    [out] = re.findall(r'--out "\$out/(\S+)"', (DEPLOY / "extract.sbatch").read_text())
    names = [
        subprocess.run(["bash", "-c", f"name={name}; echo {out}"], capture_output=True, text=True).stdout.strip()
        for name in ("texts.000.jsonl", "texts.001.jsonl")
    ]
    assert names == ["texts.000", "texts.001"]


def test_the_dashboard_shows_every_metric() -> None:
    source = Path(metrics.__file__).read_text()
    counters = set(re.findall(r'(?:counter\(|Counter\(\s*)"(weir_\w+)"', source))
    gauges = set(re.findall(r'gauge\("(weir_\w+)"', source))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = {f"{name}_total" for name in counters} | gauges | {f"{metrics.NAME}_bucket"}
    assert set(re.findall(r"weir_\w+", asked)) == names and len(names) > 9
    assert [panel["id"] for panel in dashboard["panels"]] == list(range(1, len(dashboard["panels"]) + 1))


def test_what_a_big_run_takes() -> None:
    """The page's table, from the rates that were measured."""
    measured = json.loads((ROOT / "bench/results/extract_h100.json").read_text())
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:4] == "| 1 "]
    rows = [(*left.split(), *model.replace(",", "").split()[:2], *more) for left, model, *more in cells]
    assert len(rows) == 12
    for _, count, model, blocks, rate, gb, times, sizes, shards in rows:
        (time, unit), (size, prefix) = times.split(), sizes.split()
        tokens, d_model = {"M": 1e6, "G": 1e9, "T": 1e12}[count], {"8B": 4096, "70B": 8192}[model]
        share = {"8B": 1.0, "70B": 8.03 / 70.55}[model]
        speed = measured[f"extract, blocks: {blocks}"]["tokens/s"] * share
        row = 2 * int(blocks) * d_model
        assert number(rate) == pytest.approx(speed, abs=0.5)
        assert float(gb) == pytest.approx(speed * row / 1e9, abs=0.005)
        seconds = {"s": 1, "h": 3600, "d": 86400}[unit]
        assert number(time) == pytest.approx(tokens / speed / seconds, rel=0.02)
        assert float(size) == pytest.approx(tokens * row / {"GB": 1e9, "TB": 1e12, "PB": 1e15}[prefix], abs=0.05)
        assert number(shards) == -(-int(tokens) * row // 2**28)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_wrong_option_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_serve(["demo", "--max-model-length", "8"])
    assert "--max-model-length" in capsys.readouterr().err
