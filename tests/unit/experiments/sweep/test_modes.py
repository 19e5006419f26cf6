"""Which prompt of a pair is patched, and whose rows are put in."""

from __future__ import annotations

import pytest

from vllm_weir.experiments.sweep.plan import Pair, Place, SweepPlan


@pytest.mark.parametrize(("mode", "source", "base"), [("denoise", (1, 2), (3, 4)), ("noise", (3, 4), (1, 2))])
def test_rows_of_one_prompt_are_put_into_the_other(mode: str, source: tuple[int, ...], base: tuple[int, ...]) -> None:
    places = ((Place((1,), (1,)),),)
    plan = SweepPlan((Pair(clean=(1, 2), corrupt=(3, 4)),), ("z",), (0,), (0,), places, mode=mode, num_layers=1)
    assert (plan.source(0), plan.base(0)) == (source, base)
