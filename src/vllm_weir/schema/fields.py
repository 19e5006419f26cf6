"""Helpers of the schema's frozen dataclasses: set normalised fields, refuse unknown keys.

Captures and interventions are plain dataclasses, not pydantic models, for two reasons. Pydantic
would turn a `WeirError`, which names the field, into its own `ValidationError`. And it checks each
field alone, whereas a hook point may imply the layers, and `per_layer` says what a vector's shape
means. `config.settings`, which has neither need, is a pydantic model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from vllm_weir.errors import WeirError, brief

Instance = TypeVar("Instance")
Taking = TypeVar("Taking", bound=Callable[..., Any])
_STRENGTH = ("scale", "strength", "alpha")
_VECTOR = ("vector", "direction", "directions", "values", "weight", "activations")
_LAYER, _POSITION = ("layers", "layer", "layer_indices"), ("positions", "position", "position_indices")
_HOOK, _HEAD, _NEURON = ("hook", "hooks"), ("heads", "head"), ("neurons",)
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_STRENGTH, "coef", "coeff", "coefficient", "factor", "magnitude", "multiplier"), _STRENGTH),
    **dict.fromkeys(("vector", "direction", "directions", "steering_vector", "vectors"), _VECTOR),
    **dict.fromkeys((*_LAYER, "block", "blocks", "layer_id", "layer_ids", "layer_idx", "layer_index"), _LAYER),
    **dict.fromkeys((*_HOOK, "act_name", "hook_name", "hook_point", "hook_points", "site", "sites"), _HOOK),
    **dict.fromkeys((*_POSITION, "pos", "token_positions"), _POSITION),
    **dict.fromkeys((*_HEAD, "head_idx", "head_index", "head_indices"), _HEAD),
    **dict.fromkeys((*_NEURON, "neuron", "neuron_idx", "neuron_index"), _NEURON),
    **dict.fromkeys(("feature_id", "feature_idx", "feature_index", "idx", "index"), ("feature",)),
    **dict.fromkeys(("k", "top_k", "topk"), ("top_k", "k")),
    **{one: (f"{one}s",) for one in ("feature", "intervention", "probe")},
    "captures": ("capture",),
    **dict.fromkeys(("metric_fn", "patching_metric"), ("metric",)),
}
"""What other packages, or other places here, call a field or argument -> what it may be called where it is given."""
MOST_SHOWN = 8
"""Entries of a list or mapping that a repr shows."""


def right_word(name: object, known: Collection[str]) -> str | None:
    """Return which of the `known` names is meant by another word; None if none is."""
    words = OTHER_WORDS.get(name, ()) if isinstance(name, str) and name not in known else ()
    right = next((word for word in words if word in known), None)
    return "value, scale or add" if right == "scale" and {"value", "add"} <= {*known} else right


def right_words(target: Taking) -> Taking:
    """Have a function answer another word for one of its arguments with the right one; return it.

    Of a dataclass, its ``__init__`` does, and its ``repr`` shows what is not as by default.

    Raises:
        WeirError: when the result is called with another word, naming it.
    """
    if not isinstance(target, type):
        return _checked(target, target.__name__, [*inspect.signature(target).parameters])
    kind: Any = target
    kind.__init__ = _checked(kind.__init__, kind.__name__, [f.name for f in fields(kind)])
    kind.__repr__ = short_repr
    return kind


def _checked(function: Any, name: str, known: Collection[str]) -> Any:
    known = frozenset(known)

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for word in given.keys() - known:
            if (right := right_word(word, known)) is not None:
                raise WeirError(f"{name} calls it {right}", word)
        return function(*args, **given)

    return checked


def short_repr(instance: Any) -> str:
    """Return a dataclass as its constructor is called, with vectors as their shapes.

    Defaults are left out, except of fields whose metadata say ``shown``.
    """
    parts = []
    for f in fields(instance):
        value = getattr(instance, f.name)
        if not f.repr or (f.name == "layers" and getattr(instance, "by_layer_field", False)):
            continue  # {layer: vector} says the layers
        shown = _shown(value, f.name)
        if f.default is MISSING and f.default_factory is MISSING:
            parts.append(shown)
        elif f.metadata.get("shown") or not _is_default(value, shown, f):
            parts.append(f"{f.name}={shown}")
    return f"{type(instance).__name__}({', '.join(parts)})"


def _is_default(value: Any, shown: str, f: Any) -> bool:
    default = f.default if f.default is not MISSING else f.default_factory()
    return shown == _shown(default, f.name) or (default is None and isinstance(value, (dict, tuple)) and not value)


def _shown(value: Any, name: str) -> str:
    """Return the short text of a field's value."""
    if hasattr(value, "shown"):
        return value.shown(name)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return repr(brief(value, 80))
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes):  # a hook's tensor
        return f"array{list(value[1])}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return f"[{_some([_shown(one, name) for one in value[:MOST_SHOWN]], len(value))}]"
    if isinstance(value, Mapping):
        few = list(value.items())[:MOST_SHOWN]
        shown = [f"{key if hasattr(key, '_fields') else repr(key)}: {_shown(one, name)}" for key, one in few]
        return f"{{{_some(shown, len(value))}}}"
    if is_dataclass(value) and hasattr(value, "to_json") and type(value).__repr__ is not short_repr:
        return _shown(value.to_json(), name)
    if hasattr(value, "shape") and not isinstance(value, type):
        return f"{name}{list(value.shape)}"
    return brief(value.__name__ if inspect.isfunction(value) else repr(value), 120)


def _some(shown: Sequence[str], total: int) -> str:
    return ", ".join([*shown, *([f"... {total - len(shown)} more"] if total > len(shown) else [])])


def set_fields(instance: object, **values: Any) -> None:
    """Set fields of a frozen dataclass, in its ``__post_init__`` only.

    ``dataclasses.replace`` is for everything else; it normalises and checks once more.
    """
    vars(instance).update(values)


def with_fields(instance: Instance, **values: Any) -> Instance:
    """Return a copy of a frozen dataclass with these fields, which are not checked."""
    out = object.__new__(type(instance))
    vars(out).update(vars(instance), **values)
    return out


def refuse_unknown_keys(data: Iterable[object], known: Collection[str], path: str, hint: str = "") -> None:
    """Raise WeirError for the first key of an object that is not in `known`.

    Args:
        data: the object, or its keys.
        known: the keys that it may have.
        path: the object's field, which the error names together with the key.
        hint: what to say instead of "known are ...".
    """
    for key in data:
        if key not in known:
            right = right_word(key, known)
            instead = "" if right is None else f"did you mean {right!r}? "
            raise WeirError(f"unknown key; {instead}{hint or 'known are ' + ', '.join(known)}", f"{path}.{brief(key)}")


def parse_flag(value: object, name: str, path: str = "") -> bool:
    """Return `value` if it is a bool; raise WeirError naming ``path.name`` if not."""
    if not isinstance(value, bool):
        raise WeirError(f"{name} is true or false, got {type(value).__name__}", f"{path}.{name}" if path else name)
    return value
