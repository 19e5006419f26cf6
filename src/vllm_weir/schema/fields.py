"""Helpers of the schema's frozen dataclasses: set normalised fields, refuse unknown keys.

Captures and interventions are plain dataclasses, not pydantic models, for two reasons. Pydantic
would turn a `WeirError`, which names the field, into its own `ValidationError`. And it checks each
field alone, whereas a hook point may imply the layers, and `per_layer` says what a vector's shape
means. `config.settings`, which has neither need, is a pydantic model.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from vllm_weir.errors import WeirError, brief

Instance = TypeVar("Instance")
OTHER_WORDS = {
    "alpha": "scale", "coeff": "scale", "coefficient": "scale", "strength": "scale", "direction": "vector",
    "head": "heads", "hook_point": "hook", "layer": "layers", "neuron": "neurons", "position": "positions",
}  # fmt: skip
"""What other packages call a field -> its name here."""


def right_words(kind: type[Instance]) -> type[Instance]:
    """Have a dataclass answer another package's word for one of its fields with the right one; return it."""
    target: Any = kind
    init, known = target.__init__, target.__dataclass_fields__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        for name in given.keys() - known.keys():
            if OTHER_WORDS.get(name) in known:
                raise WeirError(f"{kind.__name__} calls it {OTHER_WORDS[name]}", name)
        init(self, *args, **given)

    target.__init__ = checked
    return kind


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
            raise WeirError(f"unknown key; {hint or 'known are ' + ', '.join(known)}", f"{path}.{brief(key)}")


def parse_flag(value: object, name: str, path: str = "") -> bool:
    """Return `value` if it is a bool; raise WeirError naming ``path.name`` if not."""
    if not isinstance(value, bool):
        raise WeirError(f"{name} is true or false, got {type(value).__name__}", f"{path}.{name}" if path else name)
    return value
