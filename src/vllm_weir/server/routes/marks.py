"""The route for marks, which send rows captured with ``keep="marked"`` to their sink."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.frontend.sinks.manager import SinkManager
from vllm_weir.schema.fields import dumps
from vllm_weir.server.errors import declared, error
from vllm_weir.server.routes.router import State, weir_router

SINK_TIMEOUT = 10.0
"""Seconds for which a response waits for the sinks, which continue after it."""
MAX_METADATA = 64 << 10
"""The most bytes of a mark's metadata, as JSON."""


class Mark(BaseModel):
    """A mark of a finished or running request."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"id": "cmpl-8d2f", "metadata": {"reason": "odd"}}]}
    )

    id: str = Field(min_length=1, max_length=512, description="The response's `id`; all its sequences are marked.")
    metadata: dict[str, Any] = Field({}, description="Kept with the rows; up to 64 KiB as JSON.")


class Written(BaseModel):
    """One sequence's rows at one sink; `state` is as in a receipt."""

    sink: str
    state: str


class Marked(BaseModel):
    """What was marked.

    `sinks` has the sequences that have finished; the rows of others are written when they finish.
    `gone` gives the reasons why rows could not be marked.
    """

    id: str
    sinks: list[Written]
    gone: list[str] = []


def router() -> APIRouter:
    """Return the route POST /v1/marks."""
    routes = weir_router()

    @routes.post(
        "/v1/marks",
        response_model=Marked,
        responses=declared(400, 401, 404, 413, 500),
        summary='Have the rows of a request written that were captured with `"keep": "marked"`',
    )
    async def mark(body: Mark, state: State) -> Marked | Response:
        size = len(dumps(body.metadata, "metadata"))
        if size > MAX_METADATA:
            raise WeirError(f"is {size} bytes of JSON; at most {MAX_METADATA} are kept", "metadata")
        question = body.model_dump()
        answer = await answer_here(state.frontend.manager, question)
        if not answer["known"] and state.peers is not None:
            others = await state.peers.ask(question, 2 * SINK_TIMEOUT)
            answer = max([answer, *others], key=lambda one: (one["known"], bool(one["gone"])))
        if not answer["known"]:
            why = "; ".join(answer["gone"]) or f"no request {body.id[:40]!r} with rows to mark is known here"
            return error(404, why, "id")
        return Marked(id=body.id, sinks=answer["sinks"], gone=answer["gone"])

    return routes


async def answer_here(manager: SinkManager, question: dict[str, Any]) -> dict[str, Any]:
    """Mark what this process has of a request: ``{"known", "sinks", "gone"}``."""
    return await run_in_threadpool(_mark, manager, question["id"], question["metadata"])


def _mark(manager: SinkManager, request_id: str, metadata: dict[str, Any]) -> dict[str, Any]:
    tickets: list[Ticket] = []
    gone: list[str] = []
    known = False
    for internal_id in manager.marks.answered_as(request_id):
        try:
            tickets += manager.mark(internal_id, metadata, hold=False)
            known = True
        except WeirError as e:
            gone.append(e.message)
    deadline = time.monotonic() + SINK_TIMEOUT
    for ticket in tickets:
        with suppress(WeirError):  # reported by its state
            ticket.settle(max(0.0, deadline - time.monotonic()))
    return {"known": known, "sinks": [{"sink": t.sink, "state": t.state} for t in tickets], "gone": gone}
