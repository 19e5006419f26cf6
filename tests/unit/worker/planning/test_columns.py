"""Structured columns and their views."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_weir.worker.planning.columns import RUN, SCORE_READ, as_integers, concatenate


@pytest.mark.parametrize("dtype", [RUN, SCORE_READ])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_integers_are_a_view(dtype, count):
    array = np.zeros(count, dtype)
    integers = as_integers(array)
    assert integers.shape == (count, len(dtype)) and integers.dtype == dtype[0]
    integers[:] = 7
    assert (array[dtype.names[0]] == 7).all()
    assert (integers + np.arange(len(dtype))).shape == integers.shape


def test_nothing_is_joined():
    assert concatenate([], RUN).shape == (0,)
    assert len(concatenate([np.zeros(2, RUN), np.zeros(0, RUN), np.zeros(1, RUN)], RUN)) == 3
