"""What a sweep over HTTP is made of: counterparts of positions, and the tokens that cover a text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.unit.refusals import refused
from vllm_weir.compat.rhizonymph import sweep as patch_sweep
from vllm_weir.compat.rhizonymph.steering_schemas import PatchSweep, align, positions_of

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(clean=TOKENS, corrupt=TOKENS)
def test_counterparts_of_positions(clean, corrupt):
    """Each is the same token, unless the prompts have one length; and none is missed at either end."""
    sources, said = align(clean, corrupt)
    assert sorted({*sources, *said["unaligned_positions"]}) == list(range(len(corrupt)))
    assert all(0 <= source < len(clean) for source in sources.values())
    assert sorted(sources.values()) == [sources[p] for p in sorted(sources)] and len({*sources.values()}) == len(
        sources
    )
    if len(clean) == len(corrupt):
        assert sources == {p: p for p in range(len(corrupt))}
        return
    assert all(clean[source] == corrupt[p] for p, source in sources.items())
    if min(len(clean), len(corrupt)) > len(sources):  # something is left between: it differs at both ends
        left = said["unaligned_positions"]
        assert not left or corrupt[left[0]] != clean[left[0]]
        assert not left or corrupt[left[-1]] != clean[left[-1] + len(clean) - len(corrupt)]


def test_tokens_that_cover_a_text():
    words = ["<s>", "Tom", " was", " hap", "py", " Tom"]
    ends = [0, 3, 7, 11, 13, 17]
    offsets = list(zip([0, *ends], ends, strict=False))
    tokenizer = lambda text, return_offsets_mapping: {"offset_mapping": offsets}

    def found(*positions):
        body = PatchSweep(prompt="Tom was happy Tom", layers=[0], positions=list(positions))
        return positions_of(body, range(len(words)), tokenizer)

    assert found({"span": "happy"}, 1, 3) == [3, 4, 1]
    assert found({"span": "Tom"}) == [1] and found({"span": "Tom", "occurrence": 1}) == [5]
    with refused("positions"):
        found(*[{"span": "Tom"}] * 65)
    for wrong in ({"span": "Tom", "occurrence": 2}, {"span": "sad"}, 6, -1):
        with refused("positions[1]"):
            found(0, wrong)


WRONG = [
    {"more": 1}, {"layers": None}, {"layers": [0.5]}, {"layers": [-1]}, {"positions": [True, "x"]}, {"hooks": []},
    {"prompt": ""}, {"done": [{"hook": "q"}]}, {"metric": "loss"}, {"layers": {"start": 0, "stop": 4, "step": 0}},
]  # fmt: skip


@pytest.mark.parametrize("more", WRONG)
def test_bodies_that_are_refused(more):
    with pytest.raises(ValidationError):
        PatchSweep(**{"prompt": "x", "layers": [0]} | more)


def test_a_summary_has_the_grids_of_all_hooks():
    body = SimpleNamespace(metric="logprob", hooks=["a", "b"])
    plan = patch_sweep.Plan(body, ["a", "b"], [1, 2], [0, 3], [], [], None, {}, None, -1.0, [], None)
    values = {(h, layer, p): 10.0 * layer + p + (h == "b") for h in "ab" for layer in (1, 2) for p in (0, 3)}
    said = patch_sweep._summary(plan, values, 0.5)
    assert said["grid"] == [[10.0, 13.0], [20.0, 23.0]] and said["hook_grids"][1]["grid"][0] == [11.0, 14.0]
    assert said["argmax"] == {"layer": 2, "position": 3, "value": 23.0} and said["noise_floor"] == 0.5
