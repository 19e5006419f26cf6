"""Relative doses on a worker: what they are, that they change no row, and what they hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.unit.worker.scoring.bench import LAYERS, TOKENS, Asked, Bench, D, Draw
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import BLEND, CONST, Instruction, ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.resolved_probes import CellLayout, Scoring, count_doses, with_doses
from vllm_weir.schema.taps import CELLS, num_taps, tap_of
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.scoring.recipe import ScoringRecipe
from vllm_weir.worker.steering.programs import ProgramTable

P, G = 5, 4


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    made.close()


def moves(draw):
    """An addition at three blocks, a replacement at the last of them, and an addition before block 3."""
    add, put, before = (
        Instruction(kind, draw.vector(), a=a) for kind, a in ((CONST, 1.5), (BLEND, 0.25), (CONST, -2.0))
    )
    everywhere, generated = Positions.parse("all"), Positions.parse("generated")
    return (
        ResolvedIntervention("resid_post", (0, 2, 1), everywhere, 0, (add,)),
        ResolvedIntervention("resid_post", (2,), generated, 0, (put, add)),
        ResolvedIntervention("resid_pre", (3,), everywhere, 0, (before,)),
    )


def expected(asked, h, generated):
    """cell -> dose, and the row that leaves the model, of a token; float64."""
    vector = lambda one: torch.from_numpy(asked.vectors[one.u]).double()
    found, first = {}, dict(enumerate(itertools.accumulate((3, 1), initial=0)))
    for block in range(LAYERS):
        h = h * (0.7 + 0.1 * block) + 0.05 * block
        for k, move in enumerate(asked.moves):
            site = block + 1 if move.hook == "resid_pre" else block
            if site not in move.layers or (move.positions.kind == "generated" and not generated):
                continue
            change = sum(one.a * (vector(one) - h if one.kind == BLEND else vector(one)) for one in move.instructions)
            found[first[k] + move.layers.index(site)] = float(change.norm() / h.norm())
            h = h + change
    return found, h


def go(bench, name, asked, rows, chunks, resumed=None):
    bench.join(name, asked, [0] * P)
    for k, (first, end) in enumerate(chunks):
        bench.step({name: (first, rows[first:end])}, {name: [0] * (P + G)}, [name] if k == resumed else [])
    got = bench.got[name]
    bench.leave(name)
    bench.step({"plain": (0, torch.zeros(1, D))}, {"plain": [0]}) if "plain" in bench.got else None
    assert not got.failures
    return got


ONE_BY_ONE = [(P + k, P + k + 1) for k in range(G)]


@pytest.mark.parametrize(
    ("chunks", "resumed"),
    [
        ([(0, P), *ONE_BY_ONE], None),
        ([(0, 2), (2, P), *ONE_BY_ONE], None),
        ([(0, P), (5, 6), (0, 7), (7, 8), (8, 9)], 2),
    ],
)
def test_doses_are_what_their_definition_says(bench, chunks, resumed):
    draw = Draw(len(chunks))
    asked = Asked(moves(draw), (), (), draw.vectors, dose=True)
    rows = torch.from_numpy(draw.random.standard_normal((P + G, D))).float()
    got = go(bench, f"r{len(chunks)}", asked, rows, chunks, resumed)
    assert sorted(got.cells) == list(range(P + G)) and all(len(cells) == 5 for cells in got.cells.values())
    for position in range(P + G):
        doses, row = expected(asked, rows[position].double(), position >= P)
        assert {cell: got.cells[position][cell] for cell in doses} == pytest.approx(doses, rel=1e-5)
        torch.testing.assert_close(got.rows[position].double(), row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_measuring_changes_no_bit_beside_probes_and_gates(bench, seed):
    """Neither of the rows, nor of scores and factors."""
    draw = Draw(seed)
    asked = draw.request()
    rows = torch.from_numpy(draw.random.standard_normal((P + G, D))).float()
    chunks = [(0, 3), (3, P), *ONE_BY_ONE]
    plain = go(bench, f"plain{seed}", asked, rows, chunks)
    measured = go(bench, f"measured{seed}", replace(asked, dose=True), rows, chunks)
    assert all(torch.equal(plain.rows[k], measured.rows[k]) for k in range(P + G))
    told = asked.layout.reported
    for position, cells in plain.cells.items():
        assert measured.cells[position][:told].tobytes() == cells.tobytes()
    assert all(len(cells) == told + count_doses(asked.moves) for cells in measured.cells.values())


def test_a_request_that_measures_nothing_asks_for_the_same_as_before():
    draw = Draw(1)
    spec = Asked(moves(draw), (), (), draw.vectors).spec
    measured = replace(spec, dose=True)
    assert spec.scoring is None and spec.steps is spec.moves
    assert EngineSpec.from_wire(spec.wire) == spec and EngineSpec.from_wire(measured.wire) == measured
    assert len(spec.wire) < len(measured.wire)
    masks = []
    for one in (spec, measured):
        taps = ActiveTaps()
        taps.join("r", one, P)
        masks.append(taps.taps_in((["r"], [0])))
    assert masks[0] and masks[1] == masks[0] | 1 << CELLS, "the same taps, with the kernel that writes numbers"


def test_cells_of_doses_come_between_factors_and_raw_numbers():
    draw = Draw(2)
    asked = draw.request()
    plain, layout = CellLayout.of(asked.probes, asked.gates), CellLayout.of(asked.probes, asked.gates, 7)
    assert (layout.scores, layout.factors) == (plain.scores, plain.factors) and layout.doses == plain.reported
    assert layout.reported == plain.reported + 7 and layout.cells == plain.cells + 7
    assert layout.raws == tuple(cell + 7 for cell in plain.raws)
    steps = with_doses(moves(draw), layout)
    assert [step.dose_cell - 1 - layout.doses for step in steps] == [0, 3, 4]
    assert len({step.digest for step in (*moves(Draw(3)), *with_doses(moves(Draw(3)), layout))}) == 6


def test_what_is_measured_has_to_be_on_one_worker_in_whole_rows():
    draw = Draw(4)
    steps = with_doses(moves(draw), layout := CellLayout.of((), (), 5))
    scoring = Scoring((), (), steps, 5)
    taps = [tap_of(Site("resid_post", k)) for k in range(LAYERS)]

    def recipe(local, **more):
        return ScoringRecipe(scoring, ProgramTable(TableSizes(9, 9, 9), num_taps(LAYERS), local, D, **more))

    assert recipe(taps).reads and recipe(taps).layout == layout
    assert not recipe(taps[3:]).reads and recipe(taps[3:]).bits == 0
    with pytest.raises(WeirError, match="one pipeline stage"):
        recipe(taps[:2])
    with pytest.raises(WeirError, match="a part only"):
        recipe(taps, shards={taps[0]: (0, D // 2)})


def test_what_leaves_frees_everything(bench):
    draw = Draw(5)
    asked = Asked(moves(draw), (), (), draw.vectors, dose=True)
    go(bench, "leaves", asked, torch.zeros(TOKENS, D), [(0, P), *ONE_BY_ONE])
    bench.got["plain"] = type(bench.got["leaves"])()
    bench.step({"plain": (0, torch.zeros(1, D))}, {"plain": [0]})
    assert not any(bench.runtime.usage().values())
