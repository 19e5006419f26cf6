"""The twin: its points are what its modules compute, its gradients and patches are whole, and it is left as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.models import make_model
from tests.support.oracle import Oracle
from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.experiments.attribute import gradient_checks
from vllm_weir.experiments.attribute.twin import RowPatch, Twin
from vllm_weir.schema.hooks import Site

HOOKS = ("resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_in", "mlp_post", "mlp_out",
         "resid_post")  # fmt: skip
CLEAN = [5, 9, 200, 31, 77, 140, 6, 6, 310, 12, 45]
CORRUPT = [5, 9, 201, 31, 77, 99, 6, 6, 310, 12, 45]
FAMILIES = ("llama", "gpt2", "gemma2", "qwen3")


def metric(logits):
    return logits[17] - logits[33]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return make_model(request.param, "a", tmp_path_factory.mktemp("models"))


def sites_of(twin, *hooks):
    return [Site(hook, layer) for hook in hooks for layer in range(twin.num_layers)]


def test_rows_are_the_oracle_s(model):
    twin, truth = Twin.load(str(model)), Oracle(model).rows(CLEAN)
    rows = twin.rows(CLEAN, sites_of(twin, *HOOKS))
    for site, found in rows.items():
        expected = truth[site]
        assert found.shape == expected.shape, site
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max()), site


def test_gradients_are_those_of_a_small_change(model):
    """A change of the rows along their gradient, made in the model itself, moves the metric by what it promises."""
    twin = Twin.load(str(model))
    sites = sites_of(twin, *HOOKS)
    base = twin.differentiate(CORRUPT, metric, sites)
    for site in [s for s in sites if s.layer == 1]:
        slope = base.gradients[site]
        step = 1e-2 / float(slope.norm())
        ends = []
        for sign in (1, -1):
            moved = base.rows[site] + sign * step * slope
            ends.append(float(metric(twin.logits(CORRUPT, [RowPatch(site, p, r) for p, r in enumerate(moved)]))))
        promised = 2 * step * float(slope.pow(2).sum())
        assert abs(ends[0] - ends[1] - promised) <= 0.02 * abs(promised), site


def test_all_clean_rows_of_a_block_give_the_clean_run(model):
    twin = Twin.load(str(model))
    for hook in ("resid_pre", "resid_mid", "resid_post"):
        rows = twin.rows(CLEAN, [Site(hook, 1)])[Site(hook, 1)]
        patches = [RowPatch(Site(hook, 1), position, row) for position, row in enumerate(rows)]
        patched, clean = twin.logits(CORRUPT, patches), twin.logits(CLEAN)
        assert float((patched - clean).abs().max()) <= 1e-5 * float(clean.abs().max())
        assert float((twin.logits(CORRUPT) - clean).abs().max()) > 1e-2


def test_its_tail_gives_the_logits(model):
    twin = Twin.load(str(model))
    last = Site("resid_post", twin.num_layers - 1)
    rows = torch.cat([twin.rows(ids, [last])[last][-1:] for ids in (CLEAN, CORRUPT)])
    expected = torch.stack([twin.logits(ids) for ids in (CLEAN, CORRUPT)])
    assert float((twin.finish(rows) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    where = make_model("llama", "a", tmp_path_factory.mktemp("models"))
    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)


def test_the_model_is_left_as_it_was(llama):
    llama.train()
    llama.lm_head.weight.requires_grad_(False)
    state = {name: value.clone() for name, value in llama.state_dict().items()}
    modules, implementation = list(dict(llama.named_modules())), llama.config._attn_implementation
    twin = Twin(llama)
    twin.differentiate(CLEAN, metric, [Site("z", 0)])
    with pytest.raises(RuntimeError, match="no more"):
        twin.differentiate(CLEAN, _broken, [Site("z", 0)])
    assert llama.training and llama.model.layers[1].training and not llama.lm_head.weight.requires_grad
    assert llama.model.norm.weight.requires_grad and llama.model.norm.weight.grad is None
    assert list(dict(llama.named_modules())) == modules and llama.config._attn_implementation == implementation
    assert all(torch.equal(value, state[name]) for name, value in llama.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


def _broken(logits):
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda logits: 3.0, "returned float"),
        (lambda logits: logits[:2], r"returned shape \[2\]"),
        (lambda logits: logits.detach()[0], "does not depend on the logits"),
    ],
)
def test_a_metric_without_a_gradient_is_refused(llama, bad, message):
    with refused("metric", message):
        Twin(llama).differentiate(CLEAN, bad, [Site("z", 0)])


def test_other_dtypes_are_refused(llama):
    import copy

    with refused("model", r"float32, and this is torch\.bfloat16"):
        Twin(copy.deepcopy(llama).to(torch.bfloat16))


def test_a_point_that_is_not_there_is_refused_with_its_reason(tmp_path):
    twin = Twin.load(str(make_model("mixtral", "a", tmp_path)))
    with pytest.raises(WeirError, match=r"mlp_post\[1\] is not served on the transformers twin, Mixtral.*: no linear"):
        twin.require(Site("mlp_post", 1))
    with refused("model", "cannot load"):
        Twin.load(str(tmp_path / "nothing"))


def test_a_partial_gradient_is_refused():
    """As the norm's input would have it: without what goes around the MLP."""
    pre, attn, mlp = (torch.randn(3, 4) for _ in range(3))
    rows = {Site("resid_pre", 0): pre, Site("attn_out", 0): attn, Site("resid_mid", 0): pre + attn}
    whole = torch.randn(3, 4)
    gradients = dict.fromkeys(rows, whole)
    gradient_checks.check_stream(rows, gradients, 1)
    with pytest.raises(WeirError, match=r"resid_mid\[0\] of the twin has another gradient than attn_out"):
        gradient_checks.check_stream(rows, gradients | {Site("resid_mid", 0): whole - mlp}, 1)
    with pytest.raises(WeirError, match=r"is not the sum of resid_pre and attn_out"):
        gradient_checks.check_stream(rows | {Site("resid_mid", 0): pre + mlp}, gradients, 1)


def test_two_tensors_over_one_memory_are_refused():
    linear, tensor = torch.nn.Linear(4, 4), torch.randn(1, 3, 4)
    with gradient_checks.check_complete(SimpleNamespace(modules={"a": linear}), {Site("attn_in", 0): tensor}):
        linear(tensor)
        linear(tensor.view(3, 4))
        with pytest.raises(WeirError, match=r"reads attn_in\[0\] through two tensors"):
            linear(tensor.detach())
    assert not linear._forward_pre_hooks
