"""Weir is imported in every process of vLLM's: quickly, with the standard library alone, and never silently off."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

import vllm_weir as weir
from tests.support.without import declared
from vllm_weir.cli import doctor
from vllm_weir.guard import refuse as guard
from vllm_weir.guard.import_hook import when_imported
from vllm_weir.patches.registry import PATCHES, PatchStatus
from vllm_weir.server import endpoint_plugin as endpoints

SRC = Path(weir.__file__).parents[1]
ALONE = (
    "vllm_weir.plugin",
    "vllm_weir.patches.registry",
    "vllm_weir.server.endpoint_plugin",
    "vllm_weir.cli.doctor",
    "vllm_weir.util.start_llm",
)


def run(code: str, *flags: str, **env: str) -> subprocess.CompletedProcess:
    """A program that has Weir's source and, with ``-S``, no installed package."""
    command = [sys.executable, *flags, "-c", f"import sys\nsys.path.insert(0, {str(SRC)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


def test_what_vllm_loads_imports_with_the_standard_library_alone():
    code = (
        f"import importlib, json\n[importlib.import_module(m) for m in {ALONE}]\nprint(json.dumps(sorted(sys.modules)))"
    )
    done = run(code, "-S", "-I")
    assert done.returncode == 0, done.stderr
    others = {name.partition(".")[0] for name in json.loads(done.stdout)} - sys.stdlib_module_names
    assert others <= {"vllm_weir", "__main__", "__mp_main__"}


def test_the_plugin_imports_nothing_that_is_installed():
    """Where everything is: a process of vLLM's that does not need Weir does not wait for it."""
    done = run("import json, vllm_weir.plugin\nprint(json.dumps(sorted(sys.modules)))")
    found = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not found & {"torch", "vllm", "pydantic", "typing_extensions", *declared()}


def test_every_public_name_is_there():
    assert set(weir.__all__) <= set(dir(weir))
    for name in weir.__all__:
        assert getattr(weir, name) is not None
    assert weir.list is weir.list_vectors
    space: dict = {}
    exec("from vllm_weir import *", space)
    assert set(weir.__all__) <= set(space)
    with pytest.raises(AttributeError, match="no attribute 'captures'"):
        _ = weir.captures
    with pytest.raises(ImportError, match="captures"):
        exec("from vllm_weir import captures", {})


@pytest.mark.parametrize("package", ["", "sae", "schema", "storage", "patches"])
def test_type_checkers_see_the_names_that_are_imported_late(package):
    """From the modules that they come from."""
    tree = ast.parse((SRC / "vllm_weir" / package / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (alias.asname or alias.name): f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    module = __import__(f"vllm_weir.{package}".rstrip("."), fromlist=["__all__"])
    assert set(seen) | {"__version__"} == set(module.__all__) | {"__version__"}
    for name, place in seen.items():
        source, _, there = place.partition(":")
        assert getattr(module, name) is getattr(__import__(source, fromlist=[there]), there)


def test_every_patch_point_that_takes_requests_is_guarded():
    """The guard's places are the table's, and its wrappers named as the table's are."""
    guards = {path: make.__name__ for path, make in guard.GUARDS.items()}
    named = {s.path: (s.wrapper or "").partition(":")[2] for s in PATCHES}
    assert guards == {path: name for path, name in named.items() if name in set(guards.values())}
    assert {s.path for s in PATCHES if s.guard} == {guard.REQUESTS} <= set(guards)


@pytest.mark.parametrize(
    ("e", "said"),
    [
        (ModuleNotFoundError("No module named 'zmq.asyncio'", name="zmq.asyncio"), "(pip install pyzmq)"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), "(pip install rich)"),
        (
            ModuleNotFoundError("No module named 'vllm_weir.messages'", name="vllm_weir.messages"),
            "--force-reinstall vllm-weir",
        ),
        (ModuleNotFoundError("No module named 'vllm.v2'", name="vllm.v2"), "`weir doctor`"),
        (ImportError("libzstd.so.1: cannot open"), "`weir doctor`"),
        (ZeroDivisionError("division by zero"), "`weir doctor`"),
    ],
)
def test_the_cause_says_what_to_do(e, said):
    cause = guard.cause_of(e)
    assert cause.startswith(f"Weir could not load: {type(e).__name__}: {e}; ") and said in cause


def test_a_failure_over_http_is_one_over_http_alone():
    serving = next(s for s in PATCHES if s.serving)
    status = PatchStatus(active=True)
    status.fail(serving, ImportError("x"))
    assert status.refusal is None and "ImportError: x" in (status.serving_refusal or "")
    status.fail(next(s for s in PATCHES if not s.serving), ImportError("y"))
    assert "ImportError: y" in (status.refusal or "") and status.serving_refusal == status.refusal


@pytest.mark.parametrize(
    ("named", "left"), [(None, False), ("weir", False), ("a,weir", False), ("", True), ("a", True)]
)
def test_a_plugin_that_is_left_out_is_told_of(monkeypatch, named, left):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    assert ("VLLM_PLUGINS" in guard.NOT_LOADED.refusal) == left == (guard.left_out() is not None)
    assert guard.NOT_LOADED.serving_refusal == guard.NOT_LOADED.refusal


def test_a_module_whose_callback_raises_cannot_be_imported_at_the_second_attempt_either(tmp_path, monkeypatch):
    """Otherwise who tries again has the module, without what was to be done to it."""
    (tmp_path / "weir_hooked.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    done: list[str] = []

    def refuse(module: ModuleType) -> None:
        done.append(module.__name__)
        if len(done) < 6:
            raise RuntimeError("no")

    when_imported("weir_hooked", lambda module: done.append("first"))
    when_imported("weir_hooked", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            import weir_hooked
    done += ["", ""]
    import weir_hooked

    assert weir_hooked.x == 1 and done[-2:] == ["first", "weir_hooked"]
    sys.modules.pop("weir_hooked")


def test_a_module_that_imports_the_caller_is_caught_up_with(tmp_path, monkeypatch):
    """Its execution has begun: nothing can be hooked into it any more."""
    (tmp_path / "weir_begun.py").write_text("import weir_asks\nx = 1")
    (tmp_path / "weir_asks.py").write_text(
        "from vllm_weir.guard.import_hook import when_imported\n"
        "seen = []\nwhen_imported('weir_begun', lambda module: seen.append(module.x))"
    )
    (tmp_path / "weir_next.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import weir_begun  # isort: skip
    import weir_asks
    import weir_next

    assert weir_asks.seen == [1]
    for module in (weir_asks, weir_begun, weir_next):
        sys.modules.pop(module.__name__)


def without_zstandard(*_):
    raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")


def test_where_routes_cannot_be_loaded_they_say_why(monkeypatch):
    app = FastAPI()
    monkeypatch.delenv("WEIR_DISABLE", raising=False)
    monkeypatch.setattr(endpoints, "load_route_modules", without_zstandard)
    plugin = endpoints.Endpoints()
    plugin.attach_router(app)

    async def ask():
        state = SimpleNamespace()
        await plugin.init_state(object(), state, SimpleNamespace())
        assert "pip install zstandard" in state.weir_refusal
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weir") as client:
            for asked in ("GET /v1/weir/info", "POST /v1/steering/set", "GET /v1/steering", "GET /weir"):
                got = await client.request(*asked.split())
                assert got.status_code == 503 and "pip install zstandard" in got.json()["error"]["message"]
            assert (await client.get("/v1/models")).status_code == 404

    asyncio.run(ask())


def test_every_route_is_under_a_prefix_that_the_refusals_have():
    app = FastAPI()
    for module in endpoints.load_route_modules():
        app.include_router(module.router())
    paths = [*app.openapi()["paths"], "/weir", "/weir/weir.js"]
    assert len(paths) > 10
    for path in paths:
        assert any(path == p or path.startswith(f"{p}/") for p in endpoints.PREFIXES), path


def test_an_engine_that_weir_does_not_serve_leaves_the_server_running(monkeypatch):
    monkeypatch.delenv("WEIR_DISABLE", raising=False)
    state = SimpleNamespace()
    asyncio.run(endpoints.Endpoints().init_state(SimpleNamespace(), state, SimpleNamespace()))
    assert state.weir_refusal and not hasattr(state, "weir")


def test_weir_serve_does_not_start_without_its_routes(monkeypatch):
    from vllm_weir.cli import serve as command

    monkeypatch.setattr(command, "load_route_modules", without_zstandard)
    monkeypatch.setattr(command, "prepare", lambda arguments, environ: arguments)
    with pytest.raises(weir.WeirError, match=r"pip install zstandard"):
        command.serve(["m"])


WITHOUT = """
from tests.support.without import block
block({!r})
sys.argv = ["weir", "sites", "m"]
import vllm_weir.cli.main
vllm_weir.cli.main.app()
"""


@pytest.mark.parametrize("module", ["rich", "typer", "pydantic"])
def test_a_command_that_cannot_run_says_why(module):
    done = run(WITHOUT.format(module), PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr
    assert f"No module named '{module}'; install it (pip install {module})" in done.stderr


@pytest.fixture
def quick(monkeypatch):
    """The doctor, without vLLM's modules."""
    from vllm_weir.patches import registry

    monkeypatch.setattr(registry, "verify", list)
    monkeypatch.setattr(registry, "unloadable", lambda: ["Weir could not load: X"])
    for name in ("WEIR_DISABLE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def test_the_doctor_says_what_is_missing(quick, monkeypatch):
    real = importlib.import_module

    def without(name, *rest):
        return without_zstandard() if name == "zstandard" else real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    found = doctor.examine()
    assert not found.healthy and not found.self_test
    assert any("install it (pip install zstandard)" in p for p in found.problems)
    assert "Weir could not load: X" in found.problems
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert any("VLLM_PLUGINS is 'another'" in p for p in doctor.examine(live=False).problems)


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_the_doctor_speaks_without_what_the_command_is_made_of(quick, capsys, arguments):
    assert doctor.cannot_run(arguments, ModuleNotFoundError("No module named 'typer'", name="typer")) == 1
    said = capsys.readouterr().out
    if "--json" in arguments:
        found = json.loads(said)
        assert not found["healthy"] and any("pip install typer" in problem for problem in found["problems"])
    else:
        assert "problem: Weir could not load: ModuleNotFoundError: No module named 'typer'" in said
        assert said.startswith("not healthy\nproblem: ")


def test_params_are_refused_where_nothing_guards_them(monkeypatch):
    """A vLLM without the guard's place, which has not loaded Weir: an engine would run what they ask unheeded."""
    found = ModuleType("vllm.v1.engine.output_processor")
    monkeypatch.setattr(guard.NOT_LOADED, "unguarded", None, raising=False)
    guard._apply(guard.REQUESTS, guard.NOT_LOADED, found)
    with pytest.raises(weir.WeirError, match=r"cannot guard this vLLM: .*OutputProcessor\.add_request"):
        weir.params(SimpleNamespace(extra_args=None), capture=weir.Capture())
    with pytest.raises(RuntimeError, match="off for a test"):
        guard._apply(guard.REQUESTS, guard.Failed("off for a test"), found)


def test_workers_without_weir_are_the_reason_of_every_refusal():
    engine = importlib.import_module("vllm_weir.patches.frontend")

    async def collective_rpc(method):
        raise AttributeError(f"'Worker' object has no attribute '{method}'")

    known = SimpleNamespace(capabilities=None, refusal=None)
    frontend = SimpleNamespace(engine=known, learn=None)
    client = SimpleNamespace(output_processor=SimpleNamespace(_weir_frontend=frontend), collective_rpc=collective_rpc)
    asyncio.run(engine.ask_workers(client))
    assert "no attribute 'weir_report'" in known.refusal and "is vllm-weir installed where they run" in known.refusal


def test_a_request_that_the_core_cannot_serve_says_so_to_the_workers():
    from vllm_weir.patches import scheduler as core
    from vllm_weir.schema.engine_spec import EngineRequest

    seen = []
    for refusal, said in ((None, False), ("patch point gone", True)):
        engine_request = EngineRequest(b"", "", core_refusal="not there")
        request = SimpleNamespace(request_id="r", sampling_params=SimpleNamespace(extra_args={"weir": engine_request}))
        assert "not there" in engine_request.refusal
        config = SimpleNamespace()
        scheduler = type("S", (), {"vllm_config": config})()
        core._states[scheduler] = SimpleNamespace(schedule=lambda s, r: seen.append(r))
        core.scheduler_add_request(None, SimpleNamespace(refusal=refusal))(scheduler, request)
        assert bool(engine_request.refusal) == said
    assert len(seen) == 2
