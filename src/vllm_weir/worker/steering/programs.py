"""Programs: the interventions of requests as rows of device tables, shared by content. Pure numpy.

A program is what happens to one token at every tap: per tap a chain of nodes, one per instruction,
linked by `next`. Tables are written incrementally when requests join and their rows are reused
after they leave; `ProgramTable` keeps the host's copy and says which rows changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.table_sizes import TableSizes
from vllm_weir.schema.taps import tap_of

LAST, AFTER_POST = 1, 2
"""Node flags: the last term of an intervention; the intervention belongs to the next block's
resid_pre."""
INT_FIELDS = ("kind", "u", "w", "next", "flags")
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


class _Slots:
    """Reference-counted table rows by key.

    The row of an idle key keeps its content until it is needed for another.
    """

    def __init__(self, capacity: int) -> None:
        self.slot_of: dict[Hashable, int] = {}
        self._users: dict[Hashable, int] = {}
        self._idle: dict[Hashable, None] = {}
        """Keys without users, the one that has been idle for longest first."""
        self._free = list(range(capacity - 1, -1, -1))

    def hold(self, key: Hashable) -> tuple[int, bool]:
        """Return the key's slot for one user more, and whether its content must be written.

        Raises:
            IndexError: if all slots are in use.
        """
        if key in self.slot_of:
            self._idle.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
            return self.slot_of[key], False
        if not self._free:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                raise IndexError("all slots are in use")
            self.forget(oldest)
        slot = self._free.pop()
        self.slot_of[key], self._users[key] = slot, 1
        return slot, True

    def release(self, key: Hashable) -> bool:
        """Drop one user; return whether it was the last."""
        self._users[key] -= 1
        if self._users[key]:
            return False
        del self._users[key]
        self._idle[key] = None
        return True

    def forget(self, key: Hashable) -> None:
        """Free an idle key's slot."""
        del self._idle[key]
        self._free.append(self.slot_of.pop(key))

    @property
    def in_use(self) -> int:
        return len(self._users)


class ProgramTable:
    """The host's copy of the tables.

    Args:
        sizes: rows of each table.
        num_taps: taps of the model.
        local_taps: those of this worker.
        d_model: width of a vector.

    Attributes:
        heads: int32 [programs, taps], a tap's first node or -1.
        ints: int32 [nodes, 5], see INT_FIELDS.
        floats: float32 [nodes, 4], see FLOAT_FIELDS.
        vectors: float32 [vectors, d_model].
        changed: table name -> rows that were written since the last `take_changes`.
    """

    def __init__(self, sizes: TableSizes, num_taps: int, local_taps: Iterable[int], d_model: int) -> None:
        self.heads = np.full((sizes.programs, num_taps), -1, np.int32)
        self.ints = np.full((sizes.nodes, len(INT_FIELDS)), -1, np.int32)
        self.floats = np.zeros((sizes.nodes, len(FLOAT_FIELDS)), np.float32)
        self.vectors = np.zeros((sizes.vectors, d_model), np.float32)
        self.changed: dict[str, set[int]] = {"heads": set(), "ints": set(), "floats": set(), "vectors": set()}
        self._local_taps = frozenset(local_taps)
        self._taps_of = functools.lru_cache(MOST_PLACES)(self._find_taps)
        self._vector_slots = _Slots(sizes.vectors)
        self._program_slots = _Slots(sizes.programs)
        self._free_nodes = list(range(sizes.nodes - 1, -1, -1))
        self._nodes_of: dict[Hashable, list[int]] = {}

    def is_local(self, intervention: ResolvedIntervention) -> bool:
        """Return whether an intervention has a site at one of this worker's taps."""
        return bool(self._taps_of(intervention.hook, intervention.layers))

    def missing_vectors(self, digests: Iterable[str]) -> list[str]:
        """Return the digests of vectors that the table does not have."""
        return [digest for digest in digests if digest not in self._vector_slots.slot_of]

    def hold_vectors(self, digests: Iterable[str], fetch: Callable[[list[str]], dict[str, np.ndarray]]) -> None:
        """Hold a request's vectors, each once; all or nothing.

        Args:
            digests: of the vectors.
            fetch: returns missing ones by digest, float32 [d_model].

        Raises:
            WeirError: if the table is full or a vector cannot be had.
        """
        held: list[str] = []
        missing: list[str] = []
        try:
            for digest in digests:
                _, is_new = self._vector_slots.hold(digest)
                held.append(digest)
                if is_new:
                    missing.append(digest)
            if missing:
                rows = fetch(missing)
                for digest in missing:
                    slot = self._vector_slots.slot_of[digest]
                    self.vectors[slot] = rows[digest]
                    self.changed["vectors"].add(slot)
        except (IndexError, KeyError, ValueError) as e:
            for digest in held:
                if self._vector_slots.release(digest) and digest in missing:
                    self._vector_slots.forget(digest)
            raise WeirError(f"a steering vector could not be placed: {e}", "interventions") from None

    def release_vectors(self, digests: Iterable[str]) -> None:
        """Release a request's vectors."""
        for digest in digests:
            self._vector_slots.release(digest)

    def hold(self, active: Sequence[ActiveIntervention]) -> tuple[Hashable, int]:
        """Return (key, number) of the program for interventions in the order in which they apply.

        Each call needs one `release` of the key.

        Raises:
            WeirError: if a table is full.
        """
        key = tuple((digest, rank) for _, digest, rank in active)
        try:
            number, is_new = self._program_slots.hold(key)
        except IndexError:
            raise WeirError("the program table is full", "interventions") from None
        if is_new:
            try:
                self._write(key, number, active)
            except IndexError:
                self._program_slots.release(key)
                self._program_slots.forget(key)
                raise WeirError("the instruction table is full", "interventions") from None
        return key, number

    def release(self, key: Hashable) -> None:
        """Drop one user of a program; the last one frees its nodes."""
        if self._program_slots.release(key):
            # Its vectors may go next, so an idle program is not kept for reuse.
            self._program_slots.forget(key)
            self._free_nodes.extend(reversed(self._nodes_of.pop(key)))

    def usage(self) -> dict[str, int]:
        """Return how many rows are in use."""
        nodes = sum(len(n) for n in self._nodes_of.values())
        return {"vectors": self._vector_slots.in_use, "programs": self._program_slots.in_use, "nodes": nodes}

    def take_changes(self) -> dict[str, np.ndarray]:
        """Return the rows written since the last call, int64 and ascending, by table name."""
        changes = {name: np.fromiter(sorted(rows), np.int64) for name, rows in self.changed.items() if rows}
        for rows in self.changed.values():
            rows.clear()
        return changes

    def _write(self, key: Hashable, number: int, active: Sequence[ActiveIntervention]) -> None:
        """Write a program's chains; raises IndexError if there are not enough nodes."""
        chains = self._chains(active)
        if sum(map(len, chains)) > len(self._free_nodes):
            raise IndexError
        nodes: list[int] = []
        heads = self.heads[number]
        heads.fill(-1)
        vector_slot = self._vector_slots.slot_of
        for chain, taps in chains.items():
            next_node = -1
            for term, flags in reversed(chain):
                node = self._free_nodes.pop()
                u = vector_slot[term.u] if term.u else -1
                w = vector_slot[term.w] if term.w else -1
                nodes.append(node)
                self.ints[node] = term.kind, u, w, next_node, flags
                self.floats[node] = term.a, term.b, term.lo, term.hi
                next_node = node
            heads[taps if len(taps) > 1 else taps[0]] = next_node  # numpy is slower with a list as index
        self._nodes_of[key] = nodes
        self.changed["heads"].add(number)
        self.changed["ints"].update(nodes)
        self.changed["floats"].update(nodes)

    def _chains(self, active: Sequence[ActiveIntervention]) -> dict[tuple, list[int]]:
        """Return chain, as (instruction, flags) in order -> the taps that have it."""
        if len(active) == 1:
            ((intervention, _, rank),) = active
            taps = self._taps_of(intervention.hook, intervention.layers)
            return {_chain_of(intervention, rank): taps} if taps else {}
        by_tap: dict[int, tuple] = {}
        for after_post in (False, True):
            for intervention, _, rank in active:
                if (intervention.hook == "resid_pre") == after_post:
                    chain = _chain_of(intervention, rank)
                    for tap in self._taps_of(intervention.hook, intervention.layers):
                        by_tap[tap] = by_tap.get(tap, ()) + chain
        chains: dict[tuple, list[int]] = {}
        for tap, chain in by_tap.items():
            chains.setdefault(chain, []).append(tap)
        return chains

    def _find_taps(self, hook: str, layers: tuple[int, ...]) -> list[int]:
        taps = (tap_of(Site(hook, layer)) for layer in layers)
        return [tap for tap in taps if tap in self._local_taps]


def _chain_of(intervention: ResolvedIntervention, rank: int) -> tuple:
    """Return what an intervention does at a tap, at all positions or at one, as in `_chains`."""
    terms = intervention.instructions if rank < 0 else intervention.of_position(rank)
    flags = AFTER_POST if intervention.hook == "resid_pre" else 0
    if len(terms) == 1:
        return ((terms[0], flags | LAST),)
    return tuple((term, flags | (LAST if term is terms[-1] else 0)) for term in terms)
