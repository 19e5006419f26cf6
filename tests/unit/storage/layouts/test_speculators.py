"""The layout `speculators`: files that its trainer's reader takes, by its own code where that is installed.

The reader of speculators and hs-connectors 0.9.0 is restated here: `FileTransfer.get_cached`, `check_hidden_states`,
and what `ArrowDataset` makes of a sample.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.extracting import D, FakeEngine, run_fake, texts, write_jsonl
from tests.unit.refusals import refused
from vllm_weir.extraction.run_spec import RunSpec
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.draft_layers import draft_layers
from vllm_weir.storage import Batch, load, open_writer

VALUES = texts(20)


def get_cached(folder: Path, index: int) -> dict[str, torch.Tensor] | None:
    if importlib.util.find_spec("hs_connectors") is not None:
        from hs_connectors import FileTransfer

        return FileTransfer(folder).get_cached(index)
    path = folder / f"hs_{index}.safetensors"
    return load_file(path) if path.exists() else None


def check_hidden_states(data: dict[str, Any], tokens: list[int]) -> None:
    assert {"token_ids", "hidden_states"} <= data.keys()
    assert data["token_ids"].tolist() == tokens and len(tokens) == data["hidden_states"].shape[0]
    assert torch.isfinite(torch.stack(torch.aminmax(data["hidden_states"]))).all()


def test_records_are_samples_of_its_trainer(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", VALUES)
    out = tmp_path / "hidden_states"
    run_fake(source, str(out), layout="speculators", layers=[0, 1])
    engine = FakeEngine(RunSpec("fake"))
    for i, ids in enumerate(engine.encode(VALUES)):
        sample = get_cached(out, i)
        assert sample is not None
        check_hidden_states(sample, ids)
        assert sample["token_ids"].dtype == torch.int64 and sample["hidden_states"].shape == (len(ids), 2, D)
        first, last = (batch.rows for batch in engine.read([ids])[0].rows)
        assert torch.equal(sample["hidden_states"][:, :-1].flatten(1), first)
        assert torch.equal(sample["hidden_states"][:, -1], last)
    assert get_cached(out, len(VALUES)) is None
    ds = load(out)  # the files say what they hold
    assert len(ds) == 20 and {(site.hook, site.layer) for site in ds.sites} == {("resid_post", 0), ("resid_post", 1)}
    assert ds.metadata(ds.requests[3])["record"] == int(ds.requests[3][:10])
    assert run_fake(source, str(out), layout="speculators", layers=[0, 1]).held == 20


def test_tokens_of_a_record_are_its_prompt(tmp_path: Path) -> None:
    from vllm_weir.extraction.source import open_source

    source = write_jsonl(tmp_path / "t.jsonl", [[5, 9, 1], [], ["a"], [-1], [True]], column="input_ids")
    records = list(open_source(source, "input_ids").read(0, 5))
    assert [record.value for record in records] == [[5, 9, 1], None, None, None, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = {layer: torch.randn(3, 4).to(dtype) for layer in (1, 0)}
    with open_writer(tmp_path / "out", "speculators") as writer:
        for layer, values in rows.items():
            writer.write(Batch("cmpl-1", "resid_post", layer, np.arange(3), np.arange(3), values))
        writer.finish_request("cmpl-1", {"prompt_tokens": 3})
    states = load_file(tmp_path / "out" / "cmpl-1.safetensors")["hidden_states"]
    assert states.dtype == dtype and torch.equal(states, torch.stack([rows[0], rows[1]], dim=1))


def test_what_it_does_not_take_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", VALUES)
    for name, value in (("hook", "mlp_out"), ("positions", "last_prompt"), ("compress", "fp16"), ("reduce", "mean")):
        with refused(name, "the layout speculators takes whole rows"):
            run_fake(source, str(tmp_path / "out"), layout="speculators", layers=[0, 1], **{name: value})
    with refused("compress", "leave compress out"):
        open_writer(tmp_path / "out", "speculators", compress="fp8")
    with open_writer(tmp_path / "other", "speculators") as writer:
        writer.write(Batch("a", "resid_post", 0, np.arange(3), np.arange(3), torch.zeros(3, 4)))
        writer.write(Batch("a", "resid_post", 1, np.arange(2), np.arange(2), torch.zeros(2, 4)))
        with refused("batch.positions", "at all positions"):
            writer.finish_request("a")
        writer.write(Batch("b", "resid_mid", 0, np.arange(3), np.arange(3), torch.zeros(3, 4)))
        with refused("batch.hook", "rows of resid_post"):
            writer.finish_request("b")


def test_layers_of_draft_models() -> None:
    assert draft_layers("eagle3", 32) == (1, 15, 28, 31)  # 2, 16, 29 and 32 in vLLM's numbering
    assert draft_layers("eagle3", 6) == (1, 2, 5)  # 2, 3, 3 and 6
    assert draft_layers("mtp", 6) == (5,)
    with refused("layers", "at least 4 blocks"):
        draft_layers("eagle3", 3)
    with refused("layers", "does not say how many blocks"):
        draft_layers("mtp", None)
    assert Capture(layers=draft_layers("eagle3", 6)).layers == (1, 2, 5)
