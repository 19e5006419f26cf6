"""`TokenTexts`: the text that each token adds to a sequence. `SequenceTexts`: those of one sequence, by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError


class TokenTexts:
    """Texts of tokens; without a tokenizer, their ids.

    Args:
        tokenizer: of transformers or vLLM, or None.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._cleans_up = hasattr(tokenizer, "clean_up_tokenization_spaces")

    @classmethod
    def of_checkpoint(cls, model: str) -> TokenTexts:
        """Load the tokenizer of a checkpoint; raise WeirError if transformers cannot."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(model))
        except (OSError, ValueError, ImportError, KeyError) as e:
            raise WeirError(
                f"transformers cannot load the tokenizer of {model}: {' '.join(str(e).split())[:160]}"
            ) from e

    def single(self, token_id: int) -> str:
        return self._decode([token_id])

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text of a sequence.

        A token alone may lose its leading space, or be a part of a character, which then comes with
        the token that completes it.
        """
        out: list[str] = []
        before = ""
        for end in range(1, len(token_ids) + 1):
            text = self._decode(token_ids[:end])
            if text.endswith("\ufffd") and end < len(token_ids):
                out.append("")
                continue
            out.append(text[len(before) :] if text.startswith(before) else self._decode(token_ids[end - 1 : end]))
            before = text
        return out

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"[{token}]" for token in token_ids)
        as_they_are = {"clean_up_tokenization_spaces": False} if self._cleans_up else {}
        return self._tokenizer.decode(list(token_ids), **as_they_are)


class SequenceTexts:
    """Texts of a sequence's tokens, looked up when something is shown; a pickle has none of them.

    Args:
        ids: returns the token at each position, int64, -1 where it is not known; None if no token is.
        texts: of tokens.
    """

    def __init__(self, ids: Callable[[], np.ndarray] | None = None, texts: TokenTexts | None = None) -> None:
        self._ids, self.texts = ids, texts or TokenTexts()

    def __reduce__(self) -> tuple[type, tuple]:
        return SequenceTexts, ()

    def at(self, positions: np.ndarray, token_ids: np.ndarray | None = None) -> list[str]:
        """Return a text for each position: the token's, or else its id, or else the position.

        Args:
            positions: int64 [n], ascending.
            token_ids: the tokens there, if they are known.
        """
        if token_ids is None:
            if self._ids is None:
                return [str(position) for position in positions.tolist()]
            token_ids = self._ids()[positions]
        ids = token_ids.tolist()
        if ids and min(ids) >= 0 and positions[-1] - positions[0] == len(ids) - 1:
            return self.texts.pieces(ids)
        return ["" if one < 0 else self.texts.single(one) for one in ids]
