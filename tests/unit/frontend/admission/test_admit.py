"""Admission: whatever comes is refused with the name of the field, or resolved exactly as asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.refusals import pairs, refused
from tests.unit.request_strategies import any_extra_args, sensible_captures, served
from vllm_weir import Add, Capture, Clamp, Hook, Lens, LowRank, Probe, Replace, Site, WeirError
from vllm_weir.compat.vllm_lens.request import in_lens_words, to_weir
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.cache import MAX_KEY_BYTES, admission_key
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.frontend.admission.reachable import Media, Vocabulary
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import EngineTraits, TableSizes
from vllm_weir.schema.hooks import HOOKS, STREAM_HOOKS, place_of
from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.request import Postprocess, RequestSpec

LAYERS = 4
FACTS = EngineCapabilities(served(LAYERS), LAYERS, 128, "float32", 1024)
SIZES = TableSizes(64, 64, 1024)
FUZZ = examples(800, *HealthCheck, database=None)


def attempt(extra_args, capabilities=FACTS):
    """What the engine would receive, or the refusal."""
    try:
        with in_lens_words():
            admitted = admit(to_weir(extra_args), capabilities)
        return admitted, make_engine_request(admitted, "reply", [1, 2, 3, 4, 5, 6], 6, 8, capabilities, 1, SIZES)
    except WeirError as e:
        assert e.field, e
        assert e.message
        return None, e


def test_a_hook_of_vllm_lens_saves_on_one_pipeline_stage():
    """What it saves lies in one place; the blocks of other stages are for a hook of their own."""
    stages = {Site("resid_post", layer): frozenset({layer // 2}) for layer in range(LAYERS)}
    split = replace(FACTS, workers=stages)
    fn = lambda ctx, rows: None
    apart, together = ([Hook(fn=fn, layer_indices=blocks)] for blocks in ([0, 1, 2], [2, 3]))
    assert attempt({"apply_hooks": apart})[0] and attempt({"apply_hooks": together}, split)[0]
    _, refusal = attempt({"apply_hooks": apart}, split)
    assert refusal.field == "apply_hooks[0].layer_indices" and "pipeline stages" in str(refusal)


@FUZZ
@given(extra_args=any_extra_args(LAYERS))
def test_fuzzed_wishes_are_refused_by_field_or_resolved(extra_args):
    admitted, wire = attempt(extra_args)
    if admitted is None:
        return
    for site_request in admitted.spec.site_requests:
        assert site_request.site.hook in HOOKS and 0 <= site_request.site.layer < LAYERS
        given = [part.dtypes[site_request.site] for part in admitted.parts if site_request.site in part.dtypes]
        assert given and set(given) <= {"float32", "float16", "bfloat16"}
    if wire is None:
        assert not admitted.spec.site_requests and not admitted.effective
        return
    again = EngineSpec.from_wire(wire.spec)
    assert (
        set(again.captures.site_requests) == set(admitted.spec.site_requests)
        and list(again.moves) == admitted.effective
    )
    assert again.captures.postprocess == admitted.spec.postprocess and EngineSpec.from_wire(wire.spec) is again
    assert wire.first_position is None or wire.first_position >= 0
    assert wire.rows_per_token == len({(w.site, w.before) for w in admitted.spec.site_requests})


@given(captures=sensible_captures(LAYERS))
def test_sensible_wishes_are_never_refused(captures):
    spec = RequestSpec(tuple(Capture(h, layers, p) for h, layers, p in captures))
    admitted, _ = attempt({"weir": spec.to_json()})
    assert admitted is not None
    wanted = {Site(h, i) for h, layers, _ in captures for i in (range(LAYERS) if layers == "all" else layers)}
    assert set(admitted.spec.sites) == wanted
    assert list(admitted.spec.sites) == sorted(wanted, key=place_of)


def request(**fields):
    return {"weir": {"v": 1} | fields}


def weir(**capture):
    return request(capture=[capture])


EXTRA_ARGS = {
    "weir": [{"weir": value} for value in ("{", "[" * 100_000, [], False)],
    "weir.v": [{"weir": value} for value in ({"capture": []}, {"v": 2}, {"v": True}, {"v": 10**5000})],
    "weir.captures": [request(captures=[])],
    "capture": [request(capture=value) for value in ("all", [{}] * 63)],
    "capture[1]": [request(capture=[{}, 7])],
    "interventions[0].vector": [request(interventions=[{"op": "add"}])],
    "interventions[0].op": [request(interventions=[{"b64": "%%", "dtype": "float32", "shape": [2]}])],
    "capture[1].compress": [request(capture=[{"compress": "rp8"}, {"layers": 1}])],
    "capture[1].dtype": [request(capture=[{"dtype": "float16"}, {"layers": 1}])],
    "capture[1].before": [request(capture=[{"before": True}, {"layers": 1}])],
    "apply_hooks": [{"apply_hooks": "code"}],
    "apply_hooks[0]": [{"apply_hooks": ["code"]}],
    "output_qk": [{"output_qk": "["}],
    "output_qk.layers[0]": [{"output_qk": 3.5}],
    "output_qk.layers": [{"output_qk": value} for value in ([4], [0], True)],  # this model has no attention
    "activations_transport": [{"activations_transport": "zip"}],
    "output_residual_stream.layers": [{"output_residual_stream": [4]}],
    "output_residual_stream": [{"output_residual_stream": value} for value in ("[", "[" * 100_000)],
    "apply_steering_vectors[0].layer_indices": [
        {"apply_steering_vectors": value}
        for value in (
            [{"activations": [float("nan")]}],
            *({"activations": [[1.0] * 128], "layer_indices": layers} for layers in ([9], [-1])),
        )
    ],
    "apply_steering_vectors[0].activations": [
        {"apply_steering_vectors": {"activations": [[1.0]], "layer_indices": [1]}}
    ],
}
CAPTURE = {
    "hook": [{"hook": hook} for hook in ("nonsense", 7, "blocks." + "9" * 5000 + ".hook_resid_post")],
    "layers": [
        *({"layers": layers} for layers in ([0, 4], -1, list(range(70_000)), {"token_ids": [1]})),
        *({"hook": "embed", "layers": 1}, {"hook": "final_norm", "layers": [0, 2]}),
        *({"hook": "blocks.9.hook_resid_post"}, {"hook": "blocks.1.hook_resid_post", "layers": [2]}),
    ],
    "layers[0]": [{"layers": layers} for layers in (1.0, float("nan"), [float("inf")], [True], [10**30], [10**5000])],
    "positions": [{"positions": at} for at in ("1:2:0", "everything", [0] * 70_000, True, {"tokens": [1]})],
    "positions[0]": [{"positions": [[0]]}],
    "positions.token_ids": [{"positions": {"token_ids": ids}} for ids in ([-1], "7")],
    "before": [{"before": 1}],
    "dtype": [{"dtype": "int8"}],
    "compress.method": [{"compress": "zstd"}],
    "sink": [{"sink": "/etc/passwd"}],
    "layer": [{"layer": 1}],
}


@pytest.mark.parametrize(
    ("field", "extra_args"),
    [*pairs(EXTRA_ARGS), *((f"capture[0].{field}", weir(**fields)) for field, fields in pairs(CAPTURE))],
)
def test_refusals_name_the_field(field, extra_args):
    assert carries_keys(extra_args)
    admitted, refusal = attempt(extra_args)
    assert admitted is None
    assert refusal.field == field
    assert str(refusal).startswith(f"{field}: ")


def test_a_key_that_comes_twice_in_text_is_refused():
    for capture in ('[{}], "capture": []', '[{"layers": [0], "layers": [1]}]'):
        with pytest.raises(WeirError, match="comes twice"):
            admit({"weir": f'{{"v": 1, "capture": {capture}}}'}, FACTS)


def test_an_untapped_site_is_refused():
    gone = {Site("resid_post", 1), *(Site("attn_out", layer) for layer in range(LAYERS))}
    facts = replace(FACTS, sites=served(LAYERS, gone))
    for hook, layer in (("resid_post", 0), ("resid_pre", 1), ("mlp_out", 1), ("embed", "all"), ("final_norm", 0)):
        assert attempt(weir(hook=hook, layers=layer), facts)[0] is not None
    for hook, layers, field in (("resid_post", [0, 1], "layers"), ("attn_out", 0, "hook"), ("embed", 1, "layers")):
        with refused(f"capture[0].{field}", "it is not there|has one embed"):
            admit(weir(hook=hook, layers=layers), facts)


ROW = np.linspace(-1, 1, 128, dtype=np.float32)


@pytest.mark.parametrize(
    ("intervention", "field"),
    [
        (Add(ROW, 1, scale=7e4), "scale"),
        (Add(np.stack([ROW, 1e5 * ROW]), 1, positions=[0, 1]), "scale"),
        (Clamp(ROW, 1, value=9e5), "value"),
        (Clamp(ROW, 1, max=1.0, strength=3e38), "value"),
        (Replace(1e5 * ROW, 1), "values"),
        (LowRank(ROW[None], 0 * ROW[None], [1e5], 1), "b"),
    ],
)
def test_what_no_row_can_hold_is_refused(intervention, field):
    asked = request(interventions=[intervention.to_json()])
    assert attempt(asked, replace(FACTS, dtype="bfloat16"))[0] is not None
    with refused(f"interventions[0].{field}", r"float16 holds 6.55e\+04"):
        admit(asked, replace(FACTS, dtype="float16"))


def test_what_is_made_of_rows_may_differ_by_where_they_go():
    plain, packed = {"layers": [1]}, {"layers": [1, 2], "compress": "rp8", "sink": "kept"}
    mean = Capture(layers=2, positions="prompt", reduce="mean", sink="norms")
    for own, everyone, device, late in (
        ([packed], (), True, [False, False]),
        ([plain, packed], (), False, [False, True]),
        ([packed], (mean,), False, [False, True, True]),
        ([plain | {"reduce": "mean"}], (mean,), False, [True, True]),  # over other positions
        ([plain | {"reduce": "mean", "positions": "prompt"}], (mean,), True, [False, False]),
        ([plain], (Capture(layers=2, sink="kept"),), False, [False, False]),
    ):
        admitted = admit({"weir": {"v": 1, "capture": own}}, FACTS, everyone=everyone, sinks=("kept", "norms"))
        assert (admitted.spec.postprocess is not None) == device
        assert [part.late for part in admitted.parts] == late
        assert all(
            part.spec.postprocess == admitted.spec.postprocess for part in admitted.parts if device and part.dtypes
        )


STAYS = {"workers": {"rows": "k1"}}


@pytest.mark.parametrize("reduce", [None, "mean"])
def test_rows_that_stay_on_the_workers_come_back_nowhere(reduce):
    own = {"layers": [1, 2], "positions": "prompt", "reduce": reduce, "sink": STAYS}
    admitted = admit(request(capture=[own], interventions=[dict(op="add", vector=[1.0] * 128)]), FACTS)
    assert admitted.spec.postprocess == Postprocess(reduce, kept="k1")
    assert [part.has_rows for part in admitted.parts] == [False]
    assert EngineSpec.from_wire(admitted.wire).captures.postprocess == admitted.spec.postprocess


@pytest.mark.parametrize(
    ("captures", "more", "message"),
    [
        ([{"layers": [1]}, {"sink": STAYS}], {}, "something else of the request"),
        ([{"sink": STAYS}], {"everyone": (Capture(sink="norms"),)}, "something else of the request"),
        ([{"sink": STAYS, "compress": "rp8"}], {}, "they stay whole"),
        ([{"sink": STAYS, "project": [1.0] * 128}], {}, "they stay whole"),
        ([{"sink": STAYS, "before": True}], {}, "as they are after interventions"),
    ],
)
def test_rows_that_cannot_stay_on_the_workers(captures, more, message):
    with refused(f"capture[{len(captures) - 1}].sink", message):
        admit({"weir": {"v": 1, "capture": captures}}, FACTS, sinks=("norms",), **more)


@pytest.mark.parametrize("options", [{}, {"rows": 3}, {"rows": "k/1"}, {"rows": "k", "more": 1}])
def test_the_collection_that_keeps_rows_has_a_name(options):
    with pytest.raises(WeirError) as e:
        admit(weir(sink={"workers": options}), FACTS)
    assert e.value.field.startswith("capture[0].sink.workers")


@pytest.mark.parametrize(("length", "step", "fits"), [(10_000, 1, True), (128, 128, True), (999, 129, False)])
def test_a_step_must_fit_the_ring(length, step, fits):
    admitted = admit({"weir": {"v": 1, "capture": [{}, {"hook": "resid_pre"}]}}, FACTS)
    if fits:
        assert make_engine_request(admitted, "", None, length, 8, FACTS, step, SIZES).rows_per_token == 8
    else:
        with pytest.raises(WeirError, match="buffer_bytes"):
            make_engine_request(admitted, "", None, length, 8, FACTS, step, SIZES)


def test_facts_from_reports():
    shape = {"num_layers": 2, "d_model": 8, "dtype": "float32", "ring_rows": 10}
    good = {"ok": True, "sites": [("resid_pre", 0, ""), ("resid_post", 0, "")]} | shape
    later = [("resid_post", 1, ""), ("resid_post", 0, "not on this rank")]
    merged = EngineCapabilities.merge([good, good | {"sites": later, "ring_rows": 0}, good | {"ring_rows": 7}])
    verdicts = {Site("resid_pre", 0): "", Site("resid_post", 0): "not on this rank", Site("resid_post", 1): ""}
    workers = dict(zip(verdicts, map(frozenset, ({0, 2}, {0, 1, 2}, {1})), strict=True))
    assert merged == EngineCapabilities(verdicts, 2, 8, "float32", 7, workers=workers)
    for reports, why in (([good, {"ok": False, "reason": "because"}], "because"), ([], "worker")):
        with pytest.raises(WeirError, match=why):
            EngineCapabilities.merge(reports)


@examples(50)
@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k != "weir"), st.integers(), max_size=3))
def test_other_keys_are_not_ours(extra_args):
    assert not carries_keys(extra_args)
    assert not carries_keys(None) and not carries_keys({"weir": None})


def test_embed_of_a_prompt_that_holds_embeddings():
    """Refused, with the stream that was given as the way out; everything else of the request is served.

    With images, too, unless the engine reads it where their embeddings have joined those of the tokens.
    """
    every = [{"hook": hook} for hook in (*STREAM_HOOKS, "final_norm")]
    asked = {"v": 1, "capture": every}
    assert admit({"weir": asked}, FACTS, has_token_ids=False, has_embeddings=True).spec.site_requests
    add = Add(np.ones(128), 0, hook="embed")
    for wrong, field in (
        (asked | {"capture": [*every, {"hook": "hook_embed"}]}, "capture[6].hook"),
        (RequestSpec((), (add,)).to_json(), "interventions[0].hook"),
    ):
        assert admit({"weir": wrong}, FACTS)
        for what, said in (("has_embeddings", "embeddings"), ("has_media", "images or the like")):
            with refused(field, rf"given as {said}, which.*resid_pre at layer 0"):
                admit({"weir": wrong}, FACTS, **{what: True})
        merged = replace(FACTS, embeds_media=True)
        assert admit({"weir": wrong}, merged, has_media=True)
        with pytest.raises(WeirError, match="given as embeddings"):
            admit({"weir": wrong}, merged, has_embeddings=True, has_media=True)


def test_what_is_remembered_of_an_admission():
    """Equal wishes share it; what JSON tells apart, and what Python would take for equal, does not."""

    def key(extra, ids=True, names=0, embeddings=False):
        found = admission_key(extra, ids, names, embeddings)
        return found and found.key

    ask = lambda **more: weir(hook="resid_post", layers=[1], **more)
    assert key(ask()) == key(ask()) is not None
    values = (True, 1, 1.0, "1", None, [], {}, ["a", "b"], {"a": "b"})
    keys = [key(ask()), key(weir(hook="resid_post", layers="all")), *(key(ask(before=value)) for value in values)]
    keys += [key(ask(), ids, embeddings=given) for ids, given in ((False, True), (True, True))]
    keys += [key({}, ids, embeddings=given) for ids, given in ((True, False), (False, True), (True, True))]
    assert len(set(keys)) == len(keys) and None not in keys
    for named in (ask(project={"ref": "name"}), ask(project="name")):  # what a name means can change
        assert key(named) == key(named) != key(named, names=1)
    endless = []
    endless.append(endless)
    forgotten = [ask(before=value) for value in (object(), "x" * MAX_KEY_BYTES, endless)]
    steered = to_weir(ask() | {"apply_steering_vectors": []})
    assert not any(map(key, [*forgotten, steered, {"weir": "x"}]))


def test_refusals_say_what_to_write():
    for extra_args, words in (
        ({"weir": {"capture": [{}]}}, 'missing; this Weir speaks version 1: "v": 1'),
        (weir(sink="nowhere"), "offline, {consumer: options} makes one"),
    ):
        assert words in attempt(extra_args)[1].message


def test_directions_of_captures_take_no_room_among_steering_vectors():
    directions = [[float(k == i) for i in range(128)] for k in range(9)]
    spec = RequestSpec((Capture("resid_post", 1, project=directions),), (Add(directions[0], 1), Add([2.0] * 128, 2)))
    admitted = admit({"weir": spec.to_json()}, FACTS)
    wire = make_engine_request(admitted, "reply", [1, 2, 3], 3, 8, FACTS, 1, TableSizes(2, 64, 1024))
    assert wire.table_needs.vectors == sorted({d for move in admitted.effective for d in move.vectors})
    assert len(wire.table_needs.vectors) == 2 and len(admitted.rows) == 10


def test_steering_beside_a_connector_that_is_not_known():
    """What changes nothing, and what only reads, is served."""
    facts = replace(FACTS, traits=EngineTraits(kv_connector="OwnConnector"))
    steered, nothing = (request(interventions=[Add(ROW, 1, scale).to_json()]) for scale in (1.0, 0.0))
    with refused("interventions[0]", "KV connector, OwnConnector"):
        admit(steered, facts)
    for asked, known in ((steered, FACTS), (weir(hook="resid_post"), facts), (nothing, facts)):
        assert attempt(asked, known)[0] is not None


def test_a_selector_by_modality_becomes_the_prompts_positions():
    """In captures, interventions and probes; of what many requests share, where there are some."""
    image, at = {"modality": "image"}, [2, 3, 4, 7, 8]
    some, none = (Vocabulary(media=media) for media in (Media.of([("image", [(2, 5), (7, 9)])]), Media()))
    add = Add(np.ones(128), 1, positions=image)
    probe = Probe("p", np.ones(128), layer=1, positions=image)
    asked = {"weir": RequestSpec((Capture("resid_post", 1, image),), (add,)).to_json() | {"probes": [probe.to_json()]}}
    admitted = admit(asked, FACTS, vocabulary=some)
    items = (*admitted.spec.site_requests, *admitted.effective, *admitted.probes)
    assert [one.positions.to_json() for one in items] == [at] * 3
    (shared,) = admit({}, FACTS, always=[add], vocabulary=some).effective
    assert shared.positions.to_json() == at
    assert not admit({}, FACTS, always=[add], everyone=[Capture("resid_post", 1, image)], vocabulary=none).effective
    with refused("interventions[0].positions.modality", "the prompt has no image"):
        admit(asked, FACTS, vocabulary=none)


def carried(**asked):
    return {"weir": RequestSpec().asking(**asked).to_json()}


MET = {
    "capture": [
        Capture("resid_post", 1),
        Capture("resid_post", 1, positions="last_prompt"),
        Capture("resid_post", 2, positions="prompt", reduce="mean"),
        Capture("resid_post", 3, dtype="float16"),
        Capture("resid_mid", 3, before=True),
        Capture("resid_mid", 2, project=np.ones(128, np.float32)),
    ],
    "interventions": [Add(np.ones(128, np.float32), 3, hook="resid_mid")],
    "lens": Lens(layers=[1, 3], top_k=3),
    "probes": [Probe("p", np.ones(128, np.float32), layer=1)],
}


def test_what_one_request_can_ask_for_at_once():
    """Rows, a mean and products, at sites of their own; a lens, a probe and an intervention beside them."""
    admitted = admit(carried(**MET), replace(FACTS, no_lens=""))
    memory = admitted.parts[0]
    mean, products = memory.mixed[Site("resid_post", 2)], memory.mixed[Site("resid_mid", 2)]
    assert memory.late and memory.mixed[Site("resid_post", 1)] is None
    assert mean.reduce == "mean" and len(products.directions) == 1
    assert memory.dtypes[Site("resid_post", 3)] == "float16" and memory.dtypes[Site("resid_post", 1)] == "float32"
    assert {one.site for one in admitted.spec.site_requests if one.before} == {Site("resid_mid", 3)}
    assert admitted.sends_rows and [one.site.layer for one in admitted.spec.postprocess.read_outs] == [1, 3]
    assert admitted.told == 1 and len(admitted.effective) == 1


@pytest.mark.parametrize(
    "field, other, why",
    [
        ("capture[1].before", Capture("resid_post", 1, before=True), "both before and after"),
        ("capture[1].dtype", Capture("resid_post", 1, dtype="float16"), "both float32 and float16"),
        ("capture[1].reduce", Capture("resid_post", 1, reduce="mean"), "two ways"),
        ("capture[1].project", Capture("resid_post", 1, project=np.ones(128, np.float32)), "two ways"),
    ],
)
def test_what_one_output_cannot_have(field, other, why):
    """An output has one tensor for each site; rows before and after an intervention are told apart nowhere."""
    with refused(field, why):
        admit(carried(capture=[Capture("resid_post", 1), other]), FACTS)
