"""Probes and gates on a worker against the plain reading of their rules, however requests are cut into steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.worker.scoring.bench import Asked, Bench, D, Draw, blocks
from tests.unit.worker.scoring.plain_scores import PlainModel
from vllm_weir.schema.instructions import CONST, Instruction, ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.resolved_probes import EMA, LINEAR, MEAN, MLP, NO_ACTIVATION, NO_SMOOTHING, ResolvedGate
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.plan_builder import PlanBuilder


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    made.close()


def expected(asked, prompt_len, token_ids, rows):
    model = PlainModel(blocks(), asked.vectors, asked.moves, asked.probes, asked.gates, prompt_len, token_ids)
    return model.run(rows, list(asked.layout.factors)), model


def check(got, asked, prompt_len, token_ids, rows):
    """Rows, scores and factors are what the rules say; what is not scored is marked."""
    assert not got.failures
    want, model = expected(asked, prompt_len, token_ids, rows)
    found = torch.stack([got.rows[k] for k in range(len(rows))]).double().numpy()
    assert np.abs(found - want).max() <= 2e-5 * max(1, np.abs(want).max())
    gated = [move for move in asked.moves if any(one.cell for one in move.instructions)]
    for position in range(len(rows)):
        asked_there = any(model.selects(one.positions, position) for one in (*asked.probes, *gated))
        if asked_there:
            assert position in got.cells
        if position not in got.cells:
            continue
        cells = got.cells[position]
        for probe, first in zip(model.probes, asked.layout.scores, strict=True):
            mine = cells[first : first + probe.probe.outputs]
            if position in probe.scores:
                assert np.abs(mine - probe.scores[position]).max() <= 2e-5 * max(1, np.abs(mine).max())
            else:
                assert np.isnan(mine).all()
        for g, cell in enumerate(asked.layout.factors):
            assert abs(cells[cell] - model.factors[g][position]) <= 1e-4
    return model


def cut(draw, total, prompt_len):
    """Random chunks of the prompt, and then single tokens."""
    edges = sorted({0, prompt_len, *draw.integers(0, prompt_len + 1, 3).tolist()})
    return list(itertools.pairwise(edges)) + [(k, k + 1) for k in range(prompt_len, total)]


@examples(60)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_scores_factors_and_rows_are_what_the_rules_say(bench, seed, requests):
    draw = Draw(seed)
    live, token_ids, todo = {}, {}, {}
    for k in range(requests):
        name = f"r{k}"
        prompt_len, total = int(draw.random.integers(1, 9)), int(draw.random.integers(9, 14))
        live[name] = draw.request(), prompt_len, torch.from_numpy(draw.random.standard_normal((total, D))).float()
        token_ids[name] = draw.random.integers(0, 4, total).tolist()
        bench.join(name, live[name][0], token_ids[name][:prompt_len])
        todo[name] = cut(draw.random, total, prompt_len)
    plain = torch.from_numpy(draw.random.standard_normal((2, D))).float()
    token_ids["plain"] = [0] * 100
    bench.got["plain"] = type(bench.got["r0"])()
    steps = 0
    while any(todo.values()):
        names = [name for name in todo if todo[name] and (draw.random.random() < 0.8 or steps > 60)]
        spans = {name: todo[name].pop(0) for name in names}
        batch = {"plain": (2 * steps, plain)} | {name: (a, live[name][2][a:b]) for name, (a, b) in spans.items()}
        alone = plain
        for block in bench.model:
            alone = alone * (0.7 + 0.1 * block.layer) + 0.05 * block.layer
        token_ids["plain"] = [0] * (2 * steps + 2)
        out = bench.step(batch, token_ids)
        assert torch.equal(out[:2], alone), "neighbours are bit-identical"
        steps += 1
    for name, (asked, prompt_len, rows) in live.items():
        check(bench.got[name], asked, prompt_len, token_ids[name], rows)
        bench.leave(name)
    bench.step({"plain": (2 * steps, plain)}, {"plain": [0] * (2 * steps + 2)})
    assert not any(bench.runtime.usage().values())


def rows_of(draw, n):
    return torch.from_numpy(draw.random.standard_normal((n, D))).float()


def run_alone(bench, name, asked, rows, token_ids, chunks, resumed=None):
    """Run one request; `resumed`: the number of the chunk with which it goes on after a preemption."""
    for k, (a, b) in enumerate(chunks):
        bench.step({name: (a, rows[a:b])}, {name: token_ids}, (name,) if k == resumed else ())
    return bench.got[name]


def linear(draw, name, layer, positions="all", **fields):
    made = draw.probe(name)
    plain = {"kind": LINEAR, "outputs": 1, "rows": (draw.vector(),), "offsets": (0.1,), "start": 0, "stop": 0}
    plain |= {"out_rows": (), "out_offsets": (), "heads": 0, "activation": 0, "smoothing": NO_SMOOTHING}
    place = {"hook": "resid_post", "layer": layer, "positions": Positions.parse(positions)}
    return replace(made, **plain | place | {"parameter": 0.0} | fields)


def gated_add(draw, layer, cell, positions="all"):
    add = Instruction(CONST, draw.vector(), a=1.5, cell=cell + 1)
    return ResolvedIntervention("resid_post", (layer,), Positions.parse(positions), 0, (add,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("latch", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_delayed_gate_acts_before_its_probe_has_read(bench, seed, latch, layer):
    """On generated tokens, and on the first one with what the prompt's last token has said."""
    draw = Draw(seed)
    probe, gate = linear(draw, "p", 2), ResolvedGate(0, 0, 0.0, True, latch, 1, 0.0 if latch else 2.0)
    asked = Asked((gated_add(draw, layer, 1, "generated"),), (probe,), (gate,), draw.vectors)
    rows, token_ids = rows_of(draw, 10), [0] * 10
    name = f"early{seed}{latch}{layer}"
    bench.join(name, asked, token_ids[:4])
    got = run_alone(bench, name, asked, rows, token_ids, [(0, 2), (2, 4), *((k, k + 1) for k in range(4, 10))])
    model = check(got, asked, 4, token_ids, rows)
    assert len(set(model.factors[0].values())) > 1 or latch
    bench.leave(name)


@pytest.mark.parametrize(("layer", "delay", "why"), [(2, 1, "preempted"), (1, 0, "delay=1")])
def test_a_gate_that_would_have_to_know_the_token_before_or_its_own_block_fails_alone(bench, layer, delay, why):
    draw = Draw(3)
    gate = ResolvedGate(0, 0, 0.0, delay=delay)
    asked = Asked((gated_add(draw, 1, 1),), (linear(draw, "p", layer),), (gate,), draw.vectors)
    other = Asked((), (linear(draw, "p", 1),), (), draw.vectors)
    rows, names = rows_of(draw, 3), ("impossible", "beside")
    for name, one in zip(names, (asked, other), strict=True):
        bench.join(name, one, [0] * 3)
    bench.step(dict.fromkeys(names, (0, rows)), dict.fromkeys(names, [0] * 3))
    (reason,) = bench.got["impossible"].failures
    assert why in reason and not bench.got["impossible"].cells
    check(bench.got["beside"], other, 3, [0] * 3, rows)
    assert bench.runtime.usage()["probes"] == 1
    bench.leave("beside")
    bench.leave("impossible")


@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_was_preempted_begins_anew(bench, seed):
    draw = Draw(seed)
    asked = draw.request()
    rows, token_ids, name = rows_of(draw, 9), draw.random.integers(0, 4, 9).tolist(), f"preempted{seed}"
    bench.join(name, asked, token_ids[:5])
    chunks = [(0, 3), (3, 5), (5, 6), (6, 7), (0, 6), (6, 7), (7, 8), (8, 9)]
    got = run_alone(bench, name, asked, rows, token_ids, chunks, resumed=4)
    check(got, asked, 5, token_ids, rows)
    bench.leave(name)


def test_steps_that_repeat_are_planned_once(bench, monkeypatch):
    """64 requests with a probe and a gate each: neither the planner nor the writer of runs does anything more."""
    draw = Draw(5)
    names = [f"many{k}" for k in range(64)]
    probes = [linear(draw, "p", 1, smoothing=EMA, parameter=0.5, rows=(draw.vector(),)) for _ in names]
    gate = ResolvedGate(0, 0, 0.0)
    asked = {
        name: Asked((gated_add(draw, 2, 1),), (probe,), (gate,), draw.vectors)
        for name, probe in zip(names, probes, strict=True)
    }
    rows, ids = {name: rows_of(draw, 6) for name in names}, {name: [0] * 6 for name in names}
    for name in names:
        bench.join(name, asked[name], [0])
    for k in range(3):
        bench.step({name: (k, rows[name][k : k + 1]) for name in names}, ids)
    monkeypatch.setattr(PlanBuilder, "__init__", None)
    monkeypatch.setattr(bench.runtime.parts.scorer._run_writer, "_memory", None)
    for k in range(3, 6):
        bench.step({name: (k, rows[name][k : k + 1]) for name in names}, ids)
    monkeypatch.undo()
    for name in names:
        check(bench.got[name], asked[name], 1, ids[name], rows[name])
        bench.leave(name)


def test_rows_whose_gate_is_shut_keep_their_bits(bench):
    draw = Draw(6)
    rows = rows_of(draw, 6)
    rows[:, 0] = -0.0
    never = Asked((gated_add(draw, 2, 1),), (linear(draw, "p", 0),), (ResolvedGate(0, 0, 1e9),), draw.vectors)
    bench.join("shut", never, [0] * 6)
    bench.got["plain"] = type(bench.got["shut"])()
    out = bench.step({"shut": (0, rows), "plain": (0, rows)}, {"shut": [0] * 6, "plain": [0] * 6})
    assert torch.equal(out[:6].view(torch.int32), out[6:].view(torch.int32))
    assert all(cells[1] == 0 for cells in bench.got["shut"].cells.values())
    bench.leave("shut")


def test_states_move_together_when_room_is_in_pieces():
    """And the requests that moved go on as if nothing had happened."""
    draw = Draw(7)
    bench = Bench()
    table = bench.runtime.parts.probes
    table._extents = Arena(40)
    window = dict(smoothing=MEAN, parameter=8.0)  # 1 + 1 + 8 numbers
    asked = {name: Asked((), (linear(draw, "p", 1, **window),), (), draw.vectors) for name in "abcd"}
    rows = {name: rows_of(draw, 9) for name in "abcd"}
    ids = {name: [0] * 9 for name in "abcde"}
    for name in "abcd":
        bench.join(name, asked[name], [0])
    bench.step({name: (0, rows[name][:1]) for name in "abcd"}, ids)
    bench.leave("a")
    bench.leave("c")
    wide = Asked((), (linear(draw, "p", 1, smoothing=MEAN, parameter=18.0),), (), draw.vectors)
    bench.join("e", wide, [0])
    rows["e"] = rows_of(draw, 9)
    for k in range(1, 9):
        bench.step(
            {"b": (k, rows["b"][k : k + 1]), "d": (k, rows["d"][k : k + 1])}
            | ({"e": (0, rows["e"])} if k == 1 else {}),
            ids,
        )
    for name, of_name in (("b", asked["b"]), ("d", asked["d"]), ("e", wide)):
        check(bench.got[name], of_name, 1, ids[name], rows[name])
    assert bench.runtime.usage()["states"] == 40
    bench.join("f", asked["a"], [0])
    bench.step({"f": (0, rows["a"][:1])}, {"f": [0]})
    assert "max_probes" in bench.got["f"].failures[0]
    bench.close()


def test_a_probe_whose_vectors_move_in_their_table_goes_on():
    """As they do when a wide vector needs rows side by side, while the request is under way."""
    draw, bench = Draw(11), Bench()
    before = Asked((), (linear(draw, "a", 1),), (), draw.vectors)
    units, out = (draw.vector(), draw.vector()), draw.vector(2)
    network = linear(draw, "m", 1, kind=MLP, rows=units, offsets=(0.1, 0.2), out_rows=(out,), out_offsets=(0.3,))
    asked = Asked((), (network,), (), draw.vectors)
    rows, ids = rows_of(draw, 4), {"a": [0], "m": [0] * 4}
    bench.join("a", before, [0])
    bench.step({"a": (0, rows[:1])}, ids)  # so that its vector stands first
    bench.join("m", asked, [0] * 2)
    bench.step({"m": (0, rows[:2])}, ids)
    bench.leave("a")
    bench.step({"m": (2, rows[2:3])}, ids)
    slots = bench.runtime.parts.table._vector_slots
    stood = slots.slot_of[out]
    slots.forget(before.probes[0].rows[0])
    slots._move_together()
    assert slots.slot_of[out] < stood
    bench.join("b", Asked((), (linear(draw, "b", 1),), (), draw.vectors), [0])  # takes a place that has become free
    bench.step({"m": (3, rows[3:]), "b": (0, rows[:1])}, ids | {"b": [0]})
    check(bench.got["m"], asked, 2, ids["m"], rows)
    bench.leave("m")
    bench.leave("b")
    bench.close()


def test_cosine_similarities_do_not_depend_on_the_norm_of_a_row(bench):
    draw = Draw(3)
    probe = replace(linear(draw, "p", 0), offsets=(0.0,), activation=NO_ACTIVATION, cosine=True)
    w = torch.from_numpy(draw.vectors[probe.rows[0]])
    rows = torch.randn(5, D, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [1], [5], [20], [100]])
    bench.join("cosine", Asked((), (probe,), (), draw.vectors), [0] * 5)
    bench.step({"cosine": (0, rows)}, {"cosine": [0] * 5})
    bench.leave("cosine")
    h = blocks()[0](rows).double()
    wanted = (h @ w.double() / h.norm(dim=1)).tolist()
    assert [float(bench.got["cosine"].cells[k][0]) for k in range(5)] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
