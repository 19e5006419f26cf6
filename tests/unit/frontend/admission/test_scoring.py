"""Probes, gates and rules at admission: what the engine is told, or why it is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.properties import examples
from tests.unit.frontends import frontend_of
from tests.unit.refusals import pairs
from tests.unit.refusals import refused as expect_refusal
from tests.unit.request_strategies import selectors, served
from vllm_weir import Add, Capture, Probe, WeirError, When
from vllm_weir.compat.rhizonymph.tiers import scaled
from vllm_weir.config.settings import Settings
from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.admitted import NUMBERS_PER_ROW, check_rows
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.frontend.admission.registries import ProbeRegistry, RegisteredProbe
from vllm_weir.schema.engine_spec import EngineSpec, TableNeeds
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.gates import parse_stop_when
from vllm_weir.schema.hooks import Site, parse_site
from vllm_weir.schema.instructions import SCORE
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import RequestSpec, parse_interventions
from vllm_weir.schema.resolved_probes import ResolvedGate, scoring_steps
from vllm_weir.schema.rows import Shard
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys, UnsteeredKV

D, LAYERS, P, G = 8, 4, 6, 5
FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1024)
SIZES = TableSizes(64, 64, 1024)
rng = np.random.default_rng(0)


def probe(name="a", k=1, layer=1, **more):
    return Probe(name, rng.normal(size=(k, D)), rng.normal(size=k), layer=layer, **more)


def add(layer=2, when=None, **more):
    return Add(np.arange(1, D + 1), layer, when=when, **more)


def asked(probes=(), interventions=(), stop_when=None, capture=()):
    if not isinstance(interventions, (list, tuple)):
        interventions = [interventions]
    spec = RequestSpec(
        tuple(capture),
        parse_interventions(interventions, "interventions"),
        probes=tuple(probes),
        stop_when=parse_stop_when(stop_when, "stop_when"),
    )
    return {"weir": spec.to_json()}


def admitted(*args, facts=FACTS, registered=(), always=(), **kwargs):
    registry = ProbeRegistry({one.name: RegisteredProbe(one) for one in registered})
    return admit(asked(*args, **kwargs), facts, probes=registry, always=always)


def gates_of(found):
    return tuple(one.gate for one in found.interventions)


def engine_request(found, sizes=SIZES, prompt_ids=tuple(range(P)), facts=FACTS):
    return make_engine_request(found, "reply", prompt_ids, P, G, facts, 1, sizes)


def refused(*args, **kwargs):
    with pytest.raises(WeirError) as error:
        admitted(*args, **kwargs)
    return error.value


def test_a_gate_becomes_the_cell_of_its_factor():
    when, other = When("a", above=0.1, output=1), When("b", below=-2, latch=True)
    found = admitted(
        [probe("a", 2), probe("b")],
        [add(when=when), add(), add(3, other), add([2, 3], when), Add(np.zeros(D), 3, when=other)],
    )
    assert gates_of(found) == (0, -1, 1, 0, 1)
    assert found.gates == (
        ResolvedGate(0, 1, float(np.float32(0.1))),
        ResolvedGate(1, 0, -2.0, above=False, latch=True),
    )
    # Scores of a (2) and b (1), then the factors, then raw numbers.
    assert found.cells.factors == (3, 4) and found.cells.reported == 5 and found.cells.cells == 8
    assert [[move.instructions[0].cell for move in one.moves] for one in found.interventions] == [
        [4],
        [0],
        [5],
        [4],
        [],
    ]
    assert [move.is_gated for move in found.effective] == [True, False, True, True]
    spec = EngineSpec.from_wire(engine_request(found).spec)
    assert list(spec.moves) == found.effective and spec.probes == found.probes and spec.gates == found.gates
    steps = scoring_steps(spec.probes, spec.layout)
    assert [one.kind for step in steps for one in step.instructions] == [SCORE] * 3
    assert sorted(one.cell - 1 for step in steps for one in step.instructions) == [5, 6, 7]


def test_a_different_cell_is_a_different_program():
    one, other = (admitted([probe("a"), probe("b")], add(when=When(name, above=0))).effective[0] for name in "ab")
    plain = admitted(interventions=add()).effective[0]
    both = admitted([probe("a"), probe("b")], [add(when=When(n, above=0)) for n in "ab"]).effective
    assert one.digest != plain.digest and len({move.digest for move in both}) == 2
    assert one.instructions[0]._replace(cell=0) == other.instructions[0]._replace(cell=0) == plain.instructions[0]


def test_rows_of_positions_that_are_kept_have_the_cell_too():
    rows = np.array([np.zeros(D), np.ones(D)])
    found = admitted([probe()], Add(rows, 2, positions=[3, 4], when=When("a", above=0)))
    (move,) = found.effective
    assert {one.cell for one in move.instructions} == {found.cells.factors[0] + 1} and move.is_gated


def test_a_request_of_probes_alone_goes_to_the_engine():
    found = admitted([probe(positions="2:", k=3)])
    request = engine_request(found)
    assert request.rows_per_token == 0 and request.first_position == 2
    needs = request.table_needs
    assert (needs.programs, needs.instructions, needs.probes, needs.gates, needs.states) == (1, 3, 1, 0, 4)
    assert needs.vectors == sorted(found.probes[0].vectors) and set(needs.vectors) == set(found.rows)
    assert engine_request(admitted()) is None


@pytest.mark.parametrize(
    ("positions", "capture", "first"),
    [("all", "last_prompt", 0), ("last_prompt", "all", 0), ("sampled", "generated", P - 1), ("generated", [3], 3),
     ({"token_ids": [4]}, "sampled", 4), ("prompt", None, 0), ([2, 4], None, 2)],
)  # fmt: skip
def test_cache_hits_do_not_pass_the_first_scored_position(positions, capture, first):
    captures = [Capture("resid_post", 0, capture)] if capture is not None else []
    found = admitted([probe(positions=positions)], capture=captures)
    assert engine_request(found).first_position == first


@examples(60)
@given(chosen=st.lists(st.tuples(selectors(), st.booleans()), min_size=1, max_size=5))
def test_needs_bound_the_programs_that_there_are(chosen):
    probes = [probe(f"p{k}", positions=one) for k, (one, scored) in enumerate(chosen) if scored]
    moves = [add(k % 2 + 2, positions=one) for k, (one, scored) in enumerate(chosen) if not scored]
    found = admitted(probes, moves)
    if len({one.positions for one in found.steps if one.positions.needs_token_ids}) > 4:
        return
    needs = engine_request(found, TableSizes(64, 4096, 1 << 16)).table_needs
    at = np.arange(P + G)
    masks = [step.positions.mask(at, P, np.where(at < P, at, 7)) for step in found.steps]
    codes = {code for code in zip(*masks, strict=True) if any(code)}
    lengths = sum(len(s.instructions) for code in codes for s, on in zip(found.steps, code, strict=True) if on)
    assert needs.programs >= len(codes) and needs.instructions >= lengths


ORDER = {  # whether it fits -> where the probe reads and the gate acts, delay, positions
    True: [
        "resid_post.1 resid_post.2 0 all", "resid_pre.1 attn_out.1 0 all", "attn_out.1 resid_mid.1 0 all",
        "embed resid_pre.0 0 all", "resid_post.3 final_norm 0 all", "final_norm embed 1 generated",
        "resid_post.3 resid_post.0 1 generated", "resid_post.0 resid_post.3 1 all",
        "resid_post.1 resid_pre.2 0 all", "resid_post.1 resid_pre.2 1 all",  # one tap, at a later stage
    ],
    False: [
        "resid_post.1 resid_post.1 0 all", "resid_pre.2 resid_pre.2 0 all",  # the same stage of a tap
        "resid_pre.2 resid_post.1 0 all",  # an earlier one
        "resid_pre.1 resid_post.0 0 all", "mlp_out.1 attn_out.1 0 all", "final_norm final_norm 0 all",
        "final_norm resid_post.3 0 all", "resid_post.3 resid_post.0 1 all", "resid_post.3 resid_post.0 1 sampled",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("fits", "case"), pairs(ORDER))
def test_a_probe_reads_before_its_gate_acts(fits, case):
    read, act, delay, positions = case.split()
    probed, acting = parse_site(read), parse_site(act)
    when = When("a", above=0, delay=int(delay))
    arguments = (
        [Probe("a", np.ones(D), hook=probed.hook, layer=probed.layer)],
        Add(np.ones(D), acting.layer, hook=acting.hook, positions=positions, when=when),
    )
    if fits:
        assert gates_of(admitted(*arguments)) == (0,)
    else:
        error = refused(*arguments)
        assert error.field == f"interventions[0].when.{'delay' if when.delay else 'probe'}"
        assert str(probed) in error.message and str(acting) in error.message


def test_every_layer_of_an_intervention_has_to_come_later():
    error = refused([probe(layer=1)], add([0, 2, 3], When("a", above=0)))
    assert "resid_post[0]" in error.message and "delay=1" in error.message


WRONG = {
    "probes[0]": [(["b"],)],
    "probes[0].layer": [([probe(layer=4)],)],
    "probes[0].weight": [([Probe("a", np.ones(D + 1), layer=0)],), ([Probe("a", "gone", layer=0)],)],
    "probes[0].hook": [([Probe("a", np.ones(D), hook="z", layer=0)],)],
    "interventions[0].when.probe": [([probe()], add(when=When("b", above=0)))],
    "interventions[0].when.output": [
        ([probe(k=2)], add(when=When("a", above=0, **output))) for output in ({}, {"output": 2})
    ],
    "stop_when[0]": [
        ([probe()], (), "b > 1"),
        ([probe()], (), "a[1] > 1"),
        ([probe(positions="last_prompt")], (), "a > 1"),
    ],
    "stop_when[1]": [([probe(k=2)], (), ["a[0] > 1", "a > 1"])],
}


@pytest.mark.parametrize(("field", "wrong"), pairs(WRONG))
def test_refusals_name_the_field(field, wrong):
    assert refused(*wrong).field == field


def test_rules_are_resolved():
    found = admitted([probe("a", 2), probe("b")], stop_when=["b >= 0.9", "a[1] < -1"])
    assert found.stops == (("b", 1, 0, ">=", float(np.float32(0.9))), ("a", 0, 1, "<", -1.0))


def test_registered_probes_are_added_where_they_are_named():
    registered = [probe("a"), probe("b", 2), probe("c")]
    found = admitted(["c"], add(when=When("a", above=0)), stop_when="b[1] > 0", registered=registered)
    assert [one.name for one in found.probes] == ["c", "a", "b"]
    assert found.gates[0].probe == 1 and found.stops[0].probe == 2
    own = probe("a")
    found = admitted([own], add(when=When("a", above=0)), registered=registered)
    assert len(found.probes) == 1 and found.rows[found.probes[0].rows[0]] == pytest.approx(own.weight.array[0])
    error = refused([own], add(when=When("z", above=0)), registered=registered)
    assert "the request lists a" in error.message and "registered are a, b, c" in error.message


def test_interventions_of_every_request_mean_registered_probes():
    always = (add(when=When("a", above=0)),)
    registered = [probe("a")]
    found = admitted([probe("own")], add(3, When("own", below=0)), always=always, registered=registered)
    assert [one.name for one in found.probes] == ["own", "a"] and gates_of(found) == (0, 1)
    assert [gate.probe for gate in found.gates] == [1, 0]
    error = refused([probe("a")], always=always, registered=registered)  # another probe of that name
    assert error.field == "probes[0].name"
    assert gates_of(admitted(["a"], always=always, registered=registered)) == (0,)
    error = refused(always=always)
    assert "no probe is registered under 'a'" in error.message


def test_token_ids_and_selectors_have_limits():
    with expect_refusal("probes[0].positions"):
        admit(asked([probe(positions={"token_ids": [3]})]), FACTS, has_token_ids=False)
    many = [probe(f"p{k}", positions=[k]) for k in range(40)]
    others = [Capture("resid_post", 0, [100 + k]) for k in range(30)]
    assert refused(many, capture=others).field == "probes"
    assert len(admitted(many, capture=others[:23]).engine_spec.selectors) == 63


def test_what_the_device_cannot_hold_is_refused_with_its_setting():
    wide = weir.MLPProbe("m", np.ones((70, D)), 0, np.ones(70), layer=0)
    for probes, room, why in (
        ([wide], {"vectors": 200}, r"needs 71 numbers for each token.*raise probe_cells"),
        ([probe(smooth=("mean", 60_000))], {"states": 100}, r"needs 60002 numbers from step.*raise max_probes"),
        ([probe("a"), probe("b")], {"probes": 1}, "raise max_probes"),
    ):
        with pytest.raises(WeirError, match=why):
            engine_request(admitted(probes), dataclasses.replace(SIZES, **room))
    sizes = Settings(probe_cells=7, max_probes=3).table_sizes(D)
    assert (sizes.cells, sizes.probes, sizes.gates, sizes.states) == (7, 3, 3, 192)


def test_wide_and_narrow_vectors_are_counted_in_rows():
    mlp = weir.MLPProbe("m", np.ones((20, D)), 0, np.ones((2, 20)), layer=0)
    needs = engine_request(admitted([mlp])).table_needs
    assert set(needs.wide.values()) == {3} and len(needs.vectors) == 2  # equal rows are one vector


def test_rows_in_parts_and_stages():
    sites = served(LAYERS) | {Site("z", 1): ""}
    shape = {Site("z", 1): (2, D // 2)}
    whole = EngineCapabilities(sites, LAYERS, D, "float32", 1024, shapes=shape)
    head = Probe("a", np.ones(4), hook="z", layer=1, head=1)
    assert (admitted([head], facts=whole).probes[0].start, admitted([head], facts=whole).probes[0].stop) == (4, 8)
    parts = dataclasses.replace(whole, shards={Site("z", 1): (Shard(0, 4), Shard(4, 8))})
    error = refused([head], facts=parts)
    assert error.field == "probes[0].hook" and "tensor_parallel_size=1" in error.message
    stages = {site: frozenset({0} if site.layer < 2 and site.hook != "final_norm" else {1}) for site in served(LAYERS)}
    split = dataclasses.replace(FACTS, workers=stages)
    assert admitted([probe("a", layer=0)], add(1, When("a", above=0)), facts=split).gates
    assert "pipeline_parallel_size=1" in refused([probe(layer=0)], add(2, When("a", above=0)), facts=split).message
    assert refused([probe("a", layer=0), probe("b", layer=3)], facts=split).field == "probes"
    assert admitted([probe(layer=3)], add(0), facts=split).probes  # what is not gated may be anywhere


def test_a_server_returns_no_more_scores_than_fit():
    found = admitted([probe(k=3), probe("b", positions="generated")])
    scores = 3 * (P + G - 1) + G - 1
    check_rows(found, P, G, D, scores // NUMBERS_PER_ROW + 1)
    with expect_refusal("probes", f"up to {scores} numbers"):
        check_rows(found, P, G, D, scores // NUMBERS_PER_ROW)


# --- keys of the prefix cache ---------------------------------------------------------------------


def keys_of(found, size=4, end=P + G):
    spec = found.engine_spec
    keys = CacheKeys(spec.moves, P, spec.gated_from(P))
    return [keys.of_block(start, list(range(start, start + size))) for start in range(0, end - size + 1, size)]


def test_scoring_alone_adds_nothing_to_cache_keys():
    assert keys_of(admitted([probe()])) == [None, None]
    found = admitted([probe()], add(positions="2:"))
    assert keys_of(found) == keys_of(admitted(interventions=add(positions="2:"))) != [None, None]
    steps = CacheKeys(found.steps, P)
    assert steps.of_block(0, [1, 2, 3, 4]) == keys_of(found)[0]


@given(acts=selectors(), scored=selectors(), delay=st.sampled_from([0, 1]), size=st.sampled_from([1, 2, 4]))
def test_blocks_that_a_gate_may_change_are_shared_with_nobody(acts, scored, delay, size):
    """And those before its first score with plain requests."""

    def make(*more):
        return admitted([probe(positions=scored)], [add(positions=acts, when=When("a", above=0, delay=delay)), *more])

    one, other = keys_of(make(), size), keys_of(make(), size)
    positions = np.arange(P + G)
    scores = Positions.parse(scored).mask(positions, P, positions)
    first_score = scores.argmax() if scores.any() else P + G
    may_act = Positions.parse(acts).mask(positions, P, positions) & (positions >= first_score + delay)
    for k, (a, b) in enumerate(zip(one, other, strict=True)):
        if may_act[k * size : (k + 1) * size].any():
            assert a != b and a is not None
        if a is not None:
            assert a != b
    plain = keys_of(admitted(interventions=add(positions="prompt")), size)
    both = keys_of(make(add(positions="prompt")), size)
    for a, b, c in zip(one, plain, both, strict=True):
        assert (c == b) if a is None else (c != b)


def test_prompts_before_the_first_score_are_shared_with_plain_requests():
    generated = When("a", above=0)
    assert keys_of(admitted([probe(positions="generated")], add(when=generated)))[0] is None
    assert keys_of(admitted([probe(positions=[5])], add(when=generated)), 1)[:6][4] is None
    assert keys_of(admitted([probe(positions=[3])], add(when=When("a", above=0, delay=1))), 1)[3] is None
    assert keys_of(admitted([probe(positions=[3])], add(when=generated)), 1)[3] is not None


def test_kv_of_failed_gated_requests_is_reached_by_nobody():
    gated, third, reads = add(when=When("a", above=0)), add(positions=[2]), [probe(positions=[3])]
    found, mixed, plain = admitted(reads, [gated]), admitted(reads, [gated, third]), admitted((), [third])

    def keys(one):
        spec = one.engine_spec
        return SteeredKeys(spec.moves, P, tuple(range(P)), "", spec.gated_from(P))

    failed = UnsteeredKV()
    failed.add(keys(found), 0)
    assert not failed.may_reach(keys(found), P) and not failed.may_reach(keys(plain), P)
    failed.add(keys(mixed), 0)
    assert [failed.may_reach(keys(one), end) for one, end in ((plain, 3), (mixed, 3), (plain, 2))] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("name", ["probes", "gates", "states"])
def test_requests_wait_for_probes_gates_and_states(name):
    queue = WaitingQueue(dataclasses.replace(SIZES, **{name: 3}))
    needs = TableNeeds([], 1, 1, **{name: 2})
    assert queue.enter("a", "A", needs) and not queue.enter("b", "B", needs)
    assert queue.release({"a": 1}) == [] and queue.release({}) == ["B"]
    assert not queue.enter("c", "C", needs) and queue.release({"b": 1}) == []


# --- the registry ---------------------------------------------------------------------------------


@pytest.fixture
def frontend():
    frontend = frontend_of(FACTS)
    yield frontend
    frontend.close()


def scores(frontend, extra_args):
    return frontend._admitted(extra_args, True)


def test_a_probe_of_every_request_is_not_about_images(frontend):
    at_images = Probe("seen", np.ones(D), layer=1, positions={"modality": "image"})
    with expect_refusal("probe.positions", "not every prompt has image; "):
        frontend.names.register_probe(at_images, everyone=True)
    frontend.names.register_probe(at_images)


def test_a_name_means_what_is_registered_when_a_request_comes(frontend):
    frontend.names.put_vector("v", np.ones((2, D)))
    frontend.names.register_probe(Probe("a", "v", layer=1))
    frontend.names.put_vector("v", np.zeros((2, D)))
    request = asked(["a"])
    before = scores(frontend, request)
    assert scores(frontend, request) is before and before.probes[0].outputs == 2
    assert before.rows[before.probes[0].rows[0]] == pytest.approx(np.ones(D))
    frontend.names.register_probe(probe("a", layer=2))
    assert scores(frontend, request).probes[0].site == ("resid_post", 2)
    assert frontend.names.probes.infos() == {"a": {"kind": "linear", "outputs": 1, "hook": "resid_post", "layer": 2}}
    frontend.names.unregister_probe("a")
    with pytest.raises(WeirError, match="no probe is registered"):
        scores(frontend, request)
    with pytest.raises(WeirError, match="no probe is registered"):
        frontend.names.unregister_probe("a")


def test_probes_that_the_engine_cannot_serve_are_not_registered(frontend):
    for wrong in (probe(layer=9), Probe("a", np.ones(D + 1), layer=1), Probe("a", "gone", layer=1)):
        with pytest.raises(WeirError):
            frontend.names.register_probe(wrong)
    assert not frontend.names.probes.infos()


def test_gated_interventions_of_every_request(frontend):
    gated = parse_interventions(add(2, When("a", above=0)), "interventions")
    with pytest.raises(WeirError, match="no probe is registered"):
        frontend.names.set_always(gated)
    frontend.names.register_probe(probe("a", layer=1))
    frontend.names.set_always(gated)
    assert frontend.universal
    plain = scores(frontend, {})
    assert gates_of(plain) == (0,) and plain.probes[0].layer == 1 and scores(frontend, {}) is plain
    with pytest.raises(WeirError, match="gated by 'a'"):
        frontend.names.unregister_probe("a")
    with pytest.raises(WeirError, match="has to come before"):
        frontend.names.register_probe(probe("a", layer=3))
    frontend.names.register_probe(probe("a", layer=0))
    assert scores(frontend, {}).probes[0].layer == 0
    frontend.names.set_always(())
    frontend.names.unregister_probe("a")
    assert not frontend.universal and gates_of(scores(frontend, {})) == ()


def test_a_probe_of_every_request(frontend):
    frontend.names.register_probe(probe("w"), everyone=True)
    assert frontend.universal and [one.name for one in scores(frontend, {}).probes] == ["w"]
    found = scores(frontend, asked([probe("a")]))
    assert [one.name for one in found.probes] == ["a", "w"] and found.asked == ()
    assert [one.name for one in scores(frontend, asked(["w"])).probes] == ["w"]
    with expect_refusal("probes[0].name"):
        scores(frontend, asked([probe("w")]))
    assert frontend.names.probes.infos()["w"]["everyone"]


def test_scores_that_a_request_of_a_server_did_not_ask_for_are_not_told(frontend):
    """They are counted in metrics instead; offline they come back."""
    frontend.names.register_probe(probe("w"), everyone=True)
    assert scores(frontend, asked([probe("b")])).told == 2
    frontend.serve(1 << 20)
    for extra, told, index in (({}, 0, 0), (asked([probe("a")]), 1, 1), (asked(["w"]), 1, 0)):
        found = scores(frontend, extra)
        assert found.told == told and [(k, one.probe.name) for k, one in found.counted] == [(index, "w")]


def test_selectors_of_probes_that_select_nothing_are_refused(frontend):
    with expect_refusal("probes[0].positions", "selects no row"):
        frontend.admit("r", asked([probe(positions="generated")]), [1, 2, 3], 3, 1)


def test_modules_keep_their_gates_when_they_are_scaled():
    (one,) = scaled([add(when=When("a", above=0))], 2.0, "scale")
    assert one.when == When("a", above=0) and one.scale == 2.0


@pytest.mark.parametrize("side", ["above", "below"])
def test_a_cosine_gate_has_a_weight_of_norm_1_and_no_bias(side):
    own = probe("a", activation="sigmoid")
    found = admitted([own], add(when=When("a", metric="cosine", **{side: 0.25})))
    of_scores, of_cosines = found.probes
    weight = own.weight.array[0].astype(np.float64)
    assert np.allclose(found.rows[of_cosines.rows[0]], weight / np.linalg.norm(weight), atol=1e-6)
    assert of_cosines.cosine and of_cosines.offsets == (0.0,) and not of_scores.cosine
    (gate,) = found.gates
    assert (gate.probe, gate.threshold, gate.above) == (1, 0.25, side == "above")
