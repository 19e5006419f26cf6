"""Which hook points a loaded model has, where they are, and the proof that they mean what they are called.

The model runs a few times over a handful of tokens before it is compiled: once with its own weights, once with noise in
every part of it to find the points by arithmetic (`resolve`), once more with something added at every point to see
that it moves what lies downstream as it must; the first pass is then held against the design's identities. A point
that fails any of it is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import BLOCK_HOOKS, INNER_HOOKS, MODEL_HOOKS
from vllm_weir.worker.discovery.anchors import TensorKey, parameters_of
from vllm_weir.worker.discovery.block_types import BlockTypes
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.noise import enter_noise, fill, leave_noise, noise
from vllm_weir.worker.discovery.overrides import ModelDescription
from vllm_weir.worker.discovery.recorder import ModuleCall, Recorder, Trace
from vllm_weir.worker.discovery.resolve import BlockPoints, StreamPorts, holds
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.stream_check import StreamCheck
from vllm_weir.worker.discovery.verification import Verification

Choice = tuple[StreamPorts, dict[int, BlockPoints], dict[int, Trace]]
"""What carries the stream, the points found with it, and the passes in which they were."""
Run = Callable[[], None]
"""Runs the model once, uncompiled, over a few tokens."""


def find_tree(
    model: torch.nn.Module,
    width: int,
    num_layers: int,
    family: ModelDescription,
    is_core: Callable[[torch.nn.Module], bool],
    is_embedding: Callable[[torch.nn.Module], bool],
    run: Run,
    whole: Callable[[torch.nn.Module], bool] = lambda module: False,
    look_up: Callable[[], torch.Tensor] | None = None,
) -> ModuleTree:
    """The decoder blocks of a model; raises WeirError saying why there are none to tap. Runs it only for that.

    `whole`: whether a module is compiled as one piece, so that nothing can be done around its call.
    """
    name = type(model).__name__
    stacks: dict[str, torch.nn.ModuleList] = {}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or any(path.startswith(f"{p}.") for p in stacks):
            continue
        if path == family.stack or (not family.stack and any(is_core(m) for m in module.modules())):
            stacks[path] = module
    # Some models keep parts of the list, or all of it, under further names.
    inside = {p: {id(block) for block in m} for p, m in stacks.items()}
    order = list(stacks)
    covered = {p for p in order for q in order if inside[p] < inside[q] or (inside[p] == inside[q] and q < p)}
    stacks = {p: m for p, m in stacks.items() if p not in covered}
    if len(stacks) > 1:
        stacks = {p: m for p, m in stacks.items() if len(m) == num_layers} or stacks
    if len(stacks) != 1:
        raise WeirError(f"{name} has {_no_stack(stacks, family, run)}", "model")
    stack, modules = next(iter(stacks.items()))
    blocks = {i: m for i, m in enumerate(modules) if type(m).__name__ != "PPMissingLayer"}
    names = stack.split(".")
    above = (".".join(names[:n]) for n in range(len(names)))
    entrance = next((path for path in above if not whole(model.get_submodule(path))), "")
    return ModuleTree(model, stack, blocks, len(modules), width, is_core, is_embedding, entrance, look_up)


def _no_stack(stacks: dict[str, torch.nn.ModuleList], family: ModelDescription, run: Run) -> str:
    """Why none of these lists holds the blocks, and what to do."""
    if not stacks:
        named = f" called {family.stack!r}, as its description says" if family.stack else " with attention"
        return f"no list of blocks{named}; name the list that its blocks are in: describe={{'stack': path}}"
    runs = _runs(stacks, run)
    told = "; ".join(f"{p}: {len(stacks[p])} blocks, run {n} times in one pass" for p, n in runs.items())
    what = f"{len(stacks)} lists of blocks with attention ({told}). "
    once = [path for path, n in runs.items() if n == 1]
    if not once and max(runs.values()) > 1:
        return what + "A block that runs several times has no single row at a position: Weir cannot serve this model"
    return what + f"Layers are counted in one list: name it, say describe={{'stack': {[*once, *stacks][0]!r}}}"


def _runs(stacks: dict[str, torch.nn.ModuleList], run: Run) -> dict[str, int]:
    """How often the blocks of each list run in one pass, at most."""
    times = [(path, block, [0]) for path, modules in stacks.items() for block in modules]

    def counter(count: list[int]) -> Callable[..., None]:
        def ran(*_: object) -> None:
            count[0] += 1

        return ran

    hooks = [block.register_forward_pre_hook(counter(count)) for _, block, count in times]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {path: max((count[0] for p, _, count in times if p == path), default=0) for path in stacks}


def map_sites(tree: ModuleTree, run: Run, dtype: torch.dtype, family: ModelDescription) -> SiteMap:
    """Find and prove every site of a model."""
    sites = SiteMap(tree.num_layers)
    if not tree.blocks:
        return sites
    name = type(tree.model).__name__
    cores = {path for block, path, _, module in tree.members() if block >= 0 and tree.is_core(module)}

    def mix(_block: int, path: str, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        # Without a key-value cache attention returns nothing of use, and all the tokens of the pass are the same.
        if path in cores or tree.is_embedding(tree.modules[path]):
            fill(path, call, live)

    own = _record(Recorder(tree, leave=mix), run)
    missed = cores - {c.path for calls in own.blocks for c in calls}
    if missed:
        # The Transformers backend calls attention past its module: then the part that holds it mixes tokens.
        whole = len(tree.stack.split(".")) + 2
        cores |= {".".join(path.split(".")[:whole]) for path in missed}
        own = _record(Recorder(tree, leave=mix), run)
    matcher = Matcher(dtype)
    unfit = _unfit(own, tree)
    choices = [] if unfit else _ports(own, tree)
    if not choices:
        shapes = {str(k): s for k, s in own.blocks[min(tree.blocks)][0].shapes.items()}
        why = f"the blocks of {name} do not hand on one stream of width {tree.width}: they are given {shapes}"
        sites.refuse((*BLOCK_HOOKS, *MODEL_HOOKS), range(tree.num_layers), unfit or why)
        return sites
    noisy = {"children": _noisy(tree, run, choices[0], "children", cores)}

    def points(ports: StreamPorts) -> Choice:
        found, traces = _resolve(tree, noisy, ports, cores, family, matcher)
        if not all(p.complete for p in found.values()):
            if "leaves" not in noisy:
                noisy["leaves"] = _noisy(tree, run, choices[0], "leaves", cores)
            found, traces = _resolve(tree, noisy, ports, cores, family, matcher)
        return ports, found, traces

    def astray(ports: StreamPorts) -> dict[int, str]:
        return StreamCheck(tree, run, matcher, ports, own, mix).failures()

    (ports, found, traces), failures = _choose(tree, choices, points, astray)
    failures = failures or _left_open(tree, own, ports, found)
    proof = Verification(tree, run, matcher, ports, found, traces, own, sites, noisy["children"], mix)
    proof.conclude(cores, failures)
    return sites


def _unfit(own: Trace, tree: ModuleTree) -> str:
    """Why no position has a row of its own in a model's blocks; "" if nothing is against it."""
    name = type(tree.model).__name__
    for block in tree.blocks:
        calls = [c for c in own.blocks[block] if c.local == ""]
        if len(calls) != 1:
            return f"block {block} of {name} runs {len(calls)} times in one pass, so a position has no single row there"
        # The Transformers backend carries a batch dimension of one.
        shapes = (calls[0].shapes[key] for key in calls[0].out)
        deep = next((shape for shape in shapes if len(shape) > 2 and shape[:-2] != (1,)), None)
        if deep is not None:
            return f"the blocks of {name} hand on several streams at once {deep}, so a position has no single row there"
    return ""


def _choose(
    tree: ModuleTree,
    choices: Sequence[StreamPorts],
    points: Callable[[StreamPorts], Choice],
    astray: Callable[[StreamPorts], dict[int, str]],
) -> tuple[Choice, dict[int, str]]:
    """The choice with most points among those whose stream is all that the blocks hand on, and what is astray in it."""
    ranked: list[tuple[tuple[int, int], Choice, dict[int, str] | None]] = []
    for ports in choices:
        choice = points(ports)
        found = choice[1]
        # Where a tensor too many is taken for part of the stream, the block's own result seems to be added to it.
        own = sum(a.module == f"{tree.stack}.{block}" for block, p in found.items() for a in p.anchors.values())
        full = not own and all(p.complete and p.kind == "sequential" for p in found.values())
        failures = astray(ports) if full else None
        ranked.append(((sum(len(p.anchors) + p.proven for p in found.values()), -own), choice, failures))
        if failures == {}:
            break  # no other choice can have more points
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    tried: list[tuple[Choice, dict[int, str]]] = []
    for _, choice, failures in ranked:
        tried.append((choice, astray(choice[0]) if failures is None else failures))
        if not tried[-1][1]:
            return tried[-1]
    return tried[0]


def _left_open(tree: ModuleTree, own: Trace, ports: StreamPorts, found: dict[int, BlockPoints]) -> dict[int, str]:
    """As `StreamCheck.failures`: of a pipeline stage's only block, which results are the stream its points alone
    tell."""
    block, *others = tree.blocks
    call = own.blocks[block][0]
    stream = {call.pointers.get(key) for key in (ports.of(call).hidden_out, ports.of(call).residual_out) if key}
    rest = [key for key in call.out if call.pointers[key] not in stream]
    points = found[block]
    told = points.kind != "sequential" or "mlp_out" in points.anchors
    if others or block + 1 == tree.num_layers or not rest or (points.proven and told):
        return {}
    why = (
        f"block {block} hands on {len(call.out)} tensors, and nothing in its pipeline stage tells which are the stream"
    )
    return {block: why}


def _resolve(
    tree: ModuleTree,
    noisy: Mapping[str, Trace],
    ports: StreamPorts,
    cores: set[str],
    family: ModelDescription,
    matcher: Matcher,
) -> tuple[dict[int, BlockPoints], dict[int, Trace]]:
    """Points of every block, by the pass in which most were found, and that pass."""
    found: dict[int, BlockPoints] = {}
    traces: dict[int, Trace] = {}

    def plain(path: str) -> bool:
        return all(p.dim() < 2 for p in tree.modules[path].parameters())

    makes = {mode: BlockTypes(ports, cores, plain, matcher) for mode in noisy}
    for block in tree.blocks:
        for mode, trace in noisy.items():
            calls = trace.blocks[block]
            if family.points:
                points = _from_family(tree, block, calls, family)
                if not holds(points.anchors, calls, ports, matcher):
                    points = BlockPoints(
                        refused=dict.fromkeys(INNER_HOOKS, "what the model's description names does not add up")
                    )
            else:
                points = makes[mode].points(calls)
            if block not in found or len(points.anchors) > len(found[block].anchors):
                found[block], traces[block] = points, trace
    return found, traces


def _from_family(tree: ModuleTree, block: int, calls: list[ModuleCall], family: ModelDescription) -> BlockPoints:
    path = f"{tree.stack}.{block}"
    points = BlockPoints(kind="described")
    for hook in INNER_HOOKS:
        anchor = family.anchor(hook, path, calls)
        if anchor is None:
            points.refused[hook] = "the model's description does not name it, or names what this block does not have"
        else:
            points.anchors[hook] = anchor
    return points


def _ports(own: Trace, tree: ModuleTree) -> list[StreamPorts]:
    """What may carry the stream, likeliest first: the tensors that one block hands on and the next is given."""
    pairs: dict[tuple, int] = {}
    for block in tree.blocks:
        call = own.blocks[block][0]
        before = own.blocks[block - 1][0] if block - 1 in tree.blocks else None
        if before is None:
            continue
        given = {call.pointers[k]: k for k in call.args}
        links = tuple((o, given[before.pointers[o]]) for o in before.handed if before.pointers[o] in given)
        if links:
            pairs[links] = pairs.get(links, 0) + 1
    if not pairs:
        call = own.blocks[min(tree.blocks)][0]
        named = {k.name: k for k in call.args}
        hidden = named.get("hidden_states") or (next(iter(call.args)) if len(call.args) == 1 else None)
        outs = call.handed
        if hidden is None or not outs:
            return []
        residual = named.get("residual") or _residual_of(tree, min(tree.blocks))
        second = residual if residual in outs else outs[1] if len(outs) > 1 else None
        pair = StreamPorts(hidden, outs[0], residual, second) if residual and second else None
        return [*([pair] if pair else []), StreamPorts(hidden, outs[0])]
    links = max(pairs, key=lambda p: (pairs[p], len(p)))
    (hidden_out, hidden_in), *more = links
    found = [StreamPorts(hidden_in, hidden_out, more[0][1], more[0][0])] if more else []
    return [*found, StreamPorts(hidden_in, hidden_out), *(StreamPorts(i, o) for o, i in more)]


def _residual_of(tree: ModuleTree, block: int) -> TensorKey | None:
    names = parameters_of(tree.blocks[block])
    return TensorKey("arg", names.index("residual"), "residual") if "residual" in names else None


def _noisy(tree: ModuleTree, run: Run, ports: StreamPorts, mode: str, cores: set[str]) -> Trace:
    """A pass with noise at every block's entrance and wherever a part of it ends."""
    return _record(Recorder(tree, enter_noise(ports), leave_noise(tree, mode, cores), offset=noise), run)


def _record(recorder: Recorder, run: Run) -> Trace:
    with recorder.recording() as trace:
        run()
    return trace
