"""Which hook points a loaded model has, where they are, and the proof that they mean what they are called.

The model runs a few times over a handful of tokens before it is compiled: once with its own weights, once with noise in
every part of it to find the points by arithmetic (`resolve`), once more with something added at every point to see
that it moves what lies downstream as it must; the first pass is then held against the design's identities. A point
that fails any of it is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_weir.errors import WeirError
from vllm_weir.settings import Settings
from vllm_weir.spec.hooks import BLOCK_HOOKS, HOOKS, INNER_HOOKS, MODEL_HOOKS, Site, place_of
from vllm_weir.worker.anchors import Anchor, Key, parameters_of
from vllm_weir.worker.carried import Carried
from vllm_weir.worker.families import Family
from vllm_weir.worker.makes import Makes
from vllm_weir.worker.matcher import Matcher
from vllm_weir.worker.noise import enter_noise, fill, leave_noise, noise
from vllm_weir.worker.proof import Proof
from vllm_weir.worker.resolve import Points, Ports, holds
from vllm_weir.worker.scene import Scene
from vllm_weir.worker.select import tap_of
from vllm_weir.worker.trace import Call, Recorder, Trace

Choice = tuple[Ports, dict[int, Points], dict[int, Trace]]
"""What carries the stream, the points found with it, and the passes in which they were."""
Run = Callable[[], None]
"""Runs the model once, uncompiled, over a few tokens."""


@dataclass
class SiteMap:
    """Verdicts on every site of the blocks that live in this process.

    Attributes:
        num_layers: blocks of the whole model.
        anchors: where the supported sites are; `resid_pre` past the first block here is where the last one ended.
        refused: why the others are not supported.
    """

    num_layers: int
    anchors: dict[Site, Anchor] = field(default_factory=dict)
    refused: dict[Site, str] = field(default_factory=dict)

    def refuse(self, hooks, layers, why: str) -> None:
        """These sites are not supported, whatever was found."""
        for layer in layers:
            for hook in hooks:
                self.anchors.pop(Site(hook, layer), None)
                self.refused.setdefault(Site(hook, layer), why)


def chosen(sites: SiteMap, settings: Settings) -> dict[int, Anchor]:
    """Taps that the settings ask for and the model has here: tap -> place, in the order in which they are to act.

    Raises:
        WeirError: if a layer does not exist, or, with ``refused="start"``, if a site of a hook point that the settings
            name is refused, or all sites are.
    """
    layers = range(sites.num_layers) if settings.layers == "all" else settings.layers
    hooks = settings.hooks or HOOKS
    wanted = {Site(h, layer) for h in hooks if h in BLOCK_HOOKS for layer in layers}
    wanted |= {Site(h, 0) for h in hooks if h in MODEL_HOOKS}
    for layer in layers:
        if layer >= sites.num_layers:
            raise WeirError(
                f"block {layer} does not exist: the model has blocks 0..{sites.num_layers - 1}", "settings.layers"
            )
    if "resid_post" in hooks and 0 in layers:
        wanted.add(Site("resid_pre", 0))
    if settings.refused == "start" and settings.hooks is not None:
        for site in sorted(wanted & sites.refused.keys(), key=place_of):
            raise WeirError(f"{site} is refused: {sites.refused[site]}", "settings.hooks")
    placed: dict[int, Anchor] = {}
    for site in sorted(wanted, key=place_of):
        source = site
        if site.hook == "resid_pre" and Site("resid_post", site.layer - 1) in sites.anchors:
            source = Site("resid_post", site.layer - 1)
        if site in sites.anchors and source in sites.anchors:
            placed.setdefault(tap_of(site), sites.anchors[source])
    if settings.refused == "start" and sites.refused and not sites.anchors:
        site, why = next(iter(sites.refused.items()))
        raise WeirError(f"every site is refused; {site}: {why}", "settings.refused")
    return dict(sorted(placed.items(), key=lambda p: (p[0] == 1, p[0])))


def find_scene(
    model,
    width: int,
    num_layers: int,
    family: Family,
    is_core,
    is_embedding,
    run: Run,
    whole: Callable[[torch.nn.Module], bool] = lambda module: False,
    look_up: Callable[[], torch.Tensor] | None = None,
) -> Scene:
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
    return Scene(model, stack, blocks, len(modules), width, is_core, is_embedding, entrance, look_up)


def _no_stack(stacks: dict[str, torch.nn.ModuleList], family: Family, run: Run) -> str:
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


def map_sites(scene: Scene, run: Run, dtype: torch.dtype, family: Family) -> SiteMap:
    """Find and prove every site of a model."""
    sites = SiteMap(scene.num_layers)
    if not scene.blocks:
        return sites
    name = type(scene.model).__name__
    cores = {path for block, path, _, module in scene.members() if block >= 0 and scene.is_core(module)}

    def mix(_block: int, path: str, call: Call, live) -> None:
        # Without a key-value cache attention returns nothing of use, and all the tokens of the pass are the same.
        if path in cores or scene.is_embedding(scene.modules[path]):
            fill(path, call, live)

    own = _record(Recorder(scene, leave=mix), run)
    missed = cores - {c.path for calls in own.blocks for c in calls}
    if missed:
        # The Transformers backend calls attention past its module: then the part that holds it mixes tokens.
        whole = len(scene.stack.split(".")) + 2
        cores |= {".".join(path.split(".")[:whole]) for path in missed}
        own = _record(Recorder(scene, leave=mix), run)
    matcher = Matcher(dtype)
    unfit = _unfit(own, scene)
    choices = [] if unfit else _ports(own, scene)
    if not choices:
        shapes = {str(k): s for k, s in own.blocks[min(scene.blocks)][0].shapes.items()}
        why = f"the blocks of {name} do not hand on one stream of width {scene.width}: they are given {shapes}"
        sites.refuse((*BLOCK_HOOKS, *MODEL_HOOKS), range(scene.num_layers), unfit or why)
        return sites
    noisy = {"children": _noisy(scene, run, choices[0], "children", cores)}

    def points(ports: Ports) -> Choice:
        found, traces = _resolve(scene, noisy, ports, cores, family, matcher)
        if not all(p.complete for p in found.values()):
            if "leaves" not in noisy:
                noisy["leaves"] = _noisy(scene, run, choices[0], "leaves", cores)
            found, traces = _resolve(scene, noisy, ports, cores, family, matcher)
        return ports, found, traces

    def astray(ports: Ports) -> dict[int, str]:
        return Carried(scene, run, matcher, ports, own, mix).failures()

    (ports, found, traces), failures = _choose(scene, choices, points, astray)
    failures = failures or _left_open(scene, own, ports, found)
    proof = Proof(scene, run, matcher, ports, found, traces, own, sites, noisy["children"], mix)
    proof.conclude(cores, failures)
    return sites


def _unfit(own: Trace, scene: Scene) -> str:
    """Why no position has a row of its own in a model's blocks; "" if nothing is against it."""
    name = type(scene.model).__name__
    for block in scene.blocks:
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
    scene: Scene,
    choices: Sequence[Ports],
    points: Callable[[Ports], Choice],
    astray: Callable[[Ports], dict[int, str]],
) -> tuple[Choice, dict[int, str]]:
    """The choice with most points among those whose stream is all that the blocks hand on, and what is astray in it."""
    ranked: list[tuple[tuple[int, int], Choice, dict[int, str] | None]] = []
    for ports in choices:
        choice = points(ports)
        found = choice[1]
        # Where a tensor too many is taken for part of the stream, the block's own result seems to be added to it.
        own = sum(a.module == f"{scene.stack}.{block}" for block, p in found.items() for a in p.anchors.values())
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


def _left_open(scene: Scene, own: Trace, ports: Ports, found: dict[int, Points]) -> dict[int, str]:
    """As `Carried.failures`: of a pipeline stage's only block, which results are the stream its points alone tell."""
    block, *others = scene.blocks
    call = own.blocks[block][0]
    stream = {call.pointers.get(key) for key in (ports.of(call).hidden_out, ports.of(call).residual_out) if key}
    rest = [key for key in call.out if call.pointers[key] not in stream]
    points = found[block]
    told = points.kind != "sequential" or "mlp_out" in points.anchors
    if others or block + 1 == scene.num_layers or not rest or (points.proven and told):
        return {}
    why = (
        f"block {block} hands on {len(call.out)} tensors, and nothing in its pipeline stage tells which are the stream"
    )
    return {block: why}


def _resolve(scene: Scene, noisy, ports: Ports, cores: set[str], family: Family, matcher: Matcher):
    """Points of every block, by the pass in which most were found, and that pass."""
    found: dict[int, Points] = {}
    traces: dict[int, Trace] = {}

    def plain(path: str) -> bool:
        return all(p.dim() < 2 for p in scene.modules[path].parameters())

    makes = {mode: Makes(ports, cores, plain, matcher) for mode in noisy}
    for block in scene.blocks:
        for mode, trace in noisy.items():
            calls = trace.blocks[block]
            if family.points:
                points = _from_family(scene, block, calls, family)
                if not holds(points.anchors, calls, ports, matcher):
                    points = Points(
                        refused=dict.fromkeys(INNER_HOOKS, "what the model's description names does not add up")
                    )
            else:
                points = makes[mode].points(calls)
            if block not in found or len(points.anchors) > len(found[block].anchors):
                found[block], traces[block] = points, trace
    return found, traces


def _from_family(scene: Scene, block: int, calls: list[Call], family: Family) -> Points:
    path = f"{scene.stack}.{block}"
    points = Points(kind="described")
    for hook in INNER_HOOKS:
        anchor = family.anchor(hook, path, calls)
        if anchor is None:
            points.refused[hook] = "the model's description does not name it, or names what this block does not have"
        else:
            points.anchors[hook] = anchor
    return points


def _ports(own: Trace, scene: Scene) -> list[Ports]:
    """What may carry the stream, likeliest first: the tensors that one block hands on and the next is given."""
    pairs: dict[tuple, int] = {}
    for block in scene.blocks:
        call = own.blocks[block][0]
        before = own.blocks[block - 1][0] if block - 1 in scene.blocks else None
        if before is None:
            continue
        given = {call.pointers[k]: k for k in call.args}
        links = tuple((o, given[before.pointers[o]]) for o in before.handed if before.pointers[o] in given)
        if links:
            pairs[links] = pairs.get(links, 0) + 1
    if not pairs:
        call = own.blocks[min(scene.blocks)][0]
        named = {k.name: k for k in call.args}
        hidden = named.get("hidden_states") or (next(iter(call.args)) if len(call.args) == 1 else None)
        outs = call.handed
        if hidden is None or not outs:
            return []
        residual = named.get("residual") or _residual_of(scene, min(scene.blocks))
        second = residual if residual in outs else outs[1] if len(outs) > 1 else None
        pair = Ports(hidden, outs[0], residual, second) if residual and second else None
        return [*([pair] if pair else []), Ports(hidden, outs[0])]
    links = max(pairs, key=lambda p: (pairs[p], len(p)))
    (hidden_out, hidden_in), *more = links
    found = [Ports(hidden_in, hidden_out, more[0][1], more[0][0])] if more else []
    return [*found, Ports(hidden_in, hidden_out), *(Ports(i, o) for o, i in more)]


def _residual_of(scene: Scene, block: int) -> Key | None:
    names = parameters_of(scene.blocks[block])
    return Key("arg", names.index("residual"), "residual") if "residual" in names else None


def _noisy(scene: Scene, run: Run, ports: Ports, mode: str, cores: set[str]) -> Trace:
    """A pass with noise at every block's entrance and wherever a part of it ends."""
    return _record(Recorder(scene, enter_noise(ports), leave_noise(scene, mode, cores), offset=noise), run)


def _record(recorder: Recorder, run: Run) -> Trace:
    with recorder.recording() as trace:
        run()
    return trace
