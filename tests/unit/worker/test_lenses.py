"""Translators of fitted lenses on a worker: files that change, and devices that are full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.read_outs import LENS, ReadOut
from vllm_weir.worker.lenses import MAX_FITTED, Lenses, Unembedding

D, LAYERS = 4, 2
UNEMBEDDING = Unembedding(lambda rows: rows, D, "")


def state(value: float) -> dict[str, Any]:
    return {f"{i}.weight": torch.full((D, D), value + i) for i in range(LAYERS)} | {
        f"{i}.bias": torch.full((D,), value - i) for i in range(LAYERS)
    }


def save(folder: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"d_model": D, "num_hidden_layers": LAYERS}))
    torch.save(tensors, folder / "params.pt")
    return folder


def lenses() -> Lenses:
    return Lenses(UNEMBEDDING, LAYERS, D, torch.device("cpu"))


def weight(made: Lenses, folder: Path, layer: int = 0) -> float | None:
    reader = made.reader(ReadOut(LENS, Site("resid_post", layer), str(folder), 1))
    return None if reader.translator is None else float(reader.translator.matrix[0, 1])


def test_a_lens_that_is_saved_again_is_read_again(tmp_path):
    made, folder = lenses(), save(tmp_path / "lens", state(1.0))
    assert (weight(made, folder), weight(made, folder, 1)) == (2.0, None)
    before = (folder / "params.pt").stat()
    save(folder, state(5.0))
    os.utime(folder / "params.pt", ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # even within a clock's tick
    assert weight(made, folder) == 6.0
    assert len(made._ready) == 1


def test_a_few_lenses_stay_ready(tmp_path, monkeypatch):
    made = lenses()
    folders = [save(tmp_path / f"{n}", state(float(n))) for n in range(MAX_FITTED + 2)]
    for n, folder in enumerate(folders):
        assert weight(made, folder) == n + 1
    assert {lens.path for lens in made._ready} == set(folders[2:])
    monkeypatch.setattr("vllm_weir.lenses.files.LensFile.translator", lambda *_: pytest.fail("it was ready"))
    assert weight(made, folders[-1]) == MAX_FITTED + 2


def test_files_that_are_gone_are_refused(tmp_path):
    with pytest.raises(WeirError, match="has no lens"):
        weight(lenses(), tmp_path)


def test_a_full_device_gives_up_other_lenses_and_then_refuses(tmp_path, monkeypatch):
    made, room = lenses(), [3]
    for n in range(2):
        weight(made, save(tmp_path / f"{n}", state(float(n))))
    to = torch.Tensor.to

    def full(tensor: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        if len(made._ready) >= room[0]:
            raise torch.OutOfMemoryError("full")
        return to(tensor, *given, **more)

    monkeypatch.setattr(torch.Tensor, "to", full)
    assert weight(made, save(tmp_path / "2", state(2.0))) == 3.0
    assert [lens.path.name for lens in made._ready] == ["1", "2"]
    room[0] = 0
    with pytest.raises(WeirError, match="64 bytes of this lens at one block") as e:
        weight(made, save(tmp_path / "3", state(3.0)))
    assert e.value.field == "lens.path"


def test_a_row_is_translated_by_the_matrix_and_not_its_transpose(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{i}.weight": torch.randn(D, D, generator=generator) for i in range(LAYERS)}
    tensors |= {f"{i}.bias": torch.randn(D, generator=generator) for i in range(LAYERS)}
    reader = lenses().reader(ReadOut(LENS, Site("resid_post", 0), str(save(tmp_path / "lens", tensors)), D))
    rows = torch.randn(6, D, generator=generator)
    logits = rows + torch.einsum("ij,nj->ni", tensors["1.weight"], rows) + tensors["1.bias"]
    records = reader.read(rows)
    order = logits.argsort(1, descending=True)
    assert torch.equal(records[:, :D].long(), order)
    logprobs = logits.double().log_softmax(1).gather(1, order)
    assert (records[:, D:].contiguous().view(torch.float32) - logprobs).abs().max() <= 1e-5 * logits.abs().max()
