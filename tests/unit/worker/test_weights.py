"""The fingerprint of weights: another one after any change of any word, the same wherever they came from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.worker import parameters
from vllm_weir.worker.parameters import fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.bool)


def of(*tensors: torch.Tensor) -> str:
    return fingerprint([(f"block.{i}", tensor) for i, tensor in enumerate(tensors)])


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 7), min_size=0, max_size=3), st.data())
def test_a_change_of_one_bit_is_another(dtype, shape, data):
    size = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    at = data.draw(st.integers(0, size - 1))
    bit = 0 if dtype is torch.bool else data.draw(st.integers(0, 7))
    changed = content.clone()
    changed[at] ^= 1 << bit
    one, same, other = (bits.view(dtype).reshape(shape) for bits in (content, content.clone(), changed))
    assert of(one) == of(same) != of(other)
    spaced = torch.stack([one, one], -1)[..., 0]  # not contiguous, and at an offset
    assert of(spaced) == of(one)


@pytest.mark.parametrize("count", [9, 3 * 64 + 5])
def test_other_places_are_another(count, monkeypatch):
    """Also where words change places between the parts that are summed, or their signs with each other."""
    monkeypatch.setattr(parameters, "CPU_WORDS", 64)
    value = torch.randn(count, generator=torch.Generator().manual_seed(1))
    swapped, negated = value.clone(), value.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    negated[[1, 2]] *= -1
    rolled = value.roll(64)
    assert len({of(value), of(swapped), of(negated), of(rolled), of(value.flip(0))}) == 5


def test_shapes_dtypes_and_names_count():
    value = torch.zeros(2, 6)
    others = [value.view(6, 2), value.view(torch.int32), torch.zeros(2, 7), value.bfloat16()]
    assert len({of(value), *map(of, others), fingerprint([("other", value)])}) == 6
    assert of(value, value) != of(value) and of(torch.zeros(0)) != of()


def test_a_transposed_matrix_is_read_as_it_lies():
    value = torch.randn(5, 3)
    assert of(value.t()) == of(value.clone().t()) != of(value)


def test_tensors_without_memory_are_refused():
    with refused("", "block.0 are not loaded"):
        of(torch.empty(3, device="meta"))
