"""The op of the routers: what it writes is what `ModelRouting` reads back, to the bit, in every dtype of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_weir.schema.routing import ModelRouting, RoutedBlocks
from vllm_weir.schema.taps import STAGES, num_taps, tap_of
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.routing import RoutedRows

LAYERS, TOKENS = 6, 5
LOGITS = torch.zeros(TOKENS, 8)


def switch_of(blocks: RoutedBlocks, dtype: torch.dtype) -> TapSwitch:
    """A switch whose plan captures every token at the tap of the routers, into a ring of just such rows."""
    width, tap, taps = int(np.prod(blocks.shape)), tap_of(blocks.site), num_taps(LAYERS)
    ranks = torch.full((1, taps * STAGES), -1, dtype=torch.int32)
    ranks[0, tap * STAGES + 1] = 0
    plan = torch.zeros(TOKENS, 4, dtype=torch.int32)
    plan[:, 0], plan[:, 2] = torch.arange(TOKENS), -1
    empty = torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, 4), torch.zeros(0, width)
    heads = torch.full((1, taps), -1, dtype=torch.int32)
    return TapSwitch(TapTensors(plan, ranks, torch.zeros(TOKENS, width, dtype=dtype), heads, *empty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("experts", "id_dtype"), [(8, torch.int64), (256, torch.int32), (257, torch.int32)])
def test_choices_survive_the_ring(dtype, experts, id_dtype):
    blocks = RoutedBlocks((1, 2, 5), experts, 4)
    switch = switch_of(blocks, dtype)
    rows = RoutedRows(blocks, switch, TOKENS, dtype, torch.device("cpu"))
    numbers = {block: rows.register(block) for block in blocks.blocks}
    draw = torch.Generator().manual_seed(experts)
    ids = {b: torch.rand(TOKENS, experts, generator=draw).argsort(-1)[:, :4].to(id_dtype) for b in numbers}
    ids[5][0, 0] = experts - 1
    weights = {b: torch.randn(TOKENS, 4, generator=draw) * 10.0 ** torch.randint(-30, 30, (TOKENS, 4)) for b in numbers}
    for on in (False, True):
        switch.set_active(1 << rows.tap if on else 0)
        assert rows.wanted is on
        for block, number in numbers.items():
            torch.ops.weir.routing(weights[block], ids[block], LOGITS, number)
        assert bool(switch.tensors.ring.any()) is on
    read = {blocks.site: switch.tensors.ring.to(torch.uint8).numpy()}
    model = ModelRouting.merge([{"routers": {"refused": "", **blocks._asdict()}}], LAYERS)
    found = model.joined(read, weights=True)
    assert found.ids.dtype == (np.uint16 if experts > 256 else np.uint8) and found.weights is not None
    for block in range(LAYERS):
        want = ids[block].numpy() if block in ids else np.zeros((TOKENS, 4))
        scores = weights[block].numpy() if block in ids else np.zeros((TOKENS, 4), np.float32)
        assert np.array_equal(found.ids[:, block], want) and np.array_equal(found.weights[:, block], scores)
    assert model.joined(read, weights=False).weights is None


def test_weights_of_a_smaller_dtype_come_as_float32():
    blocks = RoutedBlocks((0,), 8, 2)
    switch = switch_of(blocks, torch.bfloat16)
    rows = RoutedRows(blocks, switch, TOKENS, torch.bfloat16, torch.device("cpu"))
    number, weights = rows.register(0), torch.rand(TOKENS, 2).bfloat16()
    switch.set_active(1 << rows.tap)
    torch.ops.weir.routing(weights, torch.zeros(TOKENS, 2, dtype=torch.int32), LOGITS, number)
    assert np.array_equal(blocks.weights(switch.tensors.ring.to(torch.uint8).numpy())[:, 0], weights.float().numpy())
