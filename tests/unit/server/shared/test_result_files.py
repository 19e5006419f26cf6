"""Results by reference: budget, lifetime, ids, and the directory that processes share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.results.receipt import Receipt
from vllm_weir.results.site_slices import SiteSlices, Stacked
from vllm_weir.schema.hooks import Site
from vllm_weir.server.shared.directory import SharedDirectory, clear
from vllm_weir.server.shared.result_files import ResultFiles


def acts(rows=4, width=64, value=0.0):
    site = Site("resid_post", 1)
    at = torch.arange(rows)
    return Activations({site: torch.full((rows, width), value)}, {site: at}, {site: at + 7})


SIZE = 4 * 64 * 4


@pytest.fixture
def spool(tmp_path):
    return ResultFiles(tmp_path, 10_000, 60.0)


def test_what_is_kept_is_what_save_writes(spool, tmp_path):
    rows = acts(value=2.5)
    with spool.open(spool.put(rows, SIZE)) as file:
        data = file.read()
    assert len(data) == len(rows.to_bytes()) == rows.save(tmp_path / "x").stat().st_size
    (tmp_path / "y").write_bytes(data)
    (tmp_path / "z").write_bytes(rows.to_bytes())
    for name in "xyz":
        back = Activations.load(tmp_path / name)
        assert torch.equal(back["resid_post", 1], rows["resid_post", 1]) and back.token_ids.tolist() == [7, 8, 9, 10]


def test_the_oldest_make_room_and_the_budget_holds(spool):
    ids = []
    for i in range(30):
        ids.append(spool.put(acts(value=i), SIZE))
        os.utime(spool.directory / f"{ids[-1]}.safetensors", (time.time() - 40 + i, time.time() - 40 + i))
        assert spool.used <= spool.budget
    held = [i for i in ids if (f := spool.open(i)) is not None and not f.close()]
    assert 2 < len(held) < 10 and held == ids[-len(held) :]


def test_writers_at_once_keep_the_budget(spool):
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda i: spool.put(acts(value=i), SIZE), range(40)))
    assert len(set(ids)) == 40 and 0 < spool.used <= spool.budget
    assert not [p for p in spool.directory.iterdir() if p.name.startswith(".") and p.name != ".lock"]


def test_one_that_is_too_large_is_refused_and_nothing_else_goes(spool):
    kept = spool.put(acts(), SIZE)
    with pytest.raises(WeirError, match="WEIR_SERVE_SPOOL_BYTES=10000"):
        spool.put(acts(rows=100), 100 * 64 * 4)
    spool.open(kept).close()
    assert len(spool) == 1


def test_results_of_one_answer_do_not_make_room_for_each_other(spool):
    """Of ten that fit one by one, nine had gone when the client got their ids."""
    before = spool.put(acts(), SIZE)
    kept = []
    with pytest.raises(WeirError, match="and the other results of this response"):
        for k in range(30):
            kept.append(spool.put(acts(value=k), SIZE, keep_ids=kept))
    assert 2 < len(kept) < 30 and spool.open(before) is None and spool.used <= spool.budget
    for key in kept:
        spool.open(key).close()


def test_a_full_disk_is_an_error_that_names_what_could_not_be_written(spool, tmp_path, monkeypatch):
    with pytest.raises(WeirError) as caught:
        acts().save(tmp_path / "none" / "x.safetensors")
    assert caught.value.message == f"cannot write {tmp_path}/none/x.safetensors: No such file or directory"

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WeirError) as caught:
        spool.put(acts(), SIZE)
    assert caught.value.message == f"the server could not store {SIZE} bytes: No space left on device"
    assert len(spool) == 0 and [p.name for p in spool.directory.iterdir()] == [".lock"]
    with pytest.raises(WeirError, match="No space left on device"):
        acts().save(tmp_path / "x.safetensors")
    assert [p for p in tmp_path.iterdir() if p.is_file()] == [tmp_path / ".lock"]


def test_a_file_has_every_sites_rows_also_where_they_lie_together_in_another_order(tmp_path):
    sites = [Site("resid_post", 0), Site("attn_out", 1), Site("resid_post", 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for places in (None, [2, 0, 1]):
            memory = torch.randn(5, 4, 16).to(dtype)[:, :3]  # rows of a wider block
            block = SiteSlices(sites, places, memory)
            at = {site: torch.arange(5) for site in sites}
            rows = Activations(block, at, {site: at[site] + 10 for site in sites})
            rows[sites[1]][2] = 3.0  # what the caller changed is what is saved
            back = Activations.load(rows.save(tmp_path / "x"))
            for k, site in enumerate(sites):
                want = memory[:, k if places is None else places[k]]
                assert torch.equal(back[site], want) and back[site].dtype == dtype
                assert back.token_ids_of(*site).tolist() == [10, 11, 12, 13, 14]


def test_files_that_differ_in_one_thing_have_headers_of_their_own(tmp_path):
    """Headers are remembered by all that they say."""
    one, two = Site("resid_post", 0), Site("resid_post", 1)
    for width, dtype, sites, lens, own in (
        (8, torch.float32, (one, two), (), (3, 3)),
        (8, torch.float32, (one, two), (), (4, 4)),
        (16, torch.float32, (one, two), (), (3, 3)),
        (8, torch.bfloat16, (one, two), (), (3, 3)),
        (8, torch.float32, (two, one), (), (3, 3)),
        (8, torch.float32, (one, two), (0, 1), (3, 3)),
        (8, torch.float32, (one, two), (), (3, 2)),
    ):
        values = {site: torch.randn(n, width).to(dtype) for site, n in zip(sites, own, strict=True)}
        at = {site: torch.arange(n) * 2 + k for k, (site, n) in enumerate(zip(sites, own, strict=True))}
        ids = {site: at[site] + 100 for site in sites}
        made = Activations(values, at, ids, lens)
        for _ in range(2):
            back = Activations.load(made.save(tmp_path / "x"))
            assert back.sites == list(sites) and back.stacked == Stacked(lens)
            for site in sites:
                assert torch.equal(back[site], values[site]) and back[site].dtype == dtype
                assert back.positions_of(*site).equal(at[site]) and back.token_ids_of(*site).equal(ids[site])


def test_a_file_that_somebody_has_mapped_is_not_changed_under_them(tmp_path):
    first = Activations.load(acts(value=1.0).save(tmp_path / "x"))
    acts(value=2.0).save(tmp_path / "x")
    assert first["resid_post", 1].unique().tolist() == [1.0]
    assert Activations.load(tmp_path / "x")["resid_post", 1].unique().tolist() == [2.0]


def test_names_and_rows_that_cannot_be_written_are_errors_that_say_so(tmp_path):
    site, at = Site("resid_post", 0), torch.arange(2)
    with pytest.raises(WeirError, match=r"rows of torch\.int32 cannot be written"):
        Activations({site: torch.zeros(2, 8, dtype=torch.int32)}, {site: at}, {site: at}).save(tmp_path / "x")
    (tmp_path / "file").write_bytes(b"theirs")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (
        tmp_path, "/", tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "y", tmp_path / "file" / "x",
        tmp_path / "loop" / "x", tmp_path / "a\0b",
    ):  # fmt: skip
        with pytest.raises(WeirError, match="cannot write"):
            acts().save(path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "loop"]
    assert Activations.load(Activations({}, {}, {}).save(tmp_path / "none")).sites == []
    wide = Activations({site: torch.zeros(2, 8).double()}, {site: at.int()}, {site: at})
    back = Activations.load(wide.save(tmp_path / ("é" * 100)))
    assert back[site].dtype == torch.float64 and back.positions.equal(at)


def test_who_stops_while_a_file_is_written_leaves_none(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        acts().save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_receipt_as_a_dict_is_nobody_else_s():
    receipt = Receipt(compression={"method": "rp8", "fields": {"scale": "f4"}}, sinks={"x": "queued"})
    out = receipt.to_dict()
    out["compression"]["fields"]["scale"], out["sinks"]["x"] = "f8", "written"
    assert receipt.compression["fields"] == {"scale": "f4"} and receipt.sinks == {"x": "queued"}


def test_it_expires(spool):
    key = spool.put(acts(), SIZE)
    file = spool.open(key)
    past = time.time() - 61
    os.utime(spool.directory / f"{key}.safetensors", (past, past))
    assert spool.open(key) is None and len(spool) == 0
    assert len(file.read()) > SIZE, "who reads it reads on"
    file.close()
    other = spool.put(acts(), SIZE)
    os.utime(spool.directory / f"{other}.safetensors", (past, past))
    spool.sweep()
    assert len(spool) == 0


def test_only_ids_name_files(spool):
    (spool.directory.parent / "secret").write_text("x")
    wrong = ("", "../" + "a" * 29, "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 32 + "\n", "٣" * 32, "/etc/passwd")
    assert all(spool.open(key) is None and not spool.delete(key) for key in wrong)


def test_processes_share_a_directory_and_the_last_removes_it(tmp_path):
    first = SharedDirectory(1234567, str(tmp_path))
    assert first.path.stat().st_mode & 0o777 == 0o700
    second = SharedDirectory(1234567, str(tmp_path))
    assert first.path == second.path
    (first.subdirectory("spool") / "x").write_text("x")
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()


def test_what_a_killed_server_left_is_removed(tmp_path):
    code = (
        "import os, signal; from vllm_weir.server.shared.directory import SharedDirectory; "
        f"h = SharedDirectory(KEY, {str(tmp_path)!r}); (h.subdirectory('spool') / 'old').write_text('x'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    for key in (11, 12):
        subprocess.run([sys.executable, "-c", code.replace("KEY", str(key))], check=False, timeout=600)
    assert [p.name[-2:] for p in tmp_path.iterdir()] == ["12"], "the second one has removed the first"
    assert (next(tmp_path.iterdir()) / "spool" / "old").exists()
    home = SharedDirectory(12, str(tmp_path))  # the same number again: nothing of the other server is in it
    assert [p.name for p in tmp_path.iterdir()] == [home.path.name] and not list(home.subdirectory("spool").iterdir())
    home.close()


def test_the_parent_clears_up_after_children_that_were_killed(tmp_path):
    code = f"""
from vllm_weir.server.shared.directory import SharedDirectory
h = SharedDirectory(13, {str(tmp_path)!r})
print('up', flush=True)
input()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    clear(13, str(tmp_path), patience=0.1)
    assert len(list(tmp_path.iterdir())) == 1, "its child lives"
    child.kill()
    clear(13, str(tmp_path))
    assert not list(tmp_path.iterdir())
    child.communicate()


def test_a_directory_that_others_could_write_is_not_used(tmp_path):
    name = f"weir-serve-{os.getuid()}-99"
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(WeirError, match="only this user can access"):
        SharedDirectory(99, str(tmp_path))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_a_file_holds_beside_the_rows_counts(tmp_path):
    size = len(acts().to_bytes())
    spool = ResultFiles(tmp_path, 2 * size - 1, 60.0)
    spool.put(acts(), SIZE)
    assert SIZE + size < spool.budget, "by its rows alone another would have room"
    kept = spool.put(acts(), SIZE)
    assert spool.used == size
    spool.open(kept).close()


def test_what_a_writer_left_that_was_killed_goes(spool):
    for left in (".0123456789abcdef", ".0123456789abcdef.tmp"):
        (spool.directory / left).write_bytes(b"x" * 100)
    kept = spool.put(acts(), SIZE)
    assert {p.name for p in spool.directory.iterdir()} == {".lock", f"{kept}.safetensors"}
    (spool.directory / ".0123456789abcdef").write_bytes(b"x" * 100)
    spool.sweep()
    assert {p.name for p in spool.directory.iterdir()} == {".lock", f"{kept}.safetensors"}


def test_not_every_result_looks_at_all_others(spool, monkeypatch):
    """A server keeps thousands; what each costs must not grow with them."""
    looks, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    size = len(acts().to_bytes())
    spool.budget = 64 * size
    for _ in range(64):
        spool.put(acts(), SIZE)
    assert len(looks) == 1 and spool.used == 64 * size == spool.budget
    for _ in range(64):
        spool.put(acts(), SIZE)
        assert spool.used == len(spool) * size <= spool.budget
    assert len(looks) <= 1 + 64 // 4
    assert len(spool) > 58, "no more goes than need be"


def test_what_was_deleted_is_taken_off_when_it_is_looked_at(spool):
    size = len(acts().to_bytes())
    spool.budget = 4 * size
    kept = [spool.put(acts(), SIZE) for _ in range(4)]
    spool.delete(kept.pop())
    spool.put(acts(), SIZE)
    assert all(spool.open(key) for key in kept), "there was room"
    spool.delete(kept.pop())
    assert spool.used == 4 * size
    spool.sweep()
    assert spool.used == 3 * size and len(spool) == 3


def test_a_count_that_was_lost_is_made_again(spool):
    spool.put(acts(), SIZE)
    for lost in (b"", b"123"):
        (spool.directory / ".lock").write_bytes(lost)
        spool.put(acts(), SIZE)
    assert len(spool) == 3 and spool.used == 3 * len(acts().to_bytes())
