"""Each model, one engine start each: greedy tokens, rows of every selector, chunks, the prefix cache, interventions."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

import vllm_weir as weir
from tests.engine.common import SELECTORS, asking, directory, prompts, sampling, tokens, verify
from tests.engine.test_steer_ops import EVERYTHING, every_case
from tests.support.engines import get_llm
from tests.support.machine import attention_heads, needs
from tests.support.models import MODELS, WORDS, head_size
from tests.support.references import reference
from tests.support.steered import SteeredOracle, check, chunks, prompt

pytestmark = pytest.mark.engine
WINDOWS = ("mistral", "gemma2", "gemma3")
FAST = (("llama", "a"), ("gemma2", "a"), ("gpt2", "a"))
"""Of the fast tier: two norms a block and four; learned positions. Of experts it has those of `test_inside_block`."""


class Model(NamedTuple):
    """A model, its engine and its reference."""

    family: str
    llm: Any
    truth: SteeredOracle


def cases() -> list[Any]:
    return [
        pytest.param(
            one,
            marks=[needs(attention_heads(head_size(*one))), *([] if one in FAST else [pytest.mark.thorough])],
            id="-".join(one),
        )
        for one in MODELS
    ]


@pytest.fixture(scope="module", params=cases())
def model(request: pytest.FixtureRequest, root) -> Model:
    where = directory(root, *request.param)
    return Model(request.param[0], get_llm(where, block_size=32, max_num_seqs=16), reference(where))


def test_greedy_tokens_equal_transformers(model):
    """What all other tests stand on; no request here asks anything of Weir, so it holds with `WEIR_DISABLE=1`, too."""
    draw = random.Random(1)
    given = [[draw.randrange(WORDS) for _ in range(length)] for length in (5, 23, 40)]  # 40: beyond the windows
    outs = model.llm.generate([{"prompt_token_ids": ids} for ids in given], sampling(12), use_tqdm=False)
    for ids, out in zip(given, outs, strict=True):
        made = list(out.outputs[0].token_ids)
        # Each is the one that follows what comes before it: together they are what greedy decoding makes.
        assert len(made) == 12 and made == model.truth.logits(ids + made[:-1])[len(ids) - 1 :].argmax(-1).tolist()
    assert model.llm.get_tokenizer().encode("w3 w7 w509") == [3, 7, 509]


def test_rows_equal_transformers(model):
    """Every selector at once in one batch, prompts from one token on."""
    asked = [asking(selector, model.truth.num_layers) for selector in SELECTORS]
    outs = model.llm.generate(prompts(), [params for params, _ in asked], use_tqdm=False)
    for out, (_, wanted) in zip(outs, asked, strict=True):
        verify(out, wanted, model.truth)

    # What leaves a block enters the next, bit for bit: both are read at one tap.
    params = weir.params(sampling(), capture=[weir.Capture("resid_post"), weir.Capture("resid_pre")])
    (out,) = model.llm.generate(prompts([20]), params, use_tqdm=False)
    for layer in range(1, model.truth.num_layers):
        assert out.activations["resid_pre", layer].equal(out.activations["resid_post", layer - 1])


def test_chunked_prefill_and_prefix_hits(model):
    """Chunks of 16 tokens, shared by up to 10 requests; the second round meets the first one's prefix cache."""
    asked = [asking(selector, model.truth.num_layers) for selector in SELECTORS]
    model.llm.reset_prefix_cache()
    hits = []
    for _ in range(2):
        with chunks(model.llm, 16):
            outs = model.llm.generate(prompts(), [params for params, _ in asked], use_tqdm=False)
        for out, (_, wanted) in zip(outs, asked, strict=True):
            verify(out, wanted, model.truth)
            assert out.receipt.cached_tokens == out.num_cached_tokens
            limit = out.receipt.hit_limit
            assert limit is None or out.num_cached_tokens <= limit
        hits.append([out.num_cached_tokens for out in outs])
    by_selector = dict(zip(map(str, SELECTORS), hits[1], strict=True))
    assert by_selector["all"] == by_selector["prompt"] == 0
    assert sum(hits[1]) > 0, hits


PROMPT = tokens(100, 3)
CAPS = [
    # selector, first wanted position, tokens from the cache with blocks of 32
    ("all", 0, 0),
    ("prompt", 0, 0),
    ("last_prompt", 99, 96),
    ("sampled", 99, 96),
    ("generated", 100, 96),
    ("40:", 40, 32),
    ([70, 90], 70, 64),
    (-1, 99, 96),
    ([10_000, 101], 101, 96),
    ({"token_ids": [PROMPT[66]]}, PROMPT.index(PROMPT[66]), PROMPT.index(PROMPT[66]) // 32 * 32),
    ({"token_ids": [513]}, 100, 96),
    ({"not_token_ids": PROMPT[:66]}, next(p for p, t in enumerate(PROMPT) if t not in PROMPT[:66]), 64),
    ({"not_token_ids": PROMPT}, 100, 96),
]


def test_a_capture_caps_the_prefix_hit_at_its_first_position(model):
    llm, given = model.llm, {"prompt_token_ids": PROMPT}
    llm.reset_prefix_cache()
    with chunks(llm, 16):
        llm.generate(given, sampling(2), use_tqdm=False)
        (plain,) = llm.generate(given, sampling(2), use_tqdm=False)
        assert plain.num_cached_tokens == 96 and plain.activations is None
        for selector, limit, cached in CAPS:
            params, wanted = asking(selector, model.truth.num_layers, max_tokens=4)
            (out,) = llm.generate(given, params, use_tqdm=False)
            verify(out, wanted, model.truth)
            assert out.receipt.hit_limit == limit, selector
            hit = out.receipt.cached_tokens
            # Where some layers have a window, vLLM has let go of the blocks before it.
            assert hit == cached or (model.family in WINDOWS and hit < cached), selector
        (plain,) = llm.generate(given, sampling(2), use_tqdm=False)
        assert plain.num_cached_tokens == 96


@pytest.mark.parametrize(
    ("size", "every"),
    [(None, 7), (7, 17), *(pytest.param(*more, marks=pytest.mark.thorough) for more in ((16, 5), (1, 43)))],
)
def test_every_intervention_at_every_selector(model, size, every):
    """`size`: tokens a step. Each `every`-th case; the numbers are prime to those of kinds and selectors."""
    asked = every_case(model.truth.hidden_size)[::every]
    assert len(asked) >= 6
    texts = [prompt(11 + (5 * k) % 21, k) for k in range(len(asked))]
    params = [weir.params(sampling(4), capture=EVERYTHING, interventions=case) for case in asked]
    with chunks(model.llm, size):
        outs = model.llm.generate(texts, params, use_tqdm=False)
    for out, case in zip(outs, asked, strict=True):
        check(out, case, model.truth)
        assert len(out.activations["resid_post", 0]) == len(out.prompt_token_ids) + 3
