"""A worker's host side and a caller's store, joined without processes: what is planned is written and read back."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from vllm_weir import codec, messages
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits, TableSizes
from vllm_weir.schema.taps import STAGES, num_taps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.columns import as_integers
from vllm_weir.worker.planning.drafts import DraftLedger
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.transfer.copy_out import no_wait
from vllm_weir.worker.transfer.notifier import StepNotice

D = 4


class SharedMirror(MappedBuffer):
    """Maps the worker's rows; what is dropped goes back to its arena."""

    def __init__(self, rows: torch.Tensor, arena: Arena) -> None:
        super().__init__()
        self._rows, self._arena = rows, arena

    @property
    def shared(self) -> bool:
        return True

    def piece(self, start, size):
        first = start * self._rows.shape[1] * self._rows.element_size()
        memory = self._rows.view(-1).view(torch.uint8).numpy()[first : first + size]
        weakref.finalize(memory, self.drop, start).atexit = False
        return torch.from_numpy(memory)

    def drop(self, start):
        self._arena.release(start)


class Post:
    """One worker with `layers` blocks and a store that reads from it (by mapping its memory, or in messages)."""

    def __init__(
        self,
        layers: int,
        rows: int = 4000,
        near: bool = True,
        patience: float | None = 0.0,
        max_site_sets: int = 512,
        traits: EngineTraits = PLAIN_ENGINE,
    ):
        taps = num_taps(layers)
        self.columns = frozenset(range(taps * STAGES))
        self.arena = Arena(rows)
        self.rows = torch.full((rows, D), -1.0)
        self.row_seqs = RowSequences(self.arena, patience, traits.draft_tokens)
        table = ProgramTable(TableSizes(4, 4, 4), taps, range(taps), D)
        self.row_bytes = D * self.rows.element_size()
        self.planner = Planner(
            self.columns, taps * STAGES, max_site_sets, table, self.row_seqs, traits=traits, row_bytes=self.row_bytes
        )
        self.ledger = DraftLedger(traits.uncertainty)
        self.compression = None
        """How the rows of those are compressed that ask for it."""
        self.store = RowStore()
        self.mapped = SharedMirror(self.rows, self.arena) if near else MappedBuffer()
        self.near = near
        self._far: dict[int, tuple[int, list]] = {}

    def step(self, batch, content, deliver=True, drafts=None, sampled=None):
        """Run a step of (request, tokens, first position); `content(request, column, position)` -> row [D].

        `drafts` says how many tokens of each request are drafts, `sampled` how many of its tokens the step samples.
        """
        names, counts, computed = zip(*batch, strict=True) if batch else ((), (), ())
        plan, drafted = self.planner.plan(list(names), counts, computed, drafts), self.planner.take_drafted()
        where = [(name, p) for name, n, first in batch for p in range(first, first + n)]
        marks = steered = np.zeros((0, 5), np.int32)
        if plan is not None:
            self._check(plan, where)
            for ring_row, place, size, columns, _ in plan.records.tolist():
                (token,) = np.flatnonzero(plan.slots == ring_row)
                name, position = where[token]
                wanted = self.planner.site_sets.columns_of[int(plan.site_sets[token])]
                rows = torch.stack([content(name, column, position).float() for column in wanted])
                records = codec.encode(rows, self.compression)
                assert len(wanted) == columns and records.numel() == size
                self.rows.view(-1).view(torch.uint8)[place : place + size] = records.view(-1)
            plain = [t for t in plan.captured_tokens.tolist() if not len(plan.records)]
            for token, (_, row, width) in zip(plain, plan.copies.tolist(), strict=True):
                name, position = where[token]
                columns = self.planner.site_sets.columns_of[int(plan.site_sets[token])] if width else ()
                assert len(columns) == width
                for k, column in enumerate(columns):
                    self.rows[row + k] = content(name, column, position)
            notice = StepNotice(no_wait, arrivals=plan.arrivals, steered=plan.steered, drafted=drafted)
            notice.sampled = lambda: sampled
            notice.drop_rejected(self.ledger)
            marks = np.concatenate([*map(as_integers, notice.arrivals.values()), marks])
            steered = np.concatenate([*map(as_integers, notice.steered.values()), np.zeros((0, 4), np.int32)])
        elif drafted is not None:
            self.ledger.verify(drafted, sampled)
        message = (self.row_seqs.take_layout_updates(), marks, steered)
        if deliver:
            self.deliver(message)
        return plan, message

    def deliver(self, message, spill=False):
        """Hand a message to the store, as the drain and the inbox do."""
        payload = b""
        for reply, layout_updates in message[0].items() or [("", messages.LayoutUpdate())]:
            del reply
            marks = message[1]
            if not self.near:
                payload = self._fetch(layout_updates, marks)
            header = messages.MessageHeader(
                "t", "w", D, "float32", layout_updates, pressure=self.arena.pressure, spill=spill
            )
            header = messages.decode(messages.encode(header))
            self.store.receive(header, self.mapped, marks, message[2], payload)
            while self.store.prepare():
                pass
            for extent in layout_updates.retired:
                self.arena.release(extent.start)
                if not self.near:
                    self.arena.release(extent.start)

    def _fetch(self, layout_updates, marks) -> bytes:
        for opened in layout_updates.opened:
            self._far[opened.row_seq] = (opened.rank_bytes(self.row_bytes), [])
        for placed in layout_updates.placed:
            self._far[placed.row_seq][1].append(placed)
        parts = []
        for number, rank, _, count, _ in marks.tolist():
            if rank >= 0:
                width, extents = self._far[number]
                extent = next(x for x in reversed(extents) if x.rank <= rank)
                first = extent.start * self.row_bytes + (rank - extent.rank) * width
                parts.append(self.rows.view(-1).view(torch.uint8)[first : first + count * width].numpy().tobytes())
        return b"".join(parts)

    def _check(self, plan, where) -> None:
        """Slots are dense and disjoint, and what the tables say agrees with the copies."""
        assert len(plan.slots) == len(plan.site_sets) == len(plan.programs) == len(where)
        used = np.zeros(plan.rows, int)
        if len(plan.records):  # these tests compress all requests or none
            return
        for token, (slot, _, width) in zip(plan.captured_tokens.tolist(), plan.copies.tolist(), strict=True):
            if width:
                assert plan.slots[token] == slot
                columns = np.flatnonzero(self.planner.site_sets.ranks[plan.site_sets[token]] >= 0)
                assert len(columns) == width
                used[slot + self.planner.site_sets.ranks[plan.site_sets[token], columns]] += 1
        assert (used == 1).all()
        silent = np.setdiff1d(np.arange(len(where)), plan.captured_tokens)
        assert (plan.slots[silent] == -1).all() and (plan.site_sets[silent] == -1).all()
        for a, b in plan.copy_runs.tolist():
            copies = plan.copies[a:b]
            if copies["rows"].all():
                (width,) = set(copies["rows"].tolist())
                assert (np.diff(plan.captured_tokens[a:b]) == 1).all() and (np.diff(copies["arena_row"]) == width).all()
                assert b - a > 1
        whole = [(s + k, r + k) for s, r, n in plan.segments.tolist() for k in range(n)]
        assert whole == [(s + k, r + k) for s, r, n in plan.copies.tolist() for k in range(n)]
