"""The tap: an opaque custom op per tapped place, called where `worker.tap.install` puts it.

Every layer's graph must be the same, so that equal graphs compile once. So the op takes its tap's
*number* as a tensor (`numbered`), a buffer of the module. All else (the step's plan, the tables,
the ring) belongs to an engine and is found by the address of that tensor. The op mutates the stream
in place, so the compiler can neither move nor drop it.

A tap's row may be a slice of the tensor's columns (the queries of the joint result of a projection,
say). The op is given the whole tensor nevertheless and takes the slice when it acts: to the
compiler, a tensor of which a view is changed is another matter than one that is changed itself.

Three forms differ in the tensor beside the one that is written: none (`tap`), a residual that is
set to zero when the stream is written (`tap_residual`), or a bias that is only read (`tap_offset`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from vllm_weir.schema.taps import ALL_STAGES, CELLS, FUNCTIONS, GROUPS, NO_GRAPH, SCORES, TAPS, early_stages
from vllm_weir.worker.tap import cpu_kernel

_LIBRARY = torch.library.Library("weir", "DEF")
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor tap) -> ()")
_LIBRARY.define("tap_residual(Tensor(a!) hidden, Tensor(b!) residual, Tensor tap) -> ()")
_LIBRARY.define("tap_offset(Tensor(a!) hidden, Tensor offset, Tensor tap) -> ()")


@dataclass(frozen=True)
class TapTensors:
    """The device tensors that the taps of one worker share.

    Attributes:
        plan: int32 [max tokens, 4]. For every token of the step its slot (first ring row), site set
            and program, -1 for none, and its span (`vllm_weir.worker.planning.step_plan.StepPlan`).
        ranks: int32 [max site sets, columns], place of a column among the rows of a token with this
            site set, -1 if it is not in the set.
        ring: [rows, d_model] in the model's dtype. A row of another width is written from the beginning
            of its first ring row on, and into as many more as it takes.
        heads: int32 [programs, taps], first node of a program at a tap, -1 for none. This and the
            following are the tables of `vllm_weir.worker.steering.programs.ProgramTable`.
        ints: int32 [nodes, 8], integer fields of the nodes.
        floats: float32 [nodes, 4], coefficients of the nodes.
        vectors: float32 [vectors, d_model]. A wider vector takes several rows.
        cells: float32 [max tokens, cells]: numbers of each token of the step, which probes write and
            gates read (`vllm_weir.schema.resolved_probes.CellLayout`).
    """

    plan: torch.Tensor
    ranks: torch.Tensor
    ring: torch.Tensor
    heads: torch.Tensor
    ints: torch.Tensor
    floats: torch.Tensor
    vectors: torch.Tensor
    cells: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))


ALL = TAPS | 1 << CELLS | 1 << GROUPS
"""Mask of every tap; bit t of a mask stands for tap t, and bit SCORES + t for the probes there."""
EVERYTHING = -1
"""Mask of every tap and all probes."""


class TapSwitch:
    """The taps of an engine, and which of them act.

    A tap that does not act returns before it launches anything: a CUDA graph that is captured
    meanwhile has no trace of it. The switch must not be set while a forward pass is being
    issued.

    Attributes:
        tensors: what the taps share.
        tables: the same tensors in the order of a kernel's arguments; `cells`, the last one, is left out
            in passes that use none.
        mask: the taps that act, as bits; 0 for none.
        pinned: whether all taps act for good.
        numbers: address of a tap's number tensor -> number of the tap.
        columns: address of a tap's number tensor -> (start, stop): the columns of the tensor that are
            its row; a tap without an entry has them all.
        head_sizes: address of a tap's number tensor -> the size of its heads, if the tensor may be
            [tokens, heads, head size], with several heads.
        launch: called by the taps in place of their kernel, with the same arguments; None for the
            kernel.
        score: called after a tap at which probes read, with its number and the stages to be scored, as bits;
            None where there are no probes.
        mapped: returns the rows of compiled functions; called with the mask, a tap's number and the
            arguments of the kernel where the mask has functions; None where there are none.
    """

    __slots__ = (
        "__weakref__", "_kept", "columns", "head_sizes", "launch", "mapped", "mask", "numbers", "pinned", "score",
        "tables", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        tensors: TapTensors,
        score: Callable[[int, int], None] | None = None,
        mapped: Callable[..., torch.Tensor | None] | None = None,
    ) -> None:
        self.tensors = tensors
        self.tables = tuple(getattr(tensors, entry.name) for entry in fields(tensors))
        self.mask, self.pinned = 0, False
        self.numbers: dict[int, int] = {}
        self.columns: dict[int, tuple[int, int]] = {}
        self.head_sizes: dict[int, int] = {}
        self.launch: Callable[..., None] | None = None
        self.score, self.mapped = score, mapped
        self._kept: list[torch.Tensor] = []

    def register(
        self,
        number: torch.Tensor,
        tap: int,
        columns: tuple[int, int] | None = None,
        head_size: int | None = None,
    ) -> None:
        """Make the tap with a number tensor of `numbered` one of this engine's.

        `columns` are (start, stop) of those that are its row, None for all; `head_size` is of a tap that may
        be given [tokens, heads, head_size], with several heads.
        """
        self._kept.append(number)  # while it lives, no other tensor has its address
        self.numbers[number.data_ptr()] = tap
        if columns is not None:
            self.columns[number.data_ptr()] = columns
        if head_size is not None:
            self.head_sizes[number.data_ptr()] = head_size
        _switches[number.data_ptr()] = self

    @property
    def live(self) -> bool:
        return self.mask != 0

    def set_active(self, mask: int) -> None:
        """Let the taps of `mask` act from the next forward pass on, and no others."""
        self.mask = EVERYTHING if self.pinned else mask

    def activate_always(self) -> None:
        """Let all taps act for good."""
        self.mask, self.pinned = EVERYTHING, True

    def launch_by(self, launch: Callable[..., None] | None) -> None:
        """Let the taps call `launch` in place of their kernel from now on; None for the kernel."""
        self.launch = launch

    def wants(self, tap: int) -> bool:
        """Return whether a tap acts; ``SCORES + tap`` stands for its probes."""
        return bool(self.mask >> tap & 1)

    def score_early(
        self,
        stage: int,
        tap: int,
        hidden: torch.Tensor,
        other: torch.Tensor | None,
        number: torch.Tensor,
        held: torch.Tensor | None = None,
    ) -> None:
        """Score what probes read at a stage of a tap whose later stages have gates that need it.

        The tensors are those of a kernel's `launch`, which comes next and reads and writes all.
        """
        if self.score is None or not early_stages(self.mask, tap) >> stage & 1:
            return
        t = self.tensors
        read = _read_cuda if hidden.is_cuda else cpu_kernel.read_early
        read(hidden, other, number, t.plan, t.heads, t.ints, t.floats, t.vectors, t.cells, held, stage)
        self.score(tap, 1 << stage)


_switches: weakref.WeakValueDictionary[int, TapSwitch] = weakref.WeakValueDictionary()
"""Address of a tap's number tensor -> the engine's switch."""


def _tap_cuda(hidden: torch.Tensor, other: torch.Tensor | None, *tables: torch.Tensor, **more: Any) -> None:
    from vllm_weir.worker.tap.triton_kernel import launch

    launch(hidden, other, *tables, **more)


def _read_cuda(*arguments: Any) -> None:
    from vllm_weir.worker.tap.peek_kernel import read_early

    read_early(*arguments)


def acts(number: torch.Tensor) -> bool:
    """Return whether the tap with this number tensor acts in the forward pass that is being issued.

    Raises:
        RuntimeError: if its engine is gone.
    """
    switch = _switches.get(address := number.data_ptr())
    if switch is None:
        raise RuntimeError("a tap was called whose engine is gone")
    return bool(switch.mask) and switch.wants(switch.numbers[address])


def _act(kernel: Callable[..., None], hidden: torch.Tensor, other: torch.Tensor | None, number: torch.Tensor) -> None:
    if not acts(number):
        return
    switch = _switches[address := number.data_ptr()]
    columns = switch.columns.get(address)
    if hidden.dim() == 3:
        by_head = hidden.shape[2] == switch.head_sizes.get(address)
        hidden = hidden.flatten(1) if by_head else _as_rows(hidden, columns)
    if columns is not None:
        hidden = hidden[:, columns[0] : columns[1]]
    if other is not None and other.dim() == 3:
        other = other.squeeze(0)
    launch, tap = switch.launch or kernel, switch.numbers[address]
    held = None
    switch.score_early(0, tap, hidden, other, number)
    if switch.mapped is not None and switch.mask >> FUNCTIONS > 0:  # a mask of all taps is negative
        held = switch.mapped(switch.mask, tap, hidden, other, number, *switch.tables)
    if not switch.wants(NO_GRAPH):  # else `launch` does so, once it has called what has to be called before
        switch.score_early(1, tap, hidden, other, number, held)
    groups = switch.wants(GROUPS)
    tables = switch.tables if groups or switch.wants(CELLS) else switch.tables[:-1]
    launch(hidden, other, number, *tables, held=held, groups=groups)
    if switch.score is not None and switch.wants(SCORES + tap):
        switch.score(tap, ALL_STAGES & ~early_stages(switch.mask, tap))


def _as_rows(tensor: torch.Tensor, columns: tuple[int, int] | None) -> torch.Tensor:
    """Return a view [tokens, width] of a tensor with three dimensions.

    The Transformers backend carries a batch dimension of one; elsewhere the last two are heads and
    their values, and together have the tap's columns.
    """
    if tensor.shape[0] == 1 and (columns is None or tensor.shape[2] >= columns[1]):
        return tensor.squeeze(0)
    return tensor.view(tensor.shape[0], -1)


def _alone(kernel: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden: torch.Tensor, number: torch.Tensor) -> None:
        _act(kernel, hidden, None, number)

    return tap


def _with_other(kernel: Callable[..., None]) -> Callable[..., None]:
    def tap(hidden: torch.Tensor, other: torch.Tensor | None, number: torch.Tensor) -> None:
        _act(kernel, hidden, other, number)

    return tap


def _fake(*_: torch.Tensor) -> None:
    """Stand for the op while shapes are traced: it returns nothing."""


for _device, _kernel in (("CPU", cpu_kernel.launch), ("CUDA", _tap_cuda)):
    _LIBRARY.impl("tap", _alone(_kernel), _device)
    _LIBRARY.impl("tap_residual", _with_other(_kernel), _device)
    _LIBRARY.impl("tap_offset", _with_other(_kernel), _device)
for _name in ("tap", "tap_residual", "tap_offset"):
    _LIBRARY._register_fake(_name, _fake)


def numbered(
    tap: int,
    scale: float = 1.0,
    other_scale: float = 1.0,
    keep_other: bool = False,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a tap's number tensor, int32 [4]: tap, bits of the two scales, `keep_other`.

    The scales are of the tensor that is written and of the other one, if there is one; `keep_other`:
    the other is not written, because the model adds it again.
    """
    scale_bits = torch.tensor([scale, other_scale], dtype=torch.float32).view(torch.int32).tolist()
    return torch.tensor([tap, *scale_bits, int(keep_other)], dtype=torch.int32, device=device)
