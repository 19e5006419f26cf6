"""`Compression`: how rows are packed, and the header that says how to unpack them.

A packed row is a *record*: little-endian fields without padding, all of one size, described by the
header. docs/reference/file-formats.md explains every field.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import refuse_unknown_keys, set_fields
from vllm_weir.schema.rows import RowShape

FORMAT = "weir-activations"
VERSION = 1
METHODS = ("none", "rp8", "full8", "topk8", "fp16", "fp8")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "float8_e4m3fn": 1}
ROW_DTYPES = ("float32", "float16", "bfloat16")
EXACT_DTYPES = ("int64",)
"""Dtypes of rows that are stored as they are, whatever the compression."""
STORED_DTYPES = (*ROW_DTYPES, *EXACT_DTYPES)
"""Dtypes of uncompressed rows."""
RP_MIN, RP_MAX = 32, 512
DEFAULT_K = 64
MAX_WIDTH = 1 << 24


@dataclass(frozen=True)
class Compression:
    """How one row of d values is packed.

    Args:
        method: ``"none"`` (the row as it is), ``"fp16"``, ``"fp8"`` (float8 e4m3 with a scale for
            the row), ``"full8"`` (affine uint8), ``"topk8"`` (the k largest by magnitude, affine
            uint8), ``"rp8"`` (a Gaussian random projection to k values, affine uint8).
        k: values kept: 32..512 for rp8, at least 1 for topk8, 64 for both if None; None for the
            other methods.
        seed: of rp8's projection, 0 .. 2**63-1.
        path: name of the field in error messages.

    Raises:
        WeirError: for anything else, naming the field.
    """

    method: str = "none"
    k: int | None = None
    seed: int = 0
    path: str = "compress"

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise WeirError(
                f"unknown method {brief(self.method)!r}; choose from {', '.join(METHODS)}", f"{self.path}.method"
            )
        if self.method not in ("rp8", "topk8"):
            if self.k is not None:
                raise WeirError(f"{self.method} takes no k; leave it out", f"{self.path}.k")
        else:
            low, high = (RP_MIN, RP_MAX) if self.method == "rp8" else (1, MAX_WIDTH)
            if self.k is None:
                set_fields(self, k=DEFAULT_K)
            elif not _is_int(self.k) or not low <= self.k <= high:
                raise WeirError(
                    f"k of {self.method} is an int in {low}..{high}, got {brief(self.k)!r}", f"{self.path}.k"
                )
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise WeirError(f"seed is an int in 0..2**63-1, got {brief(self.seed)!r}", f"{self.path}.seed")
        if self.seed and self.method != "rp8":
            raise WeirError(f"{self.method} takes no seed; leave it out", f"{self.path}.seed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compression):
            return NotImplemented
        return (self.method, self.k, self.seed) == (other.method, other.k, other.seed)

    def __hash__(self) -> int:
        return hash((self.method, self.k, self.seed))

    @classmethod
    def parse(cls, value: object, field: str = "compress") -> Compression:
        """Parse ``"rp8"``, ``{"method": "rp8", "k": 64, "seed": 1}``, a Compression, or None."""
        if isinstance(value, Compression):
            return value
        if value is None:
            return cls(path=field)
        if isinstance(value, str):
            return cls(value, path=field)
        if not isinstance(value, Mapping):
            raise WeirError(
                f"a compression is one of {', '.join(METHODS)} or an object {{method, k, seed}}, "
                f"got {type(value).__name__}",
                field,
            )
        refuse_unknown_keys(value, ("method", "k", "seed"), field)
        if "method" not in value:
            raise WeirError(f"missing; choose from {', '.join(METHODS)}", f"{field}.method")
        return cls(**value, path=field)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        out: dict[str, Any] = {"method": self.method}
        if self.k is not None:
            out["k"] = self.k
        if self.seed:
            out["seed"] = self.seed
        return out

    def check(self, d_model: int) -> Compression:
        """Return itself, or raise WeirError if it cannot pack rows of `d_model` values."""
        if not _is_int(d_model) or not 0 < d_model <= MAX_WIDTH:
            raise WeirError(f"rows of {brief(d_model)} values cannot be packed", self.path)
        if self.method == "topk8" and self.k is not None and self.k > d_model:
            raise WeirError(f"k = {self.k} is more than the row's {d_model} values; lower it", f"{self.path}.k")
        return self

    def fields(self, d_model: int, dtype: str) -> list[dict[str, Any]]:
        """Return the fields of one record, in order: name, dtype, shape, and offset in bytes."""
        self.check(d_model)
        return [{**field, "shape": list(field["shape"])} for field in _fields(self.method, self.k or 0, d_model, dtype)]

    def record_bytes(self, d_model: int, itemsize: int = 4) -> int:
        """Return the bytes of one record of a row whose values have `itemsize` bytes."""
        dtype = "float32" if itemsize == 4 else "float16"
        return _end(self.fields(d_model, dtype))

    def header(self, d_model: int, dtype: str, shape: Sequence[int] = ()) -> dict[str, Any]:
        """Return the header, plain JSON data: all that is needed to unpack.

        Args:
            d_model: values in an original row.
            dtype: of the original row: ``"float32"``, ``"float16"``, ``"bfloat16"``, or without
                compression ``"int64"``.
            shape: of an original row that has several dimensions, say [heads, d_head], which are
                `d_model` values in all. The header of a row [d_model] has no shape.
        """
        dtypes = STORED_DTYPES if self.method == "none" else ROW_DTYPES
        if dtype not in dtypes:
            raise WeirError(f"rows are {', '.join(dtypes)}, not {brief(dtype)!r}", f"{self.path}.dtype")
        fields = self.fields(d_model, dtype)
        several = {} if tuple(shape) in ((), (d_model,)) else {"shape": _checked_shape(shape, d_model, self.path)}
        return {
            "format": FORMAT,
            "version": VERSION,
            "method": self.method,
            "k": self.k,
            "seed": self.seed,
            "axis": "row",
            "d_model": d_model,
            **several,
            "dtype": dtype,
            "fields": fields,
        }

    @classmethod
    def from_header(cls, header: object, field: str = "header") -> Compression:
        """Parse a header; raise WeirError unless every entry is what `header` would write."""
        if not isinstance(header, Mapping):
            raise WeirError(f"a header is an object, got {type(header).__name__}", field)
        if header.get("format") != FORMAT:
            raise WeirError(f"not a header of {FORMAT}: format is {brief(header.get('format'))!r}", f"{field}.format")
        if header.get("version") != VERSION:
            raise WeirError(
                f"version {brief(header.get('version'))!r} is not supported; this Weir reads version {VERSION}",
                f"{field}.version",
            )
        out = cls(header.get("method", ""), header.get("k"), header.get("seed", 0), path=field)
        shape = header.get("shape", ())
        if not isinstance(shape, (list, tuple)):
            raise WeirError("shape is a list of ints", f"{field}.shape")
        expected = out.header(header.get("d_model", 0), header.get("dtype", ""), shape)
        if _canonical(dict(header)) == _canonical(expected):
            return out
        for key in {*expected, *header}:
            if key not in expected or key not in header or _canonical(header[key]) != _canonical(expected[key]):
                raise WeirError("contradicts the rest of the header", f"{field}.{brief(key)}")
        return out


def header_bytes(header: Mapping[str, Any]) -> int:
    """Return the bytes of one record, by its header."""
    return _end(header["fields"])


def header_shape(header: Mapping[str, Any]) -> RowShape:
    """Return the shape of one original row, by its header."""
    return tuple(header.get("shape", (header["d_model"],)))


def shape_text(shape: Sequence[int]) -> str:
    """Return the shape of a row in words, such as ``4096`` or ``32 x 128``."""
    return " x ".join(map(str, shape))


def _checked_shape(shape: Sequence[int], d_model: int, path: str) -> list[int]:
    sizes = list(shape)
    if len(sizes) < 2 or not all(_is_int(n) and n > 0 for n in sizes) or math.prod(sizes) != d_model:
        raise WeirError(f"a shape {brief(sizes, 80)} does not have {d_model} values", f"{path}.shape")
    return sizes


@functools.lru_cache(maxsize=64)
def _fields(method: str, k: int, d_model: int, dtype: str) -> tuple[dict[str, Any], ...]:
    """Return the fields of one record. They are cached, so callers copy them."""
    affine: list[tuple[str, str, list[int]]] = [("scale", "float32", []), ("zero", "float32", [])]
    layout: dict[str, list[tuple[str, str, list[int]]]] = {
        "none": [("values", dtype, [d_model])],
        "fp16": [("values", "float16", [d_model])],
        "fp8": [("scale", "float32", []), ("values", "float8_e4m3fn", [d_model])],
        "full8": [*affine, ("codes", "uint8", [d_model])],
        "rp8": [*affine, ("codes", "uint8", [k])],
        "topk8": [*affine, ("indices", "int32", [k]), ("codes", "uint8", [k])],
    }
    out: list[dict[str, Any]] = []
    offset = 0
    for name, kind, shape in layout[method]:
        out.append({"name": name, "dtype": kind, "shape": shape, "offset": offset})
        offset += ITEMSIZE[kind] * (shape[0] if shape else 1)
    return tuple(out)


def _end(fields: list[dict[str, Any]]) -> int:
    last = fields[-1]
    return last["offset"] + ITEMSIZE[last["dtype"]] * (last["shape"][0] if last["shape"] else 1)


def _canonical(value: object) -> str:
    """Return JSON text, in which 1, 1.0 and True differ as they do not in Python."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return ""  # differs from everything that a header holds


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
