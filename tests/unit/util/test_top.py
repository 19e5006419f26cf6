"""The largest values of rows, whether they are found by blocks or by sorting all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.util import top
from vllm_weir.util.top import as_records, top_values


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 3),
    m=st.integers(1, 300),
    k=st.integers(1, 40),
    distinct=st.sampled_from([2, 5, 1000]),
)
def test_blocks_find_what_sorting_finds(seed, n, m, k, distinct):
    """With few distinct values most are ties, which go by index."""
    k = min(k, m)
    values = torch.randint(distinct, (n, m), generator=torch.Generator().manual_seed(seed)).float() - distinct // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top, "SMALLEST", 1)
        ids, largest = top_values(values, k)
    order = [sorted(range(m), key=lambda i: (-row[i], i))[:k] for row in values.tolist()]
    assert ids.shape == largest.shape == (n, k) and ids.tolist() == order
    assert torch.equal(largest, values.gather(1, ids))


@pytest.mark.parametrize("m", [50, 5000])
def test_not_a_number_comes_first_and_zeros_are_equal(m):
    values = torch.zeros(1, m)
    values[0, m - 1], values[0, 7], values[0, 8], values[0, 3] = math.nan, math.inf, -math.inf, -0.0
    ids, largest = top_values(values, 4)
    assert ids.tolist() == [[m - 1, 7, 0, 1]]
    assert math.isnan(largest[0, 0]) and largest[0, 1:].tolist() == [math.inf, 0.0, 0.0]
    assert top_values(values, 5)[0].tolist() == [[m - 1, 7, 0, 1, 2]]


def test_records_are_bits():
    ids, values = top_values(torch.tensor([[0.5, 2.0, -1.0]]), 2)
    records = as_records(ids, values)
    assert records.dtype == torch.int32 and records[:, :2].tolist() == [[1, 0]]
    assert records[:, 2:].contiguous().view(torch.float32).tolist() == [[2.0, 0.5]]
