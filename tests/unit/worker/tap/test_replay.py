"""Which experts the routers of a worker have to choose in a step, and what choosing them does to a router's result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.forced import random_experts
from tests.unit.patches.test_model_facts import CPU_ROUTERS, Experts, facts_of
from tests.unit.worker.tap.test_routing import LAYERS, TOKENS, switch_of
from vllm_weir.errors import WeirError
from vllm_weir.schema.replay import ReplayRows
from vllm_weir.schema.routing import RoutedBlocks
from vllm_weir.schema.taps import REPLAY
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.tap.op import EVERYTHING
from vllm_weir.worker.tap.replay import Replays
from vllm_weir.worker.tap.routing import RoutedRows, force

BLOCKS = RoutedBlocks((1, 2), 8, 2)
ARRAY = random_experts((6, 3, 2), 8, 1, dense=(0,))
ROWS = ReplayRows(4, ARRAY.shape, ARRAY.tobytes())
FREE = -1


def replays(uncertainty=0, most=16):
    made = Replays(BLOCKS, most, torch.device("cpu"), uncertainty)
    made.hold("b", ROWS)
    return made


def forced_at(positions):
    """What the routers have to choose for a token of request b at each position."""
    return [ARRAY[p - 4, 1:].tolist() if 4 <= p < 10 else [[FREE] * 2] * 2 for p in positions]


@pytest.mark.parametrize("start", [0, 2, 4, 7, 9, 10, 40])
def test_each_token_has_the_experts_of_its_position(start):
    made = replays()
    made.write(["a", "b", "c"], [2, 4, 1], [0, start, 9], None, True)
    free = [[[FREE] * 2] * 2]
    assert made.forced[:7].tolist() == free * 2 + forced_at(range(start, start + 4)) + free
    assert (made.forced[7:] == FREE).all()
    made.write(["b"], [1], [5], None, True)  # nothing of the longer step is left
    assert made.forced[:1].tolist() == forced_at([5]) and (made.forced[1:] == FREE).all()
    made.write(["a"], [3], [5], None, False)
    assert (made.forced == FREE).all()
    made.write(["b"], [1], [5], None, True)
    made.release("b")
    made.write(["b"], [1], [6], None, True)
    assert (made.forced == FREE).all() and not len(made)


@pytest.mark.parametrize("behind", range(4))
def test_the_device_knows_the_position_of_a_token_after_drafts(behind):
    made, planned = replays(uncertainty=3), 6
    positions = torch.tensor([5, *(planned - behind + k for k in range(4)), 0, 0])
    made.write(["a", "b"], [1, 4], [5, planned], positions, True)
    wanted = [[[FREE] * 2] * 2, *forced_at(positions[1:5].tolist())]
    assert made.forced[:5].tolist() == wanted and (made.forced[5:] == FREE).all()


def test_a_step_whose_routers_do_not_act_is_refused():
    with pytest.raises(WeirError, match="choose freely"):
        replays().write(["b"], [1], [5], None, False)
    none = Replays(None, 4, torch.device("cpu"))
    none.hold("b", ROWS)
    none.write(["b"], [1], [5], None, False)
    assert not len(none)


@pytest.mark.parametrize("number", range(len(CPU_ROUTERS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_other_experts_are_the_routers_own(number, dtype):
    """A router's choice, in another order, has its own weights; and so have other experts by the rule of its scores."""
    router = CPU_ROUTERS[number]
    logits = torch.randn(100, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    own, ids = router._compute_routing(logits, logits, None)
    facts = facts_of((Experts(router),), on_cpu=True).routing[0]
    weights, changed = own.flip(-1).clone() * 0, ids.clone()
    force(weights, changed, logits, ids.flip(-1).to(torch.int16), facts)
    assert torch.equal(changed, ids.flip(-1)) and (weights - own.flip(-1)).abs().max() <= 1e-6
    others = torch.from_numpy(random_experts((100, 1, 3), 16, 3)[:, 0].astype(np.int16))
    others[::3] = FREE
    weights, changed = own.clone(), ids.clone()
    force(weights, changed, logits, others, facts)
    assert torch.equal(weights[::3], own[::3]) and torch.equal(changed[::3], ids[::3])
    kept = torch.ones(100, dtype=torch.bool)
    kept[::3] = False
    assert torch.equal(changed[kept].long(), others[kept].long())
    scores = logits.float().softmax(-1) if router.scoring_func == "softmax" else logits.float().sigmoid()
    expected = scores.gather(-1, changed.long())
    expected = expected / expected.sum(-1, keepdim=True) if router.renormalize else expected
    scale = router.routed_scaling_factor if router.use_grouped_topk else 1.0
    assert (weights[kept] - scale * expected[kept]).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-2)


def test_experts_that_stay_keep_the_bits_of_their_weights():
    router = CPU_ROUTERS[0]
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(4))
    own, ids = router._compute_routing(logits, logits, None)
    facts = facts_of((Experts(router),), on_cpu=True).routing[0]
    weights, changed = own + 1e-3, ids.clone()
    force(weights, changed, logits, ids.to(torch.int16), facts)
    assert torch.equal(weights, own + 1e-3) and torch.equal(changed, ids)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64, torch.uint32])
def test_the_op_forces_and_records_in_one(id_dtype):
    blocks = RoutedBlocks((1, 2), 16, 3)
    switch, made = switch_of(blocks, torch.float32), Replays(blocks, TOKENS, torch.device("cpu"))
    facts = facts_of((Experts(CPU_ROUTERS[0]),), on_cpu=True).routing[0]
    rows = RoutedRows(blocks, switch, TOKENS, torch.float32, torch.device("cpu"), made, {1: facts, 2: facts})
    array = random_experts((TOKENS, LAYERS, 3), 16, 5)
    made.hold("b", ReplayRows(0, array.shape, array.tobytes()))
    made.write(["b"], [TOKENS], [0], None, True)
    logits = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(6))
    for mask in (1 << REPLAY, 1 << rows.tap, 1 << REPLAY | 1 << rows.tap, EVERYTHING):
        switch.set_active(mask)
        switch.tensors.ring.zero_()
        assert rows.wanted
        for block in (1, 2):
            weights, ids = CPU_ROUTERS[0]._compute_routing(logits, logits, None)
            own, ids = ids.clone(), ids.to(id_dtype)
            torch.ops.weir.routing(weights, ids, logits, rows.register(block))
            is_forced = mask > 0 and bool(mask >> REPLAY & 1)  # a graph of all taps forces nothing
            wanted = torch.from_numpy(array[:, block].astype(np.int64)) if is_forced else own.long()
            assert torch.equal(ids.long(), wanted)
            if mask >> rows.tap & 1 and block == 2:
                assert np.array_equal(blocks.ids(switch.tensors.ring.to(torch.uint8).numpy())[:, 1], wanted.numpy())
    switch.set_active(0)
    assert not rows.wanted


def test_a_request_needs_its_routers_as_long_as_something_is_replayed():
    from vllm_weir.schema.engine_spec import EngineSpec
    from vllm_weir.schema.request import ResolvedSpec

    taps = ActiveTaps()
    taps.join("prompt alone", EngineSpec(ResolvedSpec(()), replayed=(0, 10)), 10)
    assert taps.taps_in((["prompt alone"], [9])) == 1 << REPLAY and not taps.taps_in((["prompt alone"], [10]))
    taps.join("more", EngineSpec(ResolvedSpec(()), replayed=(0, 11)), 10)
    assert taps.taps_in((["more"], [40])) == 1 << REPLAY
