"""SIGKILL at random moments of a run, inside writes and publications too: the rest of the run makes the same dataset.

The engine is a made-up one, so that a run takes milliseconds; tests/engine has the same with vLLM.
"""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.extracting import (
    FakeFeatureEngine,
    SlowEngine,
    SlowFeatureEngine,
    differences,
    run_and_die,
    run_fake,
    same_features,
    texts,
    write_jsonl,
)
from tests.support.machine import needs, object_store
from tests.unit.storage.test_object_store import s3
from vllm_weir.storage import load
from vllm_weir.storage.features.dataset import load_features
from vllm_weir.util.shipped import demo_sae

__all__ = ["s3"]
RECORDS = 120


@pytest.fixture(scope="module")
def forks() -> Any:
    """Children that have imported everything when they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.extracting", "s3fs", "vllm_weir.storage.loading"])
    return context


@pytest.fixture
def source(tmp_path: Path) -> Path:
    values: list[Any] = texts(RECORDS)
    values[17], values[90] = "", 5  # are skipped
    return write_jsonl(tmp_path / "texts.jsonl", values)


def kill(forks: Any, *arguments: Any) -> int:
    child = forks.Process(target=run_and_die, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode in (0, -9), child.exitcode
    return child.exitcode


def finish(source: Path, url: str, options: dict[str, Any]) -> None:
    """Go on until done, and once more to see that nothing is left to do."""
    summary = run_fake(source, url, **options)
    assert summary.requests + summary.held == RECORDS - 2 and sorted(summary.skipped) == [17, 90]
    again = run_fake(source, url, **options)
    assert again.requests == 0 and again.held == RECORDS - 2 and sorted(again.skipped) == [17, 90]


def thorough(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("layout", "kills", "seed"),
    [
        ("sharded", 6, 0),
        ("packed", 4, 1),
        ("per_request", 4, 2),
        ("npz", 4, 3),
        thorough("sharded", 30, 4),
        thorough("packed", 12, 5),
        thorough("per_request", 8, 6),
        thorough("npz", 6, 7),
    ],
)
def test_killed_on_a_local_disk(layout: str, kills: int, seed: int, tmp_path: Path, source: Path, forks: Any) -> None:
    options: dict[str, Any] = {"layout": layout, "on_error": "skip"}
    if layout == "packed":
        options["pack_bytes"] = 6000
    run_fake(source, str(tmp_path / "whole"), **options)
    whole = load(tmp_path / "whole")
    rng = random.Random(seed)
    died = 0
    for begin in range(0, kills, 6):
        url = str(tmp_path / f"killed-{begin}")
        for i in range(begin, min(begin + 6, kills)):
            by_call = rng.random() < 0.7
            # A run makes some 50 calls; published records are not done again, so later runs make fewer.
            writes = rng.randint(1, 14) if by_call else 0
            seconds = 0.0 if by_call else rng.uniform(0.005, 0.06)
            died += kill(forks, source, url, writes, seconds, options | {"start_engine": SlowEngine}) == -9
            if (Path(url) / "weir.json").exists():
                partial = load(url)
                assert set(partial.requests) <= set(whole.requests)
        finish(source, url, options)
        assert differences(load(url), whole) == []
        assert not list(Path(url).rglob(".*.tmp"))
    assert died >= kills / 2, died


@pytest.mark.parametrize("seed", [5, thorough(6)])
def test_features_killed_on_a_local_disk(seed: int, tmp_path: Path, source: Path, forks: Any) -> None:
    options: dict[str, Any] = {"on_error": "skip", "sae": {"mood": demo_sae()}, "shard_bytes": 20_000}
    run_fake(source, str(tmp_path / "whole"), **options, start_engine=FakeFeatureEngine)
    whole, url, rng = load_features(tmp_path / "whole"), str(tmp_path / "killed"), random.Random(seed)
    died = 0
    for i in range(5):
        writes, seconds = (rng.randint(1, 9), 0.0) if i % 2 else (0, rng.uniform(0.01, 0.1))
        died += kill(forks, source, url, writes, seconds, options | {"start_engine": SlowFeatureEngine}) == -9
        if (Path(url) / "features.json").exists():
            assert set(load_features(url).records) <= set(whole.records)
    finish(source, url, options | {"start_engine": FakeFeatureEngine})
    found = load_features(url)
    assert found.records.tolist() == whole.records.tolist() and found.rows == whole.rows
    assert all(same_features(found[record], whole[record]) for record in whole.records)
    assert not list(Path(url).rglob(".*.tmp"))
    assert died >= 3, died


@pytest.mark.thorough
@needs(object_store)
def test_killed_on_an_object_store(tmp_path: Path, source: Path, forks: Any, s3: dict[str, Any]) -> None:
    options: dict[str, Any] = {"on_error": "skip", "storage_options": s3, "batch": 16}
    run_fake(source, str(tmp_path / "whole"), on_error="skip")
    rng = random.Random(4)
    died = 0
    for i in range(8):
        writes, seconds = (rng.randint(2, 12), 0.0) if i % 2 else (0, rng.uniform(0.1, 1.0))
        died += kill(forks, source, "s3://acts/killed", writes, seconds, options | {"start_engine": SlowEngine}) == -9
    finish(source, "s3://acts/killed", options)
    assert differences(load("s3://acts/killed", storage_options=s3), load(tmp_path / "whole")) == []
    assert died >= 4, died
