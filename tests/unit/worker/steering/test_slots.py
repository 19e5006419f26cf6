"""Rows of a table by key: none is given twice, and what is held keeps its content wherever it is moved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.worker.steering.slots import Slots

CAPACITY = 12


class Table:
    """Slots, and the content that their owner keeps there: a row's is its key and its place."""

    def __init__(self) -> None:
        self.slots, self.rows, self.moved = Slots(CAPACITY, self.move), np.full((CAPACITY, 2), -1), 0

    def move(self, moves) -> None:
        for source, target, rows in moves:
            self.rows[target : target + rows] = self.rows[source : source + rows]
        self.moved += 1

    def hold(self, key: int, rows: int) -> None:
        slot, is_new = self.slots.hold(key, rows)
        if is_new:
            self.rows[slot : slot + rows] = [(key, k) for k in range(rows)]


@given(st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=60))
def test_rows_are_held_once_and_keep_their_content(steps):
    table, users = Table(), dict.fromkeys(range(16), 0)
    sizes = {key: 1 if key % 4 else 2 + key // 4 for key in users}  # 2, 1, 1, 1, 3, 1, 1, 1, 4, ...
    for key, joins in steps:
        in_use = sum(sizes[k] for k, n in users.items() if n)
        if not joins:
            if users[key]:
                users[key] -= 1
                assert table.slots.release(key) == (users[key] == 0)
        elif users[key] or in_use + sizes[key] <= CAPACITY:
            table.hold(key, sizes[key])
            users[key] += 1
        else:
            with pytest.raises(IndexError):
                table.hold(key, sizes[key])
        assert table.slots.in_use == sum(sizes[k] for k, n in users.items() if n)
        for held, slot in table.slots.slot_of.items():
            assert table.rows[slot : slot + sizes[held]].tolist() == [[held, k] for k in range(sizes[held])]
        assert {k for k, n in users.items() if n} <= table.slots.slot_of.keys()


def test_what_is_in_use_again_is_given_to_no_other():
    slots = Slots(2)
    for key in "ab":
        slots.hold(key)
    slots.release("a")
    assert slots.hold("a") == (slots.slot_of["a"], False)
    with pytest.raises(IndexError):
        slots.hold("c")
    slots.release("b")
    assert slots.hold("c")[1] and slots.slot_of.keys() == {"a", "c"}


def test_scattered_free_rows_are_brought_together():
    table = Table()
    for key in range(CAPACITY):
        table.hold(key, 1)
    for key in range(0, CAPACITY, 3):
        table.slots.release(key)
        table.slots.forget(key)
    table.hold(100, 4)
    assert table.moved == 1 and table.slots.in_use == CAPACITY
    assert table.rows[:, 0].tolist() == [1, 2, 4, 5, 7, 8, 10, 11, 100, 100, 100, 100]


def test_idle_rows_go_first_and_single_ones_are_taken_far_from_several():
    table = Table()
    table.hold(0, 3)
    table.hold(1, 1)
    assert table.slots.slot_of == {0: CAPACITY - 3, 1: 0}
    table.slots.release(0)
    for key in range(2, 10):
        table.hold(key, 1)
    assert 0 in table.slots.slot_of, "idle, and not needed yet"
    table.hold(10, 1)
    assert 0 not in table.slots.slot_of
