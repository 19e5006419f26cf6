"""`Scorer`: a worker's probes and gates, from the tables on the host to the numbers for the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType

import numpy as np
import torch

from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.taps import ALL_STAGES
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.columns import RUN, as_integers
from vllm_weir.worker.planning.step_plan import ScoreReads, StepPlan
from vllm_weir.worker.scoring import cpu_kernel
from vllm_weir.worker.scoring.probe_table import EARLY, FACTOR, FLAGS, GATE, GATE_STATE, NEXT_GATE, ZERO, ProbeTable
from vllm_weir.worker.scoring.step_controllers import StepControllers, SyncController
from vllm_weir.worker.scoring.tensors import RUN_FIELDS, ScoreTensors
from vllm_weir.worker.tap.device_tables import STAGING, TableWriter
from vllm_weir.worker.tap.op import TapTensors

NO_RUNS = np.empty(0, RUN)


class RunWriter:
    """Keeps the runs of the coming step on the device, which it writes without waiting for it.

    Attributes:
        offsets, runs: see `ScoreTensors`; they are parts of one tensor, written by one copy.
    """

    def __init__(self, num_taps: int, most_runs: int, device: torch.device) -> None:
        width = len(RUN_FIELDS)
        head = (num_taps + width) // width * width  # the runs are aligned, and there is an offset more than taps
        cuda = device.type == "cuda"
        self._memory = torch.zeros(head + most_runs * width, dtype=torch.int32, device=device)
        self.offsets, self.runs = self._memory[:head], self._memory[head:].view(-1, width)
        self._taps = np.arange(head)
        self._turn = 0
        self._last: np.ndarray | None = None
        self._is_empty = True
        count = STAGING if cuda else 1
        self._staging = [torch.zeros(self._memory.shape, dtype=torch.int32, pin_memory=cuda) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in range(count)] if cuda else []

    def write(self, runs: np.ndarray) -> bool:
        """Write RUN [n], by tap; return whether the device did not have them yet."""
        if runs is self._last or (self._is_empty and not len(runs)):
            return False
        self._last, self._is_empty = runs, not len(runs)
        self._turn = (self._turn + 1) % len(self._staging)
        if self._copied:
            self._copied[self._turn].synchronize()
        staging = self._staging[self._turn]
        host, head = staging.numpy(), len(self._taps)
        host[:head] = np.searchsorted(runs["tap"], self._taps)
        end = head + len(runs) * len(RUN_FIELDS)
        if len(runs):
            host[head:end] = as_integers(runs)[:, -len(RUN_FIELDS) :].reshape(-1)
        self._memory[:end].copy_(staging[:end], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return True

    def silence(self) -> None:
        self.write(NO_RUNS)


class Scorer:
    """Scores the tokens of each step; all that it does on a GPU is ordered on the current stream.

    Args:
        controllers: opened, by name.

    Attributes:
        tensors: what the score kernels read and write.
        controllers: asked after each step.
    """

    def __init__(
        self,
        table: ProbeTable,
        tap_tensors: TapTensors,
        sizes: TableSizes,
        controllers: Mapping[str, SyncController] = MappingProxyType({}),
    ) -> None:
        device = tap_tensors.plan.device
        self._table, self._device = table, device
        self._table_writer = TableWriter(table, device)
        self._run_writer = RunWriter(tap_tensors.heads.shape[1], sizes.probes, device)
        shared = {entry.name: getattr(tap_tensors, entry.name) for entry in fields(tap_tensors)}
        self.tensors = ScoreTensors(
            offsets=self._run_writer.offsets,
            runs=self._run_writer.runs,
            states=torch.zeros(sizes.states * table.copies + 1, dtype=torch.float32, device=device),
            positions=torch.zeros(tap_tensors.plan.shape[0], dtype=torch.int32, device=device),
            copies=table.copies,
            **{name: shared[name] for name in ("plan", "heads", "ints", "vectors", "cells")},
            **self._table_writer.tensors,
        )
        self.controllers = StepControllers(controllers, table, self.tensors.states)
        self._early: tuple[torch.Tensor, torch.Tensor] | None = None
        """Places in `cells` of factors that are needed before the pass reaches their probe, and in `states`."""

    def begin(self, plan: StepPlan, positions: torch.Tensor | None = None) -> None:
        """Prepare the coming forward pass; `positions`, int [>= tokens], are needed where drafts are verified."""
        while self._table.moves:  # one that fails for want of memory is made before the next step
            move = self._table.moves[0]
            self.tensors.states[: len(move)] = self.tensors.states[upload(move, self._device)]
            del self._table.moves[0]
        self._table_writer.flush()
        if self._table.copies > 1 and len(plan.runs):
            assert positions is not None, "drafts are verified"
            self.tensors.positions[: len(plan.slots)].copy_(positions[: len(plan.slots)])
        if self._run_writer.write(plan.runs):
            self._early = self._find_early(plan.runs) if self._table.early else None
            self.controllers.prepare(plan.runs)
        if self._early is not None:
            cells, states = self._early
            self.tensors.cells.view(-1).index_copy_(0, cells, self.tensors.states[states])

    def silence(self) -> None:
        """Let nothing be scored in the coming forward pass."""
        self._run_writer.silence()
        self.controllers.forget()
        self._early = None

    def launch(self, tap: int, stages: int = ALL_STAGES) -> None:
        """Compute the scores and factors that follow from what a tap has written at some of its stages."""
        if self._device.type == "cuda":
            from vllm_weir.worker.scoring.triton_kernel import launch

            launch(tap, self.tensors, stages)
        else:
            cpu_kernel.launch(tap, self.tensors, stages)

    def read(self, reads: ScoreReads) -> Callable[[ScoreReads | None], dict[str, np.ndarray]]:
        """Copy what readers are told of the step, after its forward pass was issued.

        Returned: A function that waits for the copy, and returns endpoint -> float32 [n]. It may be given reads of
        fewer tokens or columns, if some turn out not to hold.
        """
        cells = self.tensors.cells[: reads.tokens, : reads.columns]
        if self._device.type != "cuda":
            own = cells.clone()
            return lambda fewer: _pick(own, fewer or reads)
        host = torch.empty(cells.shape, dtype=cells.dtype, pin_memory=True)
        host.copy_(cells, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def arrived(fewer: ScoreReads | None) -> dict[str, np.ndarray]:
            copied.synchronize()
            return _pick(host, fewer or reads)

        return arrived

    def _find_early(self, runs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `_early` for RUN [n]: of the first token of each run."""
        table, width = self._table, self.tensors.cells.shape[1]
        gates, tokens, fresh = table.probes[runs["probe"], GATE], runs["token"].astype(np.int64), runs["fresh"] != 0
        cells, states = [], []
        while (has := gates >= 0).any():
            gates, tokens, fresh = gates[has], tokens[has], fresh[has]
            at = table.gates[gates].astype(np.int64)
            early = at[:, FLAGS] & EARLY != 0
            cells.append((tokens * width + at[:, FACTOR])[early])
            states.append(np.where(fresh, ZERO, at[:, GATE_STATE])[early])
            gates = at[:, NEXT_GATE]
        if not sum(map(len, cells)):
            return None
        return upload(np.concatenate(cells), self._device), upload(np.concatenate(states), self._device)


def _pick(cells: torch.Tensor, reads: ScoreReads) -> dict[str, np.ndarray]:
    values = cells[:, : reads.columns].numpy().reshape(-1)
    return {endpoint: values[places] for endpoint, places in reads.places.items()}
