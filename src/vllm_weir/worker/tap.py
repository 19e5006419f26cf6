"""The tap: one opaque custom op a site, traced into the model's graph by forward hooks on module instances.

The op reads everything from tensors (the site's number, the step's plan, the tables, the ring), so every layer's graph
is the same and nothing about it changes from step to step. It is declared to mutate the stream, which keeps the
compiler from moving or dropping it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from vllm_weir.worker.plan import STAGES

_LIBRARY = torch.library.Library("weir", "DEF")
_SCHEMA = "Tensor(a!) hidden, {residual}Tensor tap, Tensor plan, Tensor ranks, Tensor ring) -> ()"
_LIBRARY.define("tap(" + _SCHEMA.format(residual=""))
_LIBRARY.define("tap_residual(" + _SCHEMA.format(residual="Tensor(b!) residual, "))


@dataclass(frozen=True)
class TapTensors:
    """What the taps of one worker share.

    Attributes:
        plan: int32 [2, max tokens], slot and profile of every token of the step, -1 for none.
        ranks: int32 [max profiles, columns], place of a column in a profile, -1 if it is not wanted.
        ring: [rows, d_model] in the model's dtype.
    """

    plan: torch.Tensor
    ranks: torch.Tensor
    ring: torch.Tensor


def _tap_cpu(hidden, residual, tap, plan, ranks, ring) -> None:
    slots = plan[0, : hidden.shape[0]]
    tokens = (slots >= 0).nonzero().squeeze(1)
    if not len(tokens):
        return
    column = int(tap) * STAGES
    per_stage = ranks[plan[1, tokens].long(), column : column + STAGES]
    wanted = (per_stage >= 0).any(1)
    if not wanted.any():
        return
    tokens, per_stage = tokens[wanted], per_stage[wanted]
    rows = hidden[tokens] if residual is None else hidden[tokens] + residual[tokens]
    for stage in range(STAGES):
        ranked = per_stage[:, stage]
        at = ranked >= 0
        if at.any():
            ring[(slots[tokens[at]] + ranked[at]).long()] = rows[at].to(ring.dtype)


def _tap_cuda(hidden, residual, tap, plan, ranks, ring) -> None:
    from vllm_weir.worker.tap_triton import launch

    launch(hidden, residual, tap, plan, ranks, ring)


def _plain(implementation):
    def tap(hidden, tap, plan, ranks, ring):
        implementation(hidden, None, tap, plan, ranks, ring)

    return tap


def _nothing(*_) -> None:
    """Fake (shape) kernel: the op returns nothing and changes no shape."""


for _key, _implementation in (("CPU", _tap_cpu), ("CUDA", _tap_cuda)):
    _LIBRARY.impl("tap", _plain(_implementation), _key)
    _LIBRARY.impl("tap_residual", _implementation, _key)
_LIBRARY._register_fake("tap", _nothing)
_LIBRARY._register_fake("tap_residual", _nothing)


def place_output_tap(block: torch.nn.Module, tap: int, tensors: TapTensors) -> None:
    """Tap what leaves `block`: a tensor, or (hidden, residual) whose sum is the stream."""
    _own(block, tap, tensors, "post")
    block.register_forward_hook(_after_block)


def place_input_tap(block: torch.nn.Module, tap: int, tensors: TapTensors, hidden: str, residual: str | None) -> None:
    """Tap what enters `block`; `hidden` and `residual` name the forward arguments that carry the stream."""
    _own(block, tap, tensors, "pre")
    names = list(inspect.signature(block.forward).parameters)
    hidden_at = names.index(hidden)
    residual_at = names.index(residual) if residual else -1

    def before_block(module, args, kwargs):
        h = args[hidden_at] if hidden_at < len(args) else kwargs[hidden]
        r = None
        if residual_at >= 0:
            r = args[residual_at] if residual_at < len(args) else kwargs.get(residual)
        _apply(h, r, module.weir_pre_tap, module.weir_plan, module.weir_ranks, module.weir_ring)

    block.register_forward_pre_hook(before_block, with_kwargs=True)


def _after_block(module, _args, output):
    hidden, residual = output if isinstance(output, tuple) else (output, None)
    _apply(hidden, residual, module.weir_post_tap, module.weir_plan, module.weir_ranks, module.weir_ring)


def _apply(hidden, residual, tap, plan, ranks, ring) -> None:
    if residual is None:
        torch.ops.weir.tap(hidden, tap, plan, ranks, ring)
    else:
        torch.ops.weir.tap_residual(hidden, residual, tap, plan, ranks, ring)


def _own(block: torch.nn.Module, tap: int, tensors: TapTensors, side: str) -> None:
    number = torch.tensor(tap, dtype=torch.int32, device=tensors.plan.device)
    block.register_buffer(f"weir_{side}_tap", number, persistent=False)
    for name in ("plan", "ranks", "ring"):
        block.register_buffer(f"weir_{name}", getattr(tensors, name), persistent=False)
