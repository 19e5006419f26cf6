"""Writing plans and tables to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.step_plan import ProgramsByToken, StepPlan
from vllm_weir.worker.steering.programs import ProgramTable

STAGING = 4


class PlanWriter:
    """Writes a step's plan into the device tensor; a few staging buffers, because the copy may lag behind the host."""

    def __init__(self, plan: torch.Tensor) -> None:
        self._plan = plan
        self._cuda = plan.is_cuda
        self._dirty = 0
        self._turn = 0
        self._last: _Written | None = None
        copies = STAGING if self._cuda else 1
        self._staging = [torch.empty(plan.shape, dtype=torch.int32, pin_memory=self._cuda) for _ in range(copies)]
        self._hosts = [staging.numpy() for staging in self._staging]
        self._copied = [torch.cuda.Event() for _ in range(copies)] if self._cuda else []

    def write(self, plan: StepPlan, start: int, input_ids: torch.Tensor) -> None:
        """Plan of the step's tokens, slots shifted to the ring's row `start`; later tokens are silenced."""
        if self._last is None or not self._last.same(plan):
            self._last = _Written(plan)
        elif start == self._last.start or not plan.rows:
            return  # the device has it already
        self._last.start = start
        self._put(len(plan.slots), self._last.shifted(start))
        if plan.programs_by_token:
            self._last = None  # by the time that they have been resolved, it is another
            for lookup in plan.programs_by_token:
                self._resolve(lookup, input_ids)

    def silence(self) -> None:
        """Nothing is recorded or changed."""
        self._last = None
        if self._dirty:
            self._put(0, np.zeros((0, 4), np.int32))

    def _put(self, n: int, content: np.ndarray) -> None:
        """Write the first `n` tokens; none after them does anything."""
        width = max(n, self._dirty)
        self._dirty = n
        self._turn = (self._turn + 1) % len(self._staging)
        if self._cuda:
            self._copied[self._turn].synchronize()
        host = self._hosts[self._turn]
        host[:n] = content
        host[n:width] = -1
        self._plan[:width].copy_(self._staging[self._turn][:width], non_blocking=True)
        if self._cuda:
            self._copied[self._turn].record()

    def _resolve(self, lookup: ProgramsByToken, input_ids: torch.Tensor) -> None:
        """Choose programs by the tokens that only the device knows."""
        device = self._plan.device
        tokens = upload(lookup.tokens, device)
        ids = input_ids[tokens].long()
        index = torch.zeros(len(tokens), dtype=torch.long, device=device)
        for j, members in enumerate(lookup.token_sets):
            if not members:  # no token is among them
                continue
            some = upload(np.unique(np.array(members, np.int64)), device)
            # As torch.isin, which for more than a few makes the host wait for the device.
            at = torch.searchsorted(some, ids).clamp_(max=len(some) - 1)
            index += (some[at] == ids).long() << j
        self._plan[tokens, 2] = upload(lookup.programs, device)[index]


class _Written:
    """What was written last."""

    def __init__(self, plan: StepPlan) -> None:
        self._slots, self._profiles, self._programs = plan.slots, plan.site_sets, plan.programs
        self._spans = plan.spans
        self._content = np.stack([plan.slots, plan.site_sets, plan.programs, plan.spans], 1)
        self._captured = (plan.slots >= 0).astype(np.int32)
        self.start = 0

    def same(self, plan: StepPlan) -> bool:
        """Whether the plan is this one but for the place in the ring; steps that repeat share their arrays."""
        known = (self._slots, self._profiles, self._programs, self._spans)
        return all(a is b for a, b in zip(known, (plan.slots, plan.site_sets, plan.programs, plan.spans), strict=True))

    def shifted(self, start: int) -> np.ndarray:
        """int32 [tokens, 4] with slots counted from the ring's row `start`."""
        content = self._content.copy()
        content[:, 0] += self._captured * np.int32(start)
        return content


class TableWriter:
    """Mirrors a ProgramTable on the device, changed rows only."""

    def __init__(self, table: ProgramTable, device: torch.device) -> None:
        self._table = table
        self.tensors = {name: torch.from_numpy(getattr(table, name)).clone().to(device) for name in table.changed}

    def flush(self) -> None:
        """Write the rows that changed since the last flush."""
        if not any(self._table.changed.values()):
            return
        for name, rows in self._table.take_changes().items():
            target = self.tensors[name]
            content = getattr(self._table, name)[rows]
            target.index_copy_(0, upload(rows, target.device), upload(content, target.device))
