"""The plan of a sweep, and the places that it patches."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.grid import Label
from vllm_weir.experiments.metrics import DENOISE
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.schema.hooks import MODEL_HOOKS, Site, normalise_hook, place_of, refuse_read_only
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.rows import RowPart

EVERY = "all"
"""One entry for each token of the prompt."""


class Place(NamedTuple):
    """Positions of one entry: those patched in the base run, and those whose rows the source run gives.

    Both ascend, and the k-th gets the row of the k-th.
    """

    base: tuple[int, ...]
    source: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """An entry of the position axis."""

    label: Label  # on the axis
    selector: Positions  # of the positions that are patched together
    field: str  # named by errors

    def resolve(self, token_ids: Sequence[int], special_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """Return its positions in a prompt, ascending; raise WeirError if there are none, or one is outside."""
        length = len(token_ids)
        if self.selector.kind == "list":
            for value in self.selector.numbers:
                if not -length <= value < length:
                    raise WeirError(f"position {value} is outside the prompt of {length} tokens", self.field)
        selector = self.selector.with_special(special_ids)
        chosen = np.flatnonzero(selector.mask(np.arange(length), length, np.asarray(token_ids)))
        if not len(chosen):
            raise WeirError(f"selects no position of the prompt of {length} tokens", self.field)
        return tuple(chosen.tolist())


def parse_entries(positions: Any, field: str = "positions") -> tuple[Entry, ...] | None:
    """Parse the positions of a sweep; None stands for one entry for each token.

    A selector is one entry, and a list has one for each of its ints and selectors. WeirError names `field` for
    anything else, or an entry that occurs twice.
    """
    positions = plain(positions)
    if isinstance(positions, str) and positions == EVERY:
        return None
    if hasattr(positions, "tolist"):
        positions = positions.tolist()
    if isinstance(positions, (str, dict, Positions)) or is_int(positions) or not isinstance(positions, Sequence):
        return (_entry(positions, field),)
    if not len(positions):
        raise WeirError('an empty list names no position; list some, or write "all"', field)
    entries = tuple(_entry(item, f"{field}[{i}]") for i, item in enumerate(positions))
    for i, entry in enumerate(entries):
        if entry.label in [earlier.label for earlier in entries[:i]]:
            raise WeirError(f"{entry.label!r} is named twice", entry.field)
    return entries


def place_entries(
    entries: tuple[Entry, ...] | None,
    base: Sequence[int],
    source: Sequence[int],
    special_ids: Sequence[int] = (),
    field: str = "positions",
) -> tuple[Place, ...]:
    """Return the place of each entry for a pair of prompts."""
    if entries is None:
        if len(base) != len(source):
            raise WeirError(
                f"the prompts have {len(source)} and {len(base)} tokens, so their positions do not correspond; use "
                "prompts of the same length, or list positions that mean the same in both, such as -1",
                field,
            )
        return tuple(Place((i,), (i,)) for i in range(len(base)))
    places = []
    for entry in entries:
        place = Place(entry.resolve(base, special_ids), entry.resolve(source, special_ids))
        if len(place.base) != len(place.source):
            raise WeirError(
                f"selects {len(place.source)} positions of the one prompt and {len(place.base)} of the other",
                entry.field,
            )
        places.append(place)
    return tuple(places)


def _entry(item: Any, field: str) -> Entry:
    item = plain(item)
    selector = Positions.parse(item, field)
    if selector.kind == "generated":
        raise WeirError("a sweep patches positions of the prompt", field)
    if selector.kind == "modality":
        raise WeirError("the prompts of a sweep are text; choose positions by their place or token", field)
    return Entry(_label(item, selector), selector, field)


def _label(item: Any, selector: Positions) -> Label:
    if is_int(item):
        return int(item)
    written = selector.to_json()
    if isinstance(written, list):
        return ",".join(map(str, written))
    return written if isinstance(written, str) else json.dumps(written)


FREEZABLE = ("attn_out", "mlp_out")
"""What the two parts of a block add to the stream: with both held still, only the stream carries a change on."""
_INTO = {
    "attn_out": frozenset({"attn_in", "q", "k", "v", "z"}),
    "mlp_out": frozenset({"mlp_in", "router_logits", "mlp_post"}),
}
"""Hook points inside each part; a change there leaves the block through the part itself."""


@dataclass(frozen=True)
class Receiver:
    """The end of a path."""

    site: Site  # where it is
    heads: tuple[int, ...] | None = None  # the heads that receive; None for the whole row

    @classmethod
    def parse(cls, to: Any, field: str = "to") -> Receiver:
        """Parse ``(hook, layer)`` or ``(hook, layer, heads)``; WeirError for other forms, or what cannot be changed."""
        if isinstance(to, str) and to in MODEL_HOOKS:
            to = (to, 0)
        if isinstance(to, str) or not isinstance(to, Sequence) or len(to) not in (2, 3) or not is_int(plain(to[1])):
            raise WeirError(f"expected (hook, layer) or (hook, layer, heads), got {brief(to, 80)}", field)
        hook, layer = normalise_hook(to[0], field), int(plain(to[1]))
        refuse_read_only(hook, field)
        if layer < 0:
            raise WeirError(f"block {layer} does not exist: blocks count from 0", field)
        heads = RowPart.parse(hook, to[2] if len(to) == 3 else None, None, field).heads
        return cls(Site(hook, layer), None if heads is None else tuple(heads))

    def to_json(self) -> list[Any]:
        return [*self.site] if self.heads is None else [*self.site, list(self.heads)]

    def __str__(self) -> str:
        return f"{self.site}" if self.heads is None else f"{self.site} heads {', '.join(map(str, self.heads))}"


def parse_path(to: Any, freeze: Any) -> tuple[Receiver | None, tuple[str, ...]]:
    """Return the end of a path, None for no path, and what is held still on it; raise WeirError naming the argument."""
    if to is not None:
        return Receiver.parse(to), parse_freeze(FREEZABLE if freeze is None else freeze)
    if freeze is not None:
        raise WeirError("it is what a path holds still; give the path's receiver (to), or leave it out", "freeze")
    return None, ()


def parse_freeze(freeze: Any, field: str = "freeze") -> tuple[str, ...]:
    names = [freeze] if isinstance(freeze, str) else list(freeze)
    hooks = [normalise_hook(name, field) for name in names]
    for hook in hooks:
        if hook not in FREEZABLE:
            raise WeirError(f"{hook} cannot be held still; choose from {', '.join(FREEZABLE)}", field)
    return tuple(hook for hook in FREEZABLE if hook in hooks)


def precedes(sender: Site, receiver: Site) -> bool:
    """Return whether a token meets one site before the other."""
    return place_of(sender) < place_of(receiver)


def frozen_sites(sender: Site, receiver: Site, freeze: Sequence[str], num_layers: int) -> tuple[Site, ...]:
    """Return the sites between sender and receiver that are held at the base run's rows.

    The part that the sender lies inside is not among them: through it the change leaves the block.
    """
    between = (Site(hook, layer) for layer in range(num_layers) for hook in freeze)
    return tuple(
        site
        for site in between
        if precedes(sender, site)
        and precedes(site, receiver)
        and not (site.layer == sender.layer and sender.hook in _INTO[site.hook])
    )


SOURCE_RUN, BASE_RUN = range(2)
"""Numbers of the unpatched runs, within a pair: those whose rows are put in, and those that are patched."""


class Pair(NamedTuple):
    """Token ids of a clean and a corrupt prompt."""

    clean: tuple[int, ...]
    corrupt: tuple[int, ...]


class Job(NamedTuple):
    """One number to compute."""

    key: int  # number in the plan, from 0
    pair: int  # number of the pair of prompts
    site: Site  # where rows are put in
    place: Place  # at which positions
    head: int | None = None  # which head; None for whole rows
    own: bool = False  # whether the rows are the base run's own, as a measure of noise


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep computes.

    A pair of prompts has a number for each unpatched run, then one for each cell, then one for each
    site in which the base run's own rows are put back. Keys count through them, pair by pair.
    """

    pairs: tuple[Pair, ...]  # the prompts
    hooks: tuple[str, ...]  # hook points
    layers: tuple[int, ...]  # blocks
    labels: tuple[Label, ...]  # of the positions' axis
    places: tuple[tuple[Place, ...], ...]  # for each pair, the place of each label
    heads: tuple[int, ...] | None = None  # heads; None for whole rows
    mode: str = DENOISE  # `DENOISE` or `NOISE`
    to: Receiver | None = None  # end of the path; None to patch without one
    freeze: tuple[str, ...] = ()  # see `frozen_sites`
    num_layers: int = 0  # blocks of the model
    about: Any = None  # further JSON data that tell this plan from others: the model's configuration, the metric

    @property
    def axes(self) -> dict[str, tuple[Label, ...]]:
        axes: dict[str, tuple[Label, ...]] = {"hook": self.hooks, "layer": self.layers, "position": self.labels}
        return axes if self.heads is None else {**axes, "head": self.heads}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(labels) for labels in self.axes.values())

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site(hook, layer) for hook in self.hooks for layer in self.layers)

    @property
    def keys_of_pair(self) -> int:
        return 2 + self.cells + len(self.sites)

    @property
    def keys(self) -> int:
        return len(self.pairs) * self.keys_of_pair

    def base(self, pair: int) -> tuple[int, ...]:
        """Return the prompt that is patched."""
        return self.pairs[pair].corrupt if self.mode == DENOISE else self.pairs[pair].clean

    def source(self, pair: int) -> tuple[int, ...]:
        """Return the prompt whose rows are put in."""
        return self.pairs[pair].clean if self.mode == DENOISE else self.pairs[pair].corrupt

    def run_key(self, pair: int, run: int) -> int:
        return pair * self.keys_of_pair + run

    def jobs(self, pair: int) -> Iterator[Job]:
        """Yield what is to be patched for a pair, position by position.

        Neighbours share the prompt up to their positions, so that the engine finds it in its cache;
        the last positions, of which least is left to compute, come first.
        """
        first = pair * self.keys_of_pair + 2
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        by_start = sorted(range(len(self.labels)), key=lambda p: (-self.places[pair][p].base[0], p))
        for p in by_start:
            for h, hook in enumerate(self.hooks):
                for n, layer in enumerate(self.layers):
                    key = first + h * strides[0] + n * strides[1] + p * strides[2]
                    for k, head in enumerate(self.heads or (None,)):
                        yield Job(key + k, pair, Site(hook, layer), self.places[pair][p], head)
        own = tuple(sorted({position for place in self.places[pair] for position in place.base}))
        for i, site in enumerate(self.sites):
            yield Job(first + self.cells + i, pair, site, Place(own, own), None, True)

    def frozen(self, site: Site) -> tuple[Site, ...]:
        return () if self.to is None else frozen_sites(site, self.to.site, self.freeze, self.num_layers)

    def digest(self, weights: str) -> str:
        """Return a hash of the plan and the fingerprint of the weights, by which a checkpoint knows it."""
        data = {
            "weights": weights,
            "pairs": self.pairs, "hooks": self.hooks, "layers": self.layers, "labels": self.labels,
            "places": self.places, "heads": self.heads, "mode": self.mode, "freeze": self.freeze,
            "to": None if self.to is None else self.to.to_json(), "blocks": self.num_layers, "about": self.about,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=repr).encode()).hexdigest()


def token_labels(labels: Sequence[Label], places: Sequence[Place], texts: Sequence[str]) -> tuple[str, ...]:
    """Return labels of the positions' axis for people: single positions with the text of their token."""
    out = []
    for label, place in zip(labels, places, strict=True):
        token = texts[place.base[0]].strip() if len(place.base) == 1 else ""
        out.append(f"{label} {token}".strip())
    return tuple(out)
