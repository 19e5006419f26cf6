"""Prompts in files: a text a line, or JSON a line."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from vllm_weir.errors import StoreError, WeirError


def read_prompts(path: str | PathLike, field: str, column: str = "text") -> list[Any]:
    """Read the prompts of one class.

    Args:
        path: ``.jsonl`` (or ``.ndjson``, ``.json`` with one value a line): texts, chats (lists of
            messages), lists of token ids, or objects with one of these under `column`, or under
            ``messages``; any other file has one text a line. Empty lines are passed over.
        field: named by errors.
        column: key of the objects.

    Raises:
        WeirError: naming the line.
        StoreError: if the file cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # not where Unicode sees further ends of lines
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror or e}", field) from None
    except UnicodeDecodeError as e:
        raise WeirError(f"{path} is not UTF-8: {e.reason} at byte {e.start}", field) from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if Path(path).suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return [line for _, line in numbered]
    return [_value(line, f"{path}, line {i}", field, column) for i, line in numbered]


def _value(line: str, where: str, field: str, column: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise WeirError(f"{where} is not JSON: {e}", field) from None
    if not isinstance(value, dict):
        return value
    for key in (column, "messages"):
        if key in value:
            return value[key]
    raise WeirError(f"{where} has neither {column!r} nor 'messages'", field)
