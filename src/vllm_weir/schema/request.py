"""`RequestSpec`, what a caller asks for, and `ResolvedSpec`, its captures at a model's sites."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.features import MAX_LENSES, Features, Lens
from vllm_weir.schema.fields import loads, parse_flag, refuse_unknown_keys
from vllm_weir.schema.gates import StopText, parse_stop_when
from vllm_weir.schema.hooks import Site, place_of
from vllm_weir.schema.intervention_base import MAX_INTERVENTIONS
from vllm_weir.schema.intervention_kinds import AnyIntervention, parse_intervention
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.named_hooks import Use
from vllm_weir.schema.positions import Positions, check_listed
from vllm_weir.schema.probes import AnyProbe, parse_probes
from vllm_weir.schema.read_outs import ReadOut
from vllm_weir.schema.replay import parse_routing
from vllm_weir.schema.routing import Routing
from vllm_weir.schema.user_hooks import Hook
from vllm_weir.schema.vectors import number

WIRE_VERSION = 1
MEASURE_DOSE = False
"""Whether relative doses are measured for requests that do not say."""
MAX_TAG = 256
MAX_CAPTURES = 62
"""With the one of vllm-lens's keys, as many selectors as `Selectors` can tell apart (63)."""
MAX_FEATURES = 64
"""Entries of `Features` in one request."""
MAX_MODULES = 64
MAX_WIRE_CHARS = 64 << 20


@dataclass(frozen=True)
class Module:
    """Interventions that the server keeps under a name; they come before the request's own.

    Attributes:
        name: as the server knows it.
        scale: factor of its additions.
        path: named by errors.
    """

    name: str
    scale: float = 1.0
    path: str = field(default="module", repr=False, compare=False)

    @classmethod
    def parse(cls, data: object, path: str) -> Module:
        """Parse a name, or ``{"name", "scale"}``."""
        if isinstance(data, Module):
            return data
        if isinstance(data, str):
            data = {"name": data}
        if not isinstance(data, Mapping):
            raise WeirError("a module is its name, or {name, scale}", path)
        refuse_unknown_keys(data, ("name", "scale"), path)
        name = data.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise WeirError("a name is a string of 1 to 256 characters", f"{path}.name")
        return cls(name, number(data.get("scale", 1.0), f"{path}.scale"), path)

    def to_json(self) -> str | dict[str, Any]:
        return self.name if self.scale == 1 else {"name": self.name, "scale": self.scale}


class WireForm(dict):
    """Plain JSON data with a fast deep copy, since vLLM copies a request's params deeply."""

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        try:
            return plain_copy(self)
        except RecursionError:  # it contains itself, which admission refuses
            return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[type, tuple]:
        return dict, (dict(self),)


def plain_copy(value: Any) -> Any:
    """Copy deeply; fast for plain data, since strings and numbers need no copying."""
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
"""Types whose values need no copying."""


def parse_captures(captures: object, path: str) -> tuple[Capture, ...]:
    """Parse one Capture, its wire form, or a list of either."""
    if isinstance(captures, (Capture, Mapping)):
        captures = [captures]
    if captures is None:
        captures = ()
    if isinstance(captures, (str, bytes)) or not isinstance(captures, Sequence):
        raise WeirError(f"expected a list of captures, got {type(captures).__name__}", path)
    if len(captures) > MAX_CAPTURES:
        raise WeirError(f"{len(captures)} captures in one request, more than the limit of {MAX_CAPTURES}", path)
    return tuple(Capture.from_json(c, f"{path}[{i}]") for i, c in enumerate(captures))


def parse_interventions(interventions: object, path: str) -> tuple[AnyIntervention, ...]:
    """Parse one Intervention, its wire form, or a list of either."""
    if isinstance(interventions, (AnyIntervention, Mapping)):
        interventions = [interventions]
    if interventions is None:
        interventions = ()
    if isinstance(interventions, (str, bytes)) or not isinstance(interventions, Sequence):
        raise WeirError(f"expected a list of interventions, got {type(interventions).__name__}", path)
    if len(interventions) > MAX_INTERVENTIONS:
        raise WeirError(
            f"{len(interventions)} interventions in one request, more than the limit of {MAX_INTERVENTIONS}", path
        )
    return tuple(parse_intervention(one, f"{path}[{i}]") for i, one in enumerate(interventions))


def parse_hooks(hooks: object, path: str) -> tuple[Hook | Use, ...]:
    """Parse one `Hook` or `Use`, the wire form of a `Use`, a name, or a list of these."""
    if isinstance(hooks, (Hook, Use, Mapping, str)):
        hooks = [hooks]
    if isinstance(hooks, Sequence) and not isinstance(hooks, (str, bytes)):
        hooks = [{"name": one} if isinstance(one, str) else one for one in hooks[: MAX_INTERVENTIONS + 1]]
        hooks = [{"op": Use.op, **one} if isinstance(one, Mapping) else one for one in hooks]
    parsed = parse_interventions(hooks, path)
    for one in parsed:
        if not isinstance(one, (Hook, Use)):
            raise WeirError(f"expected a Hook or Use, got {one.op!r}, which belongs in interventions", one.path)
    return parsed  # type: ignore[return-value]


def parse_modules(modules: object, path: str) -> tuple[Module, ...]:
    """Parse a module's name, its wire form, or a list of either."""
    if isinstance(modules, (Module, Mapping, str)):
        modules = [modules]
    if modules is None:
        modules = ()
    if isinstance(modules, bytes) or not isinstance(modules, Sequence):
        raise WeirError(f"expected a list of modules, got {type(modules).__name__}", path)
    if len(modules) > MAX_MODULES:
        raise WeirError(f"{len(modules)} modules in one request, more than the limit of {MAX_MODULES}", path)
    return tuple(Module.parse(module, f"{path}[{i}]") for i, module in enumerate(modules))


def parse_features(features: object, path: str) -> tuple[Features, ...]:
    """Parse one `Features`, its wire form, or a list of either."""
    if isinstance(features, (Features, Mapping)):
        features = [features]
    if features is None:
        features = ()
    if isinstance(features, (str, bytes)) or not isinstance(features, Sequence):
        raise WeirError(f"expected a list of features, got {type(features).__name__}", path)
    if len(features) > MAX_FEATURES:
        raise WeirError(f"{len(features)} entries in one request, more than the limit of {MAX_FEATURES}", path)
    parsed = tuple(_at(Features.from_json(one, f"{path}[{i}]"), f"{path}[{i}]") for i, one in enumerate(features))
    names: set[str] = set()
    for one in parsed:
        if one.name in names:
            raise WeirError(f"{one.name!r} is asked for twice; send separate requests", f"{one.path}.name")
        names.add(one.name)
    return parsed


def _at(features: Features, path: str) -> Features:
    return features if features.path == path else replace(features, path=path)


def parse_lenses(lens: object, path: str) -> tuple[Lens, ...]:
    """Parse a `Lens`, a list of them with different labels, or their wire form; None is none."""
    if lens is None:
        return ()
    if not isinstance(lens, (list, tuple)):
        return (Lens.from_json(lens, path),)
    if len(lens) > MAX_LENSES:
        raise WeirError(f"{len(lens)} lenses, more than the limit of {MAX_LENSES}; send separate requests", path)
    found: dict[str, Lens] = {}
    for i, given in enumerate(lens):
        one = Lens.from_json(given, f"{path}[{i}]")
        if one.label in found:
            raise WeirError(
                f"two lenses are called {brief(one.label)!r}; read them with separate requests, or name fitted ones "
                "(weir.load_lens)",
                f"{path}[{i}]",
            )
        found[one.label] = replace(one, at=f"{path}[{i}]")
    return tuple(found.values())


def parse_tag(tag: object, path: str) -> str:
    """Return a request's tag; raise WeirError if it is no text, or a long one, or cannot be printed."""
    if not isinstance(tag, str) or len(tag) > MAX_TAG or not tag.isprintable():
        raise WeirError(f"a tag is a printable text of at most {MAX_TAG} characters, got {brief(tag)!r}", path)
    return tag


def _written(value: Any) -> Any:
    """Return the wire form of a field: of a tuple, that of each entry."""
    if not isinstance(value, tuple):
        return value
    return [one.to_json() if hasattr(one, "to_json") else str(one) for one in value]


def _written_lenses(lenses: tuple[Lens, ...]) -> Any:
    return lenses[0].to_json() if len(lenses) == 1 else _written(lenses)


def _asked(
    parse: Callable[[Any, str], Any], default: Any = (), write: Callable[[Any], Any] = _written, always: bool = False
) -> Any:
    """Return a field of `RequestSpec` that travels.

    Args:
        parse: (value in any public form, field that errors name) -> value, or raises WeirError.
        default: what is not written.
        write: value -> JSON data.
        always: whether the default is written, too.
    """
    return field(default=default, metadata={"parse": parse, "write": write, "always": always})


@dataclass(frozen=True)
class RequestSpec:
    """What one request asks of Weir. Each field says how it is read and written; nothing else knows all of them.

    Attributes:
        capture: the rows that it wants back.
        interventions: what it changes, in order.
        modules: interventions kept by the server, applied before its own.
        features: the features of sparse autoencoders that it wants back.
        lens: the lenses whose next-token distributions inside the model it wants back.
        probes: what scores its rows; a text is the name of a registered one.
        stop_when: rules about the scores, any of which ends generation.
        dose: whether the relative doses of its interventions are measured.
        hooks: functions that are called after the interventions: `Hook` and `Use`.
        tag: what its receipt says again.
        routing: the experts that the model's routers choose, or have to (`Replay`); None if they are not wanted.
        stacked: that of its captures whose blocks also come as one tensor; it does not travel.
        qk: of `q_rot`: whose queries, keys and facts come as vllm-lens has them; it does not travel.
        last_hooks: functions that are called after those of every request; they do not travel.
    """

    capture: tuple[Capture, ...] = _asked(parse_captures, always=True)
    interventions: tuple[AnyIntervention, ...] = _asked(parse_interventions, always=True)
    modules: tuple[Module, ...] = _asked(parse_modules)
    features: tuple[Features, ...] = _asked(parse_features)
    lens: tuple[Lens, ...] = _asked(parse_lenses, write=_written_lenses)
    probes: tuple[AnyProbe | str, ...] = _asked(parse_probes)
    stop_when: tuple[StopText, ...] = _asked(parse_stop_when)
    dose: bool = _asked(parse_flag, MEASURE_DOSE)
    hooks: tuple[Hook | Use, ...] = _asked(parse_hooks)
    tag: str = _asked(parse_tag, "")
    routing: Routing | None = _asked(parse_routing, None, methodcaller("to_json"))  # noqa: RUF009 - a field
    stacked: Capture | None = None
    qk: Capture | None = None
    last_hooks: tuple[Hook, ...] = ()

    @classmethod
    def carried_by(cls, extras: Mapping[str, Any]) -> RequestSpec:
        """Parse what params carry under Weir's key; nothing is asked where there is none."""
        carried = extras.get(WIRE_KEY)
        return cls() if carried is None else cls.parse(carried)

    @classmethod
    def parse(cls, data: object, path: str = WIRE_KEY) -> RequestSpec:
        """Parse the wire form: a mapping, or JSON text, which ``vllm_xargs`` can carry."""
        if isinstance(data, RequestSpec):
            return data
        is_text = isinstance(data, (str, bytes))
        if isinstance(data, (str, bytes)):
            data = _loads(data, path)
        if not isinstance(data, Mapping):
            raise WeirError(f"expected an object, got {type(data).__name__}", path)
        refuse_unknown_keys(data, WIRE_FIELDS, path)
        version = data.get("v")
        if version != WIRE_VERSION or isinstance(version, bool):
            problem = "missing" if version is None else f"got {brief(version)}"
            raise WeirError(f'{problem}; this Weir speaks version {WIRE_VERSION}: "v": {WIRE_VERSION}', f"{path}.v")
        check_listed(_selectors(data))
        spec = cls(**{name: how["parse"](data[name], name) for name, how in _FIELDS.items() if name in data})
        if is_text:
            spec.refuse_paths()
        return spec

    def refuse_paths(self) -> None:
        """Raise WeirError if it sets up a sink or gives a path: text may come from any client of a server."""
        for capture in self.capture:
            if capture.sink.own is not None:
                raise WeirError(
                    "a request given as text may only name one of the engine's sinks, not set up its own",
                    f"{capture.path}.sink",
                )
        for one in self.lens:
            if one.path is not None:
                raise WeirError("a request given as text names a fitted lens, and gives no path", f"{one.at}.path")

    def asking(self, **given: Any) -> RequestSpec:
        """Return a copy of which the fields that are given and not None are replaced, in any of their public forms.

        Raises:
            WeirError: naming the field that is wrong.
        """
        return replace(
            self, **{name: _FIELDS[name]["parse"](value, name) for name, value in given.items() if value is not None}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        out = WireForm({"v": WIRE_VERSION})
        for name, how in _FIELDS.items():
            value = getattr(self, name)
            if how["always"] or value != how["default"]:
                out[name] = how["write"](value)
        return out


_FIELDS = {one.name: {**one.metadata, "default": one.default} for one in fields(RequestSpec) if one.metadata}
"""The fields of a request that travel, in the order in which they are read -> how."""
WIRE_FIELDS = ("v", *_FIELDS)
"""Keys of a request's wire form."""
NOT_RESOLVED = ("tag",)
"""Fields that say nothing about rows: requests that differ in no other have one admission."""


def tag_in(extras: Mapping[str, Any]) -> str:
    """Return the tag of what params carry under Weir's key.

    Raises:
        WeirError: if it is wrong.
    """
    carried = extras.get(WIRE_KEY)
    return (
        parse_tag(carried.get("tag", ""), "tag") if isinstance(carried, Mapping) else RequestSpec.carried_by(extras).tag
    )


def _selectors(data: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield (field, selector) of what a wire form has positions for."""
    for name in ("capture", "interventions", "hooks", "features", "lens", "probes"):
        given = data.get(name)
        for one in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(one, Mapping):
                yield name, one.get("positions")


def _loads(text: str | bytes, path: str) -> Any:
    if len(text) > MAX_WIRE_CHARS:
        raise WeirError(f"{len(text)} characters, more than the limit of {MAX_WIRE_CHARS}", path)
    return loads(text, path)


def selected(selectors: Sequence[Positions], prompt_len: int, token_ids: np.ndarray) -> np.ndarray:
    """Return the positions that any of `selectors` chooses, ascending.

    Args:
        selectors: of a request.
        prompt_len: tokens of the prompt.
        token_ids: int array [n], the tokens at positions 0..n-1; only these are considered.
    """
    positions = np.arange(len(token_ids))
    if any(s.kind == "all" for s in selectors):
        return positions
    chosen = np.zeros(len(token_ids), bool)
    for selector in selectors:
        chosen |= selector.mask(positions, prompt_len, token_ids)
    return np.flatnonzero(chosen)


class SiteRequest(NamedTuple):
    """A site at the positions that a capture selects.

    Attributes:
        site: known to be tapped.
        positions: selector.
        before: whether rows from before the request's interventions are wanted.
        ring_rows: rows of a worker's ring that a row takes; known in the caller's process only.
    """

    site: Site
    positions: Positions
    before: bool
    ring_rows: int = 1


@dataclass(frozen=True)
class Postprocess:
    """What happens to a request's rows on the worker.

    They are reduced, projected, both, or compressed, or something is read off them; or they stay there.

    Attributes:
        reduce: one of `vllm_weir.schema.capture.REDUCTIONS`, or None.
        directions: digests of the directions; empty for none.
        compression: how rows are compressed, or None.
        read_outs: what is read off the rows; empty for nothing.
        with_rows: whether the rows are sent, too, where something is read off them.
        kept: key of the workers' collection in which the rows stay; "" if they leave the workers.
    """

    reduce: str | None
    directions: tuple[str, ...] = ()
    compression: Compression | None = None
    read_outs: tuple[ReadOut, ...] = ()
    kept: str = ""
    with_rows: bool = False

    @property
    def folds(self) -> bool:
        """Whether the worker reduces; dot products are reduced when the output is read."""
        return self.reduce is not None and not self.directions


def cell_rows(columns: int, values: int, row_bytes: int) -> int:
    """Return how many rows of `row_bytes` bytes hold float32 [columns, values]."""
    return -(-columns * values * 4 // row_bytes)


def _last(selector: Positions, prompt_len: int, prompt_token_ids: Sequence[int] | None) -> int | None:
    """Return the last position of the prompt that a selector chooses, or None."""
    bounds = selector.bounds(prompt_len)
    if bounds is not None:
        end = min(bounds[1], prompt_len)
        return end - 1 if bounds[0] < end else None
    ids = np.asarray(prompt_token_ids) if selector.needs_token_ids and prompt_token_ids is not None else None
    chosen = np.flatnonzero(selector.mask(np.arange(prompt_len), prompt_len, ids))
    return int(chosen[-1]) if len(chosen) else None


@dataclass(frozen=True)
class ResolvedSpec:
    """Captures resolved against a model: one entry for each site and selector.

    Attributes:
        site_requests: every site is known to be tapped.
        postprocess: of all their rows; None sends the rows as they are.
    """

    site_requests: tuple[SiteRequest, ...]
    postprocess: Postprocess | None = None

    def cell(self, d_model: int, itemsize: int) -> int:
        """Return how many rows of the ring hold the reduction of a group; 0 if there is none.

        Args:
            d_model: width of the stream.
            itemsize: bytes of a value of the model's dtype.
        """
        if self.postprocess is None or not self.postprocess.folds:
            return 0
        return cell_rows(self.width, d_model, d_model * itemsize)

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Distinct sites, in the order in which a token meets them."""
        return tuple(sorted({request.site for request in self.site_requests}, key=place_of))

    @functools.cached_property
    def by_positions(self) -> tuple[tuple[tuple[Site, ...], tuple[Positions, ...]], ...]:
        """The distinct sites grouped by their selectors: (sites, selectors)."""
        selectors: dict[Site, dict[Positions, None]] = {}
        for request in self.site_requests:
            selectors.setdefault(request.site, {})[request.positions] = None
        groups: dict[frozenset[Positions], list[Site]] = {}
        for site, chosen in selectors.items():
            groups.setdefault(frozenset(chosen), []).append(site)
        return tuple((tuple(sites), tuple(chosen)) for chosen, sites in groups.items())

    @functools.cached_property
    def positions(self) -> tuple[Positions, ...]:
        """The distinct selectors."""
        return tuple(dict.fromkeys(request.positions for request in self.site_requests))

    @functools.cached_property
    def width(self) -> int:
        """The most rows of the ring that one token can take."""
        return sum({(r.site, r.before): r.ring_rows for r in self.site_requests}.values())

    def first(self, prompt_len: int, prompt_token_ids: Sequence[int] | None) -> int | None:
        """Return the first wanted position, or None. A prefix-cache hit must not pass it."""
        firsts = [selector.first(prompt_len, prompt_token_ids) for selector in self.positions]
        return min([first for first in firsts if first is not None], default=None)

    def last(self, prompt_len: int, prompt_token_ids: Sequence[int] | None) -> int | None:
        """Return the last wanted position of the prompt, or None."""
        lasts = [_last(selector, prompt_len, prompt_token_ids) for selector in self.positions]
        return max([last for last in lasts if last is not None], default=None)

    def tokens(self, prompt_len: int) -> int | None:
        """Return how many tokens give rows that leave the device; None if there is no bound."""
        if self.postprocess is not None and self.postprocess.folds:
            # Reductions of prompts leave the device once, at the end.
            steady = (selector.steady(prompt_len) for selector in self.positions)
            in_prompt = (s is not None and not s[1] and s[0] <= prompt_len for s in steady)
            return 0 if all(in_prompt) else None
        if any(selector.kind not in ("last_prompt", "list") for selector in self.positions):
            return None
        return sum(selector.count() or 0 for selector in self.positions)

    @functools.cached_property
    def wire(self) -> list[list[Any]]:
        """The wire form for the workers: [[hook, layers, positions, before], ...]."""
        groups: dict[tuple[str, Positions, bool], list[int]] = {}
        for site, positions, before, _ in self.site_requests:
            groups.setdefault((site.hook, positions, before), []).append(site.layer)
        return [[hook, layers, positions.to_json(), before] for (hook, positions, before), layers in groups.items()]

    @property
    def postprocess_wire(self) -> list[Any] | None:
        """The wire form of `postprocess`: [reduce, directions, compression, read_outs, kept, with_rows]."""
        if self.postprocess is None:
            return None
        compression = self.postprocess.compression
        return [
            self.postprocess.reduce,
            list(self.postprocess.directions),
            None if compression is None else compression.to_json(),
            [read_out.to_wire() for read_out in self.postprocess.read_outs],
            self.postprocess.kept,
            self.postprocess.with_rows,
        ]

    @classmethod
    def from_wire(cls, data: list[list[Any]], postprocess: list[Any] | None = None) -> ResolvedSpec:
        """Parse what `wire` and `postprocess_wire` are."""
        site_requests = tuple(
            SiteRequest(Site(hook, layer), positions, before)
            for hook, layers, given, before in data
            for positions in (Positions.parse(given),)
            for layer in layers
        )
        if postprocess is None:
            return cls(site_requests)
        reduce, directions, compression, read_outs, kept, with_rows = postprocess
        parsed = None if compression is None else Compression.parse(compression, "compress")
        read = tuple(map(ReadOut.from_wire, read_outs))
        return cls(site_requests, Postprocess(reduce, tuple(directions), parsed, read, kept, with_rows))
