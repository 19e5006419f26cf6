"""Tokens as text: what each token adds to a sequence, the token for unknown words, a chat as a prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError


class TokenTexts:
    """Texts of tokens; without a tokenizer, their ids. `tokenizer`: of transformers or vLLM, or None."""

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

    `ids`: returns the token at each position, int64, -1 where it is not known; None if no token is. `texts`: of tokens.
    """

    def __init__(self, ids: Callable[[], np.ndarray] | None = None, texts: TokenTexts | None = None) -> None:
        self._ids, self.texts = ids, texts or TokenTexts()

    def __reduce__(self) -> tuple[type, tuple]:
        return SequenceTexts, ()

    def at(self, positions: np.ndarray, token_ids: np.ndarray | None = None) -> list[str]:
        """Return a text for each position: the token's, or else its id, or else the position.

        `positions`: int64 [n], ascending; `token_ids`: the tokens there, if they are known.
        """
        if token_ids is None:
            if self._ids is None:
                return [str(position) for position in positions.tolist()]
            token_ids = self._ids()[positions]
        ids = token_ids.tolist()
        if ids and min(ids) >= 0 and positions[-1] - positions[0] == len(ids) - 1:
            return self.texts.pieces(ids)
        return ["" if one < 0 else self.texts.single(one) for one in ids]


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's unknown token; None if it has none.

    Byte-level tokenizers know every text, and name a token as unknown that they also begin or end
    prompts with.
    """
    name = getattr(tokenizer, "unk_token", None)
    if name is None:  # not declared, and used all the same
        name = getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "unk_token", None)
    if not name or name in {getattr(tokenizer, f"{kind}_token", None) for kind in ("bos", "eos", "cls", "sep")}:
        return None
    return tokenizer.convert_tokens_to_ids(name)


def warn_of_unknown(tokenizer: Any, texts: Sequence[str], encoded: Sequence[Sequence[int]]) -> bool:
    """Warn, once, if tokens of texts hold the unknown token where the text does not; return whether they do."""
    unknown = unknown_id(tokenizer)
    if unknown is None:
        return False
    name = tokenizer.convert_ids_to_tokens(unknown)
    found = [text for text, tokens in zip(texts, encoded, strict=True) if unknown in tokens and name not in text]
    if found:
        warnings.warn(
            f"{len(found)} of {len(texts)} texts hold words that the tokenizer does not know and replaces by "
            f"{name!r} ({unknown}), first in {found[0][:60]!r}: the model reads the same token for all such words",
            stacklevel=3,
        )
    return bool(found)


def chat_text(tokenizer: Any, messages: Sequence[Any], field: str = "") -> str:
    """Return the text that a tokenizer's chat template makes of messages, special tokens included.

    It ends where the assistant's answer begins, unless the last message is the assistant's. Raises WeirError, naming
    `field`, if the template refuses them.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
        )
    except (TemplateError, ValueError, TypeError, KeyError) as e:
        raise WeirError(f"the chat template refuses it: {str(e)[:160]}", field) from None
