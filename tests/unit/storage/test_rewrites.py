"""What was stopped or given up can be done again, and readers may look while writers work."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.stored import check, length_of, make, write
from vllm_weir.consumers import EngineInfo, Finished, Rows
from vllm_weir.consumers.filesystem import Filesystem
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.storage import LAYOUTS, atomic_file, load, object_store, open_writer
from vllm_weir.storage.layouts import manifest, sharded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_that_was_abandoned_can_be_written_again(layout: str, tmp_path: Path) -> None:
    with open_writer(tmp_path, layout) as writer:
        write(writer, "b", finish=False)
        writer.abandon("b")
        writer.flush()
        write(writer, "a")
        write(writer, "b", finish=False)
        writer.abandon("b")
        write(writer, "b")
    check(load(tmp_path), ["a", "b"])


def test_one_whose_rows_are_published_is_refused_rather_than_counted_twice(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, "b", finish=False)
        writer.flush()
        writer.abandon("b")
        with pytest.raises(WeirError, match="another writer"):
            write(writer, "b")
        write(writer, "a")
    check(load(tmp_path), ["a"])
    with open_writer(tmp_path) as writer:
        write(writer, "b")
    check(load(tmp_path), ["a", "b"])


@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_a_sink_whose_disk_was_full_takes_the_same_requests_again(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it gave up after they were finished holds neither room nor their names."""
    room = {"buffer_bytes": 3000} if layout == "packed" else {}
    sink = Filesystem(url=str(tmp_path), layout=layout, flush_seconds=0, ids="caller", **room)
    sink.open(EngineInfo("m", 1, 64, "float32"))

    def send(name: str) -> None:
        request, at = Finished(name, 0, name, 4, 1, "stop"), torch.arange(4)
        sink.take(Rows(request, Site("resid_post", 0), at, at, torch.ones(4, 64)))
        try:
            sink.finish(request)
        except WeirError:
            sink.abort(request)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file.AtomicFile, "publish", lambda *_: (_ for _ in ()).throw(WeirError("full")))
        for name in "abcd":
            with pytest.raises(WeirError, match="full"):
                send(name)
    for name in "abcd":
        send(name)
    sink.close()
    assert sorted(load(tmp_path)) == list("abcd") and load(tmp_path).count() == 16


@pytest.mark.parametrize("layout", ["sharded", "packed"])
@pytest.mark.parametrize(
    ("place", "call", "error", "seen"),
    [
        (os, "pwrite", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), WeirError),
        (os, "replace", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), WeirError),
        (atomic_file.AtomicFile, "publish", KeyboardInterrupt("No space left"), KeyboardInterrupt),
        (atomic_file.AtomicFile, "publish", RuntimeError("No space left"), RuntimeError),
    ],
)
def test_whatever_stops_a_flush_it_can_be_tried_again(
    layout: str, place: Any, call: str, error: BaseException, seen: type, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A full disk, a file system's own kinds of error, and a user who interrupts."""

    def stopped(*_: object) -> None:
        raise error

    writer = open_writer(tmp_path, layout)
    write(writer, "a")
    with monkeypatch.context() as patch:
        patch.setattr(place, call, stopped)
        with pytest.raises(seen, match="No space left"):
            writer.flush()
    write(writer, "b")
    writer.close()
    check(load(tmp_path), ["a", "b"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_that_cannot_be_synced_leaves_nothing_published(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_path: str) -> None:
        raise OSError(5, "Input/output error")

    writer = open_writer(tmp_path, layout, fsync=True)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "_sync_folder", broken)
        with pytest.raises(WeirError, match="Input/output error"):
            write(writer, "a")
            writer.flush()
        assert [p.name for p in tmp_path.rglob("[!.]*") if p.is_file()] == ["weir.json"]
    if layout in ("sharded", "packed"):  # the others publish when a request is finished
        writer.close()
        check(load(tmp_path), ["a"])


@pytest.mark.parametrize("again", [load, open_writer])
def test_a_manifest_may_name_shards_that_came_after_the_files_were_listed(
    again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "sharded", ["a"])
    read, came = object_store.ObjectStore.read, []

    def late(self, name: str, *more: int) -> bytes:
        if name == manifest.MANIFEST and not came:
            came.append(name)
            with open_writer(tmp_path) as writer:
                write(writer, "b")
                writer.tidy()
        return read(self, name, *more)

    monkeypatch.setattr(object_store.ObjectStore, "read", late)
    found = again(tmp_path)
    if again is load:
        check(found, ["a", "b"])
        assert found.count() == 3 * (length_of("a") + length_of("b"))
    else:
        assert found.holds("a") and found.holds("b")
        found.close()


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("first", range(0, 24, 3))
def test_a_write_that_failed_behind_the_writer_s_back_is_made_good(
    first: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small batches are written by a thread while more of them come; the disk is full for some of its calls."""
    monkeypatch.setattr(sharded, "GATHER_BYTES", 700)
    real, made, failed = os.pwrite, itertools.count(), []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if first <= next(made) - 2 < first + calls:  # two are the folder's mark and the shard's room for its header
            real(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = open_writer(tmp_path, "sharded")
    for name in "abcdef":
        try:
            write(writer, name)
        except WeirError as e:
            assert "No space left" in str(e)
            failed.append(name)
    for _ in range(calls):
        try:
            writer.flush()
        except WeirError as e:
            assert "No space left" in str(e)
            failed.append("")
    writer.close()
    assert list(writer.failed) == [name for name in failed if name] and 1 <= len(failed) <= calls
    check(load(tmp_path), [name for name in "abcdef" if name not in failed])


def test_an_interrupted_wait_for_a_write_is_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "GATHER_BYTES", 700)
    begun, go, real = threading.Event(), threading.Event(), os.pwrite

    def slow(fd: int, data: memoryview, offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go.wait(60)
        return real(fd, data, offset)

    def interrupt(futures: list) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", slow)
    writer = open_writer(tmp_path, "sharded")
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(writer, "a")
    assert begun.wait(60)
    go.set()
    writer.abandon("a")
    write(writer, "b")
    writer.close()
    check(load(tmp_path), ["b"])
