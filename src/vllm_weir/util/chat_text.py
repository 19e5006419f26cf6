"""A chat as the text that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_weir.errors import WeirError


def chat_text(tokenizer: Any, messages: Sequence[Any], field: str = "") -> str:
    """Return the text that a tokenizer's chat template makes of messages, special tokens included.

    It ends where the assistant's answer begins, unless the last message is the assistant's.

    Raises:
        WeirError: naming `field`, if the template refuses them.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
        )
    except (TemplateError, ValueError, TypeError, KeyError) as e:
        raise WeirError(f"the chat template refuses it: {str(e)[:160]}", field) from None
