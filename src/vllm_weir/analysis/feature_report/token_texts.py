"""`TokenTexts`: the text that each token adds to a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_weir.errors import WeirError


class TokenTexts:
    """Texts of tokens; without a tokenizer, their ids.

    Args:
        tokenizer: of transformers, or None.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

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
        """Return the text of a token by itself."""
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
        return self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
