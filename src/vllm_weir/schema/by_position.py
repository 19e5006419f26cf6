"""Rows by position: several rows of an intervention, one for each selected position."""

from __future__ import annotations

from typing import NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.positions import Positions

PER_LAYER = "one vector for each layer is per_layer=True or {layer: vector}"


class ByPosition(NamedTuple):
    """Several rows, of which the k-th belongs to the k-th selected position in ascending order.

    Attributes:
        rows: how many there are.
        positions: selector of the intervention.
        path: of the intervention, for errors.
    """

    rows: int
    positions: Positions
    path: str

    def check(self, prompt_len: int | None = None) -> None:
        """Raise WeirError unless the selector names exactly as many positions as there are rows.

        Positions before the prompt's start do not count; those that the request may never reach do. Without
        `prompt_len` it checks only what is known without it.
        """
        field = f"{self.path}.positions"
        if self.positions.is_open:
            raise WeirError(
                f"{self.rows} rows, but {brief(self.positions.to_json())!r} is open-ended: how many positions it "
                "selects is not known beforehand; give one row ([d] or [1, d]) for all of them, list "
                f"{self.rows} positions, or give a slice with an end; {PER_LAYER}",
                field,
            )
        count = self.positions.count(prompt_len)
        if count is None and prompt_len is None:
            return
        if count != self.rows:
            with_prompt = "" if prompt_len is None else f" with a prompt of {prompt_len} tokens"
            raise WeirError(
                f"{self.rows} rows for {count or 0} positions{with_prompt}; give one row for each, or one for all; "
                f"{PER_LAYER}",
                field,
            )

    def check_everyone(self) -> None:
        """Raise WeirError unless it names as many positions whatever the prompt's length, for every request."""
        self.check()
        counts_from_end = any(value < 0 for value in self.positions.numbers)
        if counts_from_end or self.positions.count() is None:
            raise WeirError(
                f"{self.rows} rows, but how many positions {brief(self.positions.to_json())!r} selects depends on "
                "the prompt, and every request undergoes this intervention; count positions from 0, or give one "
                "row for all",
                f"{self.path}.positions",
            )
