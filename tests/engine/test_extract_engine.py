"""`weir extract` on real engines: rows are transformers', and kills, Ctrl-C and Ray leave the same dataset."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import vllm_weir as weir
from tests.engine.extract_kill import BOUND, ENGINE, trial
from tests.support.extracting import differences, texts, write_jsonl
from tests.support.machine import GIB, engine_processes, memory, module, needs
from tests.support.measure import eventually, patience, rel_err
from tests.support.oracle import Oracle
from tests.support.zygote import ROOT, Child, zygote
from vllm_weir.storage import load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs(engine_processes)]
RECORDS = 240
RAY = {"num_cpus": 2, "object_store_memory": 100_000_000}


def extract(source: Path, out: Path) -> list[str]:
    """The arguments of Python for `weir extract`."""
    return [
        "-m", "vllm_weir.cli.main", "extract", str(source), "-m", weir.demo_model(), "-o", str(out),
        "--layers", "1,4", "-e", json.dumps(ENGINE), "--batch", "8", "--flush-seconds", "0", "--json", "-q",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return env


class Run(NamedTuple):
    """`weir extract` at work, in a process group of its own, as a terminal would start it."""

    process: Child
    said: Path
    log: Path


def begin(source: Path, out: Path, *more: str, **env: str) -> Run:
    said, log = (out.parent / f"{len(more)}.{kind}" for kind in ("said", "log"))
    return Run(zygote().start([*extract(source, out), *more], environment() | env, ROOT, said, log), said, log)


def end(run: Run, code: int) -> dict[str, Any]:
    """Its summary."""
    try:
        found = run.process.wait()
    finally:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
    assert found == code, (found, run.log.read_text()[-3000:])
    return json.loads(run.said.read_text().strip().splitlines()[-1])


def wait_for(path: Path, shards: int, process: Child | subprocess.Popen[bytes]) -> None:
    """Until so many are published."""

    def there() -> bool:
        assert process.poll() is None, "it published nothing"
        return len(list(path.glob("shard-*"))) >= shards

    eventually(there, True, 400)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(texts, dataset of an uninterrupted run)."""
    folder = tmp_path_factory.mktemp("extract")
    source = write_jsonl(folder / "texts.jsonl", texts(RECORDS))
    done = zygote().run(extract(source, folder / "whole"), environment(), ROOT, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["requests"], summary["skipped"], summary["interrupted"]) == (RECORDS, {}, False)
    assert summary["rows"] == load(folder / "whole").count() and summary["bytes"] == summary["rows"] * 256 * 4
    yield source, folder / "whole"


def test_rows_are_those_of_transformers(whole: tuple[Path, Path]) -> None:
    ds = load(whole[1])
    truth = Oracle(Path(weir.demo_model()))
    assert [tuple(site) for site in ds.sites] == [("resid_post", 1), ("resid_post", 4)]
    for request in sorted(ds.requests)[::40]:
        acts = ds[request]
        reference = truth.rows(acts.token_ids.tolist())
        assert acts.positions.tolist() == list(range(ds.metadata(request)["prompt_tokens"]))
        for site in acts.sites:
            assert rel_err(acts[site], reference[site]) <= 1e-5


@pytest.mark.thorough
@needs(module("ray"), memory(4 * GIB))
def test_ctrl_c_then_ray_whose_workers_die(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """The engine's processes get Ctrl-C too, as in a terminal, and still finish what is under way."""
    source, out = whole[0], tmp_path / "out"
    run = begin(source, out)
    wait_for(out, 2, run.process)
    os.killpg(run.process.pid, signal.SIGINT)
    first = end(run, 130)
    held = len(load(out))
    assert first["interrupted"] and 0 < first["requests"] == held < RECORDS

    ray = ["--ray", "--ray-workers", "2", "--ray-cpus", "1", "--ray-options", json.dumps(RAY)]
    run = begin(source, out, *ray, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    shards = len(list(out.glob("shard-*")))
    wait_for(out, shards + 1, run.process)
    workers = [
        p for p in psutil.Process(run.process.pid).children(recursive=True) if "MapWorker" in p.name() + _title(p)
    ]
    assert len(workers) == 2, workers
    for worker in workers:  # one of them has published
        worker.kill()
    second = end(run, 0)
    found = load(out)
    # What the dead workers had published of their last tasks is there, and in no count.
    assert second["held"] >= held and second["requests"] + second["held"] == RECORDS == len(found)
    assert differences(found, load(whole[1]), BOUND) == []
    writers = {block.name.split("-")[1] for block in found.index.blocks}
    assert len(writers) >= 3  # before Ctrl-C, a worker that died, and one that Ray started again


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.thorough
def test_no_process_of_the_engine_outlives_a_run_that_is_killed(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Left alone they would hold the memory that the next run needs. Forks do not ask to end with their parent."""
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, *extract(whole[0], tmp_path / "out")]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, start_new_session=True)
    wait_for(tmp_path / "out", 1, process)
    engine = [p for p in psutil.Process(process.pid).children(recursive=True) if "VLLM::" in p.name() + _title(p)]
    assert engine, "the engine has processes of its own"
    process.kill()  # and nobody else
    process.wait()
    _, alive = psutil.wait_procs(engine, timeout=patience(60))
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.thorough
def test_killed_twice(tmp_path: Path) -> None:
    result = trial(tmp_path, kills=2, seed=3, records=160)
    assert result["kills"] == 2 and result["max_difference"] <= BOUND


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_killed_twenty_times(tmp_path: Path) -> None:
    result = trial(tmp_path, kills=20, seed=0, records=600)
    assert result["kills"] == 20
