"""`weir serve demo`: the shipped model with all that comes with it, as the docs have readers start it."""

from __future__ import annotations

import contextlib
import subprocess

import httpx
import pytest

import vllm_weir as weir
from tests.engine.serving import API_KEY, WEIR, running
from tests.support.machine import engine_processes, needs

CLOSE_OTHERS = True
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs(engine_processes)]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "log"


@pytest.fixture(scope="module")
def server(log):
    with running(log, WEIR, "--enforce-eager", model="demo", args=["--host", "127.0.0.1"], forked=True) as client:
        yield client


def test_it_has_the_autoencoder_a_vector_and_a_probe(server):
    assert [one["id"] for one in server.get("/v1/models").json()["data"]] == ["demo"]
    for kind, name in (("saes", "demo"), ("vectors", "mood"), ("probes", "mood")):
        assert [one["name"] for one in server.get(f"/v1/{kind}").json()[kind]] == [name]
    with contextlib.closing(weir.Client(str(server.base_url), API_KEY)) as client:
        opening = "Anna took the boat out early that morning. In the end, Anna"
        steer = weir.Add("mood", layers=3, scale=-1.0)
        plain, sad = (
            client.generate(opening, max_tokens=14, temperature=0, interventions=moves, probes="mood")
            for moves in ([], steer)
        )
    assert "smiled" in plain.text and "wept" in sad.text
    ends = [float(out.scores["mood"][-1, 0]) for out in (plain, sad)]
    assert ends[0] > 0.5 > ends[1]


def test_it_says_where_its_page_is(server, log):
    url = str(server.base_url).rstrip("/")
    assert f"Weir's page: {url}/weir" in log.read_text()
    assert httpx.get(f"{url}/", follow_redirects=True).url.path == "/weir"


def test_a_port_in_use_and_a_wrong_path_are_one_line(server):
    port = str(server.base_url.port)
    for arguments, said in (
        (["demo", "--host", "127.0.0.1", "--port", port], f"--port: {port} is in use"),
        (["/nowhere/at/all"], "model: there is no folder /nowhere/at/all"),
        (["nowhere"], "nowhere"),
    ):
        done = subprocess.run([*WEIR, *arguments], capture_output=True, text=True, timeout=300)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "APIServer" not in line]  # not vLLM's log
        assert done.returncode == 2 and said in lines[-1] and len(lines) <= 2, (arguments, lines)
