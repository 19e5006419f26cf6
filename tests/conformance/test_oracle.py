"""The reference itself: its points obey their definitions, and additions at one place by two names agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm")

from tests.conformance.against_identities import identity_errors
from tests.conformance.oracle import FIVE, NoPoint, Oracle
from tests.conformance.rounding import MOST, rounding_errors, widened
from tests.conformance.zoo import VARIANTS, ZOO, build
from tests.support.measure import rel_err, rounding

KINDS = {
    "LlamaForCausalLM": ["sequential"] * 4,
    "Gemma4ForCausalLM": ["sequential"] * 4,
    "Gemma4ForCausalLM:shared-keys": ["sequential"] * 4,  # attention that no other position of the stream reaches
    "FalconForCausalLM": ["parallel"] * 4,
    "Cohere2MoeForCausalLM": ["parallel"] * 4,
    "NemotronHForCausalLM": ["mixer", "mlp", "mixer", "mlp"],
    "FalconH1ForCausalLM": ["sequential"] * 4,
    "Qwen2MoeForCausalLM": ["sequential"] * 4,
}
IDS = [(3 * j + j * j) % 500 + 5 for j in range(17)]

pytestmark = pytest.mark.conformance


FAST = ("LlamaForCausalLM", "Gemma4ForCausalLM:shared-keys", "FalconForCausalLM", "NemotronHForCausalLM")
"""One of each kind of block; the others are for `make test-all`."""


@pytest.fixture(
    scope="module", params=[pytest.param(a, marks=() if a in FAST else pytest.mark.thorough) for a in KINDS]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Oracle]:
    """An architecture and its reference."""
    where: Path = tmp_path_factory.mktemp("oracle") / request.param
    return request.param, Oracle(build((ZOO | VARIANTS)[request.param], where))


def test_kinds_of_blocks(case: tuple[str, Oracle]) -> None:
    name, oracle = case
    assert [shape.kind for shape in oracle.shapes] == KINDS[name]


def test_watching_changes_nothing(case: tuple[str, Oracle]) -> None:
    _, oracle = case
    assert torch.equal(oracle.points(IDS)[1], oracle.logits(IDS))


PACKED = {
    "FalconForCausalLM": (4, 1),
    "FalconForCausalLM:two-norms": (4, 2),
    "FalconForCausalLM:alibi": (4, 4),
    "BloomForCausalLM": (4, 4),
    "GPTNeoXForCausalLM": (4, 4),
    "GPTBigCodeForCausalLM": (4, 1),
    "GPTBigCodeForCausalLM:all-heads": (4, 4),
    "GPTJForCausalLM": (4, 4),
    "Phi3ForCausalLM": (4, 2),
    "DeepseekV3ForCausalLM": (4, 4),
    "GptOssForCausalLM": (4, 2),
    "GraniteSWAForCausalLM": (4, 2),
}
"""Projections that are packed, latent attention, sinks: (heads, key-value heads)."""


@pytest.mark.parametrize("name", PACKED)
def test_what_attention_gives_is_its_pattern_of_the_values(name: str, tmp_path: Path) -> None:
    """Which columns of a packed projection are values, and what a sink takes."""
    oracle = Oracle(build((ZOO | VARIANTS)[name], tmp_path))
    rows = oracle.points(IDS)[0]
    for layer in range(oracle.num_layers):
        pattern, v, z = (rows[hook, layer] for hook in ("pattern", "v", "z"))
        assert (pattern.shape[1], rows["k_rot", layer].shape[1]) == PACKED[name]
        v = v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)
        assert rel_err(torch.einsum("qhk,khd->qhd", pattern, v), z) < rounding(1, 32)
        sinks = name in ("GptOssForCausalLM", "GraniteSWAForCausalLM")
        assert bool((pattern.sum(-1) < 0.999).any()) == sinks
        for plain, rotated in (("q", "q_rot"), ("k", "k_rot")):
            if not oracle.missing(plain, layer):  # nothing is turned at position 0, and YaRN makes all longer
                one, other = (F.normalize(rows[hook, layer][0], dim=-1) for hook in (rotated, plain))
                assert rel_err(one, other) < 1e-5


def test_rounding_is_measured_and_the_model_stays_what_it_was(case: tuple[str, Oracle]) -> None:
    _, oracle = case
    before = oracle.logits(IDS)
    errors = rounding_errors(oracle, IDS)
    assert errors.keys() == oracle.points(IDS)[0].keys() | {"logprobs"}
    assert 1e-8 < errors["logprobs"] < rounding() and max(errors.values()) < MOST
    assert rel_err(oracle.logits(IDS), before) < 1e-6


def test_a_bound_is_widened_by_rounding_alone() -> None:
    assert widened(1e-5, 0.0) == 1e-5 == widened(1e-5, 1e-6)
    assert widened(1e-5, 5e-6) == 2e-5
    assert widened(1e-5, 1.0) == 1e-4 == widened(1e-4, 1.0)


def test_identities(case: tuple[str, Oracle]) -> None:
    _, oracle = case
    assert max(identity_errors(oracle.points(IDS)[0], None, oracle.gains).values()) < 1e-6


@pytest.mark.parametrize(
    ("first", "second", "later"),
    [("attn_out", "resid_mid", 0), ("mlp_out", "resid_post", 0), ("resid_post", "resid_pre", 1)],
)
def test_two_names_of_one_place(case: tuple[str, Oracle], first: str, second: str, later: int) -> None:
    _, oracle = case
    layers = [
        layer
        for layer in range(oracle.num_layers - 1)
        if not oracle.missing(first, layer)
        and not oracle.missing(second, layer + later)
        and not (first == "mlp_out" and layer in oracle.gains)
    ]
    if not layers:
        parallel = all(oracle.missing("resid_mid", layer) for layer in range(oracle.num_layers))
        assert (first, parallel) == ("attn_out", True) or (first == "mlp_out" and oracle.gains)
        return
    vector = torch.randn(oracle.hidden_size, generator=torch.Generator().manual_seed(1))
    one = oracle.steer(IDS, first, layers[0], vector, [3, 7])[1]
    assert rel_err(one, oracle.steer(IDS, second, layers[0] + later, vector, [3, 7])[1]) < rounding()
    plain = oracle.logits(IDS)
    assert torch.equal(one[:3], plain[:3]) or rel_err(one[:3], plain[:3]) < rounding()
    assert rel_err(one[3:], plain[3:]) > 1e-2


def test_every_point_is_there_or_says_why(case: tuple[str, Oracle]) -> None:
    _, oracle = case
    rows = oracle.points(IDS)[0]
    for layer in range(oracle.num_layers):
        for hook in FIVE:
            if oracle.missing(hook, layer):
                with pytest.raises(NoPoint):
                    oracle.steer(IDS, hook, layer, torch.zeros(oracle.hidden_size))
            else:
                assert rows[hook, layer].shape == (len(IDS), oracle.hidden_size)
