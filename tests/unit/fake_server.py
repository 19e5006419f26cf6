"""A server in memory: completions, chat, streams, results by reference, and failures on demand."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from vllm_weir.results.activations import Activations
from vllm_weir.results.receipt import InterventionReceipt, Receipt
from vllm_weir.schema.hooks import Site

D = 8


def rows(n: int = 5, dtype: torch.dtype = torch.bfloat16) -> Activations:
    """Rows of two sites at n positions."""
    made = torch.arange(2 * n * D, dtype=torch.float32).reshape(2, n, D).sin().to(dtype)
    sites = (Site("resid_pre", 0), Site("resid_post", 3))
    at, tokens = torch.arange(n), torch.arange(n) + 100
    return Activations(dict(zip(sites, made)), dict.fromkeys(sites, at), dict.fromkeys(sites, tokens), ())


def same(a: Activations, b: Activations) -> bool:
    """The same rows, to the bit."""
    return a.sites == b.sites and all(
        a[s].dtype == b[s].dtype
        and torch.equal(a[s], b[s])
        and torch.equal(a.positions_of(*s), b.positions_of(*s))
        and torch.equal(a.token_ids_of(*s), b.token_ids_of(*s))
        for s in a.sites
    )


RECEIPT = Receipt(
    captured={Site("resid_pre", 0): 5, Site("resid_post", 3): 5},
    steered=({Site("resid_post", 3): 2}, {}),
    shared=(0, 0),
    interventions=(
        InterventionReceipt("add", "resid_post", (3,), 2, 0.25, {3: 0.25}),
        InterventionReceipt("ablate", "resid_post", (), 0),
    ),
    prompt_tokens=3,
    generated_tokens=3,
    sinks={"archive": "written"},
    files=("a",),
)
SCORES = {
    "positions": [0, 1, 2],
    "token_ids": [5, 6, 7],
    "sites": {"resid_post.3": [[0.5, 1.0], [1.5, 2.0], [0.1, 3.0]]},
}


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Pieces of a body; an exception among them breaks the connection there."""

    def __init__(self, pieces: list[bytes | Exception]) -> None:
        self._pieces = pieces

    def __iter__(self):
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self):
        for piece in self:
            yield piece


class FakeServer:
    """Attributes:
    seen: the requests, as (method, path, body).
    plan: answers or exceptions to give first, by "METHOD path"; each is used once.
    breaks: byte counts after which downloads break, one each.
    """

    def __init__(self, tmp: Path, *, weir: Callable[[dict], dict | None] | None = None) -> None:
        self.tmp = tmp
        self.seen: list[tuple[str, str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.plan: dict[str, list[Any]] = {}
        self.breaks: list[int] = []
        self.spool: dict[str, bytes] = {}
        self.ranges = True
        self.weir = weir or (lambda body: {"receipt": RECEIPT.to_dict()})
        self.transport = httpx.MockTransport(self.handle)

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content[:1] in (b"{", b"[") else request.content
        self.seen.append((request.method, request.url.path, body))
        self.headers.append(request.headers)
        planned = self.plan.get(f"{request.method} {request.url.path}")
        if planned:
            answer = planned.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return self.route(request, body)

    def route(self, request: httpx.Request, body: Any) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            models = [{"id": "adapter", "parent": "demo"}, {"id": "demo"}]
            return httpx.Response(200, json={"data": models})
        if path.startswith("/v1/activations/"):
            return self.activations(request, path.rpartition("/")[2])
        if path in ("/v1/completions", "/v1/chat/completions"):
            chat = "chat" in path
            return self.stream(body, chat) if body.get("stream") else self.whole(body, chat)
        return httpx.Response(200, json={"path": path, "method": request.method, "bytes": len(request.content)})

    def file(self, acts: Activations) -> bytes:
        return acts.save(self.tmp / "fake.safetensors").read_bytes()

    def keep(self, acts: Activations, id: str = "0123456789abcdef" * 2) -> str:
        self.spool[id] = self.file(acts)
        return id

    def inline(self, acts: Activations) -> dict[str, Any]:
        return {"format": "safetensors", "b64": base64.b64encode(self.file(acts)).decode()}

    def choices(self, body: dict, chat: bool) -> list[dict[str, Any]]:
        made = []
        for index in range(body.get("n", 1)):
            text = f"answer {index} to {body.get('prompt') or body['messages'][-1]['content']}"
            choice: dict[str, Any] = {"index": index, "finish_reason": "length", "token_ids": [1, 2, 3 + index]}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            if "weir" in body and (weir := self.weir(body)) is not None:
                choice["weir"] = weir
            made.append(choice)
        return made

    def whole(self, body: dict, chat: bool) -> httpx.Response:
        data = {"id": "cmpl-1", "model": body["model"], "prompt_token_ids": [7, 8, 9], "object": "x", "created": 1}
        return httpx.Response(200, json=data | {"choices": self.choices(body, chat)[::-1]})

    def stream(self, body: dict, chat: bool) -> httpx.Response:
        events = []
        for choice in self.choices(body, chat):
            text = choice["message"]["content"] if chat else choice["text"]
            for k, word in enumerate(text.split(" ")):
                part: dict[str, Any] = {"index": choice["index"], "finish_reason": None, "token_ids": [k]}
                piece = word if k == 0 else f" {word}"
                part |= {"delta": {"content": piece}} if chat else {"text": piece}
                if k < 2 and "response" in body.get("weir", {}):
                    row = {"positions": [k], "token_ids": [5 + k]}
                    part["weir"] = {"scores": row | {"sites": {"resid_post.3": [SCORES["sites"]["resid_post.3"][k]]}}}
                events.append({"id": "cmpl-1", "model": body["model"], "choices": [part]})
            events[-1]["choices"][0] |= {"finish_reason": "length"} | (
                {"weir": choice["weir"]} if "weir" in choice else {}
            )
        text = "".join(f"data: {json.dumps(e, ensure_ascii=False)}\r\n\r\n" for e in events) + "data: [DONE]\n\n"
        raw = (": a comment\n\n" + text).encode()
        pieces = [raw[k : k + 7] for k in range(0, len(raw), 7)]  # cut anywhere, also within a character
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(pieces))

    def activations(self, request: httpx.Request, id: str) -> httpx.Response:
        if id not in self.spool:
            return httpx.Response(404, json={"error": {"message": "expired", "type": "x", "param": None, "code": 404}})
        if request.method == "DELETE":
            del self.spool[id]
            return httpx.Response(204)
        data, start, status, headers = self.spool[id], 0, 200, {"etag": '"1"'}
        if "range" in request.headers and self.ranges:
            start = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
            status = 206
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest = data[start:]
        headers["content-length"] = str(len(rest))
        pieces: list[bytes | Exception] = [rest[k : k + 64] for k in range(0, len(rest), 64)]
        if self.breaks:
            n = self.breaks.pop(0)
            pieces = [rest[:n], httpx.ReadError("the line was cut")] if n else [httpx.ReadError("cut at once")]
        return httpx.Response(status, headers=headers, stream=Body(pieces))
