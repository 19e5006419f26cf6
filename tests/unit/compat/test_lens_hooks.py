"""vllm-lens's hooks: what they become, and how its functions are called."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

import vllm_weir as weir
from vllm_weir.compat.vllm_lens.request import REGISTERED, hook_results, lens_hooks
from vllm_weir.errors import WeirError
from vllm_weir.schema.functions import Travelling, by_authors, find
from vllm_weir.schema.keys import refuse_lens
from vllm_weir.schema.user_hooks import Hook, LensHook


def count(ctx, rows):
    ctx.saved["rows"] = ctx.saved.get("rows", 0) + ctx.seq_len
    ctx.saved[ctx.layer_idx] = ctx.get_parameter("norm.weight")
    ctx.saved.pop("last", None) if ctx.saved["rows"] > 3 else ctx.saved.update(last=rows[-1])
    return rows[0] * 2


def at(layer, hook, saved):
    args = {"key": hook.args["key"], "index": hook.args["index"]}
    return SimpleNamespace(layer=layer, args=args, saved=saved, parameter=lambda name: torch.ones(3))


def elsewhere(hook):
    wire = msgspec.msgpack.encode(hook.function)
    return find(msgspec.structs.replace(msgspec.msgpack.decode(wire, type=Travelling), token="of another process"))


def test_the_same_name_makes_both_kinds():
    lens = weir.Hook(fn=count, layer_indices=[1, 2], pre=True)
    assert isinstance(lens, LensHook) and not isinstance(lens, weir.Hook) and lens == LensHook(count, [1, 2], True)
    assert isinstance(weir.Hook(count), Hook)


def test_hooks_become_hooks():
    theirs = SimpleNamespace(fn=count, layer_indices=torch.tensor([3]), pre=False)
    pre, post = lens_hooks([LensHook(count, [1, 2], pre=True), theirs], start=4)
    assert (pre.hook, pre.layers, pre.mode) == ("resid_pre", (1, 2), "eager")
    assert (post.hook, post.layers, post.args["index"]) == ("resid_post", (3,), 5)
    assert pre._lower().calls.keys() != post._lower().calls.keys()


def test_a_function_is_called_as_vllm_lens_does():
    """What it has saved is of one request; a row that is returned stands for all; names need not be text."""
    (hook,) = lens_hooks([LensHook(count, [1, 2])])
    first, second, mine, other = elsewhere(hook), elsewhere(hook), {}, {}
    rows = torch.arange(6.0).view(2, 3)
    assert first(rows, at(1, hook, mine)).tolist() == [[0, 2, 4]] * 2
    second(rows, at(1, hook, other))
    assert {*hook_results(mine)["0"]} == {"rows", 1, "last"}
    first(rows, at(2, hook, mine))
    results = hook_results(mine)
    assert results.keys() == {"0"} and {*results["0"]} == {"rows", 1, 2} and results["0"]["rows"] == 4
    assert hook_results(other)["0"]["rows"] == 2 and not hook_results(mine, REGISTERED)
    own = dict.fromkeys(("own", "apply_hooks", "apply_hooks [0]", "My rows [0, 1]"))
    assert by_authors(mine | own) == own and by_authors(None) is None
    (model,) = lens_hooks([LensHook(lambda ctx, rows: ctx.model, [1])])
    with pytest.raises(AttributeError, match="get_parameter"):
        find(model.function)(rows, at(1, model, {}))


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ('[{"fn": {"cloudpickle": "gASV"}}]', "apply_hooks", "never comes as text"),
        ([{"fn": {"cloudpickle": "gASV"}, "layer_indices": [1], "pre": False}], "apply_hooks[0]", "got dict"),
        ([LensHook(count, [])], "apply_hooks[0].layer_indices", "not empty"),
        ([LensHook(count, [1]), LensHook("code", [1])], "apply_hooks[1].fn", "expected a function"),
        ([LensHook(count, 3)], "apply_hooks[0].layer_indices", "list of ints"),
        (LensHook(count, [1]), "apply_hooks", "list of hooks"),
    ],
)
def test_refusals(value, field, words):
    with pytest.raises(WeirError, match=words) as e:
        lens_hooks(value)
    assert e.value.field == field


def test_no_client_sends_functions():
    refuse_lens({"output_qk": [1], "apply_hooks": None})
    with pytest.raises(WeirError, match="--weir-hook") as e:
        refuse_lens({"apply_hooks": [1]})
    assert e.value.field == "apply_hooks"
