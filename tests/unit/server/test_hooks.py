"""The hooks of a server: what names them on its command line, and how their values come in an answer."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

import vllm_weir as weir
from tests.support import served_hooks
from tests.unit.admin_app import ADMIN, D, app_of, serving
from vllm_weir.client.response_fields import hook_values_of, saved_of
from vllm_weir.client.results import Choice, add_weir_fields
from vllm_weir.errors import WeirError
from vllm_weir.results.scores import HookValues
from vllm_weir.schema.functions import find
from vllm_weir.schema.user_hooks import Call
from vllm_weir.server import hooks
from vllm_weir.server.response_body import ValueForm

HERE = "tests.support.served_hooks"


@pytest.mark.parametrize(
    "wrong",
    [
        ["a"], ["a="], ["=m:f"], ["a b=m:f"], ["a=m:f", "a=m:g"], ["a=m"], ["a=m:"], ["a=:f"], ["a=hook.pt2"],
        ["a=/x/hook.pkl"], ["a=/x/hooks.py:f"], ["a=hook.pt2:f/g"], ["a=m:f()"], ["a=m:1"],
    ],
)  # fmt: skip
def test_options_that_are_refused(wrong):
    environ = {}
    with pytest.raises(WeirError) as e:
        hooks.put_options(wrong, environ)
    assert e.value.field == "--weir-hook" and environ == {}
    if "=" in wrong[0] and wrong[0].count("m:f") == 0:
        assert "NAME=module:attribute" in str(e.value) or "name has" in str(e.value)


def test_options():
    environ = {}
    hooks.put_options(["clip=my.hooks:clip", "two=m:Class.method"], environ)
    assert json.loads(environ["WEIR_SERVE_HOOKS"]) == {"clip": "my.hooks:clip", "two": "m:Class.method"}
    hooks.put_options([], {})


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("no_such_module:f", "a: cannot import no_such_module: ModuleNotFoundError"),
        (f"{HERE}:watsh", "a: tests.support.served_hooks has no watsh; did you mean 'watch'"),
        (f"{HERE}:NUMBER", "is a int; expected a weir.Hook, or a function"),
        ("pathlib:Path", "is a class"),
        ("raising_hooks:f", "a: cannot import raising_hooks: RuntimeError: not today"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path, monkeypatch, place, words):
    """Before the server starts; modules of the working directory are found."""
    (tmp_path / "raising_hooks.py").write_text("raise RuntimeError('not today')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(WeirError, match=words) as e:
        hooks.check_given({"WEIR_SERVE_HOOKS": json.dumps({"a": place})})
    assert e.value.field == "--weir-hook" and "\n" not in str(e.value)


def test_every_process_registers_them(tmp_path):
    """By their places, which the engine's process imports: also a lambda that a `Hook` of the module has."""
    environ = {}
    hooks.put_options([f"steer={HERE}:STEER", f"watch={HERE}:watch"], environ)
    with serving(tmp_path, 2) as servers:
        for server in servers:
            asyncio.run(hooks.load_given(server, environ))
            told = TestClient(app_of(server)).get("/v1/hooks").json()["hooks"]
            assert [(one["name"], one["function"], one["layers"]) for one in told] == [
                ("steer", "STEER", [1, 2]),
                ("watch", "watch", "all"),
            ]
            steer = server.frontend.names.hooks.find("steer", "").function
            assert find(msgspec.structs.replace(steer, token="elsewhere")) is find(served_hooks.STEER.function)
        hooks.put_options([f"deep={HERE}:DEEP"], environ)
        served_hooks.DEEP = type(served_hooks.STEER)(served_hooks.watch, layers=50)
        with pytest.raises(WeirError, match="deep: hook\\.layers") as e:
            asyncio.run(hooks.load_given(servers[0], environ))
        assert e.value.field == "--weir-hook"
        del served_hooks.DEEP


def test_modules_and_what_is_set_for_all_keep_names_and_args(tmp_path):
    """In every process, which looks the hook up itself; a vector that an arg names is what it was then."""
    environ = {}
    hooks.put_options([f"clip={HERE}:CLIP", f"own={HERE}:OWN"], environ)
    served_hooks.OWN = weir.Hook(served_hooks.watch, layers=[1], args={"w": torch.zeros(D), "n": 1})
    with serving(tmp_path, 2, vector_bytes=1024) as servers:
        for server in servers:
            asyncio.run(hooks.load_given(server, environ))
        one, two = (TestClient(app_of(server), headers=ADMIN) for server in servers)
        one.put("/v1/vectors/happy", json=[1.0] * D).raise_for_status()
        asked = [{"op": "hook", "name": "own", "args": {"w": "happy"}}]
        one.post("/v1/steering/modules/register", json={"name": "m", "interventions": asked}).raise_for_status()
        two.post("/v1/steering/set", json={"interventions": asked}).raise_for_status()
        one.put("/v1/vectors/happy", json=[2.0] * D).raise_for_status()
        for server in servers:
            server.frontend.names.refresh()
            _, sent = server.frontend.admit("r", {"weir": {"v": 1, "modules": ["m"]}}, [5] * 8, 8, 4)
            calls = [msgspec.msgpack.decode(call, type=Call) for call in sent.calls.values()]
            assert [np.frombuffer(call.args["w"][2], "<f4").tolist() for call in calls] == [[1.0] * D]
            assert calls[0].function.name == "OWN"
        for body, field in (
            ({"interventions": [{"op": "hook", "name": "clop"}]}, "interventions[0].name"),
            ({"interventions": [{"op": "hook", "name": "own", "source": "x"}]}, "interventions[0].source"),
            ({"interventions": asked * 40}, "name"),
        ):
            refused = two.post("/v1/steering/set", json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text
        kept = [{"op": "hook", "name": "own", "args": {"w": [1.0] * D}}]
        (told,) = one.get("/v1/steering").json()["interventions"]
        assert told.keys() == kept[0].keys() and told["args"]["w"]["shape"] == [D]
    del served_hooks.OWN


def view(values, saved=None):
    positions = {name: torch.arange(len(one)) for name, one in values.items()}
    return SimpleNamespace(values=lambda: HookValues(values, positions), saved=lambda: saved or {})


SAVED = {"row": torch.tensor([1.5, -2.0]), "ids": torch.arange(3), "on": torch.tensor(True), "text": "x", "n": [1, 2.5]}


@pytest.mark.parametrize("binary", [True, False])
def test_values_and_what_is_saved_through_json(binary):
    values = {"norm": torch.tensor([0.1, float("nan")]), "rows": torch.randn(2, 3, 4)}
    told = json.loads(json.dumps(ValueForm(binary, 1000).told(view(values, SAVED | {"raw": b"ab"})), allow_nan=False))
    assert ("b64" in told["values"]["rows"]) == binary
    back = hook_values_of(told["values"])
    assert torch.equal(back["rows"], values["rows"]) and back["norm"].isnan().tolist() == [False, True]
    assert back.positions["rows"].tolist() == [0, 1]
    saved = saved_of(told["saved"])
    assert all(
        torch.equal(saved[name], SAVED[name]) and saved[name].dtype == SAVED[name].dtype for name in ("row", "ids")
    )
    assert bool(saved["on"]) and saved["text"] == "x" and saved["n"] == [1, 2.5] and saved["raw"] == b"ab"
    choice = Choice()
    add_weir_fields(choice, {"weir": told})
    assert torch.equal(choice.values["rows"], values["rows"]) and choice.saved["text"] == "x"


def test_what_is_too_large_is_said_in_its_place():
    large = view({"rows": torch.zeros(100, 10)}), view({}, {"text": "x" * 4000}), view({}, {"n": list(range(500))})
    for one in large:
        told = ValueForm(False, 3999).told(one)
        assert told.keys() == {"values_error"} and "WEIR_SERVE_INLINE_BYTES" in told["values_error"]
        choice = Choice()
        add_weir_fields(choice, {"weir": told})
        for name in ("values", "saved"):
            with pytest.raises(WeirError, match="exceed the 3999"):
                getattr(choice, name)
    assert ValueForm(False, 4000).told(large[0]).keys() == {"values"}


@pytest.mark.parametrize(
    "wrong", [{"b64": "!", "dtype": "float32", "shape": [1]}, {"b64": "AAAA", "dtype": "nothing", "shape": [1]}]
)
def test_what_a_server_sends_is_checked(wrong):
    with pytest.raises(WeirError, match="cannot be read"):
        hook_values_of({"a": wrong | {"positions": [0]}})
