"""Nothing that the four systems take is ignored: each key of `tests.support.other_systems` is served or refused."""

from __future__ import annotations

import base64
import inspect
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support import machine
from tests.support.other_systems import (
    FORK_FIELDS,
    FORK_ROUTES,
    LENS_ANSWERS,
    LENS_KEYS,
    LENS_NAMES,
    LENS_ROUTES,
    MI_PATCH,
    MI_PATCH_NAMES,
    NEEDLESS,
    PROBE_HOOK,
    REFUSED,
    SERVED,
)
from tests.unit.admin_app import ADMIN, app_of, serving
from vllm_weir import WeirError, analysis
from vllm_weir.compat.http import translate
from vllm_weir.compat.mi_patch.environment import act_sink
from vllm_weir.compat.rhizonymph.requests import KnownNames
from vllm_weir.guard import refuse
from vllm_weir.schema.keys import asks, refuse_slips
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.shared.result_files import frame_key

D = 4
ROW = [1.0] * D
TABLE = {"dtype": "float32", "shape": [1, D], "data": base64.b64encode(np.float32(ROW).tobytes()).decode()}
VECTORS, CLAMPS = {"post_block": {"1": ROW}}, {"post_block": {"1": [{"vector": ROW, "max": 1.0}]}}
STEER = {"kind": "inline", "packed": {"post_block": TABLE | {"layer_indices": [1]}}}
SITE = {"layer": 1, "hook": "post_block", "dest_position": 0}
EXAMPLES = {
    "output_residual_stream": [1],
    "apply_steering_vectors": [weir.SteeringVector(torch.ones(1, D), [1]).to_json()],
    "apply_hooks": ["x"],
    "output_qk": [1],
    "activations_transport": "binary",
    "skip_reading_prefix_cache": True,
    "steering_name": "m",
    "steering": [{"when": {"kind": "always"}, "scope": "this_token", "apply": {"kind": "add", "steer": STEER}}],
    "patch": [SITE | {"source_module": "zeros"}],
    "patch_vectors": TABLE,
    "capture": {"filesystem": {"hooks": {"post_block": [1]}}},
    "capture_wait": True,
    "conversation_id": "c",
} | {
    f"{tier}steering_{kind}": example
    for tier in ("", "prefill_", "decode_")
    for kind, example in (("vectors", VECTORS), ("clamps", CLAMPS))
}


def parse(xargs=None, body=None):
    names = KnownNames(lambda name, field: (), D)
    return translate(WeirRequest.parse(xargs, body, ServerLimits()), body or {}, names)


@pytest.mark.parametrize(("key", "verdict"), LENS_KEYS.items())
def test_keys_of_vllm_lens(key, verdict):
    for xargs, body in (({key: EXAMPLES[key]}, None), (None, {"extra_args": {key: EXAMPLES[key]}})):
        assert asks(xargs, body) == (verdict != NEEDLESS)
        if verdict == REFUSED:
            with pytest.raises(WeirError) as e:
                parse(xargs, body)
            assert e.value.field == key
        elif verdict == SERVED and key != "activations_transport":  # which says how the server answers
            assert key in parse(xargs, body).extra_args
    refuse_slips({key: EXAMPLES[key]})


@pytest.mark.parametrize(("key", "verdict"), FORK_FIELDS.items())
def test_fields_of_the_fork(key, verdict):
    beside = {"steering_name": "m"} if key == "conversation_id" else {}  # alone it is not only the fork's
    body = {key: EXAMPLES[key]} | beside
    assert asks(None, body)
    if verdict == REFUSED:
        with pytest.raises(WeirError) as e:
            parse(None, body)
        assert e.value.field == key
    else:
        asked = parse(None, body).extra_args["weir"]
        done = asked.get("modules") if key == "steering_name" else asked.get("interventions")
        assert done or key == "patch_vectors", "it alone is a table that nothing refers to"


def test_routes_of_the_fork(tmp_path):
    from fastapi.testclient import TestClient

    with serving(tmp_path) as (server,):
        client = TestClient(app_of(server), headers=ADMIN)
        for (method, path), verdict in FORK_ROUTES.items():
            answer = client.request(method, path.replace("{run_id}", "r"))
            known = answer.status_code == 200 or answer.json()["error"]["message"] != "Not Found"
            assert known, (method, path)
            assert verdict == SERVED or "no runs are kept" in answer.json()["error"]["message"]


def test_routes_of_vllm_lens(tmp_path):
    from fastapi.testclient import TestClient

    with serving(tmp_path) as (server,):
        client, handle = TestClient(app_of(server), headers=ADMIN), frame_key(torch.zeros(2, D, dtype=torch.bfloat16))
        server.keep_frames({handle: b"frame"}, [])
        for (method, path), verdict in LENS_ROUTES.items():
            answer = client.request(method, path.replace("{handle}", handle))
            if verdict == REFUSED:
                assert answer.status_code == 400 and "--weir-hook" in answer.json()["error"]["message"]
                continue
            assert answer.content == b"frame" and answer.headers["Content-Type"] == "application/octet-stream"
            told = {name: answer.headers[name] for name in LENS_ANSWERS["headers"]}
            assert (told["X-VLLM-Lens-Dtype"], told["X-VLLM-Lens-Original-Dtype"]) == ("int16", "torch.bfloat16")
            assert told["X-VLLM-Lens-Shape"] == "[2, 4]" and "no-store" in told["Cache-Control"]


def test_frames_are_fetched_from_a_server_that_has_the_route():
    for key in ("output_qk", "output_residual_stream"):
        asked = WeirRequest.parse({key: [1], "activations_transport": "binary"}, None, ServerLimits())
        with pytest.raises(WeirError, match="weir serve") as e:
            translate(asked, {}, routes=False)
        assert e.value.field == "activations_transport" and translate(asked, {}).extra_args == {key: [1]}


def test_names_of_vllm_lens():
    assert all(hasattr(weir, name) == (verdict == SERVED) for name, verdict in LENS_NAMES.items())


@machine.needs(machine.module("vllm"))
def test_vllm_lens_itself_beside_weir(monkeypatch):
    """It sets results on outputs, and serves its keys where Weir is off."""
    from vllm import RequestOutput

    made = lambda: RequestOutput("r", None, [1], None, [], finished=True)
    one, other = made(), made()
    one.hook_results = one.activations = {"0": {}}
    assert one.hook_results == one.activations == {"0": {}} and other.hook_results is other.activations is None
    status = SimpleNamespace(refusal="off")
    for key in ("apply_hooks", "output_residual_stream"):
        with pytest.raises(WeirError, match="off"):
            refuse._check({key: [1]}, status)
    monkeypatch.setitem(sys.modules, "vllm_lens._activations_plugin", sys)
    refuse._check({"apply_hooks": [1], "output_residual_stream": [1]}, status)
    with pytest.raises(WeirError, match="off"):
        refuse._check({"apply_hooks": [1], "weir": {"v": 1}}, status)


@machine.needs(machine.module("vllm"))
def test_arguments_of_vllm_probe_hook():
    for cls in (weir.LLM, weir.AsyncLLM):
        assert tuple(inspect.signature(cls).parameters)[: len(PROBE_HOOK)] == PROBE_HOOK


def test_variables_and_functions_of_vllm_mi_patch(caplog):
    weir_logger = logging.getLogger("vllm_weir")
    weir_logger.addHandler(caplog.handler)
    try:
        values = {"CAPTURE": "1", "MODE": "topk8", "RETURN": "sharded", "OUTDIR": "/d", "RP_SEED": "1"}
        for name, verdict in MI_PATCH.items():
            caplog.clear()
            act_sink(
                {"VLLM_ACT_CAPTURE": "1", f"VLLM_ACT_{name}": values.get(name, "0" if name == "PER_DIM" else "64")}
            )
            assert bool(caplog.records) == (verdict == REFUSED), name
    finally:
        weir_logger.removeHandler(caplog.handler)
    assert all(callable(getattr(analysis, name)) for name in MI_PATCH_NAMES)
