"""npz files where pyarrow and fsspec are not there, and beside files that are not Weir's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from tests.unit.stored import SITES, check, length_of, make, write
from vllm_weir import analysis
from vllm_weir.errors import StoreError, WeirError
from vllm_weir.storage import Batch, inspect, load, open_writer
from vllm_weir.storage.atomic_file import LocalFiles, local_path
from vllm_weir.storage.object_store import ObjectStore

ROOT = Path(__file__).parents[3]

ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyarrow", "fsspec"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import numpy as np, torch
import vllm_weir as weir
from vllm_weir import analysis, consumers
from vllm_weir.consumers.base import EngineInfo, Finished, Rows
from vllm_weir.storage import Batch, convert, inspect
from vllm_weir.storage.verify import verify
from vllm_weir.config.settings import Settings
from vllm_weir.compat.mi_patch.environment import act_sink

out, rows, at = sys.argv[1], torch.randn(3, 8), np.arange(3)
with weir.open_writer(out + "/a", "npz", compress="full8") as writer:
    writer.write(Batch("r", "resid_post", 2, at, at, rows))
    writer.finish_request("r", {"prompt_tokens": 2})
((name, options),) = [(n, o) for n, o in act_sink(
    {"VLLM_ACT_CAPTURE": "1", "VLLM_ACT_MODE": "none", "VLLM_ACT_OUTDIR": out + "/b"}
).items() if n in ("filesystem", "npz")]
sink = consumers.make(name, options, "sink")
sink.open(EngineInfo("m", 4, 8, "float32"))
request = Finished("q", 0, "q-1", 2, 1, "length")
sink.take(Rows(request, weir.Site("resid_post", 2), positions=torch.arange(3), token_ids=torch.arange(3), data=rows))
sink.finish(request)
sink.close()
for folder, request in (("/a", "r"), ("/b", "q-1")):
    dataset = weir.load(out + folder)
    assert dataset.layout == "npz" and dataset.requests == [request], dataset
    assert dataset[request].numpy("resid_post.2").shape == (3, 8)
    assert dataset.rows(("resid_post", 2), positions=[1]).rows.shape == (1, 8)
    assert inspect(dataset).rows == 3 and not verify(dataset).damaged
    loader = analysis.ActivationLoader(out + folder)
    assert loader.load_request(loader.list_requests()[0], reconstruct=True)[0][2].shape == (3, 8)
    assert analysis.quick_load("file://" + out + folder, layer=2).shape == (3, 8)
assert convert(out + "/a", out + "/c", "per_request") == 1
for url, layout, words in ((out + "/s", "sharded", "pyarrow"), ("s3://bucket/run", "npz", "fsspec")):
    try:
        weir.open_writer(url, layout)
    except weir.WeirError as e:
        assert words in str(e) and "pip install 'vllm-weir[keep]'" in str(e), e
    else:
        raise AssertionError(url)
assert not {"pyarrow", "fsspec"} & {name.partition(".")[0] for name in sys.modules}
"""


def test_npz_needs_numpy_alone(tmp_path: Path) -> None:
    """Writing, the sink that VLLM_ACT_OUTDIR makes, reading and analysing; what needs more says so."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def foreign(path: Path) -> dict[str, bytes]:
    """What other programs may have in a directory, and what was written: name -> bytes."""
    mine = {"request_id": "x", "sequences": {"0": {"layers": {}}}, "mode": "ActMode.FULL8"}
    files = {
        "notes.txt": b"mine",
        ".DS_Store": b"\0\1",
        ".notes.swp.tmp": b"an editor's",
        "other.npz": b"no zip file",
        "model.safetensors": b"neither",
        "manifest.json": b"{",
        "data/manifest.json": b"not even JSON",
        "data/seq0_layer1_rank0.npz": b"\0",
        "data/.upload.tmp": b"on its way",
        "deep/er/req_q/manifest.json": b"[]",
        "req_theirs/manifest.json": json.dumps(mine).encode(),
        "req_theirs/seq0_layer1_rank0.npz": b"theirs",
        "req_mine/notes.txt": b"a folder of the same name",
        "reqs.csv": b"a,b",
    }
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    (path / "empty").mkdir()
    (path / "link").symlink_to(path / "data", target_is_directory=True)
    (path / "broken").symlink_to(path / "gone")
    return files


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_npz_lies_beside_other_files(first: str, tmp_path: Path) -> None:
    """Whether they were there before it, or come later: they are not read, not changed and not deleted."""
    files = foreign(tmp_path) if first == "theirs" else {}
    make(tmp_path, "npz", ["a", "b/../c"])
    files = files or foreign(tmp_path)
    for names in (["a", "b/../c"], ["a", "b/../c", "mine"]):
        check(load(tmp_path), names)
        assert sorted(load(tmp_path).requests) == sorted(names)
        assert inspect(load(tmp_path)).notes == [
            "a folder is left out whose manifests other programs wrote; load them by themselves"
        ]
        loader = analysis.ActivationLoader(tmp_path)
        assert len(loader.list_requests()) == len(names)
        assert len(loader.load_request("a")) == 1
        if "mine" not in names:
            make(tmp_path, "npz", ["mine"])
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert (tmp_path / "empty").is_dir() and (tmp_path / "link").is_symlink() and (tmp_path / "broken").is_symlink()


def test_a_folder_that_may_not_be_looked_into_is_none_of_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    scanned, real = [], os.scandir

    def scandir(path: str) -> object:
        scanned.append(Path(path).name)
        if path.endswith("lost+found"):  # the tests may run as root, whom nothing is forbidden
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    make(tmp_path, "npz", ["a"])
    check(load(tmp_path), ["a"])
    assert "req_a" in scanned
    (tmp_path / "weir.json").unlink()  # now nothing says that there is none of the dataset in it
    with pytest.raises(StoreError, match=r"^cannot list .*/lost\+found: Permission denied$"):
        load(tmp_path)


def test_another_programs_request_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    """The request fails, and says what to do; others are written."""
    theirs = tmp_path / "req_a" / "seq0_layer3_rank0.npz"
    theirs.parent.mkdir()
    np.savez(theirs, q=np.zeros((4, 5), np.uint8), scale=np.ones(4), zero=np.ones(4))
    before = theirs.read_bytes()
    with open_writer(tmp_path, "npz") as writer:
        writer.write(Batch("a", "resid_post", 3, [0], [0], torch.ones(1, 4)))
        with pytest.raises(WeirError, match=r"seq0_layer3_rank0\.npz: is another program's.*choose another id"):
            writer.finish_request("a")
        write(writer, "b")
    check(load(tmp_path), ["b"])
    assert theirs.read_bytes() == before


def test_weirs_files_beside_another_programs_manifest_are_read(tmp_path: Path) -> None:
    """Copied into a folder without Weir's marker: by what each file says of itself."""
    make(tmp_path / "ours", "npz", ["a"])
    folder = tmp_path / "copy" / "req_a"
    folder.parent.mkdir()
    (tmp_path / "ours" / "req_a").rename(folder)
    (folder / "manifest.json").write_text(json.dumps({"request_id": "x", "sequences": {}}))
    found = load(folder.parent)
    assert found.requests == ["req_a"] and [found.count(site) for site in SITES] == [length_of("a")] * 3


def test_an_attempt_that_failed_is_written_over(tmp_path: Path) -> None:
    """A killed writer leaves files without a manifest; they are Weir's own."""
    make(tmp_path, "npz", ["a"])
    (tmp_path / "req_a" / "manifest.json").unlink()
    assert load(tmp_path).requests == []
    make(tmp_path, "npz", ["a"])
    check(load(tmp_path), ["a"])


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_request"])
def test_layouts_that_need_a_place_of_their_own_say_so(layout: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(WeirError, match="is not empty and not a Weir dataset; choose another place"):
        open_writer(tmp_path, layout)
    for either in (layout, "npz"):
        with pytest.raises(WeirError, match=r"cannot create .*notes\.txt: File exists"):
            open_writer(tmp_path / "notes.txt", either)


def test_only_temporary_files_of_weirs_are_swept(tmp_path: Path) -> None:
    ours = [".weir.json.0123abcd.tmp", "req_a/.seq0_layer3_rank0.npz.00000000.tmp"]
    theirs = [".notes.tmp", ".a.0123abc.tmp", "b.0123abcd.tmp", "data/.weir.json.0123abcd.tmp", "req_a/.x.tmp"]
    for name in (*ours, *theirs):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    make(tmp_path, "npz", ["b"])
    assert not any((tmp_path / name).exists() for name in ours)
    assert all((tmp_path / name).exists() for name in theirs)


@pytest.mark.parametrize("url", ["/a/b/", "a/b", "./a", ".", "/", "~/x", "a/../b", "file:///a/b", "local:///a/", "//a"])
def test_local_paths_are_those_of_fsspec(url: str) -> None:
    path = local_path(url)
    assert path is not None
    assert path == LocalFileSystem._strip_protocol(url).rstrip("/")


def test_other_urls_are_not_local() -> None:
    for url in ("s3://bucket/run", "memory://x", "zip://a.npz::file:///b.zip", "simplecache::file:///a"):
        assert local_path(url) is None


def test_local_files_are_listed_and_read_as_fsspec_does(tmp_path: Path) -> None:
    (tmp_path / "below" / "deep").mkdir(parents=True)
    for name in ("a", "below/b", "below/deep/c", ".hidden", "below/.hidden"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    theirs, ours = LocalFileSystem(), LocalFiles()
    root = str(tmp_path)
    for deep in (False, True):
        found = theirs.find(root, maxdepth=None if deep else 1, detail=True)
        sizes = {os.path.relpath(path, root): info["size"] for path, info in found.items() if "/." not in path}
        assert ours.find(root, deep=deep) == sizes == ObjectStore(root).names(deep=deep)
    for start, end in ((None, None), (0, 4), (2, 3), (3, None), (2, 99), (4, 4)):
        assert ours.cat_file(f"{root}/below/b", start, end) == theirs.cat_file(f"{root}/below/b", start, end)
    with pytest.raises(FileNotFoundError):
        ours.cat_file(f"{root}/gone")
    assert ObjectStore(f"{root}/gone").names() == ObjectStore(f"{root}/a").names() == {}
