"""Programs for rows of any width, for heads, and for workers that hold a part of a row."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.unit.schema.test_lowering import FACTS, admitted
from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.schema import instructions as kinds
from vllm_weir.schema.engine_spec import TableNeeds
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import Instruction, ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.rows import Shard
from vllm_weir.schema.taps import STAGES, num_taps, tap_of
from vllm_weir.worker.steering.programs import AFTER_POST, LAST, ActiveIntervention, ProgramTable
from vllm_weir.worker.tap import cpu_kernel
from vllm_weir.worker.tap.op import numbered

D_MODEL, D_HEAD, HEADS = 6, 4, 4
WIDTH = D_HEAD * HEADS
TAPS, TAP = num_taps(2), tap_of(Site("z", 0))


def table_of(shard: Shard | None = None, vectors: int = 64, nodes: int = 256) -> ProgramTable:
    taps = [tap_of(Site(hook, layer)) for hook in ("z", "resid_post") for layer in range(2)]
    shards = {} if shard is None else {TAP: shard}
    return ProgramTable(TableSizes(vectors, 8, nodes), TAPS, taps, D_MODEL, {TAP: WIDTH, taps[1]: WIDTH}, shards)


def intervention(*instructions: Instruction, hook="z", layers=(0,)) -> ResolvedIntervention:
    return ResolvedIntervention(hook, layers, Positions.parse("all"), False, instructions)


def hold(table, vectors, *interventions):
    """Hold the vectors and the program; returns its number."""
    table.hold_vectors(vectors, lambda digests: {digest: vectors[digest] for digest in digests})
    return table.hold([ActiveIntervention(one, one.digest, -1) for one in interventions])[1]


def run(table, program, rows):
    """What the tap at z[0] makes of its rows."""
    plan = torch.full((len(rows), 4), -1, dtype=torch.int32)
    plan[:, 2], plan[:, 3] = program, 0
    ranks, ring = torch.full((1, TAPS * STAGES), -1, dtype=torch.int32), torch.zeros(1, D_MODEL)
    tables = [torch.from_numpy(getattr(table, name)) for name in ("heads", "ints", "floats", "vectors")]
    rows = rows.clone()
    cpu_kernel.launch(rows, None, numbered(TAP), plan, ranks, ring, *tables)
    return rows


@st.composite
def asked(draw):
    """(vectors, interventions): whole rows are added to and blended, heads undergo everything."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vectors: dict[str, np.ndarray] = {}

    def vector(size):
        name = f"v{len(vectors)}"
        vectors[name] = generator.standard_normal(size).astype(np.float32)
        return name

    def instruction():
        if draw(st.booleans()):
            return Instruction(draw(st.sampled_from([kinds.CONST, kinds.BLEND])), vector(WIDTH), a=0.7)
        kind, first = draw(st.sampled_from(range(6))), draw(st.integers(0, HEADS - 1)) * D_HEAD
        w = vector(D_HEAD) if kind in (kinds.AFFINE, kinds.CLAMP) else ""
        return Instruction(kind, vector(D_HEAD), w, 0.7, 0.3, -0.5, 0.5, first, first + D_HEAD)

    count = st.integers(1, 3)
    return vectors, [intervention(*(instruction() for _ in range(draw(count)))) for _ in range(draw(count))]


@given(asked(), st.sets(st.integers(1, HEADS - 1)), st.integers(1, 3))
def test_workers_do_together_what_one_does_alone(wanted, cuts, tokens):
    """Whatever heads each has; to the bit."""
    vectors, interventions = wanted
    rows = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    whole = table_of()
    expected = run(whole, hold(whole, vectors, *interventions), rows)
    edges = [0, *sorted(cut * D_HEAD for cut in cuts), WIDTH]
    found = []
    for start, stop in itertools.pairwise(edges):
        table = table_of(Shard(start, stop))
        found.append(run(table, hold(table, vectors, *interventions), rows[:, start:stop]))
    assert torch.cat(found, 1).equal(expected)


@pytest.mark.parametrize("kind", [kinds.CONST, kinds.NORM, kinds.AFFINE, kinds.CLAMP, kinds.BLEND, kinds.KEEP_NORM])
def test_a_head_is_steered_alone(kind):
    """By the formulas, on its own columns; the others keep their bits."""
    u, w = (np.random.default_rng(k).standard_normal(D_HEAD).astype(np.float32) for k in range(2))
    uses_w = kind in (kinds.AFFINE, kinds.CLAMP)
    term = Instruction(kind, "u", "w" if uses_w else "", 0.7, 0.3, -0.5, 0.5, 8, 12)
    table, rows = table_of(), torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    found = run(table, hold(table, {"u": u, "w": w} if uses_w else {"u": u}, intervention(term)), rows)
    h = rows[:, 8:12].double().numpy()
    along, norm = (h @ w)[:, None], np.linalg.norm(h, axis=1, keepdims=True)
    turned = h + (0.7 + 0.3 * norm) * u
    wanted = {
        kinds.CONST: h + 0.7 * u,
        kinds.NORM: h + 0.7 * norm * u,
        kinds.AFFINE: h + (0.7 * along + 0.3) * u,
        kinds.CLAMP: h + 0.7 * (along.clip(-0.5, 0.5) - along) * u,
        kinds.BLEND: h + 0.7 * (u - h),
        kinds.KEEP_NORM: turned * norm / np.linalg.norm(turned, axis=1, keepdims=True),
    }[kind]
    np.testing.assert_allclose(found[:, 8:12].numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert found[:, :8].equal(rows[:, :8]) and found[:, 12:].equal(rows[:, 12:])


def test_the_last_instruction_that_a_worker_does_ends_the_intervention():
    """The heads that come after it are another worker's."""
    terms = [Instruction(kinds.CONST, "u", start=first, stop=first + D_HEAD) for first in (0, 4, 8)]
    table = table_of(Shard(0, 8))
    number = hold(table, {"u": np.ones(D_HEAD, np.float32)}, intervention(*terms), intervention(terms[2]))
    first = table.heads[number, TAP]
    assert table.ints[first, 3:].tolist() == [table.ints[first, 3], 0, 0, 4, 0]
    second = table.ints[first, 3]
    assert table.ints[second, 3:].tolist() == [-1, LAST, 4, 8, -4]
    other = table_of(Shard(12, 16))
    number = hold(other, {"u": np.ones(D_HEAD, np.float32)}, intervention(*terms))
    assert (other.heads[number] == -1).all() and other.usage()["nodes"] == 0


def test_taps_share_a_chain_only_if_they_hold_the_same_columns():
    ones = np.ones(WIDTH, np.float32)
    both = intervention(Instruction(kinds.CONST, "u"), layers=(0, 1))
    whole, part = table_of(), table_of(Shard(0, 8))
    assert len({*whole.heads[hold(whole, {"u": ones}, both), [TAP, tap_of(Site("z", 1))]]}) == 1
    number = hold(part, {"u": ones}, both)
    mine, others = part.heads[number, [TAP, tap_of(Site("z", 1))]].tolist()
    assert part.ints[mine, 5:].tolist() == [0, 8, 0] and part.ints[others, 5:].tolist() == [0, WIDTH, 0]


def test_what_comes_before_a_block_follows_what_leaves_the_last_whatever_the_width():
    table = table_of()
    vectors = {"u": np.ones(D_MODEL, np.float32)}
    pre = intervention(Instruction(kinds.CONST, "u"), hook="resid_pre", layers=(1,))
    number = hold(table, vectors, pre, intervention(Instruction(kinds.CONST, "u"), hook="resid_post"))
    first = table.heads[number, tap_of(Site("resid_post", 0))]
    assert table.ints[first, 4:].tolist() == [LAST, 0, D_MODEL, 0]
    assert table.ints[table.ints[first, 3], 4:].tolist() == [LAST | AFTER_POST, 0, D_MODEL, 0]


@pytest.mark.parametrize(
    ("term", "match"),
    [
        (Instruction(kinds.NORM, "wide"), "measures columns 0 to 16 .* has those from 4 to 8"),
        (Instruction(kinds.AFFINE, "wide", "wide"), "measures"),
        (Instruction(kinds.KEEP_NORM, "part", start=2, stop=8), "measures columns 2 to 8"),
        (Instruction(kinds.CONST, "head"), "a vector of 4 values for 16 columns"),
        (Instruction(kinds.CONST, "wide", start=4, stop=8), "a vector of 16 values for 4 columns"),
        (Instruction(kinds.CLAMP, "head", "part", start=4, stop=8), "a vector of 6 values for 4 columns"),
    ],
)
def test_what_a_worker_cannot_do_is_refused_and_leaves_no_trace(term, match):
    vectors = {"wide": np.ones(16, np.float32), "part": np.ones(6, np.float32), "head": np.ones(4, np.float32)}
    table = table_of(Shard(4, 8))
    with pytest.raises(WeirError, match=match):
        hold(table, vectors, intervention(term))
    assert table.usage() == {"vectors": 5, "programs": 0, "nodes": 0}
    table.release_vectors(vectors)
    assert table.usage()["vectors"] == 0
    assert hold(table, vectors, intervention(Instruction(kinds.CONST, "head", start=4, stop=8))) >= 0


def test_wide_vectors_find_room_among_scattered_ones_and_programs_follow():
    """All is counted in rows: what fits by number fits."""
    table = table_of(vectors=9)
    singles = {f"s{k}": np.full(D_HEAD, float(k), np.float32) for k in range(9)}
    kept = intervention(*(Instruction(kinds.CONST, f"s{k}", a=1.0, start=0, stop=4) for k in (8, 4, 3, 1)))
    number = hold(table, singles, kept)
    rows = torch.zeros(1, WIDTH)
    expected = run(table, number, rows)
    assert expected[0].tolist() == [16.0] * 4 + [0.0] * 12
    table.take_changes()
    table.release_vectors(["s0", "s2", "s5"])
    wide = {"w": np.arange(WIDTH, dtype=np.float32)}
    table.hold_vectors(wide, lambda _: wide)
    assert table.usage()["vectors"] == 9 and run(table, number, rows).equal(expected)
    changes = table.take_changes()
    nodes = table._nodes_of[next(iter(table._nodes_of))]
    assert set(nodes) <= set(changes["ints"].tolist()) and len(changes["vectors"]) >= 3, "the device hears of it"
    added = intervention(Instruction(kinds.CONST, "w", a=1.0))
    assert run(table, table.hold([ActiveIntervention(added, added.digest, -1)])[1], rows)[0].tolist() == [*range(16)]
    with pytest.raises(WeirError, match="could not be placed"):
        table.hold_vectors(["x"], lambda _: {"x": np.ones(1, np.float32)})


def test_a_short_vector_has_nothing_of_an_earlier_one_behind_it():
    table = table_of(vectors=1)
    for digest, size in (("a", 6), ("b", 4)):
        table.hold_vectors([digest], lambda _, d=digest, n=size: {d: np.full(n, 3.0, np.float32)})
        table.release_vectors([digest])
    assert table.vectors.tolist() == [[3.0] * 4 + [0.0] * 2]


def test_the_waiting_room_counts_rows():
    room = WaitingQueue(TableSizes(5, 10, 10))
    assert room.enter("a", 1, TableNeeds(["x", "y"], 1, 1, {"x": 3}))
    assert room.enter("b", 2, TableNeeds(["x"], 1, 1, {"x": 3})), "it is there"
    assert not room.enter("c", 3, TableNeeds(["z"], 1, 1, {"z": 2}))
    assert room.release({"b": 1}) == [3], "y has left"
    assert not room.enter("d", 4, TableNeeds(["p"], 1, 1))
    assert room.release({}) == [4] and not len(room)
    assert room.enter("e", 5, TableNeeds(["q"], 1, 1, {"q": 4}))


def test_a_request_needs_as_many_rows_as_its_vectors_take():
    found = admitted(weir.Add(torch.ones(8), 1), weir.Add(torch.arange(8.0), 2))
    rows = {digest: np.ones(8 * (1 + 2 * k), np.float32) for k, digest in enumerate(found.digests)}
    wide = dataclasses.replace(found, rows=rows)

    def needs(vectors):
        request = make_engine_request(wide, "r", [1], 1, 8, FACTS, 1, TableSizes(vectors, 64, 64))
        return request.table_needs

    assert needs(4) == TableNeeds(found.digests, 1, 2, {found.digests[1]: 3})
    with pytest.raises(WeirError, match="needs 4 rows of vectors, the engine's table holds 3"):
        needs(3)
