"""`Capture`: which rows a request wants back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import layers_of, normalise_hook, split_transformer_lens
from vllm_weir.schema.positions import MAX_LIST, Positions
from vllm_weir.schema.scalars import plain
from vllm_weir.schema.sinks import MEMORY, Sink, parse_keep
from vllm_weir.schema.vectors import Vector

DTYPES = ("float32", "float16", "bfloat16")
REDUCTIONS = ("last", "mean", "max")
MAX_DIRECTIONS = 256


@dataclass(frozen=True)
class Capture:
    """Rows of the residual stream (or of a block's parts) to return with a request's output.

    Args:
        hook: hook point, e.g. ``"resid_post"``; aliases and ``"blocks.7.hook_resid_post"`` (which also sets `layers`)
            are accepted.
        layers: ``"all"``, a block index, or a list of them; blocks count from 0.
        positions: selector, see docs/reference/selectors.md; ``"all"`` gives P+G-1 rows for P prompt and G generated
            tokens.
        before: rows as they are before the request's own interventions at that site (default: after them).
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"`` (or the torch dtype) of the returned rows; None keeps the
            model's.
        compress: ``"rp8"``, ``"full8"``, ``"topk8"``, ``"fp16"``, ``"fp8"``, ``"none"`` or ``{"method", "k", "seed"}``:
            rows leave the device compressed, see docs/reference/file-formats.md; what is returned is decoded to
            float32, or `dtype`. All captures for one sink compress alike, and none of them reduces or projects.
        sink: ``"memory"``: the rows come back on the output; otherwise the name of one of the engine's sinks, or
            ``{consumer: options}``, e.g. ``{"filesystem": {"url": "/data/rows", "layout": "sharded"}}``.
        keep: ``"always"``, or ``"marked"``: the sink gets the rows only if `weir.mark` asks for it in time.
        reduce: ``"last"``, ``"mean"`` or ``"max"`` (elementwise) over the selected positions: one row a site instead of
            one for each position, computed where the rows are born if all captures of the request agree. Captures for
            one sink reduce alike, over the same positions; for memory, those of one site do.
        project: directions [m, d_model] (or [d_model], or a registered name): instead of rows their dot products with
            these, float32 [rows, m] (probe scores). Captures for one sink project alike; for memory, those of one site.

    Raises:
        WeirError: for anything else, naming the field.
    """

    hook: str = "resid_post"
    layers: Any = "all"
    positions: Any = "all"
    before: bool = False
    dtype: Any = None
    compress: Any = None
    sink: Any = MEMORY
    keep: str = "always"
    reduce: str | None = None
    project: Any = None
    path: str = field(default="capture", repr=False, compare=False)

    def __post_init__(self) -> None:
        at = self.path
        hook, layers = parse_place(self.hook, self.layers, at)
        object.__setattr__(self, "hook", hook)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "positions", Positions.parse(self.positions, f"{at}.positions"))
        if not isinstance(self.before, bool):
            raise WeirError(f"before is true or false, got {type(self.before).__name__}", f"{at}.before")
        object.__setattr__(self, "dtype", parse_dtype(self.dtype, f"{at}.dtype"))
        if self.reduce is not None and self.reduce not in REDUCTIONS:
            raise WeirError(f"unknown {brief(self.reduce)!r}; choose from {', '.join(REDUCTIONS)}", f"{at}.reduce")
        if self.project is not None:
            vector = Vector.parse(self.project, f"{at}.project")
            if vector.array is not None and vector.array.ndim == 2 and len(vector.array) > MAX_DIRECTIONS:
                raise WeirError(
                    f"{len(vector.array)} directions, more than the limit of {MAX_DIRECTIONS}", f"{at}.project"
                )
            object.__setattr__(self, "project", vector)
        if self.compress is not None:
            compression = Compression.parse(self.compress, f"{at}.compress")
            object.__setattr__(self, "compress", None if compression.method == "none" else compression)
        if self.compress is not None and (self.reduce is not None or self.project is not None):
            raise WeirError("a capture that reduces or projects is small already; leave compress out", f"{at}.compress")
        object.__setattr__(self, "sink", Sink.parse(self.sink, f"{at}.sink"))
        object.__setattr__(self, "keep", parse_keep(self.keep, f"{at}.keep"))
        if self.keep != "always" and self.sink.memory:
            raise WeirError("rows that come back on the output are not marked; name a sink", f"{at}.keep")

    @classmethod
    def from_json(cls, data: object, path: str = "capture") -> Capture:
        """From the wire form; unknown keys are refused."""
        if isinstance(data, Capture):
            return data
        if not isinstance(data, dict):
            raise WeirError(f"a capture is an object, got {type(data).__name__}", path)
        known = {"hook", "layers", "positions", "before", "dtype", "reduce", "project", "compress", "sink", "keep"}
        for key in data:
            if key not in known:
                raise WeirError(f"unknown key; known are {', '.join(sorted(known))}", f"{path}.{brief(key)}")
        return cls(**data, path=path)

    def to_json(self) -> dict[str, Any]:
        """The wire form, defaults left out."""
        out: dict[str, Any] = {
            "hook": self.hook,
            "layers": self.layers if isinstance(self.layers, (str, int)) else list(self.layers),
        }
        if self.positions.kind != "all":
            out["positions"] = self.positions.to_json()
        if self.before:
            out["before"] = True
        if self.dtype is not None:
            out["dtype"] = self.dtype
        if self.reduce is not None:
            out["reduce"] = self.reduce
        if self.project is not None:
            out["project"] = self.project.to_json()
        if self.compress is not None:
            out["compress"] = self.compress.to_json()
        if not self.sink.memory:
            out["sink"] = self.sink.to_json()
        if self.keep != "always":
            out["keep"] = self.keep
        return out

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Block indices for a model of `num_layers` blocks; raises WeirError if one is out of range."""
        return layers_of(self.hook, self.layers, num_layers, f"{self.path}.layers")


def parse_layers(layers: object, field: str, ordered: bool = False) -> Literal["all"] | tuple[int, ...]:
    """``"all"`` or a sorted tuple of distinct block indices, at least one.

    `ordered`: in the order given, duplicates refused.
    """
    layers = plain(layers)
    if isinstance(layers, str):
        if layers == "all":
            return "all"
        raise WeirError(f"layers is 'all', an int or a list of ints, got {layers[:40]!r}", field)
    if isinstance(layers, range):
        layers = list(layers[: MAX_LIST + 1])
    if layers is None or isinstance(layers, (dict, set, frozenset)):
        raise WeirError(f"layers is 'all', an int or a list of ints, got {type(layers).__name__}", field)
    several = isinstance(layers, Sequence) or getattr(layers, "ndim", 0) == 1
    if several and not len(layers):  # type: ignore[arg-type]
        raise WeirError('an empty list names no block; list some, or write "all"', field)
    values = Positions.parse(layers if several else [layers], field)
    if values.kind != "list":
        raise WeirError("layers is 'all', an int or a list of ints", field)
    for value in values.numbers:
        if value < 0:
            raise WeirError(f"block {value} does not exist: blocks count from 0", field)
    if not ordered:
        return tuple(sorted(set(values.numbers)))
    if len(set(values.numbers)) < len(values.numbers):
        raise WeirError("a block is named twice, and per_layer gives each its own vector", field)
    return values.numbers


def parse_place(
    hook: str, layers: object, path: str, ordered: bool = False
) -> tuple[str, Literal["all"] | tuple[int, ...]]:
    """(hook point, layers); of a name like ``blocks.7.hook_resid_post``, which says its block, `layers` is no other.

    `ordered`: as for `parse_layers`.
    """
    named, parsed = split_transformer_lens(hook, f"{path}.hook"), parse_layers(layers, f"{path}.layers", ordered)
    if named is None:
        return normalise_hook(hook, f"{path}.hook"), parsed
    if parsed not in ("all", (named.layer,)):
        raise WeirError(f"the hook's name says block {named.layer} already; leave layers out", f"{path}.layers")
    return named.hook, (named.layer,)


def parse_dtype(dtype: object, field: str) -> str | None:
    """One of DTYPES, or None; accepts torch dtypes."""
    if dtype is None:
        return None
    name = brief(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise WeirError(f"unknown dtype {name[:40]!r}; choose from {', '.join(DTYPES)}", field)
    return name
