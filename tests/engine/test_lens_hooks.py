"""vllm-lens's hooks on a live engine, against transformers with the same functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held
from tests.support.hook_functions import Applied
from tests.support.measure import alike, rel_err
from tests.support.steered import check, chunks, generated, prompt, same_answers, sampling, vectors
from vllm_weir.errors import WeirError
from vllm_weir.worker.own_function import HookContext

pytestmark = pytest.mark.engine("default")
D = 128


def pushed(ctx, rows):
    """What it is given, and how much at once; new rows."""
    ctx.saved.setdefault("parts", []).append(rows.cpu())
    ctx.saved.setdefault("lens", []).append((ctx.layer_idx, ctx.seq_len))
    return rows + torch.tanh(rows)


def halved(ctx, rows):
    ctx.saved["calls"] = ctx.saved.get("calls", 0) + 1
    return rows / 2


def seen(ctx, rows):
    ctx.saved["seen"] = True
    ctx.saved.setdefault("parts", []).append(rows.clone())


def applied(fn, layers, pre=False):
    """The same in the reference."""
    hook = weir.Hook(lambda rows, ctx: rows, "resid_pre" if pre else "resid_post", layers)
    return Applied(lambda rows, ctx: fn(SimpleNamespace(saved={}, layer_idx=0, seq_len=0), rows), hook, {})


def asked(hooks, steering=(), layers=True):
    extra = {"apply_hooks": hooks, "apply_steering_vectors": list(steering), "output_residual_stream": layers}
    return sampling(5, extra_args=extra)


def test_hooks_of_a_request(llm, truth):
    """After steering, in their order, before or after a block; others in the batch keep their bits."""
    hooks = [weir.Hook(fn=pushed, layer_indices=[1, 2]), weir.Hook(fn=halved, layer_indices=[2], pre=True)]
    hooks.append(SimpleNamespace(fn=seen, layer_indices=[2], pre=False))
    v = vectors(3)(1, D)
    params = asked(hooks, [weir.SteeringVector(v, [1])])
    plain, texts = sampling(5, logprobs=3), [prompt(25, 1), prompt(25, 2)]
    with chunks(llm, 10):
        before = generated(llm, texts, plain)
        llm.reset_prefix_cache()
        out, other = generated(llm, texts, [params, plain])
    assert same_answers([other], before[1:]) and other.hook_results is None
    wanted = [weir.Add(v[0], 1), applied(pushed, [1, 2]), applied(halved, [2], True), applied(seen, [2])]
    check(out, wanted, truth)
    results = out.hook_results
    assert results.keys() == {"0", "1", "2"} and out.saved == {} and params.extra_args["apply_hooks"] is hooks
    assert {layer for layer, _ in results["0"]["lens"]} == {1, 2} and results["1"]["calls"] == len(
        results["2"]["parts"]
    )
    assert sum(n for layer, n in results["0"]["lens"] if layer == 1) == 29
    assert all(n == len(rows) for (_, n), rows in zip(results["0"]["lens"], results["0"]["parts"], strict=True))
    rows = torch.cat(results["2"]["parts"])
    assert alike(rows, out.activations["residual_stream"][2]), "what is captured comes after all hooks"
    del out, other, before
    assert_nothing_is_held(llm)


def test_registered_hooks(llm, truth):
    """They act on every request, before its own, and what they save is collected until they are cleared."""
    llm.register_hooks([weir.Hook(fn=pushed, layer_indices=[1])], prefetch_params=["lm_head.weight"])
    llm.register_hooks([weir.Hook(fn=seen, layer_indices=[0])])
    try:
        assert llm.collect_hook_results() == {}
        own = asked([weir.Hook(fn=halved, layer_indices=[1])])
        out, plain = generated(llm, [prompt(12, 1), prompt(12, 2)], [own, sampling(5)])
        assert plain.hook_results is None and plain.saved is None and out.hook_results == {"0": {"calls": 5}}
        check(out, [applied(pushed, [1]), applied(halved, [1])], truth)
        ids = list(plain.prompt_token_ids) + list(plain.outputs[0].token_ids)
        logits = truth.steered(ids[:-1], 12, [applied(pushed, [1])], sites=())[1]
        assert ids[12:] == logits[11:].argmax(-1).tolist()
        found = llm.collect_hook_results()
        assert len(found) == 2 and found.keys() == llm.collect_hook_results().keys()
        for results in found.values():
            assert {*results} == {"0", "1"} and results["1"]["seen"] is True
            assert len(torch.cat(results["0"]["parts"])) == 16
        want = truth.steered(ids[:-1], 12, [], sites=())[0]["resid_post", 0]
        assert min(rel_err(torch.cat(one["1"]["parts"]), want) for one in found.values()) < 1e-5
        with pytest.raises(WeirError, match=r"blocks 0\.\.3") as e:
            llm.register_hooks([weir.Hook(fn=seen, layer_indices=[9])])
        assert e.value.field == "register_hooks[2].layer_indices"
    finally:
        llm.clear_hooks()
    assert llm.collect_hook_results() == {}
    (plain,) = generated(llm, [prompt(12, 2)], sampling(5))
    logits = truth.steered((ids[:12] + list(plain.outputs[0].token_ids))[:-1], 12, [], sites=())[1]
    assert list(plain.outputs[0].token_ids) == logits[11:].argmax(-1).tolist()
    llm.prefetch_params(["lm_head.weight"])
    llm.clear_prefetched()
    del plain, out, found
    assert_nothing_is_held(llm)


def test_a_hook_that_fails(llm):
    """vLLM-lens logs it and goes on without; here its request fails."""

    def broken(ctx, rows):
        raise ValueError("enough")

    with pytest.raises(WeirError, match=r"ValueError: enough .line .* of broken") as e:
        generated(llm, [prompt(5)], [asked([weir.Hook(fn=broken, layer_indices=[1])])])
    del e
    with pytest.raises(WeirError, match=r"blocks 0\.\.3") as e:
        llm.generate(prompt(5), asked([weir.Hook(fn=seen, layer_indices=[9])]), use_tqdm=False)
    assert e.value.field == "apply_hooks[0].layer_indices"
    del e
    assert_nothing_is_held(llm)


@pytest.mark.xfail(not hasattr(HookContext, "parameter"), reason="contexts have no weights", strict=True)
def test_weights(llm, truth):
    def unembedded(ctx, rows):
        ctx.saved["top"] = (rows @ ctx.get_parameter("lm_head.weight").T).argmax(1)

    (out,) = generated(llm, [prompt(9, 1)], [asked([weir.Hook(fn=unembedded, layer_indices=[3])])])
    weight = truth.model.lm_head.weight
    rows = out.activations["residual_stream"][3].float()
    assert (out.hook_results["0"]["top"] == (rows[-1:] @ weight.T).argmax(1)).all()
