"""The probe's passes through a runner: uncompiled, and the model is as it was afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.unit.blocks import LAYERS, TOKENS, D, Model, Sequential
from vllm_weir.config.settings import Settings
from vllm_weir.worker.model_info import ModelInfo

pytest.importorskip("vllm")


@pytest.mark.parametrize("v2", [False, True])
def test_parts_that_are_compiled_by_themselves_are_not_in_the_probe(v2):
    """A norm or a rotary embedding may be: to compile it for these passes alone would hold every start up."""
    from torch._dynamo import config

    from vllm_weir.patches.model.discovery import find_sites

    compiled, passes = [], []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    model = Model([Sequential] * LAYERS)
    model.do_not_compile = False
    part = torch.compile(lambda x: x * 2.0, backend=backend)
    for block in model.layers:
        block.ln_1.forward = lambda x: part(x)

    def dummy_run(tokens, **options):
        passes.append((tokens, model.do_not_compile, sorted(options)))
        model(torch.zeros(tokens, dtype=torch.long))

    runner = SimpleNamespace(get_model=lambda: model, _dummy_run=dummy_run)
    setup = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    capabilities = ModelInfo(D, torch.float32, torch.device("cpu"), TOKENS)
    with config.patch(disable=False):  # engines in the same process may have left it otherwise
        find_sites(runner, setup, capabilities, Settings(describe={"stack": "layers"}), v2)
        assert passes and not compiled
        assert {p[:2] for p in passes} == {(TOKENS, True)}
        assert all(("skip_attn" in options) is v2 for *_, options in passes)
        assert model.do_not_compile is False
        model(torch.zeros(TOKENS, dtype=torch.long))
        assert compiled, "outside the probe it is compiled"
