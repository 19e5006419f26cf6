"""How the rows of each tap lie in the ring, and which part of them this worker sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import RowShape, Shard, ring_rows, row_width
from vllm_weir.schema.taps import STAGES, shard_column, tap_of


@dataclass(frozen=True)
class RowLayout:
    """The rows of the taps where they are not simply [d_model]."""

    # tap -> values of the whole model's row; only of taps whose row is not [d_model]
    widths: Mapping[int, int] = field(default_factory=dict)
    # tap -> the part of its row that this worker's tensor holds; only of taps whose row is not [d_model]
    shards: Mapping[int, Shard] = field(default_factory=dict)
    # taps whose rows tensor-parallel workers hold together. Each worker sends its own part.
    spread: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()  # those of `spread` whose part another worker holds too, which sends it
    # column -> rows of the ring that one of its rows takes; left out where that is 1
    ring_rows: Mapping[int, int] = field(default_factory=dict)
    # column -> what it is called in messages, where that differs
    reader_columns: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shapes: Mapping[Site, RowShape],
        shards: Mapping[Site, Shard],
        d_model: int,
        num_layers: int,
        rank: int,
        ranks: int,
    ) -> RowLayout:
        """Work out the layout.

        Args:
            shapes: site -> shape of a row of the whole model, where that is not (d_model,).
            shards: site -> the part that this worker holds, where it does not hold all of it.
            d_model: width of a row of the ring.
            num_layers: of the model.
            rank: of this worker among those that share the model's heads and neurons.
            ranks: how many these are.
        """
        widths: dict[int, int] = {}
        by_tap: dict[int, Shard] = {}
        rows: dict[int, int] = {}
        names: dict[int, int] = {}
        silent: set[int] = set()
        for site, shape in shapes.items():
            tap, width = tap_of(site), row_width(shape)
            widths[tap] = width
            shard = by_tap[tap] = shards.get(site, Shard(0, width))
            held = shard.stop - shard.start
            if site in shards and rank % max(ranks * held // width, 1):
                silent.add(tap)
            for column in _columns_of(tap):
                if (count := ring_rows(held, d_model)) > 1:
                    rows[column] = count
                if shard.start:
                    names[column] = shard_column(column, shard.start // held, num_layers)
        return cls(widths, by_tap, frozenset(map(tap_of, shards)), frozenset(silent), rows, names)


def _columns_of(tap: int) -> Iterable[int]:
    return range(tap * STAGES, (tap + 1) * STAGES)
