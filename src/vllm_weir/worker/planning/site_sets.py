"""Site sets: the columns that are captured of a token, as rows of a table. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_weir.errors import WeirError


class SiteSets:
    """Site sets by content, counted by the requests that use them.

    Attributes:
        ranks: int32 [capacity, num_columns], a column's place in a site set, or -1.
        columns_of: site set -> its columns, ascending; one whose rows take several rows of the ring
            is repeated that often.
    """

    def __init__(self, capacity: int, num_columns: int) -> None:
        self.ranks = np.full((capacity, num_columns), -1, np.int32)
        self._changed = False
        self.columns_of: dict[int, tuple[int, ...]] = {}
        self._number_of: dict[tuple[tuple[int, ...], bool], int] = {}
        self._key_of: dict[int, tuple[tuple[int, ...], bool]] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Rows of `ranks`, from the first on, that hold all site sets in use."""
        return max(self._users, default=-1) + 1

    def write_changes(self, write: Callable[[np.ndarray], object]) -> None:
        """Call `write` with the rows of `ranks` in use, int32 [n, num_columns], unless it was and none has changed."""
        if self._changed:
            write(self.ranks[: self.used].copy())
            self._changed = False

    def __len__(self) -> int:
        return len(self._users)

    def hold(self, columns: tuple[int, ...], reduced: bool = False) -> int:
        """Add a user to the site set of these columns, as in `columns_of`, and return its number.

        The rank of a column is that of its first ring row.

        Reduced rows have site sets of their own (`reduced`): their ranks count cells of a group,
        whereas a streamed step replaces the ranks of other rows by places in bands.

        Raises:
            WeirError: if the table is full.
        """
        key = columns, reduced
        number = self._number_of.get(key)
        if number is None:
            if not self._free:
                raise WeirError(
                    f"live requests capture more than {len(self.ranks)} different sets of sites; send fewer of them at "
                    "a time, or let them capture the same sites",
                    "capture",
                )
            number = self._number_of[key] = self._free.pop()
            self._key_of[number] = key
            self.columns_of[number] = columns
            self.ranks[number] = -1
            self.ranks[number, list(reversed(columns))] = np.arange(len(columns) - 1, -1, -1)
            self._changed = True
        self._users[number] = self._users.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        """Drop one user; the last one frees the site set's row."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self.columns_of[number], self._number_of[self._key_of.pop(number)]
            self._free.append(number)
