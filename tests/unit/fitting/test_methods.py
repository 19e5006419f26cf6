"""Directions against scikit-learn and direct computation, and what has to hold of them whatever the rows are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.machine import module, needs
from tests.support.properties import examples
from tests.unit.refusals import refused
from vllm_weir.fitting.components import first_components
from vllm_weir.fitting.layer import auc, fit_layer, split, unit
from vllm_weir.fitting.logistic import fit_logistic
from vllm_weir.fitting.methods import METHODS, MethodOptions, method_of

OPTIONS = MethodOptions()
SHAPES = ((40, 12), (24, 90), (9, 9))
shapes = st.tuples(st.integers(0, 2**32 - 1), st.integers(6, 30), st.integers(2, 40))


def classes(seed: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pairs: common content, columns of different scales, and a difference along one direction that varies."""
    rng = np.random.default_rng(seed)
    content = rng.normal(size=(n, d)) * rng.uniform(0.5, 20, d) + rng.normal(size=d) * 10
    axis = unit(rng.normal(size=d))
    strength = rng.uniform(1, 8, (n, 1))
    positive = content + strength * axis + rng.normal(size=(n, d)) * 0.2
    return positive, content - strength * axis + rng.normal(size=(n, d)) * 0.2


def fitted(positive: np.ndarray, negative: np.ndarray, name: str, folds: int = 3, seed: int = 0):
    method = METHODS[name]
    parts = split(len(positive), len(negative), len(positive) == len(negative), folds, seed, method.fewest)
    return fit_layer(torch.from_numpy(positive), torch.from_numpy(negative), method, parts, OPTIONS)


def regression(rows: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float, intercept: bool = True):
    """`fit_logistic` of arrays."""
    weights, biases = fit_logistic(*map(torch.from_numpy, (rows, labels, kept)), strength, intercept)
    return weights.numpy(), biases.numpy()


def component(differences: np.ndarray, kept: np.ndarray, centred: bool) -> np.ndarray:
    """`first_components` of one subset of an array."""
    return first_components(torch.from_numpy(differences), torch.from_numpy(kept)[None], centred)[0].numpy()


def rotation(seed: int, d: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_the_difference_of_means_is_in_the_rows_units(n, d):
    positive, negative = classes(1, n, d)
    found = fitted(positive, negative[: n - 2], "diff").direction
    np.testing.assert_allclose(found.vector, positive.mean(0) - negative[: n - 2].mean(0), rtol=0, atol=1e-12)
    assert found.gap == pytest.approx(np.linalg.norm(found.vector), rel=1e-12)


@needs(module("sklearn"))
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_principal_components_are_scikit_learns(n, d):
    from sklearn.decomposition import PCA

    positive, negative = classes(2, n, d)
    difference = positive - negative
    expected = {
        "pca": PCA(1).fit(difference).components_[0],
        "pca_center": PCA(1).fit(np.concatenate([difference, -difference])).components_[0],
    }
    for name, axis in expected.items():
        found = fitted(positive, negative, name).direction
        assert abs(found.vector @ axis) == pytest.approx(1, abs=1e-9), name
        assert (np.sign(difference @ found.vector).sum()) >= 0, "most pairs' positive prompts score higher"


@needs(module("sklearn"))
@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_logistic_regression_is_scikit_learns(n, d, strength):
    from sklearn.linear_model import LogisticRegression

    positive, negative = classes(3, n, d)
    rows, labels = np.concatenate([positive, negative]), np.arange(2 * n) < n
    kept = np.stack([np.ones(2 * n, bool), np.arange(2 * n) % 3 > 0])
    for intercept in (True, False):
        weights, biases = regression(rows, labels, kept, strength, intercept)
        for weight, bias, some in zip(weights, biases, kept, strict=True):
            theirs = LogisticRegression(C=strength, fit_intercept=intercept, tol=1e-10, max_iter=100_000)
            theirs.fit(rows[some], labels[some])
            assert unit(weight) @ unit(theirs.coef_[0]) > 1 - 1e-7
            np.testing.assert_allclose(
                rows @ weight + bias, theirs.decision_function(rows), rtol=0, atol=1e-3 * np.abs(rows @ weight).max()
            )


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_logistic_regression_is_at_its_minimum(n, d):
    positive, negative = classes(4, n, d)
    rows, labels = np.concatenate([positive, negative]), np.arange(2 * n) < n
    (weight,), (bias,) = regression(rows, labels, np.ones((1, 2 * n), bool), 1.0)
    wrong = labels - 1 / (1 + np.exp(-(rows @ weight + bias)))
    scale = np.abs(rows.T @ (labels - labels.mean())).max()
    assert np.abs(weight - rows.T @ wrong).max() < 1e-6 * scale and abs(wrong.sum()) < 1e-6 * n


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_moments_of_a_subset_are_computed_from_those_of_all(n, d, centred):
    """In the space of pairs and in that of columns, against the eigenvectors of the subset's own second moments."""
    differences = np.subtract(*classes(5, n, d))
    kept = np.arange(n) % 4 > 0
    some = differences[kept]
    expected = np.linalg.eigh(np.cov(some.T, bias=True) if centred else some.T @ some / len(some))[1][:, -1]
    found = component(differences, kept, centred)
    assert np.linalg.norm(found - np.sign(found @ expected) * expected) < 1e-6


def test_components_of_several_subsets_are_found_together():
    """Of different sizes and spreads; one of them has nothing that varies."""
    rng = np.random.default_rng(0)
    differences = rng.normal(size=(60, 200)) + 3 * rng.normal(size=200) * rng.normal(size=(60, 1))
    differences[50:] = differences[50]
    index = np.arange(60)
    kept = np.stack([index >= 0, index % 2 > 0, index < 7, index >= 50])
    found = first_components(torch.from_numpy(differences), torch.from_numpy(kept), True).numpy()
    for vector, some in zip(found[:3], kept, strict=False):
        rows = differences[some] - differences[some].mean(0)
        assert abs(vector @ np.linalg.svd(rows)[2][0]) == pytest.approx(1, abs=1e-9)
    assert not first_components(torch.zeros(4, 9, dtype=torch.float64), torch.ones(2, 4, dtype=torch.bool), True).any()


@pytest.mark.parametrize("shape", [(600, 600), (900, 300)])
def test_lanczos_gives_way_to_a_full_decomposition(shape):
    """A thousand-millionth between the largest singular values: too close for so few steps."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, min(shape))))[0] for size in shape)
    values = np.sqrt(np.linspace(0, 1, min(shape)))
    values[-1] = values[-2] * (1 + 1e-9)
    found = component(left * values @ right.T, np.ones(shape[0], bool), False)
    assert np.linalg.norm(right[:, -2:].T @ found) == pytest.approx(1, abs=1e-6)


@examples(25)
@given(shapes, st.sampled_from(sorted(METHODS)), st.floats(-50, 50))
def test_directions_follow_the_rows(shape, name, offset):
    """They turn with them, change sign with the classes, and of a common offset only the bias changes."""
    seed, n, d = shape
    positive, negative = classes(seed, n, d)
    turn = rotation(seed + 1, d)
    plain, turned = fitted(positive, negative, name), fitted(positive @ turn, negative @ turn, name)
    assert unit(plain.direction.vector @ turn) @ unit(turned.direction.vector) > 1 - 1e-6
    assert turned.auc == pytest.approx(plain.auc, abs=1e-9)
    assert turned.direction.bias == pytest.approx(plain.direction.bias, rel=1e-4, abs=1e-4)
    assert turned.norm == pytest.approx(plain.norm)
    back = fitted(negative, positive, name)
    assert plain.direction.gap > 0
    assert plain.direction.score(positive).mean() > 0 > plain.direction.score(negative).mean()
    assert unit(plain.direction.vector) @ unit(back.direction.vector) < -1 + 1e-6
    assert back.auc == pytest.approx(plain.auc, abs=1e-9)
    moved = fitted(positive + offset, negative + offset, name)
    assert unit(plain.direction.vector) @ unit(moved.direction.vector) > 1 - 1e-6
    np.testing.assert_allclose(
        moved.direction.score(positive + offset), plain.direction.score(positive), rtol=1e-4, atol=1e-4
    )


def test_the_auc_is_of_rows_that_the_direction_was_not_fitted_on():
    """Noise alone: what was fitted separates its own rows, and none that were held out."""
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(size=(2, 60, 200))
    for name in METHODS:
        found = fitted(positive, negative, name, folds=5)
        assert abs(found.auc - 0.5) < 0.17, name
    own = fitted(positive, negative, "diff").direction
    assert auc(own.score(positive), own.score(negative)) > 0.95


def test_nothing_is_held_out_of_one_pair():
    positive, negative = classes(6, 1, 5)
    found = fitted(positive, negative, "diff")
    assert found.auc is None and found.held is None


def test_classes_that_are_alike_give_no_direction():
    rows, _ = classes(7, 6, 5)
    for name in METHODS:
        found = fitted(rows, rows, name)
        assert np.abs(found.direction.vector).max() < 1e-9 and found.auc == 0.5 and abs(found.direction.gap) < 1e-9


@examples(50)
@given(st.lists(st.integers(-3, 3), min_size=1), st.lists(st.integers(-3, 3), min_size=1))
def test_auc_counts_pairs(positive, negative):
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert auc(np.array(positive, float), np.array(negative, float)) == pytest.approx(np.mean(pairs))


@needs(module("sklearn"))
def test_auc_is_scikit_learns():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(1)
    positive, negative = rng.normal(0.4, 1, 90).round(1), rng.normal(0, 1, 40).round(1)
    labels = np.arange(130) < 90
    assert auc(positive, negative) == pytest.approx(roc_auc_score(labels, np.concatenate([positive, negative])))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 12), st.integers(0, 9))
def test_folds(n, m, count, seed):
    parts = split(n, m, False, count, seed)
    assert parts.number == (min(count, n, m) if min(n, m) > 1 else 0)
    for side in (parts.positive, parts.negative):
        sizes = np.bincount(side, minlength=max(parts.number, 1))
        assert sizes.max() - sizes.min() <= 1
    paired = split(n, n, True, count, seed)
    assert (paired.positive == paired.negative).all()
    again = split(n, m, False, count, seed)
    assert (again.positive == parts.positive).all() and (again.negative == parts.negative).all()


def test_another_seed_shares_otherwise():
    assert (split(40, 40, True, 5, 0).positive != split(40, 40, True, 5, 1).positive).any()


@pytest.mark.parametrize(
    ("name", "counts", "field", "message"),
    [
        ("difff", (3, 3), "method", "unknown method 'difff'; choose from diff, pca"),
        (None, (3, 3), "method", "unknown method 'None'"),
        ("pca", (3, 4), "negative", "3 positive prompts do not pair up with 4 negative"),
        ("lat", (3, 4), "negative", "take 'diff' or 'logistic'"),
        ("pca", (1, 1), "positive", "needs at least 2 pairs"),
    ],
)
def test_refusals(name, counts, field, message):
    with refused(field, message):
        method_of(name, *counts)


def test_unpaired_prompts_are_for_some_methods():
    for name in ("diff", "logistic"):
        assert method_of(name, 3, 7) is METHODS[name]
