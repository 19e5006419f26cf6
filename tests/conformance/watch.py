"""Which additions a block makes on its way, and changes to them; the eyes and hands of the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
IN_PLACE = frozenset({"add_", "__iadd__"})


@dataclass(frozen=True)
class Change:
    """`delta` [n, d] added somewhere.

    Attributes:
        layer: the block.
        where: "input" or "output" of the block; "operand" or "result" of one of its additions; "embed", "final_norm".
        addition, operand: which, for the middle two.
    """

    layer: int
    where: str
    delta: torch.Tensor
    addition: int = -1
    operand: int = 0


@dataclass(frozen=True)
class Addition:
    """One addition of two tensors as large as the stream; operands and result are nodes of the pass."""

    index: int
    operands: tuple[int, int]
    result: int


@dataclass
class Pass:
    """What one call of a block did. A node is a value that was added to something, or came of it.

    Attributes:
        source, sink: the nodes that entered and left.
        left: the rows [n, d] that left, after any change to the output.
    """

    layer: int
    nodes: list[torch.Tensor] = field(default_factory=list)
    additions: list[Addition] = field(default_factory=list)
    source: int = -1
    sink: int = -1
    left: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _at: dict[tuple[int, int], int] = field(default_factory=dict)
    # No address is used twice while the block runs.
    _held: list[torch.Tensor] = field(default_factory=list)

    def node(self, tensor: torch.Tensor, *, fresh: bool = False) -> int:
        """The node of a tensor; `fresh`: it was written since it was last seen."""
        key = _key(tensor)
        if fresh or key not in self._at:
            self._at[key] = len(self.nodes)
            self.nodes.append(tensor.detach().clone())
            self._held.append(tensor)
        return self._at[key]

    def follow(self, source: torch.Tensor, out: Any, written: bool) -> None:
        """Another tensor with a known node's value is that node; a known one written over is a new node."""
        known = self._at.get(_key(source))
        if known is None or not (isinstance(out, torch.Tensor) and out.numel() == source.numel()):
            return
        same = torch.equal(out.reshape(-1), self.nodes[known].reshape(-1))
        if written and not same:
            self.node(out, fresh=True)
        elif same and not written:
            self._at.setdefault(_key(out), known)
            self._held.append(out)

    def made_by(self, node: int) -> Addition | None:
        """The addition whose result a node is."""
        return next((a for a in self.additions if a.result == node), None)

    def chain(self) -> list[tuple[Addition, int]]:
        """The additions that lead from the input towards the output, each with the operand that is the term added."""
        back = self._back()
        if back is not None:
            return back
        # Something else than additions lies between: what can be told is how the stream begins.
        found: list[tuple[Addition, int]] = []
        node = self.source
        while True:
            step = next((a for a in self.additions if node in a.operands and a.operands[0] != a.operands[1]), None)
            if step is None:
                return found
            found.append((step, 1 - step.operands.index(node)))
            node = step.result

    def whole(self) -> bool:
        """Whether the chain reaches the output."""
        return self._back() is not None

    def _back(self) -> list[tuple[Addition, int]] | None:
        found: list[tuple[Addition, int]] = []
        node = self.sink
        while node != self.source:
            made = self.made_by(node)
            carries = [self._reaches(o) for o in made.operands] if made else []
            if sum(carries) != 1:
                return None
            assert made is not None
            found.append((made, carries.index(False)))
            node = made.operands[carries.index(True)]
        return found[::-1]

    def _reaches(self, node: int) -> bool:
        if node == self.source:
            return True
        made = self.made_by(node)
        return made is not None and any(self._reaches(o) for o in made.operands)

    def value(self, node: int) -> torch.Tensor:
        """A node's value as [n, d]."""
        return self.nodes[node].reshape(self.nodes[self.source].shape)[0]


class Watch(TorchFunctionMode):
    """Records the additions of the block that is running, and makes the changes asked for.

    Attributes:
        passes: of the blocks that ran, in their order.
        running: the one that runs now.
    """

    def __init__(self, changes: Sequence[Change] = ()) -> None:
        super().__init__()
        self.changes = changes
        self.passes: list[Pass] = []
        self.running: Pass | None = None

    def over(self, stack: contextlib.ExitStack, block: torch.nn.Module, layer: int) -> None:
        """Watch a block until the stack closes."""

        def enter(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            named = kwargs.get("hidden_states")
            at = next((i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()), None)
            hidden = named if named is not None else args[at]
            hidden = hidden + self._delta(layer, "input", torch.zeros_like(hidden))
            done = Pass(layer)
            done.source = done.node(hidden)
            self.running = done
            if named is not None:
                return args, {**kwargs, "hidden_states": hidden}
            return (*args[:at], hidden, *args[at + 1 :]), kwargs

        def leave(_module: Any, _args: Any, output: Any) -> Any:
            done, self.running = self.running, None
            hidden = output[0] if isinstance(output, tuple) else output
            done.sink = done.node(hidden)
            hidden = hidden + self._delta(layer, "output", torch.zeros_like(hidden))
            done.left = hidden.detach()[0].clone()
            self.passes.append(done)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(leave).remove)

    def _delta(self, layer: int, where: str, zero: torch.Tensor) -> torch.Tensor:
        return sum((c.delta for c in self.changes if c.layer == layer and c.where == where), zero)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        running, name = self.running, getattr(func, "__name__", "")
        if running is None:
            return func(*args, **kwargs)
        size = running.nodes[running.source].numel()
        tensors = [a for a in args[:2] if isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel() == size]
        if name not in ADDITIONS or len(tensors) != 2 or kwargs:
            out = func(*args, **kwargs)
            if tensors and isinstance(out, torch.Tensor):
                written = out.data_ptr() == tensors[0].data_ptr() and name.endswith("_") and not _is_view(name)
                running.follow(tensors[0], out, written)
            return out
        left, right = args
        index = len(running.additions)
        mine = [c for c in self.changes if c.layer == running.layer and c.addition == index]
        fresh = False
        for change in mine:
            if change.where != "operand":
                continue
            if change.operand == 1:
                right = right + change.delta.view_as(right)
            elif name in IN_PLACE:  # the caller may go on with that very tensor
                left.add_(change.delta.view_as(left))
                fresh = True
            else:
                left = left + change.delta.view_as(left)
        operands = (running.node(left, fresh=fresh), running.node(right))
        out = func(left, right)
        for change in mine:
            if change.where == "result":
                out.add_(change.delta.view_as(out))
        running.additions.append(Addition(index, operands, running.node(out, fresh=True)))
        return out


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _is_view(name: str) -> bool:
    return name in ("__getitem__", "unsqueeze_", "squeeze_", "requires_grad_")
