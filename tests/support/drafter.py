"""A drafter for speculative decoding that knows what comes: some of its drafts are right, and some are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

SPECULATIVE = {"method": "custom_class", "model": "tests.support.drafter.KnownDrafter", "num_speculative_tokens": 3}


class KnownDrafter:
    """Drafts the tokens that follow in a sequence that it was taught, three of seven changed.

    Attributes:
        known: the sequences, by their first tokens.
    """

    known: ClassVar[dict[tuple[int, ...], list[list[int]]]] = {}

    def __init__(self, vllm_config: Any) -> None:
        self._drafts = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len

    @classmethod
    def teach(cls, sequences: Iterable[list[int]]) -> None:
        """Let the drafter know sequences of token ids."""
        for sequence in sequences:
            cls.known.setdefault(tuple(sequence[:2]), []).append(sequence)

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is none."""

    def propose(self, sampled: list[list[int]], lengths: Any, token_ids: Any, **_more: Any) -> list[list[int]]:
        """Return the drafts of each sequence of a batch."""
        return [self._follow(token_ids[k, : lengths[k]].tolist()) if ids else [] for k, ids in enumerate(sampled)]

    def _follow(self, so_far: list[int]) -> list[int]:
        n = len(so_far)
        room = max(0, min(self._drafts, self._longest - n - 1))
        for sequence in self.known.get(tuple(so_far[:2]), ()):
            if sequence[:n] == so_far:
                return [t ^ 1 if (n + k) % 7 in (0, 2, 3) else t for k, t in enumerate(sequence[n : n + room])]
        return so_far[:room]
