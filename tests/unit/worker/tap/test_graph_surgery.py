"""Taps between an all-reduce and a norm do not keep a pass from fusing the two, and act as they would have."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import config
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

from vllm_weir.patches.allreduce_fusion import tapped_op
from vllm_weir.worker.tap import op as taps_op
from vllm_weir.worker.tap.graph_surgery import detach, reattach

WIDTH, EPS = 32, 1e-5
LIBRARY = torch.library.Library("weir_test", "DEF")
LIBRARY.define("all_reduce(Tensor x) -> Tensor")
LIBRARY.define("norm(Tensor hidden, Tensor residual, Tensor weight) -> (Tensor, Tensor)")
LIBRARY.define(
    "fused(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, float rms_eps, "
    "Tensor(c!)? norm_out=None, float weight_bias=0.) -> ()"
)
CALLS: list[str] = []


def _norm(hidden, residual, weight):
    stream = hidden + residual
    return stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + EPS) * weight, stream


def _fused(allreduce_in, residual, rms_gamma, rms_eps, norm_out=None, weight_bias=0.0):
    CALLS.append("fused")
    norm, stream = _norm(2 * allreduce_in, residual, rms_gamma)
    allreduce_in.copy_(norm)
    residual.copy_(stream)


LIBRARY.impl("all_reduce", lambda x: 2 * x, "CPU")
LIBRARY._register_fake("all_reduce", torch.empty_like)
LIBRARY.impl("norm", _norm, "CPU")
LIBRARY._register_fake("norm", lambda h, r, w: (torch.empty_like(h), torch.empty_like(h)))
LIBRARY.impl("fused", _fused, "CPU")
LIBRARY._register_fake("fused", lambda *args, **kwargs: None)
OPS = torch.ops.weir_test


class Fusion:
    """As vLLM's pass: `all_reduce -> norm` becomes the fused op; `fuses` False finds nothing to replace."""

    def __init__(self, fuses: bool = True) -> None:
        self.patterns, self.matches = PatternMatcherPass(pass_name="weir_test"), 0
        example = [torch.empty(5, WIDTH), torch.empty(5, WIDTH), torch.empty(WIDTH)]

        def pattern(x, residual, weight):
            return OPS.norm(OPS.all_reduce(x), residual, weight)

        def replacement(x, residual, weight):
            call = auto_functionalized(
                OPS.fused.default, allreduce_in=x, residual=residual, rms_gamma=weight, rms_eps=EPS, norm_out=None
            )
            return call[1], call[2]

        if fuses:
            register_replacement(pattern, replacement, example, fwd_only, self.patterns)

    def __call__(self, graph: torch.fx.Graph) -> None:
        detached = detach(graph, OPS.all_reduce.default)
        self.chains = [taps.kinds for taps in detached]
        self.matches = self.patterns.apply(graph)
        self.count = reattach(graph, detached, OPS.fused.default, tapped_op(OPS.fused.default))
        graph.lint()

    def uuid(self) -> None:
        return None


@pytest.fixture
def taps():
    """Three taps, whose act is recorded and adds their number to the stream; by default none is live."""
    empty = torch.empty(0)
    switch = taps_op.TapSwitch(taps_op.TapTensors(*[empty] * len(taps_op.fields(taps_op.TapTensors))))
    numbers = [taps_op.numbered(tap) for tap in (1, 2, 3)]
    for tap, number in zip((1, 2, 3), numbers):
        switch.register(number, tap)

    def launch(hidden, residual, number, *tables, **_):
        CALLS.append(f"tap {int(number[0])}")
        hidden += int(number[0])

    switch.launch = launch
    return switch, numbers


def block(x, residual, weight, first, second, third):
    """One all-reduce with a tap on what is added and one on the stream, another with a tap behind the norm too."""
    hidden = OPS.all_reduce(x)
    torch.ops.weir.tap(hidden, first)
    torch.ops.weir.tap_residual(hidden, residual, second)
    norm, stream = OPS.norm(hidden, residual, weight)
    again = OPS.all_reduce(norm.sin())
    torch.ops.weir.tap_residual(again, stream, third)
    return OPS.norm(again, stream, weight)


def inputs():
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, WIDTH, generator=generator) for _ in range(2))
    return x, residual, torch.rand(WIDTH, generator=generator)


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def branching(x, residual, weight, first, *_):
    """What a tap changes is read by a second module before the tap."""
    hidden = OPS.all_reduce(x)
    early = hidden.sum()
    torch.ops.weir.tap(hidden, first)
    norm, stream = OPS.norm(hidden, residual, weight)
    return norm, stream, early


def plain(x, residual, weight, *_):
    return OPS.norm(OPS.all_reduce(x), residual, weight)


def _act_in_parts(taps, kinds, *, allreduce_in, residual, rms_gamma, **_):
    hidden = OPS.all_reduce(allreduce_in)
    for number, kind in zip(taps, kinds, strict=True):
        torch.ops.weir.tap(hidden, number) if kind == "a" else torch.ops.weir.tap_residual(hidden, residual, number)
    norm, stream = _norm(hidden, residual, rms_gamma)
    allreduce_in.copy_(norm)
    residual.copy_(stream)


class Case(NamedTuple):
    function: Any
    live: int
    chains: list[str]
    """Kinds of the taps of each all-reduce that are taken out of the pass's way."""
    fused: int
    """How many all-reduces are fused with their norm, taps in between or not."""
    acts: list[str]
    fuses: bool = True


CASES = {
    "silent taps leave the fused op": Case(block, 0, ["ap", "p"], 2, ["fused", "fused"]),
    "taps stay where nothing is fused": Case(block, 0b1110, ["ap", "p"], 0, ["tap 1", "tap 2", "tap 3"], fuses=False),
    "a live tap acts between the two": Case(block, 0b0100, ["ap", "p"], 2, ["tap 2", "fused"]),
    "a tensor that others use keeps its taps": Case(branching, 0b1110, [], 0, ["tap 1"]),
    "an all-reduce without taps is fused as ever": Case(plain, 0, [], 1, ["fused"]),
}
QUICK = ("a live tap acts between the two", "a tensor that others use keeps its taps")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.thorough) for name, case in CASES.items()],
)
def test_what_becomes_of_taps_and_fusion(taps, case, monkeypatch):
    switch, numbers = taps
    switch.set_active(case.live)
    expected = case.function(*copies(inputs()), *numbers)
    CALLS.clear()
    monkeypatch.setattr("vllm_weir.patches.allreduce_fusion._act", _act_in_parts)
    fusion = Fusion(case.fuses)
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": fusion, "enable_auto_functionalized_v2": False, "fx_graph_cache": False}
    with config.patch(options):
        found = torch.compile(case.function, fullgraph=True)(*copies(inputs()), *numbers)
    assert fusion.chains == case.chains and case.acts == CALLS
    assert fusion.matches == case.fused and fusion.count == (case.fused if case.chains else 0)
    torch.testing.assert_close(found, expected)
