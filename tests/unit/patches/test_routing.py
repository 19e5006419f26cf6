"""Which routers a model has, and which block's choices each of them records."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from vllm_weir.patches.model.discovery import find_routers
from vllm_weir.schema.routing import RoutedBlocks


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = CPURouter(top_k=2, global_num_experts=8, renormalize=True)


def found_in(blocks, **parallel):
    parallel = {"data_parallel_size": 1} | parallel
    return find_routers(torch.nn.Module(), blocks, SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))


def test_each_router_records_the_choices_of_its_block(monkeypatch):
    blocks = {0: torch.nn.Module(), 1: torch.nn.Sequential(Layer()), 3: torch.nn.Sequential(Layer())}
    found, numbers, recorded = found_in(blocks), {}, {}
    assert found.blocks == RoutedBlocks((1, 3), 8, 2) and not found.refused
    rows = SimpleNamespace(wanted=True, register=lambda block: numbers.setdefault(block, torch.tensor([block])))
    found.install(rows)
    record = SimpleNamespace(
        routing=lambda weights, ids, _logits, number: recorded.update({int(number[0]): (weights, ids)})
    )
    monkeypatch.setattr(torch.ops, "weir", record)
    for index in (1, 3):
        logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
        weights, ids = blocks[index][0].router._compute_routing(logits, logits, None)
        assert torch.equal(recorded[index][0], weights) and torch.equal(recorded[index][1], ids)
    assert numbers.keys() == recorded.keys() == {1, 3}


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"use_sequence_parallel_moe": True}, "sequence parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_routers_that_see_other_tokens_are_refused(parallel, says):
    assert says in found_in({0: torch.nn.Sequential(Layer())}, **parallel).refused
