"""`Media`: where a prompt's images, sounds and videos are."""

from __future__ import annotations

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
        ranges: (modality, the ranges of its positions, ascending and apart), sorted by modality.
        longest: the most positions that one item has, with those of tokens within it.
    """

    ranges: tuple[tuple[str, tuple[Range, ...]], ...] = ()
    longest: int = 0

    @classmethod
    def of(cls, items: Iterable[tuple[str, Iterable[Range]]], longest: int = 0) -> Media:
        """Collect items of a prompt, (modality, ranges) each; adjacent ranges become one."""
        by_modality: dict[str, list[Range]] = {}
        for modality, ranges in items:
            by_modality.setdefault(modality, []).extend(ranges)
        ranges_of = tuple((modality, _joined(ranges)) for modality, ranges in sorted(by_modality.items()))
        return cls(ranges_of, longest)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def has(self, positions: Positions) -> bool:
        """Return whether a selector is none by modality, or the prompt has some of that modality."""
        return positions.kind != "modality" or any(
            modality == positions.modality and ranges for modality, ranges in self.ranges
        )

    def positions(self, selector: Positions, field: str) -> Positions:
        """Return the positions of what a selector by modality names.

        Raises:
            WeirError: if the prompt has none, or too many that are not adjacent.
        """
        name = selector.modality
        ranges = next((ranges for modality, ranges in self.ranges if modality == name), ())
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
