"""`SetActivation`: how its activation gets from where it is read to where it is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ACTIVATE, CONST, ENCODE, HELD, SCORE, Instruction, ResolvedIntervention
from vllm_weir.schema.intervention_kinds import parse_stored
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.schema.resolved_probes import LINEAR, ResolvedGate, ResolvedProbe
from vllm_weir.schema.set_activation import Reconstruction, SetActivation

ALL = Positions.parse("all")
W, U = np.arange(1.0, 4.0, dtype=np.float32), np.full(2, 0.5, np.float32)


def resolved(intervention, width):
    lowered = intervention.lower((width,), lambda *_: pytest.fail("no vector is named"))
    place = intervention.hook, intervention.layers, intervention.positions
    return ResolvedIntervention(*place, 0, lowered.instructions, source=lowered.source)


def elsewhere(**more):
    given = {"bias": 0.25, "threshold": 0.5, "value": 3.0, "read": ("mlp_in", 1)} | more
    return SetActivation(W, U, 1, "mlp_out", **given)


def whole(**more):
    return SetActivation(W, W, 2, "resid_post", value=1.0, sae="key#1", feature=7, **more)


def test_the_wire_form_has_where_it_reads():
    moves = (resolved(elsewhere(), 2), resolved(whole(), 3), resolved(elsewhere(sae="key#2", feature=9), 2))
    whole_row = resolved(Reconstruction("key#3", 2, "resid_post"), 3)
    moves = (*moves, replace(moves[1], joins=True), replace(moves[0], joins=True), whole_row)
    spec = EngineSpec(ResolvedSpec(()), moves)
    assert EngineSpec.from_wire(spec.wire).moves == moves
    assert len({move.digest for move in moves}) == len(moves)
    assert spec.encoders == ("key#1", "key#2", "key#3")
    assert ("mlp_in", (1,)) in spec.places
    assert len(moves[0].vectors) == 2 and len(moves[2].vectors) == 1, "what is encoded needs no column of the encoder"


def test_a_server_stores_it():
    stored = [elsewhere(unit="key#1:3"), whole(read_back=True), elsewhere(sae="key#2", feature=9)]
    stored += [Reconstruction("key#3", 2, "resid_post", error=error) for error in (False, True)]
    for one in stored:
        again = parse_stored(one.to_json(), "x")
        assert again == one and again.to_json() == one.to_json()
        width = len(one.u.array) if isinstance(one, SetActivation) else 3
        assert len({resolved(item, width).digest for item in (one, again)}) == 1
    assert elsewhere().source_site == Site("mlp_in", 1)
    assert elsewhere(value=None, add=1.0).source_site is None


def test_digests_say_what_is_read():
    changes = [{}, {"bias": 0.5}, {"threshold": 0.75}, {"read": ("mlp_in", 0)}]
    changes += [{"sae": sae, "feature": feature} for sae, feature in (("key#2", 9), ("key#2", 8), ("key#3", 8))]
    assert len({resolved(elsewhere(**change), 2).digest for change in changes}) == len(changes)


def test_cells_of_activations_come_after_all_others():
    """What reads elsewhere comes after all interventions, what encodes a row stands before its use."""
    probe = ResolvedProbe("p", "resid_post", 0, ALL, LINEAR, 1, ("w",), (0.0,))
    add = ResolvedIntervention("mlp_in", (1,), ALL, 0, (Instruction(CONST, "u"),))
    gated = resolved(whole(), 3)
    gated = ResolvedIntervention(*("resid_post", (2,), ALL, 0), tuple(x._replace(cell=2) for x in gated.instructions))
    moves = (resolved(elsewhere(), 2), add, gated, resolved(elsewhere(read=("mlp_in", 0)), 2))
    spec = EngineSpec(ResolvedSpec(()), moves, (probe,), (ResolvedGate(0, 0, 0.5),), dose=True)
    layout, steps = spec.layout, spec.steps
    assert (layout.reported, layout.activations, layout.cells) == (6, 7, 10)
    kinds = [[one.kind for one in step.instructions] for step in steps]
    assert kinds == [[HELD], [CONST], [ENCODE, HELD], [HELD], [ACTIVATE], [ACTIVATE], [SCORE]]
    first, _, encoding, last, reads, reads_last, _ = (step.instructions for step in steps)
    assert (first[0].lo, reads[0].cell) == (7.0, 8) and (last[0].lo, reads_last[0].cell) == (9.0, 10)
    assert (encoding[0].cell, encoding[1].lo, encoding[1].cell) == (9, 8.0, 2), "the gate's cell stays"
    assert [step.only_writes for step in steps] == [False] * 4 + [True] * 3
    assert [step.hook for step in steps[4:]] == ["mlp_in", "mlp_in", "resid_post"]
    assert spec.gated_from(5) == 0


def test_what_is_read_once_for_several_blocks_has_one_cell():
    """A feature of a cross-layer transcoder; at other positions, or of another feature, it has its own."""
    one = SetActivation(
        W, {1: U, 2: 2 * U, 3: 3 * U}, "all", "mlp_out", value=3.0, read=("mlp_in", 1), unit="key#1/1:3"
    )
    again = parse_stored(one.to_json(), "x")
    assert again.to_json() == one.to_json() and one.resolve_layers(4) == (1, 2, 3)
    moves = [resolved(part, 2) for part in one.by_layer(4, lambda *_: pytest.fail("no vector is named"))]
    prompt = replace(moves[0], positions=Positions.parse("prompt"))
    spec = EngineSpec(ResolvedSpec(()), (*moves, prompt, resolved(elsewhere(bias=0.5), 2)))
    first = spec.layout.activations
    assert spec.layout.cells == first + 3
    *placed, _, _ = spec.steps[:5]
    assert [step.layers for step in placed] == [(1,), (2,), (3,)]
    assert [step.instructions[0].lo for step in spec.steps[:5]] == [first, first, first, first + 1, first + 2]
    assert [step.instructions[0].cell for step in spec.steps[5:]] == [first + 1, first + 2, first + 3]
    assert len({step.instructions[0].u for step in placed}) == 3
