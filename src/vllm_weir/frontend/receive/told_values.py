"""What the functions of one sequence gave for its rows, and saved, as it arrives."""

from __future__ import annotations

from typing import Any

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
