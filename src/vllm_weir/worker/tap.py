"""The tap: one opaque custom op a site, traced into the model's graph by a wrapper around a module's forward.

Its one constant is the site's number, a tensor, so every layer's graph is the same; everything else (the step's plan,
the tables, the ring) belongs to the engine that the number was given out by, and is found by the number's address. The
op mutates the stream in place, so it is seen by everything downstream, and the compiler can neither move nor drop it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any

import torch
from torch.compiler import is_compiling

from vllm_weir.worker import tap_cpu
from vllm_weir.worker.anchors import Anchor, Key, pick

_LIBRARY = torch.library.Library("weir", "DEF")
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor tap) -> ()")
_LIBRARY.define("tap_residual(Tensor(a!) hidden, Tensor(b!) residual, Tensor tap) -> ()")
_LIBRARY.define("tap_offset(Tensor(a!) hidden, Tensor offset, Tensor tap) -> ()")


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
    """An engine's taps, and which of them act: in a CUDA graph as they are captured, elsewhere as they run.

    A silent tap returns before it launches anything, so a graph captured silently has no trace of it. Must not be
    turned while a forward pass is being issued.

    Attributes:
        tensors: what the taps share.
        mask: the taps that act; 0 for none.
        numbers: address of each tap's number on the device -> the number.
        launch: what taps do instead of their usual work, with the same arguments; None for the usual.
    """

    __slots__ = ("__weakref__", "_kept", "launch", "mask", "numbers", "pinned", "tables", "tensors")

    def __init__(self, tensors: TapTensors) -> None:
        self.tensors = tensors
        self.tables = tuple(getattr(tensors, entry.name) for entry in fields(tensors))
        self.mask, self.pinned = 0, False
        self.numbers: dict[int, int] = {}
        self.launch: Callable[..., None] | None = None
        self._kept: list[torch.Tensor] = []

    def enrol(self, number: torch.Tensor, tap: int) -> None:
        """Let the tap of this number, a tensor as of `numbered`, be one of this engine's."""
        self._kept.append(number)  # no other tensor may have its address while it is known by it
        self.numbers[number.data_ptr()] = tap
        _switches[number.data_ptr()] = self

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

    def wants(self, tap: int) -> bool:
        """Whether the tap of this number acts."""
        return self.mask == ALL or bool(self.mask >> tap & 1)


_switches: weakref.WeakValueDictionary[int, Switch] = weakref.WeakValueDictionary()
"""By the address of a tap's number, the one thing of its engine that an op can be sure of."""


def _tap_cuda(hidden, other, *tables) -> None:
    from vllm_weir.worker.tap_triton import launch

    launch(hidden, other, *tables)


def _act(usual: Callable[..., None], hidden, other, tap) -> None:
    switch = _switches.get(address := tap.data_ptr())
    if switch is None:
        raise RuntimeError("a tap acts whose engine is gone")
    if not switch.mask or not switch.wants(switch.numbers[address]):
        return
    if hidden.dim() == 3:  # the Transformers backend carries a batch dimension of one
        hidden = hidden.squeeze(0)
    if other is not None and other.dim() == 3:
        other = other.squeeze(0)
    (switch.launch or usual)(hidden, other, tap, *switch.tables)


def _alone(usual: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden, number):
        _act(usual, hidden, None, number)

    return tap


def _with_other(usual: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden, other, number):
        _act(usual, hidden, other, number)

    return tap


def _nothing(*_) -> None:
    """Fake (shape) kernel: the op returns nothing and changes no shape."""


for _key, _implementation in (("CPU", tap_cpu.launch), ("CUDA", _tap_cuda)):
    _LIBRARY.impl("tap", _alone(_implementation), _key)
    _LIBRARY.impl("tap_residual", _with_other(_implementation), _key)
    _LIBRARY.impl("tap_offset", _with_other(_implementation), _key)
for _name in ("tap", "tap_residual", "tap_offset"):
    _LIBRARY._register_fake(_name, _nothing)


_TOUCHES = "weir_touches"
Touch = Callable[[torch.nn.Module, tuple, dict, Any], None]
"""What is done where a call is tapped: (module, args, kwargs, output) -> None."""


def place(model: torch.nn.Module, anchor: Anchor, tap: int, switch: Switch) -> None:
    """Tap the stream at `anchor`; taps at one place act in the order in which they are placed.

    A pass that is not compiled does not even ask a tap that does not act.
    """
    module, name = model.get_submodule(anchor.module), f"weir_tap_{tap}"
    device = switch.tensors.plan.device
    number = numbered(tap, anchor.scale, anchor.other_scale, anchor.offset is not None, device)
    module.register_buffer(name, number, persistent=False)
    switch.enrol(number, tap)
    if anchor.beside is not None:
        kept: list[torch.Tensor] = []
        _wrap(model.get_submodule(anchor.beside.module), "after", _keep(anchor.beside.hidden, kept))
        _wrap(module, anchor.when, _touch_beside(anchor, name, switch, tap, kept))
    else:
        _wrap(module, anchor.when, _touch(anchor, name, switch, tap))


def _wrap(module: torch.nn.Module, when: str, touch: Touch) -> None:
    """Have `touch` called before or after every call of the module, after what it was given to before.

    Not by hooks: Dynamo goes through the code that calls them in every module that has any, and an engine starts later.
    """
    if _TOUCHES not in module.__dict__:
        before: list[Touch] = []
        after: list[Touch] = []
        forward = _unbound(module)

        def tapped(self, *args, **kwargs):
            for touch in before:
                touch(self, args, kwargs, None)
            output = forward(self, *args, **kwargs)
            for touch in after:
                touch(self, args, kwargs, output)
            return output

        module.__dict__[_TOUCHES] = {"before": before, "after": after}
        module.forward = MethodType(tapped, module)  # type: ignore[method-assign]
    module.__dict__[_TOUCHES][when].append(touch)


def _unbound(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of itself and the arguments."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    return lambda _self, *args, **kwargs: own(*args, **kwargs)


def _touch(anchor: Anchor, name: str, switch: Switch, tap: int) -> Touch:
    """The tap at an anchor with nothing beside it, in little code: Dynamo goes through it for every tap."""
    first, second = anchor.hidden.index, -1 if anchor.residual is None else anchor.residual.index
    alone, pair = torch.ops.weir.tap.default, torch.ops.weir.tap_residual.default
    both = pair if anchor.offset is None else torch.ops.weir.tap_offset.default

    def touch(module, args, kwargs, output):
        if is_compiling() or switch.wants(tap):
            hidden, other = anchor.tensors(args, kwargs, output)
            if other is None:
                alone(hidden, getattr(module, name))
            else:
                both(hidden, other, getattr(module, name))

    def touch_one(module, args, kwargs, output):
        if not isinstance(output, torch.Tensor):
            touch(module, args, kwargs, output)
        elif is_compiling() or switch.wants(tap):
            alone(output, getattr(module, name))

    def touch_pair(module, args, kwargs, output):
        if not isinstance(output, tuple) or len(output) <= most or output[second] is None:
            touch(module, args, kwargs, output)
        elif is_compiling() or switch.wants(tap):
            pair(output[first], output[second], getattr(module, name))

    most = max(first, second)
    returned = anchor.offset is None and all(k is None or k.kind == "out" for k in (anchor.hidden, anchor.residual))
    if returned and anchor.residual is None and first <= 0:
        return touch_one
    return touch_pair if returned and anchor.residual is not None and min(first, second) >= 0 else touch


def _touch_beside(anchor: Anchor, name: str, switch: Switch, tap: int, kept: list[torch.Tensor]) -> Touch:
    """The tap at an anchor beside which stands what an earlier call has left in `kept`."""

    def touch(module, args, kwargs, output):
        hidden, other = anchor.tensors(args, kwargs, output, kept.pop())
        if is_compiling() or switch.wants(tap):
            torch.ops.weir.tap_residual(hidden, other, getattr(module, name))

    return touch


def _keep(key: Key, kept: list[torch.Tensor]) -> Touch:
    """Keeps what stands beside, from the call that returns it to the one that is tapped."""

    def touch(_module, args, kwargs, output):
        kept[:] = [pick(key, args, kwargs, output)]

    return touch


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


def warm(switch: Switch, d_model: int) -> None:
    """Compile the taps' kernels, so that the first live step does not wait for that; the plan must be empty."""
    hidden, residual = switch.tensors.ring.new_zeros(2, 1, d_model)
    number = numbered(0, device=hidden.device)
    for other in (None, residual):
        _tap_cuda(hidden, other, number, *switch.tables)
