"""Selectors by what a token is not, and by the tokenizer's special tokens: rows and steering are the reference's."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import verify
from tests.support.check import expected_positions
from tests.support.engines import get_llm
from tests.support.measure import rel_err, rounding
from tests.support.models import BOS, EOS, PAD, UNK
from tests.support.named import ENGINES
from tests.support.steered import chunks, directory, idle, sampling, tokens, truth, vectors
from vllm_weir.codec import decode, encode
from vllm_weir.schema.compression import Compression

pytestmark = pytest.mark.engine("small")  # prompts of 100 tokens come in two chunks
ENGINE = ENGINES["small"].arguments
LAYERS = 4
MIXED = [PAD, BOS, EOS, UNK, 3, 7, 20, 33]
"""What may be generated: the four special tokens, and four words."""


@pytest.fixture
def oracle(truth):
    return truth


@pytest.fixture
def special(llm):
    ids = sorted(llm.get_tokenizer().all_special_ids)
    assert ids == sorted([PAD, BOS, EOS, UNK])
    return ids


def chat(length: int = 100, seed: int = 0) -> dict[str, list[int]]:
    """A prompt that begins with the BOS token, and has special tokens between its turns."""
    ids = [BOS, *tokens(length - 1, seed)]
    ids[length // 3] = ids[length // 2] = EOS
    return {"prompt_token_ids": ids}


def mixed(max_tokens: int = 24, **more):
    # The models' own logits of special tokens are low.
    bias = dict.fromkeys(MIXED[:4], 4.0)
    return sampling(max_tokens, temperature=2.0, allowed_token_ids=MIXED, logit_bias=bias, **more)


def known(selector, special):
    """The same selector with its tokens named."""
    if selector == {"special": True}:
        return {"token_ids": special}
    return {"not_token_ids": special} if selector == {"special": False} else selector


SELECTORS = [{"special": False}, {"special": True}, {"not_token_ids": [3, 7, EOS]}, {"token_ids": [20, UNK]}]


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_rows_in_chunks_and_from_the_cache(llm, oracle, special, selector):
    capture = [weir.Capture("resid_post", positions=selector), weir.Capture("embed", positions=selector)]
    wanted = {("resid_post", layer): [known(selector, special)] for layer in range(LAYERS)}
    first = [*expected_positions(known(selector, special), 100, 1, chat()["prompt_token_ids"]), 100][0]
    llm.generate(chat(), sampling(1), use_tqdm=False)
    for again in range(2):
        outs = llm.generate([chat(), chat(41, 3)], weir.params(mixed(), capture=capture), use_tqdm=False)
        for out in outs:
            made = set(out.outputs[0].token_ids)
            assert made & set(special) and made - set(special), "the tokens show nothing"
            embed = weir.Site("embed", 0)
            assert torch.equal(out.activations.positions_of(embed), out.activations.positions_of("resid_post", 0))
            rows = {site: rows for site, rows in out.activations.to_dict().items() if site != embed}
            assert len(rows) == LAYERS
            verify(out, wanted | {tuple(embed): wanted["resid_post", 0]}, oracle)
        # A hit goes as far as the block of the first position that is wanted, however the rows were asked for.
        assert (outs[0].receipt.hit_limit, outs[0].receipt.cached_tokens) == (first, first // 32 * 32), again


def test_rows_that_are_reduced_projected_and_compressed(llm, oracle, special):
    directions = vectors(3)(2, oracle.hidden_size)
    for selector in SELECTORS[:3]:
        ways = [{"reduce": how} for how in ("last", "mean", "max")]
        ways += [{"project": directions}, {"project": directions, "reduce": "max"}, {"compress": "full8"}]
        params = [weir.params(mixed(), capture=weir.Capture(layers=1, positions=selector, **way)) for way in ways]
        for out, way in zip(llm.generate([chat(40, 5)] * len(ways), params, use_tqdm=False), ways, strict=True):
            ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
            at = expected_positions(known(selector, special), 40, 24, ids)
            rows = oracle.rows(ids[:-1], [("resid_post", 1)])["resid_post", 1][at]
            size = 1.0  # of what is summed, over the largest sum
            if "project" in way:
                size = float(rows.norm(dim=1).max() * directions.norm(dim=1).max() / (rows @ directions.T).abs().max())
                rows = rows @ directions.T
            if "reduce" in way:
                rows = {"last": rows[-1:], "mean": rows.mean(0, True), "max": rows.amax(0, True)}[way["reduce"]]
            got = out.activations["resid_post", 1]
            assert out.activations.positions.tolist() == (at[-1:] if "reduce" in way else at)
            if "compress" in way:
                header = out.activations.compressed("resid_post", 1)[1]
                assert rel_err(got, decode(encode(rows, Compression("full8")), header)) <= 1e-2
            else:
                assert rel_err(got, rows) <= rounding() * size, way


def cases(v, d, special):
    """Interventions, and the same with the tokens named, for the reference."""
    made = [
        [(weir.Add, (3 * v(d), 1), selector)] for selector in SELECTORS
    ] + [
        [(weir.Ablate, (v(d), "all"), {"special": False}), (weir.Add, (2 * v(d), 1), {"special": True})],
        [(weir.Add, (2 * v(d), 1), s) for s in SELECTORS],  # as many as a request may have
        [(weir.Add, (v(9, d), 1), "100:109"), (weir.Replace, (v(d), 2, 0.5), {"special": False})],
        [(weir.Clamp, (v(d), 1), {"not_token_ids": [3]})],
    ]  # fmt: skip
    for case in made:
        more = [{"max": 0.0} if kind is weir.Clamp else {} for kind, _, _ in case]
        yield (
            [kind(*given, positions=at, **m) for (kind, given, at), m in zip(case, more, strict=True)],
            [kind(*given, positions=known(at, special), **m) for (kind, given, at), m in zip(case, more, strict=True)],
        )


@pytest.mark.parametrize("budget", [64, 7])
def test_steering_in_chunks_and_from_the_cache(llm, oracle, special, budget):
    capture = [weir.Capture("resid_post", positions="sampled"), weir.Capture("resid_pre", 2, "generated")]
    asked = list(cases(vectors(7), oracle.hidden_size, special))
    prompts = [chat(100, k) for k in range(len(asked))]
    params = [weir.params(mixed(), capture=capture, interventions=case) for case, _ in asked]
    for again in range(2):
        with chunks(llm, budget):
            outs = llm.generate(prompts, params, use_tqdm=False)
        for out, (_, case) in zip(outs, asked, strict=True):
            assert bool(out.num_cached_tokens) == bool(again)
            check(out, case, oracle)
    assert idle(llm)


def check(out, case, oracle):
    ids, P = [*out.prompt_token_ids, *out.outputs[0].token_ids], len(out.prompt_token_ids)
    rows, _ = oracle.steered(ids[:-1], P, case, sites=out.activations.sites)
    for site in out.activations.sites:
        assert rel_err(out.activations[site], rows[tuple(site)][out.activations.positions_of(*site)]) <= rounding(), (
            case
        )
    for item, sites, shared in zip(case, out.receipt.steered, out.receipt.shared, strict=True):
        at = expected_positions(item.positions.to_json(), P, len(ids) - P, ids)
        if item.op == "add" and item.vector.array.ndim == 2:
            at = at[: len(item.vector.array)]
        assert set(sites.values()) == {sum(p >= out.num_cached_tokens for p in at)}
        assert shared == sum(p < out.num_cached_tokens for p in at)


def test_equal_effects_share_the_cache(llm, oracle, special):
    """Whether the tokens are named by the tokenizer, one by one, or by position; what acts on others does not."""
    v = 3 * vectors(1)(oracle.hidden_size)
    at = expected_positions({"not_token_ids": special}, 100, 1, chat()["prompt_token_ids"])

    def cached(positions):
        params = weir.params(sampling(2), interventions=weir.Add(v, 1, positions=positions))
        return llm.generate(chat(), params, use_tqdm=False)[0].num_cached_tokens

    assert cached({"special": False}) == 0
    assert [cached(p) for p in ({"special": False}, {"not_token_ids": special}, at)] == [96, 96, 96]
    assert cached("all") == 0 and cached({"special": True}) == 0 and cached({"special": True}) == 96


def test_every_request(llm, oracle, special):
    v = 3 * vectors(2)(oracle.hidden_size)
    weir.set_global(llm, weir.Add(v, 1, positions={"special": False}))
    try:
        params = weir.params(mixed(), capture=weir.Capture("resid_post", positions="sampled"))
        (out,) = llm.generate(chat(), params, use_tqdm=False)
    finally:
        weir.clear_global(llm)
    check(out, [weir.Add(v, 1, positions={"not_token_ids": special})], oracle)


def test_an_engine_without_a_tokenizer():
    llm = get_llm(directory(), skip_tokenizer_init=True, **ENGINE)
    prompt, base = chat(9), sampling(3, detokenize=False)
    for selector in ({"special": False}, {"special": True}):
        for weir_object in (
            {"capture": weir.Capture(positions=selector)},
            {"interventions": weir.Add(torch.ones(128), 1, positions=selector)},
        ):
            with pytest.raises(weir.WeirError, match="skip_tokenizer_init") as e:
                llm.generate(prompt, weir.params(base, **weir_object), use_tqdm=False)
            assert e.value.field == f"{next(iter(weir_object))}[0].positions.special"
    named = weir.Capture(layers=1, positions={"not_token_ids": [PAD, BOS, EOS, UNK]})
    (out,) = llm.generate(prompt, weir.params(base, capture=named), use_tqdm=False)
    assert out.activations.positions.tolist() == [1, 2, 5, 6, 7, 8, 9, 10]


def test_prompts_of_embeddings_have_no_tokens():
    llm = get_llm(directory(), enable_prompt_embeds=True, **ENGINE)
    embeddings = truth(directory()).model.get_input_embeddings().weight.detach()
    whole = {"prompt_embeds": embeddings[tokens(9)]}
    parts = whole | {"prompt_token_ids": tokens(9), "prompt_is_token_ids": [True] * 8 + [False]}
    for prompt in (whole, parts):
        for selector in SELECTORS:
            with pytest.raises(weir.WeirError, match="given as embeddings"):
                llm.generate(prompt, weir.params(sampling(3), capture=weir.Capture(positions=selector)), use_tqdm=False)
        capture = weir.Capture(layers=1, positions=[0, 600])
        (out,) = llm.generate(prompt, weir.params(sampling(3), capture=capture), use_tqdm=False)
        assert out.activations.positions.tolist() == [0] and out.activations.token_ids.tolist() == [-1]
        for selector, max_tokens in (([600], 3), ("generated", 1)):
            params = weir.params(sampling(max_tokens), capture=weir.Capture(positions=selector))
            with pytest.raises(weir.WeirError, match="selects no row"):
                llm.generate(prompt, params, use_tqdm=False)
