"""A sequence's tokens as they were at one output, turned into arrays when somebody looks at them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from vllm_weir.schema.hooks import Site


class PromptTokens:
    """A prompt's tokens: a list that nobody changes, -1 for prompts given as embeddings."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @functools.cached_property
    def array(self) -> np.ndarray:
        """int64 [P]."""
        return np.asarray(self._ids, np.int64)


class SequenceTokens:
    """Tokens that have rows: the prompt and every generated token but the last, which never enters the model.

    Args:
        generated: the generated tokens; more may be appended later.

    Attributes:
        prompt_len: P.
        generated: how many tokens were generated so far.
    """

    def __init__(self, prompt: PromptTokens, generated: Sequence[int]) -> None:
        self._prompt, self._ids = prompt, generated
        self.prompt_len, self.generated = len(prompt), len(generated)

    def __len__(self) -> int:
        return self.prompt_len + max(self.generated - 1, 0)

    @functools.cached_property
    def array(self) -> np.ndarray:
        """int64, token at each position."""
        if self.generated < 2:
            return self._prompt.array
        return np.concatenate([self._prompt.array, np.asarray(self._ids[: self.generated - 1], np.int64)])


class TokenIds(Mapping):
    """Site -> token at each of its rows, int64 [rows]; the same tensor for sites that share their positions."""

    def __init__(self, tokens: SequenceTokens, positions: Mapping[Site, torch.Tensor]) -> None:
        self._tokens, self._positions = tokens, positions
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, site: Site) -> torch.Tensor:
        at = self._positions[site]
        for positions, ids in self._made:
            if positions is at:
                return ids
        ids = torch.from_numpy(self._tokens.array[at.numpy()])
        self._made.append((at, ids))
        return ids

    def __iter__(self) -> Iterator[Site]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)
