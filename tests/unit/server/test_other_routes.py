"""Routes whose answers have no room for Weir's: what they cannot do is refused, and names the field."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from vllm_weir import WeirError
from vllm_weir.patches import server
from vllm_weir.server import context

WISH = {"v": 1, "capture": [{"hook": "resid_post"}]}


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"apply_hooks": "[]"}, "apply_hooks"),
        ({"weir": WISH}, "capture"),
        ({"output_residual_stream": True}, "output_residual_stream"),
        ({"weir": {"v": 1, "captures": []}}, "weir.captures"),
    ],
)
def test_what_would_be_dropped_is_refused(extra, field):
    with pytest.raises(WeirError) as caught:
        context.check_answered(SimpleNamespace(extra_args=extra))
    assert caught.value.field == field


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"apply_hooks": None}])
def test_what_asks_for_no_rows_goes_on(extra):
    context.check_answered(SimpleNamespace(extra_args=extra))


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
