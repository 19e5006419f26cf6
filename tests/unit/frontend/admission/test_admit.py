"""Admission: whatever comes is refused with the name of the field, or resolved exactly as asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.request_strategies import any_extra_args, sensible_captures, served
from vllm_weir import Add, Capture, Clamp, LowRank, Replace, Site, WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import EngineTraits
from vllm_weir.schema.hooks import HOOKS, STREAM_HOOKS, place_of
from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.request import Postprocess, RequestSpec
from vllm_weir.schema.table_sizes import TableSizes

LAYERS = 4
FACTS = EngineCapabilities(served(LAYERS), LAYERS, 128, "float32", 1024)
SIZES = TableSizes(64, 64, 1024)
FUZZ = examples(800, *HealthCheck, database=None)


def attempt(extra_args, capabilities=FACTS):
    """What the engine would receive, or the refusal."""
    try:
        admitted = admit(extra_args, capabilities)
        return admitted, make_engine_request(admitted, "reply", [1, 2, 3, 4, 5, 6], 6, 8, capabilities, True, SIZES)
    except WeirError as e:
        assert e.field, e
        assert e.message
        return None, e


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


def weir(**capture):
    return {"weir": {"v": 1, "capture": [capture]}}


@pytest.mark.parametrize(
    ("extra_args", "field"),
    [
        ({"weir": "{"}, "weir"),
        ({"weir": "[" * 100_000}, "weir"),
        ({"weir": []}, "weir"),
        ({"weir": False}, "weir"),
        ({"weir": {"capture": []}}, "weir.v"),
        ({"weir": {"v": 2}}, "weir.v"),
        ({"weir": {"v": True}}, "weir.v"),
        ({"weir": {"v": 10**5000}}, "weir.v"),
        ({"weir": {"v": 1, "captures": []}}, "weir.captures"),
        ({"weir": {"v": 1, "capture": "all"}}, "capture"),
        ({"weir": {"v": 1, "capture": [{}] * 63}}, "capture"),
        ({"weir": {"v": 1, "interventions": [{"op": "add"}]}}, "interventions[0].vector"),
        ({"weir": {"v": 1, "interventions": [{"b64": "%%", "dtype": "float32", "shape": [2]}]}}, "interventions[0].op"),
        ({"weir": {"v": 1, "capture": [{}, 7]}}, "capture[1]"),
        (weir(hook="nonsense"), "capture[0].hook"),
        (weir(hook="embed", layers=1), "capture[0].layers"),
        (weir(hook="final_norm", layers=[0, 2]), "capture[0].layers"),
        (weir(hook=7), "capture[0].hook"),
        (weir(hook="blocks." + "9" * 5000 + ".hook_resid_post"), "capture[0].hook"),
        (weir(hook="blocks.9.hook_resid_post"), "capture[0].layers"),
        (weir(hook="blocks.1.hook_resid_post", layers=[2]), "capture[0].layers"),
        (weir(layers=[0, 4]), "capture[0].layers"),
        (weir(layers=-1), "capture[0].layers"),
        (weir(layers=1.0), "capture[0].layers[0]"),
        (weir(layers=float("nan")), "capture[0].layers[0]"),
        (weir(layers=[float("inf")]), "capture[0].layers[0]"),
        (weir(layers=[True]), "capture[0].layers[0]"),
        (weir(layers=[10**30]), "capture[0].layers[0]"),
        (weir(layers=[10**5000]), "capture[0].layers[0]"),
        (weir(layers=list(range(70_000))), "capture[0].layers"),
        (weir(layers={"token_ids": [1]}), "capture[0].layers"),
        (weir(positions="1:2:0"), "capture[0].positions"),
        (weir(positions="everything"), "capture[0].positions"),
        (weir(positions=[0] * 70_000), "capture[0].positions"),
        (weir(positions=[[0]]), "capture[0].positions[0]"),
        (weir(positions=True), "capture[0].positions"),
        (weir(positions={"token_ids": [-1]}), "capture[0].positions.token_ids"),
        (weir(positions={"token_ids": "7"}), "capture[0].positions.token_ids"),
        (weir(positions={"tokens": [1]}), "capture[0].positions"),
        (weir(before=1), "capture[0].before"),
        (weir(dtype="int8"), "capture[0].dtype"),
        (weir(compress="zstd"), "capture[0].compress.method"),
        (weir(sink="/etc/passwd"), "capture[0].sink"),
        (weir(layer=1), "capture[0].layer"),
        ({"weir": {"v": 1, "capture": [{"compress": "rp8"}, {"layers": 1}]}}, "capture[1].compress"),
        ({"apply_hooks": ["code"]}, "apply_hooks"),
        ({"weir": {"v": 1}, "output_qk": True}, "output_qk"),
        ({"weir": {"v": 1, "capture": [{"dtype": "float16"}, {"layers": 1}]}}, "capture[1].dtype"),
        ({"weir": {"v": 1, "capture": [{"before": True}, {"layers": 1}]}}, "capture[1].before"),
        ({"output_residual_stream": [4]}, "output_residual_stream.layers"),
        ({"output_residual_stream": "["}, "output_residual_stream"),
        ({"output_residual_stream": "[" * 100_000}, "output_residual_stream"),
        ({"apply_steering_vectors": [{"activations": [float("nan")]}]}, "apply_steering_vectors[0].layer_indices"),
    ],
)
def test_refusals_name_the_field(extra_args, field):
    assert carries_keys(extra_args)
    admitted, refusal = attempt(extra_args)
    assert admitted is None
    assert refusal.field == field
    assert str(refusal).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "text", ['{"v": 1, "capture": [{}], "capture": []}', '{"v": 1, "capture": [{"layers": [0], "layers": [1]}]}']
)
def test_a_key_that_comes_twice_in_text_is_refused(text):
    with pytest.raises(WeirError, match="comes twice"):
        admit({"weir": text}, FACTS)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"activations": [[1.0] * 128], "layer_indices": [9]}, "layer_indices"),
        ({"activations": [[1.0] * 128], "layer_indices": [-1]}, "layer_indices"),
        ({"activations": [[1.0]], "layer_indices": [1]}, "activations"),
    ],
)
def test_vllm_lens_s_fields_are_named_as_they_were_written(value, field):
    with pytest.raises(WeirError) as e:
        admit({"apply_steering_vectors": value}, FACTS)
    assert e.value.field == f"apply_steering_vectors[0].{field}"


def test_an_untapped_site_is_refused():
    gone = {Site("resid_post", 1), *(Site("attn_out", layer) for layer in range(LAYERS))}
    capabilities = EngineCapabilities(served(LAYERS, gone), LAYERS, 128, "float32", 1024)
    for hook, layer in (("resid_post", 0), ("resid_pre", 1), ("mlp_out", 1), ("embed", "all"), ("final_norm", 0)):
        assert attempt(weir(hook=hook, layers=layer), capabilities)[0] is not None
    for hook, layers, field in (("resid_post", [0, 1], "layers"), ("attn_out", 0, "hook"), ("embed", 1, "layers")):
        admitted, refusal = attempt(weir(hook=hook, layers=layers), capabilities)
        assert admitted is None and refusal.field == f"capture[0].{field}"
        assert "it is not there" in refusal.message or "has one embed" in refusal.message


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
    def asked(dtype):
        given = {"weir": {"v": 1, "interventions": [intervention.to_json()]}}
        return attempt(given, EngineCapabilities(served(LAYERS), LAYERS, 128, dtype, 1024))

    admitted, refusal = asked("float16")
    assert (
        admitted is None
        and refusal.field == f"interventions[0].{field}"
        and "float16 holds 6.55e+04" in refusal.message
    )
    assert asked("bfloat16")[0] is not None


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


def test_rows_that_stay_on_the_workers_come_back_nowhere():
    for reduce in (None, "mean"):
        own = {"layers": [1, 2], "positions": "prompt", "reduce": reduce, "sink": STAYS}
        admitted = admit(
            {"weir": {"v": 1, "capture": [own], "interventions": [dict(op="add", vector=[1.0] * 128)]}}, FACTS
        )
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
    with pytest.raises(WeirError, match=message) as e:
        admit({"weir": {"v": 1, "capture": captures}}, FACTS, sinks=("norms",), **more)
    assert e.value.field == f"capture[{len(captures) - 1}].sink"


@pytest.mark.parametrize("options", [{}, {"rows": 3}, {"rows": "k/1"}, {"rows": "k", "more": 1}])
def test_the_collection_that_keeps_rows_has_a_name(options):
    with pytest.raises(WeirError) as e:
        admit(weir(sink={"workers": options}), FACTS)
    assert e.value.field.startswith("capture[0].sink.workers")


def test_token_ids_need_tokens():
    with pytest.raises(WeirError) as e:
        admit(weir(positions={"token_ids": [1]}), FACTS, has_token_ids=False)
    assert e.value.field == "capture[0].positions"


@pytest.mark.parametrize(("chunked", "length", "fits"), [(True, 10_000, True), (False, 128, True), (False, 129, False)])
def test_a_step_must_fit_the_ring(chunked, length, fits):
    admitted = admit({"weir": {"v": 1, "capture": [{}, {"hook": "resid_pre"}]}}, FACTS)
    if fits:
        assert make_engine_request(admitted, "", None, length, 8, FACTS, chunked, SIZES).rows_per_token == 8
    else:
        with pytest.raises(WeirError, match="buffer_bytes"):
            make_engine_request(admitted, "", None, length, 8, FACTS, chunked, SIZES)


def test_facts_from_reports():
    good = {
        "ok": True,
        "sites": [("resid_pre", 0, ""), ("resid_post", 0, "")],
        "num_layers": 2,
        "d_model": 8,
        "dtype": "float32",
        "ring_rows": 10,
    }
    later = [("resid_post", 1, ""), ("resid_post", 0, "not on this rank")]
    merged = EngineCapabilities.merge([good, good | {"sites": later, "ring_rows": 0}, good | {"ring_rows": 7}])
    verdicts = {Site("resid_pre", 0): "", Site("resid_post", 0): "not on this rank", Site("resid_post", 1): ""}
    workers = dict(zip(verdicts, map(frozenset, ({0, 2}, {0, 1, 2}, {1})), strict=True))
    assert merged == EngineCapabilities(verdicts, 2, 8, "float32", 7, workers=workers)
    with pytest.raises(WeirError, match="because"):
        EngineCapabilities.merge([good, {"ok": False, "reason": "because"}])
    with pytest.raises(WeirError):
        EngineCapabilities.merge([])


@examples(50)
@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k != "weir"), st.integers(), max_size=3))
def test_other_keys_are_not_ours(extra_args):
    assert not carries_keys(extra_args)
    assert not carries_keys(None) and not carries_keys({"weir": None})


def site_request(**more):
    return {"weir": {"v": 1, "capture": [{"hook": "resid_post", "layers": [1], **more}]}}


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
            with pytest.raises(WeirError, match=rf"given as {said}, which.*resid_pre at layer 0") as e:
                admit({"weir": wrong}, FACTS, **{what: True})
            assert e.value.field == field
        merged = replace(FACTS, embeds_media=True)
        assert admit({"weir": wrong}, merged, has_media=True)
        with pytest.raises(WeirError, match="given as embeddings"):
            admit({"weir": wrong}, merged, has_embeddings=True, has_media=True)


def test_what_is_remembered_of_an_admission():
    """Equal wishes share it; what JSON tells apart, and what Python would take for equal, does not."""
    from vllm_weir.frontend.admission.cache import MAX_KEY_BYTES, admission_key

    def key(extra, ids=True, names=0, embeddings=False):
        found = admission_key(extra, ids, names, embeddings)
        return found and found.key

    assert key(site_request()) == key(site_request()) is not None
    apart = [
        site_request(),
        site_request(before=True),
        site_request(before=1),
        site_request(before=1.0),
        site_request(before="1"),
        site_request(before=None),
    ]
    apart += [
        site_request(before=[]),
        site_request(before={}),
        site_request(before=["a", "b"]),
        site_request(before={"a": "b"}),
        site_request(layers="all"),
    ]
    keys = [key(w) for w in apart] + [
        key(site_request(), ids, embeddings=given) for ids, given in ((False, True), (True, True))
    ]
    keys += [key({}, ids, embeddings=given) for ids, given in ((True, False), (False, True), (True, True))]
    assert len(set(keys)) == len(keys) and None not in keys
    for named in (site_request(project={"ref": "name"}), site_request(project="name")):  # what a name means can change
        assert key(named) == key(named) != key(named, names=1)
    assert key(site_request(before=object())) is None
    assert key(site_request() | {"apply_steering_vectors": []}) is None and key({"weir": "x"}) is None
    assert key(site_request(before="x" * MAX_KEY_BYTES)) is None
    endless = []
    endless.append(endless)
    assert key(site_request(before=endless)) is None


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
    wire = make_engine_request(admitted, "reply", [1, 2, 3], 3, 8, FACTS, True, TableSizes(2, 64, 1024))
    assert wire.table_needs.vectors == sorted({d for move in admitted.effective for d in move.vectors})
    assert len(wire.table_needs.vectors) == 2 and len(admitted.rows) == 10


def test_steering_beside_a_connector_that_is_not_known():
    """What changes nothing, and what only reads, is served."""
    facts = replace(FACTS, traits=EngineTraits(kv_connector="OwnConnector"))
    row = np.ones(128, np.float32).tolist()
    steered = {"weir": {"v": 1, "interventions": [{"op": "add", "layers": [1], "vector": row}]}}
    admitted, error = attempt(steered, facts)
    assert admitted is None and error.field == "interventions[0]" and "KV connector, OwnConnector" in error.message
    assert attempt(steered)[0] is not None
    assert attempt(weir(hook="resid_post"), facts)[0] is not None
    nothing = {"weir": {"v": 1, "interventions": [{"op": "add", "layers": [1], "vector": row, "scale": 0}]}}
    assert attempt(nothing, facts)[0] is not None


def test_a_selector_by_modality_becomes_the_prompts_positions():
    """In captures, interventions and probes; of what many requests share, where there are some."""
    from vllm_weir import Probe
    from vllm_weir.frontend.admission.reachable import Vocabulary
    from vllm_weir.schema.media import Media

    image = {"modality": "image"}
    media = Media.of([("image", [(2, 5), (7, 9)])])
    add = Add(np.ones(128), 1, positions=image)
    probe = Probe("p", np.ones(128), layer=1, positions=image)
    asked = {"weir": RequestSpec((Capture("resid_post", 1, image),), (add,)).to_json() | {"probes": [probe.to_json()]}}
    admitted = admit(asked, FACTS, vocabulary=Vocabulary(media=media))
    at = [2, 3, 4, 7, 8]
    assert {one.positions.to_json() == at for one in admitted.spec.site_requests} == {True}
    assert admitted.effective[0].positions.to_json() == at and admitted.probes[0].positions.to_json() == at
    (shared,) = admit({}, FACTS, always=[add], vocabulary=Vocabulary(media=media)).effective
    assert shared.positions.to_json() == at
    none = Vocabulary(media=Media())
    assert not admit({}, FACTS, always=[add], everyone=[Capture("resid_post", 1, image)], vocabulary=none).moves
    with pytest.raises(WeirError, match="the prompt has no image") as e:
        admit(asked, FACTS, vocabulary=none)
    assert e.value.field == "interventions[0].positions.modality"
