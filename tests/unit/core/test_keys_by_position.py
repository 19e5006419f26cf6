"""Prefix-cache keys where each position has a row of its own."""

from __future__ import annotations

import torch

import vllm_weir as weir
from tests.unit.request_strategies import served
from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.request import RequestSpec

D, BLOCK, P = 4, 4, 12
FACTS = EngineCapabilities(served(2), 2, D, "float32", 1024)
IDS = list(range(P))


def keys(rows: torch.Tensor, positions) -> list[str | None]:
    spec = RequestSpec((), (weir.Add(rows, 1, positions=positions),))
    made = CacheKeys(admit({"weir": spec}, FACTS).effective, P)
    return [made.of_block(start, IDS[start : start + BLOCK]) for start in range(0, P, BLOCK)]


def test_a_blocks_key_says_which_rows_its_positions_get():
    rows = torch.arange(6 * D, dtype=torch.float32).view(6, D) + 1
    for positions in ([2, 3, 5, 6, 8, 9], "prompt", "6:12"):
        own = torch.cat([rows, rows + 50]) if positions == "prompt" else rows
        first = keys(own, positions)
        for rank in range(len(own)):
            other = own.clone()
            other[rank] += 1
            at = positions[rank] if isinstance(positions, list) else rank + (6 if positions == "6:12" else 0)
            changed = [a != b for a, b in zip(first, keys(other, positions), strict=True)]
            assert changed == [start <= at < start + BLOCK for start in range(0, P, BLOCK)]
