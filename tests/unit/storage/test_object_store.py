"""Object stores: the same datasets behind memory:// and an S3 server, published with one put a file."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.machine import needs, object_store
from tests.support.s3 import s3_server
from tests.unit.stored import WORKERS, check, length_of, make, write
from vllm_weir.analysis import load_activation_manifest
from vllm_weir.errors import WeirError
from vllm_weir.extraction.source import open_source
from vllm_weir.storage import LAYOUTS, load, open_writer
from vllm_weir.storage.atomic_file import remove_stale_uploads
from vllm_weir.storage.object_store import ObjectStore

NAMES = ["a", "b/c", "d"]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """storage_options of a moto server with a bucket named ``acts``."""
    with s3_server("acts") as options:
        yield options


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory(layout: str) -> None:
    url = f"memory://{uuid.uuid4()}/ds"
    make(url, layout, NAMES[:2])
    with open_writer(url, layout) as writer:
        assert writer.holds("a") and not writer.holds("d")
        write(writer, "d")
    check(load(url), NAMES)


@needs(object_store)
@pytest.mark.parametrize("layout", ["sharded", "per_request"])
def test_s3(layout: str, s3: dict[str, Any]) -> None:
    url = f"s3://acts/{layout}"
    options = {"shard_bytes": 3000} if layout == "sharded" else {}
    make(url, layout, NAMES[:2], storage_options=s3, **options)
    with open_writer(url, layout, storage_options=s3) as writer:
        assert writer.holds("b/c")
        write(writer, "d")
    dataset = load(url, storage_options=s3)
    check(dataset, NAMES)
    some = dataset.rows(("resid_post", 3), positions="last_prompt")
    assert some.positions.tolist() == [4] * 3
    batches = list(dataset.torch(("resid_post", 3), batch_size=8, buffer_rows=16))
    assert sum(map(len, batches)) == sum(map(length_of, NAMES))


@needs(object_store)
def test_errors_of_a_store_name_the_file(s3: dict[str, Any]) -> None:
    with pytest.raises(WeirError, match="s3://nobucket"):
        make("s3://nobucket/ds", "sharded", ["a"], storage_options=s3)
    with pytest.raises(WeirError, match="s3://acts/nothing does not exist"):
        load("s3://acts/nothing", storage_options=s3)


class FullFileSystem(MemoryFileSystem):
    """A store that takes its marker and then no more."""

    protocol = "full"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    full = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("full://", "memory://", 1))

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        if FullFileSystem.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put_file(lpath, rpath, *args, **kwargs)


def test_a_full_store_keeps_the_rows_for_another_try() -> None:
    fsspec.register_implementation("full", FullFileSystem, clobber=True)
    writer = open_writer("full://ds")
    write(writer, "a")
    FullFileSystem.full = True
    with pytest.raises(WeirError, match=r"cannot write full://ds/shard-.*: No space left on device"):
        writer.flush()
    FullFileSystem.full = False
    write(writer, "b/c")
    writer.close()
    check(load("full://ds"), ["a", "b/c"])


@pytest.mark.parametrize("end", ["publish", "discard"])
def test_others_that_tidy_up_meanwhile(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for what dead writers have left behind, the moment that the lock goes, finds nothing of ours."""
    store, close = ObjectStore(f"memory://{uuid.uuid4()}"), os.close
    file = store.new_file("a")
    file.write(b"rows")
    monkeypatch.setattr(os, "close", lambda fd: (close(fd), remove_stale_uploads()))
    getattr(file, end)()
    monkeypatch.undo()
    assert not os.path.exists(file.temporary)
    if end == "publish":
        assert store.read("a") == b"rows"


@needs(object_store)
@pytest.mark.parametrize("layout", ["sharded", "per_request"])
def test_what_another_process_has_written_is_seen(layout: str, s3: dict[str, Any]) -> None:
    """s3fs keeps listings for good: those of an earlier look are not asked."""
    url = f"s3://acts/another/{layout}"
    writer = open_writer(url, layout, storage_options=s3)
    write(writer, "a")
    writer.flush()
    assert load(url, storage_options=s3).requests == ["a"]
    apart = WORKERS.Process(target=make, args=(url, layout, ["d"]), kwargs={"storage_options": s3})
    apart.start()
    apart.join()
    assert apart.exitcode == 0
    with open_writer(url, layout, storage_options=s3) as late:
        assert late.holds("a") and late.holds("d")
        late.tidy()
    writer.close()
    check(load(url, storage_options=s3), ["a", "d"])
    if layout == "per_request":
        assert load(f"{url}/d.safetensors", storage_options=s3).requests == ["d"]


def test_a_file_right_under_a_protocol_or_in_a_chain_of_file_systems(tmp_path: Path) -> None:
    make(tmp_path / "ds", "per_request", NAMES[:1])
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path)
    memory = fsspec.filesystem("memory")
    stem = uuid.uuid4().hex
    memory.pipe_file(f"/{stem}.safetensors", (tmp_path / "ds" / "a.safetensors").read_bytes())
    memory.pipe_file(f"/{stem}.txt", b"one\ntwo\n")
    memory.pipe_file(f"/{stem}.json", b"{}")
    for url in (f"memory://{stem}.safetensors", f"zip://ds/a.safetensors::{archive}", f"zip://ds::{archive}"):
        check(load(url), NAMES[:1])
    for url in (f"memory://{stem}.txt", f"zip://texts.txt::{archive}"):
        assert [record.value for record in open_source(url).read(0, 2)] == ["one", "two"]
    assert load_activation_manifest(f"memory://{stem}.json") == {}


@pytest.mark.parametrize("layout", ["packed", "per_request"])
def test_a_remote_file_is_opened_with_few_requests(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4()}/ds"
    names = [f"r{i}" for i in range(20)]
    make(url, layout, names)
    asked: list[int] = []
    cat_file = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *a, **k: asked.append(1) or cat_file(*a, **k))
    dataset = load(url)
    files = 1 if layout == "packed" else len(names)
    assert len(asked) <= 1 + 2 * files
    check(dataset, names)
