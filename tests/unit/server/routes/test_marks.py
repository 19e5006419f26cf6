"""`POST /v1/marks` where the rows may be in another process: whose word counts, and what is said when one is silent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from tests.unit.admin_app import app_of, serving
from vllm_weir.server.errors import PeerUnanswered

NOBODY = {"known": False, "sinks": [], "gone": []}
GONE = {"known": False, "sinks": [], "gone": ["request 'cmpl-1-0' was marked already"]}
HERE = {"known": True, "sinks": [{"sink": "archive", "state": "written"}], "gone": []}


def told(tmp_path, ask):
    """What a process that knows nothing of a request answers."""
    with serving(tmp_path) as (server,):
        server.peers = SimpleNamespace(ask=ask)
        return TestClient(app_of(server)).post("/v1/marks", json={"id": "cmpl-1", "metadata": {"x": 1}})


@pytest.mark.parametrize(
    ("others", "code", "what"),
    [
        ([], 404, "no request 'cmpl-1'"),
        ([NOBODY, NOBODY], 404, "no request 'cmpl-1'"),
        ([NOBODY, GONE], 404, "was marked already"),
        ([GONE, HERE, NOBODY], 200, "written"),
    ],
)
def test_the_process_that_knows_it_is_believed(tmp_path, others, code, what):
    asked = []

    async def ask(question, _seconds):
        asked.append(question)
        return others

    answer = told(tmp_path, ask)
    assert answer.status_code == code and what in answer.text
    assert asked == [{"id": "cmpl-1", "metadata": {"x": 1}}]


def test_a_process_that_does_not_answer_is_the_server_s_fault(tmp_path):
    async def ask(_question, _seconds):
        raise PeerUnanswered("one of the server's processes is too busy to answer; send it again")

    answer = told(tmp_path, ask)
    assert answer.status_code == 500 and "send it again" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "code", "field"),
    [
        ({"id": "cmpl-nobody"}, 404, "id"),
        ({"id": "cmpl-nobody", "metadata": {"x": float("nan")}}, 400, "metadata"),
        ({"id": "cmpl-nobody", "metadata": {"x": "y" * (65 << 10)}}, 400, "metadata"),
        ({"id": ""}, 400, None),
        ({"metadata": {}}, 400, None),
        ({"id": "x", "sink": "/tmp"}, 400, None),
        ({"id": "x", "metadata": []}, 400, None),
    ],
)
def test_marks_that_are_refused(tmp_path, asked, code, field):
    with serving(tmp_path) as (server,):
        client = TestClient(app_of(server))
        got = client.post("/v1/marks", content=json.dumps(asked), headers={"Content-Type": "application/json"})
    assert got.status_code == code, got.text
    assert field is None or got.json()["error"]["param"] == field
