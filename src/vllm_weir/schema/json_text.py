"""Text from whoever may have written it: JSON, and what goes into a header of HTTP."""

from __future__ import annotations

import functools
import json
from typing import Any

from vllm_weir.errors import WeirError, brief


def loads(text: str | bytes, path: str) -> Any:
    """The data; raises WeirError naming `path` if it is no JSON, or says one key of an object twice."""
    try:
        return json.loads(text, object_pairs_hook=functools.partial(_once, path=path))
    except WeirError:
        raise
    except (ValueError, RecursionError) as e:  # of which UnicodeDecodeError is one
        raise WeirError(f"not valid JSON ({type(e).__name__}: {str(e)[:80]})", path) from None


def dumps(data: Any, path: str, sort_keys: bool = False) -> str:
    """The text; raises WeirError naming `path` if the data is no plain JSON data, as NaN is not."""
    try:
        return json.dumps(data, sort_keys=sort_keys, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise WeirError(f"not plain JSON data ({str(e)[:80]})", path) from None


def fits_header(text: str) -> bool:
    """Whether a header carries it as it is: one line, without blanks around it."""
    return text == text.strip() and not any(c < " " or c == "\x7f" for c in text)


def _once(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    """An object of JSON text; of a key that comes twice, a parser would ignore the first without a word."""
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise WeirError(f"the key {brief(twice)!r} comes twice in one object; say it once", path)
    return out
