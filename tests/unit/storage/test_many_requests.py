"""Datasets of many files and many requests."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_weir.errors import WeirError
from vllm_weir.storage import Batch, convert, load, open_writer
from vllm_weir.storage.layouts import packed

SITE = ("resid_post", 0)


def fill(path: Path, layout: str, requests: int, **options: int) -> None:
    with open_writer(path, layout, **options) as writer:
        for i in range(requests):
            writer.write(Batch(f"r{i}", *SITE, [0], [0], torch.full((1, 8), float(i))))
            writer.finish_request(f"r{i}")


@pytest.mark.parametrize(("layout", "options"), [("per_request", {}), ("sharded", {"shard_bytes": 1})])
def test_more_files_than_a_process_may_hold_open(layout: str, options: dict[str, int], tmp_path: Path) -> None:
    fill(tmp_path, layout, 200, **options)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, hard))
    try:
        dataset = load(tmp_path)
        for _ in range(2):
            assert sorted(dataset.rows(SITE).rows[:, 0].tolist()) == list(range(200))
        assert [dataset[f"r{i}"][SITE][0, 0].item() for i in range(200)] == list(range(200))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("layers", "words", "limit"), [(1, 4000, 200_000), (8, 1, 40_000)])
def test_packs_of_many_small_requests_have_headers_that_can_be_read(
    layers: int, words: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files roll by the size of what stands beside the rows, too: readers take no header over 100 MB."""
    assert packed.HEADER_BYTES < 100_000_000
    monkeypatch.setattr(packed, "HEADER_BYTES", limit)
    text = {"prompt_tokens": 1, "text": "word " * words}
    with open_writer(tmp_path, "packed", compress="rp8") as writer:
        for i in range(60):
            for layer in range(layers):
                writer.write(Batch(f"r{i}", "resid_post", layer, [9], [0], torch.ones(1, 8)))
            writer.finish_request(f"r{i}", text)
    dataset = load(tmp_path)
    assert len(dataset) == 60 and dataset.metadata("r59") == text
    sizes = [int.from_bytes(file.read_bytes()[:8], "little") for file in tmp_path.glob("pack-*")]
    assert 5 < len(sizes) < 20 and max(sizes) < limit + 640 * layers + 6 * words


@pytest.mark.parametrize("layout", ["packed", "per_request"])
def test_metadata_that_fit_no_header_fail_their_request_alone(layout: str, tmp_path: Path) -> None:
    with open_writer(tmp_path, layout) as writer:
        writer.finish_request("before")
        with pytest.raises(WeirError, match=r"^metadata: "):
            writer.finish_request("large", {"text": "x" * 110_000_000})
        writer.finish_request("after")
    assert load(tmp_path).requests == (["before", "after"] if layout == "packed" else ["after", "before"])


def test_looking_at_requests_one_by_one_is_not_quadratic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = 400
    fill(tmp_path / "ds", "sharded", requests)
    dataset = load(tmp_path / "ds")
    looked = []
    for name in ("run_request", "run_site"):
        monkeypatch.setattr(dataset.index, name, Counted(getattr(dataset.index, name), looked))
    for request in dataset:
        assert len(dataset[request].positions) == len(dataset.rows(SITE, request)) == 1
    assert convert(dataset, tmp_path / "copy", "packed") == requests
    assert sum(looked) < 20 * requests


class Counted(np.ndarray):
    """Notes how many values each comparison looks at."""

    def __new__(cls, array: np.ndarray, looked: list[int]) -> Counted:
        out = array.view(cls)
        out.looked = looked
        return out

    def __array_finalize__(self, origin: object) -> None:
        self.looked = getattr(origin, "looked", [])

    def __eq__(self, other: object) -> np.ndarray:  # type: ignore[override]
        self.looked.append(self.size)
        return np.asarray(self) == other
