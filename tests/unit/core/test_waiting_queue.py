"""`WaitingQueue`: who waits for room in the device tables, and who goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.schema.engine_spec import TableNeeds
from vllm_weir.schema.engine_traits import TableSizes

ONE = TableNeeds([], 1, 1)


def filled() -> WaitingQueue:
    """A queue whose tables have room for one request, which "running" has taken."""
    queue = WaitingQueue(TableSizes(4, 1, 8))
    assert queue.enter("running", "running", ONE)
    return queue


def test_the_lowest_rank_goes_first_and_who_has_left_does_not():
    queue = filled()
    for name, rank in (("late", (5.0, 1.0)), ("early", (0.0, 2.0)), ("gone", (-1.0, 3.0)), ("same", (0.0, 2.0))):
        assert not queue.enter(name, name, ONE, rank)
    assert queue.leave("gone") == "gone" and queue.leave("gone") is None
    assert [queue.release({}) for _ in range(4)] == [["early"], ["same"], ["late"], []]


def test_a_lower_rank_passes_those_that_wait_and_no_other_does():
    queue = WaitingQueue(TableSizes(4, 2, 8))
    assert queue.enter("running", "running", ONE)
    assert not queue.enter("wide", "wide", TableNeeds([], 2, 1), (0.0,))
    assert not queue.enter("later", "later", ONE, (0.0,))  # there is room, but it is not its turn
    assert queue.enter("urgent", "urgent", ONE, (-1.0,))
    assert queue.release({"urgent": 1}) == [] and queue.release({}) == ["wide"]


def test_an_id_that_comes_back_has_its_new_place():
    queue = filled()
    assert not queue.enter("a", "first", ONE, (0.0,))
    assert queue.leave("a") == "first"
    assert not queue.enter("b", "b", ONE, (1.0,)) and not queue.enter("a", "second", ONE, (2.0,))
    assert [queue.release({}) for _ in range(2)] == [["b"], ["second"]]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30), st.booleans())
def test_order(entries, ranked):
    """Those that stay leave by rank, then as they came; without ranks as they came."""
    queue, staying = filled(), []
    for number, (rank, leaves) in enumerate(entries):
        assert not queue.enter(str(number), number, ONE, *([(float(rank),)] if ranked else []))
        if leaves:
            assert queue.leave(str(number)) == number
        else:
            staying.append((rank if ranked else 0, number))
    assert queue.release({"running": 1}) == [] and sorted(queue.ids()) == sorted(str(number) for _, number in staying)
    released = [queue.release({}) for _ in range(len(staying) + 1)]
    assert released == [[number] for _, number in sorted(staying)] + [[]]
