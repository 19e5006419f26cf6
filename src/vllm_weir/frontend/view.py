"""A view: the part of a sequence's rows that belongs to one output, assembled when it is first looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.frontend.activations import Activations, Receipt, empty_like, tokens_at
from vllm_weir.frontend.store import Pending


@dataclass
class View:
    """Rows at positions ``[start, end)`` of a sequence, where `end` follows from the tokens generated so far.

    Waiting for rows still on their way happens here, in the thread that looks, never in the engine's loop.
    """

    pending: Pending
    generated: np.ndarray
    start: int
    finished: bool
    aborted: bool
    cached_tokens: int
    hit_limit: int | None
    d_model: int
    timeout: float
    _made: Activations | None = None

    @property
    def end(self) -> int:
        """First position without a row."""
        return len(tokens_at(self.pending.prompt_token_ids, self.generated))

    def extend(self, later: View) -> None:
        """Take in a later output of the same sequence that was merged into this one."""
        self.generated, self.finished, self.aborted = later.generated, later.finished, later.aborted
        self._made = None

    def activations(self) -> Activations:
        """The rows; raises WeirError if they were lost."""
        if self._made is None:
            self._made = self._assemble()
        return self._made

    def receipt(self) -> Receipt:
        """What was done for this sequence up to this output."""
        acts = self.activations()
        return Receipt(
            captured={site: len(acts[site]) for site in acts.sites},
            prompt_tokens=len(self.pending.prompt_token_ids),
            generated_tokens=len(self.generated),
            cached_tokens=self.cached_tokens,
            hit_limit=self.hit_limit,
            complete=self.finished and not self.aborted,
        )

    def _assemble(self) -> Activations:
        admitted = self.pending.admitted
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        rows, positions, token_ids = {}, {}, {}
        for site in admitted.spec.sites:
            wanted = admitted.spec.expected(site, len(self.pending.prompt_token_ids), tokens)
            wanted = wanted[wanted >= self.start]
            if self.aborted:
                wanted = self.pending.arrived(site, wanted)
            if len(wanted):
                taken = self.pending.take(site, wanted, self.timeout).to(getattr(torch, admitted.dtypes[site]))
            else:
                taken = empty_like(self.d_model, admitted.dtypes[site])
            rows[site] = taken
            positions[site] = torch.from_numpy(wanted)
            token_ids[site] = torch.from_numpy(tokens[wanted].astype(np.int64))
        return Activations(rows, positions, token_ids, admitted.lens_layers)
