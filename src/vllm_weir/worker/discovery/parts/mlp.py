"""The search for the points inside the MLP of one block, in a pass as `parts.recorder` records it.

1. `mlp_post` is the input of the linear module whose result is mlp_out, or is scaled or normalised
   to be mlp_out: the down projection.
2. `mlp_pre` and `mlp_pre_linear` are columns `g` and `u` of what linear modules before it returned,
   such that ``mlp_post = f(g) * u`` for some function f of a number. The columns are halves of a
   merged projection, or all of two. Without a gate, `mlp_pre` is `g` of ``mlp_post = f(g)``.
3. `mlp_in` is the input of the modules that return these.

If experts run in one kernel, there are `mlp_in`, what that kernel or its router is given, and
`router_logits`, what the router returns and the kernel is given.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_weir.schema.hooks import MLP_HOOKS, NEURON_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall
from vllm_weir.worker.discovery.parts.attention import common_module, place_input
from vllm_weir.worker.discovery.parts.findings import BlockView, Columns, Linear, PartFindings

NO_EXPERTS = "this block has no experts to choose from"
FUSED = "the experts of this block run inside one fused kernel, which keeps their neurons to itself"
NO_DOWN = "no linear module returns what becomes mlp_out"
UNKNOWN = "what adds mlp_out is neither an MLP of linear modules nor a layer of experts that vLLM tells about"
NO_GATE = "its MLP has no gate, so mlp_pre is all that its activation is given"


def find_mlp(view: BlockView, mlp_out: Anchor | None, why_none: str, of_attention: set[str]) -> PartFindings:
    """Find the points of a block's MLP; `mlp_out` is None if that was refused, for the reason `why_none`."""
    findings = PartFindings()
    linears = [linear for linear in view.linears if linear.call.path not in of_attention]
    experts = _experts_calls(view)
    if len(experts) > 1:
        findings.refuse(MLP_HOOKS, f"block {view.record.block} has {len(experts)} layers of experts")
    elif experts:
        _find_experts(view, findings, *experts[0], linears)
    else:
        _find_neurons(view, findings, mlp_out, why_none, linears)
        unknown = findings.refused.get("mlp_in") == NO_DOWN
        findings.refuse(("router_logits",), UNKNOWN if unknown else NO_EXPERTS)
    return findings


def _experts_calls(view: BlockView) -> list[tuple[ModuleCall, int]]:
    """Return the calls of layers of experts that are in no other such call, and their numbers of experts."""
    counts = ((call, view.parts.experts(view.tree.modules[call.path])) for call in view.calls)
    calls = [(call, count) for call, count in counts if count is not None]
    return [(c, n) for c, n in calls if not any(o.start < c.start and c.end < o.end for o, _ in calls)]


def _find_experts(
    view: BlockView, findings: PartFindings, experts: ModuleCall, count: int, linears: list[Linear]
) -> None:
    findings.refuse(NEURON_HOOKS, FUSED)
    router = _place_router(view, findings, experts, count, linears)
    width = view.tree.width
    given = [(experts, key) for key in sorted(experts.args, key=lambda k: k.index)]
    of_experts = next(((c, k) for c, k in given if c.args[k].shape[1] == width), None)
    of_router = None if router is None else (router.call, router.given)
    first = of_router or of_experts
    if first is None or first[0].args[first[1]].shape[1] != width:
        findings.refuse(("mlp_in",), "its experts are not given rows of the stream's width")
        return
    value = first[0].args[first[1]]
    if of_experts is not None and not torch.equal(experts.args[of_experts[1]], value):
        findings.refuse(("mlp_in",), "its experts and their router are given different rows")
        return
    readers = [reader for reader in (of_router, of_experts) if reader is not None]
    scope = common_module([call.path for call, _ in readers]) if len(readers) > 1 else ""
    if router is None:  # it reads the same rows, in a module that is not known
        scope = experts.path.rpartition(".")[0]
    for linear in linears:
        inside = experts.start < linear.call.start < experts.end or linear.call.path.startswith(f"{scope or '?'}.")
        if inside and linear.call is not first[0] and _same(linear.value_in, value):
            readers.append((linear.call, linear.given))
    place_input(view, findings, "mlp_in", readers)
    if any(linear.shape.quantises_input for linear in linears if (linear.call, linear.given) in readers):
        findings.quantised.add("mlp_in")


def _place_router(
    view: BlockView, findings: PartFindings, experts: ModuleCall, count: int, linears: list[Linear]
) -> Linear | None:
    """Place router_logits; return the router if it is a linear module."""
    given = [(key, value) for key, value in experts.args.items() if value.shape[1] == count]
    inside = [x for x in linears if experts.start < x.call.start < experts.end and x.value_out.shape[1] == count]
    outside = [x for x in linears if x.call.end < experts.start and x.value_out.shape[1] == count]
    for key, value in given:
        router = next((x for x in outside if torch.equal(x.value_out, value)), None)
        anchor = None if router is None else view.anchor_of(router.call, router.returned, "after")
        if router is not None and anchor is not None:
            findings.anchors["router_logits"] = anchor
            findings.readers["router_logits"] = (Anchor(experts.path, "before", key),)
            findings.shapes["router_logits"] = (count,)
            return router
    anchor = view.anchor_of(inside[0].call, inside[0].returned, "after") if len(inside) == 1 else None
    if anchor is not None:
        findings.anchors["router_logits"] = anchor
        findings.shapes["router_logits"] = (count,)
        findings.router_inside = experts.path
        return inside[0]
    findings.refuse(("router_logits",), "no linear module returns the logits that its experts are chosen by")
    return None


def _find_neurons(
    view: BlockView, findings: PartFindings, mlp_out: Anchor | None, why_none: str, linears: list[Linear]
) -> None:
    hooks = ("mlp_in", *NEURON_HOOKS)
    down = view.projection_to(mlp_out, linears)
    if mlp_out is None:
        findings.refuse(hooks, f"mlp_out of this block is refused: {why_none}")
        return
    if down is None:
        findings.refuse(hooks, NO_DOWN)
        return
    neurons = down.value_in.shape[1]
    anchor = view.anchor_of(down.call, down.given, "before")
    if anchor is None or neurons != down.shape.inputs.width:
        findings.refuse(("mlp_post",), f"the down projection is given {list(down.call.shapes[down.given])}")
    else:
        findings.anchors["mlp_post"] = anchor
        findings.readers["mlp_post"] = (anchor,)
        findings.features["mlp_post"], findings.shapes["mlp_post"] = down.shape.inputs, (down.shape.inputs.whole,)
        if down.shape.quantises_input:
            findings.quantised.add("mlp_post")
    earlier = [linear for linear in linears if linear.call.end < down.call.start]
    producers = _place_pre(view, findings, down, earlier)
    _place_mlp_in(view, findings, down, earlier, producers)


def _place_pre(view: BlockView, findings: PartFindings, down: Linear, earlier: list[Linear]) -> list[Linear]:
    """Place mlp_pre and mlp_pre_linear; return the modules that return them."""
    neurons = down.value_in.shape[1]
    # A norm may lie between the neurons and the down projection.
    begin = max((linear.call.end for linear in earlier), default=0)
    between = [c for c in view.calls if begin < c.start < down.call.start]
    targets = [down.value_in, *(v for c in between for v in c.args.values() if v.shape[1] == neurons)]
    for gate, up in _gated(earlier, neurons):
        if any(_is_product(gate.value, up.value, target) for target in targets):
            _place_columns(view, findings, "mlp_pre", gate)
            _place_columns(view, findings, "mlp_pre_linear", up)
            return [gate.linear, up.linear]
    for linear in reversed(earlier):
        if linear.value_out.shape[1] == neurons and any(_is_function(linear.value_out, t) for t in targets):
            _place_columns(view, findings, "mlp_pre", Columns(linear, 0, neurons))
            findings.refuse(("mlp_pre_linear",), NO_GATE)
            return [linear]
    why = "no linear module returns what the activation before the down projection is a function of"
    findings.refuse(("mlp_pre", "mlp_pre_linear"), why)
    return []


def _place_columns(view: BlockView, findings: PartFindings, hook: str, columns: Columns) -> None:
    features, anchor = columns.features(view.parts.ranks), view.place(columns)
    if features is None:
        findings.refuse((hook,), "its projection does not tell which neurons are this worker's")
    elif anchor is None:
        findings.refuse((hook,), "its projection returns it in a shape that is not one row for each token")
    else:
        findings.anchors[hook] = anchor
        findings.features[hook], findings.shapes[hook] = features, (features.whole,)


def _place_mlp_in(
    view: BlockView, findings: PartFindings, down: Linear, earlier: list[Linear], producers: list[Linear]
) -> None:
    width = view.tree.width
    scope = common_module([down.call.path, *(x.call.path for x in producers)]) if producers else ""
    inside = scope.startswith(f"{view.record.calls[0].path}.")
    first = next((x for x in producers if x.value_in.shape[1] == width), None)
    if first is None:
        findings.refuse(("mlp_in",), "no linear module of its MLP is given rows of the stream's width")
        return
    readers = [
        linear
        for linear in earlier
        if (linear in producers or (inside and linear.call.path.startswith(f"{scope}.")))
        and _same(linear.value_in, first.value_in)
    ]
    if any(x not in readers for x in producers):
        findings.refuse(("mlp_in",), "gate and up projection are not given the same rows")
        return
    place_input(view, findings, "mlp_in", [(x.call, x.given) for x in readers])
    if any(x.shape.quantises_input for x in readers):
        findings.quantised.add("mlp_in")


def _gated(linears: list[Linear], neurons: int) -> Iterator[tuple[Columns, Columns]]:
    """Yield what gate and up projection may be, likeliest first."""
    for linear in reversed(linears):
        if linear.value_out.shape[1] == 2 * neurons:
            halves = Columns(linear, 0, neurons), Columns(linear, neurons, 2 * neurons)
            yield halves
            yield halves[::-1]
    alone = [Columns(x, 0, neurons) for x in reversed(linears) if x.value_out.shape[1] == neurons]
    for gate in alone:
        for up in alone:
            if gate is not up:
                yield gate, up


def _is_product(gate: torch.Tensor, up: torch.Tensor, product: torch.Tensor) -> bool:
    large = up.abs() > 0.5
    return _is_function(gate[large], product[large] / up[large])


def _is_function(argument: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a noise tensor determines another, element by element, by a continuous function.

    Each value then lies near the mean of the two values whose arguments are next to its own.
    """
    order = argument.flatten().argsort()
    values = value.flatten()[order]
    if len(values) < 16 or not bool(values.isfinite().all()) or float(values.std()) == 0:
        return False
    off = values[1:-1] - (values[:-2] + values[2:]) / 2
    return float(off.abs().mean()) < 0.1 * float((values - values.mean()).abs().mean())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
