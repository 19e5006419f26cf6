"""Rows on their way into a shard: copied once, written by a thread, bounded, and whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import Compression
from vllm_weir.storage import Batch, load, open_writer
from vllm_weir.storage.batch import pack
from vllm_weir.storage.layouts import sharded
from vllm_weir.storage.verify import verify

D, BUFFER = 16, 1000
SITE = ("resid_post", 1)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "GATHER_BYTES", BUFFER)


def some(n: int, seed: int = 0) -> torch.Tensor:
    """Rows [n, 3, D] of three sites."""
    return torch.randn(n, 3, D, generator=torch.Generator().manual_seed(seed)).bfloat16()


def batch_of(name: str, rows: torch.Tensor, first: int = 0) -> Batch:
    at = np.arange(first, first + len(rows))
    return Batch(name, *SITE, at, at, rows)


def stored(path: Path, name: str) -> torch.Tensor:
    dataset = load(path)
    assert not verify(dataset).damaged and not list(path.glob(".*"))
    return dataset[name][SITE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_one_site_among_others_are_copied_once(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = some(100).to(dtype)
    one = rows[:, 1]
    records = pack(batch_of("a", one), Compression()).records
    assert records.ctypes.data == one.data_ptr() and records.shape == (100, D * one.element_size())
    with open_writer(tmp_path) as writer:
        expected = one.clone()
        writer.write(batch_of("a", one))
        rows.zero_()  # the caller may use its memory again
        writer.finish_request("a")
    assert torch.equal(stored(tmp_path, "a"), expected)


@pytest.mark.parametrize("columns", [slice(0, D, 2), slice(0, 1)])
def test_rows_whose_values_do_not_follow_each_other(columns: slice, tmp_path: Path) -> None:
    rows = some(50)[:, 1, columns]
    with open_writer(tmp_path) as writer:
        writer.write(batch_of("a", rows))
        writer.finish_request("a")
    assert torch.equal(stored(tmp_path, "a"), rows)


def test_a_record_wider_than_a_buffer(tmp_path: Path) -> None:
    rows = torch.randn(5, BUFFER)
    with open_writer(tmp_path) as writer:
        writer.write(batch_of("a", rows))
        writer.finish_request("a")
    assert torch.equal(stored(tmp_path, "a"), rows)


def test_a_slow_disk_holds_the_caller_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two buffers of a large batch are in memory."""
    rows, go, real, done = some(1000), threading.Event(), os.pwrite, threading.Event()
    writer = open_writer(tmp_path)
    writer.write(batch_of("a", rows[:1, 1]))

    def slow(*args: Any) -> int:
        go.wait(60)
        return real(*args)

    def write() -> None:
        writer.write(batch_of("a", rows[1:, 1], 1))
        done.set()

    monkeypatch.setattr(os, "pwrite", slow)
    thread = threading.Thread(target=write)
    thread.start()
    assert not done.wait(0.2)
    go.set()
    thread.join()
    (shard,) = writer._open.values()
    assert len(shard.gathered) + len(shard.spare) <= 2 * BUFFER < shard.file.size
    writer.finish_request("a")
    writer.close()
    assert torch.equal(stored(tmp_path, "a"), rows[:, 1])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, WeirError])
@pytest.mark.parametrize("call", range(5))
def test_a_batch_that_ends_half_way_leaves_nothing(
    call: int, error: type, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or Ctrl-C comes, when some of a large batch is in the file."""
    writer, rows, real, calls = open_writer(tmp_path), some(200), sharded.checksums, [0]
    if before:
        writer.write(batch_of("a", rows[:7, 1]))
        writer.finish_request("a")

    def failing(records: np.ndarray) -> np.ndarray:
        calls[0] += 1
        if calls[0] > call:
            raise error("no")
        return real(records)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(sharded, "checksums", failing)
        writer.write(batch_of("x", rows[:, 2]))
    assert list(writer.failed) == (["x"] if error is WeirError else [])
    if error is KeyboardInterrupt:
        writer.write(batch_of("x", rows[:, 2]))
        writer.finish_request("x")
    writer.write(batch_of("b", rows[:9, 1]))
    writer.finish_request("b")
    writer.close()
    assert torch.equal(stored(tmp_path, "b"), rows[:9, 1])
    assert not before or torch.equal(stored(tmp_path, "a"), rows[:7, 1])
    assert sorted(load(tmp_path)) == sorted(["b"] + ["a"] * before + ["x"] * (error is KeyboardInterrupt))
    if error is KeyboardInterrupt:
        assert torch.equal(stored(tmp_path, "x"), rows[:, 2])


def test_an_error_of_the_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, rows, real = open_writer(tmp_path), some(200), os.pwrite
    writer.write(batch_of("a", rows[:7, 1]))
    writer.finish_request("a")
    main = threading.current_thread()

    def full(*args: Any) -> int:
        if threading.current_thread() is not main:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WeirError, match=r"cannot write .*: No space left on device"):
        writer.write(batch_of("x", rows[:, 1]))
    monkeypatch.setattr(os, "pwrite", real)
    writer.close()
    assert list(writer.failed) == ["x"] and list(load(tmp_path)) == ["a"]
    assert torch.equal(stored(tmp_path, "a"), rows[:7, 1])
