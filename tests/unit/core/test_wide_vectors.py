"""`WaitingQueue` and vectors that take several rows of their table."""

from __future__ import annotations

from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.schema.engine_spec import TableNeeds
from vllm_weir.schema.engine_traits import TableSizes


def test_a_wide_vector_takes_and_gives_back_all_its_rows():
    queue = WaitingQueue(TableSizes(vectors=4, programs=9, nodes=9))
    wide = TableNeeds(["wide"], 1, 1, wide={"wide": 3})
    for turn in range(3):
        assert queue.enter(f"first {turn}", 1, wide) and queue.enter(f"same vector {turn}", 2, wide)
        assert not queue.enter("two more rows", 3, TableNeeds(["a", "b"], 1, 1))
        assert queue.release({f"same vector {turn}": 1}) == []  # somebody still uses it
        assert queue.release({}) == [3]
        assert queue.release({}) == []
