"""Schemathesis over Weir's routes: no answer is a server error, and all are as the OpenAPI page says."""

from __future__ import annotations

import os

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.properties import examples
from tests.unit.admin_app import ADMIN, Server, app_of


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("serve"), os.getpid() + (1 << 23))
    try:
        yield schemathesis.openapi.from_asgi("/openapi.json", app_of(server))
    finally:
        server.directory.close()


HEADERS = [ADMIN, {"Authorization": "Bearer wrong"}, {}]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_declared(routes, mode):
    tried = 0
    for found in routes.get_all_operations():
        operation = found.ok()
        calls = []

        @examples(settings().max_examples // 5, *HealthCheck)
        @given(case=operation.as_strategy(generation_mode=mode), headers=st.sampled_from(HEADERS))
        def answered(case, headers):
            response = case.call(headers=headers)
            calls.append(response.status_code)  # noqa: B023
            assert response.status_code < 500, response.text
            case.validate_response(response, checks=CHECKS)

        try:
            answered()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing about it can be wrong
        tried += bool(calls)
    assert tried >= 10 if mode is GenerationMode.POSITIVE else tried >= 5


def test_the_page_declares_every_error(routes):
    """Bodies and errors are typed, and every route that changes something says that it needs a key."""
    paths = routes.raw_schema["paths"]
    changing = {("post", p) for p in paths if "/steering" in p} | {("put", "/v1/vectors/{name}")}
    for path, operations in paths.items():
        for method, operation in operations.items():
            codes = set(operation["responses"])
            assert codes & {"200", "204"}, path
            if (method, path) in changing:
                assert {"400", "401", "403", "413", "507"} <= codes and "requestBody" in operation, path
            for code in codes - {"200", "204", "206", "422"}:
                body = operation["responses"][code]["content"]["application/json"]["schema"]["$ref"]
                assert body.endswith("/ErrorBody"), (path, code)


def test_examples_of_the_page_are_served(tmp_path):
    """What the page shows is taken, but for its width."""
    server = Server(tmp_path, os.getpid() + (1 << 24))
    try:
        client = TestClient(app_of(server), headers=HEADERS[0])
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        for name, path in (("SetSteering", "set"), ("RegisterModule", "modules/register"), ("ClearSteering", "clear")):
            (example,) = schemas[name]["examples"]
            answer = client.post(f"/v1/steering/{path}", json=example)
            assert answer.status_code == 200 or "width" in answer.json()["error"]["message"], answer.text
    finally:
        server.directory.close()
