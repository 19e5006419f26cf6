"""What is imported and collected stays: the garbage collector does not look at it again during these tests.

Some collect garbage to see that something is gone, and half a second for each look at all of it was most of their time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_heap() -> Iterator[None]:
    """From the first of these tests on; engines come first, and vLLM freezes and unfreezes the heap itself."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
