"""Writing plans and tables to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.worker.programs import ProgramTable
from vllm_weir.worker.step import Lookup, StepPlan

STAGING = 4


class PlanWriter:
    """Writes a step's plan into the device tensor; a few staging buffers, because the copy may lag behind the host."""

    def __init__(self, plan: torch.Tensor) -> None:
        self._plan = plan
        self._cuda = plan.is_cuda
        self._dirty = 0
        self._turn = 0
        copies = STAGING if self._cuda else 1
        self._staging = [torch.empty(plan.shape, dtype=torch.int32, pin_memory=self._cuda) for _ in range(copies)]
        self._copied = [torch.cuda.Event() for _ in range(copies)] if self._cuda else []

    def write(self, plan: StepPlan, start: int, input_ids: torch.Tensor) -> None:
        """Plan of the step's tokens, slots shifted to the ring's row `start`; later tokens are silenced."""
        n = len(plan.slots)
        self._put(n, (plan.slots + np.where(plan.slots >= 0, start, 0), plan.profiles, plan.programs))
        self._dirty = n
        for lookup in plan.lookups:
            self._resolve(lookup, input_ids)

    def silence(self) -> None:
        """Nothing is recorded or changed."""
        if self._dirty:
            self._put(0, ())
            self._dirty = 0

    def _put(self, n: int, columns) -> None:
        width = max(n, self._dirty)
        self._turn = (self._turn + 1) % len(self._staging)
        if self._cuda:
            self._copied[self._turn].synchronize()
        staging = self._staging[self._turn]
        host = staging.numpy()
        host[n:width] = -1
        for k, column in enumerate(columns):
            host[:n, k] = column
        self._plan[:width].copy_(staging[:width], non_blocking=True)
        if self._cuda:
            self._copied[self._turn].record()

    def _resolve(self, lookup: Lookup, input_ids: torch.Tensor) -> None:
        """Choose programs by the tokens that only the device knows."""
        device = self._plan.device
        tokens = torch.from_numpy(lookup.tokens).to(device)
        ids = input_ids[tokens]
        index = torch.zeros(len(tokens), dtype=torch.long, device=device)
        for j, members in enumerate(lookup.token_sets):
            index += torch.isin(ids, torch.tensor(members, dtype=ids.dtype, device=device)).long() << j
        self._plan[tokens, 2] = torch.from_numpy(lookup.programs).to(device)[index]


class TableWriter:
    """Mirrors a ProgramTable on the device, changed rows only."""

    def __init__(self, table: ProgramTable, device: torch.device) -> None:
        self._table = table
        self.tensors = {name: torch.from_numpy(getattr(table, name)).clone().to(device) for name in table.changed}

    def flush(self) -> None:
        """Write the rows that changed since the last flush."""
        for name, rows in self._table.take_changes().items():
            target = self.tensors[name]
            index = torch.from_numpy(rows)
            content = torch.from_numpy(getattr(self._table, name)[rows])
            if target.is_cuda:
                index, content = index.pin_memory(), content.pin_memory()
            target.index_copy_(
                0, index.to(target.device, non_blocking=True), content.to(target.device, non_blocking=True)
            )
