"""What lies between the last block and the logits, in toy models of every shape that real ones have."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.adapters import adapter
from tests.support.models import make_model
from tests.unit import blocks as toys
from tests.unit.blocks import LAYERS, D, Sequential, mapped
from tests.unit.worker.discovery.test_sites import (
    Divides,
    Doubles,
    Drops,
    Looks,
    More,
    NormsFirst,
    Projects,
    ProjectsAlone,
    ProjectsFirst,
    Squares,
    Sums,
)
from vllm_weir.errors import WeirError
from vllm_weir.patches.model.unembedding import refuse_adapter, unembedding_of
from vllm_weir.schema.hooks import Site

VOCABULARY = 23


def config(dtype=torch.float32, vocabulary=VOCABULARY, runner="generate"):
    model = SimpleNamespace(dtype=dtype, runner_type=runner, get_vocab_size=lambda: vocabulary)
    return SimpleNamespace(model_config=model)


class SlightlyScaled(More):
    """Bfloat16 has few bits: a factor that is nearly 1 is one all the same."""

    def leave(self, hidden, residual=None):
        return self.norm(hidden) * 1.0117


class Gated(More):
    """More than its one module lies on the way: it is called whole."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D // 2)

        def forward(self, rows):
            return self.down(nn.functional.silu(self.up(rows)))

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.head = self.Head()

    def leave(self, hidden, residual=None):
        return self.head(self.norm(hidden))


def loaded(kind, dtype=torch.float32, compute=lambda model, rows: model.lm_head(rows), block=Sequential):
    """A model with its hook points found, and logits computed by `compute`; `lm_head` takes what it returns."""
    torch.manual_seed(1)
    model = kind([block] * LAYERS, kind is Sums)
    sites = mapped(model, dtype)
    width = D if sites.output_path is None else sites.output_path.output.shape[1]
    model.lm_head = nn.Linear(width, VOCABULARY, bias=False).to(dtype)
    model.compute_logits = lambda rows: compute(model, rows)
    return model, sites


SERVED = (
    toys.Model,
    Divides,
    Projects,
    Doubles,
    Drops,
    Looks,
    NormsFirst,
    ProjectsAlone,
    ProjectsFirst,
    SlightlyScaled,
    Gated,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SERVED)
def test_a_lens_takes_rows_the_way_that_the_model_takes_its_last_ones(kind, dtype):
    model, sites = loaded(kind, dtype)
    found = unembedding_of(model, sites, config(dtype))
    assert not found.refused
    rows = torch.randn(5, D).to(dtype)
    with torch.inference_mode():
        expected, got = model.lm_head(model.leave(rows)).float(), found.logits(rows).float()
    assert (got - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    factors = {Divides: 1 / 1.75, SlightlyScaled: 1.0117}
    assert sites.output_path.scale == pytest.approx(factors.get(kind, 1), rel=2e-3)


def test_a_norm_that_runs_where_logits_are_computed():
    """As in MiMo: the model returns the stream itself."""
    model, sites = loaded(Sums, compute=lambda model, rows: model.lm_head(model.norm(rows)), block=toys.Fused)
    assert Site("final_norm", 0) in sites.refused
    rows = torch.randn(5, D)
    with torch.inference_mode():
        assert torch.equal(unembedding_of(model, sites, config()).logits(rows), model.lm_head(model.norm(rows)))


def test_tokens_that_a_model_rules_out_are_ruled_out_in_its_lens():
    def compute(model, rows):
        return model.lm_head(rows).index_fill(1, torch.tensor([3, 5]), float("-inf"))

    found = unembedding_of(*loaded(toys.Model, compute=compute), config())
    assert found.logits(torch.randn(2, D)).isinf().nonzero()[:, 1].tolist() == [3, 5, 3, 5]


class Adapted(nn.Linear):
    """Adds what belongs to the tokens of a step, like vLLM's layers with LoRA."""

    punica_wrapper = None

    def forward(self, rows):
        out = super().forward(rows)
        self.punica_wrapper.add_lora_logits(out, rows, 1.0)
        return out


def test_adapters_of_the_tokens_in_a_step_are_left_out():
    model, sites = loaded(toys.Model)
    weight = model.lm_head.weight

    class Punica:
        def add_lora_logits(self, out, rows, scale):
            raise RuntimeError("other tokens than those of the step")

    model.lm_head = Adapted(D, VOCABULARY, bias=False)
    model.lm_head.weight, model.lm_head.punica_wrapper = weight, Punica()
    kept = model.lm_head.punica_wrapper
    found, rows = unembedding_of(model, sites, config()), torch.randn(3, D)
    with torch.inference_mode():
        assert torch.equal(found.logits(rows), model.norm(rows) @ weight.T)
    assert model.lm_head.punica_wrapper is kept


def by_position(model, rows):
    return model.lm_head(rows) * torch.arange(1, len(rows) + 1)[:, None]


def fails(_model, _rows):
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def zeros(_model, rows):
    return torch.zeros(len(rows), VOCABULARY)


REFUSED = {
    "a function between": (Squares, lambda model, rows: model.lm_head(rows), "changes what norm returns"),
    "by position": (toys.Model, by_position, "is not what the model says itself"),
    "raises": (toys.Model, fails, "cannot be taken alone (RuntimeError: mat1 and mat2 shapes"),
    "fewer tokens": (toys.Model, lambda model, rows: model.lm_head(rows)[:, 1:], "have shapes (6, 22) and (6, 22)"),
    "nothing": (toys.Model, lambda _model, _rows: None, "cannot be taken alone"),
    "all alike": (toys.Model, zeros, "is not what the model says itself"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_verified_is_refused_with_the_reason(case):
    kind, compute, why = REFUSED[case]
    found = unembedding_of(*loaded(kind, compute=compute), config())
    assert found.logits is None and found.refused.startswith("no lens is served: ") and why in found.refused


def test_a_way_that_gives_something_else_is_refused():
    """Weights that change the way would be such a case: the last block's lens has to be the model's own logits."""
    model, sites = loaded(toys.Model)
    model.norm.weight.data.normal_()
    assert "is not what the model says itself" in unembedding_of(model, sites, config()).refused


def test_an_engine_that_pools_has_no_unembedding():
    assert "engine pools" in unembedding_of(*loaded(toys.Model), config(runner="pooling")).refused


def test_an_adapter_of_blocks_alone_may_have_a_lens(tmp_path):
    for head in (False, True):
        where = tmp_path / str(head)
        where.mkdir()
        adapter(make_model("llama", "a", tmp_path), where, head=head)
        asked = SimpleNamespace(lora_name="tiny", lora_path=str(where))
        if not head:
            refuse_adapter(asked, "lens")
            continue
        with pytest.raises(WeirError, match=r"'tiny' has the weights base_model\.model\.lm_head\.") as e:
            refuse_adapter(asked, "lens")
        assert e.value.field == "lens"


@pytest.mark.parametrize("content", [None, b"", b"{" * 90, json.dumps({"a": 1}).encode()])
def test_an_adapter_that_cannot_be_read_has_no_lens(content, tmp_path):
    if content is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(WeirError, match="whether the adapter 'x' changes the unembedding cannot be read") as e:
        refuse_adapter(SimpleNamespace(lora_name="x", lora_path=str(tmp_path)), "lens")
    assert e.value.field == "lens"
