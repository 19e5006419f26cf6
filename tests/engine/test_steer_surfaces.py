"""Other ways in: vllm-lens's key, tiers, names, globals, n > 1, chat, LoRA."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import vllm_weir as weir
from tests.support.adapters import adapter
from tests.support.engines import get_llm
from tests.support.machine import cpu, needs
from tests.support.measure import rel_err, rounding
from tests.support.steered import (
    SteeredOracle,
    check,
    directory,
    idle,
    prompt,
    sampling,
    tokens,
    truth,
    vectors,
)

pytestmark = pytest.mark.engine("steering")
EVERYTHING = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
D = 128


class Theirs:
    """The attributes of vllm-lens's own class."""

    def __init__(self, activations, layer_indices, scale=1.0, norm_match=False, position_indices=None):
        self.activations, self.layer_indices, self.scale = activations, layer_indices, scale
        self.norm_match, self.position_indices = norm_match, position_indices


@pytest.mark.parametrize("norm_match", [False, True])
@pytest.mark.parametrize("shape", ["2-D", "3-D", "3-D at positions"])
def test_vllm_lens_key(engine, shape, norm_match):
    llm, oracle = engine
    v = vectors(41)
    more = {"layer_indices": [2, 0], "scale": 0.6, "norm_match": norm_match}
    if shape == "2-D":
        rows, at = v(2, D), "all"
        want = [weir.Add(rows[k], layer, 0.6, norm_match=norm_match) for k, layer in ((0, 2), (1, 0))]
    else:
        rows = v(2, 3, D)
        at = [0, 1, 2] if shape == "3-D" else [11, 0, 21]
        want = [
            weir.Add(rows[k, j], layer, 0.6, positions=[p], norm_match=norm_match)
            for k, layer in ((0, 2), (1, 0))
            for j, p in enumerate(at)
        ]
        if shape != "3-D":
            more["position_indices"] = at
    live = weir.SteeringVector(rows, **more)
    forms = [[live], live, [live.to_json()], json.dumps([live.to_json()]), [Theirs(rows, **more)]]
    asked = []
    for form in forms:
        params = weir.params(sampling(6), capture=EVERYTHING)
        params.extra_args["apply_steering_vectors"] = form
        asked.append(params)
    for out in llm.generate([prompt(20, 8)] * len(forms), asked, use_tqdm=False):
        check(out, want, oracle)
        assert len(out.receipt.steered) == 2
    # With its capture key too, and without Weir's.
    params = sampling(6)
    params.extra_args = {"output_residual_stream": [1, 3], "apply_steering_vectors": [live]}
    (out,) = llm.generate(prompt(20, 8), params, use_tqdm=False)
    check(out, want, oracle)
    assert out.activations["residual_stream"].shape == (2, 25, D)
    assert params.extra_args["apply_steering_vectors"] == [live] and live.activations is rows


def test_tiers(engine):
    llm, oracle = engine
    v = vectors(42)
    a, b, c, m = (v(D) for _ in range(4))
    made = weir.from_tiers(
        {"post_mlp": {1: a.tolist()}},
        {"pre_attn": {2: {"vector": b.tolist(), "scale": 0.5}}},
        {"post_mlp": {0: c.tolist()}},
        ("warm", 2.0),
        {"warm": {"vectors": {"post_mlp": {3: m.tolist()}}, "decode_vectors": {"post_mlp": {3: m.tolist()}}}},
    )
    want = [
        weir.Add(m, 3, 2.0),
        weir.Add(m, 3, 2.0, positions="generated"),
        weir.Add(a, 1),
        weir.Add(b, 2, 0.5, hook="resid_pre", positions="prompt"),
        weir.Add(c, 0, positions="generated"),
    ]
    (out,) = llm.generate(
        prompt(20, 9), weir.params(sampling(8), capture=EVERYTHING, interventions=made), use_tqdm=False
    )
    check(out, want, oracle)


def test_names(engine):
    llm, oracle = engine
    v = vectors(43)
    row, matrix = v(D), v(2, D)
    digest = weir.register(llm, "calm", row)
    weir.register(llm, "pair", matrix)
    assert weir.list(llm) == weir.list_vectors(llm)
    assert weir.list(llm)["calm"] == {"digest": digest, "shape": [D]} and weir.list(llm)["pair"]["shape"] == [2, D]
    for reference in ("calm", digest, {"ref": "calm"}):
        case = [weir.Add(reference, 1, 2.0), weir.Ablate("pair", 2)]
        (out,) = llm.generate(
            prompt(15, 1), weir.params(sampling(5), capture=EVERYTHING, interventions=case), use_tqdm=False
        )
        check(out, [weir.Add(row, 1, 2.0), weir.Ablate(matrix, 2)], oracle)
    weir.unregister(llm, "calm")
    with pytest.raises(weir.WeirError) as caught:
        weir.unregister(llm, "calm")
    assert caught.value.field == "name"
    with pytest.raises(weir.WeirError) as caught:
        llm.generate(prompt(15, 1), weir.params(sampling(5), interventions=weir.Add("calm", 1)), use_tqdm=False)
    assert caught.value.field == "interventions[0].vector"
    with pytest.raises(weir.WeirError):
        weir.register(llm, "bad", [float("nan")] * D)
    weir.unregister(llm, "pair")
    assert weir.list(llm) == {}
    with pytest.raises(weir.WeirError):
        weir.register(SimpleNamespace(), "x", row)


def test_globals(engine):
    llm, oracle = engine
    v = vectors(44)
    first, second, own = ([weir.Add(2 * v(D), k)] for k in (1, 2, 3))

    def plain():
        return llm.generate(prompt(25, 2), sampling(6), use_tqdm=False)[0]

    def right(out, case):
        made = list(out.outputs[0].token_ids)
        assert made == oracle.steered_greedy(tokens(25, 2), 6, case, made)

    try:
        right(plain(), [])
        weir.set_global(llm, first)
        out = plain()
        right(out, first)
        assert sum(out.receipt.steered[0].values()) + out.receipt.shared[0] == 30
        (out,) = llm.generate(
            prompt(25, 2), weir.params(sampling(6), capture=EVERYTHING, interventions=own), use_tqdm=False
        )
        check(out, first + own, oracle)
        assert len(out.receipt.steered) == 2
        for refused in (weir.Add(v(D + 1), 1), weir.Add(v(D), 99), weir.Add("nobody", 1), {"op": "shout"}):
            with pytest.raises(weir.WeirError):
                weir.set_global(llm, [*second, refused])
            right(plain(), first)
        weir.set_global(llm, second)
        right(plain(), second)
    finally:
        weir.clear_global(llm)
    right(plain(), [])
    assert plain().receipt is None
    assert idle(llm)


@pytest.mark.parametrize("seed", [3, None])
def test_every_sequence_of_n_is_steered(engine, seed):
    """Without a seed vLLM gives all of them the same params object."""
    llm, oracle = engine
    case = [weir.Add(2 * vectors(47)(D), 1), weir.Clamp(vectors(48)(D), 2, value=3.0, positions="generated")]
    params = weir.params(sampling(6, n=4, temperature=1.5, seed=seed), capture=EVERYTHING, interventions=case)
    (out,) = llm.generate(prompt(20, 3), params, use_tqdm=False)
    assert len({tuple(o.token_ids) for o in out.outputs}) > 1
    ids = tokens(20, 3)
    for one in out.outputs:
        rows, _ = oracle.steered((ids + list(one.token_ids))[:-1], 20, case, sites=one.activations.sites)
        for site in one.activations.sites:
            at = one.activations.positions_of(*site)
            assert at.tolist() == list(range(25))
            assert rel_err(one.activations[site], rows[tuple(site)][at]) <= rounding()
        for sites, cached, total in zip(one.receipt.steered, one.receipt.shared, (25, 5), strict=True):
            assert sum(sites.values()) + cached == total


def test_chat(engine):
    llm, oracle = engine
    case = [weir.Add(2 * vectors(49)(D), 1)]
    (out,) = llm.chat(
        [{"role": "user", "content": "w1 w2 w3 w4"}],
        weir.params(sampling(6), capture=EVERYTHING, interventions=case),
        use_tqdm=False,
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}w7",
    )
    assert out.prompt_token_ids == [1, 2, 3, 4, 7]
    check(out, case, oracle)


@needs(cpu("vLLM's LoRA kernels for GPUs take no float32"))
def test_lora_and_steering_compose(tmp_path):
    from vllm.lora.request import LoRARequest

    model_dir = directory()
    added = adapter(model_dir, tmp_path)
    merged = SteeredOracle(model_dir)
    with torch.no_grad():
        weights = dict(merged.model.named_parameters())
        for name, delta in added.items():
            weights[name] += delta
    llm = get_llm(model_dir, block_size=32, max_num_seqs=16, enable_lora=True, max_lora_rank=8)
    case = [weir.Add(2 * vectors(51)(D), 1), weir.Ablate(vectors(52)(D), "all", positions="generated")]
    request = LoRARequest("tiny", 1, str(tmp_path))
    params = weir.params(sampling(6), capture=EVERYTHING, interventions=case)
    # Not in one batch: on CPU stock vLLM itself then gives the adapter to both.
    for _ in range(2):
        ((one,), (other,)) = (
            llm.generate(prompt(70, 4), params, lora_request=adapted, use_tqdm=False) for adapted in (request, None)
        )
        check(one, case, merged)
        check(other, case, truth(model_dir))
        assert one.outputs[0].token_ids != other.outputs[0].token_ids
    cached = [
        llm.generate(prompt(70, 4), weir.params(sampling(2), interventions=c), lora_request=r, use_tqdm=False)[0]
        for c, r in ((case, request), (case, None), ([], request), ([], None), (case, request))
    ]
    # An adapter's blocks, steered or not, are its own; the first two meet what the loop left.
    assert [out.num_cached_tokens for out in cached] == [64, 64, 0, 0, 64]
