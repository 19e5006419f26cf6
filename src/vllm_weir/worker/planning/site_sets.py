"""Profiles: sets of columns that tokens have recorded, as rows of the rank table. Pure numpy."""

from __future__ import annotations

import numpy as np

from vllm_weir.errors import WeirError


class SiteSets:
    """Profiles by content, counted by the requests that use them.

    Attributes:
        ranks: int32 [profiles, columns], a column's place in a profile, or -1.
        changed: whether `ranks` has changed since this was last set to False.
        columns_of: profile -> its columns, ascending.
    """

    def __init__(self, most: int, num_columns: int) -> None:
        self.ranks = np.full((most, num_columns), -1, np.int32)
        self.changed = False
        self.columns_of: dict[int, tuple[int, ...]] = {}
        self._of: dict[tuple[tuple[int, ...], bool], int] = {}
        self._keys: dict[int, tuple[tuple[int, ...], bool]] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(most - 1, -1, -1))

    @property
    def used(self) -> int:
        """Rows of `ranks`, from the first on, that hold all that are in use."""
        return max(self._users, default=-1) + 1

    def __len__(self) -> int:
        return len(self._users)

    def take(self, columns: tuple[int, ...], folded: bool = False) -> int:
        """The profile of these columns (ascending), with one user more; raises WeirError if the table is full.

        Tokens whose rows are reduced (`folded`) have profiles of their own, as their ranks stand where those of others
        are places of a streamed step.
        """
        key = columns, folded
        profile = self._of.get(key)
        if profile is None:
            if not self._free:
                raise WeirError(f"more than {len(self.ranks)} different site sets are wanted at once", "capture")
            profile = self._of[key] = self._free.pop()
            self._keys[profile] = key
            self.columns_of[profile] = columns
            self.ranks[profile] = -1
            self.ranks[profile, list(columns)] = np.arange(len(columns))
            self.changed = True
        self._users[profile] = self._users.get(profile, 0) + 1
        return profile

    def give_back(self, profile: int) -> None:
        """One user less; after the last one the profile's row is free."""
        self._users[profile] -= 1
        if not self._users[profile]:
            del self._users[profile], self.columns_of[profile], self._of[self._keys.pop(profile)]
            self._free.append(profile)
