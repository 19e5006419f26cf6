"""The search for the points inside the attention of one block, in a pass as `part_recorder` records it.

The attention layer is called with queries, keys and values, and the linear modules before it leave
noise. So what equals some columns of a linear module's result is those columns:

1. `q_rot` and `k_rot` are the first two arguments of the call.
2. `v` is the columns that equal its third argument.
3. `q` and `k` are the columns that equal `q_rot` and `k_rot`, if the model does nothing in between;
   else what a module in between (a norm, the rotary embedding) is given, or the columns where vLLM's
   layout has them. `part_verification` then sees whether each head of `q_rot` is made of one of `q`.
4. `attn_in` is the input of the modules that return these.
5. `z` is the input of the linear module after the call whose result is attn_out, or is scaled or
   normalised to be attn_out.

An attention layer that takes latent vectors (MLA) has `attn_in` and `z` only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_weir.schema.hooks import ATTENTION_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.part_findings import BlockView, Columns, Linear, PartFindings
from vllm_weir.worker.discovery.part_modules import AttentionShape, Features
from vllm_weir.worker.discovery.trace import ModuleCall

PROJECTED = ("q", "k", "v")


def find_attention(view: BlockView, attn_out: Anchor | None) -> tuple[PartFindings, set[str]]:
    """Find the points of a block's attention.

    Args:
        view: the block.
        attn_out: where attn_out is; None if that was refused.

    Returns:
        The points, and the paths of the linear modules that belong to attention.
    """
    findings = PartFindings()
    layers = _attention_layers(view)
    if len(layers) != 1:
        findings.refuse(ATTENTION_HOOKS, _why_no_layer(view, len(layers)))
        return findings, {linear.call.path for linear in view.linears} if len(layers) > 1 else set()
    return _Search(view, *layers[0], findings).run(attn_out)


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

    def run(self, attn_out: Anchor | None) -> tuple[PartFindings, set[str]]:
        columns = {} if self.shape.latent else self._projections()
        if self.shape.latent:
            why = (
                "latent attention never computes keys and values of heads, nor queries that could be compared with them"
            )
            self.found.refuse((*PROJECTED, "q_rot", "k_rot"), why)
        out = self._find_z(attn_out)
        producers = [columns[hook].linear for hook in PROJECTED if hook in columns]
        readers = self._find_attn_in(producers, out)
        members = {linear.call.path for linear in (*producers, *readers)} | ({out.call.path} if out else set())
        scope = self._scope(producers or readers, out)
        return self.found, members | {x.call.path for x in self.view.linears if scope and _within(x.call.path, scope)}

    def _projections(self) -> dict[str, Columns]:
        """Find q_rot, k_rot, q, k and v; return the columns of the last three."""
        shape, columns = self.shape, {}
        key_width = shape.kv_heads * shape.head_size
        widths = {"q": shape.heads * shape.head_size, "k": key_width, "v": None}
        keys = {hook: self._argument(i) for i, hook in enumerate(PROJECTED)}
        values = {hook: self.layer.args[key] for hook, key in keys.items() if key is not None}
        for hook in PROJECTED:
            if hook not in values:
                other = (hook,) if hook != "k" else ("k", "k_rot")
                self.found.refuse(other, "attention of this block is called without it: it reads another block's keys")
        for hook, rotated in (("q", "q_rot"), ("k", "k_rot")):
            if hook in values:
                self._place_rotated(hook, rotated, keys[hook], widths[hook])
        if "v" in values and (v := self.view.locate(values["v"], self.before)) is not None:
            columns["v"] = v
        for hook in ("q", "k"):
            if hook in values:
                self._choose(hook, values[hook], widths[hook], columns)
        for hook in PROJECTED:
            if hook in values:
                self._place_projection(hook, columns.get(hook))
        return {hook: found for hook, found in columns.items() if hook in self.found.anchors}

    def _argument(self, index: int) -> TensorKey | None:
        return next((key for key in self.layer.args if key.index == index), None)

    def _place_rotated(self, hook: str, rotated: str, key: TensorKey, width: int) -> None:
        if self.layer.args[key].shape[1] != width:
            self.found.refuse((hook, rotated), "attention is given it in a layout that is not [heads x d_head]")
        elif not self.view.is_row(self.layer, key):
            self.found.refuse((rotated,), f"attention is given it as {list(self.layer.shapes[key])}")
        else:
            self.found.anchors[rotated] = Anchor(self.layer.path, "before", key)

    def _choose(self, hook: str, rotated: torch.Tensor, width: int, columns: dict[str, Columns]) -> None:
        """Choose the columns of q or k, apart from those chosen already."""
        view, shape = self.view, self.shape
        between = [c for c in view.calls if c.start < self.layer.start]
        given = [v for c in between for v in c.args.values() if v.shape[1] == width]
        located = [found for v in (rotated, *given) if (found := view.locate(v, self.before)) is not None]
        in_order = [n * shape.head_size for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        assumed = [part for linear in self.before for part in _parts(linear, in_order)]
        for candidate in (*located, *assumed):
            fits = candidate.stop - candidate.start == width
            if fits and not any(candidate.overlaps(other) for other in columns.values()):
                columns[hook] = candidate
                if candidate in located:
                    self.found.located.add(hook)
                return

    def _place_projection(self, hook: str, columns: Columns | None) -> None:
        found = self.found
        rotated = {"q": "q_rot", "k": "k_rot"}.get(hook)
        heads = self.shape.heads if hook == "q" else self.shape.kv_heads
        features = None if columns is None else columns.features(self.view.parts.ranks)
        if columns is None:
            found.refuse((hook,), "no linear module returns it in adjacent columns")
        elif not self.view.is_row(columns.linear.call, columns.linear.returned):
            found.refuse((hook,), f"its projection returns {list(columns.linear.call.shapes[columns.linear.returned])}")
        elif features is None:
            found.refuse((hook,), "its projection does not tell which heads are this worker's")
        else:
            found.anchors[hook] = columns.anchor()
        if features is None and self.view.parts.ranks == 1:
            features = Features.unsplit(heads * self.shape.head_size)
        width = (columns.stop - columns.start if columns else heads * self.shape.head_size) // heads
        for name in (hook, rotated):
            if name not in found.anchors:
                continue
            if features is None:
                found.refuse((name,), "nothing tells which heads are this worker's")
                continue
            found.features[name], found.shapes[name] = features, (features.whole // width, width)
        if hook in found.anchors:
            found.readers[hook] = (Anchor(self.layer.path, "before", self._argument(PROJECTED.index(hook))),)

    def _find_z(self, attn_out: Anchor | None) -> Linear | None:
        """Find z; return the linear module that it is given to."""
        out = self.view.projection_to(attn_out, self.after)
        width = self.shape.heads * self.shape.value_size
        if attn_out is None:
            self.found.refuse(("z",), "attn_out of this block is refused, so no module is known to return it")
        elif out is None:
            self.found.refuse(("z",), "no linear module after attention returns what becomes attn_out")
        elif out.value_in.shape[1] != width or out.shape.inputs.width != width:
            got, heads = out.value_in.shape[1], self.shape.heads
            self.found.refuse(("z",), f"the output projection is given {got} values, not {heads} heads")
        elif not self.view.is_row(out.call, out.given):
            self.found.refuse(("z",), f"the output projection is given {list(out.call.shapes[out.given])}")
        else:
            found, size = self.found, self.shape.value_size
            found.anchors["z"] = out.input_anchor()
            found.features["z"] = out.shape.inputs
            found.shapes["z"] = (out.shape.inputs.whole // size, size)
            found.readers["z"] = (out.input_anchor(),)
            key = min(self.layer.outputs, default=None)
            if key is None or not torch.equal(self.layer.outputs[key], out.value_in):
                self._keep_source(key)
            if out.shape.quantises_input:
                found.quantised.add("z")
        return out

    def _keep_source(self, key: TensorKey | None) -> None:
        """Keep the first head of what attention returned, from which z is made."""
        if key is None or not self.view.is_row(self.layer, key):
            self.found.refuse(("z",), "attention does not return rows that could be compared with it")
        else:
            self.found.source_of_z = Anchor(self.layer.path, "after", key, columns=(0, self.shape.value_size))

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
    if view.is_row(call, key):
        found.anchors[hook] = Anchor(call.path, "before", key)
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


def _parts(linear: Linear, widths: list[int]) -> Iterator[Columns]:
    """Yield the parts of a linear module's result: its matrices, and queries, keys, values in a row."""
    width = linear.value_out.shape[1]
    layouts = [[part.width for part in linear.shape.outputs], widths]
    for layout in layouts:
        if sum(layout) != width:
            continue
        begin = 0
        for part in layout:
            yield Columns(linear, begin, begin + part)
            begin += part
