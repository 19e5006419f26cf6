"""Programs: the interventions of requests as rows of device tables, shared by content. Pure numpy.

A program is what happens to one token at every tap: per tap a chain of nodes, one per instruction, linked by `next`.
Tables are written incrementally when requests join and their rows are reused after they leave; `ProgramTable` keeps
the host's copy and says which rows changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.table_sizes import TableSizes
from vllm_weir.schema.taps import tap_of

LAST, AFTER_POST = 1, 2
"""Node flags: the last term of an intervention; the intervention belongs to the next block's resid_pre."""
INT_FIELDS = ("kind", "u", "w", "next", "flags")
FLOAT_FIELDS = ("a", "b", "lo", "hi")
MOST_PLACES = 1024
"""Choices of blocks whose taps are remembered."""


class _Slots:
    """Reference-counted numbers by key; a free one keeps its content until it is needed again."""

    def __init__(self, capacity: int) -> None:
        self.of: dict[object, int] = {}
        self.users: dict[object, int] = {}
        self._idle: dict[object, None] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def take(self, key: object) -> tuple[int, bool]:
        """(slot, whether its content must be written); raises IndexError if all are in use."""
        if key in self.of:
            self._idle.pop(key, None)
            self.users[key] = self.users.get(key, 0) + 1
            return self.of[key], False
        if not self._free:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                raise IndexError("all slots are in use")
            self.forget(oldest)
        slot = self._free.pop()
        self.of[key], self.users[key] = slot, 1
        return slot, True

    def drop(self, key: object) -> bool:
        """One user less; True if it was the last."""
        self.users[key] -= 1
        if self.users[key]:
            return False
        del self.users[key]
        self._idle[key] = None
        return True

    def forget(self, key: object) -> None:
        """Free an idle key's slot."""
        del self._idle[key]
        self._free.append(self.of.pop(key))

    @property
    def in_use(self) -> int:
        return len(self.users)


class ProgramTable:
    """The host's copy of the tables.

    Attributes:
        heads: int32 [programs, taps], a tap's first node or -1.
        ints: int32 [nodes, 5], see INT_FIELDS.
        floats: float32 [nodes, 4], see FLOAT_FIELDS.
        vectors: float32 [vectors, d_model].
    """

    def __init__(self, sizes: TableSizes, num_taps: int, local_taps: Iterable[int], d_model: int) -> None:
        self.heads = np.full((sizes.programs, num_taps), -1, np.int32)
        self.ints = np.full((sizes.nodes, len(INT_FIELDS)), -1, np.int32)
        self.floats = np.zeros((sizes.nodes, len(FLOAT_FIELDS)), np.float32)
        self.vectors = np.zeros((sizes.vectors, d_model), np.float32)
        self.changed: dict[str, set[int]] = {"heads": set(), "ints": set(), "floats": set(), "vectors": set()}
        self._local = frozenset(local_taps)
        self._taps = functools.lru_cache(MOST_PLACES)(self._local_taps)
        self._vector_slots = _Slots(sizes.vectors)
        self._program_slots = _Slots(sizes.programs)
        self._free_nodes = list(range(sizes.nodes - 1, -1, -1))
        self._nodes_of: dict[object, list[int]] = {}

    def local(self, move: ResolvedIntervention) -> bool:
        """Whether a move has a site at one of this worker's taps."""
        return bool(self._taps(move.hook, move.layers))

    def absent(self, digests: Iterable[str]) -> list[str]:
        """Those of these vectors that would have to be fetched."""
        return [digest for digest in digests if digest not in self._vector_slots.of]

    def hold_vectors(self, digests: Iterable[str], fetch: Callable[[list[str]], dict[str, np.ndarray]]) -> None:
        """Take a request's vectors, each once, fetching those that are not here; all or nothing.

        Raises:
            WeirError: if the table is full or a vector cannot be had.
        """
        taken: list[str] = []
        missing: list[str] = []
        try:
            for digest in digests:
                _, new = self._vector_slots.take(digest)
                taken.append(digest)
                if new:
                    missing.append(digest)
            if missing:
                rows = fetch(missing)
                for digest in missing:
                    slot = self._vector_slots.of[digest]
                    self.vectors[slot] = rows[digest]
                    self.changed["vectors"].add(slot)
        except (IndexError, KeyError, ValueError) as e:
            for digest in taken:
                if self._vector_slots.drop(digest) and digest in missing:
                    self._vector_slots.forget(digest)
            raise WeirError(f"a steering vector could not be placed: {e}", "interventions") from None

    def drop_vectors(self, digests: Iterable[str]) -> None:
        """Give a request's vectors back."""
        for digest in digests:
            self._vector_slots.drop(digest)

    def take(self, active: Sequence[tuple[ResolvedIntervention, str, int]]) -> tuple[object, int]:
        """(key, number) of the program for moves in the order given, each with its digest and rank.

        A rank is a selected position's number for a move with an instruction per position, else -1. Each `take` needs
        one `give_back` of the key.
        """
        key = tuple((digest, rank) for _, digest, rank in active)
        try:
            number, new = self._program_slots.take(key)
        except IndexError:
            raise WeirError("the program table is full", "interventions") from None
        if new:
            try:
                self._write(key, number, active)
            except IndexError:
                self._program_slots.drop(key)
                self._program_slots.forget(key)
                raise WeirError("the instruction table is full", "interventions") from None
        return key, number

    def give_back(self, key: object) -> None:
        """One user of a program less; its nodes are free when the last has gone."""
        if self._program_slots.drop(key):
            # Its vectors may go next, so an idle program is not kept for reuse.
            self._program_slots.forget(key)
            self._free_nodes.extend(reversed(self._nodes_of.pop(key)))

    def usage(self) -> dict[str, int]:
        """Rows in use."""
        nodes = sum(len(n) for n in self._nodes_of.values())
        return {"vectors": self._vector_slots.in_use, "programs": self._program_slots.in_use, "nodes": nodes}

    def take_changes(self) -> dict[str, np.ndarray]:
        """Rows written since the last call, by table name."""
        out = {name: np.fromiter(sorted(rows), np.int64) for name, rows in self.changed.items() if rows}
        for rows in self.changed.values():
            rows.clear()
        return out

    def _write(self, key: object, number: int, active: Sequence[tuple[ResolvedIntervention, str, int]]) -> None:
        chains = self._chains(active)
        if sum(map(len, chains)) > len(self._free_nodes):
            raise IndexError
        used: list[int] = []
        heads = self.heads[number]
        heads.fill(-1)
        for chain, taps in chains.items():
            following = -1
            for term, flags in reversed(chain):
                at = self._free_nodes.pop()
                u = self._vector_slots.of[term.u] if term.u else -1
                w = self._vector_slots.of[term.w] if term.w else -1
                used.append(at)
                self.ints[at] = term.kind, u, w, following, flags
                self.floats[at] = term.a, term.b, term.lo, term.hi
                following = at
            heads[taps if len(taps) > 1 else taps[0]] = following  # a list takes numpy 2 us longer
        self._nodes_of[key] = used
        self.changed["heads"].add(number)
        self.changed["ints"].update(used)
        self.changed["floats"].update(used)

    def _chains(self, active: Sequence[tuple[ResolvedIntervention, str, int]]) -> dict[tuple, list[int]]:
        """What happens at a tap, as (instruction, flags) in order -> the taps at which it does."""
        if len(active) == 1:
            ((move, _, rank),) = active
            taps = self._taps(move.hook, move.layers)
            return {_nodes(move, rank): taps} if taps else {}
        by_tap: dict[int, tuple] = {}
        for after_post in (False, True):
            for move, _, rank in active:
                if (move.hook == "resid_pre") == after_post:
                    nodes = _nodes(move, rank)
                    for tap in self._taps(move.hook, move.layers):
                        by_tap[tap] = by_tap.get(tap, ()) + nodes
        chains: dict[tuple, list[int]] = {}
        for tap, chain in by_tap.items():
            chains.setdefault(chain, []).append(tap)
        return chains

    def _local_taps(self, hook: str, layers: tuple[int, ...]) -> list[int]:
        taps = (tap_of(Site(hook, layer)) for layer in layers)
        return [tap for tap in taps if tap in self._local]


def _nodes(move: ResolvedIntervention, rank: int) -> tuple:
    """What a move does at each of its taps (with its `rank`-th instruction alone, or all), as in `_chains`."""
    terms = move.instructions if rank < 0 else move.instructions[rank : rank + 1]
    flags = AFTER_POST if move.hook == "resid_pre" else 0
    if len(terms) == 1:
        return ((terms[0], flags | LAST),)
    return tuple((term, flags | (LAST if term is terms[-1] else 0)) for term in terms)
