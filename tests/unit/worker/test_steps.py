"""A step is refused whose taps would not do what its plan says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_weir.errors import WeirError
from vllm_weir.schema.taps import GROUPS
from vllm_weir.worker.steps import Steps


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(("mask", "why"), [(0, "without taps"), (1, "cannot reduce"), (1 | 1 << GROUPS, ""), (-1, "")])
def test_a_plan_fits_the_taps_of_its_step(mask, why, reduces):
    plan = SimpleNamespace(
        rows=3, runs=(), programs=np.full(2, -1), spans=np.array([2, -1] if reduces else [0, 0], np.int32)
    )
    switch = SimpleNamespace(live=mask != 0, wants=lambda bit: bool(mask >> bit & 1))
    steps = SimpleNamespace(_parts=SimpleNamespace(planner=SimpleNamespace(plan=lambda *_: plan), switch=switch))
    if not why or (why == "cannot reduce" and not reduces):
        assert Steps._plan(steps, ["a"], [2], [0], None) is plan
    else:
        with pytest.raises(WeirError, match=why):
            Steps._plan(steps, ["a"], [2], [0], None)
