"""The CPU tap against a loop over tokens, taps and stages."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_weir.worker.anchors import Anchor, Key
from vllm_weir.worker.profiles import Profiles
from vllm_weir.worker.select import STAGES
from vllm_weir.worker.tap import TapTensors, numbered, place


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 12),
    d=st.integers(1, 9),
    residual=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 0.22, 3.0]),
)
def test_tap_equals_a_naive_loop(seed, tokens, d, residual, dtype, scale):
    draw = np.random.default_rng(seed)
    taps, profiles = 3, 4
    ranks = np.full((profiles, taps * STAGES), -1, np.int32)
    for profile in range(profiles):
        columns = np.flatnonzero(draw.random(taps * STAGES) < 0.4)
        ranks[profile, columns] = np.arange(len(columns))
    plan = np.full((tokens + 3, 3), -1, np.int32)
    row = 0
    for token in range(tokens):
        if draw.random() < 0.6:
            plan[token, :2] = row, draw.integers(profiles)
            row += int((ranks[plan[token, 1]] >= 0).sum())
    hidden = torch.from_numpy(draw.standard_normal((tokens, d))).to(dtype)
    other = torch.from_numpy(draw.standard_normal((tokens, d))).to(dtype) if residual else None
    ring = torch.full((row + 1, d), 7.0, dtype=dtype)
    before = hidden.clone()
    for tap in range(taps):
        expected = ring.clone()
        for token in range(tokens):
            slot, profile = plan[token, :2]
            for stage in range(STAGES):
                rank = ranks[profile, tap * STAGES + stage] if slot >= 0 else -1
                if rank >= 0:
                    value = hidden[token] + other[token] if residual else hidden[token]
                    expected[slot + rank] = value * scale
        tensors = (
            numbered(tap, scale),
            torch.from_numpy(plan),
            torch.from_numpy(ranks),
            ring,
            *no_programs(taps, d),
        )
        if residual:
            torch.ops.weir.tap_residual(hidden, other, *tensors)
        else:
            torch.ops.weir.tap(hidden, *tensors)
        assert ring.equal(expected)
    assert hidden.equal(before)
    assert bool((ring[row] == 7.0).all())


def no_programs(taps, d):
    """Empty tables: heads, ints, floats, vectors."""
    heads, ints = torch.full((1, taps), -1, dtype=torch.int32), torch.full((1, 5), -1, dtype=torch.int32)
    return heads, ints, torch.zeros(1, 4), torch.zeros(1, d)


class Block(torch.nn.Module):
    """Arguments in vLLM's unusual order, and an output of one or two parts."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.two = two

    def forward(self, positions, hidden_states, residual=None):
        return (hidden_states * 2, hidden_states * 3) if self.two else hidden_states * 2


def captured(block, call):
    """What taps 0 (input) and 1 (output) record for every token."""
    plan = torch.tensor([[0, 0, -1], [2, 0, -1]], dtype=torch.int32)
    ranks = torch.full((1, 2 * STAGES), -1, dtype=torch.int32)
    ranks[0, 2], ranks[0, STAGES + 1] = 0, 1
    ring = torch.zeros(4, 3)
    tensors = TapTensors(plan, ranks, ring, *no_programs(2, 3))
    model = torch.nn.ModuleDict({"block": block})
    residual = Key("arg", 2, "residual")
    place(model, Anchor("block", "before", Key("arg", 1, "hidden_states"), residual), 0, tensors)
    both = (Key("out", 0), Key("out", 1)) if block.two else (Key("out", -1), None)
    place(model, Anchor("block", "after", *both), 1, tensors)
    call(block)
    return ring.view(2, 2, 3)


def test_arguments_are_found_by_name_however_they_are_passed():
    h, r, at = torch.arange(6.0).view(2, 3), torch.full((2, 3), 0.5), torch.tensor([0, 1])
    for two in (True, False):
        for call, stream in (
            (lambda b: b(at, h, r), h + r),
            (lambda b: b(at, h, residual=r), h + r),
            (lambda b: b(positions=at, hidden_states=h, residual=r), h + r),
            (lambda b: b(at, h), h),
            (lambda b: b(at, hidden_states=h, residual=None), h),
        ):
            rows = captured(Block(two), call)
            assert rows[:, 0].equal(stream)
            assert rows[:, 1].equal(h * 5 if two else h * 2)


def test_the_planner_s_tables_are_what_the_tap_reads():
    ranks = Profiles(4, 6).ranks
    assert ranks.shape == (4, 6) and ranks.dtype == np.int32 and (ranks == -1).all()
