"""The demo's probe, against cases with a known answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.demo.probe import accuracy, auc, cosine, fit_probe, mean_difference


def clouds(n: int = 200, d: int = 8, gap: float = 4.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two unit Gaussians, `gap` apart along the first axis: x [n, d], y [n]."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2 == 0
    x = torch.randn(n, d, generator=generator)
    x[:, 0] += gap * y
    return x, y


def test_a_probe_finds_the_direction_that_separates() -> None:
    probe = fit_probe(*clouds())
    x, y = clouds(seed=1)
    assert auc(probe.score(x), y) > 0.99
    assert accuracy(probe.score(x), y) > 0.95
    assert cosine(probe.weight, torch.eye(8)[0]) > 0.9
    assert cosine(mean_difference(x, y), torch.eye(8)[0]) > 0.98


def test_score_keeps_leading_shapes_and_is_linear() -> None:
    x, y = clouds()
    probe = fit_probe(x, y)
    assert probe.score(x.view(10, 20, 8)).shape == (10, 20)
    torch.testing.assert_close(probe.score(x.double().mean(0)), probe.score(x).mean())


def test_units_of_the_rows_do_not_matter() -> None:
    x, y = clouds()
    stretch = torch.logspace(-3, 3, 8)
    plain, stretched = fit_probe(x, y).score(x), fit_probe(x * stretch + 7, y).score(x * stretch + 7)
    torch.testing.assert_close(plain, stretched, rtol=1e-2, atol=1e-2)


def test_constant_features_and_separable_classes_stay_finite() -> None:
    x, y = clouds(gap=100.0)
    x[:, 3] = 5.0
    probe = fit_probe(x, y)
    assert torch.isfinite(probe.weight).all()
    assert probe.weight[3] == 0
    assert accuracy(probe.score(x), y) == 1.0


def test_more_features_than_rows() -> None:
    x, y = clouds(n=20, d=200)
    assert auc(fit_probe(x, y).score(x), y) == 1.0


SCORES = st.lists(st.integers(0, 9), min_size=1)


@given(SCORES, SCORES)
def test_auc_counts_pairs(positive: list[int], negative: list[int]) -> None:
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    labels = torch.tensor([1] * len(positive) + [0] * len(negative))
    assert auc(torch.tensor([*positive, *negative]).double(), labels) == pytest.approx(sum(pairs) / len(pairs))


def test_nonsense_is_refused() -> None:
    x, y = clouds()
    with pytest.raises(ValueError, match="need rows"):
        fit_probe(x, y[:-1])
    with pytest.raises(ValueError, match="both classes"):
        fit_probe(x, torch.ones(len(x)))
    with pytest.raises(ValueError, match="both classes"):
        auc(torch.ones(3), torch.zeros(3))
