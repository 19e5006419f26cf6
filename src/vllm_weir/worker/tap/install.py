"""Installation of taps, around the forwards of modules, where the compiler traces them.

Each tapped module gets a class of its own, whose forward is the module's with *layers* around it: a
layer takes a forward and returns one that also calls the tap. Copies and pickles of the module have
its original class and no taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType, new_class
from typing import Any

import torch
from torch.compiler import is_compiling

from vllm_weir.worker.discovery.anchors import Anchor, TensorKey, pick
from vllm_weir.worker.tap.op import TapSwitch, numbered

_LAYERS = "weir_layers"
"""The attribute of a tapped module that holds its original class and forward, and its layers."""
_BUFFER = "weir_tap_"
"""Prefix of the buffers that hold the numbers of a module's taps."""

Forward = Callable[..., Any]
"""A module's forward as a function of the module and its arguments."""
Layer = Callable[[Forward], Forward]
"""Takes a forward and returns one that does something before or after it."""


def place(model: torch.nn.Module, anchor: Anchor, tap: int, switch: TapSwitch, head_size: int | None = None) -> None:
    """Install tap number `tap`; taps at one place act in the order in which they are placed.

    In a pass that is not compiled, a tap that does not act costs one look at its switch. `head_size` is
    of the heads that make up a row, where attention's output is tapped.
    """
    module, buffer = model.get_submodule(anchor.module), f"{_BUFFER}{tap}"
    device = switch.tensors.plan.device
    number = numbered(tap, anchor.scale, anchor.other_scale, anchor.offset is not None, device)
    module.register_buffer(buffer, number, persistent=False)
    switch.register(number, tap, anchor.columns, head_size)
    if anchor.added_term is None:
        _add_layer(module, anchor.when, _tap(anchor, buffer, switch, tap, head_size))
    else:
        kept: list[torch.Tensor] = []
        earlier = model.get_submodule(anchor.added_term.module)
        _add_layer(earlier, "after", _keep(anchor.added_term.hidden, kept))
        _add_layer(module, anchor.when, _tap_with_added_term(anchor, buffer, switch, tap, kept))


def untapped(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a module's forward without its taps, for calls that belong to no request."""
    layers = module.__dict__.get(_LAYERS)
    return module.forward if layers is None else MethodType(layers["forward"], module)


class ModulePath:
    """Every module on the paths from a model to its tapped modules.

    Code that replaces one of them (by a pruned one, say) removes the taps; `replaced` notices.
    """

    def __init__(self, model: torch.nn.Module, anchors: Iterable[Anchor]) -> None:
        self._found: dict[str, tuple[dict[str, torch.nn.Module | None], str, torch.nn.Module | None]] = {}
        """Path -> the parent's children by name, the name, and the module."""
        for path in (path for anchor in anchors for path in anchor.modules if path):
            names, parent = path.split("."), model
            for n, name in enumerate(names, 1):
                self._found[".".join(names[:n])] = parent._modules, name, parent._modules[name]
                parent = parent.get_submodule(name)

    def replaced(self) -> str:
        """Return the path of the first module that was replaced; "" if none was."""
        for path, (children, name, module) in self._found.items():
            if children.get(name) is not module:
                return path
        return ""


def _add_layer(module: torch.nn.Module, when: str, layer: Layer) -> None:
    """Put a layer around a module's forward; before and after the call, earlier layers act first.

    Give the module a class of its own, as torch's parametrizations do. With hooks, or a forward set
    on the instance, Dynamo would trace torch's hook machinery in every such module, and the engine
    would start later.
    """
    state = module.__dict__
    if _LAYERS not in state:
        instance_forward = state.pop("forward", None)
        forward = type(module).forward if instance_forward is None else _unbound(module, instance_forward)
        state[_LAYERS] = {
            "class": type(module),
            "instance_forward": instance_forward,
            "forward": forward,
            "before": [],
            "after": [],
        }
    layers = state[_LAYERS]
    layers[when].append(layer)
    forward = layers["forward"]
    for around in (*reversed(layers["before"]), *layers["after"]):
        forward = around(forward)
    base = layers["class"]
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    body = names | {"__reduce_ex__": _reduce_untapped, "forward": forward}
    module.__class__ = new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(body))


def _reduce_untapped(module: torch.nn.Module, protocol: Any) -> tuple:
    """Reduce a module for a copy or a pickle without its taps, which belong to one engine."""
    layers = module.__dict__[_LAYERS]
    reduced: Any = super(type(module), module).__reduce_ex__(protocol)
    _, _, state, *rest = reduced
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != _LAYERS}
        if layers["instance_forward"] is not None:
            state["forward"] = layers["instance_forward"]
        buffers = state["_buffers"].items()
        state["_buffers"] = {name: tensor for name, tensor in buffers if not name.startswith(_BUFFER)}
        non_persistent = state["_non_persistent_buffers_set"]
        state["_non_persistent_buffers_set"] = {name for name in non_persistent if not name.startswith(_BUFFER)}
    return object.__new__, (layers["class"],), state, *rest


def _unbound(module: torch.nn.Module, instance_forward: Callable[..., Any]) -> Forward:
    """Return a forward that was set on the instance as a function that takes the module too."""
    if isinstance(instance_forward, MethodType) and instance_forward.__self__ is module:
        return instance_forward.__func__
    return lambda _self, *args, **kwargs: instance_forward(*args, **kwargs)


def _tap(anchor: Anchor, buffer: str, switch: TapSwitch, tap: int, head_size: int | None = None) -> Layer:
    """Return the layer of a tap whose tensors are all in one call.

    With a `head_size` the op is given [tokens, heads, head_size], the shape in which attention
    wrote its output. vLLM cuts the graph behind attention, and Inductor writes in place only to an
    input of a piece itself: a view of another shape would be copied, and copied back, in each pass.

    Dynamo traces it once per tap, and every function call makes that slower. So pick tensors that
    are positional arguments or elements of the output without a call.
    """
    before = anchor.when == "before"
    positions = _positions(anchor)
    last_position = max(positions or (0,))
    has_residual = anchor.residual is not None
    alone = torch.ops.weir.tap.default
    pair = (torch.ops.weir.tap_residual if anchor.offset is None else torch.ops.weir.tap_offset).default

    def layer(forward: Forward) -> Forward:
        def tapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = None if before else forward(self, *args, **kwargs)
            if is_compiling() or switch.wants(tap):
                tensors: Any = args if before else output
                if isinstance(tensors, torch.Tensor):
                    tensors = (tensors,)
                if positions is not None and isinstance(tensors, tuple) and len(tensors) > last_position:
                    hidden = tensors[positions[0]]
                    other = tensors[positions[1]] if has_residual else None
                else:
                    hidden, other = anchor.tensors(args, kwargs, output)
                if head_size is not None and is_compiling():
                    hidden = _as_heads(hidden, head_size)
                if other is None:
                    _act(alone, hidden, getattr(self, buffer))
                else:
                    _act(pair, hidden, other, getattr(self, buffer))
            return forward(self, *args, **kwargs) if before else output

        return tapped

    return layer


def _act(op: Callable[..., None], hidden: torch.Tensor, *rest: torch.Tensor | None) -> None:
    """Call a tap's op on `hidden`, in a graph that is compiled on a copy if its rows have gaps between them.

    Such rows are a view of a wider tensor. Where Inductor does not write to one in place, it takes
    the copy for as wide as that tensor, and reads beyond it.
    """
    if is_compiling() and not hidden.is_contiguous():
        rows = hidden.clone(memory_format=torch.contiguous_format)
        op(rows, *rest)
        hidden.copy_(rows)
    else:
        op(hidden, *rest)


def _as_heads(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """Return a view [tokens, heads, head_size] of rows [tokens, width] that are several heads, else the tensor."""
    if rows.dim() != 2 or rows.shape[1] == head_size or rows.shape[1] % head_size:
        return rows
    return rows.view(-1, rows.shape[1] // head_size, head_size)


def _positions(anchor: Anchor) -> tuple[int, ...] | None:
    """Return the positions of `hidden` and `residual` in a call's arguments or outputs.

    These are the arguments before a call and the outputs after it. Returns None if a tensor is
    elsewhere or only given by name, if there is a bias to add, or if heads have a dimension.
    """
    keys = [key for key in (anchor.hidden, anchor.residual) if key is not None]
    kind = "arg" if anchor.when == "before" else "out"
    if anchor.offset is not None or anchor.per_head or any(key.kind != kind for key in keys):
        return None
    if kind == "out" and len(keys) == 1:
        return (max(keys[0].index, 0),)  # -1 is the only output
    positions = tuple(key.index for key in keys)
    return positions if min(positions) >= 0 else None


def _tap_with_added_term(anchor: Anchor, buffer: str, switch: TapSwitch, tap: int, kept: list[torch.Tensor]) -> Layer:
    """Return the layer of a tap whose other tensor an earlier call has left in `kept`."""

    def act(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        hidden, other = anchor.tensors(args, kwargs, output, kept.pop())
        if is_compiling() or switch.wants(tap):
            _act(torch.ops.weir.tap_residual.default, hidden, other, getattr(module, buffer))

    return _around(anchor.when, act)


def _keep(key: TensorKey, kept: list[torch.Tensor]) -> Layer:
    """Return a layer that keeps a tensor of the output for the call that is tapped."""

    def act(_module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        kept[:] = [pick(key, args, kwargs, output)]

    return _around("after", act)


def _around(when: str, act: Callable[[torch.nn.Module, tuple, dict, Any], None]) -> Layer:
    """Return a layer that calls `act` before or after the forward."""

    def layer(forward: Forward) -> Forward:
        def before(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            act(self, args, kwargs, None)
            return forward(self, *args, **kwargs)

        def after(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            act(self, args, kwargs, output)
            return output

        return before if when == "before" else after

    return layer
