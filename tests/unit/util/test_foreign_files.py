"""Files that others wrote: what they claim is checked before it takes memory, and damage is a WeirError."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import threading
import tracemalloc
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

import vllm_weir as weir
from tests.support.sae_reference import weights, write_npz, write_v6
from tests.unit.refusals import refused
from vllm_weir.errors import StoreError, WeirError
from vllm_weir.experiments.grid import Grid, GridFile
from vllm_weir.experiments.vectors.load import load_vector
from vllm_weir.lenses.files import open_lens
from vllm_weir.schema.fields import is_json
from vllm_weir.schema.gguf import write_gguf
from vllm_weir.schema.vector_files import kind_of
from vllm_weir.util import foreign_files

A, B = np.float32([0.5, -1.0, 2.0]), np.float32([1.0, 0.25, -4.0])
TERA = 1 << 40
GRID = GridFile("sweep", "grid")


@dataclass(frozen=True)
class Numbers:
    grid: Grid
    more: int = 1


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def npz(compressed: bool = True, **arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def npy(shape: tuple[int, ...], numbers: bytes = b"", dtype: str = "<f4") -> bytes:
    """An array that says it has this shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + numbers


def zipped(**files: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def repacked(data: bytes, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    """A file of torch.save with other records."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w", compression) as after:
        for name in before.namelist():
            after.writestr(name, changed.get(name.rpartition("/")[2].replace(".", "_"), before.read(name)))
    return file.getvalue()


def calling(module: str, name: str, *arguments: int) -> bytes:
    """A pickle that calls a function with ints, which torch's restricted unpickler may allow."""
    ints = b"".join(b"\x8a\x08" + struct.pack("<q", one) for one in arguments)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + ints + b"tR."


def says_storage_of(numbers: int) -> bytes:
    """A tensor whose storage claims more numbers than its record has."""
    data = saved({1: torch.tensor(A)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        content = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    claim = b"\x8a\x08" + struct.pack("<q", numbers)
    found = content.replace(b"K\x03t", claim + b"t", 1).replace(b"K\x03\x85", claim + b"\x85", 1)
    assert found.count(claim) == 2
    return repacked(data, data_pkl=found)


HOSTILE = {
    "npy": npy((TERA,)),
    "npz": zipped(**{"layer_1.npy": npy((TERA,), b"\0" * 40)}),
    "npz of another dtype": zipped(**{"layer_1.npy": npy((3,), A.tobytes(), f"V{TERA}")}),
    "torch": says_storage_of(TERA),
    "torch, bytearray": repacked(saved({1: torch.tensor(A)}), data_pkl=calling("builtins", "bytearray", TERA)),
    "torch, Tensor": repacked(saved({1: torch.tensor(A)}), data_pkl=calling("torch", "Tensor", TERA)),
    "torch, storage": repacked(
        saved({1: torch.tensor(A)}), data_pkl=calling("torch.storage", "UntypedStorage", 1 << 33)
    ),
    "torch, compressed": repacked(saved({1: torch.zeros(1 << 20)}), zipfile.ZIP_DEFLATED),
    "numpy in torch": repacked(
        saved({1: A}),
        data_pkl=b"\x80\x02cnumpy\nndarray\n(\x8a\x08" + struct.pack("<q", 1 << 33) + b"\x85tR.",
    ),
    "safetensors": struct.pack("<Q", 60) + b'{"v":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'[:60],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_claims_takes_no_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / "v").write_bytes(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(WeirError):
            load_vector(tmp_path / "v", layers=1)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_an_archive_is_bounded_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "MOST_UNPACKED", 1 << 16)
    zeros = np.zeros(1 << 16, np.float32)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("it was unpacked"))
    GRID.write(tmp_path / "grid", Numbers(Grid(A, {"a": (0, 1, 2)})))
    (tmp_path / "v").write_bytes(npz(layer_1=zeros))
    with refused("file", "it unpacks to 262272 bytes, more than the limit"):
        load_vector(tmp_path / "v")
    (tmp_path / "params.npz").write_bytes(npz(W_enc=zeros))
    with refused("params.npz", "unpacks to"):
        weir.SAE.load(tmp_path, site=("resid_post", 1))
    (tmp_path / "grid").write_bytes(npz(grid=zeros))
    with refused("path", "unpacks to"):
        GRID.read(tmp_path / "grid", Numbers)


@pytest.mark.parametrize("limit", ["MAX_NAMES", "_MAX_LIST"])
def test_names_are_counted_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    arrays = {f"layer_{i}": A for i in range(20)}
    for name, data in (("npz", npz(**arrays)), ("torch", saved(dict.fromkeys(range(20), torch.tensor(A).clone())))):
        (tmp_path / name).write_bytes(data)
        assert len(load_vector(tmp_path / name).layers) == 20
    monkeypatch.setattr(foreign_files, limit, 2)
    for name in ("npz", "torch"):
        with refused("file", "names"):
            load_vector(tmp_path / name)


def test_names_of_safetensors_are_counted(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(save({f"layer_{i}": A[:1] for i in range(4097)}))
    with refused("file", "4097 names, more than the limit of 4096"):
        load_vector(tmp_path / "v")


def test_weights_that_are_not_compressed_may_be_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "MOST_UNPACKED", 16)
    for compressed in (True, False):
        (tmp_path / "v").write_bytes(npz(compressed, layer_1=A, layer_2=B))
        assert load_vector(tmp_path / "v").layers == (1, 2)


def test_a_pickle_is_named(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(pickle.dumps([1.0]))
    with refused("file", "a pickle, or written by torch before 1.6"):
        load_vector(tmp_path / "v")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "pointer of Git LFS.*git lfs pull"),
        (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
        (b"<HTML><body>404</body>", "a web page"),
        (b"layer,x0,x1,x2\n1,0.5,-1.0,2.0\n", "it is text that begins with 'layer,x0,x1,x2'"),
        (b"\xef\xbb\xbf0.5;1.5;2.5;3.5;4.5\n", "it is text that begins with '0.5;1.5"),
    ],
)
def test_what_is_no_file_of_tensors_is_told(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "v").write_bytes(data)
    with refused("file", why):
        load_vector(tmp_path / "v")
    with refused("probe", why):
        weir.load_probe(tmp_path / "v", name="a", layer=1)
    saes = tmp_path / "sae"
    write_v6(saes, "standard", weights("standard"))
    (saes / "sae_weights.safetensors").write_bytes(data)
    with refused("sae_weights.safetensors", why):
        weir.SAE.load(saes)
    (saes / "cfg.json").write_bytes(data)
    with refused("cfg.json", why):
        weir.SAE.load(saes)
    (tmp_path / "params.npz").write_bytes(data)
    with refused("params.npz", why):
        weir.SAE.load(tmp_path / "params.npz", site=("resid_post", 1))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_is_told_by_its_first_bytes(tmp_path: Path, mark: bytes) -> None:
    """With a byte-order mark or not, after blanks, and although a safetensors file may begin with any of them."""
    (tmp_path / "v").write_bytes(mark + b'\r\n {"directions": {"1": [0.5, 1.0]}}\r\n')
    assert load_vector(tmp_path / "v").layers == (1,)
    assert kind_of((tmp_path / "v").read_bytes()) == "json"
    (tmp_path / "v").write_bytes(mark + b'{"kind": "linear", "name": "a", "layer": 1, "weight": [0.5]}')
    assert weir.load_probe(tmp_path / "v").layer == 1
    (tmp_path / "config.json").write_bytes(mark + b'{"num_hidden_layers": 2, "d_model": 3}')
    (tmp_path / "params.pt").touch()
    open_lens(tmp_path)
    for blanks in range(6):
        data = save({"layer.1": A}, {"a": " " * (0x5B + 0x20 * blanks)})
        (tmp_path / "v").write_bytes(data)
        assert not is_json(data) and load_vector(tmp_path / "v").layers == (1,)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, device])
def test_only_regular_files_are_read(tmp_path: Path, make: Any) -> None:
    """A pipe holds the thread that opens it until somebody writes, and a device has no end."""
    write_v6(tmp_path / "a", "standard", weights("standard"))
    write_v6(tmp_path / "b", "standard", weights("standard"))
    for name in ("a/cfg.json", "b/sae_weights.safetensors", "params.npz", "config.json"):
        make(tmp_path / name)
    (tmp_path / "params.pt").touch()
    doors = [
        lambda: load_vector(tmp_path / "params.npz"),
        lambda: weir.load_probe(tmp_path / "params.npz"),
        lambda: weir.SAE.load(tmp_path / "a"),
        lambda: weir.SAE.load(tmp_path / "b"),
        lambda: weir.SAE.load(tmp_path / "params.npz", site=("resid_post", 1)),
        lambda: GRID.read(tmp_path / "params.npz", Numbers),
        lambda: open_lens(tmp_path / "params.npz"),
        lambda: open_lens(tmp_path),
    ]
    refusals: list[WeirError] = []

    def try_all() -> None:
        for door in doors:
            with pytest.raises(WeirError) as e:
                door()
            refusals.append(e.value)

    thread = threading.Thread(target=try_all, daemon=True)
    thread.start()
    thread.join(60)
    assert len(refusals) == len(doors), f"door {len(refusals)} does not return"
    assert all("a pipe or a device; name a regular file" in str(e) for e in refusals)
    assert all(isinstance(e, StoreError) for e in refusals[:-1])


FILES = {
    "gguf": write_gguf({"general.architecture": "controlvector", "controlvector.model_hint": "x"}, {"direction.1": A}),
    "safetensors": save({"layer.1": A}),
    "npz": npz(layer_1=A, layer_2=B),
    "npy": npy((3,), A.tobytes()),
    "torch": saved({1: torch.tensor(A)}),
    "numpy in torch": saved({1: A}),
    "json": b'{"directions": {"1": [0.5, 1.0]}}',
}
EDITS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 1 << 16), st.sampled_from([0, 1, 255, 1 << 31, TERA, (1 << 64) - 1])),
    min_size=1,
    max_size=3,
)


def edited(data: bytes, edits: list[tuple[int, int, int]]) -> bytes:
    """A file with some bytes cut off, changed, put in, or taken out."""
    for kind, place, number in edits:
        place %= len(data) + 1
        value = struct.pack("<Q", number)
        end = (data[place + 1 :], data[place + 8 :], data[place:], data[place + 4 :])[kind] if kind < 4 else b""
        data = data[:place] + (value[:1], value, value[:3], b"", b"")[kind] + end
    return data


@given(edits=EDITS, name=st.sampled_from(sorted(FILES)))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory, edits: Any, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(edited(FILES[name], edits))
    for given_layers in ({}, {"layers": 1}):
        with contextlib.suppress(WeirError):
            load_vector(path, **given_layers)


@given(edits=EDITS)
def test_damage_of_grids_and_autoencoders(tmp_path_factory: pytest.TempPathFactory, edits: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    GRID.write(folder / "grid", Numbers(Grid(A, {"a": (0, 1, 2)})))
    (folder / "grid").write_bytes(edited((folder / "grid").read_bytes(), edits))
    write_npz(folder, weights("jumprelu"))
    (folder / "params.npz").write_bytes(edited((folder / "params.npz").read_bytes(), edits))
    for read in (
        lambda: GRID.read(folder / "grid", Numbers),
        lambda: weir.SAE.load(folder / "params.npz", site=("resid_post", 1)),
    ):
        with contextlib.suppress(WeirError):
            read()
