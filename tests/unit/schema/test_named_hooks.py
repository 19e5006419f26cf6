"""`Use`: a registered hook by name: its wire form, and what of a hook a request may change."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support.hook_functions import clamp_norm
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import unknown_reference
from vllm_weir.frontend.admission.registries import HookRegistry
from vllm_weir.schema.request import RequestSpec, parse_hooks

ARGS = {"w": torch.arange(3.0), "at": [1, 2], "on": [True], "most": 2.0, "k": 4, "word": "x", "flag": False}
HOOK = weir.Hook(clamp_norm, layers=[1], args=ARGS, key="mine")
B64 = {"b64": base64.b64encode(np.ones(3, "<f4").tobytes()).decode(), "dtype": "float32", "shape": [3]}


def resolved(lookup=unknown_reference, **asked):
    """What a `Use` becomes, through JSON."""
    (use,) = parse_hooks([json.loads(json.dumps(weir.Use("clip", **asked).to_json()))], "hooks")
    registry = HookRegistry()
    registry.put("clip", HOOK)
    return registry.resolve(use, lookup)


def value(hook, name):
    dtype, shape, data = hook.args[name]
    return np.frombuffer(data, dtype).reshape(shape).tolist()


@pytest.mark.parametrize("w", [[1, 1, 1], [1.0, 1.0, 1.0], torch.ones(3, dtype=torch.bfloat16), np.ones(3), B64])
def test_args_as_lists_tensors_and_base64(w):
    hook = resolved(args={"w": w, "at": [7, 8], "on": [False], "most": 3, "k": 5, "word": "y", "flag": True})
    assert value(hook, "w") == [1.0, 1.0, 1.0] and hook.args["w"][0] == "float32"
    assert value(hook, "at") == [7, 8] and hook.args["at"][0] == "int64" and value(hook, "on") == [False]
    assert [hook.args[name] for name in ("most", "k", "word", "flag")] == [3.0, 5, "y", True]
    assert type(hook.args["most"]) is float and hook.function is HOOK.function


def test_what_is_left_out_is_as_registered():
    hook = resolved()
    assert hook.args == HOOK.args and hook.layers == (1,) and hook.key == "mine" and hook.positions == HOOK.positions
    hook = resolved(layers=[2, 3], positions="generated", when=weir.When("mood", above=0.5), args={"k": 5})
    assert hook.layers == (2, 3) and hook.positions.kind == "generated" and hook.when.probe == "mood"
    assert hook.key != "mine" and hook.key == resolved(args={"k": 5}).key != resolved(args={"k": 6}).key
    assert hook.args["w"] == HOOK.args["w"] and hook.path == "hooks[0]"


def test_a_tensor_may_be_the_name_of_a_vector():
    for given in ("mood", {"ref": "mood"}):
        assert value(resolved(lambda ref, at: np.full(3, 2.0, np.float32), args={"w": given}), "w") == [2.0] * 3
    with pytest.raises(WeirError, match="no vector is registered under 'mood'"):
        resolved(args={"w": "mood"})


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"args": {"v": 1}}, "args.v", "no such arg; it has at, flag"),
        ({"args": {"mosst": 1}}, "args.mosst", "did you mean 'most'"),
        ({"args": {"w": [1.0]}}, "args.w", r"float32 \[3\], got \[1\]"),
        ({"args": {"w": 1.0}}, "args.w", "got float"),
        ({"args": {"at": [1.5, 2.0]}}, "args.at", "other numbers"),
        ({"args": {"on": [1]}}, "args.on", "other numbers"),
        ({"args": {"k": 1.5}}, "args.k", "registered as int, got float"),
        ({"args": {"k": True}}, "args.k", "registered as int, got bool"),
        ({"args": {"most": "x"}}, "args.most", "registered as float, got str"),
        ({"args": {"most": [1.0]}}, "args.most", "got float32"),
        ({"layers": "some"}, "layers", "some"),
        ({"positions": "nowhere"}, "positions", "nowhere"),
        ({"args": {"most": float("nan")}}, "args.most", "NaN"),
        ({"args": {"w": [1e39, 0, 0]}}, "args.w", "NaN or Inf"),
        ({"args": {"w": [["x"]]}}, "args.w", "got str"),
        ({"args": {"w": {**B64, "shape": [2]}}}, "args.w.b64", "bytes do not make"),
        ({"args": {"w": {**B64, "dtype": "int4"}}}, "args.w.dtype", "unknown dtype"),
        ({"args": {"w": {**B64, "shape": [1 << 40]}}}, "args.w.shape", "more than the limit"),
        ({"args": {str(k): 1 for k in range(65)}}, "args", "up to 64"),
        ({"args": [1]}, "args", "by name"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(asked, field, words):
    with pytest.raises(WeirError, match=words) as e:
        resolved(**asked)
    assert e.value.field in (f"hooks.{field}", f"hooks[0].{field}")


@pytest.mark.parametrize("key", ["function", "source", "cloudpickle", "fn"])
@pytest.mark.parametrize("place", ["hooks", "interventions"])
def test_code_is_refused_with_a_pointer(place, key):
    with pytest.raises(WeirError, match="--weir-hook NAME=module:attribute") as e:
        RequestSpec.parse({"v": 1, place: [{"op": "hook", "name": "clip", key: "gASV"}]})
    assert e.value.field == f"{place}[0].{key}"


def test_forms_and_places():
    asked = {"v": 1, "hooks": ["clip", {"name": "other"}], "interventions": [{"op": "hook", "name": "third"}]}
    spec = RequestSpec.parse(asked)
    assert [one.name for one in (*spec.interventions, *spec.hooks)] == ["third", "clip", "other"]
    assert RequestSpec.parse(json.loads(json.dumps(spec.to_json()))) == spec
    for wrong, field in (
        ({"op": "add", "vector": [1.0]}, "hooks[0]"),
        ({"args": {}}, "hooks[0].name"),
        (5, "hooks[0]"),
    ):
        with pytest.raises(WeirError) as e:
            RequestSpec.parse({"v": 1, "hooks": [wrong]})
        assert e.value.field == field
    registry = HookRegistry()
    registry.put("clip", HOOK)
    with pytest.raises(WeirError, match="did you mean 'clip'"):
        registry.find("clp", "hooks[0].name")
