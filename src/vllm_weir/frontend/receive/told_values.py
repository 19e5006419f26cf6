"""What the functions of one sequence gave for its rows, and saved, as it arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.results.scores import HookValues
from vllm_weir.schema import saved


class ToldValues:
    """Values by name and position; one that is sent again, of a position computed anew, replaces the older one."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, np.ndarray]] = {}
        self._saved: dict[str, bytes] = {}

    def record(self, told: messages.Told) -> None:
        """Enter what a message says."""
        if told.positions is None:
            self._saved[told.name] = told.data
            return
        rows = np.frombuffer(told.data, "<f4").reshape(told.shape)
        of_name = self._values.setdefault(told.name, {})
        of_name.update(zip(np.frombuffer(told.positions, "<i4").tolist(), rows, strict=True))

    def values(self, start: int, end: int) -> HookValues:
        """Return the values of positions from `start` to `end` (not included)."""
        values, positions = {}, {}
        for name, rows in list(self._values.items()):
            if at := sorted(one for one in list(rows) if start <= one < end):
                values[name] = torch.from_numpy(np.stack([rows[one] for one in at]))
                positions[name] = torch.tensor(at)
        return HookValues(values, positions)

    def saved(self) -> dict[str, Any]:
        """Return what was saved last under each name."""
        return {name: saved.decode(data) for name, data in self._saved.items()}
