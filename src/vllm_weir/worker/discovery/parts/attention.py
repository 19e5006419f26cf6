"""The search for the points inside the attention of one block, in a pass as `parts.recorder` records it.

The attention layer is called with queries, keys and values, and the linear modules before it leave
noise. So what equals some columns of a linear module's result is those columns:

1. `q_rot` and `k_rot` are the first two arguments of the call.
2. `q`, `k` and `v` are the columns that the three arguments are made of (`parts.projections`).
3. `attn_in` is the input of the modules that return these.
4. `z` is the input of the linear module after the call whose result is attn_out, or is scaled or
   normalised to be attn_out.

An attention layer that takes latent vectors (MLA) has `attn_in` and `z` only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_weir.schema.hooks import ATTENTION_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey
from vllm_weir.worker.discovery.parts.findings import BlockView, Linear, PartFindings
from vllm_weir.worker.discovery.parts.projections import PROJECTED, ROTATED, Projections
from vllm_weir.worker.discovery.parts.recorder import AttentionShape

LATENT = "latent attention never computes keys and values of heads, nor queries that could be compared with them"


def find_attention(view: BlockView, attn_out: Anchor | None, why_none: str) -> tuple[PartFindings, set[str]]:
    """Return the points of a block's attention, and the paths of the linear modules that belong to it.

    `attn_out` is None if that was refused, for the reason `why_none`.
    """
    findings = PartFindings()
    layers = _attention_layers(view)
    if len(layers) != 1:
        findings.refuse(ATTENTION_HOOKS, _why_no_layer(view, len(layers)))
        return findings, {linear.call.path for linear in view.linears} if len(layers) > 1 else set()
    return _Search(view, *layers[0], findings).run(attn_out, why_none)


def _attention_layers(view: BlockView) -> list[tuple[ModuleCall, AttentionShape]]:
    shapes = ((call, view.parts.attention(view.tree.modules[call.path])) for call in view.calls)
    return [(call, shape) for call, shape in shapes if shape is not None]


def _why_no_layer(view: BlockView, layers: int) -> str:
    block = f"block {view.record.block}"
    if layers:
        return f"{block} has {layers} attention layers, so the point is not one place"
    if any(view.tree.is_mixer(view.tree.modules[call.path]) for call in view.calls):
        return f"{block} mixes tokens in a state-space or linear attention layer, all of it in one kernel"
    return f"{block} has no attention"


class _Search:
    def __init__(self, view: BlockView, layer: ModuleCall, shape: AttentionShape, findings: PartFindings) -> None:
        self.view, self.layer, self.shape, self.found = view, layer, shape, findings
        self.before = [linear for linear in view.linears if linear.call.end < layer.start]
        self.after = [linear for linear in view.linears if linear.call.start > layer.end]

    def run(self, attn_out: Anchor | None, why_none: str) -> tuple[PartFindings, set[str]]:
        producers: list[Linear] = []
        if self.shape.latent:
            self.found.refuse((*PROJECTED, *ROTATED.values()), LATENT)
        else:
            producers = Projections(self.view, self.layer, self.shape, self.found).place()
        out = self._find_z(attn_out, why_none)
        readers = self._find_attn_in(producers, out)
        members = {linear.call.path for linear in (*producers, *readers)} | ({out.call.path} if out else set())
        scope = self._scope(producers or readers, out)
        return self.found, members | {x.call.path for x in self.view.linears if scope and _within(x.call.path, scope)}

    def _find_z(self, attn_out: Anchor | None, why_none: str) -> Linear | None:
        """Find z; return the linear module that it is given to."""
        out = self.view.projection_to(attn_out, self.after)
        width = self.shape.heads * self.shape.value_size
        if attn_out is None:
            self.found.refuse(("z",), f"attn_out of this block is refused: {why_none}")
        elif out is None:
            self.found.refuse(("z",), "no linear module after attention returns what becomes attn_out")
        elif out.value_in.shape[1] != width or out.shape.inputs.width != width:
            got, heads = out.value_in.shape[1], self.shape.heads
            self.found.refuse(("z",), f"the output projection is given {got} values, not {heads} heads")
        elif (anchor := self.view.anchor_of(out.call, out.given, "before")) is None:
            self.found.refuse(("z",), f"the output projection is given {list(out.call.shapes[out.given])}")
        else:
            found, size = self.found, self.shape.value_size
            found.anchors["z"] = anchor
            found.features["z"] = out.shape.inputs
            found.shapes["z"] = (out.shape.inputs.whole // size, size)
            found.readers["z"] = (anchor,)
            key = min(self.layer.outputs, default=None)
            if key is None or not torch.equal(self.layer.outputs[key], out.value_in):
                self._keep_source(key)
            if out.shape.quantises_input:
                found.quantised.add("z")
        return out

    def _keep_source(self, key: TensorKey | None) -> None:
        """Keep the first head of what attention returned, from which z is made."""
        anchor = None if key is None else self.view.anchor_of(self.layer, key, "after")
        if anchor is None:
            self.found.refuse(("z",), "attention does not return rows that could be compared with it")
        else:
            self.found.source_of_z = replace(anchor, columns=(0, self.shape.value_size))

    def _find_attn_in(self, producers: list[Linear], out: Linear | None) -> list[Linear]:
        """Find attn_in; return the linear modules that are given it."""
        width = self.view.tree.width
        of_width = [linear for linear in self.before if linear.value_in.shape[1] == width]
        scope = self._scope(producers, out)
        first = next((x for x in producers if x in of_width), None)
        first = first or next((x for x in of_width if scope and _within(x.call.path, scope)), None)
        if first is None:
            self.found.refuse(("attn_in",), "no linear module before attention is given rows of the stream's width")
            return []
        readers = [
            linear
            for linear in of_width
            if (linear in producers or (scope and _within(linear.call.path, scope)))
            and torch.equal(linear.value_in, first.value_in)
        ]
        if any(x in of_width and x not in readers for x in producers):
            self.found.refuse(("attn_in",), "queries, keys and values are not projected from one tensor")
        else:
            place_input(self.view, self.found, "attn_in", [(x.call, x.given) for x in readers])
            if any(x.shape.quantises_input for x in readers):
                self.found.quantised.add("attn_in")
        return readers

    def _scope(self, producers: list[Linear], out: Linear | None) -> str:
        """Return the path of the innermost module that holds all of attention; "" if the block does."""
        calls = [self.layer, *(x.call for x in producers), *([out.call] if out else [])]
        path = common_module([call.path for call in calls])
        return path if path.startswith(f"{self.view.record.calls[0].path}.") else ""


def place_input(view: BlockView, found: PartFindings, hook: str, readers: list[tuple[ModuleCall, TensorKey]]) -> None:
    """Place attn_in or mlp_in at the first of the calls that are given it."""
    call, key = min(readers, key=lambda reader: reader[0].start)
    anchor = view.anchor_of(call, key, "before")
    if anchor is not None:
        found.anchors[hook] = anchor
        found.readers[hook] = tuple(Anchor(c.path, "before", k) for c, k in readers)
    else:
        found.refuse((hook,), f"{call.local_path} is given {list(call.shapes[key])}")


def common_module(paths: list[str]) -> str:
    """Return the path of the innermost module that holds all of these (or is the only one)."""
    split = [path.split(".")[:-1] if len(paths) > 1 else path.split(".") for path in paths]
    shared = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _within(path: str, scope: str) -> bool:
    return path.startswith(f"{scope}.")
