"""Crashes, full disks, damaged files: what was published stays readable, and what cannot be read is named."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.unit.stored import WORKERS, check, make, read_all, write
from vllm_weir.errors import WeirError
from vllm_weir.extraction import run_spec, source
from vllm_weir.schema.compression import Compression
from vllm_weir.storage import LAYOUTS, Batch, load, open_writer
from vllm_weir.storage.layouts.base import read_marker
from vllm_weir.storage.layouts.site_tensors import safe_name
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.verify import verify

NAMES = [f"r{i}" for i in range(8)]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Crash(BaseException):
    """Stands for the end of the process at some system call."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """After `left` system calls that write, every further one ends the process; a last pwrite may write only a part."""
    state = {"left": 10**9}
    real_write, real_replace = os.pwrite, os.replace

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        state["left"] -= 1
        if state["left"] < 0:
            real_write(fd, data[: len(data) // 2], offset)
            raise Crash
        return real_write(fd, data, offset)

    def replace(source: str, target: str) -> None:
        state["left"] -= 1
        if state["left"] < 0:
            raise Crash
        real_replace(source, target)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "replace", replace)
    yield state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_crash_at_any_write_loses_and_repeats_nothing(layout: str, tmp_path: Path, dying: dict) -> None:
    options = {"sharded": {"shard_bytes": 3000}, "packed": {"pack_bytes": 3000}}.get(layout, {})
    crashes = 0
    for after in (0, 3, 6, 9, 12, 15, 20, 27, 36):
        path = tmp_path / str(after)
        dying["left"] = after
        try:
            writer = open_writer(path, layout, **options)
            for name in NAMES[:5]:
                write(writer, name)
            writer.close()
        except Crash:
            crashes += 1
        dying["left"] = 10**9
        if (path / "weir.json").exists():
            published = load(path)
            check(published, published.requests)
        writer = open_writer(path, layout, **options)  # a fresh process
        for name in NAMES[:5]:
            if not writer.holds(name):
                write(writer, name)
        writer.close()
        check(load(path), NAMES[:5])
    assert crashes >= 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_finished_before_an_error_is_published(layout: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path, layout) as writer:
        for name in NAMES[:3]:
            write(writer, name)
        write(writer, NAMES[3], finish=False)
        raise KeyboardInterrupt
    check(load(tmp_path), NAMES[:3])


def test_what_could_not_be_published_after_an_error_is_said_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="mine") as e, open_writer(tmp_path, "packed") as writer:
        write(writer, "a")
        monkeypatch.setattr(os, "pwrite", full)
        raise RuntimeError("mine")
    (note,) = e.value.__notes__
    assert "could not be published" in note and "No space left" in note
    assert writer._closed


def open_and_die(folder: str) -> None:
    """Write to a remote store by way of `folder`; if no other's temporary file is there any more, be killed."""
    tempfile.tempdir = folder
    writer = open_writer("memory://killed/ds", "sharded")
    write(writer, "a")
    if len(os.listdir(folder)) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_writer_had_on_its_way_to_a_remote_store_is_swept(tmp_path: Path) -> None:
    for _ in range(2):
        child = WORKERS.Process(target=open_and_die, args=(str(tmp_path),))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        (left,) = tmp_path.iterdir()
        assert left.stat().st_mode & 0o777 == 0o600


def test_a_live_writers_files_are_not_swept(tmp_path: Path) -> None:
    first = open_writer(tmp_path)
    write(first, "a", finish=False)
    with open_writer(tmp_path) as second:
        write(second, "b")
    first.finish_request("a", {"prompt_tokens": 5, "text": "a"})
    first.close()
    check(load(tmp_path), ["a", "b"])


def test_another_user_s_temporary_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "sharded", ["a"])
    theirs = tmp_path / ".shard-theirs.safetensors.0123.tmp"
    theirs.write_bytes(b"at work")
    opened = os.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> int:  # the tests may run as root, whom nothing is forbidden
        if str(path) == str(theirs):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    with open_writer(tmp_path) as writer:
        write(writer, "d")
    check(load(tmp_path), ["a", "d"])
    assert theirs.exists()


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer that is just being opened finds it without a lock, as if its writer were dead."""
    opened, swept = os.open, []

    def open_and_sweep(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = opened(path, *args, **kwargs)
        if str(path).endswith(".tmp") and not swept:
            swept.append(path)
            ObjectStore(tmp_path).sweep()
            assert not os.path.exists(path)
        return fd

    monkeypatch.setattr(os, "open", open_and_sweep)
    ObjectStore(tmp_path).put("x", b"all")
    assert swept and (tmp_path / "x").read_bytes() == b"all" and os.listdir(tmp_path) == ["x"]


def test_an_unfinished_request_is_not_there_unless_asked_for(tmp_path: Path) -> None:
    with open_writer(tmp_path, shard_bytes=1000) as writer:
        write(writer, "a")
        write(writer, "b", finish=False)
    dataset = load(tmp_path)
    check(dataset, ["a"])
    assert dataset.incomplete == ["b"]
    assert load(tmp_path, incomplete=True)["b"]["resid_pre", 0].shape[0] > 0
    with open_writer(tmp_path) as writer:
        assert not writer.holds("b")
        write(writer, "b")
    check(load(tmp_path), ["a", "b"])
    check(load(tmp_path, incomplete=True), ["a", "b"])


def test_two_writers_of_one_request_leave_it_once(tmp_path: Path) -> None:
    for layout in ("sharded", "packed"):
        writers = [open_writer(tmp_path / layout, layout) for _ in range(2)]
        for writer in writers:
            write(writer, "a")
        for writer in writers:
            writer.close()
        check(load(tmp_path / layout), ["a"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_fails_the_request_and_not_its_neighbours(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path, layout)
    write(writer, "a")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    big = torch.zeros(150_000, 48, dtype=torch.bfloat16)  # too large to be gathered
    if layout == "packed":  # which writes when it is flushed
        with pytest.raises(WeirError, match=r"cannot write .*: No space left on device"):
            writer.flush()
    else:
        with pytest.raises(WeirError, match=r"cannot write .*: No space left on device"):
            writer.write(Batch("x", "resid_post", 0, np.arange(len(big)), np.arange(len(big)), big))
            writer.finish_request("x")
        assert "No space left" in writer.failed["x"]
        with pytest.raises(WeirError, match=r"cannot be kept: .*No space left"):
            writer.write(Batch("x", "resid_post", 0, [0], [0], big[:1]))
    monkeypatch.setattr(os, "pwrite", real)
    write(writer, "b")
    writer.close()
    check(load(tmp_path), ["a", "b"])
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_permission(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path, layout)

    def refused(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(WeirError, match=f"cannot write {tmp_path}.*Permission denied"):
        write(writer, "a")
        writer.flush()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("cut", [1, 100, 0.5])
def test_a_shard_that_is_cut_off_behind_its_rows_is_truncated(cut: float, remote: bool, tmp_path: Path) -> None:
    """Its rows are all there, and the manifest's copy too: what is missing is the shard's own index."""
    make(tmp_path, "sharded", NAMES[:3])
    (shard,) = tmp_path.glob("shard-*.safetensors")
    size = shard.stat().st_size
    os.truncate(shard, int(size * cut) if cut < 1 else size - int(cut))
    with pytest.raises(WeirError, match=f"{shard.name}: .*the file has"):
        if remote:  # where opening a dataset does not take a request for each shard
            store = fsspec.filesystem("memory")
            store.put(str(tmp_path), f"memory://cut-{cut}", recursive=True)
            (damaged,) = verify(load(f"memory://cut-{cut}")).damaged
            raise WeirError(damaged.error)
        load(tmp_path)


@pytest.mark.parametrize("below", LAYOUTS)
@pytest.mark.parametrize("above", LAYOUTS)
def test_a_dataset_in_a_folder_of_another_leaves_it_readable(above: str, below: str, tmp_path: Path) -> None:
    make(tmp_path, above, NAMES[:2])
    for folder in ("below", "beside/deep"):
        make(tmp_path / folder, below, NAMES[1:3])
        check(load(tmp_path), NAMES[:2])
        check(load(tmp_path / folder), NAMES[1:3])
    make(tmp_path, above, NAMES[4:5])
    check(load(tmp_path), [*NAMES[:2], NAMES[4]])


def test_a_store_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least of all with the advice to delete the file."""
    store = ObjectStore(tmp_path)
    store.put("extract.json", b"{}")
    store.put("skipped.jsonl", b"")
    store.put("weir.json", b"{}")

    def read(self: ObjectStore, name: str, *_: object) -> bytes:
        raise WeirError(f"cannot read {name}: the connection timed out")

    monkeypatch.setattr(ObjectStore, "read", read)
    for look in (
        lambda: run_spec.check_run(store, {}),
        lambda: run_spec.read_skipped(store),
        lambda: read_marker(store),
        lambda: source._json(store, "state.json"),
    ):
        with pytest.raises(WeirError, match="the connection timed out"):
            look()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_that_is_called_as_another_one_s_file_is_no_other(layout: str, tmp_path: Path) -> None:
    names = ["user/1", safe_name("user/1")]
    make(tmp_path, layout, names)
    assert sorted(load(tmp_path).requests) == sorted(names)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_damaged_byte_of_an_npz_header_is_damage(save: Callable, tmp_path: Path) -> None:
    """numpy reads a header as Python, whose parser has errors of its own: those of unbalanced brackets, say."""
    file = tmp_path / "req_1" / "seq0_layer3_rank0.npz"
    file.parent.mkdir()
    q = np.random.default_rng(0).integers(0, 256, (600, 32), np.uint8)  # no sum is compared before the end
    save(file, q=q, scale=np.ones(600, np.float32), zero=np.zeros(600, np.float32))
    good = file.read_bytes()
    begin = good.index(b"q.npy")
    # A dtype without fields, and a way of compression that there is not.
    other_way = bytearray(good)
    for signature, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        other_way[good.index(signature) + at] = 14
    bad = [bytes(other_way)] + [good.replace(b"'|u1'", b"()   ", 1)] * (save is np.savez)
    for data in bad:
        file.write_bytes(data)
        with pytest.raises(WeirError, match=r"seq0_layer3_rank0\.npz: .*damaged"):
            read_all(tmp_path)
    seen = set()
    for at in range(begin, begin + 135):
        file.write_bytes(good[:at] + b"(\"\x00'"[at % 4 : at % 4 + 1] + good[at + 1 :])
        try:
            read_all(tmp_path)
        except WeirError as e:
            assert "seq0_layer3_rank0.npz" in str(e), e
            seen.add(str(e).split("is damaged: ")[-1].split(":")[0])
    assert {"ValueError", "BadZipFile"} <= seen and (save is np.savez_compressed or "TokenError" in seen), seen


def test_a_shard_that_is_gone_is_missed(tmp_path: Path) -> None:
    make(tmp_path, "sharded", NAMES[:3], shard_bytes=1500)
    manifest, shard = tmp_path / "manifest.parquet", min(tmp_path.glob("shard-*"))
    joined = manifest.read_bytes()
    manifest.unlink()
    check(load(tmp_path), NAMES[:3])  # it is only a copy
    shard.unlink()
    with pytest.raises(WeirError, match="a shard is missing"):
        load(tmp_path)
    manifest.write_bytes(joined)
    with pytest.raises(WeirError, match="is missing"):
        load(tmp_path)


def test_foreign_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "noise").mkdir()
    for name, content in (("a.safetensors", b"PK\3\4" * 9), ("b.npz", b"zip"), ("seq0_layer1_rank0.npz", b"\0" * 50),
                          ("c.json", b"{}"), ("c.bin", b"")):  # fmt: skip
        file = tmp_path / "noise" / name
        file.write_bytes(content)
        with pytest.raises(WeirError, match=name.split(".")[0]):
            load(file)
    save_file({"model.weight": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(WeirError, match=r"weights.safetensors: holds no activations"):
        load(tmp_path / "weights.safetensors")
    (tmp_path / "weir.json").write_text(json.dumps({"format": "weir-activations", "version": 9, "layout": "sharded"}))
    with pytest.raises(WeirError, match="version 9 is unknown"):
        load(tmp_path)


@pytest.mark.parametrize("layout", ["packed", "sharded"])
def test_files_that_nothing_would_be_read_of_are_an_error(layout: str, tmp_path: Path) -> None:
    """A copy under another name, or a folder above the dataset, was an empty dataset."""
    make(tmp_path / "run" / "ds", layout, ["a"])
    file = next((tmp_path / "run" / "ds").glob("*-*.safetensors"))
    check(load(file), ["a"])
    shutil.copy(file, tmp_path / "mine.safetensors")
    with pytest.raises(WeirError, match=r"mine.safetensors: was renamed"):
        load(tmp_path / "mine.safetensors")
    with pytest.raises(WeirError, match="was renamed"):
        load(tmp_path / "run")


def test_a_folder_that_was_deleted_under_a_writer_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="own"), open_writer(tmp_path / "ds") as writer:
        write(writer, "a")
        shutil.rmtree(tmp_path / "ds")
        with pytest.raises(WeirError, match="cannot write"):
            writer.flush()
        raise KeyError("own")


def test_rows_that_vanish_under_a_reader_are_an_error(tmp_path: Path) -> None:
    make(tmp_path, "per_request", ["a"])
    dataset = load(tmp_path)
    os.truncate(tmp_path / "a.safetensors", 1000)
    with pytest.raises(WeirError, match=r"a.safetensors"):
        dataset["a"]["resid_post", 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_of_topk8_outside_its_row_is_damage_of_that_file(layout: str, tmp_path: Path) -> None:
    records = torch.zeros(2, 8 + 5 * 3, dtype=torch.uint8)
    records[1, 10] = 1  # of the second row, the first index: 65536
    header = Compression.parse({"method": "topk8", "k": 3}).header(16, "float32")
    with open_writer(tmp_path, layout) as writer:
        writer.write(Batch("r", "resid_post", 0, [0, 1], [0, 0], records, header))
        writer.finish_request("r")
    with pytest.raises(WeirError, match=f"{tmp_path}/.*damaged: an index of topk8 lies outside a row of 16 values"):
        load(tmp_path)["r"]["resid_post", 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_id_that_is_no_text_spoils_nothing(layout: str, tmp_path: Path) -> None:
    half = "a" + chr(0xD800)
    with open_writer(tmp_path, layout) as writer:
        write(writer, "r0")
        with pytest.raises(WeirError, match="request_id: a request id is text"):
            writer.write(Batch(half, "resid_post", 0, [0], [0], torch.ones(1, 8)))
        for wrong in (half, "", 7):
            with pytest.raises(WeirError, match="request_id"):
                writer.finish_request(wrong)  # type: ignore[arg-type]
    assert load(tmp_path).requests == ["r0"]


def test_rows_of_a_request_that_is_dropped_give_their_room_back(tmp_path: Path) -> None:
    """A request for which the disk had no room went on holding what room there was."""
    writer = open_writer(tmp_path)
    write(writer, "a")
    writer.settle("a")
    big = torch.zeros(40_000, 48, dtype=torch.bfloat16)
    before = sum(path.stat().st_size for path in tmp_path.iterdir())
    for layer in (0, 3):
        writer.write(Batch("x", "resid_post", layer, np.arange(len(big)), np.arange(len(big)), big))
    writer.settle("x")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 2 * big.nbytes
    writer.abandon("x")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= before < big.nbytes
    write(writer, "b")
    writer.close()
    check(load(tmp_path), ["a", "b"])
    with open_writer(tmp_path / "none") as writer:
        writer.write(Batch("x", "resid_post", 0, np.arange(len(big)), np.arange(len(big)), big))
        writer.abandon("x")
        assert [path.name for path in (tmp_path / "none").iterdir()] == ["weir.json"]


@pytest.mark.parametrize("reserving", [True, False])
@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_requests_that_are_dropped_anywhere_on_a_disk_full_at_times(
    layout: str, reserving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reserving:
        monkeypatch.delattr(os, "posix_fallocate")
    real, chance, odds = os.pwrite, random.Random(0), {"full": 0.0}
    monkeypatch.setattr(os, "pwrite", lambda *args: full() if chance.random() < odds["full"] else real(*args))
    for seed in range(min(12, settings().max_examples // 4)):
        rng, path, kept = random.Random(seed), tmp_path / str(seed), []
        limit = rng.choice([50, 700, 1500, 5000, 4 << 20])
        monkeypatch.setattr("vllm_weir.storage.layouts.sharded.GATHER_BYTES", limit)
        writer = open_writer(path, layout, **{"sharded": {"shard_bytes": 30_000}, "packed": {}}[layout])
        for k in range(40):
            odds["full"] = rng.choice([0, 0, 0.3])
            try:
                write(writer, f"r{k}", pieces=rng.randrange(1, 4))
                writer.settle(f"r{k}")
                if rng.random() < 0.2:
                    raise WeirError("given up")
                kept.append(f"r{k}")
            except WeirError:
                if writer.holds(f"r{k}") and not writer.pending(f"r{k}"):
                    kept.append(f"r{k}")  # it was published, with those before it
                else:
                    writer.abandon(f"r{k}")
        odds["full"] = 0
        writer.close()
        check(load(path), kept)
        assert not verify(load(path)).damaged and not list(path.glob(".*"))


def test_room_that_was_set_aside_is_given_back_when_a_file_is_published(tmp_path: Path) -> None:
    spool = ObjectStore(tmp_path).new_file("x")
    spool.write(b"begun")
    assert spool.reserve(1000) and spool.reserve(10) and os.stat(spool.temporary).st_size >= 1000
    spool.write(b" and done")
    spool.publish()
    assert (tmp_path / "x").read_bytes() == b"begun and done"


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_room_that_cannot_be_set_aside(refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(fd: int, start: int, size: int) -> None:
        os.ftruncate(fd, start + size // 2)
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    spool = ObjectStore(tmp_path).new_file("x")
    spool.write(b"begun")
    if refused == errno.ENOSPC:
        with pytest.raises(WeirError, match=r"cannot write .*/x: No space left on device"):
            spool.reserve(1000)
    else:
        assert not spool.reserve(1000)
    assert os.stat(spool.temporary).st_size == 5
    spool.publish()


@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_a_writer_that_cannot_be_closed_leaves_no_temporary_files(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeirError, match="No space left"), open_writer(tmp_path / "a", layout) as writer:
        write(writer, "a")
        writer.settle("a")
        monkeypatch.setattr(os, "replace", lambda *_: full())
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["weir.json"]
