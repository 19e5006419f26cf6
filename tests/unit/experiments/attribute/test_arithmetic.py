"""Estimates on a linear model, where attribution patching is exact, and the order of the largest."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.experiments.attribute.result import PatchedPlace, first_order, largest
from vllm_weir.experiments.grid import Grid
from vllm_weir.schema.hooks import Site

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))


@given(SIZES, st.integers(0, 2**31))
def test_a_linear_metric_changes_by_exactly_the_estimate(sizes, seed):
    tokens, heads, size = sizes
    generator = torch.Generator().manual_seed(seed)
    source, base, weight = (torch.randn(tokens, heads, size, generator=generator) for _ in range(3))
    rows = base.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad((weight * rows).sum(), rows)
    whole, by_head = (first_order(source, base, slope, by_head) for by_head in (False, True))
    assert whole.shape == (tokens,) and by_head.shape == (tokens, heads)
    for position in range(tokens):
        patched = base.double().clone()
        patched[position] = source[position].double()
        change = float((weight.double() * (patched - base.double())).sum())
        assert abs(whole[position] - change) <= 1e-9 * max(1, abs(change))
        for head in range(heads):
            patched = base.double().clone()
            patched[position, head] = source[position, head].double()
            change = float((weight.double() * (patched - base.double())).sum())
            assert abs(by_head[position, head] - change) <= 1e-9 * max(1, abs(change))


@given(st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6), st.integers(0, 8))
def test_the_largest_come_first_by_magnitude_and_zeros_never(values, count):
    axes = {"hook": ("resid_pre",), "layer": (3, 7), "position": (0, 4, 9)}
    found = largest(Grid(np.array(values).reshape(1, 2, 3), axes), count)
    sizes = sorted((abs(v) for v in values if v != 0), reverse=True)
    assert [abs(value) for _, value in found] == sizes[:count]
    for place, value in found:
        layer, position = axes["layer"].index(place.site.layer), axes["position"].index(place.position)
        assert values[layer * 3 + position] == value and place.head is None


def test_a_head_is_named_by_its_label():
    array = np.zeros((1, 1, 2, 2))
    array[0, 0, 1, 0] = -3
    grid = Grid(array, {"hook": ("z",), "layer": (2,), "position": (0, 5), "head": (6, 1)})
    assert largest(grid, 10) == [(PatchedPlace(Site("z", 2), 5, 6), -3.0)]
    assert str(largest(grid, 1)[0][0]) == "z[2] at 5, head 6"
