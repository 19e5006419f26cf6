"""Captures of derived sites: which sources they need, what is refused, and values from sources' rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.frontend.derived.formulas import attention_pattern, attention_scores, choose_experts
from vllm_weir.frontend.derived.recipe import AttentionRecipe
from vllm_weir.frontend.derived.sources import DerivedPoints, derived_verdicts, up_to
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts, ModelFacts, RoutingFacts
from vllm_weir.schema.positions import Positions

LAYERS = 3
ATTENTION = AttentionFacts(heads=4, head_size=8, scale=0.5)
ROUTING = RoutingFacts(2, renormalize=True)
SOURCES = ("q_rot", "k_rot", "router_logits")


@dataclass
class Served:
    """Stands for an engine's capabilities."""

    facts: ModelFacts = field(
        default_factory=lambda: ModelFacts(
            {n: replace(ATTENTION, keys_layer=n) for n in range(LAYERS)}, dict.fromkeys(range(LAYERS), ROUTING)
        )
    )
    refused: dict[Site, str] = field(default_factory=dict)
    num_layers: int = LAYERS

    @property
    def sites(self) -> dict[Site, str]:
        taps = {Site(hook, n): "" for hook in (*SOURCES, "resid_post") for n in range(LAYERS)} | self.refused
        return taps | derived_verdicts(taps, self.facts)


def expand(*captures: Capture, served: Served | None = None, **options):
    return DerivedPoints.expand(captures, served or Served(), **options)


def test_a_pattern_needs_its_queries_and_all_keys_before_them():
    plain = Capture("resid_post", layers=0)
    captures, sources, recipes = expand(Capture("pattern", layers=[0, 2], positions=[5, 9]), plain)
    assert captures == (plain,)
    assert set(sources) == {
        Capture(hook, layers=n, positions=positions)
        for n in (0, 2)
        for hook, positions in (("q_rot", [5, 9]), ("k_rot", ":10"))
    }
    assert [recipe.site for recipe in recipes] == [Site("pattern", 0), Site("pattern", 2)]
    assert [source.whole for source in recipes[0].sources] == [False, True]
    assert recipes[0].positions == (Positions.parse([5, 9]),)


def test_experts_need_logits_at_the_same_positions():
    """Before interventions if they are asked for before; other captures pass as they are."""
    others = (Capture("resid_post"), Capture("q_rot", layers=1, positions=[3]))
    asked = {"expert_ids": "generated", "expert_weights": "all"}
    captures, sources, recipes = expand(*others, *(Capture(hook, layers=1, positions=p) for hook, p in asked.items()))
    assert captures == others
    assert sources == tuple(Capture("router_logits", layers=1, positions=p) for p in asked.values())
    assert [recipe.site.hook for recipe in recipes] == list(asked)
    _, (source,), (recipe,) = expand(Capture("expert_ids", layers=0, before=True))
    assert source.before and recipe.before


def test_layers_that_share_keys_take_those_of_the_layer_that_has_them():
    served = Served()
    served.facts = replace(served.facts, attention={**served.facts.attention, 2: replace(ATTENTION, keys_layer=0)})
    _, sources, (recipe,) = expand(Capture("pattern", layers=2), served=served)
    assert {(source.hook, source.layers) for source in sources} == {("q_rot", (2,)), ("k_rot", (0,))}
    assert recipe.sources[1].site == Site("k_rot", 0)


@given(
    selector=st.sampled_from(["all", "prompt", "generated", "last_prompt", "sampled", {"token_ids": [1]}])
    | st.lists(st.integers(-12, 20), min_size=1, max_size=5)
    | st.tuples(st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 20), st.none() | st.integers(1, 3)).map(
        lambda bounds: ":".join("" if bound is None else str(bound) for bound in bounds)
    ),
    prompt_len=st.integers(1, 12),
    generated=st.integers(0, 6),
)
def test_keys_reach_from_0_to_the_last_query(selector, prompt_len, generated):
    try:
        positions = Positions.parse(selector)
    except WeirError:
        return
    at = torch.arange(prompt_len + generated).numpy()
    chosen = positions.mask(at, prompt_len, None if positions.needs_token_ids else at)
    keys = sum(one.mask(at, prompt_len, at) for one in up_to(positions)) > 0
    last = int(at[chosen][-1]) if chosen.any() else -1
    assert keys[: last + 1].all()
    if not positions.is_open:
        assert keys.sum() <= max(last + 1, prompt_len, 0) or any(v >= 0 for v in positions.numbers)


@pytest.mark.parametrize(
    ("hook", "options", "words"),
    [
        ("pattern", {"reduce": "mean"}, "computed when an output is read"),
        ("pattern", {"project": [1.0]}, "leave project out"),
        ("pattern", {"compress": "fp16"}, "leave compress out"),
        ("pattern", {"sink": "disk"}, "no sink takes them"),
        ("pattern", {"before": True}, "no value before interventions"),
        ("expert_ids", {"dtype": "float32"}, "int64"),
    ],
)
def test_what_cannot_be_done_to_derived_rows_is_refused(hook, options, words):
    with refused(f"capture[3].{next(iter(options))}", words):
        expand(Capture(hook, layers=0, path="capture[3]", **options))


def test_two_captures_of_a_site_merge_and_must_agree():
    one, other = Capture("pattern", layers=0, positions=[1]), Capture("pattern", layers=0, positions=[4])
    _, _, (recipe,) = expand(one, other)
    assert recipe.positions == (one.positions, other.positions)
    with pytest.raises(WeirError, match=r"pattern\[0\] is wanted in two ways"):
        expand(one, replace(other, dtype="float16"))


def test_too_many_selectors_are_refused():
    captures = [Capture("pattern", layers=0, positions=[n]) for n in range(40)]
    with pytest.raises(WeirError, match="80 different choices of positions, more than the limit of 63"):
        expand(*captures)


def test_verdicts_say_why():
    served = Served(refused={Site("q_rot", 0): "it is fused"})
    attention = {1: replace(ATTENTION, keys_layer=1, refused="it is odd")}
    served.facts = ModelFacts(attention, {0: ROUTING, 1: replace(ROUTING, refused="it is custom")})
    sites = served.sites
    assert sites[Site("pattern", 0)] == "it is computed from q_rot[0], which is refused: it is fused"
    assert sites[Site("attn_scores", 1)] == "it is odd"
    assert sites[Site("pattern", 2)].startswith("the block has no attention layer of vLLM's")
    assert sites[Site("expert_ids", 0)] == "" and sites[Site("expert_weights", 1)] == "it is custom"
    assert sites[Site("expert_ids", 2)].startswith("the block has no router of vLLM's")
    sourced = derived_verdicts({Site("q_rot", 0): "", Site("k_rot", 0): ""}, ModelFacts())
    assert set(sourced) == {Site("pattern", 0), Site("attn_scores", 0)}, "a block without a source has no verdict"
    with pytest.raises(WeirError, match=r"pattern\[1\] is refused: it is odd") as error:
        expand(Capture("pattern", layers=1), served=served)
    assert error.value.field == "capture.hook", "no layer has it, so the layers are not to blame"
    with refused("capture.layers"):
        expand(Capture("expert_ids"), served=served)


def test_images_whose_tokens_see_each_other_are_refused():
    served = Served()
    served.facts = replace(served.facts, attention={0: replace(ATTENTION, media=True)})
    assert expand(Capture("pattern", layers=0), served=served).recipes
    assert expand(Capture("expert_ids", layers=0), served=served, has_media=True).recipes
    with pytest.raises(WeirError, match="tokens of one image see each other"):
        expand(Capture("pattern", layers=0), served=served, has_media=True)


def test_reports_of_workers_are_merged():
    def facts(first: int) -> ModelFacts:
        one = AttentionFacts(2, 8, 0.5, 16, sinks=(first + 0.5, first + 1.5), alibi=(0.1 * first, 0.2), keys_layer=7)
        return ModelFacts({7: one}, {7: replace(ROUTING, bias=(0.25, 0.5))}, {7: first})

    other_stage = ModelFacts({9: replace(ATTENTION, keys_layer=9)})
    merged = ModelFacts.merge([part.report() for part in (facts(2), facts(0), other_stage, facts(2))])
    assert merged.attention[7] == AttentionFacts(
        4, 8, 0.5, 16, sinks=(0.5, 1.5, 2.5, 3.5), alibi=(0.0, 0.2, 0.2, 0.2), keys_layer=7
    )
    assert merged.attention[9] == other_stage.attention[9]
    assert merged.routing == {7: replace(ROUTING, bias=(0.25, 0.5))}
    assert ModelFacts.merge([{"ok": True}]) == ModelFacts()


def recipe_of(hook: str, facts: AttentionFacts = ATTENTION, **options) -> AttentionRecipe:
    served = Served()
    served.facts = replace(served.facts, attention={1: replace(facts, keys_layer=1)})
    (recipe,) = expand(Capture(hook, layers=1, **options), served=served).recipes
    return recipe


def compute(recipe, q, k, queries, keys):
    rows = {Site("q_rot", 1): q, Site("k_rot", 1): k}
    at = {"q_rot": queries, "k_rot": keys}
    return recipe.compute(rows, {Site(hook, 1): torch.tensor(p, dtype=torch.int64) for hook, p in at.items()})


@pytest.mark.parametrize(("hook", "function"), [("pattern", attention_pattern), ("attn_scores", attention_scores)])
def test_values_have_keys_up_to_the_last_query_and_the_dtype_asked_for(hook, function):
    q, k = torch.randn(2, 4, 8), torch.randn(9, 2, 8)
    values, positions = compute(recipe_of(hook, positions=[2, 5]), q, k, [2, 5], range(9))
    assert positions.tolist() == [2, 5] and values.shape == (2, 4, 6) and values.dtype == torch.float32
    assert torch.equal(values, function(q, k[:6], positions, ATTENTION))
    halves, _ = compute(recipe_of(hook, positions=[2, 5], dtype="bfloat16"), q, k, [2, 5], range(9))
    assert torch.equal(halves, values.bfloat16())
    recipe, none = recipe_of(hook), torch.empty(0, dtype=torch.int64)
    values, positions = compute(recipe, q[:0], k[:0], none.tolist(), none.tolist())
    assert values.shape == recipe.empty().shape == (0, 4, 0) and not len(positions)


@pytest.mark.parametrize(
    ("facts", "complete"),
    [(ATTENTION, [1]), (replace(ATTENTION, window=2), [1, 4, 5]), (replace(ATTENTION, chunk=3), [1, 3, 4, 5])],
)
def test_a_query_with_a_missing_key_has_no_value(facts, complete):
    """Key 2 was lost: queries from there on have no value unless their window begins after it."""
    q, k = torch.randn(4, 4, 8), torch.randn(6, 2, 8)
    kept, queries = [0, 1, 3, 4, 5], [1, 3, 4, 5]
    values, positions = compute(recipe_of("pattern", facts), q, k[kept], queries, kept)
    assert positions.tolist() == complete
    whole, _ = compute(recipe_of("pattern", facts), q, k, queries, range(6))
    expected = whole[[queries.index(p) for p in complete]][..., : complete[-1] + 1]
    assert (values - expected).abs().max() < 2e-5, "but for the order of sums of 8 products"


def test_experts_come_at_the_logits_positions():
    ids, weights = expand(Capture("expert_ids", layers=1), Capture("expert_weights", layers=1)).recipes
    logits, at = torch.randn(3, 8), torch.tensor([4, 5, 6])
    rows, positions = {Site("router_logits", 1): logits}, {Site("router_logits", 1): at}
    expected_ids, expected_weights = choose_experts(logits, ROUTING)
    values, there = ids.compute(rows, positions)
    assert torch.equal(values, expected_ids) and torch.equal(there, at)
    assert torch.equal(weights.compute(rows, positions)[0], expected_weights)
    assert ids.empty().shape == weights.empty().shape == (0, 2) and ids.empty().dtype == torch.int64
