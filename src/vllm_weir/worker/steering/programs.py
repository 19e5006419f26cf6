"""Programs: the interventions of requests as rows of device tables, shared by content. Pure numpy.

A program is what happens to one token at every tap: per tap a chain of nodes, one per instruction,
linked by `next`. A node acts on the columns `lo` to `hi` (not included) of the tap's row, and
element ``c + shift`` of its vectors belongs to column c. A tap may hold a part of the model's row
only: then its nodes are what instructions do to that part.

Tables are written incrementally when requests join and their rows are reused after they leave;
`ProgramTable` keeps the host's copy and says which rows changed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import BY_COLUMN, DOSE, ENCODE, HOOK, RECONSTRUCT, Instruction, ResolvedIntervention
from vllm_weir.schema.rows import Shard, ring_rows
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.steering.slots import HostTables, Move, Slots

LAST, AFTER_POST = 1, 2
"""Node flags: the last term of an intervention; the intervention belongs to the next block's
resid_pre. Above them, from bit `CELL_BIT` on, stands the instruction's cell."""
CELL_BIT = 8
INT_FIELDS = ("kind", "u", "w", "next", "flags", "lo", "hi", "shift")
FLOAT_FIELDS = ("a", "b", "lo", "hi")
MOST_PLACES = 1024
"""Pairs of hook point and blocks whose taps are cached."""


class ActiveIntervention(NamedTuple):
    """An intervention as it applies to a token.

    `rank` is the place of the position, if each has instructions of its own, else -1.
    """

    intervention: ResolvedIntervention
    digest: str
    rank: int


class TapRow(NamedTuple):
    """The row of a tap: the columns from `start` to `stop` (not included) of the model's, which has `width`."""

    width: int
    start: int
    stop: int


class Node(NamedTuple):
    """An instruction at a tap: its flags, and the last three of INT_FIELDS."""

    instruction: Instruction
    flags: int
    lo: int
    hi: int
    shift: int


class ProgramTable(HostTables):
    """The host's copy of the tables.

    A vector wider than `d_model` takes several rows of its table, one after the other.

    Args:
        widths: tap -> width of the model's row there; `d_model` where it has none.
        shards: tap -> the part of that row that the tap has; all of it where it has none.
        place_of: key of a HOOK -> the slot of its args, and the number of its function, -1 if the host calls it.

    Attributes:
        heads: int32 [programs, taps], a tap's first node or -1.
        ints: int32 [nodes, 8], see INT_FIELDS.
        floats: float32 [nodes, 4], see FLOAT_FIELDS.
        vectors: float32 [vectors, d_model].
        called: node -> its instruction, of ENCODE and HOOK nodes, for which something runs between kernels. A
            RECONSTRUCT has a HOOK node: to a kernel both are a row that it is given.
        followers: called when vectors move to other rows, with int64 [vectors]: the new row of each.
    """

    def __init__(
        self,
        sizes: TableSizes,
        num_taps: int,
        local_taps: Iterable[int],
        d_model: int,
        widths: Mapping[int, int] = MappingProxyType({}),
        shards: Mapping[int, Shard] = MappingProxyType({}),
        place_of: Callable[[str], tuple[int, int]] = lambda _: (0, -1),
    ) -> None:
        self._place_of = place_of
        self.heads = np.full((sizes.programs, num_taps), -1, np.int32)
        self.ints = np.full((sizes.nodes, len(INT_FIELDS)), -1, np.int32)
        self.floats = np.zeros((sizes.nodes, len(FLOAT_FIELDS)), np.float32)
        self.vectors = np.zeros((sizes.vectors, d_model), np.float32)
        super().__init__("heads", "ints", "floats", "vectors")
        self.called: dict[int, Instruction] = {}
        self.followers: list[Callable[[np.ndarray], None]] = []
        self._lengths = [0] * sizes.vectors
        """Values of the vector that begins at a row."""
        self._row_of: dict[int, TapRow] = {}
        for tap in local_taps:
            width = widths.get(tap, d_model)
            self._row_of[tap] = TapRow(width, *shards.get(tap, (0, width)))
        self._taps_of = functools.lru_cache(MOST_PLACES)(self._find_taps)
        self._vector_slots = Slots(sizes.vectors, self._move_vectors)
        self._program_slots = Slots(sizes.programs)
        self._free_nodes = list(range(sizes.nodes - 1, -1, -1))
        self._nodes_of: dict[Hashable, list[int]] = {}

    def is_local(self, intervention: ResolvedIntervention) -> bool:
        """Return whether an intervention has a site at one of this worker's taps."""
        return bool(self._taps_of(intervention.hook, intervention.layers))

    def missing_vectors(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if digest not in self._vector_slots.slot_of]

    def hold_vectors(self, digests: Iterable[str], fetch: Callable[[list[str]], dict[str, np.ndarray]]) -> None:
        """Hold a request's vectors, each once, all or none; `fetch` returns missing ones by digest, float32 [width].

        Raises WeirError if the table is full or a vector cannot be had.
        """
        held: list[str] = []
        missing: list[str] = []
        slots = self._vector_slots
        try:
            for digest in digests:
                if digest in slots.slot_of:
                    slots.hold(digest)
                    held.append(digest)
                else:
                    missing.append(digest)
            vectors = fetch(missing) if missing else {}
            for digest in missing:
                vector = vectors[digest]
                rows = ring_rows(len(vector), self.vectors.shape[1])
                slot, is_new = slots.hold(digest, rows)
                held.append(digest)
                if is_new:
                    self._write_vector(slot, rows, vector)
        except (IndexError, KeyError, ValueError) as e:
            for digest in held:
                if slots.release(digest) and digest in missing:
                    slots.forget(digest)
            raise WeirError(f"a steering vector could not be placed: {e}", "interventions") from None

    def _write_vector(self, slot: int, rows: int, vector: np.ndarray) -> None:
        self._lengths[slot] = width = len(vector)
        if width == self.vectors.shape[1]:
            self.vectors[slot] = vector
        else:
            content = self.vectors[slot : slot + rows].reshape(-1)
            content[:width], content[width:] = vector, 0.0
        self.changed["vectors"].update(range(slot, slot + rows))

    def _move_vectors(self, moves: Sequence[Move]) -> None:
        """Move vectors, and let the nodes in use follow them."""
        new_slot = np.arange(len(self.vectors))
        for source, target, rows in moves:
            self.vectors[target : target + rows] = self.vectors[source : source + rows]
            self._lengths[target] = self._lengths[source]
            new_slot[source] = target
            self.changed["vectors"].update(range(target, target + rows))
        nodes = np.fromiter(itertools.chain.from_iterable(self._nodes_of.values()), np.int64)
        first_rows = self.ints[nodes, 1:3]
        self.ints[nodes, 1:3] = np.where(first_rows >= 0, new_slot[first_rows], -1)
        self.changed["ints"].update(nodes.tolist())
        for follow in self.followers:
            follow(new_slot)

    def vector_row(self, digest: str, width: int) -> int:
        """Return the first row of a vector of `width` values that is held.

        Raises WeirError if it has another number of values.
        """
        slot = self._vector_slots.slot_of[digest]
        if self._lengths[slot] != width:
            raise WeirError(f"a vector of {self._lengths[slot]} values for {width} hidden units", "probes")
        return slot

    def row_at(self, tap: int) -> TapRow | None:
        return self._row_of.get(tap)

    def release_vectors(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._vector_slots.release(digest)

    def hold(self, active: Sequence[ActiveIntervention]) -> tuple[Hashable, int]:
        """Return (key, number) of the program for interventions in the order in which they apply.

        Each call needs one `release` of the key. Raises WeirError if a table is full, or this worker cannot do what is
        asked.
        """
        key = tuple((digest, rank) for _, digest, rank in active)
        try:
            number, is_new = self._program_slots.hold(key)
        except IndexError:
            raise WeirError("the program table is full", "interventions") from None
        if is_new:
            try:
                self._write(key, number, active)
            except WeirError:
                self._program_slots.release(key)
                self._program_slots.forget(key)
                raise
        return key, number

    def release(self, key: Hashable) -> None:
        """Drop one user of a program; the last one frees its nodes."""
        if self._program_slots.release(key):
            # Its vectors may go next, so an idle program is not kept for reuse.
            self._program_slots.forget(key)
            nodes = self._nodes_of.pop(key)
            self._free_nodes.extend(reversed(nodes))
            for node in self.called.keys() & nodes:
                del self.called[node]

    def usage(self) -> dict[str, int]:
        nodes = sum(len(n) for n in self._nodes_of.values())
        return {"vectors": self._vector_slots.in_use, "programs": self._program_slots.in_use, "nodes": nodes}

    def _write(self, key: Hashable, number: int, active: Sequence[ActiveIntervention]) -> None:
        """Write a program's chains; raises WeirError, before anything is written, if that cannot be done."""
        chains = self._chains(active)
        if sum(len(chain) for chain, _ in chains) > len(self._free_nodes):
            raise WeirError("the instruction table is full", "interventions")
        nodes: list[int] = []
        heads = self.heads[number]
        heads.fill(-1)
        vector_slot = self._vector_slots.slot_of
        for chain, taps in chains:
            next_node = -1
            hooks = sum(term.kind in (HOOK, RECONSTRUCT) for term, *_ in chain)
            for term, flags, lo, hi, shift in reversed(chain):
                node = self._free_nodes.pop()
                u = vector_slot[term.u] if term.u else -1
                w = vector_slot[term.w] if term.w else -1
                nodes.append(node)
                self.ints[node] = term.kind, u, w, next_node, flags, lo, hi, shift
                self.floats[node] = term.a, term.b, term.lo, term.hi
                if term.kind in (ENCODE, HOOK, RECONSTRUCT):
                    self.called[node] = term
                if term.kind in (HOOK, RECONSTRUCT):
                    hooks -= 1  # the place of its row among those held for the token
                    slot, function = self._place_of(term.key) if term.kind == HOOK else (0, -1)
                    self.ints[node, 0], self.floats[node] = HOOK, (1.0, slot, hooks, function)
                next_node = node
            heads[taps if len(taps) > 1 else taps[0]] = next_node  # numpy is slower with a list as index
        self._nodes_of[key] = nodes
        self.changed["heads"].add(number)
        self.changed["ints"].update(nodes)
        self.changed["floats"].update(nodes)

    def _chains(self, active: Sequence[ActiveIntervention]) -> list[tuple[tuple[Node, ...], list[int]]]:
        """Return different chains, each with the taps that have it."""
        if len(active) == 1:
            ((intervention, _, rank),) = active
            return list(self._chains_of(intervention, rank))
        # Chains of single interventions are numbered, since numbers are hashed faster.
        numbers: dict[tuple[Node, ...], int] = {}
        by_tap: dict[int, tuple[int, ...]] = {}
        active = sorted(active, key=lambda one: not one.intervention.leads)
        for after_post in (False, True):
            for intervention, _, rank in active:
                if (intervention.hook == "resid_pre") == after_post:
                    for chain, taps in self._chains_of(intervention, rank):
                        number = (numbers.setdefault(chain, len(numbers)),)
                        for tap in taps:
                            by_tap[tap] = by_tap.get(tap, ()) + number
        taps_of: dict[tuple[int, ...], list[int]] = {}
        for tap, parts in by_tap.items():
            taps_of.setdefault(parts, []).append(tap)
        chains = list(numbers)
        return [(sum((chains[k] for k in parts), ()), taps) for parts, taps in taps_of.items()]

    def _chains_of(self, intervention: ResolvedIntervention, rank: int) -> Iterator[tuple[tuple[Node, ...], list[int]]]:
        """Yield what an intervention does at this worker's taps, each chain with those that have it."""
        for row, taps in self._taps_of(intervention.hook, intervention.layers).items():
            if not (chain := self._chain_of(intervention, rank, row)):
                continue
            if not intervention.dose_cell:
                yield chain, taps
                continue
            for k, layer in enumerate(intervention.layers):
                if (tap := tap_of(Site(intervention.hook, layer))) in taps:
                    yield _measured(chain, row, intervention.dose_cell + k), [tap]

    def _find_taps(self, hook: str, layers: tuple[int, ...]) -> dict[TapRow, list[int]]:
        """Return this worker's taps for a hook point, by their row."""
        taps: dict[TapRow, list[int]] = {}
        for tap in (tap_of(Site(hook, layer)) for layer in layers):
            if (row := self._row_of.get(tap)) is not None:
                taps.setdefault(row, []).append(tap)
        return taps

    def _chain_of(self, intervention: ResolvedIntervention, rank: int, row: TapRow) -> tuple[Node, ...]:
        """Return what an intervention does to a tap's row, at all positions or at one.

        Raises WeirError if that takes columns that the tap does not have, or a vector has another width.
        """
        terms = intervention.instructions if rank < 0 else intervention.of_position(rank)
        flags = AFTER_POST if intervention.hook == "resid_pre" else 0
        end, nodes = 0 if intervention.joins else LAST, []
        for term in reversed(terms):
            start, stop = (term.start, term.stop) if term.stop else (0, row.width)
            lo, hi = max(start, row.start), min(stop, row.stop)
            if lo >= hi:
                continue
            if hi - lo < stop - start and term.kind not in BY_COLUMN:
                raise WeirError(
                    f"an intervention measures columns {start} to {stop} of a row of {intervention.hook}, and this "
                    f"worker has those from {row.start} to {row.stop}; steer a head, or use Add or Replace",
                    "interventions",
                )
            self._check_vectors(term, stop - start)
            node_flags = flags | end | term.cell << CELL_BIT
            nodes.append(Node(term, node_flags, lo - row.start, hi - row.start, row.start - start))
            end = 0
        return tuple(reversed(nodes))

    def _check_vectors(self, term: Instruction, width: int) -> None:
        """Raise WeirError unless an instruction's vectors, which are held, have `width` values."""
        slot_of, lengths = self._vector_slots.slot_of, self._lengths
        for digest in (term.u, term.w):
            if digest and lengths[slot := slot_of[digest]] != width:
                raise WeirError(f"a vector of {lengths[slot]} values for {width} columns", "interventions")


def _measured(chain: tuple[Node, ...], row: TapRow, cell: int) -> tuple[Node, ...]:
    """Return an intervention's chain with a node at its end, which writes its relative dose into ``cell - 1``."""
    *others, last = chain
    flags = last.flags & ((1 << CELL_BIT) - 1) | cell << CELL_BIT
    dose = Node(Instruction(DOSE, ""), flags, 0, row.stop - row.start, 0)
    return (*others, last._replace(flags=last.flags & ~LAST), dose)
