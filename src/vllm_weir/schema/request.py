"""All that a request asks for, and its two wire forms: what the caller sends and what the engine receives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import Site, place_of
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import parse_intervention
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.vectors import number

WIRE_VERSION = 1
MAX_CAPTURES = 62  # with vllm-lens's key 63 selectors: the planner keeps one bit of an int64 for each
MAX_INTERVENTIONS = 1024
MAX_MODULES = 64
MAX_WIRE_CHARS = 64 << 20


@dataclass(frozen=True)
class Module:
    """Interventions that the server keeps under a name; they come before the request's own.

    Attributes:
        scale: factor of its additions.
    """

    name: str
    scale: float = 1.0
    path: str = field(default="module", repr=False, compare=False)

    @classmethod
    def parse(cls, data: object, path: str) -> Module:
        """From a name, or ``{"name", "scale"}``."""
        if isinstance(data, Module):
            return data
        if isinstance(data, str):
            data = {"name": data}
        if not isinstance(data, Mapping):
            raise WeirError("a module is its name, or {name, scale}", path)
        for key in data:
            if key not in ("name", "scale"):
                raise WeirError("unknown key; known are name, scale", f"{path}.{brief(key)}")
        name = data.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise WeirError("a name is a string of 1 to 256 characters", f"{path}.name")
        return cls(name, number(data.get("scale", 1.0), f"{path}.scale"), path)


class WireForm(dict):
    """Plain JSON data. vLLM makes a deep copy of it for each request: this one knows that strings need no copying."""

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        try:
            return plain_copy(self)
        except RecursionError:  # it holds itself: admission says what is wrong with it
            return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[type, tuple]:
        return dict, (dict(self),)


def plain_copy(value: Any) -> Any:
    """A deep copy, which is quick for plain data."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list:
        return [plain_copy(v) for v in value]
    if kind is dict or kind is WireForm:
        return {key: plain_copy(v) for key, v in value.items()}
    if kind is set:
        return set(map(plain_copy, value))
    return copy.deepcopy(value)


ATOMS = frozenset({str, int, float, bool, type(None)})
"""Types whose values are their own copies."""


@dataclass(frozen=True)
class RequestSpec:
    """What one request asks of Weir."""

    capture: tuple[Capture, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    modules: tuple[Module, ...] = ()

    @classmethod
    def parse(cls, data: object, path: str = WIRE_KEY) -> RequestSpec:
        """From the wire form: a mapping, or the same as a JSON string (which is what ``vllm_xargs`` can carry)."""
        if isinstance(data, RequestSpec):
            return data
        by_text = isinstance(data, (str, bytes))
        if isinstance(data, (str, bytes)):
            data = _loads(data, path)
        if not isinstance(data, Mapping):
            raise WeirError(f"expected an object, got {type(data).__name__}", path)
        for key in data:
            if key not in ("v", "capture", "interventions", "modules"):
                raise WeirError("unknown key; known are v, capture, interventions, modules", f"{path}.{brief(key)}")
        version = data.get("v")
        if version != WIRE_VERSION or isinstance(version, bool):
            what = "missing" if version is None else f"got {brief(version)}"
            raise WeirError(f'{what}; this Weir speaks version {WIRE_VERSION}: "v": {WIRE_VERSION}', f"{path}.v")
        captures = parse_captures(data.get("capture", ()), "capture")
        for capture in captures:
            if by_text and capture.sink.own is not None:
                # A request as text may come from anyone who reaches the server: it does not choose where files go.
                raise WeirError(
                    "a request given as text names one of the engine's sinks and does not set up its own",
                    f"{capture.path}.sink",
                )
        interventions = parse_interventions(data.get("interventions", ()), "interventions")
        return cls(captures, interventions, parse_modules(data.get("modules", ()), "modules"))

    def to_json(self) -> dict[str, Any]:
        """The wire form."""
        out = WireForm(
            {
                "v": WIRE_VERSION,
                "capture": [c.to_json() for c in self.capture],
                "interventions": [i.to_json() for i in self.interventions],
            }
        )
        if self.modules:
            out["modules"] = [{"name": m.name, "scale": m.scale} for m in self.modules]
        return out


def parse_captures(captures: object, path: str) -> tuple[Capture, ...]:
    """One Capture, its wire form, or a list of either."""
    if isinstance(captures, (Capture, Mapping)):
        captures = [captures]
    if captures is None:
        captures = ()
    if isinstance(captures, (str, bytes)) or not isinstance(captures, Sequence):
        raise WeirError(f"expected a list of captures, got {type(captures).__name__}", path)
    if len(captures) > MAX_CAPTURES:
        raise WeirError(f"{len(captures)} captures in one request, more than the limit of {MAX_CAPTURES}", path)
    return tuple(Capture.from_json(c, f"{path}[{i}]") for i, c in enumerate(captures))


def parse_interventions(interventions: object, path: str) -> tuple[Intervention, ...]:
    """One Intervention, its wire form, or a list of either."""
    if isinstance(interventions, (Intervention, Mapping)):
        interventions = [interventions]
    if interventions is None:
        interventions = ()
    if isinstance(interventions, (str, bytes)) or not isinstance(interventions, Sequence):
        raise WeirError(f"expected a list of interventions, got {type(interventions).__name__}", path)
    if len(interventions) > MAX_INTERVENTIONS:
        raise WeirError(
            f"{len(interventions)} interventions in one request, more than the limit of {MAX_INTERVENTIONS}", path
        )
    return tuple(parse_intervention(x, f"{path}[{i}]") for i, x in enumerate(interventions))


def parse_modules(modules: object, path: str) -> tuple[Module, ...]:
    """A module's name, its wire form, or a list of either."""
    if isinstance(modules, (Module, Mapping, str)):
        modules = [modules]
    if modules is None:
        modules = ()
    if isinstance(modules, bytes) or not isinstance(modules, Sequence):
        raise WeirError(f"expected a list of modules, got {type(modules).__name__}", path)
    if len(modules) > MAX_MODULES:
        raise WeirError(f"{len(modules)} modules in one request, more than the limit of {MAX_MODULES}", path)
    return tuple(Module.parse(x, f"{path}[{i}]") for i, x in enumerate(modules))


def _loads(text: str | bytes, path: str) -> Any:
    if len(text) > MAX_WIRE_CHARS:
        raise WeirError(f"{len(text)} characters, more than the limit of {MAX_WIRE_CHARS}", path)
    return loads(text, path)


def selected(selectors: Sequence[Positions], prompt_len: int, token_ids: np.ndarray) -> np.ndarray:
    """Positions that any of `selectors` chooses among those of `token_ids` (the tokens at 0..n-1), ascending."""
    every = np.arange(len(token_ids))
    if any(s.kind == "all" for s in selectors):
        return every
    chosen = np.zeros(len(token_ids), bool)
    for selector in selectors:
        chosen |= selector.mask(every, prompt_len, token_ids)
    return np.flatnonzero(chosen)


class SiteRequest(NamedTuple):
    """One site at the positions one capture selects, resolved against a model."""

    site: Site
    positions: Positions
    before: bool


@dataclass(frozen=True)
class Postprocess:
    """What a request wants instead of its rows: a reduction of them, their products with directions, or both; or the
    rows compressed.

    Attributes:
        reduce: one of `vllm_weir.schema.capture.REDUCTIONS`, or None.
        directions: digests of the directions; empty for none.
        compression: how rows are compressed, or None.
    """

    reduce: str | None
    directions: tuple[str, ...] = ()
    compression: Compression | None = None

    @property
    def folds(self) -> bool:
        """Whether rows themselves are reduced; products are few, and reduced when they are handed out."""
        return self.reduce is not None and not self.directions


def cell_rows(columns: int, values: int, row_bytes: int) -> int:
    """Rows of `row_bytes` bytes that hold float32 [columns, values]."""
    return -(-columns * values * 4 // row_bytes)


def _last(selector: Positions, prompt_len: int, prompt_token_ids: Sequence[int] | None) -> int | None:
    """The last position of the prompt that a selector chooses, or None."""
    bounds = selector.bounds(prompt_len)
    if bounds is not None:
        end = min(bounds[1], prompt_len)
        return end - 1 if bounds[0] < end else None
    ids = np.asarray(prompt_token_ids) if selector.needs_token_ids and prompt_token_ids is not None else None
    chosen = np.flatnonzero(selector.mask(np.arange(prompt_len), prompt_len, ids))
    return int(chosen[-1]) if len(chosen) else None


@dataclass(frozen=True)
class ResolvedSpec:
    """A RequestSpec resolved against a model: every layer named, every site known to be tapped."""

    site_requests: tuple[SiteRequest, ...]
    postprocess: Postprocess | None = None

    def cell(self, d_model: int, itemsize: int) -> int:
        """Rows of the ring that hold what a group of rows is reduced to; 0 if none are."""
        if self.postprocess is None or not self.postprocess.folds:
            return 0
        return cell_rows(self.width, d_model, d_model * itemsize)

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Distinct sites, in the order in which a token meets them."""
        return tuple(sorted({w.site for w in self.site_requests}, key=place_of))

    @functools.cached_property
    def by_positions(self) -> tuple[tuple[tuple[Site, ...], tuple[Positions, ...]], ...]:
        """The distinct sites, those with the same selectors together, and these selectors."""
        selectors: dict[Site, dict[Positions, None]] = {}
        for w in self.site_requests:
            selectors.setdefault(w.site, {})[w.positions] = None
        groups: dict[frozenset[Positions], list[Site]] = {}
        for site, chosen in selectors.items():
            groups.setdefault(frozenset(chosen), []).append(site)
        return tuple((tuple(sites), tuple(chosen)) for chosen, sites in groups.items())

    @functools.cached_property
    def positions(self) -> tuple[Positions, ...]:
        """The distinct selectors."""
        return tuple(dict.fromkeys(w.positions for w in self.site_requests))

    @functools.cached_property
    def width(self) -> int:
        """Rows that a token can give."""
        return len({(w.site, w.before) for w in self.site_requests})

    def first(self, prompt_len: int, prompt_token_ids: Sequence[int] | None) -> int | None:
        """The first wanted position, or None: a prefix-cache hit must not pass it."""
        starts = [s.first(prompt_len, prompt_token_ids) for s in self.positions]
        return min([s for s in starts if s is not None], default=None)

    def last(self, prompt_len: int, prompt_token_ids: Sequence[int] | None) -> int | None:
        """The last wanted position of the prompt, or None."""
        lasts = [_last(selector, prompt_len, prompt_token_ids) for selector in self.positions]
        return max([last for last in lasts if last is not None], default=None)

    def tokens(self, prompt_len: int) -> int | None:
        """How many tokens give rows that leave the device, or None if that is not bounded."""
        if self.postprocess is not None and self.postprocess.folds:
            ends = (selector.steady(prompt_len) for selector in self.positions)
            return 0 if all(end is not None and not end[1] and end[0] <= prompt_len for end in ends) else None
        if any(selector.kind not in ("last_prompt", "list") for selector in self.positions):
            return None
        return sum(selector.count() or 0 for selector in self.positions)

    @functools.cached_property
    def wire(self) -> list[list[Any]]:
        """For the workers: [hook, layers, positions, before] per distinct selector."""
        groups: dict[tuple[str, Positions, bool], list[int]] = {}
        for w in self.site_requests:
            groups.setdefault((w.site.hook, w.positions, w.before), []).append(w.site.layer)
        return [[hook, layers, positions.to_json(), before] for (hook, positions, before), layers in groups.items()]

    @property
    def postprocess_wire(self) -> list[Any] | None:
        """The treatment, for the workers."""
        if self.postprocess is None:
            return None
        compression = self.postprocess.compression
        return [
            self.postprocess.reduce,
            list(self.postprocess.directions),
            None if compression is None else compression.to_json(),
        ]

    @classmethod
    def from_wire(cls, data: list[list[Any]], postprocess: list[Any] | None = None) -> ResolvedSpec:
        """The inverse of `wire` and `postprocess_wire`."""
        return cls(
            tuple(
                SiteRequest(Site(hook, layer), Positions.parse(positions), before)
                for hook, layers, positions, before in data
                for layer in layers
            ),
            None
            if postprocess is None
            else Postprocess(
                postprocess[0],
                tuple(postprocess[1]),
                None if postprocess[2] is None else Compression.parse(postprocess[2], "compress"),
            ),
        )
