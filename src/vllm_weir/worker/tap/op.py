"""The tap: one opaque custom op a site, called where `vllm_weir.worker.tap.install` has put it.

Its one constant is the site's number, a tensor, so every layer's graph is the same; everything else (the step's plan,
the tables, the ring) belongs to the engine that the number was given out by, and is found by the number's address. The
op mutates the stream in place, so it is seen by everything downstream, and the compiler can neither move nor drop it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from vllm_weir.worker.tap import cpu_kernel

_LIBRARY = torch.library.Library("weir", "DEF")
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor tap) -> ()")
_LIBRARY.define("tap_residual(Tensor(a!) hidden, Tensor(b!) residual, Tensor tap) -> ()")
_LIBRARY.define("tap_offset(Tensor(a!) hidden, Tensor offset, Tensor tap) -> ()")


@dataclass(frozen=True)
class TapTensors:
    """What the taps of one worker share.

    Attributes:
        plan: int32 [max tokens, 4], slot, profile and program of every token of the step, -1 for none, and its span,
            see `vllm_weir.worker.planning.step_plan.StepPlan`.
        ranks: int32 [max profiles, columns], place of a column in a profile, -1 if it is not wanted.
        ring: [rows, d_model] in the model's dtype.
        heads, ints, floats, vectors: the tables of `vllm_weir.worker.steering.programs.ProgramTable`.
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


class TapSwitch:
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


_switches: weakref.WeakValueDictionary[int, TapSwitch] = weakref.WeakValueDictionary()
"""By the address of a tap's number, the one thing of its engine that an op can be sure of."""


def _tap_cuda(hidden: torch.Tensor, other: torch.Tensor | None, *tables: torch.Tensor) -> None:
    from vllm_weir.worker.tap.triton_kernel import launch

    launch(hidden, other, *tables)


def acts(number: torch.Tensor) -> bool:
    """Whether the tap of this number (a tensor as of `numbered`) acts in the forward pass being issued.

    Raises:
        RuntimeError: if its engine is gone.
    """
    switch = _switches.get(address := number.data_ptr())
    if switch is None:
        raise RuntimeError("a tap acts whose engine is gone")
    return bool(switch.mask) and switch.wants(switch.numbers[address])


def _act(usual: Callable[..., None], hidden: torch.Tensor, other: torch.Tensor | None, tap: torch.Tensor) -> None:
    if not acts(tap):
        return
    switch = _switches[tap.data_ptr()]
    if hidden.dim() == 3:  # the Transformers backend carries a batch dimension of one
        hidden = hidden.squeeze(0)
    if other is not None and other.dim() == 3:
        other = other.squeeze(0)
    (switch.launch or usual)(hidden, other, tap, *switch.tables)


def _alone(usual: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden: torch.Tensor, number: torch.Tensor) -> None:
        _act(usual, hidden, None, number)

    return tap


def _with_other(usual: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden: torch.Tensor, other: torch.Tensor | None, number: torch.Tensor) -> None:
        _act(usual, hidden, other, number)

    return tap


def _nothing(*_: torch.Tensor) -> None:
    """Fake (shape) kernel: the op returns nothing and changes no shape."""


for _key, _implementation in (("CPU", cpu_kernel.launch), ("CUDA", _tap_cuda)):
    _LIBRARY.impl("tap", _alone(_implementation), _key)
    _LIBRARY.impl("tap_residual", _with_other(_implementation), _key)
    _LIBRARY.impl("tap_offset", _with_other(_implementation), _key)
for _name in ("tap", "tap_residual", "tap_offset"):
    _LIBRARY._register_fake(_name, _nothing)


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
