"""Weir's routes on an app without an engine: bodies, keys, ids, ranges, and patch points that this vLLM lacks."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import httpx
import pytest
import torch
from fastapi import Body, Depends, FastAPI

from vllm_weir import api
from vllm_weir.compat.vllm_lens.tensors import zstd_frame
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.patches import registry
from vllm_weir.patches.registry import PATCHES, PatchStatus
from vllm_weir.results.activations import Activations
from vllm_weir.schema.hooks import Site
from vllm_weir.server.errors import weir_error
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.routes import activations, info
from vllm_weir.server.routes.router import BodyLimit, require_admin
from vllm_weir.server.shared.result_files import ResultFiles, frame_key
from vllm_weir.util.shipped import demo_model

SITE = Site("resid_post", 1)


@pytest.fixture
def app(tmp_path):
    app = FastAPI()
    app.include_router(activations.router())
    app.add_middleware(BodyLimit, max_bytes=1000)
    app.add_exception_handler(WeirError, weir_error)
    app.state.weir = SimpleNamespace(spool=ResultFiles(tmp_path, 1 << 20, 60.0), admin_key="sesame")

    @app.post("/echo")
    async def echo(body: Annotated[dict, Body()]) -> int:
        return len(body)

    @app.post("/refuse")
    async def refuse() -> None:
        raise WeirError("no", "a.b")

    @app.post("/admin", dependencies=[Depends(require_admin)])
    async def admin() -> str:
        return "done"

    return app


def call(app, method, path, **how):
    async def go():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **how)

    return asyncio.run(go())


def put(app):
    at = torch.arange(5)
    acts = Activations({SITE: torch.randn(5, 16)}, {SITE: at}, {SITE: at})
    return acts, app.state.weir.spool.put(acts, 5 * 64)


def test_rows_are_fetched_whole_in_ranges_and_freed(app, tmp_path):
    acts, key = put(app)
    url = f"/v1/activations/{key}"
    whole = call(app, "GET", url)
    assert whole.status_code == 200 and whole.headers["accept-ranges"] == "bytes"
    (tmp_path / "x").write_bytes(whole.content)
    assert torch.equal(Activations.load(tmp_path / "x")[SITE], acts[SITE])
    part = call(app, "GET", url, headers={"Range": "bytes=8-19"})
    assert part.status_code == 206 and part.content == whole.content[8:20]
    assert part.headers["content-range"] == f"bytes 8-19/{len(whole.content)}"
    beyond = call(app, "GET", url, headers={"Range": "bytes=999999-"})
    assert beyond.status_code == 416 and beyond.headers["content-range"] == f"bytes */{len(whole.content)}"
    assert str(len(whole.content)) in beyond.json()["error"]["message"]
    for several in ("bytes=0-3,8-11", "bytes=-4", "bytes=8-", " bytes=0-0"):
        assert call(app, "GET", url, headers={"Range": several}).status_code == 206, several
    for none in ("bytes=abc", "items=0-5", "bytes=5-2", "bytes=", "bytes=-", "bytes", "bytes=0-1,x", "x" * 999):
        ignored = call(app, "GET", url, headers={"Range": none})
        assert ignored.status_code == 200 and ignored.content == whole.content, none
    assert call(app, "DELETE", url).status_code == 204
    for method in ("GET", "DELETE"):
        gone = call(app, method, url)
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "id"


def test_a_frame_is_fetched_as_it_is_in_ranges_and_freed(app):
    """Its id says what it holds; a wrong one of the same random part finds nothing."""
    spool, tensor = app.state.weir.spool, torch.randn(2, 5, 4, 8)
    key, (frame, _) = frame_key(tensor), zstd_frame(tensor)
    other = put(app)[1]
    spool.put_frame(key, frame, [other])
    assert len(spool) == 2 and spool.open(other).close() is None
    url = f"/v1/activations/{key}"
    whole = call(app, "GET", url)
    assert whole.content == frame and int(whole.headers["content-length"]) == len(frame)
    assert json.loads(whole.headers["x-vllm-lens-shape"]) == [2, 5, 4, 8]
    assert whole.headers["x-vllm-lens-original-dtype"] == "torch.float32" and "x-vllm-lens-dtype" in whole.headers
    assert call(app, "GET", url, headers={"Range": "bytes=2-5"}).content == frame[2:6]
    for wrong in (
        key[:32],
        f"{key[:32]}-float16-2x5x4x8",
        f"{key[:-1]}9",
        f"{key}x",
        f"{key}.zst",
        f"{key}%2f..%2f{other}",
    ):
        assert call(app, "GET", f"/v1/activations/{wrong}").status_code == 404, wrong
    spool.sweep()
    assert call(app, "DELETE", url).status_code == 204 and call(app, "GET", url).status_code == 404
    assert "x-vllm-lens-shape" not in call(app, "GET", f"/v1/activations/{other}").headers


def test_what_is_no_id_is_not_found(app):
    for key in ("x", "..%2f..%2fetc%2fpasswd", "%00", "A" * 32, "a" * 5000, "%2e%2e"):
        for method in ("GET", "DELETE"):
            assert call(app, method, f"/v1/activations/{key}").status_code == 404


def test_no_file_stays_open(app):
    _, key = put(app)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        call(app, "GET", f"/v1/activations/{key}")
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_large_body_is_refused_before_it_is_read(app):
    told = call(app, "POST", "/echo", json={"x": "y" * 2000})
    assert told.status_code == 413 and told.json()["error"]["code"] == 413
    read = 0

    async def drip():
        nonlocal read
        for _ in range(1000):
            read += 100
            yield b" " * 100

    assert call(app, "POST", "/echo", content=drip()).status_code == 413
    assert read <= 2000
    assert call(app, "POST", "/echo", headers={"Content-Length": "9" * 5000}).status_code == 413
    assert call(app, "POST", "/echo", json={"x": 1}).json() == 1
    lying = {"Content-Length": "10", "Transfer-Encoding": "chunked"}  # the encoding says where the body ends
    read = 0
    assert call(app, "POST", "/echo", headers=lying, content=drip()).status_code == 413 and read <= 2000


@pytest.mark.parametrize(
    ("headers", "code", "why"),
    [
        ({}, 401, ""),
        ({"Authorization": "Basic sesame"}, 401, ""),
        ({"X-Weir-Admin-Key": "wrong"}, 401, "wrong"),
        ({"X-Weir-Admin-Key": ""}, 401, ""),
        ({"Authorization": "Bearer sesam"}, 401, "missing"),
        ({"Authorization": "Bearer api-key"}, 401, "missing"),
        ({"Authorization": "Bearer api-key", "X-Weir-Admin-Key": "api-key"}, 401, "wrong"),
        ({"X-Weir-Admin-Key": "sesame"}, 200, ""),
        ({"Authorization": "bearer sesame"}, 200, ""),
        ({"Authorization": "Bearer api-key", "X-Weir-Admin-Key": "sesame"}, 200, ""),
    ],
)
def test_admin(app, headers, code, why):
    """A key that is missing is not called wrong."""
    got = call(app, "POST", "/admin", headers=headers)
    assert got.status_code == code and why in got.text
    assert not why or {"missing": "wrong", "wrong": "missing"}[why] not in got.text
    assert why != "missing" or "X-Weir-Admin-Key" in got.text


@pytest.mark.parametrize("key", [None, ""])
def test_without_an_admin_key_nobody_is_admin(app, key):
    app.state.weir.admin_key = key
    got = call(app, "POST", "/admin", headers={"X-Weir-Admin-Key": ""})
    assert got.status_code == 403 and "WEIR_ADMIN_KEY" in got.text


def test_errors_of_a_server(app):
    """What Weir refuses names its field; a server where Weir did not start says so; the schema declares them."""
    got = call(app, "POST", "/refuse")
    assert got.status_code == 400
    assert got.json() == {"error": {"message": "a.b: no", "type": "BadRequestError", "param": "a.b", "code": 400}}
    app.state.weir = None
    assert call(app, "GET", f"/v1/activations/{'a' * 32}").status_code == 503
    paths = app.openapi()["paths"]["/v1/activations/{id}"]
    assert {"200", "206", "401", "404"} <= set(paths["get"]["responses"])
    assert {"204", "404"} <= set(paths["delete"]["responses"])


def test_a_route_that_this_vllm_does_not_have_is_no_missing_patch_point(monkeypatch):
    recent = tuple(patch for patch in PATCHES if patch.recent)
    modules = {patch.module for patch in recent}
    exists = registry._module_exists
    monkeypatch.setattr(registry, "_module_exists", lambda name: name not in modules and exists(name))
    monkeypatch.setattr(registry, "when_imported", lambda name, hold: None)
    assert registry.install(active=True).serving_refusal is None and len(modules) == 7
    monkeypatch.setattr(registry, "PATCHES", recent)  # to look at the others is to import all of vLLM
    assert {why for _, why in registry.verify()} == {""}


def test_a_missing_serving_patch_point_refuses_over_http_only():
    status = PatchStatus(active=True)
    patch = next(p for p in PATCHES if p.serving)
    status.note(patch, "gone")
    assert status.refusal is None
    assert re.search(r"could not patch .* \(gone\)", status.serving_refusal or "")
    status = PatchStatus(active=True)
    status.note(next(s for s in PATCHES if not s.serving), "gone")
    assert status.refusal and status.serving_refusal == status.refusal
    assert PatchStatus(active=False).serving_refusal


def info_of(monkeypatch, facts, model="m"):
    """What the route tells of an engine with these capabilities."""

    async def sites_async(engine):
        return api._verdicts(facts)

    monkeypatch.setattr("vllm_weir.sites_async", sites_async, raising=False)
    frontend = SimpleNamespace(model=model, engine=SimpleNamespace(require_capabilities=lambda: facts))
    app = FastAPI()
    app.include_router(info.router())
    app.state.weir = SimpleNamespace(engine_client=None, frontend=frontend, limits=ServerLimits(), admin_key=None)
    return call(app, "GET", "/v1/weir/info").json()


def test_the_server_says_the_shape_of_each_row(monkeypatch):
    """And of `weir.sites`, which it asks: none for points that are refused, 0 for the number of keys."""
    sites = {
        Site("resid_post", 0): "",
        Site("z", 0): "",
        Site("z", 1): "no attention",
        Site("pattern", 0): "",
        Site("mlp_post", 0): "",
    }
    shapes = {Site("z", 0): (4, 2), Site("z", 1): (4, 2), Site("pattern", 0): (4, 0), Site("mlp_post", 0): (24,)}
    facts = EngineCapabilities(sites, 2, 8, "float32", 100, shapes)

    found = {(s["hook"], s["layer"]): s for s in info_of(monkeypatch, facts)["sites"]}
    assert {site: s["shape"] for site, s in found.items()} == {
        ("resid_post", 0): [8],
        ("z", 0): [4, 2],
        ("z", 1): [],
        ("pattern", 0): [4, 0],
        ("mlp_post", 0): [24],
    }
    assert not found["z", 1]["served"] and found["z", 1]["why"] == "no attention"


def test_messages_for_the_shipped_model_are_in_words_that_it_knows(monkeypatch):
    facts = EngineCapabilities({}, 2, 8, "float32", 100, {})
    asked = [info_of(monkeypatch, facts, model)["examples"] for model in ("m", demo_model())]
    words = json.loads(Path(demo_model(), "tokenizer.json").read_text())["model"]["vocab"]
    tokens = {token for text in asked[1] for token in re.findall(r"^\w+| \w+|[.]", text)}
    assert asked[0] == [] and len(asked[1]) >= 3 and tokens <= set(words), tokens - set(words)
