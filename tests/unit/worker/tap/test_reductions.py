"""Reductions by the taps: what they give depends on positions, not on steps or on who else is in the batch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.rows import GROUP
from vllm_weir.schema.taps import STAGES, num_taps, tap_of
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.columns import ARRIVAL
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap import cpu_kernel
from vllm_weir.worker.tap.op import numbered
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.transfer.directions import Products

LAYERS, D = 2, 6
TAPS = num_taps(LAYERS)
SITES = [Site("resid_post", 0), Site("mlp_out", 1), Site("resid_pre", 1)]
HOW = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "last": lambda x: x[-1]}


class Worker:
    """A planner, the taps of a device and what joins their groups; rows are `content` over and over."""

    def __init__(self, dtype=torch.float32, device="cpu", width=D, launch=cpu_kernel.launch):
        self.dtype, self.words, self.device, self.width, self.launch = dtype, 4 // dtype.itemsize, device, width, launch
        columns = frozenset(range(TAPS * STAGES))
        table = ProgramTable(TableSizes(4, 4, 4), TAPS, range(TAPS), width)
        row_seqs, row_bytes = RowSequences(Arena(4000)), width * dtype.itemsize
        self.planner = Planner(columns, TAPS * STAGES, 64, table, row_seqs, row_bytes=row_bytes)
        self.ring = torch.full((3000, width), float("nan"), dtype=dtype, device=device)
        self.folder = TapReducer(self.ring)
        self.host = torch.zeros(4000, width, dtype=dtype)

    def read(self, name, how, positions, length):
        site_requests = tuple(SiteRequest(site, Positions.parse(positions), False) for site in SITES)
        self.planner.add_capture(name, "a", ResolvedSpec(site_requests, Postprocess(how)), length, None, 1)

    def forget(self):
        """Do what the worker does after each step."""
        for layout_updates in self.planner.row_seqs.take_layout_updates().values():
            self.folder.forget(layout_updates.closed)

    def step(self, batch, content):
        """`content(request, tap, position)` -> row; returns request -> float32 [columns, d] of what is complete."""
        names, counts, computed = zip(*batch, strict=True)
        plan = self.planner.plan(list(names), counts, computed)
        if plan is None:
            return {}
        start, where = 4, [(name, p) for name, n, first in batch for p in range(first, first + n)]
        assert plan.rows <= len(self.ring) - start
        self.ring[:] = float("nan")  # nothing is left there from step to step
        table = np.stack([plan.slots, plan.site_sets, plan.programs, plan.spans], 1)
        table[plan.slots >= 0, 0] += start
        self.folder.seed(plan.reductions, start)
        none, times = torch.full((1, TAPS), -1, dtype=torch.int32), -(-self.width // D)
        tables = [torch.from_numpy(table), torch.from_numpy(self.planner.site_sets.ranks.copy()), none, none]
        plan_, ranks, heads, ints = (x.to(self.device) for x in tables)
        floats, vectors = torch.zeros(1, 4, device=self.device), torch.zeros(1, self.width, device=self.device)
        for tap in sorted({tap_of(site) for site in SITES}):
            rows = torch.stack([content(name, tap, p) for name, p in where]).repeat(1, times)[:, : self.width]
            hidden, number = rows.to(self.device, self.dtype), numbered(tap, device=self.device)
            self.launch(hidden, None, number, plan_, ranks, self.ring, heads, ints, floats, vectors)
        self.folder.settle(plan.reductions, start)
        for slot, row, rows in plan.segments.tolist():
            self.host[row : row + rows] = self.ring[start + slot : start + slot + rows]
        found = {}
        self.forget()
        row_seqs = {s.number: s for s in self.planner.row_seqs.live.values()}
        for number, rank, *_ in plan.arrivals.get("a", np.zeros(0, ARRIVAL)).tolist():
            row_seq = row_seqs[number]
            if rank == 0 and row_seq.rank_size == len(SITES) * self.words:
                at = row_seq.extents[0][0]
                cells = self.host[at : at + row_seq.rank_size].view(-1).view(torch.float32)
                found[row_seq.request_id] = cells.view(len(SITES), self.width).clone()
        return found


@functools.cache
def _rows(name, tap):
    return torch.randn(4096, D, generator=torch.Generator().manual_seed(int(name[-1], 36) * TAPS + tap)) * 3


def content(name, tap, position):
    return _rows(name, tap)[position]


def expected(name, how, positions, length):
    """float64 [columns, d]."""
    chosen = np.flatnonzero(Positions.parse(positions).mask(np.arange(length), length))
    taps = sorted(tap_of(site) for site in SITES)
    return torch.stack([HOW[how](torch.stack([content(name, t, p) for p in chosen]).double()) for t in taps])


LENGTHS = st.sampled_from([1, 5, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 7])
WANTED = st.sampled_from(["prompt", "all", "last_prompt", "2:", "1:200:3", [0, 3, 130, -1], ":-1"])


@examples(25)
@given(
    asked=st.lists(st.tuples(st.sampled_from([*HOW]), WANTED, LENGTHS), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_the_same_bits_however_a_prompt_is_cut_and_batched(asked, dtype, seed):
    requests, turn = {f"r{k}": one for k, one in enumerate(asked)}, np.random.default_rng(seed)
    alone, together = Worker(dtype), Worker(dtype)
    for name, asked in requests.items():
        alone.read(name, *asked)
        together.read(name, *asked)
    whole = {}
    for name, (_, _, length) in requests.items():
        whole |= alone.step([(name, length, 0)], content)
    cut, at = {}, dict.fromkeys(requests, 0)
    again = turn.choice(["", *requests])
    while at:
        batch = []
        for name, first in at.items():
            length = requests[name][2]
            few, left = int(turn.integers(1, 4)), length - first
            count = int(turn.choice([min(few, left), int(turn.integers(1, left + 1)), left], p=[0.2, 0.5, 0.3]))
            if len(at) == 1 or turn.random() < 0.75:
                batch.append((name, count, first))
        if not batch:
            continue
        cut |= together.step(batch, content)
        for name, count, first in batch:
            at[name] = first + count
            if at[name] == requests[name][2]:
                del at[name]
            elif name == again:
                at[name], again = 0, ""  # preempted: computed again from the start
    assert whole.keys() == cut.keys()
    for name, rows in whole.items():
        assert torch.equal(rows, cut[name]), name
        if dtype == torch.float32:
            want = expected(name, *requests[name])
            assert (rows.double() - want).abs().max() <= 1e-6 * want.abs().max()
    for name, (_, wanted, length) in requests.items():
        some = Positions.parse(wanted).mask(np.arange(length), length).any()
        assert (name in whole) == bool(some)
    for worker in (alone, together):
        for name in requests:
            worker.planner.remove(name)
        worker.forget()
        assert not worker.folder._places and not worker.folder._end and not len(worker.planner.site_sets)


def test_rows_of_a_prompt_that_is_reduced_take_no_room_of_their_own():
    worker = Worker()
    for name in "abc":
        worker.read(name, "mean", "prompt", 1000)
    plan = worker.planner.plan(["a", "b", "c"], [1000, 500, 30], [0, 0, 0])
    groups = -(-1000 // GROUP) + -(-500 // GROUP) + 1
    assert plan.rows == plan.group_rows == groups * len(SITES) and not len(plan.captured_tokens)


def test_not_a_number_stays_one():
    worker = Worker()
    for name, how in (("a", "mean"), ("b", "max")):
        worker.read(name, how, "prompt", 4)
    found = worker.step([("a", 4, 0), ("b", 4, 0)], lambda *at: content(*at) + (float("nan") if at[2] == 1 else 0))
    assert all(rows.isnan().all() for rows in found.values()) and len(found) == 2


@pytest.mark.parametrize("often", [1, 3])
def test_what_is_kept_between_steps_is_freed_and_used_again(often):
    worker, most = Worker(), 0
    for _ in range(often):
        for k in range(20):
            worker.read(f"r{k}", "mean", "prompt", 10)
        first = worker.step([(f"r{k}", 4, 0) for k in range(20)], content)
        assert not first and len(worker.folder._places) == 20
        held = len(worker.folder._kept)
        assert 2 * 20 * len(SITES) <= held <= 4 * 20 * len(SITES)
        most = most or held
        for k in range(10):
            worker.planner.remove(f"r{k}")
        found = worker.step([(f"r{k}", 6, 4) for k in range(10, 20)], content)
        assert sorted(found) == sorted(f"r{k}" for k in range(10, 20))
        for k in range(10, 20):
            worker.planner.remove(f"r{k}")
    assert held == most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 2, 17, 256])
def test_products_of_a_row_do_not_depend_on_the_others(dtype, m):
    draw = torch.Generator().manual_seed(0)
    rows, matrix = torch.randn(300, 192, generator=draw).to(dtype), torch.randn(m, 192, generator=draw)
    made = Products(matrix)
    every = made.encode(rows).view(torch.float32)
    assert every.shape == (300, m) and made.record_bytes == 4 * m
    assert torch.equal(every, torch.cat([made.encode(some).view(torch.float32) for some in rows.split([1, 7, 292])]))
    want = rows.double() @ matrix.double().T
    assert (every.double() - want).abs().max() <= 1e-6 * want.abs().max()
