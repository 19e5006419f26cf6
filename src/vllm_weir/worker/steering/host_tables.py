"""Tables on the host that are mirrored on the device."""

from __future__ import annotations

import numpy as np


class HostTables:
    """Arrays of which single rows are written.

    Args:
        names: of the attributes that are such arrays.

    Attributes:
        changed: table name -> rows that were written since the last `take_changes`.
    """

    def __init__(self, *names: str) -> None:
        self.changed: dict[str, set[int]] = {name: set() for name in names}

    def take_changes(self) -> dict[str, np.ndarray]:
        """Return the rows written since the last call, int64 and ascending, by table name."""
        changes = {name: np.fromiter(sorted(rows), np.int64) for name, rows in self.changed.items() if rows}
        for rows in self.changed.values():
            rows.clear()
        return changes
