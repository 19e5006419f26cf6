"""The functions of the guide "Write your own intervention", against transformers; and built-in ones as functions."""

from __future__ import annotations

import importlib.util
import inspect
import re

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND
from tests.support.hook_functions import both
from tests.support.markdown import ROOT, blocks
from tests.support.measure import rel_err
from tests.support.steered import check, chunks, generated, prompt, sampling, vectors

pytestmark = pytest.mark.engine("default")
D = 128
PAGE = ROOT / "docs" / "guides" / "write-your-own-intervention.md"
spec = importlib.util.spec_from_file_location("examples_hooks", ROOT / "examples" / "hooks.py")
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)
NAMES = ("probe and steer", "clamp the norm", "value head", "own autoencoder", "without top neurons")


def test_the_guide_has_these_functions():
    """Word for word, but for the types."""
    code = "\n".join(block.text for block in blocks(PAGE) if block.language == "python")
    found = examples.hooks(D)
    assert tuple(found) == NAMES
    for function, _ in found.values():
        assert re.sub(r": Any|-> Any", "", inspect.getsource(function)).replace(" :", ":") in code


@pytest.mark.parametrize("name", NAMES)
def test_functions_against_transformers(llm, truth, name):
    """Rows everywhere, tokens, values and states, in chunks and in one piece."""
    function, given = examples.hooks(D)[name]
    if "most" in given["args"]:
        given["args"] = {"most": 5.0}  # which rows of this model are longer than
    hook, applied = both(function, given)
    params = weir.params(sampling(6), hooks=hook, capture=weir.Capture())
    for size in (None, 7):
        with chunks(llm, size):
            (out,) = generated(llm, [prompt(30, 4)], [params])
        check(out, [applied], truth)
        assert set(out.values) == set(applied.values)
        for key, values in applied.values.items():
            assert rel_err(out.values[key], values.float()) <= 10 * BOUND, "it is a product of rows"
    plain = truth.steered(list(out.prompt_token_ids), 30, [], sites=())[1]
    if name != "value head":
        assert rel_err(truth.steered(list(out.prompt_token_ids), 30, [applied], sites=())[1], plain) > 0.01, "it acts"


def climb(rows, ctx):
    """A step along the gradient of a value."""
    with torch.enable_grad():
        at = rows.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(at @ ctx.args["w"]).sum(), at)
    return rows + 2 * slope


def test_gradients(llm, truth):
    w = vectors(6)(D) / D**0.5
    hook, applied = both(climb, {"layers": [1], "args": {"w": w}})
    (out,) = generated(llm, [prompt(20, 7)], [weir.params(sampling(5), hooks=hook, capture=weir.Capture())])
    check(out, [applied], truth)


def add(rows, ctx):
    return rows + ctx.args["scale"] * ctx.args["vector"]


def ablate(rows, ctx):
    unit = ctx.args["directions"] / ctx.args["directions"].norm()
    return rows - (rows @ unit)[:, None] * unit


def test_what_is_built_in_could_have_been_a_hook(llm, truth):
    """`Add` and `Ablate` and the same as functions: tokens and rows of one batch, and those of the reference."""
    v = vectors(5)(D)
    pairs = (
        (weir.Add(v, [1, 2], scale=2.0), weir.Hook(add, layers=[1, 2], args={"vector": v, "scale": 2.0})),
        (weir.Ablate(v, [1, 2]), weir.Hook(ablate, layers=[1, 2], args={"directions": v})),
    )
    for built_in, hook in pairs:
        params = [weir.params(sampling(8), interventions=one, capture=weir.Capture()) for one in (built_in, hook)]
        first, second = generated(llm, [prompt(20, 6)] * 2, params)
        check(first, [built_in], truth)
        check(second, [built_in], truth)
        assert list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids)
        for site in first.activations.sites:
            assert rel_err(second.activations[site], first.activations[site]) <= 1e-5
