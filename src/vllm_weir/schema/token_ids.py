"""Tokens that a caller names."""

from __future__ import annotations

from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.scalars import is_int, plain
from vllm_weir.util.token_texts import unknown_id


def token_id(value: Any, tokenizer: Any, field_name: str) -> int:
    """Return the id of a token that is given by its text or id; raise WeirError if a text is not one known token."""
    value = plain(value)
    if is_int(value):
        if value < 0:
            raise WeirError("a token id is never negative", field_name)
        return int(value)
    if not isinstance(value, str):
        raise WeirError(f"expected a token's text or id, got {type(value).__name__}", field_name)
    if tokenizer is None:
        raise WeirError("the engine has no tokenizer; give token ids", field_name)
    unknown = unknown_id(tokenizer)
    other = value.lstrip() if value[:1].isspace() else f" {value}"
    ids, of_other = (list(tokenizer.encode(text, add_special_tokens=False)) for text in (value, other))
    if len(ids) == 1 and (ids[0] != unknown or tokenizer.convert_ids_to_tokens(unknown) == value):
        return int(ids[0])
    what = f"{len(ids)} tokens, {ids[:8]}"
    if len(ids) == 1:
        what = f"no token of the model: it becomes {tokenizer.convert_ids_to_tokens(unknown)!r} ({unknown})"
    fits = len(of_other) == 1 and of_other[0] != unknown
    instead = f"did you mean {other!r}?" if fits else "give a text of one token, or a token's id"
    raise WeirError(f"{brief(value)!r} is {what}; {instead}", field_name)
