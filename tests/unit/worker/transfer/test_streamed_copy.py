"""A step that leaves the ring band by band brings the same bytes to the same places as one that leaves it whole."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.request_strategies import sensible_captures
from tests.unit.worker.planning.test_planner import COLUMNS, LAYERS, spec_of, step
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.taps import STAGES, is_boundary, num_taps, tap_of
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.columns import COPY_RUN, ROW_COPY
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.transfer import streamed_copy as stream
from vllm_weir.worker.transfer.band_layout import layout_bands, learn_tap_order
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.directions import Products
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.postprocess import Postprocessor, packs_of
from vllm_weir.worker.transfer.ring import Ring
from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

D, ROW = 8, 32
CPU = torch.device("cpu")


def planner_of(arena_rows):
    taps = num_taps(LAYERS)
    table = ProgramTable(TableSizes(4, 4, 4), taps, range(taps), D)
    return Planner(COLUMNS, taps * STAGES, 64, table, RowSequences(Arena(arena_rows)), row_bytes=ROW)


def row_of(token, column, part=0):
    """What the model has there, or a part of it if that is wider than the ring."""
    return torch.randn(D, generator=torch.Generator().manual_seed(100_000 * part + 1000 * token + column))


def record(ring, plan, token, at, column, rows=1):
    """As a tap does; one group's tokens are added to what its first one left."""
    for k in range(rows):
        row = row_of(token, column, k)
        ring[at + k] = row if plan.spans[token] >= 0 else ring[at + k] + row


def deliver(host, packet):
    flat = packet.records.view(-1)
    for source, target, size in packet.pieces.tolist():
        host[target : target + size] = flat[source : source + size]


def whole(plan, planner, codecs, host):
    """The step through a ring that holds all of it."""
    ring = torch.zeros(plan.rows, D)
    for token in np.flatnonzero(plan.site_sets >= 0).tolist():
        for rank, column in enumerate(planner.site_sets.columns_of[int(plan.site_sets[token])]):
            record(ring, plan, token, int(plan.slots[token]) + rank, column)
    TapReducer(ring).settle(plan.reductions, 0)
    rows = host.view(torch.float32).view(-1, D)
    for slot, row, count in plan.segments.tolist():
        rows[row : row + count] = ring[slot : slot + count]
    for quick in (True, False):
        for packet in Postprocessor(ring).pack(plan, 0, codecs, quick):
            deliver(host, packet)


class Outlet:
    """Where rows leave at once, and what is not theirs any more is overwritten."""

    stream = SimpleNamespace(wait_event=lambda event: None)

    def __init__(self, ring, host):
        self.ring, self.host = ring.buffer, host
        self.rows = host.view(torch.float32).view(-1, D)

    def send_runs(self, start, stride, runs):
        for lane, row, pitch, count, width in runs.tolist():
            for k in range(count):
                at = start + (lane + k) * stride
                self.rows[row + k * pitch : row + k * pitch + width] = self.ring[at : at + width]

    def send(self, segments):
        for at, row, width in segments.tolist():
            self.rows[row : row + width] = self.ring[at : at + width]

    def send_packet(self, packet):
        deliver(self.host, packet)


class Model:
    """A streamed step's passes through the taps, in an order of its own; rows that have left are overwritten."""

    def __init__(self, capacity, codecs, arena_rows, monkeypatch):
        self.ring = Ring(capacity, D, torch.float32, CPU)
        self.host = torch.full((arena_rows * ROW,), 7, dtype=torch.uint8)
        self.numbers = [torch.tensor([tap]) for tap in range(num_taps(LAYERS))]
        taps = {number.data_ptr(): tap for tap, number in enumerate(self.numbers)}
        ranks = torch.zeros(64, num_taps(LAYERS) * STAGES, dtype=torch.int32)
        self.streamer = StreamedCopy(self.ring, Outlet(self.ring, self.host), ranks, taps, codecs)
        release_after = self.ring.release_after

        def overwritten(start, rows, copied):
            self.ring.buffer[start : start + rows] = float("nan")
            release_after(start, rows, copied)

        self.ring.release_after = overwritten
        event = SimpleNamespace(record=lambda *_: None, synchronize=lambda: None, query=lambda: True, wait=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(stream, "launch", self._launch)

    def step(self, plan, planner, order):
        """The host's memory after the step, and what to call to wait for it."""
        self.host.fill_(7)
        self.columns_of = planner.site_sets.columns_of
        self.streamer.begin(plan, planner.site_sets.columns_of)
        laid = plan.in_lanes(self.streamer.stride)
        for tap in order:
            self.streamer.tap(None, None, self.numbers[tap], laid, None, self.ring.buffer)
        TapReducer(self.ring.buffer).settle(plan.reductions, self.streamer.cells)
        return self.streamer.end(plan)

    def check(self, plan, planner, codecs, order):
        """Its bytes come to the places that the step through a ring that holds all of it brings them to."""
        expected = torch.full_like(self.host, 7)
        whole(plan, planner, codecs, expected)
        self.step(plan, planner, order)()
        assert self.host.equal(expected)

    def _launch(self, hidden, other, number, laid, regions, ring, listed):
        for token in np.flatnonzero(laid.slots >= 0).tolist():
            for column in range(int(number) * STAGES, (int(number) + 1) * STAGES):
                site_set = int(laid.site_sets[token])
                region = int(regions[site_set, column])
                if region >= 0:
                    times = self.columns_of[site_set].count(column)
                    record(ring, laid, token, int(laid.slots[token]) + region, column, times)


@examples(60, HealthCheck.function_scoped_fixture)
@given(data=st.data())
def test_the_same_bytes_come_to_the_same_places(data, monkeypatch):
    arena_rows = data.draw(st.sampled_from([40, 4000]))  # in the small one some find no room, and their requests fail
    planner, codecs, state = planner_of(arena_rows), Codecs(D, CPU), {}
    for i in range(data.draw(st.integers(1, 5))):
        how = data.draw(st.sampled_from([None, "full8", "fp16", {"method": "topk8", "k": 3}]))
        number = -1 if how is None else codecs.hold(f"r{i}", Compression.parse(how, "c"))
        length = data.draw(st.integers(1, 12))
        spec = spec_of(data.draw(sensible_captures(LAYERS)), how)
        planner.add_capture(f"r{i}", "a", spec, length, list(range(length)), 30, number)
        state[f"r{i}"] = 0
    # As the scheduler sees to: all that one tap writes fits the ring.
    model = Model(data.draw(st.integers(5 * 9 * STAGES, 1000)), codecs, arena_rows, monkeypatch)
    order = data.draw(st.permutations(range(num_taps(LAYERS))))
    for _ in range(data.draw(st.integers(1, 4))):
        batch = [(name, data.draw(st.integers(1, 9)), at) for name, at in state.items()]
        plan = step(planner, batch)
        state.update({name: at + n for name, n, at in batch})
        if plan is None or not plan.rows:
            continue
        needed = {c // STAGES for p in plan.site_sets.tolist() if p >= 0 for c in planner.site_sets.columns_of[p]}
        others = data.draw(st.sets(st.sampled_from(order)))
        model.check(plan, planner, codecs, [tap for tap in order if tap in needed | others])
        laid = plan.in_lanes(1)
        assert ((laid.slots >= 0) == (laid.site_sets >= 0)).all(), "a slot without a site set is read out of bounds"


def test_groups_of_reduced_rows_stay_while_bands_come_and_go(monkeypatch):
    """A request whose prompt is reduced beside one whose rows stream through what is left of the ring."""
    planner, codecs = planner_of(4000), Codecs(D, CPU)
    sites = tuple(SiteRequest(Site("resid_post", layer), Positions.parse("all"), False) for layer in range(LAYERS))
    planner.add_capture("mean", "a", ResolvedSpec(sites, Postprocess("mean")), 200, None, 30, -1)
    planner.add_capture("rows", "a", ResolvedSpec(sites), 9, None, 30, -1)
    model = Model(2 * LAYERS + 3 * 9, codecs, 4000, monkeypatch)
    order = list(range(num_taps(LAYERS)))
    for _ in range(2):  # the second time, the order of the taps is known
        plan = step(planner, [("mean", 200, 0), ("rows", 9, 0)])
        assert plan.group_rows == 2 * LAYERS and plan.rows == plan.group_rows + 9 * LAYERS > model.ring.capacity
        model.check(plan, planner, codecs, order)
        assert len(plan.reduced) == 1


def test_columns_leave_side_by_side_once_the_order_of_the_taps_is_known(monkeypatch):
    """And rows that an unexpected order may have overwritten are lost with a word, as are those of a tap not met."""
    planner, codecs = planner_of(4000), Codecs(D, CPU)
    planner.add_capture("r", "a", spec_of([("resid_post", "all", "all"), ("mlp_out", "all", "all")]), 6, None, 30, -1)
    model = Model(6 * 4 * LAYERS, codecs, 4000, monkeypatch)
    order = list(range(num_taps(LAYERS)))
    strides = []
    for _ in range(2):
        model.step(step(planner, [("r", 6, 0)]), planner, order)()
        strides.append(model.streamer.stride)
    assert strides[0] == 1 < strides[1], strides
    narrow = Model(6 * 4, codecs, 4000, monkeypatch)
    narrow.step(step(planner, [("r", 6, 6)]), planner, order)()
    with pytest.raises(RuntimeError, match="another order"):
        narrow.step(step(planner, [("r", 6, 12)]), planner, order[::2] + order[1::2])()
    narrow.step(step(planner, [("r", 3, 18)]), planner, order[::2] + order[1::2])()
    with pytest.raises(RuntimeError, match="did not reach its taps"):
        model.step(step(planner, [("r", 3, 21)]), planner, order[:-1])()


def test_taps_that_no_step_before_has_met_take_no_room_of_a_band(monkeypatch):
    """One request's taps are known, another's lie between them."""
    planner, codecs = planner_of(4000), Codecs(D, CPU)
    planner.add_capture("r", "a", spec_of([("resid_post", "all", "all")]), 6, None, 30, -1)
    planner.add_capture("s", "a", spec_of([("attn_out", "all", "all"), ("mlp_out", "all", "all")]), 3, None, 30, -1)
    model = Model(36, codecs, 4000, monkeypatch)
    order = sorted(tap_of(Site(h, k)) for h in ("resid_post", "attn_out", "mlp_out") for k in range(LAYERS))
    plan = step(planner, [("r", 6, 0)])
    model.step(plan, planner, [tap for tap in order if is_boundary(tap)])()
    for turn in range(2):
        plan = step(planner, [("r", 3, 6 + 3 * turn), ("s", 3, 3 * turn)])
        model.check(plan, planner, codecs, order)


def test_the_stages_of_one_tap_share_no_rows_of_the_ring(monkeypatch):
    """A ring of a little more than three regions, wherever the steps before have left off."""
    places = ((Site("resid_post", 0), True), (Site("resid_post", 0), False), (Site("resid_pre", 1), False))
    spec = ResolvedSpec(tuple(SiteRequest(site, Positions.parse("all"), before) for site, before in places), None)
    for used in range(22):
        planner, codecs = planner_of(4000), Codecs(D, CPU)
        planner.add_capture("r", "a", spec, 6, None, 30, -1)
        model = Model(22, codecs, 4000, monkeypatch)
        model.ring.take(used)
        model.check(step(planner, [("r", 6, 0)]), planner, codecs, range(num_taps(LAYERS)))


wide_site_sets = st.tuples(
    st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 40), min_size=1, max_size=12), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=14, max_size=14),
).map(
    lambda drawn: {
        number: tuple(column for column in sorted(columns) for _ in range(drawn[1][column // STAGES]))
        for number, columns in drawn[0].items()
    }
)
"""Site set -> its columns, each as often as its tap's row takes rows of the ring."""


def most_rows_at_one_tap(columns_of):
    """Of one token: what the scheduler sees to that there is room for."""
    return max(max(Counter(c // STAGES for c in columns).values()) for columns in columns_of.values())


@given(
    wide_site_sets,
    st.permutations(range(14)),
    st.booleans(),
    st.integers(1, 50),
    st.integers(1, 8),
    st.integers(0, 600),
)
def test_bands_that_are_written_at_once_share_no_rows(columns_of, order, known, lanes, wanted, spare):
    capacity = lanes * most_rows_at_one_tap(columns_of) + spare
    width, bands = layout_bands(columns_of, order if known else (), lanes, capacity, wanted)
    for number, columns in columns_of.items():
        own = [s.columns for band in bands for s in band if s.site_set in (None, number) and s.columns[0] in columns]
        assert sorted(c for some in own for c in some) == list(columns), "each once, whole"
        for some in own:
            assert len(some) <= width and columns[columns.index(some[0]) :][: len(some)] == some, "side by side"
    for band in bands:
        assert len(band) == 1 or len({s.site_set for s in band} - {None}) == len(band)
    ring = Ring(capacity, D, torch.float32, CPU)
    ring.take(spare)
    ring.rewind()
    starts = [ring.take(lanes * width) for _ in bands]
    # Of the model's way: what has begun to be written and is not complete, and what the next tap writes.
    turn = {tap: k for k, tap in enumerate(order)}
    turns = [[turn[c // STAGES] for strip in band for c in strip.columns] for band in bands]
    spans = [(min(some), max(some)) for some in turns]
    for at in range(14):
        open_ = sorted(s for s, (first, last) in zip(starts, spans, strict=True) if first <= at <= last)
        assert all(b - a >= lanes * width for a, b in itertools.pairwise(open_))


def plan_of(columns_of, site_sets, draw):
    """A step whose tokens have these site sets, and rows somewhere in the arena."""
    sizes = np.array([len(columns_of[number]) for number in site_sets])
    slots = sizes.cumsum() - sizes
    copies, end = np.zeros(len(sizes), ROW_COPY), 0
    runs: list[list[int]] = []
    for k, (number, size) in enumerate(zip(site_sets, sizes.tolist(), strict=True)):
        gap = int(draw.integers(3))
        if runs and not gap and number == site_sets[k - 1]:
            runs[-1][1] = k + 1
        else:
            runs.append([k, k + 1])
        copies[k] = slots[k], end + gap, size
        end += gap + size
    return StepPlan(
        slots=slots.astype(np.int32),
        site_sets=np.array(site_sets, np.int32),
        programs=np.full(len(sizes), -1, np.int32),
        rows=int(sizes.sum()),
        captured_tokens=np.arange(len(sizes)),
        copies=copies,
        copy_runs=np.array([tuple(run) for run in runs if run[1] - run[0] > 1], COPY_RUN),
        spans=np.zeros(len(sizes), np.int32),
    )


@examples(60, HealthCheck.function_scoped_fixture)
@given(columns_of=wide_site_sets, data=st.data())
def test_wide_rows_come_whole_however_little_room_there_is(columns_of, data, monkeypatch):
    """Rows of several ring rows beside others, in a ring that holds what one tap writes, or more."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    site_sets = data.draw(st.lists(st.sampled_from(sorted(columns_of)), min_size=1, max_size=8))
    plan, order = plan_of(columns_of, site_sets, draw), data.draw(st.permutations(range(14)))
    spare = data.draw(st.sampled_from([0, 3, 40, 1000]))
    model = Model(len(site_sets) * most_rows_at_one_tap(columns_of) + spare, Codecs(D, CPU), 2000, monkeypatch)
    planner = SimpleNamespace(site_sets=SimpleNamespace(columns_of=columns_of))
    expected = torch.full((2000 * ROW,), 7, dtype=torch.uint8)
    rows = expected.view(torch.float32).view(-1, D)
    for token, (number, (_, at, _)) in enumerate(zip(site_sets, plan.copies.tolist(), strict=True)):
        seen: Counter[int] = Counter()
        for k, column in enumerate(columns_of[number]):
            rows[at + k] = row_of(token, column, seen[column])
            seen[column] += 1
    for _ in range(2):  # the second time, the order of the taps is known
        model.step(plan, planner, order)()
        assert model.host.equal(expected)


def test_compressed_rows_and_scores_are_streamed():
    planner, codecs = planner_of(4000), Codecs(D, CPU)
    number = codecs.hold("r", Compression.parse("full8", "c"))
    planner.add_capture("r", "a", spec_of([("resid_post", "all", "all")], "full8"), 6, None, 30, number)
    plan = step(planner, [("r", 6, 0)])
    (pack,) = packs_of(plan, codecs, CPU)
    assert plan.has_records and pack.packet().pieces.tolist() == [[0, 0, 6 * LAYERS * codecs[number].record_bytes]]
    planner.remove("r")
    site_requests = spec_of([("resid_post", "all", "all")]).site_requests
    number = codecs.add(Products(torch.ones(3, D)))
    planner.add_capture("s", "a", ResolvedSpec(site_requests, Postprocess(None, ("x", "y", "z"))), 6, None, 30, number)
    plan = step(planner, [("s", 6, 0)])
    (pack,) = packs_of(plan, codecs, CPU)
    assert plan.has_records and plan.rows == 6 * LAYERS, "rows take room while they are in the ring, scores none"
    assert pack.packet().pieces[:, 2].tolist() == [6 * LAYERS * 3 * 4]


def test_orders_are_learned_from_steps_that_come_to_some_of_the_taps():
    """Two kinds of requests in turn keep theirs; a step with both replaces them; a contradiction is forgotten."""
    orders = []
    for met in ((6, 10, 14), (3, 7), (6, 10), (3, 7)):
        orders = learn_tap_order(orders, met)
    assert orders == [(3, 7), (6, 10, 14)]
    orders = learn_tap_order(orders, (3, 6, 7, 10))
    assert orders == [(3, 6, 7, 10), (6, 10, 14)]
    assert learn_tap_order(orders, (7, 3)) == [(7, 3), (6, 10, 14)]
    assert learn_tap_order(orders, (14,)) == orders


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 9), st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=5
    )
)
def test_runs_are_cut_at_block_edges(runs):
    buffer = HostBuffer(1000, 4096, pin=False)
    buffer._block_rows = 32
    given_ = np.array([(1000 * k, at, width + gap, n, width) for k, (at, gap, n, width) in enumerate(runs)], np.int64)
    parts = buffer.split_runs(given_)
    ends = parts[:, 2] + (parts[:, 4] - 1) * parts[:, 3] + parts[:, 5] - 1
    assert (parts[:, 2] // 32 == ends // 32).all() and (parts[:, 4:] > 0).all()

    def rows(of):
        return [
            (lane + k, first + j, place + k * step + j)
            for lane, first, place, step, n, width in of
            for k in range(n)
            for j in range(width)
        ]

    whole = [(lane, 0, place, step, n, width) for lane, place, step, n, width in given_.tolist()]
    assert sorted(rows(parts.tolist())) == sorted(rows(whole))
