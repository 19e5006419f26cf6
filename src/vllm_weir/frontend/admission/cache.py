"""The keys of the admission cache: requests that ask for the same are checked once."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.request import ATOMS, NOT_RESOLVED, WIRE_KEY
from vllm_weir.schema.vectors import vector_of

CACHE_BYTES, MAX_KEY_BYTES = 32 << 20, 1 << 20
"""Bytes of the keys of all cached admissions, and of one."""


class AdmissionKey(NamedTuple):
    """A key that is equal for requests that ask for the same.

    Attributes:
        size: about how many bytes it takes.
        parts: the values of the request's ``weir`` object, with digests for vectors.
    """

    key: tuple
    size: int
    parts: Collection[Any] = ()

    @property
    def cacheable(self) -> bool:
        """Whether an admission may be stored under the key: only if all parts are JSON data.

        The key of an array has its bytes without the dtype, so different requests could share it.
        Looking such a key up is safe: JSON has no bytes, so no stored key equals it.
        """
        return _is_json(self.parts)


def admission_key(
    extra_args: Mapping[str, Any], has_token_ids: bool, names: Hashable = 0, content_of_prompt: Hashable = ()
) -> AdmissionKey | None:
    """Return the key of what a request asks for; None if it cannot be compared.

    `names` are versions of the registries: until one changes, every name keeps its meaning.
    `content_of_prompt` is what else of the prompt an admission depends on.
    """
    weir_object = extra_args.get(WIRE_KEY)
    if not carries_keys(extra_args):
        return AdmissionKey((has_token_ids, names, content_of_prompt), 8)
    if not isinstance(weir_object, dict):
        return None
    size = [0]
    try:
        # Version 2 writes equal values alike, and different types (1, 1.0, True; a list, a tuple)
        # differently.
        short = {name: _shortened(part, size) for name, part in weir_object.items() if name not in NOT_RESOLVED}
        content = marshal.dumps(short, 2)
    except ValueError:
        return None  # not plain JSON, which admission may refuse
    size[0] += len(content)
    if size[0] > MAX_KEY_BYTES:
        return None
    return AdmissionKey((has_token_ids, names, content, content_of_prompt), size[0], short.values())


def _is_json(values: Collection[Any]) -> bool:
    """Return whether all values, at any depth, are JSON data or the ``...`` that marks a digest."""
    kinds = set(map(type, values)) - _LEAVES
    if not kinds:
        return True
    return kinds <= _CONTAINERS and all(
        _is_json(value.values() if type(value) is dict else value) for value in values if type(value) in _CONTAINERS
    )


_LEAVES = ATOMS | {type(...)}

_CONTAINERS = frozenset({dict, list, tuple})


def _shortened(part: Any, size: list[int]) -> Any:
    """Return a part with vectors that this process encoded replaced by digests, and add their bytes to `size[0]`."""
    if type(part) is not list:
        return part
    return [
        {name: _digest(value, size) if type(value) is dict else value for name, value in item.items()}
        if type(item) is dict
        else item
        for item in part
    ]


def _digest(value: dict, size: list[int], by_layer: bool = True) -> Any:
    """Return a vector's wire form with a digest for its text; if `by_layer`, ``{layer: vector}`` likewise."""
    text = value.get("b64")
    if text is None and by_layer:
        return {key: _digest(v, size, False) if type(v) is dict else v for key, v in value.items()}
    if type(text) is not str or (vector := vector_of(text)) is None:
        return value
    size[0] += len(text)
    return {**value, "b64": (..., vector.digest)}
