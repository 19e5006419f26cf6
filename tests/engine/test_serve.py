"""`weir serve`, one server for all: the same rows as offline, inline, by reference and streamed, and nothing left."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import textwrap

import httpx
import numpy as np
import pytest
import torch
import zstandard
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

import vllm_weir as weir
from tests.engine.common import sampling
from tests.engine.serve_probe import FAIL, WHY
from tests.engine.serve_probe import PATH as HELD
from tests.engine.serving import ADMIN_KEY, API_KEY, WEIR, running
from tests.support.engines import close_all, get_llm
from tests.support.machine import engine_processes, lens_folder, lens_source, needs
from tests.support.measure import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs(engine_processes)]
CLOSE_OTHERS = True

PROMPTS = ["Anna walked to the harbor in the morning .", "Tom was sad", "The lesson"]
CAPTURE = [
    {"hook": "resid_post", "layers": [0, 3], "positions": "all"},
    {"hook": "mlp_out", "layers": [2], "positions": "prompt"},
]
WISH = {"v": 1, "capture": CAPTURE}
ADD = {"op": "add", "vector": [0.5] * 256, "layers": [3], "scale": 2.0}
G = 6


def body(**more):
    return {"model": "demo", "prompt": PROMPTS[0], "max_tokens": G, "temperature": 0, "ignore_eos": True} | more


def chat(**more):
    out = body(messages=[{"role": "user", "content": PROMPTS[0]}], **more)
    del out["prompt"]
    return out


def projection():
    directions = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    return {"hook": "resid_post", "layers": [1, 4], "positions": "all", "project": directions.tolist()}


@pytest.fixture(scope="module")
def offline():
    """What the same requests give in a process of their own, one at a time as the tests send them."""
    llm = get_llm(weir.demo_model(), max_model_len=256, block_size=32)
    steered = {"interventions": [weir.Add([0.5] * 256, 3, scale=2.0)]}
    weir_objects = {
        "rows": {"capture": CAPTURE},
        "steered": {"capture": CAPTURE} | steered,
        "scores": {"capture": [projection()]},
    }
    found = {}
    for name, weir_object in weir_objects.items():
        for prompt in PROMPTS:
            out = llm.generate([prompt], weir.params(sampling(G), **weir_object), use_tqdm=False)[0]
            rows = {site: (out.activations[site].clone(), out.activations.positions_of(*site).tolist())
                    for site in out.activations.sites}  # fmt: skip
            receipt = json.loads(json.dumps(out.receipt.to_dict()))
            found[name, prompt] = (rows, list(out.outputs[0].token_ids), receipt)
    del out
    close_all()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def client(offline, folder):
    env = {"WEIR_SERVE_BODY_BYTES": str(4 << 20), "WEIR_SERVE_ROWS": "5000", "WEIR_SERVE_DIRECTORY": str(folder)}
    more = ["--weir-admin-key", ADMIN_KEY, "--middleware", "tests.engine.serve_probe.Held"]
    sinks = {"archive": {"filesystem": {"url": str(folder / "archive")}}}
    more += ["--additional-config", json.dumps({"weir": {"sinks": sinks}})]
    with running(folder / "log", WEIR, *more, env=env, forked=True) as found:
        yield found
        served = (folder / "log").read_text()
    assert not list(folder.glob("weir-serve-*")), "the server leaves its directory behind"
    assert ADMIN_KEY not in (folder / "log").read_text()
    # Not what comes after: as it ends, vLLM itself may trip over a process of its own that has just ended (psutil).
    # A stream that a test has failed is logged by vLLM.
    assert served.count("Traceback") == served.count(WHY), served[-4000:]


def post(client, path="/v1/completions", code=200, **more):
    made = chat(**more) if "chat" in path else body(**more)
    # httpx's own JSON has no escapes, so no half of a surrogate pair.
    got = client.post(path, content=json.dumps(made), headers={"Content-Type": "application/json"})
    assert got.status_code == code, got.text[:2000]
    return got.json()


def events(client, path="/v1/completions", **more):
    made = chat(stream=True, **more) if "chat" in path else body(stream=True, **more)
    with client.stream("POST", path, json=made) as got:
        lines = [line for line in got.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def choices(chunks, index=0):
    return [c for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index]


def load(tmp_path, data):
    path = tmp_path / "rows.safetensors"
    path.write_bytes(data)
    return weir.Activations.load(path)


def rows_of(client, tmp_path, choice):
    """The rows of a choice, wherever they are."""
    acts = choice["weir"]["activations"]
    if "b64" in acts:
        data = base64.b64decode(acts["b64"])
        assert len(data) == acts["bytes"]
    else:
        data = client.get(acts["url"]).raise_for_status().content
        assert acts["bytes"] <= len(data) and 0 < acts["expires_in"] <= 600
        assert client.delete(acts["url"]).status_code == 204
    found = load(tmp_path, data)
    assert [f"{s.hook}.{s.layer}" for s in found.sites] == acts["sites"] and acts["format"] == "safetensors"
    return found


def assert_same(found, expected):
    """The same sites, positions, and bytes of every row."""
    assert {tuple(s) for s in found.sites} == {tuple(s) for s in expected}
    for site, (rows, at) in expected.items():
        assert found.positions_of(*site).tolist() == at
        assert found[site].numpy().tobytes() == rows.numpy().tobytes(), site


def held(client):
    return client.get(HELD).raise_for_status().json()


def ended(client):
    """How many sequences have come to an end by themselves."""
    families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    samples = [s for f in families for s in f.samples if s.name == "vllm:request_success_total"]
    return int(sum(s.value for s in samples if s.labels["finished_reason"] in ("stop", "length")))


def assert_nothing_held(client, seconds=1.0, spool=0):
    eventually(lambda: held(client), {"store": 0, "requests": 0, "workers": 0, "spool": spool}, seconds)


def test_plain_answers_are_vllm_s(client):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponseChoice
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice

    got = post(client)
    assert set(got) == set(CompletionResponse.model_fields)
    assert set(got["choices"][0]) == set(CompletionResponseChoice.model_fields)
    said = post(client, "/v1/chat/completions")["choices"][0]
    assert set(said) <= set(ChatCompletionResponseChoice.model_fields)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert not any("weir" in c for c in choices(events(client, path)))


@pytest.mark.parametrize("name", ["rows", "steered"])
@pytest.mark.parametrize("how", ["inline", "reference", "xargs", "streamed", "streamed reference"])
def test_the_rows_are_those_of_the_same_request_offline(client, offline, tmp_path, name, how):
    weir_object = WISH | ({"interventions": [ADD]} if name == "steered" else {})
    weir_object |= {"response": {"inline_bytes": 0 if "reference" in how else 1 << 20}}
    asked = {"vllm_xargs": {"weir": json.dumps(weir_object)}} if how == "xargs" else {"weir": weir_object}
    for prompt in PROMPTS:
        expected, tokens, receipt = offline[name, prompt]
        if "streamed" in how:
            parts = choices(events(client, prompt=prompt, return_token_ids=True, **asked))
            ids = [t for c in parts for t in c["token_ids"]]
            choice = parts[-1]
            assert choice["finish_reason"] == "length" and not any("weir" in c for c in parts[:-1])
        else:
            choice = post(client, prompt=prompt, return_token_ids=True, **asked)["choices"][0]
            ids = choice["token_ids"]
        assert ids == tokens
        assert ("id" in choice["weir"]["activations"]) == ("reference" in how)
        assert_same(rows_of(client, tmp_path, choice), expected)
        mine = choice["weir"]["receipt"]
        assert mine.pop("cached_tokens") >= 0 and mine | {"cached_tokens": receipt["cached_tokens"]} == receipt
    assert_nothing_held(client)


def to_archive(**more):
    return [capture | {"sink": "archive"} | more for capture in CAPTURE]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_operator_s_sinks(client, tmp_path, path, stream):
    """They get rows beside those that come back, of the same sites, and keep nothing else alive."""
    weir_object = {"v": 1, "capture": [*CAPTURE, *to_archive()], "response": {"inline_bytes": 1 << 20}}
    choice = (
        choices(events(client, path, weir=weir_object))[-1]
        if stream
        else post(client, path, weir=weir_object)["choices"][0]
    )
    back, receipt = rows_of(client, tmp_path, choice), choice["weir"]["receipt"]
    assert len(back) == 3 and len(back["resid_post", 0]) >= G and receipt["sinks"] == {"archive": "written"}
    (file,) = receipt["files"]
    kept = weir.Activations.load(file)
    assert_same(kept, {site: (back[site], back.positions_of(*site).tolist()) for site in back})
    assert_nothing_held(client)
    only = post(client, path, weir={"v": 1, "capture": to_archive()})["choices"][0]["weir"]
    assert set(only) == {"receipt"} and only["receipt"]["sinks"] == {"archive": "written"}
    assert_nothing_held(client)


def test_rows_that_are_marked(client, folder, offline):
    """Of finished requests, with several prompts in one; of one that is still generating; and never twice."""
    marked = {"weir": {"v": 1, "capture": to_archive(keep="marked")}}
    got = post(client, prompt=PROMPTS[:2], **marked)
    assert [c["weir"]["receipt"]["sinks"] for c in got["choices"]] == [{"archive": "held"}] * 2
    asked = {"id": got["id"], "metadata": {"reason": "odd"}}
    told = client.post("/v1/marks", json=asked).raise_for_status().json()
    assert told == {"id": got["id"], "sinks": [{"sink": "archive", "state": "written"}] * 2, "gone": []}
    rows = weir.load(folder / "archive")
    mine = [name for name in rows if rows.metadata(name).get("mark") == {"reason": "odd"}]
    assert len(mine) == 2
    for name, prompt in zip(sorted(mine), PROMPTS, strict=False):
        assert_same(rows[name], offline["rows", prompt][0])
    again = client.post("/v1/marks", json=asked)
    assert again.status_code == 404 and again.json()["error"]["message"].count("was marked already") == 2
    assert again.json()["error"]["param"] == "id"

    with weir.Client(str(client.base_url), API_KEY) as own:
        capture = marked["weir"]["capture"]
        for _ in range(10):
            chunks = own.stream(PROMPTS[2], max_tokens=240, temperature=0, ignore_eos=True, capture=capture)
            first = next(chunks)
            told = own.mark(first, reason="soon")
            *_, last = chunks
            if not told["sinks"]:
                break  # otherwise it had ended before the mark came
        assert told == {"id": first.raw.id, "sinks": [], "gone": []}
        assert last.result.receipt.sinks == {"archive": "written"}
        done = own.generate(PROMPTS[0], capture=capture)
        assert own.mark(done)["sinks"] == [{"sink": "archive", "state": "written"}]
        with pytest.raises(weir.NotFound, match="was marked already"):
            own.mark(done.id)
    assert_nothing_held(client)


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
def test_marks_that_are_refused(client, asked, code, field):
    got = client.post("/v1/marks", content=json.dumps(asked), headers={"Content-Type": "application/json"})
    assert got.status_code == code, got.text
    assert field is None or got.json()["error"]["param"] == field
    assert client.post("/v1/marks", json=asked if code == 404 else {"id": "x"}, headers={"Authorization": "Bearer no"}
                       ).status_code == 401  # fmt: skip


def test_several_prompts_and_n(client, tmp_path):
    got = post(client, prompt=PROMPTS, n=2, temperature=1.0, seed=3, return_token_ids=True, weir=WISH)["choices"]
    assert [c["index"] for c in got] == list(range(6))
    for choice in got:
        found = rows_of(client, tmp_path, choice)
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        assert found.token_ids_of("resid_post", 3).tolist() == ids[:-1]
        assert choice["weir"]["receipt"]["captured"]["resid_post.0"] == len(ids) - 1
    streamed = events(client, prompt=PROMPTS, n=2, temperature=1.0, seed=3, return_token_ids=True, weir=WISH)
    for choice in got:
        parts = choices(streamed, choice["index"])
        assert [t for c in parts for t in c["token_ids"]] == choice["token_ids"]
        found = rows_of(client, tmp_path, parts[-1])
        assert found.token_ids_of("resid_post", 3).tolist() == (parts[0]["prompt_token_ids"] + choice["token_ids"][:-1])
    assert_nothing_held(client)


def test_chat(client, tmp_path):
    got = post(client, "/v1/chat/completions", n=2, temperature=1.0, seed=1, weir=WISH)
    prompt, generated = got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]
    assert generated == 2 * G
    for choice in got["choices"]:
        assert rows_of(client, tmp_path, choice).count(("resid_post", 0)) == prompt + G - 1
    chunks = events(client, "/v1/chat/completions", n=2, temperature=1.0, seed=1, weir=WISH)
    for i in range(2):
        parts = choices(chunks, i)
        assert ["weir" in c for c in parts] == [False] * (len(parts) - 1) + [True]
        same = rows_of(client, tmp_path, got_choice := parts[-1])
        assert got_choice["finish_reason"] == "length" and same.count(("resid_post", 0)) == prompt + G - 1


def test_scores(client, offline):
    expected, _, _ = offline["scores", PROMPTS[0]]
    weir_object = {"v": 1, "capture": [projection()]}
    whole = post(client, weir=weir_object)["choices"][0]["weir"]
    assert "activations" not in whole and set(whole["scores"]["sites"]) == {"resid_post.1", "resid_post.4"}
    for (hook, layer), (rows, at) in expected.items():
        found = np.array(whole["scores"]["sites"][f"{hook}.{layer}"], np.float32)
        assert found.tobytes() == rows.numpy().tobytes() and whole["scores"]["positions"] == at
    parts = choices(events(client, weir=weir_object | {"response": {"stream": True}}))
    assert parts[-1]["weir"]["scores"] == whole["scores"] and "receipt" in parts[-1]["weir"]
    early = [c["weir"]["scores"] for c in parts[:-1]]
    assert len(early) == len(parts) - 1 and all("receipt" not in c.get("weir", {}) for c in parts[:-1])
    at = [p for scores in early for p in scores["positions"]]
    assert at == whole["scores"]["positions"][: len(at)] and len(at) >= len(parts) - 1
    for site, rows in whole["scores"]["sites"].items():
        assert [r for scores in early for r in scores["sites"][site]] == rows[: len(at)]
    opening, *parts = choices(events(client, "/v1/chat/completions", weir=weir_object | {"response": {"stream": True}}))
    assert opening["delta"] == {"role": "assistant", "content": ""} and "weir" not in opening
    # An engine that is ahead of its reader sends several tokens in one chunk.
    assert 0 < len(parts) <= G and all(c["weir"]["scores"]["positions"] for c in parts)
    last = parts[-1]["weir"]["scores"]["positions"]
    assert last == list(range(len(last)))
    assert_nothing_held(client)


def test_scores_of_sites_with_different_rows(client):
    captures = [projection() | {"layers": [1]}, projection() | {"layers": [2], "positions": "last_prompt"}]
    scores = post(client, weir={"v": 1, "capture": captures})["choices"][0]["weir"]["scores"]
    assert "positions" not in scores
    for site, rows in scores["sites"].items():
        assert len(rows) == len(scores["positions_of"][site]) == len(scores["token_ids_of"][site])
    assert len(scores["sites"]["resid_post.2"]) == 1


def test_interventions_alone(client, offline):
    plain, steered = offline["rows", PROMPTS[0]][1], offline["steered", PROMPTS[0]][1]
    got = post(client, return_token_ids=True, weir={"v": 1, "interventions": [ADD]})["choices"][0]
    assert got["token_ids"] == steered and set(got["weir"]) == {"receipt"}
    assert sum(got["weir"]["receipt"]["steered"][0].values()) + got["weir"]["receipt"]["shared"][0] > G
    assert post(client, return_token_ids=True)["choices"][0]["token_ids"] == plain


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"weir": "{"}, "weir"),
        ({"weir": 5}, "weir"),
        ({"weir": {}}, "weir.v"),
        ({"weir": {"v": 2}}, "weir.v"),
        ({"weir": WISH | {"captures": []}}, "weir.captures"),
        ({"weir": WISH | {"response": {"xyz": 1}}}, "weir.response.xyz"),
        ({"weir": {"v": 1, "\ud800": 1}}, r"weir.\ud800"),
        ({"steering_vectors": {"\ud800": {"1": [1.0] * 256}}}, r"steering_vectors.\ud800.1.hook"),
        ({"weir": WISH, "vllm_xargs": {"weir": json.dumps(WISH)}}, "weir"),
        ({"weir": {"v": 1, "capture": [{"hook": "resid_post", "layers": [99]}]}}, "capture[0].layers"),
        ({"weir": {"v": 1, "capture": [{"hook": "nowhere"}]}}, "capture[0].hook"),
        ({"weir": {"v": 1, "capture": [{"layers": []}]}}, "capture[0].layers"),
        ({"weir": {"v": 1, "capture": [{"positions": []}]}}, "capture[0].positions"),
        ({"weir": {"v": 1, "capture": [{}, {"positions": [300, 400]}]}}, "capture[1].positions"),
        ({"weir": {"v": 1, "capture": [{"positions": {"special": "no"}}]}}, "capture[0].positions.special"),
        ({"weir": {"v": 1, "interventions": [ADD | {"positions": "generated"}]}, "max_tokens": 1},
         "interventions[0].positions"),
        ({"weir": {"v": 1, "interventions": [ADD | {"positions": {"token_ids": [9999]}}]}},
         "interventions[0].positions.token_ids"),
        ({"decode_steering_vectors": {"resid_post": {"3": [0.5] * 256}}, "max_tokens": 1},
         "decode_steering_vectors.resid_post.3.positions"),
        ({"steering_vectors": {"resid_post": {}}}, "steering_vectors.resid_post"),
        ({"weir": {"v": 1, "capture": [{"hook": "resid_post", "sink": {"filesystem": {"path": "/"}}}]}},
         "capture[0].sink"),
        ({"weir": {"v": 1, "capture": [{"hook": "resid_post", "sink": "nosuch"}]}}, "capture[0].sink"),
        ({"weir": {"v": 1, "interventions": [ADD | {"vector": [1.0]}]}}, "interventions[0].vector"),
        ({"weir": {"v": 1, "interventions": [ADD | {"vector": {"ref": "unknown"}}]}}, "interventions[0].vector"),
        ({"weir": {"v": 1, "interventions": [{"op": "pickle"}]}}, "interventions[0].op"),
        ({"vllm_xargs": {"output_residual_stream": "[99]"}}, "output_residual_stream.layers"),
        ({"vllm_xargs": {"apply_hooks": "[]"}}, "apply_hooks"),
        ({"extra_args": {"apply_steering_vectors": [1]}}, "apply_steering_vectors[0].activations"),
        ({"weir": {"v": 1, "capture": [{"hook": h} for h in ("resid_pre", "attn_out", "resid_mid", "mlp_out")]},
          "max_tokens": 240}, "capture"),
        ({"lora_request": {"lora_name": "x", "lora_path": "/etc"}}, "lora_request.lora_name"),
        ({"lora_request": {"lora_path": "/etc"}}, "lora_request.lora_name"),
        ({"lora_request": "x"}, "lora_request"),
        ({"weir": WISH, "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"wier": WISH}, "wier"),
        ({"capture": [{"hook": "resid_post"}]}, "capture"),
        ({"vllm_xargs": {"Weir": json.dumps(WISH), "mine": 1}}, "Weir"),
        ({"vllm_xargs": {"output_residual_streams": [1]}}, "output_residual_streams"),
        ({"weir": WISH, "extra_args": {"apply_steering_vector": []}}, "apply_steering_vector"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(client, path, asked, field, stream):
    error = post(client, path, code=400, stream=stream, **asked)["error"]
    assert error["code"] == 400 and error["param"] == field, error
    assert error["message"].startswith(field)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_scores_of_all_but_special_tokens(client, stream):
    """The chat template of the shipped model writes special tokens; the server's tokenizer says which they are."""
    capture = {"layers": [1], "positions": {"special": False}, "project": [1.0] * 256}
    asked = {"path": "/v1/chat/completions", "weir": {"v": 1, "capture": [capture]}}
    answer = choices(events(client, **asked))[-1] if stream else post(client, **asked)["choices"][0]
    scores = answer["weir"]["scores"]
    special = AutoTokenizer.from_pretrained(weir.demo_model()).all_special_ids
    assert scores["positions"][0] == 2 and not set(special) & set(scores["token_ids"])
    assert scores["positions"][-1] == answer["weir"]["receipt"]["prompt_tokens"] + G - 2


def test_other_routes_refuse_what_they_cannot_answer(client):
    asked = {"model": "demo", "input": "hi", "max_output_tokens": 2}
    lens = {"v": 1, "lens": {}}
    for more in (
        {"weir": WISH},
        {"vllm_xargs": {"weir": json.dumps(WISH)}},
        {"vllm_xargs": {"weir": json.dumps(lens)}},
    ):
        got = client.post("/v1/responses", json=asked | more)
        assert got.status_code == 400 and "/v1/completions" in got.text
    steer = {"vllm_xargs": {"weir": json.dumps({"v": 1, "interventions": [ADD]})}}
    assert client.post("/v1/responses", json=asked | steer).status_code == 200


@pytest.mark.parametrize("more", [{"wier": WISH}, {"vllm_xargs": {"wier": json.dumps(WISH)}}], ids=["body", "xargs"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_routes_know_a_slip(client, path, more):
    asked = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    if path == "/v1/responses":
        asked = {"model": "demo", "input": "hi", "max_output_tokens": 2}
    assert client.post(path, json=asked | {"wire": 1, "vllm_xargs": {"wire": 1}}).status_code == 200
    got = client.post(path, json=asked | more)
    assert got.status_code == 400 and "did you mean 'weir'?" in got.text, got.text


def test_a_route_that_drops_what_it_does_not_know_refuses_it(client):
    asked = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert client.post("/v1/messages", json=asked).status_code == 200
    for more in ({"weir": WISH}, {"extra_args": {"weir": WISH}}, {"vllm_xargs": {"weir": json.dumps(WISH)}}):
        got = client.post("/v1/messages", json=asked | more)
        assert got.status_code == 400 and "/v1/completions" in got.text, (more, got.text)
    steer = {"vllm_xargs": {"weir": json.dumps({"v": 1, "interventions": [ADD]})}}
    known = "vllm_xargs" in AnthropicMessagesRequest.model_fields  # not yet in 0.28
    assert client.post("/v1/messages", json=asked | steer).status_code == (200 if known else 400)


def test_a_route_that_makes_requests_of_its_own_refuses_it(client):
    asked = {"model": "demo", "query": "Tom was", "items": [" happy", " sad"], "label_token_ids": [5, 6]}
    plain = client.post("/generative_scoring", json=asked)
    assert plain.status_code == 200, plain.text
    steer = {"vllm_xargs": {"weir": json.dumps({"v": 1, "interventions": [ADD]})}}
    for more in ({"weir": WISH}, steer, {"steering_name": "a"}, {"extra_body": {"weir": WISH}}):
        got = client.post("/generative_scoring", json=asked | more)
        assert got.status_code == 400, (more, got.text)
        assert "/v1/completions" in got.text or "extra_body" in got.text


def test_large_bodies_and_missing_keys(client):
    large = json.dumps(body(user="x" * (5 << 20)))
    got = client.post("/v1/completions", content=large, headers={"Content-Type": "application/json"})
    assert got.status_code == 413 and got.json()["error"]["code"] == 413
    pieces = (large[i : i + 65536].encode() for i in range(0, len(large), 65536))
    got = client.post("/v1/completions", content=pieces, headers={"Content-Type": "application/json"})
    assert got.status_code == 413
    for path in ("/v1/weir/info", f"/v1/activations/{'a' * 32}"):
        assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get(f"/v1/activations/{'a' * 32}").status_code == 404
    post(client)


def test_info(client):
    found = client.get("/v1/weir/info").raise_for_status().json()
    assert (found["num_layers"], found["d_model"], found["dtype"]) == (6, 256, "float32")
    assert found["version"] == weir.__version__ and found["admin"] is True
    served = {"hook": "resid_post", "layer": 5, "served": True, "why": "", "shape": [256], "read_only": ""}
    assert served in found["sites"]
    assert found["limits"]["rows"] == 5000 and "directory" not in found["limits"] and ADMIN_KEY not in str(found)
    paths = client.get("/openapi.json").raise_for_status().json()["paths"]
    assert {"/v1/weir/info", "/v1/activations/{id}"} <= set(paths)


def lens_tensor(field):
    """As vllm-lens's client decodes it."""
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(field["data"]))
    assert field["compression"] == "zstd" and field["original_dtype"] == "torch.float32"
    return torch.from_numpy(np.frombuffer(raw, np.dtype(field["dtype"])).reshape(field["shape"]).copy())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_lens_s_keys_and_fields(client, path):
    asked = {"vllm_xargs": {"output_residual_stream": "[0, 3]"}}
    got = post(client, path, **asked)
    tokens = got["usage"]["prompt_tokens"] + G - 1
    stream = lens_tensor(got["activations"]["residual_stream"])
    assert stream.shape == (2, tokens, 256) and "activations" not in got["choices"][0]["weir"]
    for same in (
        {"vllm_xargs": {"output_residual_stream": [0, 3]}},
        {"extra_args": {"output_residual_stream": [0, 3]}},
    ):
        assert torch.equal(lens_tensor(post(client, path, **same)["activations"]["residual_stream"]), stream)
    every = post(client, path, vllm_xargs={"output_residual_stream": True})
    assert lens_tensor(every["activations"]["residual_stream"]).shape == (6, tokens, 256)
    last = events(client, path, **asked)[-1]
    assert set(last) == {"activations"}
    assert torch.equal(lens_tensor(last["activations"]["residual_stream"]), stream)
    assert_nothing_held(client)


def test_vllm_lens_s_keys_give_the_same_rows(client, offline):
    got = post(client, vllm_xargs={"output_residual_stream": "[0, 3]"})
    stream = lens_tensor(got["activations"]["residual_stream"])
    for row, layer in zip(stream, (0, 3), strict=True):
        assert row.numpy().tobytes() == offline["rows", PROMPTS[0]][0]["resid_post", layer][0].numpy().tobytes()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["rows", "steered", "scores"])
def test_what_a_worker_fails_is_no_mistake_of_the_client(client, path, kind):
    """It was answered with 400; a stream of scores was cut without a word."""
    weir_object = {"rows": WISH, "steered": {"v": 1, "interventions": [ADD]},
            "scores": {"v": 1, "capture": [projection()], "response": {"stream": True}}}[kind]  # fmt: skip
    client.get(FAIL).raise_for_status()
    errors = [post(client, path, 500, weir=weir_object)["error"]]
    made = chat(stream=True, weir=weir_object) if "chat" in path else body(stream=True, weir=weir_object)
    client.get(FAIL).raise_for_status()
    with client.stream("POST", path, json=made) as got:
        lines = [line for line in got.iter_lines() if line]
    if got.status_code == 500:  # a slow event loop gets all tokens at once: it has failed before a chunk was sent
        errors.append(json.loads("".join(lines))["error"])
    else:
        *begun, error, done = lines
        assert all('"choices"' in line for line in begun) and done == "data: [DONE]" and got.status_code == 200
        assert begun or (kind, path) == ("scores", "/v1/completions")
        errors.append(json.loads(error[6:])["error"])
    for one in errors:
        assert WHY in one["message"] and (one["code"], one["type"]) == (500, "InternalServerError")
    assert_nothing_held(client)


@needs(lens_source)
def test_vllm_lens_s_own_client(client):
    code = textwrap.dedent(
        """
        import sys, types, importlib.util, torch
        package = types.ModuleType("vllm_lens")  # its __init__ imports vLLM, which a client does not need
        package.__path__ = [sys.argv[1] + "/vllm_lens"]
        sys.modules["vllm_lens"] = package
        from vllm_lens.client import VLLMLensClient
        from vllm_lens._helpers.types import SteeringVector
        client = VLLMLensClient(sys.argv[2], api_key=sys.argv[3])
        same = dict(max_tokens=6, ignore_eos=True)
        base = client.generate("Tom was sad", capture_layers=[2, 3], **same)
        rows = base.activations["residual_stream"]
        vector = SteeringVector(activations=torch.full((1, 256), 0.5), layer_indices=[2], scale=4.0)
        out = client.generate("Tom was sad", capture_layers=[2, 3], steering_vectors=[vector], **same)
        moved = out.activations["residual_stream"]
        print(tuple(rows.shape), float((moved[0, 0] - rows[0, 0] - 2.0).abs().max()) < 1e-4)
        low = SteeringVector(activations=torch.full((1, 256), 0.5).bfloat16(), layer_indices=[2], scale=4.0)
        lower = client.generate("Tom was sad", capture_layers=[2, 3], steering_vectors=[low], **same)
        print(torch.equal(lower.activations["residual_stream"], moved))
        said = client.chat([{"role": "user", "content": "hi"}], capture_layers=[1], **same)
        print(said.activations["residual_stream"].shape[0])
        try:
            client.generate("x", capture_layers=[77])
        except RuntimeError as e:
            print("refused", "output_residual_stream" in str(e))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, lens_folder(), str(client.base_url).rstrip("/"), API_KEY],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:4] == ["(2, 9, 256) True", "True", "1", "refused True"], done.stdout


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_vanishes_leaves_nothing(client, path):
    left = held(client)["spool"]
    assert_nothing_held(client, spool=left)
    more = {"max_tokens": 200, "temperature": 1.0, "n": 2, "weir": WISH | {"response": {"inline_bytes": 0}}}
    more["ignore_eos"] = True
    made = chat(stream=True, **more) if "chat" in path else body(stream=True, **more)
    for _ in range(10):
        before = ended(client)
        with client.stream("POST", path, json=made) as got:
            assert got.status_code == 200
            lines = got.iter_lines()
            seen = [next(lines) for _ in range(8)]
            under_way = held(client)["requests"]
        eventually(lambda: held(client)["requests"], 0, 1.0)
        done = ended(client) - before
        eventually(lambda: held(client) | {"spool": 0}, {"store": 0, "requests": 0, "workers": 0, "spool": 0}, 1.0)
        kept = held(client)["spool"] - left
        assert 0 <= kept <= done, "results of sequences that did not end"
        left += kept  # of what has ended, each answer that went out before its client was gone can be fetched
        if not done:
            break
    assert not done, "they end before their client is gone, every time"
    assert under_way == 2 and not any('finish_reason":"' in line for line in seen)
    for _ in range(10):  # not streamed: gone while it waits
        before, gone = ended(client), False
        try:
            client.post(path, json=made | {"stream": False, "n": 24}, timeout=httpx.Timeout(120, read=0.1))
        except httpx.ReadTimeout:
            gone = True
        eventually(lambda: held(client)["requests"], 0, 1.0)
        if gone and ended(client) == before:
            break  # otherwise it had its answer in time, or all but
        eventually(lambda: held(client) | {"spool": 0}, {"store": 0, "requests": 0, "workers": 0, "spool": 0}, 1.0)
        left = held(client)["spool"]
    else:
        pytest.fail("they end before their client is gone, every time")
    assert_nothing_held(client, spool=left)


def test_fifty_at_once_leave_nothing(client, offline, tmp_path):
    """Plain, capturing, steering, streaming and aborted requests together; each gets its own."""

    async def one(http, i):
        prompt, kind = PROMPTS[i % 3], i % 5
        weir_object = WISH | {"response": {"inline_bytes": 0 if i % 2 else 1 << 20}}
        asked = body(prompt=prompt, return_token_ids=True)
        if kind == 0:
            got = (await http.post("/v1/completions", json=asked)).raise_for_status().json()["choices"][0]
            assert "weir" not in got and got["token_ids"] == offline["rows", prompt][1]
        elif kind in (1, 2):
            name = "rows" if kind == 1 else "steered"
            weir_object |= {} if kind == 1 else {"interventions": [ADD]}
            got = (await http.post("/v1/completions", json=asked | {"weir": weir_object})).raise_for_status().json()
            return name, prompt, got["choices"][0]
        elif kind == 3:
            async with http.stream(
                "POST", "/v1/completions", json=asked | {"weir": weir_object, "stream": True}
            ) as got:
                lines = [line async for line in got.aiter_lines() if line.startswith("data: {")]
            last = json.loads(lines[-1][6:])["choices"][0]
            return "rows", prompt, last
        else:
            weir_object["response"] = {
                "inline_bytes": 1 << 20
            }  # one that has ended by then leaves nothing to be fetched
            long = asked | {"weir": weir_object, "stream": True, "max_tokens": 200}
            async with http.stream("POST", "/v1/completions", json=long) as got:
                async for line in got.aiter_lines():
                    if line.startswith("data: {"):
                        break
        return None

    left = held(client)["spool"]

    async def many():
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=120) as http:
            return await asyncio.gather(*(one(http, i) for i in range(50)))

    found = [f for f in asyncio.run(many()) if f is not None]
    assert len(found) == 30
    for name, prompt, choice in found:
        expected = offline[name, prompt][0]
        acts = rows_of(client, tmp_path, choice)
        for site, (rows, at) in expected.items():
            # Batched with others the same sums are added in another order.
            assert acts.positions_of(*site).tolist() == at
            torch.testing.assert_close(acts[site], rows, rtol=1e-4, atol=1e-4)
    assert_nothing_held(client, seconds=2, spool=left)
