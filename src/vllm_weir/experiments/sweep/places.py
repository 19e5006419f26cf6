"""Which positions each cell of a sweep patches, and what a path reads, patches and holds still."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.grid import Label
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
