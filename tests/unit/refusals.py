"""What is refused, by the field that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_weir.errors import WeirError


@contextmanager
def refused(field: str | None, why: str | None = None) -> Iterator[pytest.ExceptionInfo[WeirError]]:
    """Expect a refusal that names the field, with a message that has `why` (a regular expression) in it."""
    with pytest.raises(WeirError, match=why) as caught:
        yield caught
    assert caught.value.field == field, caught.value


def pairs(table: Mapping[str, Iterable[Any]]) -> list[tuple[str, Any]]:
    """Return (field, wrong value) for each of a table's wrong values, to be a test's parameters."""
    return [(field, value) for field, values in table.items() for value in values]
