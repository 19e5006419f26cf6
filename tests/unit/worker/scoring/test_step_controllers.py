"""Sync controllers on a worker: what they are given, what their answers do, and what becomes of wrong ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker.scoring.bench import Asked, Bench, D, Draw
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.instructions import CONST, Instruction, ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.resolved_probes import LINEAR, CellLayout, ResolvedGate, ResolvedProbe
from vllm_weir.worker.scoring.step_controllers import REFUSED, ScoredStep, SyncController, _checked

GENERATED = Positions.parse("generated")


class Ema(SyncController):
    """Half of what was, and half the tanh of the score of `a` less the last of `b`."""

    probes = ("a", "b")

    def open(self, worker):
        self.worker, self.state, self.seen = worker, torch.zeros(worker.slots), []
        self.answer = None

    def step(self, step: ScoredStep):
        self.seen.append(step)
        if self.answer is not None:
            return self.answer(step)
        before = torch.where(step.first, 0.0, self.state[step.slots])
        score = step.scores["a"][:, 0] - step.scores["b"][:, -1].nan_to_num(0.0)
        self.state[step.slots] = after = 0.5 * before + 0.5 * score.tanh()
        return after


@pytest.fixture
def bench():
    made = Bench(controllers={"ema": Ema()})
    yield made
    made.close()


@pytest.fixture(scope="module")
def benches():
    """One for requests that are steered, one for the same that are not."""
    made = [Bench(controllers={"ema": Ema()}) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def controller(bench):
    return bench.runtime.parts.scorer.controllers._controllers["ema"]


def asked_of(draw, outputs=1, positions="all", layer=1):
    """Two probes, `a` with an output and `b` with some, and an addition of 1 to each value of a block's rows."""

    def probe(name, at, where, k):
        rows = tuple(draw.vector() for _ in range(k))
        return ResolvedProbe(name, "resid_post", at, Positions.parse(where), LINEAR, k, rows, (0.1,) * k)

    probes = probe("a", 1, "all", 1), probe("b", 2, positions, outputs)
    gates = (ResolvedGate(0, 0, 0.0, delay=1, controller="ema", reads=(0, 1)),)
    cell = CellLayout.of(probes, gates).factors[0] + 1
    draw.vectors["ones"] = np.ones(D, np.float32)
    move = ResolvedIntervention("resid_post", (layer,), GENERATED, 0, (Instruction(CONST, "ones", a=1.0, cell=cell),))
    return Asked((move,), probes, gates, draw.vectors)


def rows_of(draw, n):
    return torch.from_numpy(draw.random.standard_normal((n, D)).astype(np.float32))


def strengths_of(got, asked, prompt_len, total, state=0.0):
    """The strengths that follow from the scores that the reader was told of."""
    a, b = asked.layout.scores
    last = b + asked.probes[1].outputs - 1
    found, known = [0.0] * total, 0.0
    for t in range(total - 1):
        cells = got.cells[t]
        known = known if np.isnan(cells[last]) else float(cells[last])
        if t >= prompt_len - 1:
            state = 0.5 * state + 0.5 * math.tanh(float(cells[a]) - known)
            found[t + 1] = state
    return found


def drive(bench, name, asked, rows, prompt_len, cuts):
    bench.join(name, asked, [0] * prompt_len)
    start, ids = 0, {name: [0] * len(rows)}
    for end in (*sorted({*cuts, prompt_len}), *range(prompt_len + 1, len(rows) + 1)):
        bench.step({name: (start, rows[start:end])}, ids)
        start = end


@given(seed=st.integers(0, 10**6), prompt_len=st.integers(1, 9), data=st.data())
def test_strengths_follow_from_the_token_before_however_a_prompt_is_cut(benches, seed, prompt_len, data):
    (bench, plain), draw = benches, Draw(seed)
    layer = data.draw(st.sampled_from([0, 1, 3]))  # before, at and after what is read
    asked = asked_of(draw, 2, data.draw(st.sampled_from(["all", "generated", "last_prompt"])), layer)
    rows, cuts = rows_of(draw, prompt_len + 5), data.draw(st.sets(st.integers(1, prompt_len)))
    controller(bench).seen.clear()
    drive(bench, "r", asked, rows, prompt_len, cuts)
    got, cell = bench.got["r"], asked.layout.factors[0]
    want = strengths_of(got, asked, prompt_len, len(rows))
    for t in range(prompt_len, len(rows)):
        assert abs(float(got.cells[t][cell]) - want[t]) <= 1e-6
    # The scores that these follow from are those of rows with `strength` added at the block.
    drive(plain, "r", Asked((), asked.probes, (), asked.vectors), rows, prompt_len, cuts)
    scale = math.prod(0.7 + 0.1 * k for k in range(layer + 1, 4))
    for t in range(len(rows)):
        change = (got.rows[t] - plain.got["r"].rows[t]) / scale
        assert float((change - want[t]).abs().max()) <= 1e-5
    assert [bool(step.first) for step in controller(bench).seen] == [True] + [False] * 5
    for one in benches:
        one.leave("r")


def test_requests_are_asked_about_by_their_slots(bench):
    """Joining and leaving: each keeps its slot and its state, and `first` says where a slot begins anew."""
    draw = Draw(3)
    asked = {name: asked_of(draw, outputs) for name, outputs in (("x", 1), ("y", 3), ("z", 2))}
    rows = {name: rows_of(draw, 8) for name in asked}
    ids = {name: [0] * 8 for name in asked}
    bench.join("x", asked["x"], [0] * 2)
    bench.step({"x": (0, rows["x"][:2])}, ids)
    bench.join("y", asked["y"], [0] * 3)
    bench.step({"x": (2, rows["x"][2:3]), "y": (0, rows["y"][:2])}, ids)
    bench.step({"y": (2, rows["y"][2:3]), "x": (3, rows["x"][3:4])}, ids)
    bench.leave("x")
    bench.join("z", asked["z"], [0])
    bench.step({"y": (3, rows["y"][3:4]), "z": (0, rows["z"][:1])}, ids)
    for k in range(4, 8):
        bench.step({"y": (k, rows["y"][k : k + 1]), "z": (k - 3, rows["z"][k - 3 : k - 2])}, ids)
    seen = [
        {name: (int(slot), bool(first)) for name, slot, first in zip(s.request_ids, s.slots, s.first, strict=True)}
        for s in controller(bench).seen
    ]
    x, y = seen[0]["x"][0], seen[2]["y"][0]
    assert seen[:3] == [{"x": (x, True)}, {"x": (x, False)}, {"x": (x, False), "y": (y, True)}] and x != y
    assert seen[3] == {"y": (y, False), "z": (x, True)}, "a slot that is free is given again"
    assert all(one == {"y": (y, False), "z": (x, False)} for one in seen[4:]) and len(seen) == 8
    assert controller(bench).seen[3].scores["b"].shape == (2, 3), "as many as the widest has"
    ragged = controller(bench).seen[3]
    assert bool(ragged.scores["b"][ragged.request_ids.index("z"), 2].isnan())
    got, cell = bench.got["y"], asked["y"].layout.factors[0]  # the only one with the last column, which `Ema` reads
    found = [float(got.cells[t][cell]) for t in range(3, 8)]
    assert found == pytest.approx(strengths_of(got, asked["y"], 3, 8)[3:], abs=1e-6)


def test_a_request_that_was_preempted_begins_anew(bench):
    draw = Draw(4)
    asked, rows = asked_of(draw), rows_of(draw, 6)
    bench.join("r", asked, [0] * 3)
    ids = {"r": [0] * 6}
    for start, end in ((0, 3), (3, 4)):
        bench.step({"r": (start, rows[start:end])}, ids)
    first = float(bench.got["r"].cells[3][asked.layout.factors[0]])
    bench.step({"r": (0, rows[:3])}, ids, resumed=["r"])
    bench.step({"r": (3, rows[3:4])}, ids)
    assert float(bench.got["r"].cells[3][asked.layout.factors[0]]) == first != 0.0
    assert [bool(step.first) for step in controller(bench).seen] == [True, False, True, False]
    bench.step({"r": (0, rows[:5])}, ids, resumed=["r"])
    (why,) = bench.got["r"].failures
    assert "preempted" in why and "controller" in why


def test_what_a_controller_raises_fails_its_requests_alone(bench):
    draw = Draw(5)
    asked, rows = asked_of(draw), rows_of(draw, 4)
    other = Asked((), asked.probes, (), asked.vectors)
    ids = {"r": [0] * 4, "o": [0] * 4}
    bench.join("r", asked, [0] * 2)
    bench.join("o", other, [0] * 2)

    def answer(step):
        raise KeyError("no such thing")

    controller(bench).answer = answer
    bench.step({"r": (0, rows[:2]), "o": (0, rows[:2])}, ids)
    assert bench.got["r"].failures == ["the controller 'ema' failed: KeyError: 'no such thing'"]
    out = bench.step({"r": (2, rows[2:3]), "o": (2, rows[2:3])}, ids)
    assert torch.equal(out[0], out[1]), "it is not steered any more"
    assert not bench.got["o"].failures and 2 in bench.got["o"].cells and 2 not in bench.got["r"].cells
    controller(bench).answer = None
    bench.join("s", asked, [0] * 2)
    bench.step({"s": (0, rows[:2])}, {"s": [0] * 2})
    assert not bench.got["s"].failures


def test_answers_that_are_none():
    states = torch.zeros(3)
    odd = torch.tensor([float("nan"), 1.5, -float("inf"), 1.0, -1.0, -0.0, 0.25], dtype=torch.float64)
    got = _checked(odd, 7, states)
    assert got.dtype == torch.float32 and got.tolist() == [0, 0, 0, 1, -1, 0, 0.25]
    assert math.copysign(1, REFUSED) == -1
    assert torch.signbit(got).tolist() == [True, True, True, False, True, False, False]
    wrongs = {TypeError: (None, 0.5), ValueError: (torch.zeros(2), torch.zeros(7, 1))}
    for error, wrong in ((error, one) for error, some in wrongs.items() for one in some):
        with pytest.raises(error, match="step returned"):
            _checked(wrong, 7, states)


def test_a_controller_that_cannot_be_opened_is_named():
    class Broken(Ema):
        def open(self, worker):
            raise OSError("no file")

    with pytest.raises(WeirError, match="OSError: no file") as error:
        Bench(controllers={"ema": Broken()})
    assert error.value.field == "settings.controllers.ema"
    with pytest.raises(WeirError, match="unknown option 'x'"):
        SyncController(x=1)


def test_what_is_told_of_a_gate_comes_back_from_the_wire():
    asked = asked_of(Draw(6), 2)
    assert EngineSpec.from_wire(asked.spec.wire) == asked.spec
    assert asked.spec.gated_from(5) == 5, "the prompt's KV is everybody's"
