"""A disk that is really full (a small tmpfs): it fails the requests whose rows it cannot take, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, prompts, sampling
from tests.support.extracting import differences, run_fake, texts, write_jsonl
from tests.support.machine import mounted, needs, tmpfs
from vllm_weir.storage import load

SIZE = 2 << 20
pytestmark = needs(tmpfs)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of SIZE bytes."""
    path = tmp_path / "disk"
    path.mkdir()
    with mounted(path, SIZE):
        yield path


def free(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


OTHERS: list[tuple[str, dict]] = [("per_request", {}), ("npz", {}), ("packed", {})]
OTHERS += [("sharded", {"flush_seconds": 0, "shard_bytes": 1})]


@pytest.mark.engine("default")
@pytest.mark.parametrize(
    ("layout", "more"), [("sharded", {}), *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS)]
)
def test_a_full_disk_fails_the_request_and_not_the_engine(
    layout: str, more: dict[str, Any], llm: Any, disk: Path
) -> None:
    """With layouts that collect, too: the request was told "written", and its rows were lost ten seconds later."""
    sink = {"filesystem": {"url": str(disk / "rows"), "layout": layout, "ids": "caller", **more}}
    to_disk = weir.params(sampling(1), capture=weir.Capture("resid_post", sink=sink))
    in_memory = weir.params(sampling(1), capture=weir.Capture("resid_post"))
    (first,) = llm.generate(prompts([5]), to_disk, use_tqdm=False)
    assert set(first.receipt.sinks.values()) == {"written"}
    weir.flush(llm)
    assert layout != "sharded" or (disk / "rows" / "manifest.parquet").exists()
    reference = llm.generate(prompts([20]), in_memory, use_tqdm=False)[0].activations

    ballast = disk / "ballast"
    ballast.write_bytes(bytes(free(disk)))
    assert free(disk) == 0
    with pytest.raises(weir.WeirError, match=f"cannot write {disk}.*No space left on device"):
        llm.generate(prompts([20]), to_disk, use_tqdm=False)
    (beside,) = llm.generate(prompts([20]), in_memory, use_tqdm=False)
    for site in reference.sites:
        assert (beside.activations[site] == reference[site]).all()

    ballast.unlink()
    (last,) = llm.generate(prompts([7]), to_disk, use_tqdm=False)
    assert set(last.receipt.sinks.values()) == {"written"}
    weir.flush(llm)
    assert set(load(disk / "rows").requests) == {first.request_id, last.request_id}
    del first, last, beside, reference
    assert_nothing_is_held(llm)


@pytest.mark.engine("default")
@pytest.mark.parametrize("layout", ["sharded", pytest.param("packed", marks=pytest.mark.thorough)])
def test_a_receipt_says_when_rows_could_not_be_published(
    layout: str, llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = {"filesystem": {"url": str(tmp_path / "rows"), "layout": layout}}
    to_disk = weir.params(sampling(1), capture=weir.Capture("resid_post", sink=sink))
    (out,) = llm.generate(prompts([5]), to_disk, use_tqdm=False)
    assert out.receipt.sinks == {"filesystem": "written"}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(weir.WeirError, match=r"could not be flushed.*No space left on device"):
            weir.flush(llm)
    assert out.receipt.sinks["filesystem"].startswith("failed: StoreError: cannot write")
    weir.flush(llm)
    assert out.receipt.sinks == {"filesystem": "written"} and len(load(tmp_path / "rows")) == 1


def test_extract_onto_a_full_disk_goes_on_when_there_is_room(tmp_path: Path, disk: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", texts(80))
    run_fake(source, str(tmp_path / "whole"))
    out = str(disk / "out")
    run_fake(source, out, limit=16)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(max(0, free(disk) - 40_000)))
    with pytest.raises(weir.WeirError, match=f"cannot write {disk}.*No space left on device"):
        run_fake(source, out)
    held = len(load(out))
    assert 16 <= held < 80
    ballast.unlink()
    assert run_fake(source, out).held == held
    assert differences(load(out), load(tmp_path / "whole")) == []
