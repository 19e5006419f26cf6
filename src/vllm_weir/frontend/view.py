"""A view: the part of a sequence's rows that belongs to one output, assembled when it is first looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.frontend.activations import Activations, Receipt, empty_like, tokens_at
from vllm_weir.frontend.store import Pending
from vllm_weir.spec.hooks import Site


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
            self.pending.check()
            self._made = self._assemble()
        return self._made

    def verify(self) -> tuple[tuple[dict[Site, int], ...], tuple[int, ...]]:
        """What was steered and what was shared, as in `Receipt`; raises WeirError if that is not what was asked."""
        if not self.pending.admitted.moves:
            self.pending.check()
            return (), ()
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        every = np.arange(len(tokens))
        steered: list[dict[Site, int]] = []
        shared: list[int] = []
        number = 0
        for move in self.pending.admitted.moves:
            if move is None:
                steered.append({})
                shared.append(0)
                continue
            wanted = np.flatnonzero(move.positions.mask(every, len(self.pending.prompt_token_ids), tokens))
            if move.per_position:
                kept = [k for k, term in enumerate(move.instructions[: len(wanted)]) if term.u]
                wanted = wanted[kept]
            cached = int((wanted < self.cached_tokens).sum())
            if not self.aborted:
                self.pending.await_steered(number, wanted[cached:], self.timeout)
            number += 1
            steered.append({Site(move.hook, layer): len(wanted) - cached for layer in move.layers})
            shared.append(cached)
        return tuple(steered), tuple(shared)

    def receipt(self) -> Receipt:
        """What was done for this sequence up to this output."""
        acts = self.activations()
        steered, shared = self.verify()
        return Receipt(
            captured={site: len(acts[site]) for site in acts.sites},
            dropped=self._dropped(acts),
            steered=steered,
            shared=shared,
            prompt_tokens=len(self.pending.prompt_token_ids),
            generated_tokens=len(self.generated),
            cached_tokens=self.cached_tokens,
            hit_limit=self.hit_limit,
            complete=self.finished and not self.aborted,
        )

    def _dropped(self, acts: Activations) -> dict[Site, int]:
        if self.aborted:
            return {}
        admitted, prompt_len = self.pending.admitted, len(self.pending.prompt_token_ids)
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        out = {}
        for sites in admitted.spec.by_positions():
            wanted = int((admitted.spec.expected(sites[0], prompt_len, tokens) >= self.start).sum())
            out.update({s: wanted - len(acts[s]) for s in sites if len(acts[s]) < wanted})
        return out

    def _assemble(self) -> Activations:
        admitted, prompt_len = self.pending.admitted, len(self.pending.prompt_token_ids)
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        rows, positions, token_ids = {}, {}, {}
        for sites in admitted.spec.by_positions():
            wanted = admitted.spec.expected(sites[0], prompt_len, tokens)
            wanted = wanted[wanted >= self.start]
            if self.aborted:
                taken = self.pending.arrived(sites, wanted)
            else:
                taken = self.pending.take(sites, wanted, self.timeout)
            at, ids = torch.from_numpy(wanted), torch.from_numpy(tokens[wanted].astype(np.int64))
            for site in sites:
                found, dtype = taken[site], admitted.dtypes[site]
                rows[site] = empty_like(self.d_model, dtype) if found.rows is None else found.rows.to(DTYPES[dtype])
                if len(found.positions) == len(wanted):
                    positions[site], token_ids[site] = at, ids
                else:
                    positions[site] = torch.from_numpy(found.positions)
                    token_ids[site] = torch.from_numpy(tokens[found.positions].astype(np.int64))
        order = admitted.spec.sites
        return Activations(
            {s: rows[s] for s in order},
            {s: positions[s] for s in order},
            {s: token_ids[s] for s in order},
            admitted.lens_layers,
        )


DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
