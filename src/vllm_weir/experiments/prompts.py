"""Prompts, as experiments take them, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.util.text_lines import read_json_lines, read_lines
from vllm_weir.util.token_texts import chat_text, warn_of_unknown

Prompt = str | list[dict[str, Any]] | list[int]
"""A text, a chat (a list of messages), or token ids."""


def parse_prompts(prompts: Any, field: str) -> list[Prompt]:
    """Parse texts, chats, lists of token ids or ``{"prompt_token_ids": [...]}``; raise WeirError naming the prompt."""
    prompts = _listed(prompts)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise WeirError(f"expected a list of prompts, got {type(prompts).__name__}", field)
    if not prompts:
        raise WeirError("the list of prompts is empty; give at least one", field)
    return [parse_prompt(prompt, f"{field}[{i}]") for i, prompt in enumerate(prompts)]


def parse_one_or_more(prompts: Any, field: str) -> list[Prompt]:
    """Parse a prompt, or a list of prompts; arguments and errors as for `parse_prompts`."""
    prompts = _listed(prompts)
    if isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts):
        items = [plain(item) for item in prompts]
        one = all(map(is_int, items)) or all(isinstance(item, Mapping) and "role" in item for item in items)
        if not one:
            return [parse_prompt(items[0], field)] if len(items) == 1 else parse_prompts(items, field)
    return [parse_prompt(prompts, field)]


def parse_prompt(prompt: Any, field: str) -> Prompt:
    """Parse a prompt; arguments and errors as for `parse_prompts`."""
    prompt = _listed(prompt)
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
        prompt = _listed(prompt["prompt_token_ids"])
    if isinstance(prompt, str):
        if not prompt:
            raise WeirError("the text is empty", field)
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        items = [plain(item) for item in prompt]
        if not items:
            raise WeirError("the prompt has no tokens", field)
        if all(is_int(token) and token >= 0 for token in items):
            return [int(token) for token in items]
        if all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in items):
            return [dict(message) for message in items]
    raise WeirError("a prompt is a text, a list of messages with role and content, or a list of token ids", field)


def _listed(value: Any) -> Any:
    return value.tolist() if getattr(value, "ndim", 0) > 0 else plain(value)


def named(prompts: Sequence[Any], field: str) -> list[str]:
    """Return how errors name the prompts of a list; the only one has the name of the argument."""
    return [field] if len(prompts) == 1 else [f"{field}[{i}]" for i in range(len(prompts))]


def encode(
    prompts: Sequence[Prompt], tokenizer: Callable[[], Any], longest: int | None, fields: Sequence[str]
) -> list[list[int]]:
    """Return the tokens of prompts.

    A text gets the special tokens that the tokenizer adds to a prompt, a chat those of its template.
    Texts with words that the tokenizer does not know get one warning.

    Args:
        prompts: as they were parsed.
        tokenizer: returns the model's, or None if it has none; called only if it is needed.
        longest: tokens that the engine takes; None if no engine is asked.
        fields: how errors name the prompts.

    Raises:
        WeirError: naming the prompt, if it has no tokens, too many, or its template refuses it.
    """
    encoded: list[list[int]] = [[] for _ in prompts]
    texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
    for i, (prompt, field) in enumerate(zip(prompts, fields, strict=True)):
        if isinstance(prompt, str):
            texts[True].append((i, prompt))
        elif isinstance(prompt[0], dict):
            texts[False].append((i, chat_text(_present(tokenizer(), field), prompt, field)))
        else:
            encoded[i] = list(prompt)  # type: ignore[arg-type]
    for special, group in texts.items():
        if group:
            called = _present(tokenizer(), fields[group[0][0]])
            ids = called([text for _, text in group], add_special_tokens=special)["input_ids"]
            for (i, _), tokens in zip(group, ids, strict=True):
                encoded[i] = list(tokens)
    if written := texts[True] + texts[False]:
        warn_of_unknown(tokenizer(), [text for _, text in written], [encoded[i] for i, _ in written])
    for tokens, field in zip(encoded, fields, strict=True):
        if not tokens:
            raise WeirError("the prompt has no tokens", field)
        if longest is not None and len(tokens) > longest:
            raise WeirError(f"{len(tokens)} tokens, and the engine takes 1 to {longest}", field)
    return encoded


def check_tokens(encoded: Sequence[Sequence[int]], size: int, fields: Sequence[str]) -> None:
    """Raise WeirError naming the first prompt with a token that a vocabulary of that size does not have."""
    for tokens, field in zip(encoded, fields, strict=True):
        if max(tokens) >= size:
            raise WeirError(f"token {max(tokens)} does not exist: the vocabulary has {size}", field)


def _present(tokenizer: Any, field: str) -> Any:
    if tokenizer is None:
        raise WeirError("there is no tokenizer; give token ids", field)
    return tokenizer


def read_prompts(path: str | PathLike, field: str, column: str = "text") -> list[Any]:
    """Read the prompts of one class, for `parse_prompts`.

    JSON lines are texts, chats, lists of token ids, or objects with one of these under `column` or ``messages``; any
    other file has one text a line. WeirError names the line, StoreError a file that cannot be read.
    """
    if Path(path).suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return [line for _, line in read_lines(path, field)]
    return [_prompt(value, where, field, column) for where, value in read_json_lines(path, field)]


def _prompt(value: Any, where: str, field: str, column: str) -> Any:
    if not isinstance(value, dict):
        return value
    for key in (column, "messages"):
        if key in value:
            return value[key]
    raise WeirError(f"{where} has neither {column!r} nor 'messages'", field)
