"""A live tap between all-reduce and norm: the parts give what vLLM's fused kernel gives, with the taps in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_weir.patches import allreduce_fusion
from vllm_weir.worker.tap import op as taps_op
from vllm_weir.worker.tap.graph_surgery import ALONE, PAIR

WIDTH, EPS = 16, 1e-5


@pytest.fixture
def taps(monkeypatch):
    """Two live taps: the first adds 1 to what is added, the second 2 to the stream. An all-reduce doubles."""
    empty = torch.empty(0)
    switch = taps_op.TapSwitch(taps_op.TapTensors(*[empty] * len(taps_op.fields(taps_op.TapTensors))))
    numbers = [taps_op.numbered(tap) for tap in (1, 2)]
    for tap, number in zip((1, 2), numbers):
        switch.register(number, tap)
    switch.launch = lambda hidden, residual, number, *tables, **_: hidden.add_(int(number[0]))
    switch.set_active(0b110)
    monkeypatch.setattr("vllm.distributed.communication_op.tensor_model_parallel_all_reduce", lambda x: 2 * x)
    yield numbers
    switch.set_active(0)  # it is held until here


def inputs():
    generator = torch.Generator().manual_seed(0)
    source, residual = (torch.randn(3, WIDTH, generator=generator) for _ in range(2))
    return source, residual, torch.rand(WIDTH, generator=generator)


@pytest.mark.parametrize("how", ["in place", "with a bias", "with an output", "quantised"])
def test_norm_and_stream_go_where_the_kernel_puts_them(taps, how, monkeypatch):
    """With an output for the norm the stream takes the input's place."""
    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", lambda x, scale, output: output.copy_(x / scale))
    source, residual, weight = inputs()
    out, scale = torch.empty_like(source), torch.tensor(0.5)
    stream = 2 * source + 1 + 2 + residual
    norm = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + EPS)
    more, places, wanted = {
        "in place": ({}, (source, residual), norm * weight),
        "with a bias": ({"weight_bias": 1.0}, (source, residual), norm * (weight + 1)),
        "with an output": ({"norm_out": out}, (out, source), norm * weight),
        "quantised": ({"quant_out": out, "scale_factor": scale}, (out, residual), norm * weight / scale),
    }[how]
    arguments = dict(
        allreduce_in=source, residual=residual, rms_gamma=weight, rms_eps=EPS, world_size=2, pattern_code=0
    )
    allreduce_fusion._act(taps, ALONE + PAIR, **arguments, **more)
    torch.testing.assert_close(places, (wanted, stream))


def scaled_fp4_quant():
    """Stands for vLLM's op."""


@pytest.mark.parametrize("target", [scaled_fp4_quant, torch.relu])
def test_a_graph_that_cannot_be_fused_goes_to_the_pass_as_it_is(monkeypatch, target):
    """One that quantises to FP4, of which the parts know nothing; or any, without FlashInfer's op."""
    graph = torch.fx.Graph()
    graph.call_function(target, ())
    if target is scaled_fp4_quant:
        monkeypatch.setattr(torch.ops.vllm, allreduce_fusion._FUSED, SimpleNamespace(default=None), raising=False)
    monkeypatch.setattr(allreduce_fusion, "detach", None)
    seen = []
    allreduce_fusion.apply(lambda self, given: seen.append((self, given)), None)("the pass", graph)
    assert seen == [("the pass", graph)]
