"""What a user's function saves, as bytes: msgpack, with tensors and arrays as (dtype, shape, bytes)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_weir.errors import WeirError

_TENSOR = "__tensor__"


def encode(value: Any) -> bytes:
    """Return a value as bytes; tensors are copied to the host, and keep their dtype.

    Raise WeirError if it holds something else than tensors, numbers, texts, bytes, None, lists and dicts.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except TypeError as e:
        raise WeirError(f"cannot be sent to the caller: {e}", "hooks") from None


def decode(data: bytes) -> Any:
    return _with_tensors(msgspec.msgpack.decode(data))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _plain(torch.from_numpy(np.ascontiguousarray(value)))
    raise TypeError(f"a {type(value).__name__}")


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            dtype, shape, data = value[_TENSOR]
            return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(getattr(torch, dtype)).reshape(shape)
        return {key: _with_tensors(one) for key, one in value.items()}
    return [_with_tensors(one) for one in value] if isinstance(value, list) else value


class Unsent:
    """Knows which part of what a function saves its reader has: a list that grows is not sent anew."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[bool, list[tuple[Any, int]]]] = {}
        """Name -> whether it is a list, and the marks of its items."""

    def take(self, kept: Mapping[Any, Any]) -> Iterator[tuple[str, int, bytes]]:
        """Yield what is new: (name, 0, value), (name, k, the items of a list from k on), (name, -1, b"") if it is gone.

        Raise WeirError if something cannot be sent.
        """
        for name in [one for one in self._sent if one not in kept]:
            del self._sent[name]
            yield name, -1, b""
        for name, value in kept.items():
            if not isinstance(name, str):
                raise WeirError(f"cannot be sent to the caller: the name {name!r} is no text", "hooks")
            is_list = isinstance(value, list)
            marks = [_mark(one) for one in (value if is_list else (value,))]
            was_list, before = self._sent.get(name, (is_list, None))
            first = 0
            if before is not None and was_list == is_list and len(before) <= len(marks):
                same = (a[0] is b[0] and a[1] == b[1] for a, b in zip(before, marks, strict=False))
                first = next((k for k, equal in enumerate(same) if not equal), len(before))
                if first == len(marks):
                    continue
            self._sent[name] = is_list, marks
            yield name, first, encode(value[first:] if is_list else value)


def _mark(value: Any) -> tuple[Any, int]:
    """Return what changes with a value: of a tensor that counts changes in place, itself and their number."""
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return value, value._version
    return None, hash(encode(value))
