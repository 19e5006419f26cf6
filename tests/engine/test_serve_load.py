"""A server in trouble: a process of it is killed, readers stall, it sleeps and wakes, one request fills a table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.engine.serve_cases import PROMPTS, D
from tests.engine.serving import ADMIN_KEY, COMPLETIONS, WEIR, Server, body, post, running
from tests.support.machine import engine_processes, needs
from tests.support.measure import eventually
from tests.support.zygote import forking

pytestmark = [pytest.mark.engine, pytest.mark.thorough, pytest.mark.timeout(1500), needs(engine_processes)]
CLOSE_OTHERS = True

ROWS = 32
"""Of the device's table of vectors."""
CAPTURE = {"hook": "resid_post", "layers": [1, 3], "positions": "all"}
ASKED = {"v": 1, "capture": [CAPTURE], "response": {"inline_bytes": 8 << 20}}
rng = np.random.default_rng(0)


def full(rows: int = ROWS) -> dict[str, Any]:
    """A request whose vectors fill the table, each for one position."""
    vectors = rng.normal(size=(rows, D)).astype(np.float32)
    steer = {"op": "add", "vector": vectors.tolist(), "layers": [2], "positions": list(range(rows))}
    return body(max_tokens=60, weir=ASKED | {"interventions": [steer]})


def small(k: int) -> dict[str, Any]:
    steer = {"op": "add", "vector": (2 * rng.normal(size=D)).tolist(), "layers": [k % 3]}
    return body(prompt=PROMPTS[k % 2], max_tokens=20, weir=ASKED | {"interventions": [steer]})


def told(server: Server, asked: dict[str, Any]) -> tuple[str, Any, Any]:
    """An answer's text, and what its receipt says was captured and steered."""
    got = server.http.post(COMPLETIONS, json=asked)
    assert got.status_code == 200, got.text[:2000]
    (choice,) = got.json()["choices"]
    receipt = choice.get("weir", {}).get("receipt", {})
    return choice["text"], receipt.get("captured"), [sorted(one) for one in receipt.get("steered", ())]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    env = {"VLLM_SERVER_DEV_MODE": "1", "WEIR_SERVE_DIRECTORY": str(folder), "WEIR_ADMIN_KEY": ADMIN_KEY}
    more = ["--additional-config", json.dumps({"weir": {"vector_bytes": ROWS * D * 4}})]
    more += ["--middleware", "tests.engine.serve_probe.Held"]
    with running(folder / "log", WEIR, *more, env=env, forked=True) as http:
        yield Server(http, folder)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").check_nothing_held()


def test_one_request_that_fills_the_table_of_vectors(server):
    """Others that need it wait, plain ones do not; each gets what it gets alone."""
    asked = [full(), small(0), body(max_tokens=20), full(), small(1), body(max_tokens=20, prompt=PROMPTS[1])]
    alone = [told(server, one) for one in asked]
    with ThreadPoolExecutor(3 * len(asked)) as pool:
        assert list(pool.map(lambda one: told(server, one), asked * 3)) == alone * 3
    assert "vector_bytes" in post(server.http, code=400, **full(ROWS + 1))["error"]["message"]


def under_way(server: Server, pool: ThreadPoolExecutor, ask: Callable[[Any], Any], asked: list[Any]) -> list[Future]:
    """Answers to requests of which the engine has some now; all are asked again where it was done before one looked."""
    answers: list[Future] = []

    def seen() -> bool:
        if all(answer.done() for answer in answers):
            answers.extend(pool.submit(ask, one) for one in asked)
        return server.held()["requests"] > 0

    eventually(seen, True, 30)
    return answers


def test_sleep_and_wake_under_load(server):
    """What is kept goes on where it was; what is aborted ends, and leaves nothing."""
    asked = [small(k) | {"max_tokens": 150} for k in range(4)]
    alone = [told(server, one) for one in asked]

    def sleep(mode: str) -> None:
        assert server.http.post("/sleep", params={"level": 0, "mode": mode}).status_code == 200
        assert server.http.get("/is_sleeping").json()["is_sleeping"]
        assert server.http.post("/wake_up", params={"tags": "scheduling"}).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        answers = under_way(server, pool, lambda one: told(server, one), asked * 2)
        for _ in range(5):
            sleep("keep")
        assert [answer.result() for answer in answers] == alone * (len(answers) // 4)
        stream = lambda one: server.http.post(COMPLETIONS, json=one | {"stream": True})
        streams = under_way(server, pool, stream, asked)
        sleep("abort")
        for answer in streams:
            assert "[DONE]" in answer.result().text
    assert told(server, asked[0]) == alone[0]


def stalled(server: Server, method: str, path: str, asked: Any = None) -> socket.socket:
    """A client that sends a request and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((server.http.base_url.host, server.http.base_url.port))
    content = b"" if asked is None else json.dumps(asked).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {server.http.headers['Authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


def own_memory(server: Server) -> int:
    """Bytes of all its processes that they share with none: buffers for rows fill up as they are used."""
    listens = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == server.http.base_url.port}
    roots = [psutil.Process(pid) for pid in listens - {None, os.getpid()}]
    processes = {*roots, *(child for root in roots for child in root.children(True))}
    return sum((used := process.memory_info()).rss - used.shared for process in processes)


def test_readers_that_stall(server):
    """They hold what is theirs; others are served, and everything is freed when they go."""
    response = {"inline_bytes": 8 << 20, "stream": True}
    every = {"v": 1, "capture": [{"hook": "resid_post", "positions": "all"}], "response": response}
    asked = body(max_tokens=200, stream=True, n=2, temperature=1.0, weir=every)
    by_reference = every | {"response": {"inline_bytes": 0}}
    kept = post(server.http, max_tokens=200, weir=by_reference)["choices"][0]["weir"]["activations"]
    alone = told(server, small(0))

    def stall() -> int:
        socks = [stalled(server, "POST", COMPLETIONS, asked) for _ in range(8)]
        socks += [stalled(server, "GET", kept["url"]) for _ in range(8)]
        eventually(lambda: server.http.get("/health").status_code, 200, 5)
        assert told(server, small(0))[1:] == alone[1:]
        eventually(lambda: server.held()["requests"], 0, 120)
        for sock in socks:
            sock.close()
        eventually(lambda: server.held()["store"], 0, 30)
        return own_memory(server)

    # Eight answers of a round have more than 2 x 8 x 1.2 MB of rows. Allocators keep what they please for some rounds,
    # but where rows stay, no two rounds one after the other add less than one round's.
    held = [stall(), stall(), stall()]
    while held[-1] - held[-3] >= 19 << 20:
        assert len(held) < 12, held
        held.append(stall())
    assert server.http.delete(kept["url"]).status_code == 204


def started(log: Path) -> set[int]:
    return set(map(int, re.findall(r"Started server process \[(\d+)\]", log.read_text())))


def test_one_api_process_of_several_is_killed(tmp_path):
    """vLLM ends the others then; all that they shared goes, and the next server starts clean."""
    log, env = tmp_path / "log", {"WEIR_SERVE_DIRECTORY": str(tmp_path)} | forking()
    before = set(os.listdir("/dev/shm"))
    with (
        contextlib.suppress(httpx.TransportError),
        running(log, WEIR, "--api-server-count", "2", env=env | {"VLLM_LOGGING_LEVEL": "INFO"}) as client,
    ):
        post(client, weir={"v": 1, "capture": [CAPTURE], "response": {"inline_bytes": 0}})
        eventually(lambda: len(started(log)), 2, 60)
        pids = sorted(started(log))
        (parent,) = {psutil.Process(pid).parent() for pid in pids}
        many = body(prompt=[PROMPTS[0]] * 16, max_tokens=200, stream=True, weir=ASKED)
        with client.stream("POST", COMPLETIONS, json=many) as got:
            next(lines := got.iter_lines())
            os.kill(pids[0], signal.SIGKILL)
            for _ in lines:
                pass
    eventually(lambda: [pid for pid in pids if psutil.pid_exists(pid)], [], 60)
    eventually(lambda: list(tmp_path.glob("weir-serve-*")), [], 60)
    eventually(lambda: not parent.is_running() or parent.status() == psutil.STATUS_ZOMBIE, True, 120)
    assert {name for name in set(os.listdir("/dev/shm")) - before if "weir" in name} == set()
