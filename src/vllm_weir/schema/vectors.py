"""`Vector`: a float32 array, or a reference to one, and its wire forms."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import is_int, plain, refuse_unknown_keys
from vllm_weir.util.lru import LruCache

KEPT = (1, 2, 3)
"""Numbers of dimensions that a registered vector may have: [d], [n, d], or [layers, n, d]."""
MAX_NDIM = 8
"""No field takes as many; more would be an error of numpy's, or of the stack."""
MAX_ROWS = 8192
MAX_ELEMENTS = 1 << 26
_FLOAT32 = np.dtype("<f4")
_DTYPES = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


class Vector:
    """A vector or matrix: a float32 array, or the name or digest of one in the vector registry.

    Not a dataclass: tools that print dataclasses field by field to compare them, as Inspect does
    for the keys of its cache, abbreviate long arrays, so that different vectors would look equal.

    Attributes:
        array: float32, read-only where it was parsed; None for a reference.
        ref: the name or digest; empty for an array.
    """

    def __init__(self, array: np.ndarray | None = None, ref: str = "") -> None:
        self.array, self.ref = array, ref

    def __repr__(self) -> str:
        return f"Vector({self.digest!r})"

    def shown(self, name: str) -> str:
        """Return a short text for the repr of what holds it in the field `name`."""
        return repr(brief(self.ref, 80)) if self.array is None else f"{name}{list(self.array.shape)}"

    @classmethod
    def parse(cls, value: Any, field: str, ndim: tuple[int, ...] = (1, 2)) -> Vector:
        """Parse a torch tensor, numpy array, nested list, or a wire form.

        Args:
            value: the vector.
            field: named by errors.
            ndim: the numbers of dimensions that are accepted.

        Raises:
            WeirError: for anything but finite numbers of that shape.
        """
        if isinstance(value, Vector):
            return value
        if isinstance(value, str):
            value = {"ref": value}
        if isinstance(value, Mapping):
            if set(value) == {"ref"}:
                if not isinstance(value["ref"], str) or not 0 < len(value["ref"]) <= 256:
                    raise WeirError("a reference is a name or a digest", f"{field}.ref")
                return cls(ref=value["ref"])
            cached = _cached_vector(value)
            if cached is not None and cached.array is not None and cached.array.ndim in ndim:
                return cached
            value = decode(value, field)
        return cls(array=_checked(value, field, ndim))

    @classmethod
    def parse_one(cls, value: Any, field: str) -> Vector:
        """Parse a single vector: [d], or [1, d], which becomes [d]."""
        vector = cls.parse(value, field)
        if vector.array is None or vector.array.ndim == 1:
            return vector
        if len(vector.array) > 1:
            raise WeirError(f"expected one vector, got {len(vector.array)} rows", field)
        return cls(vector.array[0])

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
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
        """Digest of the array's content; of a reference, the reference itself."""
        return digest_of(self.array) if self.array is not None else self.ref


_texts: LruCache[tuple[str, Vector]] = LruCache(32 << 20)
"""Base64 text and vector, by the text's id. The text is kept, so that no other gets its id."""


def vector_of(text: str) -> Vector | None:
    """Return the vector that this process encoded to this very string, if it is cached."""
    entry = _texts.get(id(text))
    return entry[1] if entry is not None and entry[0] is text else None


def _cached_vector(value: Mapping) -> Vector | None:
    """Return the vector of a wire form that this process has written and nobody has changed."""
    vector = vector_of(value["b64"]) if isinstance(value.get("b64"), str) else None
    if vector is None or vector.array is None or value.get("shape") != list(vector.array.shape):
        return None
    return vector if value.get("dtype") == "float32" and len(value) == 3 else None


def digest_of(array: np.ndarray) -> str:
    """Return the content address of a float32 array: a hash of its shape and bytes."""
    content = hashlib.sha256(f"{list(array.shape)}".encode())
    content.update(np.ascontiguousarray(array, _FLOAT32).data)
    return content.hexdigest()[:32]


def decode(value: Mapping, field: str) -> np.ndarray:
    """Return the array of ``{"b64", "dtype", "shape"}``; raise WeirError if it is none."""
    refuse_unknown_keys(value, ("b64", "dtype", "shape"), field, "a vector is {ref} or {b64, dtype, shape}")
    dtype, shape, text = value.get("dtype"), value.get("shape"), value.get("b64")
    if not isinstance(text, str):
        message = "missing" if text is None else f"expected base64 text, got {type(text).__name__}"
        raise WeirError(message, f"{field}.b64")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WeirError(f"unknown dtype {brief(dtype)!r}; choose from {', '.join(_DTYPES)}", f"{field}.dtype")
    if not isinstance(shape, (list, tuple)) or not 0 < len(shape) <= MAX_NDIM:
        raise WeirError(f"shape is a list of 1 to {MAX_NDIM} positive ints", f"{field}.shape")
    if not all(type(n) is int and n > 0 for n in shape):
        raise WeirError("shape is a list of positive ints", f"{field}.shape")
    count = 1
    for n in shape:
        count *= n
    if count > MAX_ELEMENTS:
        raise WeirError(f"{count} elements, more than the limit of {MAX_ELEMENTS}", f"{field}.shape")
    try:
        raw = _base64_bytes(text)
    except (binascii.Error, TypeError, ValueError):
        raise WeirError("not valid base64", f"{field}.b64") from None
    stored = np.dtype(_DTYPES[dtype])
    if len(raw) != count * stored.itemsize:
        raise WeirError(f"{len(raw)} bytes do not make shape {list(shape)[:4]} of {dtype}", f"{field}.b64")
    array = np.frombuffer(raw, stored)
    if dtype == "bfloat16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(shape)


def _base64_bytes(text: Any) -> bytes:
    """Decode base64."""
    try:
        return msgspec.convert(text, bytes)  # several times as fast as `base64`, and as strict
    except (msgspec.ValidationError, ValueError, TypeError):
        return base64.b64decode(text, validate=True)


def as_array(value: Any, field: str) -> np.ndarray:
    """Return a tensor, array or nested list as an array; floats of a tensor as float32.

    Raises:
        WeirError: if a nested list is not rectangular, or holds something else than numbers.
    """
    if hasattr(value, "detach"):
        value = _of_tensor(value, field)
    elif isinstance(value, (list, tuple)) and any(hasattr(v, "detach") for v in value):
        value = [_of_tensor(v, f"{field}[{i}]") if hasattr(v, "detach") else v for i, v in enumerate(value)]
    if isinstance(value, (list, tuple)):
        _refuse_other_leaves(value, field, MAX_NDIM)
    try:
        return np.asarray(value)
    except (ValueError, TypeError):
        raise WeirError("not a rectangular array of numbers", field) from None


def _checked(value: Any, field: str, ndim: tuple[int, ...]) -> np.ndarray:
    """Return a read-only float32 copy of finite numbers with an accepted number of dimensions."""
    array = as_array(value, field)
    if array.dtype.kind not in "fiu":
        raise WeirError(f"expected numbers, got {array.dtype}", field)
    if array.ndim not in ndim or array.size == 0:
        raise WeirError(f"expected {' or '.join(map(str, ndim))} dimensions, got shape {list(array.shape)}", field)
    if array.size > MAX_ELEMENTS:
        raise WeirError(f"{array.size} elements, more than the limit of {MAX_ELEMENTS}", field)
    if array.ndim == 2 and len(array) > MAX_ROWS:
        raise WeirError(f"{len(array)} rows, more than the limit of {MAX_ROWS}", field)
    if array.dtype == np.float32:
        out = np.array(array)
    else:
        with np.errstate(over="ignore"):
            out = np.array(array, np.float32)
    if not is_finite(out):
        raise WeirError("contains NaN or Inf (or overflows float32)", field)
    out.setflags(write=False)
    return out


def _refuse_other_leaves(value: list | tuple, field: str, deepest: int) -> None:
    """Raise WeirError unless a nested list holds numbers, at most `deepest` lists deep.

    `numpy.asarray` gives each element the room of the longest text, so one text among many short ones would take
    gigabytes before its type could be told.
    """
    types = set(map(type, value))
    if types <= {int, float}:
        return
    for kind in types:
        if kind not in (list, tuple) and not issubclass(kind, (int, float, np.number, np.ndarray)):
            raise WeirError(f"expected numbers, got {kind.__name__}", field)
    if deepest == 1 and types & {list, tuple}:
        raise WeirError(f"lists more than {MAX_NDIM} deep", field)
    for one in value:
        if isinstance(one, (list, tuple)):
            _refuse_other_leaves(one, field, deepest - 1)


def is_finite(array: np.ndarray) -> bool:
    """Return whether a float array has neither NaN nor Inf."""
    # A sum of squares takes a quarter of the time; it is finite unless there is one, or it overflows.
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def _of_tensor(tensor: Any, field: str) -> np.ndarray:
    """Copy a torch tensor to a float32 array, without importing torch, which clients may lack."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex() or dtype == "bool":
        raise WeirError(f"expected numbers, got {dtype}", field)
    try:
        return tensor.detach().cpu().float().numpy()
    except (TypeError, RuntimeError) as e:  # sparse, or without data (the device "meta")
        raise WeirError(f"cannot read the tensor's numbers ({str(e)[:80]}); give a dense tensor", field) from None


def number(value: Any, field: str) -> float:
    """Parse a number that float32 can hold; raise WeirError naming `field`."""
    value = plain(value)
    if not is_int(value) and not isinstance(value, (float, np.floating)):
        raise WeirError(f"expected a number, got {type(value).__name__}", field)
    try:
        out = float(value)
    except OverflowError:
        out = float("inf")
    if not abs(out) <= 3e38:
        raise WeirError(f"{out} is not a finite float32", field)
    return out
