"""Rows by position: which selectors they fit, and what to say where they do not."""

from __future__ import annotations

from typing import NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.positions import Positions

PER_LAYER = "one vector for each layer is per_layer=True or {layer: vector}"


class ByPosition(NamedTuple):
    """Several rows, of which the k-th belongs to the k-th selected position in ascending order.

    Attributes:
        rows: how many there are.
        path: of the intervention.
    """

    rows: int
    positions: Positions
    path: str

    def check(self, prompt_len: int | None = None) -> None:
        """Raise WeirError unless exactly as many positions are selected; `prompt_len` None: if that is known without.

        A position before the prompt's start is none; one that the request may not reach counts.
        """
        field = f"{self.path}.positions"
        if self.positions.is_open:
            raise WeirError(
                f"{self.rows} rows, but {brief(self.positions.to_json())!r} is open: how many positions it selects "
                "is not known beforehand; give one row ([d] or [1, d]) for all of them, list "
                f"{self.rows} positions, or give a slice with an end; {PER_LAYER}",
                field,
            )
        count = self.positions.count(prompt_len)
        if count is None and prompt_len is None:
            return
        if count != self.rows:
            there = "" if prompt_len is None else f" with a prompt of {prompt_len} tokens"
            raise WeirError(
                f"{self.rows} rows for {count or 0} positions{there}; give one row for each, or one for all; "
                f"{PER_LAYER}",
                field,
            )

    def check_everyone(self) -> None:
        """As `check`, for what every request undergoes: prompts of any length must select as many positions."""
        self.check()
        from_end = any(value < 0 for value in self.positions.values if value is not None)
        if from_end or self.positions.count() is None:
            raise WeirError(
                f"{self.rows} rows, but how many positions {brief(self.positions.to_json())!r} selects depends on "
                "the prompt, and every request undergoes this; count positions from 0, or give one row for all",
                f"{self.path}.positions",
            )
