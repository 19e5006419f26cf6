"""The rows of each step: their places in the ring, and their way out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CpuCopyOut, CudaCopyOut
from vllm_weir.worker.transfer.postprocess import Postprocessor
from vllm_weir.worker.transfer.ring import Ring

if TYPE_CHECKING:
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

STREAM_SHARE = 8
"""A step without a CUDA graph is streamed if its rows would fill more than 1/8 of the ring."""


class StepRows:
    """Gives each step its rows of the ring, and sends what the taps have written there.

    `streamed_copy`: does so while a step runs; None if no step is streamed.
    """

    def __init__(
        self,
        ring: Ring,
        copy_out: CpuCopyOut | CudaCopyOut,
        streamed_copy: StreamedCopy | None,
        reducer: TapReducer,
        codecs: Codecs,
    ) -> None:
        self._ring, self.copy_out, self._streamed_copy = ring, copy_out, streamed_copy
        self._reducer, self._codecs = reducer, codecs
        self._postprocessor = Postprocessor(ring.buffer)

    def streamed_copy_for(self, plan: StepPlan) -> StreamedCopy | None:
        """Return the streamed copy if the step has enough rows to be streamed, else None."""
        most = min(self._ring.capacity // STREAM_SHARE, self._ring.capacity - plan.group_rows)
        return self._streamed_copy if plan.rows and plan.rows - plan.group_rows > most else None

    def claim(self, rows: int) -> int:
        """Return the first of the next `rows` ring rows, once they are free; raise ValueError if they do not fit."""
        if not rows:
            return 0
        first_row = self._ring.take(rows)
        self._ring.claim(first_row, rows)
        return first_row

    def send(self, plan: StepPlan, first_row: int, streamed: bool) -> Callable[[], None] | None:
        """Send what the taps have written; return what to call to wait until it has arrived."""
        self._reducer.settle(plan.reductions, first_row)
        if streamed and self._streamed_copy is not None:
            return self._streamed_copy.end(plan)
        if not plan.rows:
            return None
        pack = functools.partial(self._postprocessor.pack, plan, first_row, self._codecs)
        return self.copy_out.ship(plan, first_row, lambda: pack(True), lambda: pack(False))
