"""The way of a row from the last block to what the model returns, as a lens takes it for rows of any block.

Models differ in what they do there: a norm (most), a projection behind it (OPT), a division (MiniCPM), nothing at all
(MiMo, which norms where it computes logits). So the way is found in a pass with noise, in which a tensor that is equal
to another, or a multiple of it, was made from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_weir.worker.discovery.anchors import TensorKey
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.trace import ModuleCall, Trace


@dataclass(frozen=True)
class Link:
    """A module on the way."""

    module: str  # path from the model
    scale: float  # it is given so many times the tensor before it
    result: TensorKey  # which tensor of its output goes on


@dataclass(frozen=True, eq=False)
class OutputPath:
    """What a model does with the stream behind its last block."""

    links: tuple[Link, ...]  # modules, each called with one tensor alone
    scale: float  # the model returns so many times what leaves the last of them
    stream: torch.Tensor  # what left the last block in a pass with the model's own weights, float32 [tokens, d]
    output: torch.Tensor  # what the model returned in that pass, float32 [tokens, any width]


def find_links(
    trace: Trace, matcher: Matcher, tensor: torch.Tensor, time: int
) -> tuple[tuple[Link, ...], float] | None:
    """Return the links from a tensor to what the model returned, and the last factor; None if they are not found.

    `tensor` is [tokens, width], and is there since `time` of the noise pass `trace`.
    """
    if trace.model_output is None:
        return None
    scale = matcher.factor(tensor, trace.model_output)
    if scale is not None:
        return (), scale
    # By their ends, parts come before the modules that they are parts of, which may do more than they are seen to do.
    for call in sorted((call for call in trace.outside if call.start > time), key=lambda call: call.end):
        given = given_times(call, tensor, matcher)
        if given is None:
            continue
        for key, value in _results(call).items():
            # What passes it on as it is (a dropout, a norm's second result) is no link.
            rest = None if matcher.same(value, tensor) else find_links(trace, matcher, value, call.end)
            if rest is not None:
                return (Link(call.path, given, key), *rest[0]), rest[1]
    return None


def _results(call: ModuleCall) -> dict[TensorKey, torch.Tensor]:
    return call.outputs | {key: value for key, value in call.other_widths.items() if key.kind == "out"}


def given_times(call: ModuleCall, tensor: torch.Tensor, matcher: Matcher) -> float | None:
    """Return how many times a tensor a call is given, alone or as the sum of two arguments; None if it is not."""
    given = [*call.args.values(), *(value for key, value in call.other_widths.items() if key.kind == "arg")]
    if len(given) == 2 and given[0].shape == given[1].shape and matcher.same(given[0] + given[1], tensor):
        return 1.0
    return next((scale for one in given if (scale := matcher.factor(tensor, one)) is not None), None)
