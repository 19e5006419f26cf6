"""Checks and parsers for fields: texts of JSON, numbers, lists and flags from whoever asked."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.util.token_texts import unknown_id


def plain(value: Any) -> Any:
    """Return the Python number in a tensor or array of no dimensions; anything else as it is."""
    if isinstance(value, np.generic) or getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        number = value.item()
    except RuntimeError:  # on the device "meta" it has no value; the caller refuses the tensor
        return value
    return number if isinstance(number, (int, float)) else value


def is_int(value: object) -> bool:
    """Return whether a value is an int of Python or numpy; a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def is_json(data: bytes) -> bool:
    """Return whether the bytes of a file begin as an object or a list of JSON does, and no safetensors file."""
    # A byte-order mark may come first. The length with which safetensors begins has bytes of 0.
    return re.match(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[\[{]", data) is not None and b"\0" not in data[:8]


def loads(text: str | bytes, path: str) -> Any:
    """Parse JSON; raise WeirError naming `path` if it is invalid or repeats a key in an object."""
    try:
        return json.loads(text, object_pairs_hook=functools.partial(_without_duplicates, path=path))
    except WeirError:
        raise
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise WeirError(f"not valid JSON ({type(e).__name__}: {str(e)[:80]})", path) from None


def dumps(data: Any, path: str, sort_keys: bool = False) -> str:
    """Return JSON text; raise WeirError naming `path` for other data, such as NaN."""
    try:
        return json.dumps(data, sort_keys=sort_keys, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise WeirError(f"not plain JSON data ({str(e)[:80]})", path) from None


def fits_header(text: str) -> bool:
    """Return whether an HTTP header can carry the text: one line, without blanks around it."""
    return text == text.strip() and not any(c < " " or c == "\x7f" for c in text)


def _without_duplicates(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    """Build an object; refuse a repeated key, whose first value `json` would drop silently."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise WeirError(f"the key {brief(duplicate)!r} comes twice in one object; keep one of them", path)
    return out


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


def token_id(value: Any, tokenizer: Any, field_name: str) -> int:
    """Return the id of a token that is given by its text or id; raise WeirError if a text is not one known token."""
    value = plain(value)
    if is_int(value):
        if value < 0:
            raise WeirError("a token id is never negative", field_name)
        return int(value)
    if not isinstance(value, str):
        raise WeirError(f"expected a token's text or id, got {type(value).__name__}", field_name)
    if tokenizer is None:
        raise WeirError("the engine has no tokenizer; give token ids", field_name)
    unknown = unknown_id(tokenizer)
    other = value.lstrip() if value[:1].isspace() else f" {value}"
    ids, of_other = (list(tokenizer.encode(text, add_special_tokens=False)) for text in (value, other))
    if len(ids) == 1 and (ids[0] != unknown or tokenizer.convert_ids_to_tokens(unknown) == value):
        return int(ids[0])
    what = f"{len(ids)} tokens, {ids[:8]}"
    if len(ids) == 1:
        what = f"no token of the model: it becomes {tokenizer.convert_ids_to_tokens(unknown)!r} ({unknown})"
    fits = len(of_other) == 1 and of_other[0] != unknown
    instead = f"did you mean {other!r}?" if fits else "give a text of one token, or a token's id"
    raise WeirError(f"{brief(value)!r} is {what}; {instead}", field_name)
