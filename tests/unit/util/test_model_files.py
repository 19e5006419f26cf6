"""The fingerprint of a model's files: the same for a copy, another one after a step of training."""

from __future__ import annotations

import os
import shutil

import pytest

from vllm_weir.util.model_files import PART, fingerprint


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    (path / "model.safetensors").write_bytes(bytes(range(256)) * (3 * PART // 256))
    (path / "notes.txt").write_text("anything")
    return path


def test_a_copy_has_the_same(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (0, 0))
    (copy / "notes.txt").write_text("else")
    assert fingerprint(str(copy)) == fingerprint(str(model)) is not None


@pytest.mark.parametrize("at", [0, PART - 1, -1])
def test_other_weights_have_another(model, at):
    before, data = fingerprint(str(model)), bytearray((model / "model.safetensors").read_bytes())
    data[at] ^= 1
    (model / "model.safetensors").write_bytes(data)
    assert fingerprint(str(model)) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_other_files_have_another(model, name):
    before = fingerprint(str(model))
    with (model / name).open("ab") as file:
        file.write(b" ")
    assert fingerprint(str(model)) != before
    os.rename(model / name, model / f"other-{name}")
    (model / f"other-{name}").write_bytes((model / f"other-{name}").read_bytes()[:-1])
    assert fingerprint(str(model)) != before


def test_a_hub_has_none_and_a_file_has_its_own(model):
    assert fingerprint("meta-llama/Llama-3.1-8B") is None
    assert fingerprint(str(model / "model.safetensors")) not in (None, fingerprint(str(model)))
