"""`SweepPlan`: the cells of a sweep, as pure data, and the jobs that compute them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_weir.experiments.grid import Label
from vllm_weir.experiments.metrics import DENOISE
from vllm_weir.experiments.sweep.places import Place, Receiver, frozen_sites
from vllm_weir.schema.hooks import Site

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
