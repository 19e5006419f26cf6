"""A view: the part of a sequence's rows that belongs to one output, assembled when it is first looked at."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.outputs.host_postprocess import reduced, treated
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.frontend.receive.pending_sequence import PendingSequence, TakenRows
from vllm_weir.frontend.receive.tokens import SequenceTokens, TokenIds
from vllm_weir.results.activations import Activations, CompressedRows
from vllm_weir.results.receipt import Receipt
from vllm_weir.results.site_slices import SiteSlices
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, selected


@dataclass(frozen=True)
class ViewSnapshot:
    """What a view becomes in a pickle or a deep copy: all that it was then, and nothing that waits."""

    asked: bool
    rows: Activations
    done: Receipt

    def activations(self) -> Activations:
        """As `OutputView.activations`."""
        return self.rows

    def receipt(self) -> Receipt:
        """As `OutputView.receipt`."""
        return self.done


@dataclass
class OutputView:
    """Rows at positions ``[start, end)`` of a sequence, where `end` follows from the tokens generated so far.

    Waiting for rows still on their way happens here, in the thread that looks, never in the engine's loop.
    """

    pending: PendingSequence
    part: CaptureGroup
    tokens: SequenceTokens
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
    _checked: list[tuple[ResolvedIntervention | None, int, int]] | None = None
    """What `verify` has found of a finished sequence."""

    def __reduce__(self) -> tuple[type, tuple]:
        return ViewSnapshot, (self.asked, self.activations(), self.receipt())

    @property
    def end(self) -> int:
        """First position without a row."""
        return len(self.tokens)

    def extend(self, later: OutputView) -> None:
        """Take in a later output of the same sequence that was merged into this one."""
        self.tokens, self.finished, self.aborted = later.tokens, later.finished, later.aborted
        self.tickets = later.tickets
        self._made = self._checked = None

    def activations(self) -> Activations:
        """The rows; raises WeirError if they were lost."""
        if self._made is None:
            self.pending.check()
            whole = not (self.start or self.aborted or self.part is not self.pending.memory)
            whole = whole and (self.finished or not self.part.folds)  # a reduction is there at the end
            self._made = (self.pending.early or self._cut_ahead() if whole else None) or self._assemble()
        return self._made

    def _cut_ahead(self) -> Activations | None:
        """All rows of a sequence that ended as was foreseen, if they were cut ahead and are here."""
        if self.end != self.pending.foreseen or (cut := self.pending.whole(self.part.spec.sites)) is None:
            return None
        return self._activations(cut.block, cut.positions)

    def _activations(self, rows: Mapping[Site, torch.Tensor], positions: Mapping[Site, torch.Tensor]) -> Activations:
        """Of rows as they came, or of their records."""
        part, ids = self.part, TokenIds(self.tokens, positions)
        if part.spec.postprocess is not None and part.spec.postprocess.compression is not None:
            header = part.spec.postprocess.compression.header(self.d_model, part.dtype)
            return Activations({}, positions, ids, part.lens_layers, CompressedRows(header, rows, part.dtypes))
        if recast := self.part.casts:
            if isinstance(rows, SiteSlices) and len(recast) == len(rows) and len(kinds := set(recast.values())) == 1:
                return Activations(rows.to(DTYPES[kinds.pop()]), positions, ids, part.lens_layers)
            rows = {**rows, **{site: rows[site].to(DTYPES[dtype]) for site, dtype in recast.items()}}
        return Activations(rows, positions, ids, part.lens_layers)

    def drop(self) -> None:
        """Forget the rows that were made; they can be made again while their request is held."""
        self._made = None

    def arrived(self) -> bool:
        """Whether every row of the part, or what the prompt's are reduced to, is here, by the marks that have been
        read; not for parts that are treated otherwise."""
        kind = "fold" if self.part.folds else "rows"
        return all(self.pending.has(sites, self._wanted(some, how)[0], kind) for sites, some, how in self.part.groups)

    def touched(self, move: ResolvedIntervention) -> np.ndarray:
        """Positions that an intervention is for, ascending; those before `cached_tokens` are none of this pass."""
        wanted = self._selected((move.positions,))
        if move.per_position:
            wanted = wanted[[k for k, term in enumerate(move.instructions[: len(wanted)]) if term.u]]
        return wanted

    def _touched(self, move: ResolvedIntervention) -> tuple[int, int] | np.ndarray:
        """As `touched`; (first, end) if that is known to be all between them."""
        span = None if move.per_position else self._span((move.positions,))
        return self.touched(move) if span is None else span

    def verify(self) -> list[tuple[ResolvedIntervention | None, int, int]]:
        """Of every move the positions that were changed, and those that were shared, as in `Receipt`; raises WeirError
        if that is not what was asked."""
        if not self.pending.admitted.moves or self._checked is not None:
            self.pending.check()
        if self._checked is not None:
            return self._checked
        out: list[tuple[ResolvedIntervention | None, int, int]] = []
        number = 0
        for move in self.pending.admitted.moves:
            if move is None:
                out.append((None, 0, 0))
                continue
            at = self._touched(move)
            if isinstance(at, tuple):
                first, end = at
                cached, count = min(max(self.cached_tokens - first, 0), end - first), end - first
            else:
                cached, count = int(np.searchsorted(at, self.cached_tokens)), len(at)
            if not self.aborted:
                # Also where KV came from the cache: the worker knows who has left some there without being steered.
                self.pending.await_steered(number, at, self.timeout)
            number += 1
            out.append((move, count - cached, cached))
        if self.finished and not self.aborted:
            self._checked = out
        return out

    def concluded(self) -> bool:
        """Whether `verify` and `settle` have nothing to wait for."""
        if self.tickets:
            return False
        moves = self.pending.admitted.effective
        if self.aborted or not moves or self._checked is not None:
            return True
        return self.pending.confirmed([self._touched(move) for move in moves])

    @property
    def steered(self) -> int:
        """Positions that interventions are for, each counted once; those before `cached_tokens` are none."""
        spans: list[tuple[int, int]] = []
        others: list[np.ndarray] = []
        for move in self.pending.admitted.effective:
            at = self._touched(move)
            if isinstance(at, tuple):
                spans.append(at)
            else:
                others.append(at)
        if others:
            changed = np.zeros(self.end, bool)
            for at in others:
                changed[at] = True
            for first, end in spans:
                changed[first:end] = True
            return int(changed[self.cached_tokens :].sum())
        count, reached = 0, self.cached_tokens
        for first, end in sorted(spans):
            count, reached = count + max(end - max(first, reached), 0), max(reached, end)
        return count

    def wait(self) -> None:
        """Wait for all that `receipt` waits for; raises WeirError as that does."""
        self.settle()
        self.activations()
        self.verify()

    def receipt(self) -> Receipt:
        """What was done for this sequence up to this output; waits for its sinks as `settle` does."""
        self.settle()
        acts = self.activations()
        done = self._by_intervention(self.verify())
        return Receipt(
            captured={site: acts.count(site) for site in acts.sites},
            dropped=self._dropped(acts),
            steered=tuple(sites for sites, _ in done),
            shared=tuple(shared for _, shared in done),
            prompt_tokens=self.tokens.prompt_len,
            generated_tokens=self.tokens.generated,
            cached_tokens=self.cached_tokens,
            hit_limit=self.hit_limit,
            complete=self.finished and not self.aborted,
            compression=self._compression(),
            files=tuple(file for ticket in self.tickets for file in ticket.files),
            sinks={ticket.sink: ticket.state for ticket in self.tickets},
        )

    def _by_intervention(
        self, moves: Sequence[tuple[ResolvedIntervention | None, int, int]]
    ) -> list[tuple[dict[Site, int], int]]:
        """As `verify`, of each intervention that was asked for: (site -> rows changed, positions that were shared)."""
        out, each = [], iter(moves)
        for count in self.pending.admitted.parted:
            some = list(itertools.islice(each, count))
            sites = {Site(move.hook, layer): n for move, n, _ in some if move for layer in move.layers}
            shared = max(cached for _, _, cached in some)
            if shared and count > 1 and any(move and move.per_position for move, _, _ in some):
                # Where a row is zero, it changes nothing at its layer.
                at = np.unique(np.concatenate([self.touched(move) for move, _, _ in some if move]))
                shared = int(np.searchsorted(at, self.cached_tokens))
            out.append((dict(sorted(sites.items())), shared))
        return out

    def settle(self) -> None:
        """Wait until the sinks that get this sequence's rows now have taken them.

        Raises:
            WeirError: if one that the request depends on has failed.
        """
        for ticket in self.tickets:
            ticket.settle(self.timeout)

    def _compression(self) -> dict[str, Any] | None:
        asked = (part for part in (self.part, *self.pending.admitted.parts) if part.spec.site_requests)
        postprocess = next((part.spec.postprocess for part in asked), None)
        if postprocess is None or postprocess.compression is None:
            return None
        return postprocess.compression.header(self.d_model, self.part.dtype)

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
        for sites, selectors, how in self.part.groups:
            wanted = len(self._wanted(selectors, how)[0])
            out.update({s: wanted - acts.count(s) for s in sites if acts.count(s) < wanted})
        return out

    def _selected(self, selectors: Sequence[Positions]) -> np.ndarray:
        """Positions that any of these chooses, ascending."""
        span = self._span(selectors)
        if span is not None:
            return np.arange(*span)
        return selected(selectors, self.tokens.prompt_len, self.tokens.array)

    def _span(self, selectors: Sequence[Positions]) -> tuple[int, int] | None:
        """(first, end) of what `_selected` finds if that is known to be all between them, else None."""
        bounds = selectors[0].bounds(self.tokens.prompt_len) if len(selectors) == 1 else None
        if bounds is None:
            return None
        first, end = max(bounds[0], 0), min(bounds[1], self.end)
        return first, max(first, end)

    def _wanted(self, selectors: Sequence[Positions], postprocess: Postprocess | None) -> tuple[np.ndarray, np.ndarray]:
        """(positions of the rows that belong here, positions that they are made from)."""
        chosen = self._selected(selectors)
        if postprocess is not None and postprocess.reduce is not None:
            # A reduction is there once there is nothing more to reduce.
            return (chosen[-1:], chosen) if self.finished else (chosen[:0], chosen[:0])
        chosen = chosen[chosen >= self.start] if self.start else chosen
        return chosen, chosen

    def _assemble(self) -> Activations:
        part = self.part
        found: list[Mapping[Site, torch.Tensor]] = []
        positions: dict[Site, torch.Tensor] = {}
        for sites, selectors, postprocess in part.groups:
            for taken in self._treated(postprocess, sites, *self._wanted(selectors, postprocess)):
                found.append(taken.rows or dict.fromkeys(taken.sites, self._nothing(postprocess)))
                positions.update(dict.fromkeys(taken.sites, torch.from_numpy(taken.positions)))
        if tuple(positions) != part.spec.sites:
            positions = {site: positions[site] for site in part.spec.sites}
        return self._activations(_joined(found), positions)

    @property
    def rows(self) -> int:
        """Rows that belong here, of all sites."""
        return sum(len(sites) * self._count(some, how) for sites, some, how in self.part.groups)

    def _count(self, selectors: Sequence[Positions], postprocess: Postprocess | None) -> int:
        """As many as `_wanted` finds rows."""
        span = self._span(selectors)
        if span is None or (postprocess is not None and postprocess.reduce is not None):
            return len(self._wanted(selectors, postprocess)[0])
        return max(span[1] - max(span[0], self.start), 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, about."""
        width, dtype = self._row(self.part.spec.postprocess)
        return width * dtype.itemsize

    def _row(self, postprocess: Postprocess | None) -> tuple[int, torch.dtype]:
        """Values of a row, and what they are."""
        if postprocess is not None and postprocess.compression is not None:
            return postprocess.compression.record_bytes(self.d_model), torch.uint8
        if postprocess is not None and postprocess.directions:
            return len(postprocess.directions), torch.float32
        return self.d_model, DTYPES[self.part.dtype]

    def _nothing(self, postprocess: Postprocess | None) -> torch.Tensor:
        width, dtype = self._row(postprocess)
        return torch.empty(0, width, dtype=dtype)

    def _treated(
        self, postprocess: Postprocess | None, sites: Sequence[Site], at: np.ndarray, sources: np.ndarray
    ) -> list[TakenRows]:
        if postprocess is None or self.part.late:
            rows = self._take(sites, sources, "rows")
            return rows if postprocess is None else treated(postprocess, self.part.directions, at, sources, rows)
        if postprocess.compression is not None:
            return self._take(sites, sources, "packed")
        if postprocess.directions:
            scores = self._take(sites, sources, "scores")
            return scores if postprocess.reduce is None else reduced(postprocess.reduce, at, scores, [], len(sources))
        in_prompt = sources[sources < self.tokens.prompt_len]
        folds = self._take(sites, in_prompt[-1:], "fold")
        if len(in_prompt) == len(sources):
            return folds
        later = self._take(sites, sources[len(in_prompt) :], "rows")
        return reduced(postprocess.reduce or "", at, later, folds, len(sources) - len(in_prompt), len(in_prompt))

    def _take(self, sites: Sequence[Site], positions: np.ndarray, kind: str) -> list[TakenRows]:
        own = self.part.sink.memory and self.pending.awaited(sites)  # whoever gets them may change them
        if self.aborted:
            return self.pending.arrived(sites, positions, kind, own)
        return self.pending.take(sites, positions, self.timeout, kind, own)


def _joined(parts: Sequence[Mapping[Site, torch.Tensor]]) -> Mapping[Site, torch.Tensor]:
    return parts[0] if len(parts) == 1 else {site: rows for part in parts for site, rows in part.items()}


DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
