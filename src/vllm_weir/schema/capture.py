"""`Capture`: which rows a request wants back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.fields import parse_flag, plain, refuse_unknown_keys, right_words, set_fields
from vllm_weir.schema.hooks import MODEL_HOOKS, HookPoint, Site, layers_of, normalise_hook, split_transformer_lens
from vllm_weir.schema.positions import MAX_LIST, Positions
from vllm_weir.schema.rows import WHOLE, RowPart, RowShape
from vllm_weir.schema.sinks import MEMORY, Keep, Sink, check_sink, parse_keep
from vllm_weir.schema.vectors import Vector

DTYPES = ("float32", "float16", "bfloat16")
Reduction = Literal["last", "mean", "max"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
MAX_DIRECTIONS = 256
WIRE_FIELDS = (
    "before", "compress", "dtype", "heads", "hook", "keep", "layers", "neurons", "positions", "project", "reduce",
    "sink",
)  # fmt: skip


@right_words
@dataclass(frozen=True)
class Capture:
    """Rows of a hook point to return with a request's output.

    Args:
        hook: hook point, e.g. ``"resid_post"``; aliases and ``"blocks.7.hook_resid_post"`` (which
            also sets `layers`) are accepted.
        layers: ``"all"``, a block index, or a list of them; blocks count from 0.
        positions: selector, see docs/reference/selectors.md; ``"all"`` gives P+G-1 rows for P
            prompt and G generated tokens.
        before: return rows as they are before the request's own interventions at that site
            (default: after them).
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"`` (or the torch dtype) of the returned
            rows; None keeps the model's.
        compress: ``"rp8"``, ``"full8"``, ``"topk8"``, ``"fp16"``, ``"fp8"``, ``"none"`` or
            ``{"method", "k", "seed"}``: rows leave the device compressed, see
            docs/reference/file-formats.md, and are decoded to float32, or to `dtype`. All captures
            for one sink compress alike, and none of them reduces or projects.
        sink: ``"memory"``: the rows come back on the output; otherwise the name of one of the
            engine's sinks, or ``{consumer: options}``, e.g.
            ``{"filesystem": {"url": "/data/rows", "layout": "sharded"}}``.
        keep: ``"always"``, or ``"marked"``: the sink gets the rows only if `weir.mark` asks for it
            in time.
        reduce: ``"last"``, ``"mean"`` or ``"max"`` (elementwise) over the selected positions: one
            row a site instead of one for each position, computed on the worker if all captures of
            the request agree. Captures for one sink reduce alike, over the same positions; for
            memory, those of one site do.
        project: directions [m, d_model] (or [d_model], or a registered name): returns the rows' dot
            products with these, float32 [rows, m] (probe scores), instead of the rows. Captures for
            one sink project alike; for memory, those of one site.

    Raises:
        WeirError: for anything else, naming the field.
    """

    hook: HookPoint = "resid_post"
    layers: Any = "all"
    positions: Any = "all"
    before: bool = False
    dtype: Any = None
    compress: Any = None
    sink: Any = MEMORY
    keep: Keep = "always"
    reduce: Reduction | None = None
    project: Any = None
    path: str = field(default="capture", repr=False, compare=False)
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        path = self.path
        hook, layers = parse_place(self.hook, self.layers, path)
        part = RowPart.parse(hook, self.heads, self.neurons, path)
        set_fields(
            self,
            hook=hook,
            layers=layers,
            heads=part.heads,
            neurons=part.neurons,
            positions=Positions.parse(self.positions, f"{path}.positions"),
            before=parse_flag(self.before, "before", path),
            dtype=parse_dtype(self.dtype, f"{path}.dtype"),
            reduce=_parse_reduction(self.reduce, f"{path}.reduce"),
            project=_parse_directions(self.project, f"{path}.project"),
            compress=_parse_compression(self.compress, f"{path}.compress"),
            sink=Sink.parse(self.sink, f"{path}.sink"),
            keep=parse_keep(self.keep, f"{path}.keep"),
        )
        check_sink(self.sink, hook, f"{path}.sink")
        if self.compress is not None and (self.reduce is not None or self.project is not None):
            raise WeirError(
                "a capture that reduces or projects cannot be compressed as well; leave compress out",
                f"{path}.compress",
            )
        if self.compress is not None and part != WHOLE:
            picked = "heads" if part.neurons is None else "neurons"
            raise WeirError(
                f"rows are compressed whole; leave compress out, or {picked}",
                f"{path}.compress",
            )
        if self.keep != "always" and self.sink.memory:
            raise WeirError("rows that come back on the output are not marked; name a sink", f"{path}.keep")

    @classmethod
    def from_json(cls, data: object, path: str = "capture") -> Capture:
        """Parse the wire form; raise WeirError for unknown keys."""
        if isinstance(data, Capture):
            return data
        if not isinstance(data, dict):
            raise WeirError(f"a capture is an object, got {type(data).__name__}", path)
        refuse_unknown_keys(data, WIRE_FIELDS, path)
        return cls(**data, path=path)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
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
        return out | self.part.to_json()

    @property
    def part(self) -> RowPart:
        """The heads or neurons that are picked."""
        return RowPart(self.heads, self.neurons)

    def check_shape(self, shape: RowShape) -> None:
        """Raise WeirError, naming the field, if rows of this shape lack a head or neuron that is picked."""
        self.part.check(shape, self.hook, self.path)

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the block indices for `num_layers` blocks; raise WeirError if one is missing."""
        return layers_of(self.hook, self.layers, num_layers, f"{self.path}.layers")


def parse_layers(layers: object, field: str, ordered: bool = False) -> Literal["all"] | tuple[int, ...]:
    """Parse layers: ``"all"``, or a sorted tuple of distinct block indices, at least one.

    Args:
        layers: ``"all"``, an int, or several in a list, range, array or tensor.
        field: named by errors.
        ordered: keep the order given, and refuse duplicates.
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
    # A list of layers has the form of a list of positions.
    listed = Positions.parse(layers if several else [layers], field)
    if listed.kind != "list":
        raise WeirError("layers is 'all', an int or a list of ints", field)
    numbers = listed.numbers
    for layer in numbers:
        if layer < 0:
            raise WeirError(f"block {layer} does not exist: blocks count from 0", field)
    distinct = set(numbers)
    if not ordered:
        return tuple(sorted(distinct))
    if len(distinct) < len(numbers):
        raise WeirError("a block is named twice, and per_layer gives each its own vector", field)
    return numbers


def parse_place(
    hook: str, layers: object, path: str, ordered: bool = False
) -> tuple[str, Literal["all"] | tuple[int, ...]]:
    """Parse a hook point and its layers.

    A name like ``blocks.7.hook_resid_post`` says its block; `layers` may then repeat it or be
    ``"all"``.

    Args:
        hook: hook point, an alias, or TransformerLens's name of one.
        layers: as for `parse_layers`.
        path: of the capture or intervention; errors name ``path.hook`` or ``path.layers``.
        ordered: as for `parse_layers`.
    """
    site, parsed = split_transformer_lens(hook, f"{path}.hook"), parse_layers(layers, f"{path}.layers", ordered)
    if site is None:
        return normalise_hook(hook, f"{path}.hook"), parsed
    if parsed not in ("all", (site.layer,)):
        raise WeirError(f"the hook's name says block {site.layer} already; leave layers out", f"{path}.layers")
    return site.hook, (site.layer,)


def parse_dtype(dtype: object, field: str) -> str | None:
    """Parse a dtype: one of `DTYPES`, the torch dtype of that name, or None."""
    if dtype is None:
        return None
    name = brief(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise WeirError(f"unknown dtype {name[:40]!r}; choose from {', '.join(DTYPES)}", field)
    return name


def _parse_reduction(reduce: object, field: str) -> Any:
    if reduce is not None and reduce not in REDUCTIONS:
        raise WeirError(f"unknown reduction {brief(reduce)!r}; choose from {', '.join(REDUCTIONS)}", field)
    return reduce


def _parse_directions(project: object, field: str) -> Vector | None:
    if project is None:
        return None
    vector = Vector.parse(project, field)
    if vector.array is not None and vector.array.ndim == 2 and len(vector.array) > MAX_DIRECTIONS:
        raise WeirError(f"{len(vector.array)} directions, more than the limit of {MAX_DIRECTIONS}", field)
    return vector


def _parse_compression(compress: object, field: str) -> Compression | None:
    if compress is None:
        return None
    compression = Compression.parse(compress, field)
    return None if compression.method == "none" else compression


ROW_NOTES_KEY = "capture"
"""The metadata's key for these notes."""
MOST_NUMBERS = 64
"""Of longer lists only the length is noted, to keep metadata small."""


def describe_rows(capture: Capture, directions: int = 0) -> dict[str, Any] | None:
    """Return a note on a capture's rows; None if they are the plain rows of all positions.

    A note has the form of `Capture.to_json`, except that ``project`` is the number of directions,
    and ``positions``, ``heads`` and ``neurons`` that list more than `MOST_NUMBERS` are a short text.
    """
    note: dict[str, Any] = {}
    if capture.before:
        note["before"] = True
    if capture.reduce is not None:
        note["reduce"] = capture.reduce
    if directions:
        note["project"] = directions
    for name, picked in capture.part.to_json().items():
        note[name] = picked if len(picked) <= MOST_NUMBERS else f"{len(picked)} listed ones"
    # Plain rows carry their positions, a reduced one does not: "prompt" must be noted then.
    unremarkable = ("all",) if capture.reduce is not None else ("all", "prompt")
    if capture.positions.kind not in unremarkable:
        note["positions"] = _short(capture.positions)
    if not note:
        return None
    return {"hook": capture.hook, "layers": "all" if capture.layers == "all" else list(capture.layers), **note}


def entries_of(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the notes in a request's metadata, without entries that are not Weir's."""
    entries = metadata.get(ROW_NOTES_KEY)
    if not isinstance(entries, list):
        return []
    return [e for e in entries if isinstance(e, dict) and isinstance(e.get("hook"), str) and _has_layers(e)]


def is_about(entry: dict[str, Any], site: Site) -> bool:
    """Return whether a note is about this site's rows."""
    if entry["hook"] != site.hook:
        return False
    return site.hook in MODEL_HOOKS or entry["layers"] == "all" or site.layer in entry["layers"]


def in_words(entry: dict[str, Any]) -> str:
    """Describe a note in words: ``resid_post[3]: one row a request, reduced (mean) over positions 'prompt'``."""
    positions, reduce, directions = entry.get("positions", "all"), entry.get("reduce"), entry.get("project")
    parts = []
    if reduce:
        parts.append(f"one row a request, reduced ({reduce}) over positions {positions!r}")
    elif positions != "all":
        parts.append(f"only positions {positions!r}")
    if directions:
        parts.append(f"dot products with {directions} direction{'s' if directions != 1 else ''} instead of rows")
    for name in ("heads", "neurons"):
        if picked := entry.get(name):
            parts.append(f"only {name} {', '.join(map(str, picked)) if isinstance(picked, list) else picked}")
    if entry.get("before"):
        parts.append("from before the request's interventions")
    return f"{_place(entry)}: {'; '.join(parts)}"


def _short(positions: Positions) -> Any:
    if len(positions.values) <= MOST_NUMBERS:
        return positions.to_json()
    if not positions.needs_token_ids:
        return f"{len(positions.values)} listed ones"
    return f"{'all but ' if positions.kind == 'not_token_ids' else ''}{len(positions.values)} token ids"


def _has_layers(entry: dict[str, Any]) -> bool:
    layers = entry.get("layers")
    return layers == "all" or (isinstance(layers, list) and bool(layers))


def _place(entry: dict[str, Any]) -> str:
    if entry["hook"] in MODEL_HOOKS:
        return str(entry["hook"])
    return f"{entry['hook']}[{'all' if entry['layers'] == 'all' else ', '.join(map(str, entry['layers']))}]"
