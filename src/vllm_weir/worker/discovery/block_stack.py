"""Where a model keeps its blocks, and what a description says of them and of the points inside."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import INNER_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, value_at
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.module_tree import ModuleTree, Run
from vllm_weir.worker.discovery.stream_ports import StreamPorts


@dataclass(frozen=True)
class Identity:
    """``whole == sum of parts``; for resid_post, the sum is multiplied by the block's gain."""

    whole: str
    parts: tuple[str, ...]

    @property
    def hooks(self) -> tuple[str, ...]:
        return (self.whole, *self.parts)


IDENTITIES = {
    "sequential": (
        Identity("resid_mid", ("resid_pre", "attn_out")),
        Identity("resid_post", ("resid_mid", "mlp_out")),
    ),
    "parallel": (Identity("resid_post", ("resid_pre", "attn_out", "mlp_out")),),
    "attention only": (Identity("resid_post", ("resid_pre", "attn_out")),),
    "MLP only": (Identity("resid_post", ("resid_pre", "mlp_out")),),
}
"""Kind of block -> what holds between its points on any input."""


@dataclass
class BlockPoints:
    """What was found in one block."""

    # hook point inside the block -> where it is, for those that were found
    anchors: dict[str, Anchor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    kind: str = "unknown"  # a key of `IDENTITIES`; "described" if a description names the points; or "unknown"
    gain: float = 1.0  # factor of the stream after the last addition, as it leaves the block

    @classmethod
    def none(cls, reason: str) -> BlockPoints:
        return cls(refused=dict.fromkeys(INNER_HOOKS, reason))

    @property
    def explained(self) -> bool:
        """Whether the block's output was found to be its input plus what its parts add."""
        return self.kind != "unknown"

    @property
    def complete(self) -> bool:
        """Whether every point that a block of this kind can have was found."""
        return len(self.anchors) == {"sequential": 3, "parallel": 2}.get(self.kind)


# Hand-written descriptions of models whose structure does not tell where a hook point is.
#
# A description is a mapping ``{"stack": path, "points": {hook point: place}}``, both keys optional.
# `stack` is the path of the list of blocks. A place is relative to the block:
#
# * ``"self_attn:out"``: what the module returns; ``"self_attn:out:1"``: element 1 of it.
# * ``"ln_2:in:hidden_states"``: an argument of the module, by name or position.
# * ``"ln_2:in:x+residual"``: the sum of two arguments; ``"ln_2:in:0+1"`` by position.
#
# Described points are verified at load like all others. A package can describe its models in entry
# points of the group ``vllm_weir.models``, each named after the model's class.

GROUP = "vllm_weir.models"


@dataclass(frozen=True)
class ModelDescription:
    """A parsed description; empty for a model that has none."""

    stack: str = ""  # path of the list of blocks; "" if it is to be found
    points: Mapping[str, str] = field(default_factory=dict)  # hook point inside the block -> place

    @classmethod
    def parse(cls, data: object, field_path: str) -> ModelDescription:
        """Parse a JSON-like object; raise WeirError that names the bad part, below `field_path` of the settings."""
        if not isinstance(data, Mapping):
            raise WeirError(f"a description is an object with 'stack' and 'points', got {brief(data)}", field_path)
        for key in data:
            if key not in ("stack", "points"):
                raise WeirError("unknown key; a description has 'stack' and 'points'", f"{field_path}.{brief(key)}")
        stack, points = data.get("stack") or "", data.get("points") or {}
        if not isinstance(stack, str) or not isinstance(points, Mapping):
            raise WeirError("'stack' must be a path and 'points' an object", field_path)
        for hook, place in points.items():
            if hook not in INNER_HOOKS:
                known = ", ".join(INNER_HOOKS)
                raise WeirError(f"only {known} can be described", f"{field_path}.points.{brief(hook)}")
            _split(place, f"{field_path}.points.{hook}")
        return cls(stack, dict(points))

    def anchor(self, hook: str, calls: Sequence[ModuleCall]) -> Anchor | None:
        """Return where `hook` is in a block, whose own call is the first of `calls`; None if it is not there."""
        if hook not in self.points:
            return None
        module, when, names = _split(self.points[hook], f"points.{hook}")
        path = f"{calls[0].path}.{module}" if module else calls[0].path
        call = next((c for c in calls if c.path == path), None)
        if call is None:
            return None
        if when == "out":
            index = int(names[0]) if names else 0
            key = next((k for k in call.outputs if max(k.index, 0) == index), None)
            return None if key is None else Anchor(path, "after", key)
        keys = [next((k for k in call.args if name in (k.name, str(k.index))), None) for name in names]
        if None in keys or keys[0] is None:
            return None
        return Anchor(path, "before", keys[0], keys[1] if len(keys) > 1 else None)


def description_of(model_class: str, setting: Mapping[str, Any] | None) -> ModelDescription:
    """Return a model class's description, from the setting or an installed package, else an empty one."""
    if setting:
        return ModelDescription.parse(setting, "settings.describe")
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == model_class:
            return ModelDescription.parse(entry.load(), f"{GROUP}:{entry.name}")
    return ModelDescription()


def resolve_described_block(
    description: ModelDescription, calls: Sequence[ModuleCall], ports: StreamPorts, matcher: Matcher
) -> BlockPoints:
    """Return the points that a description names in a block, if an equation holds for them."""
    points = BlockPoints(kind="described")
    for hook in INNER_HOOKS:
        anchor = description.anchor(hook, calls)
        if anchor is None:
            points.refused[hook] = "the model's description does not name it, or names what this block does not have"
        else:
            points.anchors[hook] = anchor
    if not _adds_up(points.anchors, calls, ports, matcher):
        return BlockPoints.none("what the model's description names does not add up")
    return points


def _adds_up(anchors: Mapping[str, Anchor], calls: Sequence[ModuleCall], ports: StreamPorts, matcher: Matcher) -> bool:
    """Return whether one of the block's equations holds between these points."""
    pre, post = ports.stream_through(calls[0])
    if pre is None or post is None:
        return False
    values = {hook: value_at(calls, anchor) for hook, anchor in anchors.items()}
    attn_out, mid, mlp_out = (values.get(hook) for hook in ("attn_out", "resid_mid", "mlp_out"))
    if mid is not None:
        return (attn_out is not None and matcher.same(pre + attn_out, mid)) or (
            mlp_out is not None and matcher.same(mid + mlp_out, post)
        )
    return matcher.same(pre + sum(term for term in (attn_out, mlp_out) if term is not None), post)


def _split(place: object, field_path: str) -> tuple[str, str, list[str]]:
    """Return the module, "in" or "out", and the argument names or output index of a place."""
    parts = place.split(":") if isinstance(place, str) else []
    if len(parts) in (2, 3) and parts[1] == "out" and (len(parts) == 2 or parts[2].isdigit()):
        return parts[0], "out", parts[2:]
    if len(parts) == 3 and parts[1] == "in":
        names = parts[2].split("+")
        if 1 <= len(names) <= 2 and all(name.isidentifier() or name.isdigit() for name in names):
            return parts[0], "in", names
    raise WeirError(
        f"{brief(place)!r} is no place; write 'module:out', 'module:out:1' or 'module:in:argument'", field_path
    )


def find_tree(
    model: torch.nn.Module,
    width: int,
    num_layers: int,
    description: ModelDescription,
    is_mixer: Callable[[torch.nn.Module], bool],
    is_embedding: Callable[[torch.nn.Module], bool],
    run: Run,
    compiled_whole: Callable[[torch.nn.Module], bool] = lambda module: False,
    look_up: Callable[[], torch.Tensor] | None = None,
    beside_stream: Callable[[Mapping[str, Any]], Sequence[torch.Tensor]] = lambda _given: (),
) -> ModuleTree:
    """Find the decoder blocks of a model.

    Args:
        num_layers: blocks of the whole model.
        description: may name the list of blocks.
        is_mixer: whether a module mixes tokens.
        is_embedding: whether a module looks tokens up.
        run: runs the model; called only to word an error.
        compiled_whole: whether a module is compiled as one piece, so that its call cannot be
            tapped.
        look_up: returns the model's embeddings of a few tokens, [tokens, width].
        beside_stream: see `ModuleTree`.

    Raises:
        WeirError: if there is no list of blocks, or several; says what to describe.
    """
    stacks = _without_aliases(_candidate_stacks(model, description, is_mixer))
    if len(stacks) > 1:
        stacks = {path: modules for path, modules in stacks.items() if len(modules) == num_layers} or stacks
    if len(stacks) != 1:
        raise WeirError(f"{type(model).__name__} has {_why_no_stack(stacks, description, run)}", "model")
    stack, modules = next(iter(stacks.items()))
    blocks = {i: module for i, module in enumerate(modules) if type(module).__name__ != "PPMissingLayer"}
    return ModuleTree(
        model=model,
        stack=stack,
        blocks=blocks,
        num_layers=len(modules),
        width=width,
        is_mixer=is_mixer,
        is_embedding=is_embedding,
        entrance=_entrance(model, stack, compiled_whole),
        look_up=look_up,
        beside_stream=beside_stream,
    )


def _candidate_stacks(
    model: torch.nn.Module, description: ModelDescription, is_mixer: Callable[[torch.nn.Module], bool]
) -> dict[str, torch.nn.ModuleList]:
    """Return the outermost lists, by path, that contain a mixer or that the description names."""
    stacks: dict[str, torch.nn.ModuleList] = {}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in stacks):
            continue
        if path == description.stack or (not description.stack and any(is_mixer(m) for m in module.modules())):
            stacks[path] = module
    return stacks


def _without_aliases(stacks: dict[str, torch.nn.ModuleList]) -> dict[str, torch.nn.ModuleList]:
    """Drop lists whose blocks are all in another list; of equal lists, keep the first by name."""
    members = {path: {id(block) for block in modules} for path, modules in stacks.items()}

    def covered(path: str) -> bool:
        own = members[path]
        return any(own < blocks or (own == blocks and other < path) for other, blocks in members.items())

    return {path: modules for path, modules in stacks.items() if not covered(path)}


def _entrance(model: torch.nn.Module, stack: str, compiled_whole: Callable[[torch.nn.Module], bool]) -> str:
    """Return the path of the outermost module above the blocks whose call can be tapped; "" is the model."""
    names = stack.split(".")
    above = (".".join(names[:n]) for n in range(len(names)))
    return next((path for path in above if not compiled_whole(model.get_submodule(path))), "")


def _why_no_stack(stacks: dict[str, torch.nn.ModuleList], description: ModelDescription, run: Run) -> str:
    """Return why none of these lists can be taken for the blocks, and what to do."""
    if not stacks:
        named = f" called {description.stack!r}, as its description says" if description.stack else " with attention"
        return f"no list of blocks{named}; name the list that its blocks are in: describe={{'stack': path}}"
    runs = _runs_per_pass(stacks, run)
    listed = "; ".join(f"{p}: {len(stacks[p])} blocks, run {n} times in one pass" for p, n in runs.items())
    found = f"{len(stacks)} lists of blocks with attention ({listed}). "
    run_once = [path for path, n in runs.items() if n == 1]
    if not run_once and max(runs.values()) > 1:
        return found + "A block that runs several times has no single row at a position: Weir cannot serve this model"
    return found + f"Layers are counted in one list: name it, say describe={{'stack': {[*run_once, *stacks][0]!r}}}"


def _runs_per_pass(stacks: dict[str, torch.nn.ModuleList], run: Run) -> dict[str, int]:
    """Return, for each list, the most often that any of its blocks runs in one pass."""
    counts = {path: [0] * len(modules) for path, modules in stacks.items()}

    def counter(path: str, index: int) -> Callable[..., None]:
        def count(*_: object) -> None:
            counts[path][index] += 1

        return count

    handles = [
        block.register_forward_pre_hook(counter(path, index))
        for path, modules in stacks.items()
        for index, block in enumerate(modules)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {path: max(of_blocks, default=0) for path, of_blocks in counts.items()}
