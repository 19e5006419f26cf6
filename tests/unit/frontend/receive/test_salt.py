"""Blocks that a failed request left in the prefix cache are nobody else's: each failure changes the salt."""

from __future__ import annotations

import pytest

from tests.unit.scored import Worker
from vllm_weir.frontend.receive.row_store import RowStore


@pytest.mark.parametrize("failure", [{"failures": {"somebody": "out of memory"}}, {"broken": "a step was lost"}])
def test_each_failure_changes_the_salt(failure):
    store = RowStore()
    worker = Worker(store)
    worker.send()
    assert store.salt == ""
    worker.send(**failure)
    first = store.salt
    assert first
    worker.send()
    assert store.salt == first
    worker.send(**failure)
    assert store.salt not in ("", first)
