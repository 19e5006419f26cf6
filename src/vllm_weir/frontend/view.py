"""A view: the part of a sequence's rows that belongs to one output, assembled when it is first looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.frontend.activations import Activations, Packed, Receipt, tokens_at
from vllm_weir.frontend.parts import Part
from vllm_weir.frontend.sinks.ticket import Ticket
from vllm_weir.frontend.store import Pending, Taken
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import selected


@dataclass
class View:
    """Rows at positions ``[start, end)`` of a sequence, where `end` follows from the tokens generated so far.

    Waiting for rows still on their way happens here, in the thread that looks, never in the engine's loop.
    """

    pending: Pending
    part: Part
    generated: np.ndarray
    start: int
    finished: bool
    aborted: bool
    cached_tokens: int
    hit_limit: int | None
    d_model: int
    timeout: float
    asked: bool = True
    tickets: Sequence[Ticket] = ()
    _made: Activations | None = None

    @property
    def end(self) -> int:
        """First position without a row."""
        return len(tokens_at(self.pending.prompt_token_ids, self.generated))

    def extend(self, later: View) -> None:
        """Take in a later output of the same sequence that was merged into this one."""
        self.generated, self.finished, self.aborted = later.generated, later.finished, later.aborted
        self.tickets = later.tickets
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
        """What was done for this sequence up to this output; waits for its sinks as `settle` does."""
        self.settle()
        acts = self.activations()
        steered, shared = self.verify()
        return Receipt(
            captured={site: acts.count(site) for site in acts.sites},
            dropped=self._dropped(acts),
            steered=steered,
            shared=shared,
            prompt_tokens=len(self.pending.prompt_token_ids),
            generated_tokens=len(self.generated),
            cached_tokens=self.cached_tokens,
            hit_limit=self.hit_limit,
            complete=self.finished and not self.aborted,
            compression=self._compression(),
            files=tuple(file for ticket in self.tickets for file in ticket.files),
            sinks={ticket.sink: ticket.state for ticket in self.tickets},
        )

    def settle(self) -> None:
        """Wait until the sinks that get this sequence's rows now have taken them.

        Raises:
            WeirError: if one that the request depends on has failed.
        """
        for ticket in self.tickets:
            ticket.settle(self.timeout)

    def _compression(self) -> dict[str, Any] | None:
        treatment = self.pending.admitted.spec.treatment
        if treatment is None or treatment.compression is None:
            return None
        return treatment.compression.header(self.d_model, self.part.dtype)

    def _dropped(self, acts: Activations) -> dict[Site, int]:
        out = self.missing(acts)
        for ticket in self.tickets:
            out.update({site: max(n, out.get(site, 0)) for site, n in ticket.missing.items()})
        return out

    def missing(self, acts: Activations) -> dict[Site, int]:
        """Site -> rows of this view that are not in `acts`, because the worker had no room for them."""
        if self.aborted:
            return {}
        out = {}
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        for sites, selectors in self.part.spec.by_positions:
            wanted = len(self._wanted(selectors, tokens)[0])
            out.update({s: wanted - acts.count(s) for s in sites if acts.count(s) < wanted})
        return out

    def _wanted(self, selectors: Sequence[Positions], tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions of the rows that belong here, positions that they are made from)."""
        chosen = selected(selectors, len(self.pending.prompt_token_ids), tokens)
        treatment = self.part.spec.treatment
        if treatment is not None and treatment.reduce is not None:
            # A reduction is there once there is nothing more to reduce.
            return (chosen[-1:], chosen) if self.finished else (chosen[:0], chosen[:0])
        chosen = chosen[chosen >= self.start] if self.start else chosen
        return chosen, chosen

    def _assemble(self) -> Activations:
        part = self.part
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        rows, positions, token_ids = {}, {}, {}
        for sites, selectors in part.spec.by_positions:
            at, sources = self._wanted(selectors, tokens)
            for taken in self._treated(sites, at, sources):
                held = torch.from_numpy(taken.positions)
                ids = torch.from_numpy(tokens[taken.positions])
                found = taken.rows or dict.fromkeys(taken.sites, self._nothing())
                rows.update(found)
                positions.update(dict.fromkeys(found, held))
                token_ids.update(dict.fromkeys(found, ids))
        order = part.spec.sites
        if tuple(rows) != order:
            rows, positions, token_ids = ({s: by_site[s] for s in order} for by_site in (rows, positions, token_ids))
        if part.spec.treatment is not None and part.spec.treatment.compression is not None:
            dtypes = {site: DTYPES[dtype] for site, dtype in part.dtypes.items()}
            header = part.spec.treatment.compression.header(self.d_model, part.dtype)
            packed = Packed(header, rows, dtypes)
            return Activations({}, positions, token_ids, part.lens_layers, packed)
        for site, dtype in self._dtypes().items():
            rows[site] = rows[site].to(DTYPES[dtype])
        return Activations(rows, positions, token_ids, part.lens_layers)

    @property
    def rows(self) -> int:
        """Rows that belong here, of all sites."""
        tokens = tokens_at(self.pending.prompt_token_ids, self.generated)
        groups = self.part.spec.by_positions
        return sum(len(sites) * len(self._wanted(selectors, tokens)[0]) for sites, selectors in groups)

    @property
    def size(self) -> int:
        """Bytes of the rows, about."""
        row = self._nothing()
        return self.rows * row.shape[1] * row.element_size()

    def _dtypes(self) -> dict[Site, str]:
        """Sites whose rows have to be cast: products stay float32 unless asked for otherwise."""
        treatment = self.part.spec.treatment
        return self.part.dtypes if treatment is not None and treatment.folds else self.part.recast

    def _nothing(self) -> torch.Tensor:
        treatment = self.part.spec.treatment
        if treatment is not None and treatment.compression is not None:
            return torch.empty(0, treatment.compression.record_bytes(self.d_model), dtype=torch.uint8)
        if treatment is not None and treatment.directions:
            return torch.empty(0, len(treatment.directions))
        return torch.empty(0, self.d_model, dtype=DTYPES[self.part.dtype])

    def _treated(self, sites: Sequence[Site], at: np.ndarray, sources: np.ndarray) -> list[Taken]:
        treatment = self.part.spec.treatment
        if treatment is None:
            return self._take(sites, sources, "rows")
        if treatment.compression is not None:
            return self._take(sites, sources, "packed")
        if treatment.directions:
            scores = self._take(sites, sources, "scores")
            return scores if treatment.reduce is None else [_reduce(treatment.reduce, at, scores, [])]
        prompt_len = len(self.pending.prompt_token_ids)
        in_prompt = sources[sources < prompt_len]
        folds = self._take(sites, in_prompt[-1:], "fold")
        later = self._take(sites, sources[len(in_prompt) :], "rows")
        return [_reduce(treatment.reduce or "", at, later, folds, len(in_prompt))]

    def _take(self, sites: Sequence[Site], positions: np.ndarray, kind: str) -> list[Taken]:
        if self.aborted:
            return self.pending.arrived(sites, positions, kind)
        return self.pending.take(sites, positions, self.timeout, kind)


def _reduce(how: str, at: np.ndarray, rows: list[Taken], folds: list[Taken], folded: int = 0) -> Taken:
    """One row a site of its rows [n, k], and of what `folded` earlier ones were reduced to ([1, k], float32)."""
    sites = [site for taken in rows or folds for site in taken.sites]
    later = {site: part for taken in rows for site, part in taken.rows.items()}
    earlier = {site: part for taken in folds for site, part in taken.rows.items()}
    out = {}
    for site in sites:
        tail = later[site].float() if site in later else None
        head = earlier.get(site)
        if tail is None:
            if head is None:
                continue
            whole = head
        elif head is None:
            whole = {"last": tail[-1:], "max": tail.amax(0, True), "mean": tail.mean(0, True)}[how]
        elif how == "last":
            whole = tail[-1:]
        elif how == "max":
            whole = torch.maximum(head, tail.amax(0, keepdim=True))
        else:
            whole = (head * folded + tail.sum(0, keepdim=True)) / (folded + len(tail))
        out[site] = whole
    return Taken(sites, at if out else at[:0], out)


DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
