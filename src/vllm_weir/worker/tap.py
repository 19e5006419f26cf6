"""The tap: one opaque custom op a site, traced into the model's graph by forward hooks on module instances.

The op reads everything from tensors (the site's number, the step's plan, the tables, the ring), so every layer's graph
is the same and nothing about it changes from step to step. It mutates the stream in place, so it is seen by everything
downstream, and the compiler can neither move nor drop it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch.compiler import is_compiling

from vllm_weir.spec.interventions import AFFINE, BLEND, CLAMP, CONST, NORM
from vllm_weir.worker.anchors import Anchor, pick
from vllm_weir.worker.programs import AFTER_POST, LAST
from vllm_weir.worker.select import STAGES

_LIBRARY = torch.library.Library("weir", "DEF")
_TABLES = "Tensor tap, Tensor plan, Tensor ranks, Tensor ring, Tensor heads, Tensor ints, Tensor floats, Tensor vectors"
_LIBRARY.define(f"tap(Tensor(a!) hidden, {_TABLES}) -> ()")
_LIBRARY.define(f"tap_residual(Tensor(a!) hidden, Tensor(b!) residual, {_TABLES}) -> ()")
_LIBRARY.define(f"tap_offset(Tensor(a!) hidden, Tensor offset, {_TABLES}) -> ()")


@dataclass(frozen=True)
class TapTensors:
    """What the taps of one worker share.

    Attributes:
        plan: int32 [max tokens, 3], slot, profile and program of every token of the step, -1 for none.
        ranks: int32 [max profiles, columns], place of a column in a profile, -1 if it is not wanted.
        ring: [rows, d_model] in the model's dtype.
        heads, ints, floats, vectors: the tables of `vllm_weir.worker.programs.ProgramTable`.
    """

    plan: torch.Tensor
    ranks: torch.Tensor
    ring: torch.Tensor
    heads: torch.Tensor
    ints: torch.Tensor
    floats: torch.Tensor
    vectors: torch.Tensor


ALL = -1
"""Mask of every tap; bit t of a mask stands for tap t."""


class Switch:
    """Which of the taps that share a plan act: in a CUDA graph as they are captured, elsewhere as they run.

    A silent tap returns before it launches anything, so a graph captured silently has no trace of it. Must not be
    turned while a forward pass is being issued.

    Attributes:
        mask: the taps that act; 0 for none.
        numbers: address of each tap's number on the device -> the number.
        launch: what taps do instead of their usual work, with the same arguments; None for the usual.
    """

    __slots__ = ("__weakref__", "launch", "mask", "numbers", "pinned")

    def __init__(self, plan: torch.Tensor) -> None:
        self.mask, self.pinned = 0, False
        self.numbers: dict[int, int] = {}
        self.launch: Callable[..., None] | None = None
        _switches[plan.data_ptr()] = self

    @property
    def live(self) -> bool:
        """Whether any tap acts."""
        return self.mask != 0

    def turn(self, mask: int) -> None:
        """These taps act in the forward passes to come, the others do not."""
        self.mask = ALL if self.pinned else mask

    def pin(self) -> None:
        """All act, for good."""
        self.mask, self.pinned = ALL, True

    def acts(self, tap: torch.Tensor) -> bool:
        """Whether this tap does."""
        return self.mask == ALL or self.wants(self.numbers[tap.data_ptr()])

    def wants(self, tap: int) -> bool:
        """Whether the tap of this number acts."""
        return self.mask == ALL or bool(self.mask >> tap & 1)


_switches: weakref.WeakValueDictionary[int, Switch] = weakref.WeakValueDictionary()
"""By the address of the plan, the one thing of its engine that an op can be sure of."""


def _tap_cpu(hidden, other, tap, plan, ranks, ring, heads, ints, floats, vectors) -> None:
    n, (scale, other_scale), fixed = hidden.shape[0], tap[1:3].view(torch.float32).tolist(), bool(tap[3])
    tap = int(tap[0])
    slots, profiles, programs = plan[:n].unbind(1)
    nodes = torch.where(programs >= 0, heads[programs.clamp(min=0).long(), tap], -1)
    ranked = ranks[profiles.clamp(min=0).long(), tap * STAGES : (tap + 1) * STAGES]
    ranked = torch.where((slots >= 0)[:, None], ranked, -1)
    tokens = ((nodes >= 0) | (ranked >= 0).any(1)).nonzero().squeeze(1)
    if not len(tokens):
        return
    stream = hidden[tokens]
    # In the order in which models round: a sum is scaled, or terms of different scales are added.
    if other is not None and scale == other_scale:
        stream = stream + other[tokens]
    if scale != 1:
        stream = stream * scale
    if other is not None and scale != other_scale:
        stream = stream + other[tokens] * other_scale
    nodes, ranked, slots = nodes[tokens], ranked[tokens], slots[tokens]
    h = stream.float()
    for stage in range(STAGES):
        if stage:
            nodes, h = _run(nodes, h, stage == STAGES - 1, ints, floats, vectors)
        at = ranked[:, stage] >= 0
        if at.any():
            ring[(slots[at] + ranked[at, stage]).long()] = h[at].to(ring.dtype)
    steered = programs[tokens] >= 0
    steered &= heads[programs[tokens].clamp(min=0).long(), tap] >= 0
    if steered.any():
        rows, written = tokens[steered], h[steered] / scale
        if fixed:
            written -= other[rows]
        hidden[rows] = written.to(hidden.dtype)
        if other is not None and not fixed:
            other[rows] = 0


def _run(nodes, h, past_post: bool, ints, floats, vectors):
    """Follow each row's chain as far as the stage goes; returns where it stopped, and the new rows (float32)."""
    nodes, h = nodes.clone(), h.clone()
    for start in nodes[nodes >= 0].unique().tolist():
        at = (nodes == start).nonzero().squeeze(1)
        rows, delta, node = h[at], torch.zeros_like(h[at]), start
        while node >= 0:
            kind, u, w, following, flags = ints[node].tolist()
            if flags & AFTER_POST and not past_post:
                break
            a, b, lo, hi = floats[node].tolist()
            if kind == BLEND:
                delta += a * (vectors[u] - rows)
            else:
                delta += _factor(kind, rows, vectors[w] if w >= 0 else None, a, b, lo, hi) * vectors[u]
            if flags & LAST:
                rows, delta = rows + delta, torch.zeros_like(delta)
            node = following
        h[at], nodes[at] = rows, node
    return nodes, h


def _factor(kind: int, rows, w, a: float, b: float, lo: float, hi: float):
    """c(h) of an instruction for rows [n, d]: a float, or a tensor [n, 1]."""
    if kind == CONST:
        return a
    if kind == NORM:
        return a * rows.norm(dim=1, keepdim=True)
    along = (rows * w).sum(1, keepdim=True)
    if kind == AFFINE:
        return a * along + b
    if kind == CLAMP:
        return a * (along.clamp(lo, hi) - along)
    raise AssertionError(f"unknown instruction {kind}")


def _tap_cuda(hidden, other, *tables) -> None:
    from vllm_weir.worker.tap_triton import launch

    launch(hidden, other, *tables)


def _act(usual: Callable[..., None], hidden, other, tap, plan, *tables) -> None:
    if hidden.dim() == 3:  # the Transformers backend carries a batch dimension of one
        hidden = hidden.squeeze(0)
    if other is not None and other.dim() == 3:
        other = other.squeeze(0)
    switch = _switches.get(plan.data_ptr())
    if switch is None:
        usual(hidden, other, tap, plan, *tables)
    elif switch.mask and switch.acts(tap):
        (switch.launch or usual)(hidden, other, tap, plan, *tables)


def _alone(usual: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden, *tables):
        _act(usual, hidden, None, *tables)

    return tap


def _with_other(usual: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden, other, *tables):
        _act(usual, hidden, other, *tables)

    return tap


def _nothing(*_) -> None:
    """Fake (shape) kernel: the op returns nothing and changes no shape."""


for _key, _implementation in (("CPU", _tap_cpu), ("CUDA", _tap_cuda)):
    _LIBRARY.impl("tap", _alone(_implementation), _key)
    _LIBRARY.impl("tap_residual", _with_other(_implementation), _key)
    _LIBRARY.impl("tap_offset", _with_other(_implementation), _key)
for _name in ("tap", "tap_residual", "tap_offset"):
    _LIBRARY._register_fake(_name, _nothing)


def place(
    model: torch.nn.Module, anchor: Anchor, tap: int, tensors: TapTensors, switch: Switch | None = None
) -> torch.Tensor:
    """Tap the stream at `anchor`; taps at one place act in the order in which they are placed.

    With a `switch`, a pass that is not compiled does not even ask a tap that does not act.

    Returns the tap's number, as of `numbered`.
    """
    module = model.get_submodule(anchor.module)
    name = f"weir_tap_{tap}"
    number = numbered(tap, anchor.scale, anchor.other_scale, anchor.offset is not None, tensors.plan.device)
    module.register_buffer(name, number, persistent=False)
    for entry in fields(tensors):
        module.register_buffer(f"weir_{entry.name}", getattr(tensors, entry.name), persistent=False)
    kept: list[torch.Tensor] = []
    """What stands beside, from the call that returns it to the one that is tapped."""
    op = torch.ops.weir.tap_residual if anchor.offset is None else torch.ops.weir.tap_offset

    find = _finder(anchor)

    def before(module, args, kwargs):
        if is_compiling() or switch is None or switch.wants(tap):
            _apply(op, module, getattr(module, name), *find(args, kwargs, None, None))

    def after(module, args, kwargs, output):
        beside = None if anchor.beside is None else kept.pop()
        if is_compiling() or switch is None or switch.wants(tap):
            _apply(op, module, getattr(module, name), *find(args, kwargs, output, beside))

    if anchor.beside is not None:
        key = anchor.beside.hidden

        def keep(_module, args, kwargs, output):
            kept[:] = [pick(key, args, kwargs, output)]

        model.get_submodule(anchor.beside.module).register_forward_hook(keep, with_kwargs=True)
    if anchor.when == "before":
        module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        module.register_forward_hook(after, with_kwargs=True)
    return getattr(module, name)


def _finder(anchor: Anchor) -> Callable[..., tuple]:
    """`Anchor.tensors` as a function of little code: Dynamo goes through it for every tap when an engine starts."""
    keys = [key for key in (anchor.hidden, anchor.residual) if key is not None]
    mixed = len({key.kind for key in keys}) > 1 or any(key.kind == "arg" and key.index < 0 for key in keys)
    if anchor.beside is not None or anchor.offset is not None or mixed:
        return anchor.tensors
    if keys[0].kind == "arg":
        (name, place), *more = [(key.name, key.index) for key in keys]
        if not more:
            return lambda args, kwargs, output, beside: (kwargs[name] if name in kwargs else args[place], None)
        other_name, other = more[0]

        def given(args, kwargs, output, beside):
            hidden = kwargs[name] if name in kwargs else args[place]
            if other_name in kwargs:
                return hidden, kwargs[other_name]
            return hidden, args[other] if 0 <= other < len(args) else None

        return given
    first, second = max(keys[0].index, 0), keys[1].index if len(keys) > 1 else None

    def returned(args, kwargs, output, beside):
        if not isinstance(output, (tuple, list)):
            return (output, None) if first == 0 else anchor.tensors(args, kwargs, output)
        return output[first], output[second] if second is not None and second < len(output) else None

    return returned


def numbered(
    tap: int, scale: float = 1.0, other: float = 1.0, fixed: bool = False, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A tap's number, int32 [4]: which it is, the bits of its scales, and whether what stands beside is not written.

    Args:
        scale: of the tensor that is written.
        other: of what stands beside it, if anything does.
        fixed: whether that stays as it is: the model adds it again.
    """
    bits = torch.tensor([scale, other], dtype=torch.float32).view(torch.int32).tolist()
    return torch.tensor([tap, *bits, int(fixed)], dtype=torch.int32, device=device)


def _apply(op, module, tap, hidden, other) -> None:
    tables = (
        module.weir_plan,
        module.weir_ranks,
        module.weir_ring,
        module.weir_heads,
        module.weir_ints,
        module.weir_floats,
        module.weir_vectors,
    )
    if other is None:
        torch.ops.weir.tap(hidden, tap, *tables)
    else:
        op(hidden, other, tap, *tables)


def warm(tensors: TapTensors, d_model: int) -> None:
    """Compile the taps' kernels, so that the first live step does not wait for that; the plan must be empty."""
    hidden, residual = tensors.ring.new_zeros(2, 1, d_model)
    tap = numbered(0, device=hidden.device)
    tables = [getattr(tensors, entry.name) for entry in fields(tensors)]
    torch.ops.weir.tap(hidden, tap, *tables)
    torch.ops.weir.tap_residual(hidden, residual, tap, *tables)
