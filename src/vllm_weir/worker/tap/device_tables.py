"""Device copies of plans and tables; writing them does not wait for the device."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.step_plan import ProgramsByPosition, ProgramsByToken, StepPlan
from vllm_weir.worker.steering.slots import HostTables

STAGING = 4
"""Staging buffers of the plan: how many steps the host may be ahead of copies to the device."""


class PlanWriter:
    """Writes the plan of each step into the device tensor.

    Args:
        plan: int32 [max tokens, 4], see `vllm_weir.worker.tap.op.TapTensors`.
    """

    def __init__(self, plan: torch.Tensor) -> None:
        self._plan = plan
        self._cuda = plan.is_cuda
        self._num_written = 0
        """Length of the plan on the device; entries beyond it are silent."""
        self._turn = 0
        self._last: _WrittenPlan | None = None
        count = STAGING if self._cuda else 1
        self._staging = [torch.empty(plan.shape, dtype=torch.int32, pin_memory=self._cuda) for _ in range(count)]
        self._staging_np = [staging.numpy() for staging in self._staging]
        self._copied = [torch.cuda.Event() for _ in range(count)] if self._cuda else []

    def write(self, plan: StepPlan, start: int, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Write a step's plan, whose ring rows begin at `start`; tokens after the step's do nothing.

        `input_ids` and `positions`, int [tokens] on the device, are for programs that depend on them.
        """
        if self._last is None or not self._last.same(plan):
            self._last = _WrittenPlan(plan)
        elif start == self._last.start or not plan.rows:
            return  # the device has this plan
        self._put(len(plan.slots), self._last.starting_at(start))
        if plan.programs_by_token:
            self._last = None  # the look-ups change the plan on the device
            for lookup in plan.programs_by_token:
                self._resolve(lookup, input_ids)
        if plan.programs_by_position:
            assert positions is not None, "drafts are verified"
            self._last = None
            for choice in plan.programs_by_position:
                self._place(choice, positions)

    def silence(self) -> None:
        """Write a plan in which no token is recorded or changed."""
        self._last = None
        if self._num_written:
            self._put(0, np.zeros((0, 4), np.int32))

    def _put(self, n: int, content: np.ndarray) -> None:
        """Write `content`, int32 [n, 4], for the first `n` tokens; later tokens do nothing."""
        width = max(n, self._num_written)
        self._num_written = n
        self._turn = (self._turn + 1) % len(self._staging)
        if self._cuda:
            self._copied[self._turn].synchronize()
        host = self._staging_np[self._turn]
        host[:n] = content
        host[n:width] = -1
        self._plan[:width].copy_(self._staging[self._turn][:width], non_blocking=True)
        if self._cuda:
            self._copied[self._turn].record()

    def _resolve(self, lookup: ProgramsByToken, input_ids: torch.Tensor) -> None:
        """Choose programs by token ids that are known on the device alone."""
        device = self._plan.device
        tokens = upload(lookup.tokens, device)
        ids = input_ids[tokens].long()
        index = torch.zeros(len(tokens), dtype=torch.long, device=device)
        for j, members in enumerate(lookup.token_sets):
            if not members:
                continue
            token_set = upload(np.unique(np.array(members, np.int64)), device)
            # torch.isin would do, but makes the host wait for the device if the set is not small.
            at = torch.searchsorted(token_set, ids).clamp_(max=len(token_set) - 1)
            index += (token_set[at] == ids).long() << j
        self._plan[tokens, 2] = upload(lookup.programs, device)[index]

    def _place(self, choice: ProgramsByPosition, positions: torch.Tensor) -> None:
        """Choose programs by positions that are known on the device alone."""
        tokens = upload(choice.tokens, self._plan.device)
        index = (positions[tokens].long() - choice.first).clamp_(0, len(choice.programs) - 1)
        self._plan[tokens, 2] = upload(choice.programs, self._plan.device)[index]


class _WrittenPlan:
    """The plan that was written last, and where its rows begin in the ring."""

    def __init__(self, plan: StepPlan) -> None:
        self._slots, self._site_sets, self._programs = plan.slots, plan.site_sets, plan.programs
        self._spans = plan.spans
        self._content = np.stack([plan.slots, plan.site_sets, plan.programs, plan.spans], 1)
        self._captured = (plan.slots >= 0).astype(np.int32)
        self.start = 0

    def same(self, plan: StepPlan) -> bool:
        """Return whether a plan shares its arrays with this one: only its start may differ."""
        arrays = (self._slots, self._site_sets, self._programs, self._spans)
        return all(a is b for a, b in zip(arrays, (plan.slots, plan.site_sets, plan.programs, plan.spans), strict=True))

    def starting_at(self, start: int) -> np.ndarray:
        """Return the plan, int32 [tokens, 4], for rows that begin at ring row `start`, and note that they do."""
        self.start = start
        content = self._content.copy()
        content[:, 0] += self._captured * np.int32(start)
        return content


class TableWriter:
    """Mirrors tables of the host on the device.

    Attributes:
        tensors: the mirrored arrays by name.
    """

    def __init__(self, table: HostTables, device: torch.device) -> None:
        self._table = table
        self.tensors = {name: torch.from_numpy(getattr(table, name)).clone().to(device) for name in table.changed}

    def flush(self) -> None:
        """Copy the rows that changed since the last flush; if that fails, the next one copies them."""
        if not any(self._table.changed.values()):
            return
        changes = self._table.take_changes()
        try:
            for name, rows in changes.items():
                target = self.tensors[name]
                content = getattr(self._table, name)[rows]
                target.index_copy_(0, upload(rows, target.device), upload(content, target.device))
        except torch.OutOfMemoryError:
            for name, rows in changes.items():
                self._table.changed[name].update(rows.tolist())
            raise
