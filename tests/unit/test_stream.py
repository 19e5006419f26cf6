"""A step that leaves the ring tap by tap brings the same bytes to the same places as one that leaves it whole."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_planner import COLUMNS, LAYERS, spec_of, step
from tests.unit.wishes import sensible_captures
from vllm_weir.spec.compress import Compression
from vllm_weir.spec.sizes import Sizes
from vllm_weir.worker.arena import Arena
from vllm_weir.worker.codecs import Codecs
from vllm_weir.worker.hostmem import HostBuffer
from vllm_weir.worker.packs import packs_of
from vllm_weir.worker.plan import Planner
from vllm_weir.worker.programs import ProgramTable
from vllm_weir.worker.select import STAGES, num_taps
from vllm_weir.worker.step import PACKED
from vllm_weir.worker.strands import Strands
from vllm_weir.worker.stream import ROWS_IN_A_RUN, Pieces
from vllm_weir.worker.treat import Treater

D, ROW = 8, 32
CPU = torch.device("cpu")


def planner_of(arena_rows):
    taps = num_taps(LAYERS)
    table = ProgramTable(Sizes(4, 4, 4), taps, range(taps), D)
    planner = Planner(COLUMNS, taps * STAGES, 64, table, Strands(Arena(arena_rows)))
    planner.reader.row_bytes = ROW
    return planner


def row_of(token, column):
    """What the model has there."""
    return torch.randn(D, generator=torch.Generator().manual_seed(1000 * token + column))


def deliver(host, packet):
    flat = packet.records.view(-1)
    for source, target, size in packet.pieces.tolist():
        host[target : target + size] = flat[source : source + size]


def whole(plan, planner, codecs, host):
    """The step through a ring that holds all of it."""
    ring = torch.zeros(plan.rows, D)
    for token in np.flatnonzero(plan.profiles >= 0).tolist():
        for rank, column in enumerate(planner.profiles.columns_of[int(plan.profiles[token])]):
            ring[int(plan.slots[token]) + rank] = row_of(token, column)
    rows = host.view(torch.float32).view(-1, D)
    for slot, row, count in plan.segments.tolist():
        rows[row : row + count] = ring[slot : slot + count]
    for packet in Treater(ring).pack(plan, 0, codecs):
        deliver(host, packet)


def streamed(plan, planner, codecs, host):
    """The step column by column; lanes that no token of the column has hold NaN."""
    columns_of, laid = planner.profiles.columns_of, plan.in_lanes()
    packs, pieces = packs_of(plan, codecs, CPU), Pieces(plan)
    used = {int(p) for p in plan.profiles[plan.tokens] if p >= 0}
    rows = host.view(torch.float32).view(-1, D)
    for column in sorted({c for p in used for c in columns_of[p]}):
        lanes = torch.full((len(plan.tokens), D), float("nan"))
        places = {p: columns_of[p].index(column) for p in used if column in columns_of[p]}
        for token in np.flatnonzero(laid.slots >= 0).tolist():
            if int(plan.profiles[token]) in places:
                lanes[int(laid.slots[token])] = row_of(token, column)
        runs, rest = pieces.of(places)
        assert (runs[:, 3] >= ROWS_IN_A_RUN).all() and (rest[:, 2] == 1).all()
        for lane, row, width, count in runs.tolist():
            rows[row : row + count * width : width] = lanes[lane : lane + count]
        for lane, row, _ in rest.tolist():
            rows[row] = lanes[lane]
        for pack in packs:
            if pack.profile in places:
                pack.take(lanes, places[pack.profile])
    for pack in packs:
        deliver(host, pack.packet())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_same_bytes_come_to_the_same_places(data):
    arena_rows = data.draw(st.sampled_from([40, 4000]))  # in the small one some find no room, and their requests fail
    planner, codecs, state = planner_of(arena_rows), Codecs(D, CPU), {}
    for i in range(data.draw(st.integers(1, 5))):
        how = data.draw(st.sampled_from([None, "full8", "fp16", {"method": "topk8", "k": 3}]))
        number = -1 if how is None else PACKED - codecs.hold(f"r{i}", Compression.parse(how, "c"))
        length = data.draw(st.integers(1, 12))
        spec = spec_of(data.draw(sensible_captures(LAYERS)), how)
        planner.read(f"r{i}", "a", spec, length, list(range(length)), 30, number)
        state[f"r{i}"] = 0
    for _ in range(data.draw(st.integers(1, 4))):
        batch = [(name, data.draw(st.integers(1, 9)), at) for name, at in state.items()]
        plan = step(planner, batch)
        state.update({name: at + n for name, n, at in batch})
        if plan is None or not plan.rows:
            continue
        hosts = [torch.full((arena_rows * ROW,), 7, dtype=torch.uint8) for _ in range(2)]
        whole(plan, planner, codecs, hosts[0])
        streamed(plan, planner, codecs, hosts[1])
        assert hosts[0].equal(hosts[1])
        laid = plan.in_lanes()
        assert ((laid.slots >= 0) == (laid.profiles >= 0)).all(), "a slot without a profile is read out of bounds"


def test_compressed_rows_are_streamed_and_sums_are_not():
    planner, codecs = planner_of(4000), Codecs(D, CPU)
    number = codecs.hold("r", Compression.parse("full8", "c"))
    planner.read("r", "a", spec_of([("resid_post", "all", "all")], "full8"), 6, None, 30, PACKED - number)
    plan = step(planner, [("r", 6, 0)])
    assert plan.treated and not plan.whole
    (pack,) = packs_of(plan, codecs, CPU)
    assert pack.packet().pieces.tolist() == [[0, 0, 6 * LAYERS * codecs[number].record_bytes]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=5))
def test_runs_are_cut_at_block_edges(runs):
    buffer = HostBuffer(1000, 4096, pin=False)
    buffer._block_rows = 32
    given_ = np.array([(1000 * k, place, width, count) for k, (place, width, count) in enumerate(runs)], np.int64)
    parts = buffer.split_runs(given_)
    ends = parts[:, 1] + (parts[:, 3] - 1) * parts[:, 2]
    assert (parts[:, 1] // 32 == ends // 32).all() and (parts[:, 3] > 0).all()

    def rows(of):
        return [(source + k, place + k * width) for source, place, width, n in of.tolist() for k in range(n)]

    assert rows(parts) == rows(given_)
