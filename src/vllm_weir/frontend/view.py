"""A view: the part of a sequence's rows that belongs to one output, assembled when it is first looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.frontend.activations import Activations, Receipt, tokens_at
from vllm_weir.frontend.store import Pending
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.request import selected


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
        for sites, selectors in admitted.spec.by_positions:
            wanted = int((selected(selectors, prompt_len, tokens) >= self.start).sum())
            out.update({s: wanted - len(acts[s]) for s in sites if len(acts[s]) < wanted})
        return out

    def _assemble(self) -> Activations:
        admitted, prompt_len = self.pending.admitted, len(self.pending.prompt_token_ids)
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        rows, positions, token_ids = {}, {}, {}
        for sites, selectors in admitted.spec.by_positions:
            wanted = selected(selectors, prompt_len, tokens)
            if self.start:
                wanted = wanted[wanted >= self.start]
            if self.aborted:
                parts = self.pending.arrived(sites, wanted)
            else:
                parts = self.pending.take(sites, wanted, self.timeout)
            for taken in parts:
                at = torch.from_numpy(taken.positions)
                ids = torch.from_numpy(tokens[taken.positions])
                found = taken.rows or {
                    s: torch.empty(0, self.d_model, dtype=DTYPES[admitted.dtype]) for s in taken.sites
                }
                rows.update(found)
                positions.update(dict.fromkeys(found, at))
                token_ids.update(dict.fromkeys(found, ids))
        for site, dtype in admitted.recast.items():
            rows[site] = rows[site].to(DTYPES[dtype])
        order = admitted.spec.sites
        if tuple(rows) != order:
            rows, positions, token_ids = ({s: by_site[s] for s in order} for by_site in (rows, positions, token_ids))
        return Activations(rows, positions, token_ids, admitted.lens_layers)


DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
