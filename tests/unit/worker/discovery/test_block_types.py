"""Of each type one block is searched; the others have the points that a search would find."""

from __future__ import annotations

import pytest
import torch

from tests.unit import blocks as toys
from tests.unit.blocks import Model, Scaled, Sequential, mapped
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery import block_types

KINDS = [
    toys.Sequential, toys.Fused, toys.Sandwich, toys.PostNorm, toys.Scaled, toys.Parallel, toys.OutputArgument,
    toys.Deep, toys.Shared, toys.TwoMixers, toys.TooLate, toys.Biased, toys.BiasedParallel, toys.Gain, toys.More,
    toys.MoreUnscaled, toys.MixerOnly, toys.MLPOnly, toys.Joint, toys.Feeding, toys.Chained, toys.Weighted,
]  # fmt: skip
FUSED = (toys.Fused, toys.Sandwich, toys.Parallel, toys.Weighted)


class Halved(Sequential):
    """Calls the same parts as `Sequential`, and adds half of what its MLP makes."""

    def fed(self, x):
        return 0.5 * super().fed(x)


class Minus(Sequential):
    """Takes away what the others add."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states - self.mixed(positions, hidden_states)
        return hidden_states + self.fed(hidden_states)


@pytest.fixture
def searched(monkeypatch):
    """Paths of the blocks that were searched."""
    paths, search = [], block_types.resolve_block

    def counted(calls, *more):
        paths.append(calls[0].path)
        return search(calls, *more)

    monkeypatch.setattr(block_types, "resolve_block", counted)
    return paths


def of_many(kinds, fused=False):
    """Verdicts on a model of these blocks."""
    torch.manual_seed(0)
    return mapped(Model(kinds, fused))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_points_are_those_of_a_search_in_every_block(kind, monkeypatch):
    quick = of_many([kind] * toys.LAYERS, kind in FUSED)
    monkeypatch.setattr(block_types.BlockTypes, "_type_of", lambda self, calls: calls[0].path)  # each is searched
    slow = of_many([kind] * toys.LAYERS, kind in FUSED)
    assert quick.anchors.keys() == slow.anchors.keys() and quick.refused == slow.refused
    for site, anchor in slow.anchors.items():
        found = quick.anchors[site]
        assert found.scale == pytest.approx(anchor.scale, rel=1e-5)
        assert vars(found) | {"scale": 0, "added_term": 0} == vars(anchor) | {"scale": 0, "added_term": 0}, site


@pytest.mark.parametrize("kind", [Sequential, Scaled])
def test_blocks_of_one_type_are_searched_once(kind, searched):
    of_many([kind] * toys.LAYERS)
    assert searched == ["layers.0"]


@pytest.mark.parametrize(("odd", "hook", "scale"), [(Halved, "mlp_out", 0.5), (Minus, "attn_out", -1.0)])
@pytest.mark.parametrize("place", range(3))
def test_a_block_that_only_looks_alike_is_searched(odd, hook, scale, place):
    kinds = [Sequential] * 3
    kinds[place] = odd
    sites = of_many(kinds)
    assert not sites.refused
    for layer in range(3):
        expected = scale if layer == place else 1.0
        assert sites.anchors[Site(hook, layer)].scale == pytest.approx(expected, rel=1e-4)


def test_after_three_blocks_in_vain_the_others_are_not_searched(searched, monkeypatch):
    model = Model([toys.Weighted] * 6, True)
    monkeypatch.setattr(toys, "LAYERS", 6)
    sites = mapped(model)
    assert all(Site("attn_out", layer) in sites.refused for layer in range(6))
    assert {"layers.0", "layers.1", "layers.2", "layers.3"} >= set(searched), "block 0 is given no residual"
