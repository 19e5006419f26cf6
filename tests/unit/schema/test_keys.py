"""Keys that look like Weir's are refused with the right name; everybody else's pass."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.unit.refusals import pairs, refused
from vllm_weir import WeirError
from vllm_weir.client.payload import body_of
from vllm_weir.config.settings import Settings
from vllm_weir.schema import keys
from vllm_weir.schema.keys import FORK_FIELDS, KEYS, LENS_KEYS, asks, meant, misplaced, refuse_slips
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.request import WeirRequest

CAPTURE, STEER = "output_residual_stream", "apply_steering_vectors"
WISH = {"v": 1, "capture": [{"hook": "resid_post"}]}
SLIPS = {
    "weir": [*str.split("wier Weir WEIR weir_ _weir we-ir weri ewir weirr weeir weirs vllm_weir"), "weir "],
    CAPTURE: str.split("""
        output_residual_streams outputResidualStream output-residual-stream output_residual_steam residual_stream
        output_residuals_stream ouptut_residual_stream
    """),
    STEER: str.split("apply_steering_vector apply_steerings_vectors applySteeringVectors steering_vector"),
    "apply_hooks": ["Apply_Hooks", "apply_hook"],
}
ORDINARY = """
    kv_transfer_params ec_transfer_params request_id weight weights wire wired weir_d their where were heir weird seed
    weirdness word ward wei wer wir eir air pair fair weight_ir dir wait write capture_id captured intervene session_id
    lora steering residual residuals stream streams output outputs output_stream output_hidden_states vectors hooks hook
    apply apply_chat_template steering_wheel extra_args vllm_xargs priority query qk
""".split()  # noqa: SIM905
PLACES = ("extra_args", "vllm_xargs", "body", "body's extra_args", "extra_body")


def over_http(key, value, place):
    """(vllm_xargs, unknown fields) of a body that has a key there."""
    if place in ("extra_args", "vllm_xargs"):
        return {key: value}, None
    inside = {"body's extra_args": "extra_args", "extra_body": "extra_body"}
    return None, {key: value} if place == "body" else {inside[place]: {key: value}}


def said(place, key, value=WISH):
    """The refusal of a request with a key at a place; None if there is none."""
    try:
        if place == "extra_args":
            refuse_slips({"other": 1, key: value})
        else:
            xargs, body = over_http(key, value, place)
            asked = asks(xargs, body)
            assert WeirRequest.parse(xargs, body, ServerLimits()) is None and not asked
    except WeirError as e:
        assert place == "extra_args" or asked
        return e
    return None


@pytest.mark.parametrize("place", PLACES)
def test_a_slip_is_refused_with_the_right_name(place):
    for right, key in pairs(SLIPS):
        e = said(place, key)
        assert e is not None and e.field == key, key
        if key == "steering_vector" and place in ("body", "extra_body"):
            right = "steering_vectors"  # which is what stands there
        assert f"did you mean {right!r}?" in e.message, key
        assert said(place, key, None) is None, key  # as vLLM takes it: not given


@pytest.mark.parametrize("place", PLACES)
def test_everybody_else_s_keys_pass(place):
    for key in ORDINARY:
        assert said(place, key, {"mine": 1}) is None and meant(key) is None, key


def test_what_vllm_itself_calls_things_passes():
    from vllm import SamplingParams
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    bodies = (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    names = {name for kind in bodies for name in kind.model_fields} | {*SamplingParams.__struct_fields__}
    assert len(names) > 100
    for name in names:
        for place in ("extra_args", "body"):
            assert said(place, name, {"mine": 1}) is None, name


@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_inside_is_told_where(place):
    for key in ("capture", "captures", "intervention", "interventions", "probes", "stop_when"):
        right = {"c": "capture", "i": "interventions"}.get(key[0], key)
        for value in ([], {}, [{"hook": "resid_post"}], '{"hook": "resid_post"}'):
            e = said(place, key, value)
            assert e is not None and e.field == key and f'"{right}": [...]' in e.message and "'weir'" in e.message
        for value in (None, True, 3, 0.5):  # somebody's switch
            assert said(place, key, value) is None


@pytest.mark.parametrize("key", [*KEYS, *FORK_FIELDS])
def test_a_right_key_is_no_slip_and_a_server_s_field_offline_is_told_where_it_belongs(key):
    assert meant(key) is None and meant(key, True) is None
    if key in KEYS:
        refuse_slips({key: WISH})
        return
    e = said("extra_args", key)
    assert e is not None and e.field == key and "from_tiers" in e.message
    assert (f"did you mean {STEER!r}?" in e.message) == (key == "steering_vectors")
    wrong = misplaced(None, {"extra_args": {key: {}}})
    assert wrong is not None and wrong.field == f"extra_args.{key}"


@given(st.sampled_from(["weir", *LENS_KEYS]), st.data())
def test_swapped_and_doubled_letters_are_slips(own, data):
    i = data.draw(st.integers(0, len(own) - 2))
    swapped = own[:i] + own[i + 1] + own[i] + own[i + 2 :]
    for slip in (swapped, own[:i] + own[i] + own[i:], own.upper(), f"_{own}", own.replace("_", "-")):
        assert slip == own or meant(slip) == own, slip


def distance(a: str, b: str) -> int:
    """Letters to insert, delete or change."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


CUT = {"vllmweir", "residualstream", "residualstreams", "outputresidual", "applysteering", "steeringvector"}


@given(st.text(max_size=60) | st.text("weirabcdhosty_", max_size=8))
def test_nothing_far_from_a_key_is_taken_for_it(key):
    right = meant(key)
    if right is not None:
        short = "".join(c for c in key.lower() if c.isalnum())
        assert short in CUT or distance(short, right.replace("_", "")) <= 2


def test_every_door_refuses_a_slip():
    """Parameters offline, settings, and the client before it sends."""
    for key, value in {"wier": WISH, "capture": [], "steering_name": "x"}.items():
        with refused(key):
            weir.params(SimpleNamespace(extra_args={key: value}), capture=weir.Capture())
    with refused("additional_config.wier", "did you mean 'weir'"):
        Settings.load({"wier": {"layers": [1]}}, {})
    Settings.load({"wire": 1, "weird": 2, 7: 8}, {})
    for key, fields in (
        ("wier", {"wier": WISH}), ("Weir", {"extra_body": {"Weir": WISH}}), ("weir_", {"vllm_xargs": {"weir_": "{}"}}),
    ):  # fmt: skip
        with refused(key, "did you mean 'weir'"):
            body_of({"prompt": "x"}, "m", fields=fields)


def test_a_plain_request_is_not_looked_at(monkeypatch):
    engine = importlib.import_module("vllm_weir.patches.frontend")
    from vllm_weir.guard import refuse

    seen = []
    for module in (engine, refuse):
        monkeypatch.setattr(module, "refuse_slips", lambda extra: pytest.fail("looked at"))
    for make in (engine.add_request, refuse.add_request):
        wrapper = make(lambda self, request: seen.append(request), SimpleNamespace(refusal="off"))
        for params in (None, SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={})):
            wrapper(SimpleNamespace(), SimpleNamespace(sampling_params=params, pooling_params=None, request_id="r"))
    assert len(seen) == 6


@pytest.mark.parametrize("module", ["vllm_weir.patches.frontend", "vllm_weir.guard.refuse"])
def test_a_slip_does_not_reach_the_engine(module):
    make = importlib.import_module(module).add_request
    wrapper = make(lambda self, request: pytest.fail("entered"), SimpleNamespace(refusal=None))
    params = SimpleNamespace(extra_args={"wier": WISH})
    with refused("wier", "did you mean 'weir'"):
        wrapper(SimpleNamespace(), SimpleNamespace(sampling_params=params, request_id="r", mm_features=[]))


def test_looking_at_the_ends_of_a_key_misses_no_slip():
    """Every slip of every key, against a comparison with all keys one after the other."""

    def compared_with_all(letters: str) -> str | None:
        for own, theirs in keys._LETTERS.items():
            if letters == theirs or keys._swapped_or_doubled(letters, theirs):
                return own
            if own not in keys._SHORT and keys._one_letter_off(letters, theirs):
                return own
        return keys._OTHER_NAMES.get(letters)

    for own in keys._LETTERS.values():
        cuts = [(own[:i], own[j:]) for i in range(len(own) + 1) for j in (i, i + 1)]
        slips = [before + letter + after for before, after in cuts for letter in ("", "q")]
        slips += [own[:i] + own[i + 1 : i + 2] + own[i : i + 1] + own[i + 2 :] for i in range(len(own) - 1)]
        for slip in {*slips, *(own[:i] + own[i] + own[i:] for i in range(len(own)))}:
            if slip not in keys.KEYS and len(slip) <= keys._MAX_MISSPELT:
                assert keys.meant.__wrapped__(slip, True) == compared_with_all(slip), slip
