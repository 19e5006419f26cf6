"""Vectors on the wire: inline as base64 or lists, or by reference; content-addressed, float32, checked."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.scalars import is_int, plain
from vllm_weir.util.lru import LruCache

KEPT = (1, 2, 3)
"""Dimensions of what is kept under a name: [d], [n, d], or [layers, n, d]."""
MAX_ROWS = 8192
MAX_ELEMENTS = 1 << 26
_DTYPES = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


class Vector:
    """One vector or matrix: a float32 array, or the name or digest of one that the engine's process keeps.

    No dataclass: what is made of those field by field, such as the key of Inspect's cache, has long arrays cut short.
    """

    def __init__(self, array: np.ndarray | None = None, ref: str = "") -> None:
        self.array, self.ref = array, ref

    def __repr__(self) -> str:
        return f"Vector({self.digest!r})"

    @classmethod
    def parse(cls, value: Any, field: str, ndim: tuple[int, ...] = (1, 2)) -> Vector:
        """From a torch tensor, numpy array, nested list, or a wire form; raises WeirError naming `field`."""
        if isinstance(value, Vector):
            return value
        if isinstance(value, str):
            value = {"ref": value}
        if isinstance(value, Mapping):
            if set(value) == {"ref"}:
                if not isinstance(value["ref"], str) or not 0 < len(value["ref"]) <= 256:
                    raise WeirError("a reference is a name or a digest", f"{field}.ref")
                return cls(ref=value["ref"])
            known = _known(value)
            if known is not None and known.array is not None and known.array.ndim in ndim:
                return known
            value = _decode(value, field)
        return cls(array=_checked(value, field, ndim))

    @classmethod
    def parse_one(cls, value: Any, field: str) -> Vector:
        """As `parse`, of a single vector: [d], or [1, d], which becomes [d]."""
        vector = cls.parse(value, field)
        if vector.array is None or vector.array.ndim == 1:
            return vector
        if len(vector.array) > 1:
            raise WeirError(f"expected one vector, got {len(vector.array)} rows", field)
        return cls(vector.array[0])

    def to_json(self) -> dict[str, Any]:
        """The wire form."""
        if self.array is None:
            return {"ref": self.ref}
        text = self._text
        _texts.put(id(text), (text, self), 2 * len(text))
        return {"b64": text, "dtype": "float32", "shape": list(self.array.shape)}

    @functools.cached_property
    def _text(self) -> str:
        return base64.b64encode(np.ascontiguousarray(self.array, "<f4").tobytes()).decode()

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the content; of a reference, what it refers to by name."""
        return digest_of(self.array) if self.array is not None else self.ref


_texts: LruCache[tuple[str, Vector]] = LruCache(32 << 20)
"""By the id of the text that stands for it on the wire; the text is held, so that its id stays its own."""


def vector_of(text: str) -> Vector | None:
    """The vector of which this very string was made in this process, if that is remembered."""
    found = _texts.get(id(text))
    return found[1] if found is not None and found[0] is text else None


def _known(value: Mapping) -> Vector | None:
    """What this process has written down, in the form that it gave it."""
    vector = vector_of(value["b64"]) if isinstance(value.get("b64"), str) else None
    if vector is None or vector.array is None or value.get("shape") != list(vector.array.shape):
        return None
    return vector if value.get("dtype") == "float32" and len(value) == 3 else None


def digest_of(array: np.ndarray) -> str:
    """Content address of a float32 array: shape and bytes."""
    head = f"{list(array.shape)}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array, "<f4").tobytes()).hexdigest()[:32]


def _decode(value: Mapping, field: str) -> np.ndarray:
    for key in value:
        if key not in ("b64", "dtype", "shape"):
            raise WeirError("unknown key; a vector is {ref} or {b64, dtype, shape}", f"{field}.{brief(key)}")
    dtype, shape, text = value.get("dtype"), value.get("shape"), value.get("b64")
    if not isinstance(text, str):
        what = "missing" if text is None else f"expected base64 text, got {type(text).__name__}"
        raise WeirError(what, f"{field}.b64")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WeirError(f"choose from {', '.join(_DTYPES)}", f"{field}.dtype")
    if not isinstance(shape, (list, tuple)) or not shape or not all(type(n) is int and n > 0 for n in shape):
        raise WeirError("shape is a list of positive ints", f"{field}.shape")
    count = 1
    for n in shape:
        count *= n
    if count > MAX_ELEMENTS:
        raise WeirError(f"{count} elements, more than the limit of {MAX_ELEMENTS}", f"{field}.shape")
    try:
        raw = _unwritten(text)
    except (binascii.Error, TypeError, ValueError):
        raise WeirError("not valid base64", f"{field}.b64") from None
    array = np.frombuffer(
        raw[: len(raw) // np.dtype(_DTYPES[dtype]).itemsize * np.dtype(_DTYPES[dtype]).itemsize], _DTYPES[dtype]
    )
    if len(raw) != count * array.itemsize:
        raise WeirError(f"{len(raw)} bytes do not make shape {list(shape)[:4]} of {dtype}", f"{field}.b64")
    if dtype == "bfloat16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(shape)


def _unwritten(text: Any) -> bytes:
    """The bytes that base64 `text` stands for."""
    try:
        return msgspec.convert(text, bytes)  # several times as fast, and takes no text that base64 does not
    except (msgspec.ValidationError, ValueError, TypeError):
        return base64.b64decode(text, validate=True)


def _checked(value: Any, field: str, ndim: tuple[int, ...]) -> np.ndarray:
    if hasattr(value, "detach"):
        value = _of_tensor(value, field)
    elif isinstance(value, (list, tuple)) and any(hasattr(v, "detach") for v in value):
        value = [_of_tensor(v, f"{field}[{i}]") if hasattr(v, "detach") else v for i, v in enumerate(value)]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        raise WeirError("not a rectangular array of numbers", field) from None
    if array.dtype.kind not in "fiu":
        raise WeirError(f"expected numbers, got {array.dtype}", field)
    if array.ndim not in ndim or array.size == 0:
        raise WeirError(f"expected {' or '.join(map(str, ndim))} dimensions, got shape {list(array.shape)}", field)
    if array.size > MAX_ELEMENTS:
        raise WeirError(f"{array.size} elements, more than the limit of {MAX_ELEMENTS}", field)
    if array.ndim == 2 and len(array) > MAX_ROWS:
        raise WeirError(f"{len(array)} rows, more than the limit of {MAX_ROWS}", field)
    with np.errstate(over="ignore"):
        out = np.array(array, np.float32)
    if not np.isfinite(out).all():
        raise WeirError("contains NaN or Inf (or overflows float32)", field)
    out.setflags(write=False)
    return out


def _of_tensor(tensor: Any, field: str) -> np.ndarray:
    """A torch tensor as float32 on the host, without importing torch for those who have none."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex() or dtype == "bool":
        raise WeirError(f"expected numbers, got {dtype}", field)
    try:
        return tensor.detach().cpu().float().numpy()
    except (TypeError, RuntimeError) as e:  # sparse, or without data (the device "meta")
        raise WeirError(f"a tensor without plain numbers ({str(e)[:80]}); give a dense one", field) from None


def number(value: Any, field: str, minimum: float | None = None) -> float:
    """A finite float; raises WeirError naming `field`."""
    value = plain(value)
    if not is_int(value) and not isinstance(value, (float, np.floating)):
        raise WeirError(f"expected a number, got {type(value).__name__}", field)
    try:
        out = float(value)
    except OverflowError:
        out = float("inf")
    if not abs(out) <= 3e38:
        raise WeirError(f"{out} is not a finite float32", field)
    if minimum is not None and out < minimum:
        raise WeirError(f"must be at least {minimum:g}, got {out:g}", field)
    return out
