"""Datasets of many files and many requests."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from vllm_weir.keep import Batch, load, open_writer

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
