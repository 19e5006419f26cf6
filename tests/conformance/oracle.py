"""The reference for every hook point: a transformers model, fp32 and eager, watched while it adds to its stream.

Nothing here knows a family. A block's hook points are read off what it does: the additions that lead from the tensor
that enters it to the tensor that leaves it. A term that answers to an earlier position of the stream it was made from
is the token mixer's (attention, linear attention, a state space); one that does not is the MLP's; and where two terms
do not answer to each other the block is parallel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.conformance.inside import INNER, Edit, Inside
from tests.conformance.watch import Addition, Change, Pass, Watch
from tests.support.measure import rel_err

Rows = dict[tuple[str, int], torch.Tensor]
Take = Callable[[str, torch.Tensor, float], torch.Tensor]
"""(hook point, tensor, scale) -> the tensor that takes its place; the point's rows are so many times it."""

INSIDE = ("attn_out", "resid_mid", "mlp_out")
FIVE = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
ENDS = ("embed", "final_norm")
"""Hook points outside the blocks; their layer is 0."""

PARALLEL = "attention and MLP read the same stream and are added together: there is nothing between them"


class NoPoint(ValueError):
    """A hook point that a model does not have; the message says why."""


@dataclass(frozen=True)
class Shape:
    """How a block adds to its stream.

    Attributes:
        kind: "sequential", "parallel", "mixer", "mlp" or "unknown".
        attn, mlp: where the term is found: (step on the block's chain of additions, operand of the addition that made
            that step's term, or -1 for the term itself).
        gain: what the stream is multiplied with after the last addition.
        missing: hook point -> why there is none.
    """

    kind: str
    attn: tuple[int, int] = (0, -1)
    mlp: tuple[int, int] = (1, -1)
    missing: dict[str, str] = field(default_factory=dict)
    gain: float = 1.0

    def read(self, done: Pass, hook: str) -> torch.Tensor:
        """The rows [n, d] of a hook point."""
        if hook == "resid_pre":
            return done.value(done.source)
        if hook == "resid_post":
            return done.left
        if hook == "resid_mid":
            return done.value(done.chain()[0][0].result)
        addition, operand = self._place(done, hook)
        return done.value(addition.operands[operand])

    def change(self, done: Pass, hook: str, delta: torch.Tensor) -> Change:
        """The change that adds `delta` at a hook point."""
        if hook == "resid_pre":
            return Change(done.layer, "input", delta)
        if hook == "resid_post":
            return Change(done.layer, "output", delta)
        if hook == "resid_mid":
            return Change(done.layer, "result", delta, done.chain()[0][0].index)
        addition, operand = self._place(done, hook)
        return Change(done.layer, "operand", delta, addition.index, operand)

    def _place(self, done: Pass, hook: str) -> tuple[Addition, int]:
        step, inner = self.attn if hook == "attn_out" else self.mlp
        addition, operand = done.chain()[step]
        if inner < 0:
            return addition, operand
        made = done.made_by(addition.operands[operand])
        assert made is not None
        return made, inner


@dataclass(frozen=True)
class Term:
    """One term of a block's chain: does it answer to the stream it was added to, and across positions?"""

    sees: bool
    mixes: bool
    # The same of the two terms it is itself the sum of, if any.
    parts: tuple[bool, bool] | None


def moved(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two values differ by more than rounding: an expert's sums depend on which other tokens it was given."""
    return rel_err(b, a) > 1e-4


def find_shape(plain: Pass, disturb: Callable[[int, bool], Pass], like: Shape | None = None) -> Shape:
    """The shape of a block from a plain pass.

    `disturb(step, first)` is a pass with the stream before that step's addition moved, at the first position only or
    at all; `like` is the shape of an earlier block of the same class.
    """
    chain, whole = plain.chain(), plain.whole()
    terms = []
    for step, (addition, operand) in enumerate(chain):
        node = addition.operands[operand]
        inner = plain.made_by(node)
        every, first = disturb(step, False), disturb(step, True)

        def term(done: Pass, step: int = step) -> int:
            addition, operand = done.chain()[step]
            return addition.operands[operand]

        def later(a: int, b: int, first: Pass = first) -> bool:
            return moved(plain.value(a)[1:], first.value(b)[1:])

        parts = None
        if inner is not None:
            other = first.made_by(term(first))
            parts = tuple(later(a, b) for a, b in zip(inner.operands, other.operands)) if other else None
        sees = moved(plain.value(node), every.value(term(every)))
        terms.append(Term(sees, later(node, term(first)), parts))

    mixing = [t.mixes for t in terms]
    if len(terms) >= 2 and not any(mixing) and like is not None and like.kind == "sequential":
        # Attention that takes its keys and values from an earlier block answers to no other position of its own stream.
        mixing[0] = True
    if whole and len(terms) == 2:
        if not terms[1].sees:
            # Whether the second mixes shows only when what both read is moved.
            done = disturb(0, True)
            again = done.chain()[1]
            node = chain[1][0].operands[chain[1][1]]
            second = moved(plain.value(node)[1:], done.value(again[0].operands[again[1]])[1:])
            if mixing[0] != second:
                attn = 0 if mixing[0] else 1
                return Shape("parallel", (attn, -1), (1 - attn, -1), {"resid_mid": PARALLEL})
        elif mixing == [True, False]:
            return Shape("sequential")
    if whole and len(terms) == 1:
        parts = terms[0].parts
        if parts and parts[0] != parts[1]:
            attn = 0 if parts[0] else 1
            return Shape("parallel", (0, attn), (0, 1 - attn), {"resid_mid": PARALLEL})
        alone = "the block has one part only, {}: there is no {} and nothing between"
        if mixing[0]:
            reason = alone.format("a token mixer", "MLP")
            return Shape("mixer", missing={"resid_mid": reason, "mlp_out": reason})
        reason = alone.format("an MLP", "token mixer")
        return Shape("mlp", mlp=(0, -1), missing={"resid_mid": reason, "attn_out": reason})
    if len(terms) >= 2 and mixing[0] and not any(mixing[1:]) and terms[1].sees:
        gain = _proportion(plain.value(chain[-1][0].result), plain.left)
        if not whole and len(terms) == 2 and gain != 1:
            return Shape("sequential", gain=gain)
        after = "more is added to the stream after the MLP's term" if whole else "the stream is scaled after the MLP"
        return Shape("sequential", missing={"mlp_out": f"{after}: resid_mid + mlp_out is not what leaves the block"})
    what = f"{len(terms)} terms, {sum(mixing)} of token mixers, are added" if whole else "more than additions lie"
    reason = f"between the block's input and its output {what}: which is which cannot be told"
    return Shape("unknown", missing=dict.fromkeys(INSIDE, reason))


class Oracle:
    """A model directory, loaded as the truth."""

    def __init__(self, model_dir: str | Path) -> None:
        self.model = self._load(model_dir)
        config = self.model.config.get_text_config()
        self.blocks = find_blocks(self.model, config.num_hidden_layers)
        self.num_layers = len(self.blocks)
        self.hidden_size: int = config.hidden_size
        self.inside = Inside(self.model, self.blocks, self.hidden_size)
        self.embed_scale = 1.0
        self.shapes = self._find_shapes()

    def _load(self, model_dir: str | Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()

    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        """One pass over a sequence: its logits [n, vocab]."""
        return self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits [n, vocab] of a plain pass that nothing watches."""
        with torch.no_grad():
            return self._forward(ids)

    @property
    def gains(self) -> dict[int, float]:
        """Block -> what it multiplies the stream with at its end, where it does."""
        return {layer: shape.gain for layer, shape in enumerate(self.shapes) if shape.gain != 1}

    def missing(self, hook: str, layer: int = 0) -> str | None:
        """Why there is no such point; None if there is."""
        if hook in ENDS:
            return None if hook in self.ends else f"{hook} cannot be told apart in this model"
        if hook in INNER:
            return self.inside.missing(hook, layer)
        return self.shapes[layer].missing.get(hook)

    def points(
        self, ids: Sequence[int], changes: Sequence[Change] = (), inside: bool = True
    ) -> tuple[Rows, torch.Tensor]:
        """Every point there is, {(hook, layer): [n, ...]}, and the logits [n, vocab]; rows are after the changes.

        `inside`: also those inside attention and MLP, which take a third of the time.
        """
        return self._points(ids, changes, inside=inside)

    def _points(
        self, ids: Sequence[int], changes: Sequence[Change] = (), edit: Edit | None = None, inside: bool = True
    ) -> tuple[Rows, torch.Tensor]:
        inner: Rows = {}
        with self.inside.watched(inner, edit) if inside else contextlib.nullcontext():
            passes, ends, logits = self._run(ids, changes)
        rows = {
            (hook, layer): self.shapes[layer].read(done, hook)
            for layer, done in enumerate(passes)
            for hook in FIVE
            if hook not in self.shapes[layer].missing
        }
        return rows | inner | {(hook, 0): ends[hook] for hook in self.ends}, logits

    def steer(
        self, ids: Sequence[int], hook: str, layer: int, vector: torch.Tensor, positions: Sequence[int] | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """`points` with `vector`, as wide as a row there, added at one point, at `positions` (None: at all)."""
        reason = self.missing(hook, layer)
        if reason:
            raise NoPoint(reason)
        if hook in INNER:

            def add(at: str, block: int, rows: torch.Tensor) -> torch.Tensor:
                if (at, block) != (hook, layer):
                    return rows
                rows = rows.clone()
                rows[slice(None) if positions is None else list(positions)] += vector.view(rows.shape[1:]).to(rows)
                return rows

            return self._points(ids, edit=add)
        delta = torch.zeros(len(ids), self.hidden_size)
        delta[slice(None) if positions is None else list(positions)] = vector
        if hook in ENDS:
            return self.points(ids, [Change(0, hook, delta)])
        done = self._run(ids)[0][layer]
        return self.points(ids, [self.shapes[layer].change(done, hook, delta)])

    def lens(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits [blocks, n, vocab] that follow if the last block leaves what each block leaves."""
        passes = self._run(ids)[0]
        last = passes[-1]
        return torch.stack(
            [self._run(ids, [Change(last.layer, "output", done.left - last.left)])[2] for done in passes]
        )

    @torch.no_grad()
    def _run(
        self, ids: Sequence[int], changes: Sequence[Change] = ()
    ) -> tuple[list[Pass], dict[str, torch.Tensor], torch.Tensor]:
        watch, ends = Watch(changes), {}
        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                watch.over(stack, block, layer)
            self._watch_ends(stack, watch, ends)
            with watch:
                logits = self._forward(ids)
        order = [p.layer for p in watch.passes]
        if order != list(range(self.num_layers)):
            raise NoPoint(f"the blocks run in the order {order}, not once each")
        return watch.passes, ends, logits

    def _watch_ends(self, stack: contextlib.ExitStack, watch: Watch, ends: dict[str, torch.Tensor]) -> None:
        """The token embedding, scaled as the stream has it, and the last norm after the last block."""

        def taken(hook: str, output: torch.Tensor, scale: float) -> torch.Tensor:
            for change in watch.changes:
                if change.where == hook:
                    output = output + change.delta / scale
            ends[hook] = scale * output.detach()[0]
            return output

        def normed(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            after = watch.running is None and len(watch.passes) == self.num_layers
            return taken("final_norm", output, 1.0) if after and _is_stream(output, self) else output

        self._watch_embed(stack, ends, taken)
        for module in self.model.modules():
            if "norm" in type(module).__name__.lower():
                stack.callback(module.register_forward_hook(normed).remove)

    def _watch_embed(self, stack: contextlib.ExitStack, ends: dict[str, torch.Tensor], taken: Take) -> None:
        narrow: list[torch.Tensor] = []

        def embedded(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            if "embed" in ends:
                return output
            if _is_stream(output, self):
                return taken("embed", output, self.embed_scale)
            narrow.append(output)  # narrower than the stream: what widens it comes next
            return output

        def widened(_module: Any, args: Any, output: Any) -> Any:
            from_embedding = narrow and args and args[0] is narrow[0] and "embed" not in ends
            return taken("embed", output, self.embed_scale) if from_embedding and _is_stream(output, self) else output

        stack.callback(self.model.get_input_embeddings().register_forward_hook(embedded).remove)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Linear):
                stack.callback(module.register_forward_hook(widened).remove)

    def _find_shapes(self) -> list[Shape]:
        ids = [3 + 5 * i for i in range(9)]
        plain, ends, _ = self._run(ids)
        self.ends = tuple(hook for hook in ENDS if hook in ends)
        if "embed" in ends:
            self.embed_scale = _proportion(ends["embed"], plain[0].value(plain[0].source))
        generator = torch.Generator().manual_seed(0)
        shapes: list[Shape] = []
        likes: dict[type, Shape] = {}
        for layer, done in enumerate(plain):
            delta = torch.randn(len(ids), self.hidden_size, generator=generator)
            delta *= done.value(done.source).abs().mean()
            first_only = torch.zeros_like(delta)
            first_only[0] = delta[0]

            def disturb(step: int, first: bool, done: Pass = done, every: Any = delta, one: Any = first_only) -> Pass:
                amount = one if first else every
                change = Change(done.layer, "input", amount)
                if step:
                    change = Change(done.layer, "result", amount, done.chain()[step - 1][0].index)
                return self._run(ids, [change])[0][done.layer]

            kind = type(self.blocks[layer])
            shapes.append(find_shape(done, disturb, likes.get(kind)))
            likes.setdefault(kind, shapes[-1])
        return shapes


def find_blocks(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """The decoder blocks: the outermost list of `count` modules."""
    lists = [
        (path.count("."), place, module)
        for place, (path, module) in enumerate(model.named_modules())
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise NoPoint(f"the model has no list of {count} blocks")
    return min(lists, key=lambda found: found[:2])[2]


def _is_stream(output: Any, oracle: Oracle) -> bool:
    return isinstance(output, torch.Tensor) and output.ndim == 3 and output.shape[-1] == oracle.hidden_size


def _proportion(one: torch.Tensor, other: torch.Tensor) -> float:
    """What one tensor is multiplied with to be another; 1 if something else is done to it (positions, a norm)."""
    scale = float((one * other).sum() / (one * one).sum())
    return scale if rel_err(scale * one, other) < 1e-5 else 1.0
