"""JSON and HTTP header text from untrusted callers."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from vllm_weir.errors import WeirError, brief


def is_json(data: bytes) -> bool:
    """Return whether the bytes of a file begin as an object or a list of JSON does, and no safetensors file."""
    # A byte-order mark may come first. The length with which safetensors begins has bytes of 0.
    return re.match(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[\[{]", data) is not None and b"\0" not in data[:8]


def loads(text: str | bytes, path: str) -> Any:
    """Parse JSON; raise WeirError naming `path` if it is invalid or repeats a key in an object."""
    try:
        return json.loads(text, object_pairs_hook=functools.partial(_without_duplicates, path=path))
    except WeirError:
        raise
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise WeirError(f"not valid JSON ({type(e).__name__}: {str(e)[:80]})", path) from None


def dumps(data: Any, path: str, sort_keys: bool = False) -> str:
    """Return JSON text; raise WeirError naming `path` for other data, such as NaN."""
    try:
        return json.dumps(data, sort_keys=sort_keys, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise WeirError(f"not plain JSON data ({str(e)[:80]})", path) from None


def fits_header(text: str) -> bool:
    """Return whether an HTTP header can carry the text: one line, without blanks around it."""
    return text == text.strip() and not any(c < " " or c == "\x7f" for c in text)


def _without_duplicates(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    """Build an object; refuse a repeated key, whose first value `json` would drop silently."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise WeirError(f"the key {brief(duplicate)!r} comes twice in one object; keep one of them", path)
    return out
