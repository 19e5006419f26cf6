"""Requests that ask for the same are admitted once: what makes two of them equal."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vllm_weir.schema.keys import LENS_KEYS, carries_keys
from vllm_weir.schema.request import ATOMS, WIRE_KEY
from vllm_weir.schema.vectors import vector_of

MOST_KNOWN, LONGEST_KNOWN = 32 << 20, 1 << 20
"""Bytes of the keys of all admissions that are remembered, and of one."""


class AdmissionKey(NamedTuple):
    """What requests that ask for the same have in common: an equal `key`, about so many bytes, made of `parts`."""

    key: tuple
    size: int
    parts: Collection[Any] = ()

    @property
    def plain(self) -> bool:
        """Whether it may be remembered. One that is not has no key that a remembered one has: of an array the key holds
        the bytes alone, which stand for other numbers in another dtype, and bytes are no JSON."""
        return _plain(self.parts)


def admission_key(
    extra_args: Mapping[str, Any], has_token_ids: bool, names: int = 0, has_embeddings: bool = False
) -> AdmissionKey | None:
    """The wish, whose key is equal for requests that ask for the same while names mean the same (which `names` stands
    for); None for those that cannot be compared."""
    weir_object = extra_args.get(WIRE_KEY)
    if not carries_keys(extra_args):
        return AdmissionKey((has_token_ids, has_embeddings), 8)
    if not isinstance(weir_object, dict) or not _LENS.isdisjoint(extra_args):
        return None
    size = [0]
    try:
        # Version 2 writes equal values alike, and different types (1, 1.0, True; a list, a tuple) differently.
        short = {name: _shortened(part, size) for name, part in weir_object.items()}
        content = marshal.dumps(short, 2)
    except ValueError:
        return None  # not plain JSON; admission says what is wrong with it, if anything is
    size[0] += len(content)
    if size[0] > LONGEST_KNOWN:
        return None
    return AdmissionKey((has_token_ids, names, content, has_embeddings), size[0], short.values())


_LENS = frozenset(LENS_KEYS)


def _plain(values: Collection[Any]) -> bool:
    """Whether these are JSON data all through, or stand for a vector."""
    kinds = set(map(type, values)) - _LEAVES
    if not kinds:
        return True
    return kinds <= _HOLDERS and all(
        _plain(value.values() if type(value) is dict else value) for value in values if type(value) in _HOLDERS
    )


_LEAVES = ATOMS | {type(...)}

_HOLDERS = frozenset({dict, list, tuple})


def _shortened(part: Any, size: list[int]) -> Any:
    """The same with every vector that this process wrote down replaced by its digest, which is needed anyway; `size`
    grows by about their bytes."""
    if type(part) is not list:
        return part
    return [
        {name: _digest(value, size) if type(value) is dict else value for name, value in item.items()}
        if type(item) is dict
        else item
        for item in part
    ]


def _digest(value: dict, size: list[int], by_layer: bool = True) -> Any:
    """A vector's wire form with the digest for its text; `by_layer`: of {layer: vector}, each with its own."""
    text = value.get("b64")
    if text is None and by_layer:
        return {key: _digest(v, size, False) if type(v) is dict else v for key, v in value.items()}
    if type(text) is not str or (vector := vector_of(text)) is None:
        return value
    size[0] += len(text)
    return {**value, "b64": (..., vector.digest)}
