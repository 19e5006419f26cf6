"""Sparse autoencoders of a server: loaded, read beside the tokens, set, bounded, and gone, as any client sees it."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
import torch

import vllm_weir as weir
from tests.engine.serving import ADMIN_KEY, API_KEY, WEIR, running
from tests.support.machine import engine_processes, needs
from tests.support.sae_reference import weights
from vllm_weir.util.top import top_values

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs(engine_processes)]
CLOSE_OTHERS = True
ADMIN = {"X-Weir-Admin-Key": ADMIN_KEY}
HAPPY, D = 100, 256
"""The shipped autoencoder's feature of happy stories, and the width of the shipped model."""
PROMPT, MAX_TOKENS = "Anna took the boat out.", 12
PATHS = ["/v1/completions", "/v1/chat/completions"]
MOOD = {"name": "mood", "top_k": 5, "positions": "all"}
OTHER = {"name": "other", "ids": [9, 2, 40], "positions": "generated"}
BOTH = [MOOD, OTHER]
ROWS = [{"hook": "resid_post", "layers": [1, 3], "positions": "all"}]
SAD = {"op": "set_feature", "name": "mood", "feature": HAPPY, "value": -4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saes")


@pytest.fixture(scope="module")
def saes(folder):
    """The shipped autoencoder, and a TopK one of another block, which is saved."""
    made = weir.SAE.from_tensors("topk", ("resid_post", 1), k=7, **weights("topk", 3, D, 64))
    made.save(folder / "other")
    return {"mood": weir.SAE.load(weir.demo_sae()), "other": made}


@pytest.fixture(scope="module")
def server(folder, saes):
    """A server with room for just these two."""
    env = {"WEIR_ADMIN_KEY": ADMIN_KEY, "WEIR_SAE_BYTES": str(sum(sae.nbytes for sae in saes.values()))}
    more = ["--weir-sae", f"mood={weir.demo_sae()}"]
    with running(folder / "log", WEIR, *more, env=env, forked=True) as client:
        yield client


@pytest.fixture
def two(server, folder):
    """The server with both loaded."""
    load(server, "other", folder / "other").raise_for_status()
    yield server
    server.delete("/v1/saes/other", headers=ADMIN)


def load(server, name, path):
    return server.put(f"/v1/saes/{name}", json={"path": str(path)}, headers=ADMIN)


def loaded(server) -> list[str]:
    return [one["name"] for one in server.get("/v1/saes").raise_for_status().json()["saes"]]


def body(path: str, **weir_object) -> dict:
    asked = {"prompt": PROMPT} if path == PATHS[0] else {"messages": [{"role": "user", "content": PROMPT}]}
    more = {"model": "demo", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return asked | more | {"weir": {"v": 1, **weir_object}}


def post(server, path: str, code: int = 200, **weir_object) -> dict:
    answer = server.post(path, json=body(path, **weir_object))
    assert answer.status_code == code, answer.text[:2000]
    return answer.json()["choices"][0] if code == 200 else answer.json()["error"]


def events(server, path: str, **weir_object) -> list[dict]:
    """The choices of a stream's events."""
    asked = body(path, **weir_object, response={"stream": True}) | {"stream": True}
    with server.stream("POST", path, json=asked) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


def rows_of(server, path, folder, capture=ROWS, **more) -> tuple[weir.Activations, dict]:
    """The rows of the same request, and its choice."""
    choice = post(server, path, capture=capture, response={"inline_bytes": 1 << 22}, **more)
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"  # rows are mapped from their file
    file.write_bytes(base64.b64decode(choice["weir"]["activations"]["b64"]))
    return weir.Activations.load(file), choice


def check(found: dict, asked: dict, sae: weir.SAE, acts: weir.Activations) -> None:
    """What is told of an autoencoder is what it says of the rows."""
    at, prompt = acts.positions_of(*sae.site), int(acts.positions_of(*sae.site)[-1]) + 2 - MAX_TOKENS
    here = at >= (prompt if asked["positions"] == "generated" else 0)
    assert found["positions"] == at[here].tolist()
    dense = sae.encode(acts[sae.site][here])
    values = torch.tensor(found["values"])
    assert torch.allclose(values, dense.gather(1, torch.tensor(found["ids"])), rtol=1e-4, atol=1e-4)
    if "ids" in asked:
        assert found["ids"] == [asked["ids"]] * len(dense)
    else:
        assert torch.allclose(values, top_values(dense, asked["top_k"])[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("steer", [[], [SAD]], ids=["plain", "steered"])
def test_features_of_two_autoencoders(two, saes, folder, path, steer):
    """In the answer, and streamed beside the tokens; alone, and with the rows."""
    acts, with_rows = rows_of(two, path, folder, features=BOTH, interventions=steer)
    alone = post(two, path, features=BOTH, interventions=steer)
    assert text_of(alone) == text_of(with_rows) and "activations" not in alone["weir"]
    for choice in (alone, with_rows):
        assert set(choice["weir"]["features"]) == {"mood", "other"}
        for asked in BOTH:
            check(choice["weir"]["features"][asked["name"]], asked, saes[asked["name"]], acts)
    *chunks, last = events(two, path, features=BOTH, interventions=steer)
    assert "".join(map(text_of, [*chunks, last])) == text_of(alone)
    assert last["weir"]["features"].keys() == {"mood", "other"}
    for asked in BOTH:
        name = asked["name"]
        check(last["weir"]["features"][name], asked, saes[name], acts)
        parts = [
            chunk["weir"]["features"][name] for chunk in chunks if name in chunk.get("weir", {}).get("features", {})
        ]
        joined = {key: [row for part in parts for row in part[key]] for key in ("positions", "ids", "values")}
        whole = last["weir"]["features"][name]
        assert len(joined["ids"]) >= len(whole["ids"]) - 1  # the last row may come with the last event alone
        assert all(whole[key][: len(rows)] == rows for key, rows in joined.items())


@pytest.mark.parametrize("path", PATHS)
def test_each_token_comes_with_its_features(server, path):
    """Of the position that it was sampled from, in the same event."""
    choices = events(server, path, features=[{"name": "mood", "top_k": 2, "positions": "sampled"}])
    tokens = rows = 0
    for choice in choices[:-1]:
        tokens += len(choice.get("token_ids") or ())
        found = choice.get("weir", {}).get("features", {}).get("mood", {"positions": []})
        rows += len(found["positions"])
        if text_of(choice):
            assert rows == tokens, choice
    assert rows >= MAX_TOKENS - 1 and len(choices[-1]["weir"]["features"]["mood"]["ids"]) == MAX_TOKENS


@pytest.mark.parametrize("path", PATHS)
def test_a_feature_is_set_and_the_error_kept(two, saes, folder, path):
    acts, choice = rows_of(two, path, folder, interventions=[SAD])
    sae = saes["mood"]
    here = [{"hook": "resid_post", "layers": [3], "positions": "all", "before": True}]
    before, same = rows_of(two, path, folder, here, interventions=[SAD])
    assert text_of(same) == text_of(choice)
    h = before[sae.site].float()
    features = sae.encode(h)
    error = h - sae.decode(features)
    features[:, HAPPY] = SAD["value"]
    wanted = sae.decode(features) + error
    assert (acts[sae.site] - wanted).abs().max() <= 1e-4 * wanted.abs().max() < (acts[sae.site] - h).abs().max()
    assert choice["weir"]["receipt"]["steered"] == [{"resid_post.3": len(h)}]
    assert "".join(map(text_of, events(two, path, interventions=[SAD]))) == text_of(choice)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_refused_names_its_field(two, path, stream):
    """One that was never loaded, one that was unloaded, and what an autoencoder has not."""
    assert two.delete("/v1/saes/other", headers=ADMIN).status_code == 204
    for asked, field, why in (
        ({"features": [MOOD, OTHER]}, "features[1].name", "loaded are mood"),
        ({"features": [{"name": "nobody"}]}, "features[0].name", "loaded are mood"),
        ({"features": [{"name": "mood", "top_k": 513}]}, "features[0].top_k", "has 512 features"),
        ({"features": [{"name": "mood", "ids": [512]}]}, "features[0].ids", "from 0 to 511"),
        ({"features": [MOOD | {"k": 3}]}, "features[0].k", "unknown"),
        ({"interventions": [SAD, SAD | {"name": "other"}]}, "interventions[1].name", "loaded are mood"),
        ({"interventions": [SAD | {"feature": 512}]}, "interventions[0].feature", "from 0 to 511"),
        ({"interventions": [SAD | {"scale": 2.0}]}, "interventions[0].value", "one of value"),
    ):
        answer = two.post(path, json=body(path, **asked) | {"stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == field and why in error["message"], error
    assert post(two, path, features=[MOOD])["weir"]["features"]["mood"]


@pytest.mark.parametrize(("change", "target"), [("add", None), ("value", 3.0)])
def test_top_k_is_added_to_and_set(two, folder, saes, change, target):
    plain, _ = rows_of(two, PATHS[0], folder)
    before = plain["resid_post", 1][0]
    active = float(saes["other"].encode(before[None])[0, 2])
    asked = {"op": "set_feature", "name": "other", "feature": 2, change: 3.0}
    edited, _ = rows_of(two, PATHS[0], folder, interventions=[asked])
    step = 3.0 if target is None else target - active
    wanted = before + step * weights("topk", 3, D, 64)["W_dec"][2]
    assert torch.allclose(edited["resid_post", 1][0], wanted, atol=1e-4 * float(wanted.abs().max()))


def test_memory_is_bounded_and_given_back(two, folder, saes):
    size = saes["other"].nbytes
    refused = load(two, "third", folder / "other")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "settings.sae_bytes" and str(size) in error["message"]
    assert loaded(two) == ["mood", "other"]
    assert two.delete("/v1/saes/other", headers=ADMIN).status_code == 204
    assert load(two, "third", folder / "other").json()["bytes"] == size
    assert loaded(two) == ["mood", "third"]
    assert two.delete("/v1/saes/third", headers=ADMIN).status_code == 204
    assert two.delete("/v1/saes/third", headers=ADMIN).status_code == 404
    assert load(two, "mood", folder / "other").json()["error"]["param"] == "name"
    assert two.put("/v1/saes/x", json={"path": "/x"}).status_code == 403


def test_a_stream_goes_on_with_an_autoencoder_that_is_unloaded(two):
    asked = body(PATHS[0], features=[OTHER], response={"stream": True}) | {"stream": True, "max_tokens": 100}
    last = None
    with two.stream("POST", PATHS[0], json=asked) as answer:
        for line in filter(None, answer.iter_lines()):
            if last is None:
                assert two.delete("/v1/saes/other", headers=ADMIN).status_code == 204
            if line != "data: [DONE]":
                last = json.loads(line[6:])["choices"][0]
    assert loaded(two) == ["mood"] and len(last["weir"]["features"]["other"]["ids"]) == 99


def client_of(server, cls=weir.Client):
    return cls(str(server.base_url), API_KEY, ADMIN_KEY)


ASKED = {
    "features": [weir.Features("mood", top_k=5), weir.Features("other", ids=[9, 2, 40], positions="generated")],
    "interventions": weir.SetFeature("mood", HAPPY, value=-4.0),
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}


def check_answer(found, choice: dict) -> None:
    """What a client tells is what the raw answer has."""
    assert found.text == text_of(choice)
    for name, expected in choice["weir"]["features"].items():
        got = found.features[name]
        assert got.positions.tolist() == expected["positions"] and got.ids.tolist() == expected["ids"]
        assert torch.allclose(got.values, torch.tensor(expected["values"]), rtol=1e-4, atol=1e-4)


def check_chunks(chunks, choice: dict) -> None:
    """The chunks' features follow each other, and the result has all of them."""
    *_, last = chunks
    check_answer(last.result, choice)
    for name, expected in choice["weir"]["features"].items():
        parts = [chunk.features[name] for chunk in chunks if name in chunk.features]
        assert len(parts) > 1  # a client that is slow gets several tokens in one chunk
        assert [at for part in parts for at in part.positions.tolist()] == expected["positions"]
        assert [ids for part in parts for ids in part.ids.tolist()] == expected["ids"]


@pytest.mark.parametrize("path", PATHS)
def test_the_client(server, folder, path):
    messages = [{"role": "user", "content": PROMPT}]
    with client_of(server) as client:
        assert client.saes.load("other", folder / "other")["d_sae"] == 64
        try:
            assert [one["name"] for one in client.saes.list()["saes"]] == ["mood", "other"]
            choice = post(server, path, features=BOTH, interventions=[SAD])
            ask = client.generate if path == PATHS[0] else client.chat
            prompt = PROMPT if path == PATHS[0] else messages
            check_answer(ask(prompt, **ASKED), choice)
            check_chunks(list(client.stream(prompt, **ASKED)), choice)
        finally:
            client.saes.unload("other")
        for ask in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
            with pytest.raises(weir.WeirError, match="loaded are mood") as e:
                ask(PROMPT, **ASKED)
            assert e.value.field == "features[1].name"
        with pytest.raises(weir.WeirError) as e:
            client.saes.load("mood", folder / "other")
        assert e.value.field == "name"
        with pytest.raises(weir.NotFound):
            client.saes.unload("other")


def test_the_async_client(server, folder):
    async def all_at_once():
        async with client_of(server, weir.AsyncClient) as client:
            await client.saes.load("other", folder / "other")
            try:
                choice = post(server, PATHS[0], features=BOTH, interventions=[SAD])
                answers = await asyncio.gather(*[client.generate(PROMPT, **ASKED) for _ in range(3)])
                return choice, answers, [chunk async for chunk in client.stream(PROMPT, **ASKED)]
            finally:
                await client.saes.unload("other")

    choice, answers, chunks = asyncio.run(all_at_once())
    for answer in answers:
        check_answer(answer, choice)
    check_chunks(chunks, choice)
    assert loaded(server) == ["mood"]
