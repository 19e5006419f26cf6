"""Files that cannot be read, and files that are not there: neither is called damaged."""

from __future__ import annotations

import errno
import json
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.unit.mi_patch import write_request
from tests.unit.stored import make, read_all
from vllm_weir import analysis
from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.storage import LAYOUTS, load
from vllm_weir.storage.atomic_file import LocalFiles
from vllm_weir.storage.verify import verify


class Refused(Exception):
    """As botocore's errors, which are no OSErrors."""


ERRORS = (
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "Input/output error"),
    Refused("could not connect"),
    TimeoutError("timed out"),
)


def write_fork(path: Path) -> None:
    path.mkdir()
    np.zeros((4, 5), "<f4").tofile(path / "4_post_block.bin")
    sidecar = {"request_id": "r1", "layer": 4, "hook": "post_block", "shape": [4, 5], "dtype": "float32"}
    (path / "4_post_block.json").write_text(json.dumps(sidecar))


@pytest.mark.parametrize(("kind", "error"), zip([*LAYOUTS, "mi_patch", "fork"], [*ERRORS, *ERRORS[:2]], strict=True))
def test_a_read_that_fails_is_called_that(
    kind: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read of a file, one after the other, fails once."""
    path = tmp_path / "ds"
    if kind == "mi_patch":
        write_request(path / "req_1", (2,))
    elif kind == "fork":
        write_fork(path)
    else:
        make(path, kind, ["a", "b"], compress="full8")
    real, left = LocalFiles.cat_file, [10**6]

    def cat_file(self: Any, *args: Any, **kwargs: Any) -> bytes:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LocalFiles, "cat_file", cat_file)
    read_all(path)
    reads = 10**6 - left[0]
    assert reads >= 1
    for n in range(1, reads + 1):
        left[0] = n
        with pytest.raises(StoreError, match=f"^cannot read {path}/[^ ]*: ") as e:
            read_all(path)
        assert str(error.args[-1]) in str(e.value) and str(e.value).count("cannot read") == 1
        assert not isinstance(e.value, MissingFile)


def test_a_manifest_that_cannot_be_read_is_not_called_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "manifest.json"
    file.write_text("{}")
    assert analysis.load_activation_manifest(file) == {}

    def refused(*_: object, **__: object) -> bytes:
        raise ERRORS[0]

    monkeypatch.setattr(LocalFiles, "cat_file", refused)
    with pytest.raises(StoreError, match=rf"^cannot read {file}: Permission denied$"):
        analysis.load_activation_manifest(file)


def test_a_folder_that_cannot_be_listed_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "sharded", ["a"])

    def refused(*_: object) -> None:
        raise ERRORS[0]

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StoreError, match=f"^cannot list {tmp_path}: Permission denied$"):
        load(tmp_path)


@pytest.mark.parametrize(("layout", "error"), zip(LAYOUTS, ERRORS[::-1], strict=True))
def test_a_connection_that_breaks_while_rows_are_verified_is_no_damage(
    layout: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4()}/ds"
    make(url, layout, ["a", "b"], compress="full8")
    dataset = load(url)
    assert not verify(dataset).damaged

    def broken(*_: object, **__: object) -> bytes:
        raise error

    for call in ("cat_file", "cat_ranges"):
        monkeypatch.setattr(MemoryFileSystem, call, broken)
    with pytest.raises(StoreError, match=f"^cannot read {url}/"):
        verify(pickle.loads(pickle.dumps(dataset)))  # noqa: S301


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    none = tmp_path / "none"
    for call in (
        lambda: load(none),
        lambda: load(none / "rows.safetensors"),
        lambda: analysis.load_activation_file(none / "seq0_layer1_rank0.npz"),
        lambda: analysis.load_activation_manifest(none / "manifest.json"),
        lambda: analysis.ActivationLoader(none).list_requests(),
        lambda: analysis.quick_load(none),
        lambda: analysis.load_sequence_activations(none, "a"),
    ):
        with pytest.raises(MissingFile, match=str(none)) as e:
            call()
        assert isinstance(e.value, WeirError) and isinstance(e.value, FileNotFoundError)
        again = pickle.loads(pickle.dumps(e.value))  # noqa: S301
        assert type(again) is MissingFile and str(again) == str(e.value)
