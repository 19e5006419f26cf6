"""Writes the runs of each step into device memory, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.worker.planning.columns import RUN, as_integers
from vllm_weir.worker.scoring.tensors import RUN_FIELDS
from vllm_weir.worker.tap.device_tables import STAGING


class RunWriter:
    """Keeps the runs of the coming step on the device.

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
        self.write(_NONE)


_NONE = np.empty(0, RUN)
