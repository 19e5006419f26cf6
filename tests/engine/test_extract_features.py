"""`weir extract --sae` on a real engine: what the autoencoder says of captured rows, and a kill costs nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import vllm_weir as weir
from tests.engine.extract_kill import ENGINE
from tests.support.extracting import texts, write_jsonl
from tests.support.measure import eventually
from tests.support.oracle import Oracle
from tests.support.zygote import ROOT, zygote

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
RECORDS = 96
BOUND = 1e-5


def job(source: Path, out: Path, *more: str) -> list[str]:
    return [
        "-m", "vllm_weir.cli.main", "extract", str(source), "-m", weir.demo_model(), "-o", str(out), "-e",
        json.dumps(ENGINE), "--batch", "8", "--flush-seconds", "0", "--json", "-q", *more,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_features_are_those_of_transformers_rows(tmp_path: Path, killed: bool) -> None:
    stories = texts(RECORDS)
    source, out = write_jsonl(tmp_path / "texts.jsonl", stories), tmp_path / "features"
    command = job(source, out, "--sae", f"mood={weir.demo_sae()}", "--top-k", "128", "--max-tokens", "3")
    command += ["--positions", "all"]
    held = kill_midway(command, out, tmp_path) if killed else 0
    done = zygote().run(command, environment(), ROOT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["requests"], summary["held"]) == (RECORDS - held, held)

    from transformers import AutoTokenizer

    sae, found, truth = weir.SAE.load(weir.demo_sae()), weir.load_features(out), Oracle(Path(weir.demo_model()))
    encode = AutoTokenizer.from_pretrained(weir.demo_model())
    assert found.records.tolist() == list(range(RECORDS))
    worst, largest, active, rows = 0.0, 1.0, 0, 0
    for record, story in enumerate(stories):
        prompt, features = encode(story)["input_ids"], found[record]
        ids, at = features.token_ids.tolist(), features.positions.tolist()
        assert ids[: len(prompt)] == prompt and at == list(range(len(ids)))
        assert features.generated.tolist() == [position >= len(prompt) for position in at]
        wanted, dense = sae.encode(truth.rows(ids)[tuple(sae.site)].float()).numpy(), features.dense(sae.d_sae)
        worst, largest = max(worst, float(np.abs(dense - wanted).max())), max(largest, float(np.abs(wanted).max()))
        active, rows = active + len(features.ids), rows + len(ids)
    assert worst <= BOUND * largest and active > 5 * rows and found.rows == rows


def kill_midway(command: list[str], out: Path, folder: Path) -> int:
    """Kill the command once it has published some records; return how many it holds."""
    log = folder / "killed.log"
    process = zygote().start(command, environment(), ROOT, folder / "killed.out", log)

    def published() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return len(list(out.glob("features-*.parquet"))) >= 16  # each has at least one record

    eventually(published, True, 300)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    held = len(weir.load_features(out))
    assert 16 <= held < RECORDS
    return held
