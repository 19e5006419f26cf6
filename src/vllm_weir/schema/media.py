"""`Media`: where a prompt's images, sounds and videos are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.schema.positions import MAX_LIST, Positions

Range = tuple[int, int]
"""The first of some adjacent positions, and one past the last."""


@dataclass(frozen=True)
class Media:
    """The positions of a prompt that hold embeddings of images and the like instead of tokens' own.

    Attributes:
        items: (modality, the ranges of each item's positions), sorted by modality; a modality's items
            are in the order of the prompt.
        longest: the most positions that one item has, with those of tokens within it.
    """

    items: tuple[tuple[str, tuple[tuple[Range, ...], ...]], ...] = ()
    longest: int = 0

    @classmethod
    def of(cls, items: Iterable[tuple[str, Iterable[Range]]], longest: int = 0) -> Media:
        """Collect items of a prompt, (modality, ranges) each; adjacent ranges of an item become one."""
        by_modality: dict[str, list[tuple[Range, ...]]] = {}
        for modality, ranges in items:
            by_modality.setdefault(modality, []).append(_joined(ranges))
        return cls(tuple((modality, tuple(sorted(some))) for modality, some in sorted(by_modality.items())), longest)

    @functools.cached_property
    def ranges(self) -> tuple[tuple[str, tuple[Range, ...]], ...]:
        """(Modality, the ranges of all its items' positions, ascending and apart), sorted by modality."""
        return tuple((modality, _joined(itertools.chain(*some))) for modality, some in self.items)

    def __bool__(self) -> bool:
        return bool(self.items)

    def has(self, positions: Positions) -> bool:
        """Return whether a selector is none by modality, or the prompt has what it names."""
        return positions.kind != "modality" or bool(self._of(positions))

    def _of(self, selector: Positions) -> tuple[Range, ...]:
        """Return the ranges of what a selector by modality names; none if the prompt has no such item."""
        if selector.index is None:
            return dict(self.ranges).get(selector.modality, ())
        some = dict(self.items).get(selector.modality, ())
        return some[selector.index] if -len(some) <= selector.index < len(some) else ()

    def positions(self, selector: Positions, field: str) -> Positions:
        """Return the positions of what a selector by modality names; `field` is that of the modality.

        Raises:
            WeirError: if the prompt has none, or too many that are not adjacent.
        """
        name, ranges = selector.modality, self._of(selector)
        if not ranges and (some := dict(self.items).get(name, ())) and selector.index is not None:
            raise WeirError(
                f"item {selector.index} of {name} has no position: the prompt's are 0..{len(some) - 1}; choose one of "
                "them, or leave this out for such a prompt",
                f"{field.removesuffix('modality')}index",
            )
        if not ranges:
            others = ", ".join(modality for modality, some in self.ranges if some)
            raise WeirError(
                f"the prompt has no {name}{f', but {others}' if others else ''}; leave this out for such a prompt, or "
                "choose other positions",
                field,
            )
        if len(ranges) == 1:
            return Positions("slice", (*ranges[0], None))
        if (count := sum(end - first for first, end in ranges)) > MAX_LIST:
            raise WeirError(
                f"the prompt has {count} positions of {name} in {len(ranges)} places, and the limit is {MAX_LIST}; "
                "choose some of them by their place",
                field,
            )
        return Positions("list", tuple(position for first, end in ranges for position in range(first, end)))

    def changed_from(self, first: int) -> int | None:
        """Return the first position of an image or the like that ends after `first`; None if none does.

        Where its positions attend to each other both ways, what is done from `first` on can change
        all of them.
        """
        starts = (start for _, ranges in self.ranges for start, end in ranges if end > first)
        return min(starts, default=None)


NO_MEDIA = Media()


def embedded_ranges(offset: int, length: int, is_embed: Any = None) -> tuple[Range, ...]:
    """Return the ranges of a placeholder's positions that hold an item's embeddings; `is_embed`: bool [length]."""
    if is_embed is None:
        return ((offset, offset + length),) if length else ()
    return _joined((offset + k, offset + k + 1) for k, one in enumerate(is_embed.tolist()) if one)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    out: list[Range] = []
    for first, end in sorted(ranges):
        if out and out[-1][1] >= first:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((first, end))
    return tuple(out)
