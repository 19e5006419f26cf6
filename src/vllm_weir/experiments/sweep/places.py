"""Which positions each cell of a sweep patches: parsing, and resolving for the prompts of a pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.experiments.grid import Label
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.scalars import is_int, plain

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
    """An entry of the position axis.

    Attributes:
        label: on the axis.
        selector: of the positions that are patched together.
        field: named by errors.
    """

    label: Label
    selector: Positions
    field: str

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
