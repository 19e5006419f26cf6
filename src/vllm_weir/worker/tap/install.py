"""Where taps are put: around modules' forwards, so that the compiler traces them into the model's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType, new_class
from typing import Any

import torch
from torch.compiler import is_compiling

from vllm_weir.worker.discovery.anchors import Anchor, TensorKey, pick
from vllm_weir.worker.tap.op import TapSwitch, numbered

_LAYERS, _TAP = "weir_layers", "weir_tap_"
Forward = Callable[..., Any]
"""A module's forward as a function of the module and its arguments."""
Layer = Callable[[Forward], Forward]
"""What is done around a call: makes of a forward one that does it too."""


def place(model: torch.nn.Module, anchor: Anchor, tap: int, switch: TapSwitch) -> None:
    """Tap the stream at `anchor`; taps at one place act in the order in which they are placed.

    A pass that is not compiled does not even ask a tap that does not act.
    """
    module, name = model.get_submodule(anchor.module), f"{_TAP}{tap}"
    device = switch.tensors.plan.device
    number = numbered(tap, anchor.scale, anchor.other_scale, anchor.offset is not None, device)
    module.register_buffer(name, number, persistent=False)
    switch.enrol(number, tap)
    if anchor.added_term is not None:
        kept: list[torch.Tensor] = []
        _wrap(model.get_submodule(anchor.added_term.module), "after", _keep(anchor.added_term.hidden, kept))
        _wrap(module, anchor.when, _beside(anchor, name, switch, tap, kept))
    else:
        _wrap(module, anchor.when, _tap(anchor, name, switch, tap))


class ModulePath:
    """Every step on the way from a model to its tapped modules.

    Whoever puts another module in the place of one of them (a pruned one, say) puts it where there is no tap.
    """

    def __init__(self, model: torch.nn.Module, anchors: Iterable[Anchor]) -> None:
        self._found: dict[str, tuple[dict[str, torch.nn.Module | None], str, torch.nn.Module | None]] = {}
        for path in (path for a in anchors for path in (a.module, a.added_term.module if a.added_term else "") if path):
            names, parent = path.split("."), model
            for n, name in enumerate(names, 1):
                self._found[".".join(names[:n])] = parent._modules, name, parent._modules[name]
                parent = parent.get_submodule(name)

    def replaced(self) -> str:
        """Path of the first that is not what it was; empty if all are."""
        for path, (held, name, module) in self._found.items():
            if held.get(name) is not module:
                return path
        return ""


def _wrap(module: torch.nn.Module, when: str, layer: Layer) -> None:
    """Put a layer around the module's forward; before the call, and after it, earlier ones act first.

    Not by hooks, nor by a forward of the instance: Dynamo then goes through all the code that calls hooks, in every
    such module, and an engine starts later. The module gets a class of its own instead, as in torch's parametrizations.
    """
    state = module.__dict__
    if _LAYERS not in state:
        own = state.pop("forward", None)
        forward = type(module).forward if own is None else _unbound(module, own)
        state[_LAYERS] = {"class": type(module), "own": own, "forward": forward, "before": [], "after": []}
    layers = state[_LAYERS]
    layers[when].append(layer)
    forward = layers["forward"]
    for around in (*reversed(layers["before"]), *layers["after"]):
        forward = around(forward)
    base = layers["class"]
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    body = names | {"__reduce_ex__": _untapped, "forward": forward}
    module.__class__ = new_class(base.__name__, (base,), exec_body=lambda own: own.update(body))


def _untapped(module: torch.nn.Module, protocol: Any) -> tuple:
    """A copy, or a pickle, is of the module as the model has it without taps: these belong to one engine."""
    layers = module.__dict__[_LAYERS]
    reduced: Any = super(type(module), module).__reduce_ex__(protocol)
    _, _, state, *rest = reduced
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != _LAYERS}
        if layers["own"] is not None:
            state["forward"] = layers["own"]
        state["_buffers"] = {name: tensor for name, tensor in state["_buffers"].items() if not name.startswith(_TAP)}
        kept = {name for name in state["_non_persistent_buffers_set"] if not name.startswith(_TAP)}
        state["_non_persistent_buffers_set"] = kept
    return object.__new__, (layers["class"],), state, *rest


def _unbound(module: torch.nn.Module, own: Callable[..., Any]) -> Forward:
    """A forward that was put on the instance, as a function of the module too."""
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    return lambda _self, *args, **kwargs: own(*args, **kwargs)


def _tap(anchor: Anchor, name: str, switch: TapSwitch, tap: int) -> Layer:  # noqa: C901
    """The tap at an anchor with nothing beside it, in little code: Dynamo goes through it for every tap."""
    alone, pair = torch.ops.weir.tap.default, torch.ops.weir.tap_residual.default
    both = pair if anchor.offset is None else torch.ops.weir.tap_offset.default

    def act(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if is_compiling() or switch.wants(tap):
            hidden, other = anchor.tensors(args, kwargs, output)
            if other is None:
                alone(hidden, getattr(module, name))
            else:
                both(hidden, other, getattr(module, name))

    keys = [key for key in (anchor.hidden, anchor.residual) if key is not None]
    first, second = keys[0].index, keys[-1].index
    most = max(first, second)

    def one_after(forward: Forward) -> Forward:
        def tapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            if not isinstance(output, torch.Tensor):
                act(self, args, kwargs, output)
            elif is_compiling() or switch.wants(tap):
                alone(output, getattr(self, name))
            return output

        return tapped

    def pair_after(forward: Forward) -> Forward:
        def tapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            if not isinstance(output, tuple) or len(output) <= most or output[second] is None:
                act(self, args, kwargs, output)
            elif is_compiling() or switch.wants(tap):
                pair(output[first], output[second], getattr(self, name))
            return output

        return tapped

    def one_before(forward: Forward) -> Forward:
        def tapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) <= first:
                act(self, args, kwargs, None)
            elif is_compiling() or switch.wants(tap):
                alone(args[first], getattr(self, name))
            return forward(self, *args, **kwargs)

        return tapped

    def pair_before(forward: Forward) -> Forward:
        def tapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) <= most or args[second] is None:
                act(self, args, kwargs, None)
            elif is_compiling() or switch.wants(tap):
                pair(args[first], args[second], getattr(self, name))
            return forward(self, *args, **kwargs)

        return tapped

    if anchor.offset is None and all(key.kind == "out" for key in keys):
        if len(keys) == 1 and first <= 0:
            return one_after
        if len(keys) == 2 and min(first, second) >= 0:
            return pair_after
    if anchor.offset is None and anchor.when == "before" and min(first, second) >= 0:
        return one_before if len(keys) == 1 else pair_before
    return _around(anchor.when, act)


def _around(when: str, act: Callable[[torch.nn.Module, tuple, dict, Any], None]) -> Layer:
    """`act` before or after the call."""

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


def _beside(anchor: Anchor, name: str, switch: TapSwitch, tap: int, kept: list[torch.Tensor]) -> Layer:
    """The tap at an anchor beside which stands what an earlier call has left in `kept`."""

    def act(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        hidden, other = anchor.tensors(args, kwargs, output, kept.pop())
        if is_compiling() or switch.wants(tap):
            torch.ops.weir.tap_residual(hidden, other, getattr(module, name))

    return _around(anchor.when, act)


def _keep(key: TensorKey, kept: list[torch.Tensor]) -> Layer:
    """Keeps what stands beside, from the call that returns it to the one that is tapped."""

    def act(_module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        kept[:] = [pick(key, args, kwargs, output)]

    return _around("after", act)
