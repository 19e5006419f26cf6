"""Refusals that name a field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vllm_weir.errors import WeirError


@contextmanager
def raises_for(field: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[WeirError]]:
    """Expect that the block raises a `WeirError` of this field, whose text `match` is found in."""
    with pytest.raises(WeirError, match=match) as error:
        yield error
    assert error.value.field == field, error.value
