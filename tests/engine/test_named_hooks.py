"""Hooks by name on a live engine: registered, used with other args, replaced while requests run, and gone."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held
from tests.support.engines import async_llm
from tests.support.hook_functions import both, cases, clamp_norm, probe_and_steer
from tests.support.steered import check, directory, generated, prompt, sampling
from vllm_weir.errors import WeirError
from vllm_weir.schema.functions import _here

pytestmark = pytest.mark.engine("default")
D, D_MLP, D_Z = 128, 192, 128
CAPTURE = [weir.Capture("resid_post"), weir.Capture("resid_pre", [2])]
FUNCTION, GIVEN = cases(D, D_MLP, D_Z)[0]


@pytest.fixture
def named(llm):
    """The engine with `FUNCTION` as "steer"; afterwards nothing is registered."""
    weir.register_hook(llm, "steer", weir.Hook(FUNCTION, **GIVEN))
    yield llm
    for name in weir.list_hooks(llm):
        weir.unregister_hook(llm, name)


def use(name="steer", max_tokens=6, **more):
    return weir.params(sampling(max_tokens), hooks=weir.Use(name, **more), capture=CAPTURE)


def applied(**changes):
    """What "steer" does in the reference."""
    return both(FUNCTION, GIVEN | changes | {"args": GIVEN["args"] | changes.get("args", {})})[1]


def test_requests_name_a_hook_with_args_of_their_own(named, truth):
    """In one batch, by every form; others are as they would be alone."""
    w = torch.randn(D, generator=torch.Generator().manual_seed(9)) / 8
    weir.register(named, "direction", w)
    params = [
        (use(), applied()),
        (use(args={"w": w, "scale": 2}), applied(args={"w": w, "scale": 2.0})),
        (use(args={"w": "direction"}, layers=3, positions="generated"),
         applied(args={"w": w}, layers=3, positions="generated")),
        (weir.params(sampling(6), hooks="steer", capture=CAPTURE), applied()),
        (weir.params(sampling(6), interventions=[weir.Use("steer", layers=[1])], capture=CAPTURE), applied(layers=[1])),
    ]  # fmt: skip
    outs = generated(named, [prompt(20 + k, k) for k in range(len(params))], [one for one, _ in params])
    for out, (_, wanted) in zip(outs, params, strict=True):
        check(out, [wanted], truth)
        assert out.values["probe"].shape[0] > 0 and out.receipt.interventions[0].op == "hook"
    weir.unregister(named, "direction")
    told = weir.list_hooks(named)["steer"]
    assert told["args"] == {"w": {"dtype": "float32", "shape": [D]}, "scale": 3.0} and told["layers"] == [1, 2]


def test_a_name_that_changes_changes_later_requests_only(named, truth):
    """Requests that run, and those that wait, keep what they were admitted with."""
    engine = named.llm_engine
    wanted = {}
    ids = [prompt(30, 40 + k) for k in range(3)]
    for k, change in enumerate((None, "replace", "remove")):
        if change == "replace":
            weir.register_hook(named, "steer", weir.Hook(clamp_norm, layers=2, args={"most": 5.0}))
        if change == "remove":
            weir.unregister_hook(named, "steer")
            with pytest.raises(WeirError, match="no hook is registered under 'steer'; none is"):
                engine.add_request("late", ids[k], use())
            continue
        engine.add_request(f"r{k}", ids[k], use(max_tokens=8))
        engine.step()
        wanted[f"r{k}"] = applied() if k == 0 else both(clamp_norm, {"layers": 2, "args": {"most": 5.0}})[1]
    outs = {}
    while engine.has_unfinished_requests():
        outs |= {out.request_id: out for out in engine.step() if out.finished}
    assert outs.keys() == wanted.keys()
    for request_id, out in outs.items():
        check(out, [wanted[request_id]], truth)


def test_everybody_may_undergo_one(named, truth):
    weir.set_global(named, [weir.Use("steer", args={"scale": 1.0})])
    weir.unregister_hook(named, "steer")  # what is set keeps it
    try:
        (out,) = generated(named, [prompt(20, 5)], [weir.params(sampling(6), capture=CAPTURE)])
    finally:
        weir.clear_global(named)
    check(out, [applied(args={"scale": 1.0})], truth)


def test_200_registrations_leave_nothing(llm):
    """Neither functions nor what they close over, whether or not a request has used them."""
    gc.collect()
    functions, before = [], len(_here)
    for k in range(200):
        big = torch.full((D,), float(k))

        def function(rows, ctx, big=big):
            return rows, {"it": rows @ big.to(rows.device)}

        functions.append(weakref.ref(function))
        weir.register_hook(llm, f"hook{k % 7}", function)
        if k % 10 == 0:
            (out,) = generated(
                llm, [prompt(6, k)], [weir.params(sampling(2), hooks=weir.Use(f"hook{k % 7}", layers=1))]
            )
            assert len(out.values["it"]) == 7
            del out
        if k % 7 == 6:
            for name in weir.list_hooks(llm):
                weir.unregister_hook(llm, name)
    for name in weir.list_hooks(llm):
        weir.unregister_hook(llm, name)
    del function
    generated(llm, [prompt(5)], [sampling(2)])  # a worker lets go of a request in the step after its last
    gc.collect()
    assert [k for k, one in enumerate(functions) if one() is not None] == [] and len(_here) == before
    assert weir.list_hooks(llm) == {}
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"name": "stear"}, "hooks[0].name", "did you mean 'steer'"),
        ({"args": {"v": 1.0}}, "hooks[0].args.v", "no such arg"),
        ({"args": {"w": [1.0]}}, "hooks[0].args.w", r"float32 \[128\], got \[1\]"),
        ({"args": {"scale": "x"}}, "hooks[0].args.scale", "registered as float"),
        ({"layers": 30}, "hooks[0].layers", "blocks 0..3"),
        ({"when": weir.When("nobody", above=0)}, "hooks[0].when.probe", "nobody"),
    ],
)
def test_refusals(named, asked, field, words):
    with pytest.raises(WeirError, match=words) as e:
        generated(named, [prompt(5)], [use(**asked)])
    assert e.value.field == field


def test_a_hook_that_cannot_be_served_is_not_registered(named):
    for hook, field in (
        (weir.Hook(probe_and_steer, layers=30), "hook.layers"),
        (5, "hook.function"),
    ):
        with pytest.raises(WeirError) as e:
            weir.register_hook(named, "steer", hook)
        assert e.value.field == field
    assert weir.list_hooks(named)["steer"]["layers"] == [1, 2]
    with pytest.raises(WeirError, match="no hook is registered under 'other'; registered are steer"):
        weir.unregister_hook(named, "other")


@pytest.mark.thorough
def test_an_async_engine(truth):
    """In a process of its own, where a function travels by its module."""

    async def run():
        engine = async_llm(directory())
        try:
            weir.register_hook(engine, "steer", weir.Hook(FUNCTION, **GIVEN))
            return [out async for out in engine.generate(prompt(20, 1), use(), request_id="one")][-1]
        finally:
            engine.shutdown()

    check(asyncio.run(run()), [applied()], truth)
