"""`FittedLens`: a lens of an engine, or of a file alone."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.lenses.files import LensFile, open_lens
from vllm_weir.schema.fields import is_int, plain


class FittedLens:
    """A tuned or Jacobian lens, as `load_lens` and `fit_lens` return it, or read with ``FittedLens(path)``.

    Args:
        lens: its path, or its opened files.
        num_layers: blocks of its engine's model; None without an engine.
        unembedding: returns a token's row of the model's unembedding [d_model], or of an ``AsyncLLM`` what gives it
            when awaited; None without an engine.

    Attributes:
        kind: ``"tuned"`` or ``"jacobian"``.
        path: of its directory or file.
        layers: blocks of which it reads what leaves them, besides the last block.
        d_model: width of the stream.
        n_prompts: which a Jacobian lens was fitted on; None if the file does not say.

    Raises:
        WeirError: if the path has no lens.
    """

    def __init__(
        self,
        lens: LensFile | str | os.PathLike,
        num_layers: int | None = None,
        unembedding: Callable[[int], torch.Tensor | Awaitable[torch.Tensor]] | None = None,
    ) -> None:
        self._file = lens if isinstance(lens, LensFile) else open_lens(lens)
        self._num_layers, self._unembedding = num_layers, unembedding
        self.kind, self.path = self._file.kind, Path(self._file.path)
        self.layers, self.d_model, self.n_prompts = self._file.layers, self._file.d_model, self._file.n_prompts

    def __repr__(self) -> str:
        return f"FittedLens({self.kind}, {len(self.layers)} blocks, d_model={self.d_model}, {str(self.path)!r})"

    def matrix(self, layer: int) -> torch.Tensor:
        """Return the map A [d_model, d_model] of rows that leave a block, as the file stores it.

        Of a Jacobian lens it is J; of a tuned one I + A.

        Raises:
            WeirError: if the lens has none for the block.
        """
        return self._file.translator(layer).matrix

    def direction(self, token_id: int, layer: int) -> torch.Tensor:
        """Return the direction at a block along which the lens sees a token: A^T W_U[token], float32 [d_model].

        Adding it (``weir.Add(lens.direction(token, 3), layers=[3])``) raises the token's logit under the lens, but
        for the final norm, and ablating it removes what the lens reads as the token. At the last block it is
        W_U[token], the token's row of the unembedding.

        Args:
            token_id: of the token.
            layer: block.

        Raises:
            WeirError: if the lens has nothing for the block, there is no such token, or the lens has no engine.
                Of an ``AsyncLLM`` await `direction_async`.
        """
        row = self._row(token_id)
        if not isinstance(row, torch.Tensor):
            raise WeirError("this engine answers only asynchronously; await direction_async", "lens")
        return self._seen_from(row, layer)

    async def direction_async(self, token_id: int, layer: int) -> torch.Tensor:
        """Do what `direction` does, for a lens of an ``AsyncLLM``."""
        row = self._row(token_id)
        return self._seen_from(row if isinstance(row, torch.Tensor) else await row, layer)

    def _row(self, token_id: Any) -> torch.Tensor | Awaitable[torch.Tensor]:
        if self._unembedding is None:
            raise WeirError("this lens has no engine, whose unembedding it needs; weir.load_lens(llm, ..) has", "lens")
        token_id = plain(token_id)
        if not is_int(token_id) or token_id < 0:  # type: ignore[operator]
            raise WeirError(f"a token id is an int from 0, got {brief(token_id)!r}", "token_id")
        return self._unembedding(int(token_id))  # type: ignore[call-overload]

    def _seen_from(self, row: torch.Tensor, layer: int) -> torch.Tensor:
        if self._num_layers is not None and layer == self._num_layers - 1:
            return row
        return self.matrix(layer).float().T @ row
