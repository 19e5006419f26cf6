"""The search for the decoder blocks: the one list of modules with attention in it.

1. Take every `ModuleList` that contains a token mixer, or the one that the model's description
   names.
2. Drop lists whose blocks another list has too: some models keep them under several names.
3. If several remain, take the one whose length is the model's number of layers.
4. If that leaves no list or several, raise an error that says what to describe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.worker.discovery.descriptions import ModelDescription
from vllm_weir.worker.discovery.module_tree import ModuleTree, Run


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
