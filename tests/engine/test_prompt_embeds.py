"""Engines that take prompts as embeddings: `embed` is served to requests with tokens, in one batch with the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import vllm_weir as weir
from tests.conformance.oracle import Oracle, Rows
from tests.engine.common import assert_nothing_is_held, directory, ids_of, sampling, tokens
from tests.engine.test_points import DENSE
from tests.support.engines import get_llm
from tests.support.machine import inductor, needs
from tests.support.measure import alike, rel_err, rounding
from tests.support.named import ENGINES

pytestmark = pytest.mark.engine
BOUND = rounding()
UNGATED = ("gpt2", "opt")
"""Families whose MLP has no gate."""
FAMILIES = {  # what a model does to the embeddings that it is given
    "llama": "nothing",
    "gpt2": "positions are added",
    "gemma3": "they are scaled as they are looked up",
    "opt": "positions are added",
}


def hooks(family: str = "llama") -> set[str]:
    """The hook points that a family has."""
    return set(DENSE) - ({"mlp_pre_linear"} if family in UNGATED else set())


def every(family: str = "llama") -> list[weir.Capture]:
    return [weir.Capture(hook) for hook in DENSE if hook in hooks(family)]


def start(root, family, **more):
    return get_llm(directory(root, family), **ENGINES["small"].arguments, enable_prompt_embeds=True, **more)


class Case(NamedTuple):
    """A family, its engine and its reference."""

    family: str
    llm: Any
    truth: Oracle


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ("llama", "gemma3") else pytest.mark.thorough) for name in FAMILIES],
)
def case(request: pytest.FixtureRequest, root) -> Case:
    family = request.param
    return Case(family, start(root, family), Oracle(directory(root, family)))


def embedded(truth: Oracle, ids: list[int]) -> torch.Tensor:
    """What vLLM takes for the embeddings of these tokens: what transformers' embedding layer returns."""
    with torch.no_grad():
        return truth.model.get_input_embeddings()(torch.tensor(ids))


def wrong(out: Any, truth: Oracle, read: Callable[[], tuple[Rows, torch.Tensor]]) -> str:
    """Which points are wrong, and how far the engine and transformers, which `read` asks, are from float64.

    A point that is far from transformers' fp32 has to be as near to its float64.
    """
    reference, _ = read()
    far_off = [site for site in out.activations.sites if rel_err(out.activations[site], reference[tuple(site)]) > BOUND]
    if not far_off:
        return ""
    truth.model.double()
    try:
        exact, _ = read()
    finally:
        truth.model.float()
    found = [site for site in far_off if rel_err(out.activations[site], exact[tuple(site)]) > BOUND]
    inside = sorted(found, key=lambda site: (site.layer, list(DENSE).index(site.hook)))[:8]
    return "\n".join(
        f"{site} of {len(found)}: {far(out.activations[site], reference[tuple(site)], exact[tuple(site)])}"
        for site in inside
    )


def far(got: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> str:
    """How far two fp32 results [n, ...] are from the exact one, and in which rows the first is."""
    room = BOUND * exact[exact.isfinite()].abs().max()
    right = torch.isclose(got.double(), exact, rtol=0, atol=float(room)).flatten(1).all(1)
    rows = (~right).nonzero().flatten().tolist()
    return f"engine {rel_err(got, exact):.1e}, transformers {rel_err(reference, exact):.1e}, in {rows}"


def test_rows_in_mixed_batches(case):
    """Chunked prompts, decoding, neighbours with embeddings and without Weir's keys: against transformers, twice."""
    family, llm, truth = case
    llm.reset_prefix_cache()
    assert {v.hook for v in weir.sites(llm) if v.supported} == hooks(family)
    prompts, asked = [], []
    for n, length in enumerate((70, 33, 5, 64, 1, 20)):
        ids = tokens(length, n)
        prompts.append({"prompt_embeds": embedded(truth, ids)} if n % 3 == 1 else {"prompt_token_ids": ids})
        inside = [capture for capture in every(family) if capture.hook != "embed" or n % 3 != 1]
        asked.append(sampling(6) if n % 3 == 2 else weir.params(sampling(6), capture=inside))
    for _ in range(2):  # the second time prompts are in the prefix cache
        outs = llm.generate(prompts, asked, use_tqdm=False)
        for n, (out, length) in enumerate(zip(outs, (70, 33, 5, 64, 1, 20), strict=True)):
            if n % 3 == 2:
                assert out.activations is None
                continue
            ids = [*tokens(length, n), *out.outputs[0].token_ids][:-1]
            rows, _ = truth.points(ids)
            assert {tuple(site) for site in out.activations.sites} == {
                site for site in rows if n % 3 != 1 or site[0] != "embed"
            }
            assert all(out.activations[site].shape == rows[tuple(site)].shape for site in out.activations.sites)
            assert wrong(out, truth, partial(truth.points, ids)) == "", n
    del outs, out
    assert_nothing_is_held(llm)


def test_what_is_added_at_embed_arrives(case):
    """Next to a request with embeddings and one without keys, which are what they are alone."""
    family, llm, truth = case
    llm.reset_prefix_cache()
    size = 2.0 * embedded(truth, [7]).abs().mean()
    v = size * torch.randn(truth.hidden_size, generator=torch.Generator().manual_seed(3))
    ids, others = tokens(20), [{"prompt_embeds": embedded(truth, tokens(9, 1))}, {"prompt_token_ids": tokens(30, 2)}]
    alone = [out.outputs[0].token_ids for out in llm.generate(others, sampling(5), use_tqdm=False)]
    add = weir.params(sampling(5), capture=every(family), interventions=weir.Add(v, 0, hook="embed", positions="2:"))
    out, *beside = llm.generate([{"prompt_token_ids": ids}, *others], [add, sampling(5), sampling(5)], use_tqdm=False)
    ids = ids_of(out)[:-1]
    assert wrong(out, truth, partial(truth.steer, ids, "embed", 0, v, list(range(2, len(ids))))) == ""
    assert [other.outputs[0].token_ids for other in beside] == alone
    early = weir.params(
        sampling(1), capture=weir.Capture("embed", before=True), interventions=weir.Add(v, 0, hook="embed")
    )
    (out,) = llm.generate({"prompt_token_ids": tokens(20)}, early, use_tqdm=False)
    assert rel_err(out.activations["embed"], truth.points(tokens(20))[0]["embed", 0]) <= BOUND


def test_the_request_with_embeddings_is_refused_and_no_other(case):
    """By a capture and by an intervention; the way out that the refusal names gives what the prompt was."""
    family, llm, truth = case
    given = embedded(truth, tokens(9))
    vector = torch.ones(truth.hidden_size)
    for asked, field in (
        ({"capture": weir.Capture("embed")}, "capture[0].hook"),
        (
            {"capture": [weir.Capture("resid_post"), weir.Capture("hook_embed", positions="generated")]},
            "capture[1].hook",
        ),
        ({"interventions": weir.Add(vector, 0, hook="embed")}, "interventions[0].hook"),
    ):
        with pytest.raises(weir.WeirError, match=r"is given as embeddings.*resid_pre at layer 0") as e:
            llm.generate({"prompt_embeds": given}, weir.params(sampling(2), **asked), use_tqdm=False)
        assert e.value.field == field
        (out,) = llm.generate({"prompt_token_ids": tokens(9)}, weir.params(sampling(2), **asked), use_tqdm=False)
        assert out.receipt.prompt_tokens == 9
    asked = weir.params(sampling(1), capture=weir.Capture("resid_pre", 0))
    (out,) = llm.generate({"prompt_embeds": given}, asked, use_tqdm=False)
    if FAMILIES[family] != "positions are added":
        assert alike(out.activations["resid_pre", 0], given)
    weir.set_global(llm, [weir.Add(vector, 0, hook="embed")])
    try:
        with pytest.raises(weir.WeirError, match="is given as embeddings"):
            llm.generate({"prompt_embeds": given}, sampling(2), use_tqdm=False)
        assert llm.generate({"prompt_token_ids": tokens(9)}, sampling(2), use_tqdm=False)
    finally:
        weir.clear_global(llm)
    del out, e
    assert_nothing_is_held(llm)


@pytest.mark.thorough
@needs(inductor)
def test_compiled(root):
    """Tapped outside what is compiled, since tokens are looked up there."""
    llm = start(root, "llama", enforce_eager=False)
    truth = Oracle(directory(root))
    asked = weir.params(sampling(4), capture=every())
    for _ in range(2):
        out, other = llm.generate(
            [{"prompt_token_ids": tokens(40)}, {"prompt_embeds": embedded(truth, tokens(7))}],
            [asked, sampling(4)],
            use_tqdm=False,
        )
        rows, _ = truth.points(ids_of(out)[:-1])
        for site in out.activations.sites:
            assert rel_err(out.activations[site], rows[tuple(site)]) <= BOUND, site
        assert len(other.outputs[0].token_ids) == 4
