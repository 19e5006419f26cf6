"""JSON as text, from whoever may have written it."""

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


def _once(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    """An object of JSON text; of a key that comes twice, a parser would ignore the first without a word."""
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise WeirError(f"the key {brief(twice)!r} comes twice in one object; say it once", path)
    return out
