"""Sparse autoencoders of a server: loaded, read beside the tokens, set, bounded, and gone, as any client sees it."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

import vllm_weir as weir
from tests.engine.serve_cases import other_sae
from tests.engine.serving import ADMIN, CHAT, COMPLETIONS, PATHS, body, choices, events, post, rows_of
from tests.support.machine import engine_processes, needs
from vllm_weir.client.response_fields import features_of
from vllm_weir.util.top import top_values

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(900), needs(engine_processes)]
HAPPY = 100
"""The shipped autoencoder's feature of happy stories."""
PROMPT, MAX_TOKENS = "Anna took the boat out.", 12
SAME = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "return_token_ids": True}
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
    """The shipped autoencoder, which the server has loaded, and another, which is saved."""
    made = other_sae()
    made.save(folder / "other")
    return {"mood": weir.SAE.load(weir.demo_sae()), "other": made}


@pytest.fixture(scope="module")
def server(weir_server):
    return weir_server.http


@pytest.fixture
def two(server, folder, saes):
    """The server with both loaded."""
    load(server, "other", folder / "other").raise_for_status()
    yield server
    server.delete("/v1/saes/other", headers=ADMIN)


def load(server, name, path):
    return server.put(f"/v1/saes/{name}", json={"path": str(path)}, headers=ADMIN)


def loaded(server) -> list[str]:
    return [one["name"] for one in server.get("/v1/saes").raise_for_status().json()["saes"]]


def ask(server, path: str = COMPLETIONS, **weir_object) -> dict:
    return post(server, path, weir={"v": 1, **weir_object}, **SAME)["choices"][0]


def stream(server, path: str = COMPLETIONS, **weir_object) -> list[dict]:
    asked = {"v": 1, **weir_object, "response": {"stream": True}}
    return choices(events(server, path, weir=asked, **SAME))


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


def read(server, folder, path: str = COMPLETIONS, capture=ROWS, **more) -> tuple[weir.Activations, dict]:
    """The rows of a request, and its choice."""
    choice = ask(server, path, capture=capture, response={"inline_bytes": 1 << 22}, **more)
    return rows_of(server, choice, folder), choice


def bound(sae: weir.SAE, rows: torch.Tensor) -> float:
    """How far two sums in float32 for a feature may be apart."""
    return 1e-5 * float((rows.abs() @ sae.tensors["W_enc"].float().abs()).max())


def check(found: dict, asked: dict, sae: weir.SAE, acts: weir.Activations) -> None:
    """What is told of an autoencoder is what it says of the rows."""
    at, prompt = acts.positions_of(*sae.site), int(acts.positions_of(*sae.site)[-1]) + 2 - MAX_TOKENS
    here = at >= (prompt if asked["positions"] == "generated" else 0)
    assert found["positions"] == at[here].tolist()
    rows = acts[sae.site][here]
    dense, values, atol = sae.encode(rows), torch.tensor(found["values"]), bound(sae, rows)
    assert (values - dense.gather(1, torch.tensor(found["ids"]))).abs().max() <= atol
    if "ids" in asked:
        assert found["ids"] == [asked["ids"]] * len(dense)
    else:
        assert (values - top_values(dense, asked["top_k"])[1]).abs().max() <= atol


@pytest.mark.parametrize(("path", "steer"), [(COMPLETIONS, []), (CHAT, [SAD])], ids=["plain", "steered chat"])
def test_features_of_two_autoencoders(two, saes, folder, path, steer):
    """In the answer, and streamed beside the tokens; alone, and with the rows."""
    acts, with_rows = read(two, folder, path, features=BOTH, interventions=steer)
    alone = ask(two, path, features=BOTH, interventions=steer)
    *chunks, last = stream(two, path, features=BOTH, interventions=steer)
    assert text_of(alone) == text_of(with_rows) == "".join(map(text_of, [*chunks, last]))
    assert "activations" not in alone["weir"]
    for choice in (alone, with_rows, last):
        assert set(choice["weir"]["features"]) == {"mood", "other"}
        for asked in BOTH:
            check(choice["weir"]["features"][asked["name"]], asked, saes[asked["name"]], acts)
    for name, whole in last["weir"]["features"].items():
        parts = [found[name] for chunk in chunks if name in (found := chunk.get("weir", {}).get("features", {}))]
        joined = {key: [row for part in parts for row in part[key]] for key in ("positions", "ids", "values")}
        # Rows of the tokens in the last event may come with that alone.
        assert len(joined["ids"]) >= len(whole["ids"]) - len(last["token_ids"])
        assert all(whole[key][: len(rows)] == rows for key, rows in joined.items())


@pytest.mark.parametrize("path", PATHS)
def test_each_token_comes_with_its_features(server, path):
    """Of the position that it was sampled from, in the same event."""
    *parts, last = stream(server, path, features=[{"name": "mood", "top_k": 2, "positions": "sampled"}])
    tokens = rows = 0
    for choice in parts:
        tokens += len(choice.get("token_ids") or ())
        found = choice.get("weir", {}).get("features", {}).get("mood", {"positions": []})
        rows += len(found["positions"])
        if text_of(choice):
            assert rows == tokens, choice
    assert tokens + len(last["token_ids"]) == MAX_TOKENS == len(last["weir"]["features"]["mood"]["ids"])


@pytest.mark.parametrize("path", PATHS)
def test_a_feature_is_set_and_the_error_kept(server, saes, folder, path):
    acts, choice = read(server, folder, path, interventions=[SAD])
    sae = saes["mood"]
    here = [{"hook": "resid_post", "layers": [3], "positions": "all", "before": True}]
    before, same = read(server, folder, path, here, interventions=[SAD])
    assert text_of(same) == text_of(choice)
    h = before[sae.site].float()
    features = sae.encode(h)
    error = h - sae.decode(features)
    features[:, HAPPY] = SAD["value"]
    wanted = sae.decode(features) + error
    assert (acts[sae.site] - wanted).abs().max() <= 1e-4 * wanted.abs().max() < (acts[sae.site] - h).abs().max()
    assert choice["weir"]["receipt"]["steered"] == [{"resid_post.3": len(h)}]
    assert "".join(map(text_of, stream(server, path, interventions=[SAD]))) == text_of(choice)


@pytest.mark.parametrize("path", PATHS)
def test_rows_are_reconstructed_with_a_feature_set(server, saes, folder, path):
    sae, asked = saes["mood"], [SAD, {"op": "reconstruct", "name": "mood"}]
    acts, choice = read(server, folder, path, interventions=asked)
    here = [{"hook": "resid_post", "layers": [3], "positions": "all", "before": True}]
    before, same = read(server, folder, path, here, interventions=asked)
    assert text_of(same) == text_of(choice)
    features = sae.encode(before[sae.site].float())
    features[:, HAPPY] = SAD["value"]
    wanted = sae.decode(features)
    assert (acts[sae.site] - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert choice["weir"]["receipt"]["steered"] == [{"resid_post.3": len(wanted)}] * 2
    assert "".join(map(text_of, stream(server, path, interventions=asked))) == text_of(choice)


@pytest.mark.parametrize(("change", "target"), [("add", None), ("value", 3.0)])
def test_top_k_is_added_to_and_set(two, folder, saes, change, target):
    other = saes["other"]
    plain, _ = read(two, folder)
    before = plain["resid_post", 1][0]
    asked = {"op": "set_feature", "name": "other", "feature": 2, change: 3.0}
    edited, _ = read(two, folder, interventions=[asked])
    step = 3.0 if target is None else target - float(other.encode(before[None])[0, 2])
    wanted = before + step * other.tensors["W_dec"][2].float()
    assert torch.allclose(edited["resid_post", 1][0], wanted, atol=1e-4 * float(wanted.abs().max()))


def test_memory_is_bounded_and_given_back(two, folder, saes):
    size = saes["other"].nbytes
    refused = load(two, "third", folder / "other")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "settings.sae_bytes" and str(size) in error["message"]
    assert loaded(two) == ["mood", "other"]
    assert two.delete("/v1/saes/other", headers=ADMIN).status_code == 204
    gone = post(two, code=400, weir={"v": 1, "features": [OTHER]}, **SAME)["error"]
    assert gone["param"] == "features[0].name" and "loaded are mood" in gone["message"]
    assert load(two, "third", folder / "other").json()["bytes"] == size
    assert loaded(two) == ["mood", "third"]
    assert two.delete("/v1/saes/third", headers=ADMIN).status_code == 204
    assert two.delete("/v1/saes/third", headers=ADMIN).status_code == 404
    assert load(two, "mood", folder / "other").json()["error"]["param"] == "name"
    assert two.put("/v1/saes/x", json={"path": "/x"}).status_code == 401


def test_a_stream_goes_on_with_an_autoencoder_that_is_unloaded(two):
    asked = {"v": 1, "features": [OTHER], "response": {"stream": True}}
    last = None
    with two.stream("POST", COMPLETIONS, json=body(stream=True, weir=asked, **SAME | {"max_tokens": 100})) as answer:
        for line in filter(None, answer.iter_lines()):
            if last is None:
                assert two.delete("/v1/saes/other", headers=ADMIN).status_code == 204
            if line != "data: [DONE]":
                last = json.loads(line[6:])["choices"][0]
    assert loaded(two) == ["mood"] and len(last["weir"]["features"]["other"]["ids"]) == 99


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
        got, values = found.features[name], torch.tensor(expected["values"])
        assert got.positions.tolist() == expected["positions"] and got.ids.tolist() == expected["ids"]
        assert (got.values - values).abs().max() <= 1e-4 * values.abs().max()


def check_chunks(chunks, choice: dict) -> None:
    """The chunks' features follow each other, and the result has all of them."""
    *_, last = chunks
    check_answer(last.result, choice)
    for name, expected in choice["weir"]["features"].items():
        parts = [chunk.features[name] for chunk in chunks if name in chunk.features]
        assert [at for part in parts for at in part.positions.tolist()] == expected["positions"]
        assert [ids for part in parts for ids in part.ids.tolist()] == expected["ids"]


def test_a_gate_by_a_feature_acts_where_that_is_active(weir_server, server, saes, folder):
    """At the hook point that the autoencoder reads, with its other clients' forms; and what a client gets wrong."""
    sae = saes["mood"]
    here = [{"hook": sae.site.hook, "layers": [sae.site.layer], "positions": "all", "before": True}]
    acts, _ = read(server, folder, capture=here)
    dense = sae.encode(acts[sae.site])
    feature = int(((dense > 0).sum(0) - len(dense) // 2).abs().argmin())
    gate = {"probe": "sae:mood", "feature": feature, "above": 0.01}
    gated = {"op": "set_feature", "name": "mood", "feature": feature, "value": 0.0, "when": gate}
    acts, choice = read(server, folder, capture=here, interventions=[gated])
    active = sae.encode(acts[sae.site])[:, feature]
    told = choice["weir"]["receipt"]["gates"][0]
    fired = [p for first, end in told["spans"] for p in range(first, end)]
    assert fired == (active > 0.01).nonzero()[:, 0].tolist() and 0 < len(fired) < told["of"]
    assert (told["probe"], told["feature"], told["fired"]) == ("sae:mood", feature, len(fired))
    scores = torch.tensor(choice["weir"]["scores"][f"sae:mood[{feature}]"]["values"])[:, 0]
    assert (scores - active).abs().max() <= bound(sae, acts[sae.site])
    own = weir.SetFeature("mood", feature, value=0.0, when=weir.When("sae:mood", feature=feature, above=0.01))
    with weir_server.client() as client:
        answer = client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0, interventions=own)
        assert answer.text == text_of(choice) and answer.receipt.gates[0]["feature"] == feature
        wrong = weir.SetFeature("mood", 0, value=0.0, when=weir.When("sae:gone", feature=0, above=0.0))
        with pytest.raises(weir.WeirError, match="loaded are mood") as e:
            client.generate(PROMPT, interventions=wrong)
        assert e.value.field == "interventions[0].when.probe"


@pytest.mark.parametrize("path", PATHS)
def test_the_client(weir_server, server, saes, folder, path):
    prompt = PROMPT if path == COMPLETIONS else [{"role": "user", "content": PROMPT}]
    with weir_server.client() as client:
        assert client.saes.load("other", folder / "other")["d_sae"] == 64
        try:
            assert [one["name"] for one in client.saes.list()["saes"]] == ["mood", "other"]
            choice = ask(server, path, features=BOTH, interventions=[SAD])
            check_answer((client.generate if path == COMPLETIONS else client.chat)(prompt, **ASKED), choice)
            check_chunks(list(client.stream(prompt, **ASKED)), choice)
        finally:
            client.saes.unload("other")
        for again in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
            with pytest.raises(weir.WeirError, match="loaded are mood") as e:
                again(PROMPT, **ASKED)
            assert e.value.field == "features[1].name"
        with pytest.raises(weir.NotFound):
            client.saes.unload("other")


def test_the_async_client(weir_server, server, saes, folder):
    async def all_at_once():
        async with weir_server.client(weir.AsyncClient) as client:
            await client.saes.load("other", folder / "other")
            try:
                choice = ask(server, features=BOTH, interventions=[SAD])
                answers = await asyncio.gather(*[client.generate(PROMPT, **ASKED) for _ in range(3)])
                return choice, answers, [chunk async for chunk in client.stream(PROMPT, **ASKED)]
            finally:
                await client.saes.unload("other")

    choice, answers, chunks = asyncio.run(all_at_once())
    for answer in answers:
        check_answer(answer, choice)
    check_chunks(chunks, choice)
    assert loaded(server) == ["mood"]


@pytest.fixture
def cross(server, folder):
    """The server with a cross-layer transcoder of its model loaded from files, and that transcoder."""
    count, d, features = 6, 256, 16  # for which there is room
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) / d**0.5

    tensors = {
        "W_enc": [normal(d, features) for _ in range(count)],
        "W_dec": [normal(features, count - layer, d) for layer in range(count)],
        "b_enc": [normal(features) for _ in range(count)],
        "b_dec": [torch.zeros(d)] * count,
    }
    sae = weir.SAE.from_tensors("transcoder", ("mlp_in", 0), layers=range(count), **tensors)
    sae.save(folder / "cross")
    answer = load(server, "cross", folder / "cross")
    assert answer.status_code == 200, answer.text
    described = answer.json()
    assert described["layers"] == list(range(count)) and described["bytes"] < sae.nbytes / 2
    yield sae
    server.delete("/v1/saes/cross", headers=ADMIN)


def test_features_of_a_cross_layer_transcoder_are_by_block(cross, server, folder):
    """In the answer and streamed, as the client's objects; one is set at all its later blocks."""
    asked = {"name": "cross", "ids": [3, 13], "layers": [1, 4], "positions": "all"}
    edit = {"op": "set_feature", "name": "cross", "feature": 3, "layer": 1, "value": 2.0}
    capture = [{"hook": "mlp_in", "layers": [1, 4], "positions": "all"}]
    acts, with_rows = read(server, folder, capture=capture, interventions=[edit], features=[asked])
    *chunks, last = stream(server, interventions=[edit], features=[asked])
    assert text_of(with_rows) == "".join(map(text_of, [*chunks, last]))
    assert list(with_rows["weir"]["receipt"]["steered"][0]) == [f"mlp_out.{layer}" for layer in range(1, 6)]
    for choice in (with_rows, last):
        found = features_of(choice["weir"]["features"])["cross"]
        assert list(found) == [1, 4]
        for layer, one in found.items():
            wanted = cross.block(layer).encode(acts["mlp_in", layer])[:, [3, 13]]
            assert (one.values - wanted).abs().max() <= 1e-5 * acts["mlp_in", layer].abs().max()
            assert one.positions.tolist() == acts.positions_of("mlp_in", layer).tolist()
    streamed = [features_of(one) for chunk in chunks if (one := chunk.get("weir", {}).get("features"))]
    assert streamed and all(set(one["cross"]) <= {1, 4} for one in streamed)
    answer = server.post("/v1/steering/set", json={"interventions": [edit]}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    try:
        assert text_of(ask(server)) == text_of(with_rows)
    finally:
        server.post("/v1/steering/clear", headers=ADMIN)
