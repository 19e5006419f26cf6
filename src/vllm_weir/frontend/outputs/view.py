"""The part of a sequence's rows that belongs to one output, assembled when somebody looks at it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.admission.read_outs import AskedReadOut
from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.frontend.derived.recipe import Inputs, compute_all
from vllm_weir.frontend.outputs.host_postprocess import (
    apply_postprocess,
    join_shards,
    pick_values,
    reduce_rows,
    sources_of,
)
from vllm_weir.frontend.outputs.intervention_receipts import (
    VerifiedIntervention,
    changed_by_intervention,
    gate_counts,
    intervention_receipts,
)
from vllm_weir.frontend.outputs.read_outs import collect, from_records, from_rows
from vllm_weir.frontend.outputs.scored_rows import ScoredRows
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.frontend.receive.pending_sequence import PendingSequence, TakenRows
from vllm_weir.frontend.receive.tokens import SequenceTokens, TokenIds
from vllm_weir.results.activations import Activations, CompressedRows
from vllm_weir.results.read_outs import ReadValues
from vllm_weir.results.receipt import Receipt
from vllm_weir.results.scores import HookValues, Scores
from vllm_weir.results.site_slices import SiteSlices
from vllm_weir.schema.functions import by_authors
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, selected
from vllm_weir.schema.routing import RoutedExperts
from vllm_weir.util.token_texts import SequenceTexts


@dataclass(frozen=True)
class ViewSnapshot:
    """What a view becomes in a pickle or a deep copy: its results, without anything that waits."""

    asked: bool
    saved_activations: Activations
    saved_receipt: Receipt
    saved_read_values: ReadValues
    saved_scores: Scores | None = None
    saved_values: HookValues | None = None
    saved_by_functions: dict[str, Any] | None = None
    saved_routing: RoutedExperts | None = None

    def routing(self) -> RoutedExperts | None:
        """Return the experts that routers chose, see `OutputView.routing`."""
        return self.saved_routing

    def values(self) -> HookValues | None:
        """Return what functions gave for rows, see `OutputView.values`."""
        return self.saved_values

    def saved(self) -> dict[str, Any] | None:
        """Return what functions have saved, see `OutputView.saved`."""
        return by_authors(self.saved_by_functions)

    def all_saved(self) -> dict[str, Any] | None:
        """Return what functions and their adapters have saved."""
        return self.saved_by_functions

    def activations(self) -> Activations:
        """Return the rows, see `OutputView.activations`."""
        return self.saved_activations

    def receipt(self) -> Receipt:
        """Return the receipt, see `OutputView.receipt`."""
        return self.saved_receipt

    def read_values(self) -> ReadValues:
        """Return features and lens, see `OutputView.read_values`."""
        return self.saved_read_values

    def scores(self) -> Scores | None:
        """Return the probes' scores, see `OutputView.scores`."""
        return self.saved_scores


@dataclass
class OutputView:
    """The rows at positions ``[start, end)`` of a sequence.

    `end` follows from the tokens generated so far. The thread that looks waits here for rows on
    their way; the engine's loop never does.

    Attributes:
        pending: the sequence.
        part: which of its captures.
        tokens: its tokens so far.
        start: first position; only outputs that hold new rows alone have one other than 0.
        scored_start: first position with a score, likewise; None for `start`.
        judged: how many of the generated tokens are known to have their own scores; one more than have rows where
            outputs wait for the scores of their tokens, see `HeldOutputs`.
        finished, aborted: whether the sequence has ended, and whether before its time.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        hit_limit: first wanted position, which a prefix-cache hit was not allowed to pass; None for
            no limit.
        d_model: values of a row.
        timeout: seconds to wait for rows.
        asked: whether the request itself asked for anything; others only have rows for sinks.
        tickets: the sinks that get rows of this sequence.
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
    scored_start: int | None = None
    judged: int = 0
    _cached_activations: Activations | None = None
    _cached_read_values: ReadValues | None = None
    _cached_scores: Scores | None = None
    _cached_routing: RoutedExperts | None = None
    _verified: list[list[VerifiedIntervention]] | None = None
    """The result of `verify` for a finished sequence."""

    def __reduce__(self) -> tuple[type, tuple]:
        return ViewSnapshot, (
            self.asked,
            self.activations(),
            self.receipt(),
            self.read_values(),
            self.scores(),
            self.values(),
            self.all_saved(),
            self.routing(),
        )

    @property
    def end(self) -> int:
        """First position without a row."""
        return len(self.tokens)

    @property
    def _texts(self) -> SequenceTexts:
        """Texts of the tokens; without this view, which keeps rows."""
        return SequenceTexts(functools.partial(self.tokens.up_to, self.scored_end), self.pending.texts)

    @property
    def scored_end(self) -> int:
        """First position without a score."""
        return max(self.end, self.tokens.prompt_len + self.judged)

    def with_start(self, start: int, part: CaptureGroup | None = None, scored_start: int | None = None) -> OutputView:
        """Return a view from position `start` on, of the same captures or of another part.

        Args:
            start: first position of the rows.
            part: which captures; None for the same.
            scored_start: first position of the scores; None for `start`.
        """
        return replace(
            self,
            start=start,
            part=part or self.part,
            scored_start=scored_start,
            _cached_activations=None,
            _cached_read_values=None,
            _cached_scores=None,
            _cached_routing=None,
        )

    def extend(self, later: OutputView) -> None:
        """Cover a later output of the same sequence that was merged into this one."""
        self.tokens, self.finished, self.aborted = later.tokens, later.finished, later.aborted
        self.tickets, self.judged = later.tickets, later.judged
        self._cached_activations = self._cached_read_values = self._cached_scores = self._verified = None
        self._cached_routing = None

    def activations(self) -> Activations:
        """Return the rows, waiting for those on their way; raise WeirError if they were lost."""
        if self._cached_activations is None:
            self.pending.check()
            all_positions = not self.start and not self.aborted and self.part is self.pending.memory
            # A reduction is there at the end.
            final = self.finished or not self.part.folds
            ready = self._ready_activations() if all_positions and final else None
            self._cached_activations = self._assemble() if ready is None else ready
            self._cached_activations.texts = self._texts
        return self._cached_activations

    def read_values(self) -> ReadValues:
        """Return features and lens, waiting for those on their way; raise WeirError if they were lost."""
        if self._cached_read_values is None:
            part = self.part
            self.pending.check()
            late = part.late_rows is not None
            on_workers = [one for one in part.read_outs if one.sae is None or not late]
            row_bytes = self.d_model * DTYPES[part.dtype].itemsize if self.pending.admitted.sends_rows else 0
            values = from_records(on_workers, self._read_at, self._take_records, row_bytes)
            if part.late_rows is not None:
                features = [one for one in part.read_outs if one.sae is not None]
                rows = self.with_start(self.start, part.late_rows).activations()
                values = from_rows(features, self._read_at, rows) | values
            self._cached_read_values = collect(values, self._texts)
        return self._cached_read_values

    def routing(self) -> RoutedExperts | None:
        """Return the experts that routers chose, waiting for those on their way; None until the sequence has ended.

        Of an aborted sequence they are those of the positions up to the first whose rows had not arrived.

        Raises:
            WeirError: if rows were lost.
        """
        routed = self.part.routed
        if routed is None or not self.finished:
            return None
        if self._cached_routing is None:
            self.pending.check()
            acts = self.with_start(0, routed.group).activations()
            first = routed.asked.prompt_start
            count = min(_run_from(first, acts.positions_of(site)) for site in acts.sites)
            if not self.aborted and count < self.end - first:
                raise WeirError("rows of the routers were dropped, as the worker had no room for them", "routing")
            rows = {site: acts[site][:count].to(torch.uint8).numpy() for site in acts.sites}
            self._cached_routing = routed.model.joined(rows, routed.asked.weights)
        return self._cached_routing

    def scores(self) -> Scores | None:
        """Return the probes' scores, waiting for those on their way; None without probes.

        Raises:
            WeirError: if the request has failed, or scores do not come in time.
        """
        if self._cached_scores is None:
            self._cached_scores = self._scored_rows().scores()
            if self._cached_scores is not None:
                self._cached_scores.texts = self._texts
        return self._cached_scores

    def values(self) -> HookValues | None:
        """Return what functions gave for rows, waiting for what is on its way; None without functions."""
        if not self.pending.admitted.calls:
            return None
        self.pending.check()
        self.verify()
        values = self.pending.told.values(self.start, self.end)
        if values is not None:
            values.texts = self._texts
        return values

    def saved(self) -> dict[str, Any] | None:
        """Return what functions have saved; waits as `values` does."""
        return by_authors(self.all_saved())

    def all_saved(self) -> dict[str, Any] | None:
        """Return what functions and their adapters have saved; waits likewise."""
        if not self.pending.admitted.calls:
            return None
        self.pending.check()
        self.verify()
        return self.pending.told.saved()

    def every_score(self) -> Scores:
        """Return the scores of all probes of this output, also of those that score every request; waits for them.

        Raises:
            WeirError: if the request has failed, or scores do not come in time.
        """
        return self._scored_rows().every_score()

    def counted_scores(self) -> list[tuple[RegisteredProbe, np.ndarray]]:
        """Return the probes that score every request, with their scores [rows, k] of this output; waits for them.

        Raises:
            WeirError: if scores do not come in time.
        """
        rows = self._scored_rows()
        return [(registered, rows.scores_of(index)[1]) for index, registered in self.pending.admitted.counted]

    def _scored_rows(self) -> ScoredRows:
        start = self.start if self.scored_start is None else self.scored_start
        return ScoredRows(self.pending, self.tokens, start, self.scored_end, self.aborted, self.timeout)

    def _read_at(self, asked: AskedReadOut) -> np.ndarray:
        return self._wanted((asked.positions,), None)[0]

    def _take_records(self, sites: Sequence[Site], positions: np.ndarray) -> list[TakenRows]:
        if self.aborted:
            return self.pending.arrived(sites, positions, "read_outs")
        return self.pending.take(sites, positions, self.timeout, "read_outs")

    def _ready_activations(self) -> Activations | None:
        """Return the rows of the whole sequence if they were sliced before anybody asked."""
        if self.pending.early_activations is not None:
            return self.pending.early_activations
        if self.end != self.pending.expected_end or self.part.recipes:
            return None
        sliced = self.pending.complete_preslice(self.part.spec.sites)
        return None if sliced is None else self._build_activations(sliced.block, sliced.positions)

    def _build_activations(
        self, rows: Mapping[Site, torch.Tensor], positions: Mapping[Site, torch.Tensor]
    ) -> Activations:
        """Return activations of rows, or of their records, with the dtypes that were asked for."""
        part, token_ids = self.part, TokenIds(self.tokens, positions)
        if part.picks:
            rows = {site: self._with_shape(site, tensor) for site, tensor in rows.items()}
        if part.spec.postprocess is not None and part.spec.postprocess.compression is not None:
            header = part.spec.postprocess.compression.header(self.d_model, part.dtype)
            return Activations({}, positions, token_ids, (), CompressedRows(header, rows, part.dtypes), part.stacked)
        if casts := part.casts:
            dtypes = set(casts.values())
            if isinstance(rows, SiteSlices) and len(casts) == len(rows) and len(dtypes) == 1:
                return Activations(rows.to(DTYPES[dtypes.pop()]), positions, token_ids, stacked=part.stacked)
            rows = {**rows, **{site: rows[site].to(DTYPES[dtype]) for site, dtype in casts.items()}}
        return Activations(rows, positions, token_ids, stacked=part.stacked)

    def drop(self) -> None:
        """Drop the assembled rows; they can be assembled again while their request is held."""
        self._cached_activations = self._cached_read_values = self._cached_scores = self._cached_routing = None

    def arrived(self) -> bool:
        """Return whether every row, or the reduction of the prompt's, is among the arrivals read.

        Not for captures that are projected or compressed.
        """
        kind = "fold" if self.part.folds else "rows"
        if self.part.sources is not None and not self.with_start(0, self.part.sources).arrived():
            return False
        return all(
            self.pending.has(sources_of(self.pending, sites), self._wanted(selectors, postprocess)[0], kind)
            for sites, selectors, postprocess in self.part.groups
        )

    def changed_positions(self, intervention: ResolvedIntervention) -> np.ndarray:
        """Return the positions that an intervention is for, ascending.

        Those before `cached_tokens` were changed when their KV was computed, by another request.
        """
        wanted = self._selected((intervention.positions,))
        if intervention.per_position:
            # Where all vectors are zero, nothing is changed.
            wanted = wanted[[k for k in range(len(wanted)) if intervention.of_position(k)]]
        return wanted

    def _changed(self, intervention: ResolvedIntervention) -> tuple[int, int] | np.ndarray:
        """Return `changed_positions`, or (first, end) if that is known to be all between them."""
        span = None if intervention.per_position else self._span((intervention.positions,))
        return self.changed_positions(intervention) if span is None else span

    def verify(self) -> list[list[VerifiedIntervention]]:
        """Return how many positions each intervention has changed, in each of its parts, and how many were cached.

        Wait until the workers have confirmed them, and for the factors of gates.

        Raises:
            WeirError: if a position was not changed as asked.
        """
        interventions = self.pending.admitted.interventions
        if not interventions or self._verified is not None:
            self.pending.check()
        if self._verified is not None:
            return self._verified
        index = itertools.count()
        out = [[self._verify(next(index), move, one.gate) for move in one.moves] for one in interventions]
        if self.finished and not self.aborted:
            self._verified = out
        return out

    def _verify(self, index: int, intervention: ResolvedIntervention, gate: int) -> VerifiedIntervention:
        """Verify one resolved intervention; `index`: among all of the request."""
        positions = self._changed(intervention)
        if isinstance(positions, tuple):
            first, end = positions
            cached, count = min(max(self.cached_tokens - first, 0), end - first), end - first
        else:
            cached, count = int(np.searchsorted(positions, self.cached_tokens)), len(positions)
        if not self.aborted:
            # Cached positions too: the worker knows which requests have left KV without being
            # steered.
            self.pending.await_steered(index, positions, self.timeout)
        if gate < 0:
            return VerifiedIntervention(intervention, count - cached, cached)
        changed = len(self._acted(gate, intervention, self.cached_tokens))
        return VerifiedIntervention(intervention, changed, cached, gate, count)

    def _acted(self, gate: int, intervention: ResolvedIntervention, start: int = 0) -> np.ndarray:
        """Return the positions from `start` on at which an intervention with a gate has changed rows."""
        positions = self.changed_positions(intervention)
        return self._scored_rows().acted(gate, positions[positions >= start])

    def concluded(self) -> bool:
        """Return whether `verify`, `settle`, `scores`, `routing` and the doses of `receipt` would return at once."""
        if self.part.routed is not None and self.finished and self._cached_routing is None:
            return False
        interventions = self.pending.admitted.effective
        measured = interventions if self.pending.admitted.dose else []
        if self.tickets or not self._scored_rows().arrived(map(self._computed, measured)):
            return False
        if self.aborted or not interventions or self._verified is not None:
            return True
        return self.pending.confirmed([self._changed(intervention) for intervention in interventions])

    @property
    def steered(self) -> int:
        """Positions from `cached_tokens` on that interventions have changed, each counted once."""
        spans: list[tuple[int, int]] = []
        others: list[np.ndarray] = []
        parts = [(move, one.gate) for one in self.pending.admitted.interventions for move in one.moves]
        for intervention, gate in parts:
            positions = self._changed(intervention) if gate < 0 else self._acted(gate, intervention)
            if isinstance(positions, tuple):
                spans.append(positions)
            else:
                others.append(positions)
        if others:
            changed = np.zeros(self.end, bool)
            for positions in others:
                changed[positions] = True
            for first, end in spans:
                changed[first:end] = True
            return int(changed[self.cached_tokens :].sum())
        count, counted_to = 0, self.cached_tokens
        for first, end in sorted(spans):
            count, counted_to = count + max(end - max(first, counted_to), 0), max(counted_to, end)
        return count

    def wait(self) -> None:
        """Wait for the sinks, the rows and the word on steering; raise WeirError if any failed."""
        self.settle()
        self.activations()
        self.read_values()
        self.scores()
        self.routing()
        self.verify()

    def receipt(self) -> Receipt:
        """Return what was done for this sequence up to this output, waiting as `wait` does."""
        self.settle()
        activations = self.activations()
        verified = self.verify()
        changed = changed_by_intervention(verified, self.changed_positions, self.cached_tokens)
        return Receipt(
            captured={site: activations.count(site) for site in activations.sites},
            dropped=self._dropped(activations),
            steered=tuple(sites for sites, _ in changed),
            shared=tuple(shared for _, shared in changed),
            prompt_tokens=self.tokens.prompt_len,
            generated_tokens=self.tokens.generated,
            cached_tokens=self.cached_tokens,
            hit_limit=self.hit_limit,
            complete=self.finished and not self.aborted,
            compression=self._compression(),
            files=tuple(file for ticket in self.tickets for file in ticket.files),
            sinks={ticket.sink: ticket.state for ticket in self.tickets},
            gates=gate_counts(self.pending.admitted, verified, self._acted),
            interventions=intervention_receipts(
                self.pending.admitted, verified, self._acted_here, self._scored_rows().doses
            ),
            notes=self.pending.told.notes(self.end),
            tag=self.pending.tag,
        )

    def _acted_here(self, one: VerifiedIntervention) -> np.ndarray:
        """Return the positions that one resolved intervention has changed for this sequence, ascending."""
        if one.gate >= 0:
            return self._acted(one.gate, one.intervention, self.cached_tokens)
        return self._computed(one.intervention)

    def _computed(self, intervention: ResolvedIntervention) -> np.ndarray:
        """Return those of `changed_positions` that were computed for this sequence."""
        positions = self.changed_positions(intervention)
        return positions[positions >= self.cached_tokens]

    def settle(self) -> None:
        """Wait until the sinks have taken this sequence's rows.

        Not for sinks where rows wait to be marked.

        Raises:
            WeirError: if a sink that the request depends on has failed.
        """
        for ticket in self.tickets:
            ticket.settle(self.timeout)

    def _compression(self) -> dict[str, Any] | None:
        """Return the header of the compression of the rows; None if they are not compressed."""
        parts = (part for part in (self.part, *self.pending.admitted.parts) if part.spec.site_requests)
        postprocess = next((part.spec.postprocess for part in parts), None)
        if postprocess is None or postprocess.compression is None:
            return None
        return postprocess.compression.header(self.d_model, self.part.dtype)

    def _dropped(self, activations: Activations) -> dict[Site, int]:
        out = self.missing(activations)
        for ticket in self.tickets:
            out.update({site: max(n, out.get(site, 0)) for site, n in ticket.missing.items()})
        return out

    def missing(self, activations: Activations) -> dict[Site, int]:
        """Return site -> rows that `activations` lacks because the worker had no room for them."""
        if self.aborted:
            return {}
        out = {}
        for sites, selectors, postprocess in self.part.groups:
            wanted = len(self._wanted(selectors, postprocess)[0])
            out.update({s: wanted - activations.count(s) for s in sites if activations.count(s) < wanted})
        for recipe in self.part.recipes:
            if (lacking := self._count(recipe.positions, None) - activations.count(recipe.site)) > 0:
                out[recipe.site] = lacking
        return out

    def _selected(self, selectors: Sequence[Positions]) -> np.ndarray:
        """Return the positions that any of these selects, ascending."""
        span = self._span(selectors)
        if span is not None:
            return np.arange(*span)
        return selected(selectors, self.tokens.prompt_len, self.tokens.array)

    def _span(self, selectors: Sequence[Positions]) -> tuple[int, int] | None:
        """Return (first, end) if the selected positions are known to be a range, else None."""
        bounds = selectors[0].bounds(self.tokens.prompt_len) if len(selectors) == 1 else None
        if bounds is None:
            return None
        first, end = max(bounds[0], 0), min(bounds[1], self.end)
        return first, max(first, end)

    def _wanted(self, selectors: Sequence[Positions], postprocess: Postprocess | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of this view's rows, and the positions that they are made from."""
        positions = self._selected(selectors)
        if postprocess is not None and postprocess.reduce is not None:
            # A reduction is complete once the sequence is.
            return (positions[-1:], positions) if self.finished else (positions[:0], positions[:0])
        positions = positions[positions >= self.start] if self.start else positions
        return positions, positions

    def _assemble(self) -> Activations:
        """Take the rows from the pending sequence, and apply what was left to this process."""
        part = self.part
        found: list[Mapping[Site, torch.Tensor]] = []
        positions: dict[Site, torch.Tensor] = {}
        for sites, selectors, postprocess in part.groups:
            for taken in self._take_results(postprocess, sites, *self._wanted(selectors, postprocess)):
                found.append(taken.rows or {site: self._empty_rows(site, postprocess) for site in taken.sites})
                positions.update(dict.fromkeys(taken.sites, torch.from_numpy(taken.positions)))
        rows = _join(found)
        if part.recipes:
            derived = self._derived()
            rows = {**rows, **{site: values for site, (values, _) in derived.items()}}
            positions |= {site: at for site, (_, at) in derived.items()}
        if tuple(positions) != part.sites:
            positions = {site: positions[site] for site in part.sites}
        return self._build_activations(rows, positions)

    def _derived(self) -> dict[Site, tuple[torch.Tensor, torch.Tensor]]:
        """Compute the derived sites: their values, and the positions of these."""
        assert self.part.sources is not None
        sources = self.with_start(0, self.part.sources).activations()
        chosen: dict[tuple[int, int, tuple[Positions, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

        def choose(at: torch.Tensor, selectors: tuple[Positions, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the indices of the wanted positions, and these; layers share both."""
            if (key := (at.data_ptr(), len(at), selectors)) not in chosen:
                wanted, _ = self._wanted(selectors, None)
                here = torch.from_numpy(np.flatnonzero(np.isin(at.numpy(), wanted)))
                chosen[key] = here, at[here]
            return chosen[key]

        inputs = []
        for recipe in self.part.recipes:
            rows = {source.site: sources[source.site] for source in recipe.sources}
            positions = {site: sources.positions_of(site) for site in rows}
            for site, whole in recipe.sources:
                if not whole:
                    here, positions[site] = choose(positions[site], recipe.positions)
                    rows[site] = rows[site][here]
            inputs.append(Inputs(rows, positions))
        return compute_all(self.part.recipes, inputs)

    @property
    def rows(self) -> int:
        """Rows of this view, of all sites."""
        tapped = sum(
            len(sites) * self._count(selectors, postprocess) for sites, selectors, postprocess in self.part.groups
        )
        return tapped + sum(self._count(recipe.positions, None) for recipe in self.part.recipes)

    def _count(self, selectors: Sequence[Positions], postprocess: Postprocess | None) -> int:
        """Return how many rows `_wanted` finds, without listing a span."""
        span = self._span(selectors)
        if span is None or (postprocess is not None and postprocess.reduce is not None):
            return len(self._wanted(selectors, postprocess)[0])
        return max(span[1] - max(span[0], self.start), 0)

    @property
    def size(self) -> int:
        """Bytes of this view's rows; approximate if rows are cast."""
        total = 0
        for sites, selectors, postprocess in self.part.groups:
            formats = [self._row_format(site, postprocess) for site in sites]
            row_bytes = sum(width * dtype.itemsize for width, dtype in formats)
            total += row_bytes * self._count(selectors, postprocess)
        return total

    def _row_format(self, site: Site, postprocess: Postprocess | None) -> tuple[int, torch.dtype]:
        """Return how many values a row of a site has, and their dtype."""
        if postprocess is not None and postprocess.compression is not None:
            return postprocess.compression.record_bytes(self.d_model), torch.uint8
        if postprocess is not None and postprocess.directions:
            return len(postprocess.directions), torch.float32
        pick = self.part.picks.get(site)
        return self.d_model if pick is None else pick.width, DTYPES[self.part.dtype]

    def _empty_rows(self, site: Site, postprocess: Postprocess | None) -> torch.Tensor:
        width, dtype = self._row_format(site, postprocess)
        return torch.empty(0, width, dtype=dtype)

    def _with_shape(self, site: Site, rows: torch.Tensor) -> torch.Tensor:
        """Return flat rows in the shape that their site has; scores stay as they are."""
        pick = self.part.picks.get(site)
        if pick is None or self._projects(site):
            return rows
        return rows.unflatten(1, pick.shape)

    def _projects(self, site: Site) -> bool:
        """Return whether a site's results are dot products, not rows."""
        postprocess = self.part.mixed.get(site) if self.part.mixed else self.part.spec.postprocess
        return postprocess is not None and bool(postprocess.directions)

    def _take_results(
        self, postprocess: Postprocess | None, sites: Sequence[Site], positions: np.ndarray, sources: np.ndarray
    ) -> list[TakenRows]:
        """Return the results at `positions`, made from the rows at `sources`, see `_wanted`."""
        if postprocess is None:
            return self._take(sites, sources, "rows")
        if self.part.late:
            rows = self._take(sites, sources, "rows")
            return apply_postprocess(postprocess, self.part.directions, positions, len(sources), rows)
        if postprocess.compression is not None:
            return self._take(sites, sources, "packed")
        if postprocess.directions:
            scores = self._take(sites, sources, "scores")
            if postprocess.reduce is None:
                return scores
            return reduce_rows(postprocess.reduce, positions, scores, len(sources))
        # The worker has reduced the prompt's rows; those of generated tokens come as they are.
        in_prompt = sources[sources < self.tokens.prompt_len]
        reduced = self._take(sites, in_prompt[-1:], "fold")
        if len(in_prompt) == len(sources):
            return reduced
        generated = sources[len(in_prompt) :]
        rows = self._take(sites, generated, "rows")
        return reduce_rows(postprocess.reduce or "", positions, rows, len(generated), reduced, len(in_prompt))

    def _take(self, sites: Sequence[Site], positions: np.ndarray, kind: str) -> list[TakenRows]:
        # Whoever gets rows on an output may change them, so sinks that wait for the same rows need
        # their own.
        copy = self.part.sink.memory and self.pending.awaited(sites)
        sources = sources_of(self.pending, sites)
        if self.aborted:
            taken = self.pending.arrived(sources, positions, kind, copy)
        else:
            taken = self.pending.take(sources, positions, self.timeout, kind, copy)
        if not self.part.picks:
            return taken
        return [pick_values(rows, self.part.picks) for rows in join_shards(taken)]


def _run_from(first: int, positions: torch.Tensor) -> int:
    """Return how many of ascending positions follow each other, beginning with `first`."""
    return int((positions == torch.arange(first, first + len(positions))).sum())


def _join(parts: Sequence[Mapping[Site, torch.Tensor]]) -> Mapping[Site, torch.Tensor]:
    return parts[0] if len(parts) == 1 else {site: rows for part in parts for site, rows in part.items()}


DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
