"""Requests that are thrown out of a KV cache too small for them and computed again: rows, records and steering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import vllm_weir as weir
from tests.engine.common import asking, assert_nothing_is_held, directory, prompts, sampling, verify
from tests.engine.probe_cases import preemptions
from tests.engine.test_compress import asked as compressed
from tests.engine.test_compress import decoded
from tests.support.engines import get_llm
from tests.support.machine import cpu, needs
from tests.support.named import ENGINES
from tests.support.references import reference
from tests.support.steered import check, prompt, vectors

pytestmark = pytest.mark.engine
SCARCE = ENGINES["scarce"].arguments
SELECTORS = ["all", "generated", "sampled", "prompt", "30:90:2", {"token_ids": list(range(0, 510, 2))}]
LENGTHS = (30, 31, 40, 33, 32, 35)
WITHOUT_CACHE = {"enable_prefix_caching": False}
WINDOWS = {"num_gpu_blocks_override": 14}  # blocks of two kinds of layers
LEFT = needs(cpu("blocks that the window has left are free again there: six requests fit"))
MODELS = [
    pytest.param(("llama", {}), id="llama"),
    *(
        pytest.param((family, more), id=name, marks=[pytest.mark.thorough, *marks])
        for name, family, more, *marks in (
            ("llama, no cache", "llama", WITHOUT_CACHE),
            ("gemma2", "gemma2", WINDOWS),
            ("mistral, no cache", "mistral", WITHOUT_CACHE, LEFT),
        )
    ),
]


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest, root) -> tuple[Any, Any]:
    family, more = request.param
    return get_llm(directory(root, family), **SCARCE | more), reference(directory(root, family))


@pytest.fixture(autouse=True)
def thrown_out(case) -> Iterator[list[int]]:
    """How many tokens had been computed of each request that was thrown out during the test."""
    llm, _ = case
    llm.reset_prefix_cache()
    with preemptions(llm) as found:
        yield found
    assert found, "nothing was preempted: this test shows nothing"
    assert any(computed > 45 for computed in found), "nobody had generated tokens to compute again"
    assert_nothing_is_held(llm)  # nor where the rows from before the preemptions were


def test_every_row_comes_once(case):
    llm, truth = case
    asked = [asking(selector, truth.num_layers, max_tokens=90) for selector in SELECTORS]
    outs = llm.generate(prompts(LENGTHS), [p for p, _ in asked], use_tqdm=False)
    for out, (_, wanted) in zip(outs, asked, strict=True):
        verify(out, wanted, truth)


def test_compressed_rows(case):
    llm, truth = case
    asked = [compressed(selector, "full8", 90, last=truth.num_layers - 1) for selector in SELECTORS]
    for out in llm.generate(prompts(LENGTHS), asked, use_tqdm=False):
        decoded(out, "full8", truth)
        assert not out.receipt.dropped


def test_tokens_computed_again_keep_their_own_steering(case):
    """Generated tokens come back in a prefill; they stay generated."""
    llm, truth = case
    d, v = truth.hidden_size, vectors(23)
    cases = [
        [weir.Add(2 * v(d), 1, positions="prompt"), weir.Add(2 * v(d), 1, positions="generated")],
        [weir.Add(v(d), 1, 2.0)],
        [weir.Add(v(d), [0, 2], positions="prompt"), weir.Clamp(v(d), 1, value=2.0, positions="generated")],
        [weir.Replace(v(20, d), 1, positions="40:60")],
        [weir.Add(3 * v(d), 1, hook="resid_pre", positions={"token_ids": list(range(0, 500, 3))})],
        [weir.Ablate(v(3, d), "all", positions="sampled")],
    ]
    everything = [weir.Capture("resid_post"), weir.Capture("resid_pre", 1)]
    params = [weir.params(sampling(70), capture=everything, interventions=case) for case in cases]
    outs = llm.generate([prompt(40, 60 + k) for k in range(len(cases))], params, use_tqdm=False)
    for out, interventions in zip(outs, cases, strict=True):
        check(out, interventions, truth)
        assert len(out.activations["resid_post", 0]) == 109
    assert outs[0].receipt.steered == ({("resid_post", 1): 40}, {("resid_post", 1): 69})
