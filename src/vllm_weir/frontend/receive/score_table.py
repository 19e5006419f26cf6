"""Scores of probes and factors of gates as they arrive, by position."""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.results.scores import HookValues
from vllm_weir.schema.hooks import Site, place_of
from vllm_weir.util import saved


class ToldValues:
    """Values by name, hook point and position; those of a position that is computed anew replace the older ones."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Site, dict[int, np.ndarray]]] = {}
        self._saved: dict[str, list[tuple[int, bytes]]] = {}
        """Name -> (item of a list at which they begin, bytes), in the order in which they came."""
        self._spoiled: dict[tuple[str, Site], dict[int, bool]] = {}
        """(function, hook point) -> position -> whether its row was finite, and no longer is."""

    def record(self, told: messages.Told) -> None:
        """Enter what a message says."""
        if told.positions is None:
            if told.first > 0:
                self._saved[told.name].append((told.first, told.data))
            elif told.first == 0:
                self._saved[told.name] = [(0, told.data)]
            else:
                self._saved.pop(told.name, None)
            return
        site, positions = Site(told.hook, told.layer), np.frombuffer(told.positions, "<i4").tolist()
        if told.spoiled:
            flags = self._spoiled.setdefault((told.name, site), {})
            flags.update(zip(positions, np.frombuffer(told.data, bool).tolist(), strict=True))
            return
        rows = np.frombuffer(told.data, "<f4").reshape(told.shape)
        of_site = self._values.setdefault(told.name, {}).setdefault(site, {})
        of_site.update(zip(positions, rows, strict=True))

    def values(self, start: int, end: int) -> HookValues:
        """Return the values of positions from `start` to `end` (not included)."""
        values, positions = {}, {}
        for name, of_name in list(self._values.items()):
            rows = [dict(of_name[site]) for site in sorted(of_name, key=place_of)]
            at = sorted(one for one in set(rows[0]).intersection(*rows[1:]) if start <= one < end)
            if not at:
                continue
            columns = [torch.from_numpy(np.stack([of_site[one] for one in at])) for of_site in rows]
            values[name] = columns[0] if len(columns) == 1 else torch.stack(columns, 1)
            positions[name] = torch.tensor(at)
        return HookValues(values, positions)

    def saved(self) -> dict[str, Any]:
        """Return what was saved last under each name."""
        found = {}
        for name, ((_, data), *later) in list(self._saved.items()):
            found[name] = saved.decode(data)
            for first, more in later:
                found[name][first:] = saved.decode(more)
        return found

    def notes(self, end: int) -> tuple[str, ...]:
        """Return what a receipt says of each function that has spoiled rows at positions before `end`."""
        spoiled: dict[str, list[tuple[int, tuple[bool, int, int], Site]]] = {}
        for (name, site), flags in list(self._spoiled.items()):
            at = [(one, place_of(site), site) for one, flag in list(flags.items()) if flag and one < end]
            spoiled.setdefault(name, []).extend(at)
        out = []
        for name, found in spoiled.items():
            if found:
                position, _, site = min(found)
                made = f"the hook {name} returned NaN or infinity for {len(found)} rows that were finite"
                out.append(f"{made}, first at {site}, position {position}")
        return tuple(out)


KEPT = 1 << 16
"""Series of requests that have gone whose size is remembered, since workers may still send entries of them."""


class ScoreTable:
    """The reported cells of one sequence's tokens: its probes' scores, then its gates' factors.

    One thread records, any thread reads; neither waits for the other. An entry that is sent again, because the
    request was preempted and computed anew, replaces the older one.
    """

    def __init__(self, cells: int) -> None:
        self._values = np.zeros((0, cells), np.float32)
        self._known = np.zeros(0, bool)

    def record(self, first: int, values: np.ndarray) -> None:
        """Enter the cells of the positions from `first` on, float32 [n, cells]."""
        end = first + len(values)
        if end > len(self._known):
            grown = np.zeros((max(2 * len(self._known), end), self._values.shape[1]), np.float32)
            grown[: len(self._values)] = self._values
            known = np.zeros(len(grown), bool)
            known[: len(self._known)] = self._known
            # In this order: whoever finds a position known must find its values.
            self._values = grown
            self._known = known
        self._values[first:end] = values
        self._known[first:end] = True

    def forget_from(self, position: int) -> None:
        """Forget the cells of a position and all later ones."""
        self._known[position:] = False

    def row(self, position: int) -> np.ndarray | None:
        """Return the cells of a position, float32 [cells], or None if they have not arrived."""
        known = self._known
        return self._values[position] if position < len(known) and known[position] else None

    def known(self, positions: np.ndarray) -> np.ndarray:
        """Return which of `positions`, ascending, have arrived, as a bool array."""
        known = self._known
        found = np.zeros(len(positions), bool)
        inside = int(np.searchsorted(positions, len(known)))
        found[:inside] = known[positions[:inside]]
        return found

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Return a copy of the cells of positions that have arrived, float32 [n, cells]."""
        return self._values[positions]


class ScoreSeries:
    """The series of scores that workers have opened, and the tables of those whose request is still waited for."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, int], tuple[int, ref[ScoreTable] | None]] = {}
        """(worker, series) -> numbers of an entry, and the table; in the order in which they were opened."""
        self._prune_above = 2 * KEPT

    def __len__(self) -> int:
        return len(self._series)

    def open(self, worker: str, opened: messages.SeriesOpened, table: ScoreTable | None) -> None:
        """Enter a series; `table` is None if nobody waits for the request."""
        self._series[worker, opened.series] = opened.reported, None if table is None else ref(table)
        if len(self._series) > self._prune_above:
            self._prune()

    def record(self, worker: str, scored: bytes, scores: bytes) -> None:
        """File the scores of a message, see `messages.MessageHeader`.

        Raises:
            ValueError: if the message does not fit what was opened.
        """
        runs = np.frombuffer(scored, "<i4").reshape(-1, len(messages.SCORED_FIELDS))
        values, at = np.frombuffer(scores, "<f4"), 0
        for series, first, count in runs.tolist():
            cells, table_ref = self._series.get((worker, series), (0, None))
            size = count * cells
            if not size or first < 0 or at + size > len(values):
                raise ValueError(f"scores of series {series}, which was not opened or does not fit")
            table = None if table_ref is None else table_ref()
            if table is not None:
                table.record(first, values[at : at + size].reshape(count, cells))
            at += size

    def _prune(self) -> None:
        """Forget series of requests that have gone, but for the newest ones."""
        for key in list(self._series)[:-KEPT]:
            table_ref = self._series[key][1]
            if table_ref is None or table_ref() is None:
                del self._series[key]
        self._prune_above = len(self._series) + KEPT
