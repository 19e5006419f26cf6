"""The reference reads transformers' own blocks."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from vllm_weir.util.transformers_reference import TransformersReference

IDS = [1, 5, 9, 11, 7]


@pytest.fixture(scope="module")
def reference() -> TransformersReference:
    return TransformersReference.from_pretrained(weir.demo_model())


def test_streams_are_transformers_hidden_states(reference: TransformersReference) -> None:
    entered, left = reference.streams(IDS)
    with torch.no_grad():
        states = reference.network(torch.tensor([IDS]), use_cache=False, output_hidden_states=True).hidden_states
    assert torch.equal(entered, states[0][0]) and len(left) == len(states) - 1
    for layer, expected in enumerate(states[1:-1]):  # the last one comes after the final norm
        assert torch.equal(left[layer], expected[0])
    assert not torch.allclose(left[-1], states[-1][0])


def test_positions_choose_rows(reference: TransformersReference) -> None:
    entered, left = reference.streams(IDS)
    some_entered, some_left = reference.streams(torch.tensor(IDS), torch.tensor([0, 3]))
    assert torch.equal(some_entered, entered[[0, 3]]) and torch.equal(some_left, left[:, [0, 3]])


def test_a_model_without_one_stack_of_blocks_is_refused(reference: TransformersReference) -> None:
    with pytest.raises(ValueError, match="0 stacks of 99 blocks"):
        TransformersReference(reference.network, 99)
