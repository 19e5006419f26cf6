"""Prompts in files: a text a line, or JSON a line."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.util.text_lines import read_json_lines, read_lines


def read_prompts(path: str | PathLike, field: str, column: str = "text") -> list[Any]:
    """Read the prompts of one class.

    Args:
        path: ``.jsonl`` (or ``.ndjson``, ``.json`` with one value a line): texts, chats (lists of
            messages), lists of token ids, or objects with one of these under `column`, or under
            ``messages``; any other file has one text a line. Blank lines are passed over.
        field: named by errors.
        column: key of the objects.

    Raises:
        WeirError: naming the line.
        StoreError: if the file cannot be read.
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
