"""Recipes that are computed together are what each is alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from vllm_weir.frontend.derived import recipe as recipes
from vllm_weir.frontend.derived.recipe import AttentionRecipe, Inputs, Source, compute_all
from vllm_weir.frontend.outputs.slicers import captures_only_prompt
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts
from vllm_weir.schema.positions import Positions

HEADS, SIZE = 4, 8
FACTS = {
    "plain": AttentionFacts(HEADS, SIZE, scale=0.3),
    "window": AttentionFacts(HEADS, SIZE, scale=0.3, window=3),
    "sinks": AttentionFacts(HEADS, SIZE, scale=0.3, sinks=(0.5, -1.0, 2.0, 0.0)),
    "alibi": AttentionFacts(HEADS, SIZE, scale=0.3, alibi=(0.5, 0.25, 0.1, 0.0)),
    "soft cap": AttentionFacts(HEADS, SIZE, scale=0.9, soft_cap=2.0),
}


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for the order of sums: a score is one of 8 products of some units each, a pattern is its softmax."""
    assert torch.equal(got.isinf(), wanted.isinf())
    assert not got.numel() or (got - wanted).nan_to_num(0.0).abs().max() < 2e-5


def layer(n, hook, facts, at, there, heads=None, kv_heads=2):
    sources = (Source(Site("q_rot", n), False), Source(Site("k_rot", n), True))
    recipe = AttentionRecipe(
        Site(hook, n), (Positions.parse("all", "positions"),), sources, False,
        AttentionFacts(**(vars(facts) | {"keys_layer": n})), heads, torch.float32,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(n)
    rows = {
        sources[0].site: torch.randn(len(at), HEADS, SIZE, generator=generator).bfloat16(),
        sources[1].site: torch.randn(len(there), kv_heads, SIZE, generator=generator).bfloat16(),
    }
    positions = {sources[0].site: torch.tensor(at, dtype=torch.int64)}
    return recipe, Inputs(rows, positions | {sources[1].site: torch.tensor(there, dtype=torch.int64)})


@examples(60)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(sorted(FACTS)), st.sampled_from([1, 2, 4])), min_size=1, max_size=6),
    hook=st.sampled_from(["pattern", "attn_scores"]),
    at=st.lists(st.integers(0, 8), max_size=5, unique=True).map(sorted),
    missing=st.sets(st.integers(0, 8), max_size=1),
    heads=st.sampled_from([None, (3, 1)]),
    limit=st.sampled_from([1, 40, 1 << 22]),
)
def test_together_as_alone(kinds, hook, at, missing, heads, limit):
    there = [p for p in range(9) if p not in missing]
    # The last has other positions than the rest.
    made = [layer(n, hook, FACTS[kind], at, there, heads, kv_heads) for n, (kind, kv_heads) in enumerate(kinds)]
    made.append(layer(len(kinds), hook, FACTS[kinds[0][0]], [8], there, heads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "CHUNK_VALUES", limit)
        found = compute_all([one for one, _ in made], [inputs for _, inputs in made])
    assert list(found) and set(found) == {one.site for one, _ in made}
    for one, inputs in made:
        values, positions = one.compute(*inputs)
        assert torch.equal(found[one.site][1], positions) and found[one.site][0].shape == values.shape
        assert found[one.site][0].is_contiguous()
        assert_close(found[one.site][0], values)


@pytest.mark.parametrize("kv_heads", [(2, 4, 2), (1, 1, 4)])
def test_layers_with_other_numbers_of_kv_heads_are_not_computed_as_one(kv_heads):
    """Nor where all their query heads can be divided among all their key-value heads: 12 among 6."""
    made = [layer(n, "pattern", FACTS["plain"], [4], range(9), kv_heads=count) for n, count in enumerate(kv_heads)]
    found = compute_all([one for one, _ in made], [inputs for _, inputs in made])
    for one, inputs in made:
        assert_close(found[one.site][0], one.compute(*inputs)[0])


@pytest.mark.parametrize(
    ("selector", "length", "early"),
    [
        ("last_prompt", 50, True),
        ("prompt", 50, True),
        ("generated", 50, False),
        ("all", 50, False),
        ("last_prompt", 2000, True),
        ("prompt", 2000, False),
    ],
)
def test_few_values_of_the_prompt_are_computed_before_anybody_asks(selector, length, early):
    recipe, _ = layer(0, "pattern", FACTS["plain"], [0], [0])
    recipe = replace(recipe, positions=(Positions.parse(selector, "positions"),))
    spec = SimpleNamespace(by_positions=(), postprocess=None)
    group = SimpleNamespace(spec=spec, recipes=(recipe,), late=False, recast={}, folds=False)
    assert captures_only_prompt(group, length) == early
