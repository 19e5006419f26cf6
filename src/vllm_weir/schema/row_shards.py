"""Rows as workers send them: in parts of their own width, which the caller's process joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.row_parts import RowPart
from vllm_weir.schema.row_shapes import RowShape, Shard, ring_rows, row_width


class RowShard(NamedTuple):
    """The part of a site's rows that one worker sends: its `shard`-th, in the order of columns."""

    site: Site
    shard: int


@dataclass(frozen=True)
class RowPick:
    """What a capture takes of a site's rows.

    Attributes:
        whole: shape of a row of the site.
        chosen: which of its heads, or of its neurons, in order; None for all.
    """

    whole: RowShape
    chosen: tuple[int, ...] | None = None

    @classmethod
    def of(cls, whole: RowShape, part: RowPart) -> RowPick:
        """Return the pick of a part of rows of this shape."""
        return cls(whole, part.heads if part.heads is not None else part.neurons)

    @property
    def shape(self) -> RowShape:
        return self.whole if self.chosen is None else (len(self.chosen), *self.whole[1:])

    @property
    def width(self) -> int:
        return row_width(self.shape)


class ShardWidths:
    """The widths of the parts of rows that do not come as one row [d_model].

    Args:
        shapes: site -> shape of its rows.
        shards: site -> its parts, for rows that several workers hold together.
        d_model: width of a row of the ring.
    """

    def __init__(self, shapes: Mapping[Site, RowShape], shards: Mapping[Site, tuple[Shard, ...]], d_model: int) -> None:
        self._d_model = d_model
        self._widths: dict[Site, tuple[int, ...]] = {}
        for site, shape in shapes.items():
            width = row_width(shape)
            parts = tuple(shard.stop - shard.start for shard in shards.get(site, ())) or (width,)
            if parts != (d_model,):
                self._widths[site] = parts

    def __bool__(self) -> bool:
        return bool(self._widths)

    def __contains__(self, site: object) -> bool:
        return site in self._widths

    def shards(self, site: Site) -> Iterator[tuple[RowShard, int]]:
        return ((RowShard(site, k), width) for k, width in enumerate(self._widths[site]))

    def ring_rows(self, site: Site) -> int:
        """Return how many rows of one worker's ring a row of a site takes at most."""
        widths = self._widths.get(site)
        return 1 if widths is None else ring_rows(max(widths), self._d_model)
