"""The identities of points inside a block: they hold for a block made by hand, and see what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.conformance.inside_identities import Rows, first_tokens, gathered, neurons, patterns
from tests.support.measure import rel_err

TOKENS, HEADS, KV_HEADS, SIZE, NEURONS = 9, 4, 2, 8, 24


def _rows(seed: int) -> Rows:
    """The rows of a block with normed heads and a gated MLP."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = random(TOKENS, HEADS, SIZE), random(TOKENS, KV_HEADS, SIZE), random(TOKENS, KV_HEADS, SIZE)
    pre, linear = random(TOKENS, NEURONS), random(TOKENS, NEURONS)
    weight = torch.linspace(0.5, 1.5, SIZE)
    q_rot, k_rot = (weight * x / x.pow(2).mean(-1, keepdim=True).sqrt() for x in (q, k))
    q_rot[1:], k_rot[1:] = q_rot[1:].flip(-1), k_rot[1:].flip(-1)  # what rotation does elsewhere is not looked at
    scores = random(TOKENS, HEADS, TOKENS).masked_fill(torch.ones(TOKENS, 1, TOKENS).triu(1) > 0, -torch.inf)
    pattern = scores.softmax(-1)
    z = torch.einsum("qhk,khd->qhd", pattern, v.repeat_interleave(HEADS // KV_HEADS, 1))
    made = dict(q=q, k=k, v=v, q_rot=q_rot, k_rot=k_rot, attn_scores=scores, pattern=pattern, z=z)
    made |= dict(mlp_pre=pre, mlp_pre_linear=linear, mlp_post=functional.silu(pre) * linear)
    return {(hook, 0): value for hook, value in made.items()}


def _errors(check: Callable[..., None], *rows: Rows) -> dict[str, float]:
    found: dict[str, float] = {}

    def note(error: float, *hooks: str, certain: bool = False) -> None:
        found.update(dict.fromkeys(hooks, error))

    check(*rows, note)
    return found


def test_a_sound_block_obeys_them() -> None:
    first, second = _rows(0), _rows(1)
    found = _errors(patterns, first) | _errors(neurons, first) | _errors(first_tokens, first, second)
    assert set(found) == {hook for hook, _ in first}
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("hook", ["q", "k"])
def test_columns_in_another_order(hook: str) -> None:
    wrong = [rows | {(hook, 0): rows[hook, 0].roll(1, -1)} for rows in (_rows(0), _rows(1))]
    assert _errors(first_tokens, *wrong)[hook] > 0.1


def test_gate_and_up_exchanged() -> None:
    rows = _rows(0)
    rows["mlp_pre", 0], rows["mlp_pre_linear", 0] = rows["mlp_pre_linear", 0], rows["mlp_pre", 0]
    assert _errors(neurons, rows)["mlp_pre"] > 0.1


def test_values_of_another_head() -> None:
    rows = _rows(0)
    rows["v", 0] = rows["v", 0].flip(1)
    assert _errors(patterns, rows)["v"] > 0.1


def test_columns_of_a_projection() -> None:
    out = torch.randn(TOKENS, 40, generator=torch.Generator().manual_seed(2))
    assert gathered(out[:, [7, 3, 31]], out) == 0
    assert gathered(out[:, [7, 7]], out) == 1
    other = out[:, :8] + 0.1 * out[:, 8:16]
    assert gathered(other, out) > 0.05 and rel_err(other, out[:, :8]) > 0.05
