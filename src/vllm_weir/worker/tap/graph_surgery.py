"""Moves taps out of the way of a compiler pass that matches an all-reduce followed by a norm.

vLLM fuses `all_reduce -> add -> norm` into one kernel. A tap in between breaks the match, even in
an engine where nobody reads or steers. So the pass runs on a graph without those taps:

1. `detach` removes every chain of taps between an all-reduce and the users of its result.
2. The pass runs.
3. `reattach` looks at each all-reduce. If the pass has fused it, replace the fused op by one that
   takes the taps too (see `vllm_weir.patches.allreduce_fusion`); if not, put the taps back.

Graphs are functionalized graphs of `torch.fx`: a tap is ``auto_functionalized(weir.tap, hidden=..,
tap=..)``, and the tensors that it changed are its outputs 1 and 2.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_weir.worker.tap import op as _op  # noqa: F401 - defines the ops

TAP, TAP_RESIDUAL = torch.ops.weir.tap.default, torch.ops.weir.tap_residual.default
ALONE, PAIR = "a", "p"
"""How a detached tap acts: on the all-reduced tensor alone, or on it and the residual."""


@dataclass(frozen=True)
class DetachedTaps:
    """A chain of taps that was taken out behind one all-reduce.

    Attributes:
        source: the tensor that is all-reduced.
        reduced, residual: inputs of the first tap; `residual` is None if no tap has one.
        numbers: the taps' numbers, in the order in which they act.
        kinds: `ALONE` or `PAIR` for each of them.
        users: the nodes that used the chain's results.
    """

    source: fx.Node
    reduced: fx.Node
    residual: fx.Node | None
    numbers: tuple[fx.Node, ...]
    kinds: str
    users: tuple[fx.Node, ...]


def detach(graph: fx.Graph, all_reduce: Any) -> list[DetachedTaps]:
    """Remove the taps behind every all-reduce; return what `reattach` needs to restore them."""
    nodes = [node for node in graph.nodes if node.target is all_reduce]
    return [taps for node in nodes if (taps := _detach_behind(graph, node)) is not None]


def reattach(graph: fx.Graph, detached: list[DetachedTaps], fused: Any, tapped: Any) -> int:
    """Restore detached taps, and return how many chains were fused.

    Replace each `fused` op by `tapped`, which takes the taps; elsewhere put them back as they were.

    Raises:
        RuntimeError: if neither the all-reduce nor the fused op of a chain is left in the graph.
    """
    count = 0
    for taps in detached:
        node = next((user for user in taps.source.users if _is_call(user, fused, "allreduce_in", taps.source)), None)
        if node is not None:
            kwargs = {**node.kwargs, "taps": list(taps.numbers), "kinds": taps.kinds}
            with graph.inserting_before(node):
                call = graph.call_function(auto_functionalized, (tapped,), kwargs)
            call.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(call)
            graph.erase_node(node)
            count += 1
        else:
            _put_back(graph, taps)
    return count


def _detach_behind(graph: fx.Graph, reduced: fx.Node) -> DetachedTaps | None:
    hidden: fx.Node = reduced
    first_residual: fx.Node | None = None
    residual: fx.Node | None = None
    chain: list[fx.Node] = []
    kinds = ""
    while (tap := _next_tap(hidden)) is not None:
        other: Any = tap.kwargs.get("residual")
        if other is not None:
            if residual is None:
                first_residual = other
            elif other is not residual:
                break  # of another stream
        changed = _outputs(tap)
        if 1 not in changed or not set(changed) <= {1, 2}:
            break
        chain.append(tap)
        kinds += ALONE if other is None else PAIR
        hidden = changed[1]
        residual = changed.get(2) if other is not None else residual
        if other is not None and residual is None:
            break  # nothing uses the residual any more, so no tap can follow
    if not chain:
        return None
    users = [*hidden.users]
    hidden.replace_all_uses_with(reduced)
    if first_residual is not None and residual is not None:
        users += [user for user in residual.users if user not in users]
        residual.replace_all_uses_with(first_residual)
    numbers = tuple(tap.kwargs["tap"] for tap in chain)
    for tap in reversed(chain):
        for output in _outputs(tap).values():
            graph.erase_node(output)
        graph.erase_node(tap)
    return DetachedTaps(reduced.args[0], reduced, first_residual, numbers, kinds, tuple(users))  # type: ignore[arg-type]


def _next_tap(hidden: fx.Node) -> fx.Node | None:
    """Return the only user of `hidden` if it is a tap, with a residual or without."""
    if len(hidden.users) != 1:
        return None
    user = next(iter(hidden.users))
    return user if any(_is_call(user, op, "hidden", hidden) for op in (TAP, TAP_RESIDUAL)) else None


def _is_call(node: fx.Node, op: Any, name: str, value: fx.Node) -> bool:
    return node.target is auto_functionalized and node.args[0] is op and node.kwargs.get(name) is value


def _outputs(call: fx.Node) -> dict[int, fx.Node]:
    return {user.args[1]: user for user in call.users}  # type: ignore[misc]


def _put_back(graph: fx.Graph, taps: DetachedTaps) -> None:
    there = set(graph.nodes)
    users = [user for user in taps.users if user in there]
    if taps.reduced not in there or not users:
        raise RuntimeError("a compiler pass removed an all-reduce behind which Weir has taps")
    order = {node: n for n, node in enumerate(graph.nodes)}
    hidden, residual = taps.reduced, taps.residual
    with graph.inserting_before(min(users, key=order.__getitem__)):
        for number, kind in zip(taps.numbers, taps.kinds, strict=True):
            pair = kind == PAIR
            kwargs: dict[str, Any] = {"hidden": hidden, **({"residual": residual} if pair else {}), "tap": number}
            call = graph.call_function(auto_functionalized, (TAP_RESIDUAL if pair else TAP,), kwargs)
            values = (None, hidden.meta.get("val"), *((residual.meta.get("val"),) if pair and residual else ()))
            call.meta["val"] = values
            hidden = _output(graph, call, 1, values)
            if pair:
                residual = _output(graph, call, 2, values)
    for user in users:
        user.replace_input_with(taps.reduced, hidden)
        if taps.residual is not None and residual is not None:
            user.replace_input_with(taps.residual, residual)


def _output(graph: fx.Graph, call: fx.Node, index: int, values: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(operator.getitem, (call, index))
    node.meta["val"] = values[index]
    return node
