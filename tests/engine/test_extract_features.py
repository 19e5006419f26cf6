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
from tests.support.zygote import ROOT, zygote

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
CLOSE_OTHERS = True
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


def test_features_are_those_of_captured_rows_after_a_kill(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "texts.jsonl", texts(RECORDS)), tmp_path / "features"
    asked = ["--sae", f"mood={weir.demo_sae()}", "--top-k", "128", "--max-tokens", "3", "--positions", "all"]
    log, said = tmp_path / "killed.log", tmp_path / "killed.out"
    process = zygote().start(job(source, out, *asked), environment(), ROOT, said, log)

    def published() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return len(list(out.glob("features-*.parquet"))) >= 16  # each has at least one record

    eventually(published, True, 300)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    held = len(weir.load_features(out))
    assert 16 <= held < RECORDS

    done = zygote().run(job(source, out, *asked), environment(), ROOT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["requests"], summary["held"]) == (RECORDS - held, held)
    rows = zygote().run(
        job(source, tmp_path / "rows", "--layers", "3", "--max-tokens", "3", "--positions", "all"),
        environment(), ROOT, tmp_path,
    )  # fmt: skip
    assert rows.returncode == 0, rows.stderr[-3000:]

    sae, found, captured = weir.SAE.load(weir.demo_sae()), weir.load_features(out), weir.load(tmp_path / "rows")
    assert found.records.tolist() == list(range(RECORDS)) and found.rows == captured.count()
    worst, active = 0.0, 0
    for request in captured.requests:
        acts, features = captured[request], found[captured.metadata(request)["record"]]
        assert features.positions.tolist() == acts.positions.tolist()
        assert features.token_ids.tolist() == acts.token_ids.tolist()
        prompt = captured.metadata(request)["prompt_tokens"]
        assert features.generated.tolist() == [at >= prompt for at in acts.positions.tolist()]
        wanted, dense = sae.encode(acts[sae.site].float()).numpy(), features.dense(sae.d_sae)
        assert np.array_equal(dense > 0, wanted > 0), request
        worst, active = max(worst, float(np.abs(dense - wanted).max())), active + len(features.ids)
    assert worst <= BOUND * max(1.0, float(np.abs(wanted).max())) and active > 5 * found.rows
