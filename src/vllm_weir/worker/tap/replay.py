"""The experts that routers have to choose, on the device: one row for each token of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.replay import ReplayRows
from vllm_weir.schema.routing import RoutedBlocks
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.replays import FREE, HeldReplay, ReplayedStep, replayed_step
from vllm_weir.worker.tap.batch import Batch

NO_PROGRAMS = np.zeros(0, np.int32)


class Replays:
    """The experts that live requests make the routers of a worker choose.

    Args:
        blocks: the worker's blocks that choose experts; None if it has none.
        uncertainty: see `EngineTraits.uncertainty`.

    Attributes:
        forced: int16 [max tokens, blocks, top_k], for the tokens of the step: an expert, or `FREE`.
    """

    def __init__(
        self, blocks: RoutedBlocks | None, max_tokens: int, device: torch.device, uncertainty: int = 0
    ) -> None:
        self._blocks, self._uncertainty = blocks, uncertainty
        shape = (0, 0) if blocks is None else (len(blocks.blocks), blocks.top_k)
        self.forced = torch.full((max_tokens, *shape), FREE, dtype=torch.int16, device=device)
        self._held: dict[str, HeldReplay] = {}
        self._written = 0
        """Rows of `forced`, from the first on, that may say something."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, rows: ReplayRows | None) -> None:
        """Have routers choose these experts for a request from now on; None for none."""
        if rows is not None and self._blocks is not None:
            self._held[request_id] = HeldReplay.of(rows, self._blocks)

    def release(self, request_id: str) -> None:
        """Let routers choose for a request; unknown ids are ignored."""
        self._held.pop(request_id, None)

    def write(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        positions: torch.Tensor | None,
        served: bool,
    ) -> None:
        """Write what is to be chosen in the coming step; arguments as of `Steps.plan_step`.

        Raises:
            WeirError: if something is, and the routers of the step are not `served`: their ops do not act.
        """
        step = None
        if self._held and self._blocks is not None:
            step = replayed_step(self._held, self._blocks, request_ids, num_tokens, num_computed, self._uncertainty)
        if step is None:
            return self.silence()
        if not served:
            raise WeirError("a step whose routers choose freely has experts to be replayed", "routing")
        if self._uncertainty and positions is None:
            raise WeirError("which experts a token has to have is known by its position alone", "routing")
        n, device = len(step.bases), self.forced.device
        try:
            if self._uncertainty and positions is not None:
                places = (upload(step.bases, device) + positions[:n]).clamp_(min=0)
                rows = upload(step.rows, device)[places]
            else:
                rows = upload(_by_token(step, request_ids, num_tokens, num_computed), device)
        except torch.OutOfMemoryError:
            self.silence()  # what the last step had is nothing for the tokens of this one
            raise
        self.forced[:n].copy_(rows)
        if self._written > n:
            self.forced[n : self._written].fill_(FREE)
        self._written = n
        return None

    def silence(self) -> None:
        """Let all routers choose."""
        if self._written:
            self.forced[: self._written].fill_(FREE)
            self._written = 0


def _by_token(
    step: ReplayedStep, request_ids: Sequence[str], num_tokens: Sequence[int], num_computed: Sequence[int]
) -> np.ndarray:
    """Return the rows of a step's tokens, whose positions are known."""
    positions = Batch.of(NO_PROGRAMS, request_ids, num_tokens, num_computed).positions
    return step.rows[np.maximum(step.bases + positions, 0)]
