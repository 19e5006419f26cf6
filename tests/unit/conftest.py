"""What holds for all of these tests: nothing fails because the machine is slow, or is slow because much is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_heap() -> Iterator[None]:
    """The garbage collector does not look at what is imported and collected, which stays.

    Some tests collect garbage to see that something is gone, and a look at all of it takes half a second. Engines come
    before these tests; vLLM freezes and unfreezes the heap itself.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
