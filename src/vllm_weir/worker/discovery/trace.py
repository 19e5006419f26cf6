"""A recorded forward pass: which tensors passed which module, in what order.

`Recorder` fills a `Trace` with one `ModuleCall` per call of a module. `value_at` evaluates an
anchor on recorded calls. All recorded tensors are float32 copies, [tokens, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_weir.worker.discovery.anchors import Anchor, TensorKey


@dataclass
class ModuleCall:
    """One call of a module."""

    path: str  # of the module, from the model
    local_path: str  # of the module, from its block; "" for the block itself
    start: int  # time of the call. Times count the starts and ends of calls in a pass.
    occurrence: int = 0  # number of earlier calls of this module in the pass
    end: int = 0  # time of the return
    # arguments of the stream's width, as the call was given them
    args: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    outputs: dict[TensorKey, torch.Tensor] = field(default_factory=dict)  # outputs of the stream's width
    # the arguments that the call wrote into, or is known to write into, after the call
    args_after: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    # vectors [d] among the outputs, float32: biases that the caller is to add
    offsets: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    # arguments and outputs of other widths; only of calls outside the blocks
    other_widths: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    # of every floating-point argument and output of two or more dimensions
    shapes: dict[TensorKey, tuple[int, ...]] = field(default_factory=dict)
    pointers: dict[TensorKey, int] = field(default_factory=dict)  # addresses of the tensors in `args` and `outputs`

    @property
    def results(self) -> dict[TensorKey, torch.Tensor]:
        return {**self.outputs, **self.args_after}

    @property
    def visible_after(self) -> dict[TensorKey, torch.Tensor]:
        """All tensors that the caller holds after the call: its arguments, and the outputs."""
        return {**self.args, **self.results}

    @property
    def result_keys(self) -> list[TensorKey]:
        """Keys of the results; an argument that is returned too counts as an output only."""
        returned = {self.pointers[key] for key in self.outputs}
        written = (key for key in sorted(self.args_after) if self.pointers[key] not in returned)
        return [*sorted(self.outputs), *written]


@dataclass
class Trace:
    """The calls of one forward pass."""

    # for each block, its own call and then those of the modules that ran in it, by start
    blocks: list[list[ModuleCall]]
    outside: list[ModuleCall]  # calls of modules that ran in no block and contain no block, by start
    model_output: torch.Tensor | None = None  # the first tensor that the model returned, float32 [tokens, any width]


def terms_at(calls: Sequence[ModuleCall], anchor: Anchor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return an anchor's `hidden` and `other` in recorded calls; None if they were not recorded."""
    call = next((c for c in calls if c.path == anchor.module), None)
    if call is None:
        return None
    tensors = call.visible_after if anchor.when == "after" else call.args
    hidden = tensors.get(anchor.hidden)
    if hidden is None:
        return None
    if anchor.added_term is not None:
        term = anchor.added_term
        added = next((c.outputs[term.hidden] for c in calls if c.path == term.module), None)
        return None if added is None else (hidden, added)
    if anchor.offset is not None:
        return hidden, call.offsets[anchor.offset]
    return hidden, None if anchor.residual is None else tensors.get(anchor.residual)


def value_at(calls: Sequence[ModuleCall], anchor: Anchor) -> torch.Tensor | None:
    """Return an anchor's value in recorded calls, [tokens, d]; None if it was not recorded."""
    terms = terms_at(calls, anchor)
    return None if terms is None else anchor.value(*terms)
