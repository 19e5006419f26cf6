"""The reference of probes and gates is itself checked, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.probe_reference import GateCase, ProbeCase, comes_first

ROWS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [-1.0, 1.0]])
LINEAR = {"weight": torch.tensor([2.0, -1.0]), "bias": torch.tensor(1.0)}  # 3, -1, 6, -2


def scores(kind, tensors, **more):
    probe = ProbeCase("p", "resid_post", 0, kind, tensors, **more)
    return probe.scores(ROWS, 3, [5, 6, 7, 8])


@pytest.mark.parametrize(
    ("smooth", "expected"),
    [
        (None, [3, -1, 6, -2]),
        (("ema", 0.25), [3, 2, 3, 1.75]),
        (("max",), [3, 3, 6, 6]),
        (("mean", 2), [3, 1, 2.5, 2]),
    ],
)
def test_smoothing(smooth, expected):
    at, got = scores("linear", LINEAR, smooth=smooth)
    assert at == [0, 1, 2, 3] and got[:, 0].tolist() == expected


def test_only_scored_positions_count():
    at, got = scores("linear", LINEAR, smooth=("ema", 0.5), positions=[0, 2])
    assert at == [0, 2] and got[:, 0].tolist() == [3, 4.5]


def test_activations():
    assert scores("linear", LINEAR, activation="sigmoid")[1][0, 0] == pytest.approx(1 / (1 + math.exp(-3)))
    two = {"weight": torch.eye(2), "bias": torch.tensor([0.0, math.log(2)])}
    got = scores("linear", two, activation="softmax")[1]
    assert got[0].tolist() == pytest.approx([math.e / (math.e + 2), 2 / (math.e + 2)], rel=1e-6)


def test_a_hidden_layer():
    tensors = {
        "w_in": torch.tensor([[1.0, 0.0], [0.0, -1.0]]),
        "b_in": torch.tensor([0.0, 1.0]),
        "w_out": torch.tensor([[1.0, 10.0]]),
        "b_out": torch.tensor([0.5]),
    }
    assert scores("mlp", tensors)[1][:, 0].tolist() == [11.5, 0.5, 3.5, 0.5]
    assert scores("mlp", tensors, hidden="tanh")[1][0, 0] == pytest.approx(11 * math.tanh(1) + 0.5)


def test_attention_is_over_what_came_before():
    tensors = {
        "query": torch.tensor([[0.0, math.log(2)]]),
        "value": torch.tensor([[[1.0, 0.0]]]),
        "bias": torch.ones(1),
    }
    # Weights 1, 4, 2, 2 of the values 1, 0, 3, -1.
    assert scores("attention", tensors)[1][:, 0].tolist() == pytest.approx([2, 1 + 1 / 5, 1 + 7 / 7, 1 + 5 / 9])


SCORED = ([1, 2, 4], torch.tensor([[1.0], [3.0], [-2.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (GateCase("p", above=0.0), [0, 1, 1, 1, 0, 0]),
        (GateCase("p", above=2.0), [0, 0, 1, 1, 0, 0]),
        (GateCase("p", below=2.0), [0, 1, 0, 0, 1, 1]),
        (GateCase("p", above=2.0, latch=True), [0, 0, 1, 1, 1, 1]),
        (GateCase("p", above=2.0, delay=1), [0, 0, 0, 1, 1, 0]),
        (GateCase("p", below=2.0, delay=1, latch=True), [0, 0, 1, 1, 1, 1]),
    ],
)
def test_switches(gate, expected):
    assert gate.factors(SCORED, 6) == expected


def test_sigmoids():
    above, below = (GateCase("p", **{side: 2.0}, sharpness=0.5).factors(SCORED, 3) for side in ("above", "below"))
    assert above == pytest.approx([0, 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-0.5))])
    assert below == pytest.approx([0, 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))])


def test_the_order_of_hook_points():
    probe = ProbeCase("p", "resid_post", 1, "linear", LINEAR)
    assert comes_first(probe, "attn_in", [2]) and comes_first(probe, "resid_post", [2, 3])
    assert not comes_first(probe, "resid_pre", [2]) and not comes_first(probe, "mlp_out", [1, 3])
