"""The prompts of the two classes, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.schema.scalars import is_int, plain

Prompt = str | list[dict[str, Any]] | list[int]
"""A text, a chat (a list of messages), or token ids."""


def parse_prompts(prompts: Any, field: str) -> list[Prompt]:
    """Parse the prompts of one class.

    Args:
        prompts: a list of texts, chats, lists of token ids, or ``{"prompt_token_ids": [...]}``.
        field: named by errors.

    Raises:
        WeirError: naming the prompt.
    """
    prompts = _listed(prompts)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise WeirError(f"expected a list of prompts, got {type(prompts).__name__}", field)
    if not prompts:
        raise WeirError("an empty list of prompts has no mean; give at least one", field)
    return [_parse_prompt(prompt, f"{field}[{i}]") for i, prompt in enumerate(prompts)]


def _parse_prompt(prompt: Any, field: str) -> Prompt:
    prompt = _listed(prompt)
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
        prompt = _listed(prompt["prompt_token_ids"])
    if isinstance(prompt, str):
        if not prompt:
            raise WeirError("the text is empty", field)
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and len(prompt):
        items = list(prompt)
        if all(is_int(token) and token >= 0 for token in items):
            return [int(token) for token in items]
        if all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in items):
            return [dict(message) for message in items]
    raise WeirError("a prompt is a text, a list of messages with role and content, or a list of token ids", field)


def _listed(value: Any) -> Any:
    """Return an array or tensor as a list, anything else as it is."""
    return value.tolist() if getattr(value, "ndim", 0) > 0 else plain(value)


def encode(prompts: Sequence[Prompt], tokenizer: Callable[[], Any], longest: int, field: str) -> list[list[int]]:
    """Return the tokens of prompts.

    A text gets the special tokens that the tokenizer adds to a prompt, a chat those of its template.

    Args:
        prompts: as `parse_prompts` returns them.
        tokenizer: returns the engine's; called only if it is needed.
        longest: tokens that the engine takes.
        field: named by errors.

    Raises:
        WeirError: naming the prompt, if it has no tokens, too many, or its template refuses it.
    """
    encoded: list[list[int]] = [[] for _ in prompts]
    texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            texts[True].append((i, prompt))
        elif isinstance(prompt[0], dict):
            texts[False].append((i, _chat_text(tokenizer(), prompt, f"{field}[{i}]")))
        else:
            encoded[i] = list(prompt)  # type: ignore[arg-type]
    for special, group in texts.items():
        if group:
            ids = tokenizer()([text for _, text in group], add_special_tokens=special)["input_ids"]
            for (i, _), tokens in zip(group, ids, strict=True):
                encoded[i] = list(tokens)
    for i, tokens in enumerate(encoded):
        if not 0 < len(tokens) <= longest:
            raise WeirError(f"{len(tokens)} tokens, and the engine takes 1 to {longest}", f"{field}[{i}]")
    return encoded


def _chat_text(tokenizer: Any, messages: Any, field: str) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
        )
    except (TemplateError, ValueError, TypeError, KeyError) as e:
        raise WeirError(f"the chat template refuses it: {str(e)[:160]}", field) from None
