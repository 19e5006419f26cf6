"""Rows of hook points: their shapes, which part of one is picked, who holds it, and reductions over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.schema.hooks import HEAD_HOOKS, NEURON_HOOKS, Site

RowShape: TypeAlias = tuple[int, ...]
"""Shape of a row: (d_model,), (heads, d_head), (d_mlp,), (experts,) or (top_k,)."""


class Shard(NamedTuple):
    """The part of a row that one tensor-parallel worker holds: columns `start` to `stop` (not included)."""

    start: int
    stop: int


def row_width(shape: RowShape) -> int:
    """Return how many values a row of this shape has."""
    return math.prod(shape)


def ring_rows(width: int, d_model: int) -> int:
    """Return how many rows of a worker's ring, [d_model] each, hold a row of `width` values.

    The row begins at the first value of its first ring row; what follows it in the last is undefined.
    """
    return -(-width // d_model)


MAX_PICKED = 65_536
"""Most heads or neurons that one capture or intervention can list."""
_LARGEST = 2**31 - 1
_HOOKS = {"heads": HEAD_HOOKS, "neurons": NEURON_HOOKS}


class RowPart(NamedTuple):
    """What is picked of a row.

    Attributes:
        heads: those picked, in the order given; None: all.
        neurons: likewise.
    """

    heads: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, hook: str, heads: object, neurons: object, path: str) -> RowPart:
        """Parse the fields `heads` and `neurons` of a capture or an intervention.

        Each is None, an int, or several in a list, range, array or tensor: distinct, not negative,
        and at least one.

        Args:
            hook: the hook point.
            heads: as given.
            neurons: as given.
            path: of the capture or intervention; errors name ``path.heads`` or ``path.neurons``.
        """
        if heads is None and neurons is None:
            return WHOLE
        return cls(_parse(hook, "heads", heads, path), _parse(hook, "neurons", neurons, path))

    def check(self, shape: RowShape, hook: str, path: str) -> None:
        """Raise WeirError, naming the field, for a head or neuron that a row of this shape does not have."""
        for name, picked in self._asdict().items():
            if picked is not None and max(picked) >= shape[0]:
                one = name.removesuffix("s")
                raise WeirError(
                    f"{one} {max(picked)} does not exist: {hook} has {name} 0..{shape[0] - 1}", f"{path}.{name}"
                )

    def to_json(self) -> dict[str, list[int]]:
        """Return the fields of the wire form, those that are None left out."""
        return {name: list(picked) for name, picked in self._asdict().items() if picked is not None}


WHOLE = RowPart()


def _parse(hook: str, name: str, value: object, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    field = f"{path}.{name}"
    if hook not in _HOOKS[name]:
        raise WeirError(
            f"{name} picks from the rows of {', '.join(_HOOKS[name])}; {hook} has no {name}: leave {name} out", field
        )
    numbers = tuple(_number(one, name, field) for one in _listed(value, name, field))
    if not numbers:
        raise WeirError(f"an empty list picks nothing; list some, or leave {name} out for all", field)
    if len(set(numbers)) < len(numbers):
        twice = next(number for k, number in enumerate(numbers) if number in numbers[:k])
        raise WeirError(f"{name.removesuffix('s')} {twice} is listed twice; list each once", field)
    return numbers


def _listed(value: Any, name: str, field: str) -> Sequence[Any]:
    """Return a single int, or the entries of a list, range, array or tensor, as a sequence."""
    value = plain(value)
    if is_int(value):
        return (value,)
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)):
        raise WeirError(f"{name} is an int or a list of ints, got {type(value).__name__}", field)
    if len(value) > MAX_PICKED:
        raise WeirError(f"{len(value)} entries, more than the limit of {MAX_PICKED}; use several", field)
    return value


def _number(value: Any, name: str, field: str) -> int:
    number = plain(value)
    if not is_int(number):
        raise WeirError(f"expected an int, got {type(value).__name__}", field)
    if number < 0:
        raise WeirError(f"{name.removesuffix('s')} {brief(number)} does not exist: {name} count from 0", field)
    if number > _LARGEST:
        raise WeirError(f"{name.removesuffix('s')} {brief(number)} does not exist", field)
    return int(number)


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


GROUP = 128
"""Positions of a group, of which the tap makes one partial result."""

SPAN, MAXIMUM, SEEDED = 255, 1 << 8, 1 << 9
"""In the plan, at a group's first token: a mask of the number of consecutive tokens up to the
group's last one, a flag for maxima instead of sums, and a flag that the cells already hold the
result of an earlier step."""

CONTINUED, COMPLETE = 1, 2
"""Where a step resumes a reduction that earlier steps began: inside their last group, or after it,
as that group is complete."""
