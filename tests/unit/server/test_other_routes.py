"""Routes whose answers have no room for Weir's: what they cannot do is refused, and names the field."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from tests.unit.admin_app import FACTS
from tests.unit.frontends import frontend_of
from vllm_weir import WeirError
from vllm_weir.compat.vllm_lens.request import read
from vllm_weir.patches import server
from vllm_weir.server import context

WISH = {"v": 1, "capture": [{"hook": "resid_post"}]}
ADD = {"op": "add", "vector": [1.0, 2.0], "layers": [1]}
GATED = ADD | {"when": {"probe": "mood", "above": 0}}
PROBE = {"kind": "linear", "name": "own", "weight": [1.0, 2.0], "layer": 0}


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"apply_hooks": "[]"}, "apply_hooks"),
        ({"weir": WISH}, "capture"),
        ({"output_residual_stream": True}, "output_residual_stream"),
        (
            {"apply_steering_vectors": [{"activations": [[1.0]], "layer_indices": ["x"]}]},
            "apply_steering_vectors[0].layer_indices",
        ),
        ({"weir": {"v": 1, "captures": []}}, "weir.captures"),
        ({"weir": {"v": 1, "features": [{"name": "sae", "top_k": 2}]}}, "features"),
        ({"weir": {"v": 1, "lens": {}}}, "lens"),
        ({"weir": '{"v": 1, "lens": {}}'}, "lens"),
        ({"weir": {"v": 1, "interventions": [GATED], "dose": True}}, "dose"),
        ({"weir": {"v": 1, "probes": ["refusal"]}}, "probes[0]"),
        ({"weir": {"v": 1, "probes": ["mood", PROBE], "stop_when": "mood > 1", "interventions": [ADD]}}, "probes[1]"),
        ({"weir": {"v": 1, "probes": ["refusal", "mood"], "interventions": [GATED]}}, "probes[0]"),
    ],
)
def test_what_would_be_dropped_is_refused(extra, field):
    with pytest.raises(WeirError) as caught:
        context.check_answered(SimpleNamespace(extra_args=extra), read)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {},
        {"other": 1},
        {"apply_hooks": None},
        {"weir": {"v": 1, "capture": [{"hook": "resid_post", "sink": "archive"}]}},
        {"weir": {"v": 1, "probes": [PROBE], "stop_when": "own > 1"}},
        {"weir": {"v": 1, "probes": ["mood"], "interventions": [ADD, GATED]}},
        {"weir": {"v": 1, "probes": ["read"], "interventions": [ADD | {"when": {"probe": "controller:c"}}]}},
    ],
)
def test_what_asks_for_no_rows_goes_on(extra):
    context.check_answered(SimpleNamespace(extra_args=extra), read)


def test_scores_that_a_controller_gets_are_not_dropped():
    asked = SimpleNamespace(extra_args={"weir": {"v": 1, "probes": ["mood"]}})
    context.check_answered(asked, read, scores_taken=True)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (
            {"capture": [{"hook": "resid_post", "layers": [1], "sink": {"filesystem": {"url": "{}"}}}]},
            "capture[0].sink",
        ),
        ({"capture": {"hook": "resid_post", "layers": [1], "sink": {"workers": {"rows": "mine"}}}}, "capture[0].sink"),
        ({"lens": {"kind": "tuned", "path": "{}"}}, "lens.path"),
    ],
)
def test_no_client_chooses_a_path_whichever_route_takes_its_params(tmp_path, asked, field):
    """/inference/v1/generate takes a whole SamplingParams, so only admission sees what it asks."""
    path = tmp_path / "chosen"
    asked = json.loads(json.dumps({"v": 1, **asked}).replace("{}", str(path)))
    frontend = frontend_of(FACTS)
    frontend.serve(1000)
    with closing(frontend), pytest.raises(WeirError) as caught:
        frontend.admit("id", {"weir": asked}, [1, 2], 2, 1)
    assert caught.value.field == field and caught.value.message.startswith("over HTTP")
    assert not path.exists()


class Body(BaseModel):
    """Drops what it does not know."""

    messages: list = []


class BodyWithXargs(Body):
    vllm_xargs: dict | None = None


class Serving:
    def create_error_response(self, message, param=None):
        return message, param

    async def create_messages(self, request, raw_request=None):
        return "answered"


@pytest.mark.parametrize(
    ("kind", "body", "refused"),
    [
        (Body, {}, False),
        (Body, {"weir": WISH}, True),
        (Body, {"extra_args": {"output_residual_stream": [0]}}, True),
        (Body, {"steering_name": "happy"}, True),
        (Body, {"vllm_xargs": {"weir": "{}"}}, True),
        (Body, {"vllm_xargs": "no mapping"}, False),
        (BodyWithXargs, {"vllm_xargs": {"weir": "{}"}}, False),
        (BodyWithXargs, {"weir": WISH, "vllm_xargs": {}}, True),
    ],
)
def test_a_request_model_that_drops_keys_does_not_hide_them(kind, body, refused):
    async def read():
        return body

    create = server.without_room(Serving.create_messages, None)
    got = asyncio.run(create(Serving(), kind(), SimpleNamespace(json=read)))
    assert (got == ("weir: " + got[0].removeprefix("weir: "), "weir")) if refused else got == "answered"
    assert asyncio.run(create(Serving(), kind())) == "answered"
