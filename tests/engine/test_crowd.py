"""Two hundred clients at once, some of whom vanish: nobody gets another's rows, and nothing is left."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from dataclasses import dataclass

import httpx
import pytest

import vllm_weir as weir
from tests.engine.serve_probe import PATH as HELD
from tests.engine.serving import PLAIN, WEIR, running
from tests.support.machine import engine_processes, needs
from tests.support.measure import eventually, rel_err

pytestmark = [pytest.mark.engine, pytest.mark.thorough, needs(engine_processes)]
CLOSE_OTHERS = True
CLIENTS, EACH, TOKENS = 200, 2, 12
PROMPTS = ("Anna walked to the harbor in the morning .", "Tom was sad", "The lesson", "A dog ran over the hill")
CAPTURE = {"capture": [{"hook": "resid_post", "layers": [1, 4], "positions": "all"}]}
EMPTY = {"store": 0, "requests": 0, "workers": 0, "spool": 0}


def add(seed: int, scale: float) -> dict:
    chance = random.Random(seed)
    vector = [round(chance.gauss(0, 3), 3) for _ in range(256)]
    return {"interventions": [{"op": "add", "vector": vector, "layers": [2], "scale": scale}]}


WISHES = {
    "plain": None,
    "capture": {"v": 1} | CAPTURE,
    "steer one way": {"v": 1} | add(3, 1.0),
    "steer another": {"v": 1} | add(5, 2.0),
    "both": {"v": 1} | CAPTURE | add(5, 2.0),
}


def body(prompt: str, kind: str, **more) -> dict:
    out = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    weir_object = WISHES[kind]
    return out | {"return_token_ids": True} | ({"weir": weir_object} if weir_object else {}) | more


@dataclass
class Answer:
    """What one request gave: its tokens, and its rows if it asked for some."""

    tokens: list[int]
    rows: weir.Activations | None


def read(choice: dict, tmp_path, key: str) -> Answer:
    found = choice.get("weir", {}).get("activations")
    rows = None
    if found is not None:
        path = tmp_path / f"{key}.safetensors"
        path.write_bytes(base64.b64decode(found["b64"]))
        rows = weir.Activations.load(path)
    return Answer(choice["token_ids"], rows)


async def whole(client: httpx.AsyncClient, prompt: str, kind: str) -> dict:
    answer = await client.post("/v1/completions", json=body(prompt, kind))
    answer.raise_for_status()
    return answer.json()["choices"][0]


async def streamed(client: httpx.AsyncClient, prompt: str, kind: str, leave_after: int | None) -> dict | None:
    """The streamed choice put together; None if the client left after some chunks."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body(prompt, kind, stream=True)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice["token_ids"]
                last = choice
            if leave_after is not None and len(tokens) >= leave_after:
                return None
    return last | {"token_ids": tokens}


async def crowd(url: str, headers: dict) -> list[tuple[str, str, dict]]:
    """(prompt, kind, choice) of every request that was not given up."""
    # No connection is used twice: a server closes those that nobody uses for 5 s, and on a crowded machine a client may
    # find that out only once it has asked.
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:

        async def person(number: int) -> list[tuple[str, str, dict]]:
            chance, out = random.Random(number), []
            for _ in range(EACH):
                prompt, kind = chance.choice(PROMPTS), chance.choice(["plain", "plain", *WISHES])
                how = chance.choice(["whole", "whole", "streamed", "left"])
                if how == "whole":
                    choice = await whole(client, prompt, kind)
                else:
                    choice = await streamed(client, prompt, kind, chance.randrange(1, 6) if how == "left" else None)
                if choice is not None:
                    out.append((prompt, kind, choice))
            return out

        return [found for some in await asyncio.gather(*(person(i) for i in range(CLIENTS))) for found in some]


@pytest.fixture(scope="module")
def plain_tokens(tmp_path_factory) -> dict[str, list[int]]:
    """What a server without the plugin answers."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with running(log, PLAIN, env={"WEIR_DISABLE": "1"}, forked=True) as client:
        answers = {p: client.post("/v1/completions", json=body(p, "plain")).raise_for_status() for p in PROMPTS}
    return {p: a.json()["choices"][0]["token_ids"] for p, a in answers.items()}


def test_two_hundred_clients(plain_tokens, tmp_path):
    more = ["--middleware", "tests.engine.serve_probe.Held"]
    with running(tmp_path / "log", WEIR, *more, forked=True) as client:
        url, headers = str(client.base_url), dict(client.headers)
        alone = {}
        for prompt in PROMPTS:
            for kind in WISHES:
                choice = client.post("/v1/completions", json=body(prompt, kind)).raise_for_status().json()["choices"][0]
                alone[prompt, kind] = read(choice, tmp_path, f"alone-{len(alone)}")
        assert len({tuple(alone[PROMPTS[0], kind].tokens) for kind in WISHES}) == 3, "steering changes what is said"
        found = asyncio.run(crowd(url, headers))
        # What the crowd asked for is gone within a second.
        eventually(lambda: client.get(HELD).raise_for_status().json(), EMPTY, 1)
        again = client.post("/v1/completions", json=body(PROMPTS[0], "plain")).raise_for_status().json()["choices"][0]
    kinds = [kind for _, kind, _ in found]
    assert len(found) > CLIENTS and all(kinds.count(kind) > 10 for kind in WISHES)
    assert again["token_ids"] == plain_tokens[PROMPTS[0]]
    for number, (prompt, kind, choice) in enumerate(found):
        mine, expected = read(choice, tmp_path, f"{number}"), alone[prompt, kind]
        if kind == "plain":
            assert "weir" not in choice and mine.tokens == plain_tokens[prompt]
        assert mine.tokens == expected.tokens, (prompt, kind)
        assert (mine.rows is None) == (expected.rows is None)
        if mine.rows is not None:
            assert same_places(mine.rows, expected.rows)
            # A batch's size decides how the CPU's kernels sum up, so only a neighbour's rows would be far off.
            assert all(rel_err(mine.rows[site], expected.rows[site]) < 1e-4 for site in mine.rows.sites)


def same_places(a: weir.Activations, b: weir.Activations) -> bool:
    return a.positions.tolist() == b.positions.tolist() and a.token_ids.tolist() == b.token_ids.tolist()
