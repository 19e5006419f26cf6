"""The token that a tokenizer puts in place of words that it does not know."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


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
