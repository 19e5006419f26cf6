"""A sequence's tokens at the time of one output, made into arrays when somebody looks at them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from vllm_weir.schema.hooks import Site


class PromptTokens:
    """The tokens of a prompt.

    Args:
        ids: token ids that nobody changes; -1 each for a prompt given as embeddings.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @functools.cached_property
    def array(self) -> np.ndarray:
        return np.asarray(self._ids, np.int64)


class SequenceTokens:
    """The tokens that have rows: the prompt, and every generated token but the last.

    The last one never enters the model.

    Args:
        prompt: the prompt's tokens.
        generated: the generated tokens; more may be appended later.

    Attributes:
        prompt_len: tokens of the prompt.
        generated: tokens generated so far.
    """

    def __init__(self, prompt: PromptTokens, generated: Sequence[int]) -> None:
        self._prompt, self._generated_ids = prompt, generated
        self.prompt_len, self.generated = len(prompt), len(generated)

    def __len__(self) -> int:
        return self.prompt_len + max(self.generated - 1, 0)

    @functools.cached_property
    def array(self) -> np.ndarray:
        """int64, token at each position."""
        return self.up_to(len(self))

    def up_to(self, end: int) -> np.ndarray:
        """Return the tokens at the positions before `end`, int64; one after the prompt may be the last token's."""
        count = end - self.prompt_len
        if count < 1:
            return self._prompt.array[:end]
        return np.concatenate([self._prompt.array, np.asarray(self._generated_ids[:count], np.int64)])


class TokenIds(Mapping):
    """The token at each row, int64 [rows] by site; sites with the same positions share a tensor."""

    def __init__(self, tokens: SequenceTokens, positions: Mapping[Site, torch.Tensor]) -> None:
        self._tokens, self._positions = tokens, positions
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(positions, token ids at them)."""

    def __getitem__(self, site: Site) -> torch.Tensor:
        positions = self._positions[site]
        for cached_positions, ids in self._cache:
            if cached_positions is positions:
                return ids
        ids = torch.from_numpy(self._tokens.array[positions.numpy()])
        self._cache.append((positions, ids))
        return ids

    def __iter__(self) -> Iterator[Site]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)
