"""`frozen_heap` freezes what exists, for as long as it lasts, and leaves alone what others have frozen."""

from __future__ import annotations

import gc

import pytest

from vllm_weir.util.memory import frozen_heap


@pytest.fixture
def nothing_frozen():
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if before:
        gc.freeze()


def test_what_exists_is_frozen_until_the_end(nothing_frozen: None) -> None:
    with pytest.raises(KeyError), frozen_heap():
        assert gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_is_frozen_stays_frozen(nothing_frozen: None) -> None:
    gc.freeze()
    with frozen_heap():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() > 1000
