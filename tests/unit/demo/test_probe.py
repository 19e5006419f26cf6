"""The demo's probe, against cases with a known answer."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
    ],
)
def test_auc_by_hand(scores: list[float], labels: list[int], expected: float) -> None:
    assert auc(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)) == expected


def test_auc_counts_pairs() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 9, (60,), generator=generator).double()
    labels = torch.randint(0, 2, (60,), generator=generator)
    gap = scores[labels == 1][:, None] - scores[labels == 0][None]
    assert auc(scores, labels) == pytest.approx(float(((gap > 0).double() + 0.5 * (gap == 0)).mean()))


def test_nonsense_is_refused() -> None:
    x, y = clouds()
    with pytest.raises(ValueError, match="need rows"):
        fit_probe(x, y[:-1])
    with pytest.raises(ValueError, match="both classes"):
        fit_probe(x, torch.ones(len(x)))
    with pytest.raises(ValueError, match="both classes"):
        auc(torch.ones(3), torch.zeros(3))
