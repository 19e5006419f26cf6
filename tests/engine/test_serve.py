"""`weir serve`: the same rows as offline, inline, by reference and streamed, and nothing left."""

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
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

import vllm_weir as weir
from tests.engine.serve_cases import CAPTURE, MAX_TOKENS, PROMPTS, D, prompt_cases
from tests.engine.serve_probe import FAIL, ROUTES, WHY
from tests.engine.serving import (
    ADMIN_KEY,
    API_KEY,
    CHAT,
    COMPLETIONS,
    PATHS,
    add,
    body,
    choices,
    events,
    post,
    rows_of,
)
from tests.support.machine import engine_processes, lens_folder, lens_source, needs
from tests.support.measure import eventually, rel_err
from tests.support.refusals import refusals
from vllm_weir.client.response_fields import activations_of

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(1500), needs(engine_processes)]

ASKED = {"v": 1, "capture": CAPTURE}
STEERED = {"v": 1, "interventions": [add()]}
SCORES = {"v": 1, **prompt_cases()["projected"]}
G = MAX_TOKENS
INLINE, BY_REFERENCE = {"inline_bytes": 1 << 20}, {"inline_bytes": 0}


@pytest.fixture(scope="module")
def client(weir_server):
    return weir_server.http


@pytest.fixture(scope="module")
def offline(offline_answers):
    """(name, prompt) -> rows, token ids and receipt of the same request offline."""
    told = json.loads((offline_answers / "told.json").read_text())
    found = {}
    for name in prompt_cases():
        for k, prompt in enumerate(PROMPTS):
            rows, one = weir.Activations.load(offline_answers / f"{name}-{k}.safetensors"), told[f"{name}-{k}"]
            found[name, prompt] = (rows, one["token_ids"], one["receipt"])
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(weir_server):
    yield
    weir_server.check_nothing_held()


def assert_same(found, expected):
    """The same sites, positions, and bytes of every row."""
    assert set(found.sites) == set(expected.sites)
    for site in expected.sites:
        assert found.positions_of(*site).equal(expected.positions_of(*site))
        assert found[site].numpy().tobytes() == expected[site].numpy().tobytes(), site


def test_plain_answers_are_vllm_s(client):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponseChoice
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice

    got = post(client)
    assert set(got) == set(CompletionResponse.model_fields)
    assert set(got["choices"][0]) == set(CompletionResponseChoice.model_fields)
    assert set(post(client, CHAT)["choices"][0]) <= set(ChatCompletionResponseChoice.model_fields)
    for path in PATHS:
        assert not any("weir" in c for c in choices(events(client, path)))


@pytest.mark.parametrize("name", ["rows", "steered"])
@pytest.mark.parametrize("how", ["inline", "reference", "xargs", "streamed", "streamed reference"])
def test_the_rows_are_those_of_the_same_request_offline(client, offline, tmp_path, name, how):
    weir_object = ASKED | (STEERED if name == "steered" else {})
    weir_object |= {"response": BY_REFERENCE if "reference" in how else INLINE}
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
        assert_same(rows_of(client, choice, tmp_path), expected)
        mine = choice["weir"]["receipt"]
        assert mine.pop("cached_tokens") >= 0 and mine | {"cached_tokens": receipt["cached_tokens"]} == receipt


def to_archive(**more):
    return [capture | {"sink": "archive"} | more for capture in CAPTURE]


@pytest.mark.parametrize(("path", "stream"), [(COMPLETIONS, False), (CHAT, False), (COMPLETIONS, True), (CHAT, True)])
def test_the_operator_s_sinks(weir_server, client, tmp_path, path, stream):
    """They get rows beside those that come back, of the same sites, and keep nothing else alive."""
    weir_object = {"v": 1, "capture": [*CAPTURE, *to_archive()], "response": INLINE}
    answer = (
        choices(events(client, path, weir=weir_object)) if stream else post(client, path, weir=weir_object)["choices"]
    )
    back, receipt = rows_of(client, answer[-1], tmp_path), answer[-1]["weir"]["receipt"]
    assert len(back) == 3 and len(back["resid_post", 0]) >= G and receipt["sinks"] == {"archive": "written"}
    (file,) = receipt["files"]
    assert "/" not in file, "where the sink lies is nothing to a client"
    assert_same(weir.Activations.load(weir_server.folder / "archive" / file), back)
    only = post(client, path, weir={"v": 1, "capture": to_archive()})["choices"][0]["weir"]
    assert set(only) == {"receipt"} and only["receipt"]["sinks"] == {"archive": "written"}


def test_rows_that_are_marked(weir_server, client, offline):
    """Of finished requests, with several prompts in one; of one that is still generating; and never twice."""
    capture = to_archive(keep="marked")
    got = post(client, prompt=PROMPTS[:2], weir={"v": 1, "capture": capture})
    assert [c["weir"]["receipt"]["sinks"] for c in got["choices"]] == [{"archive": "held"}] * 2
    asked = {"id": got["id"], "metadata": {"reason": "odd"}}
    told = client.post("/v1/marks", json=asked).raise_for_status().json()
    assert told == {"id": got["id"], "sinks": [{"sink": "archive", "state": "written"}] * 2, "gone": []}
    rows = weir.load(weir_server.folder / "archive")
    mine = [name for name in rows if rows.metadata(name).get("mark") == {"reason": "odd"}]
    assert len(mine) == 2
    for name, prompt in zip(sorted(mine), PROMPTS, strict=False):
        assert_same(rows[name], offline["rows", prompt][0])
    again = client.post("/v1/marks", json=asked)
    assert again.status_code == 404 and again.json()["error"]["message"].count("was marked already") == 2
    assert again.json()["error"]["param"] == "id"

    with weir_server.client() as own:
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


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, PROMPTS), (CHAT, PROMPTS[0])], ids=["prompts", "chat"])
def test_several_prompts_and_n(client, tmp_path, path, prompt):
    """Each choice has its own rows, in the last event of its stream."""
    asked = dict(path=path, prompt=prompt, n=2, temperature=1.0, seed=3, return_token_ids=True, weir=ASKED)
    got, streamed = post(client, **asked), events(client, **asked)
    assert [c["index"] for c in got["choices"]] == list(range(2 if path == CHAT else 6))
    assert got["usage"]["completion_tokens"] == G * len(got["choices"])
    for choice in got["choices"]:
        ids = (choice if path == COMPLETIONS else got)["prompt_token_ids"] + choice["token_ids"]
        assert choice["weir"]["receipt"]["captured"]["resid_post.0"] == len(ids) - 1
        parts = choices(streamed, choice["index"])
        assert [t for c in parts for t in c.get("token_ids") or ()] == choice["token_ids"]
        assert ["weir" in c for c in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1]["finish_reason"] == "length"
        for one in (choice, parts[-1]):
            assert rows_of(client, one, tmp_path).token_ids_of("resid_post", 3).tolist() == ids[:-1]


def test_scores(client, offline):
    expected, _, _ = offline["projected", PROMPTS[0]]
    whole = post(client, weir=SCORES)["choices"][0]["weir"]
    assert "activations" not in whole and set(whole["scores"]["sites"]) == {"resid_post.1", "resid_post.4"}
    for site in expected.sites:
        found = np.array(whole["scores"]["sites"][f"{site.hook}.{site.layer}"], np.float32)
        assert found.tobytes() == expected[site].numpy().tobytes()
        assert whole["scores"]["positions"] == expected.positions_of(*site).tolist()
    streamed = SCORES | {"response": {"stream": True}}
    parts = choices(events(client, weir=streamed))
    assert parts[-1]["weir"]["scores"] == whole["scores"] and "receipt" in parts[-1]["weir"]
    early = [c["weir"]["scores"] for c in parts[:-1]]
    assert len(early) == len(parts) - 1 and all("receipt" not in c.get("weir", {}) for c in parts[:-1])
    at = [p for scores in early for p in scores["positions"]]
    assert at == whole["scores"]["positions"][: len(at)] and len(at) >= len(parts) - 1
    for site, rows in whole["scores"]["sites"].items():
        assert [r for scores in early for r in scores["sites"][site]] == rows[: len(at)]
    opening, *parts = choices(events(client, CHAT, weir=streamed))
    assert opening["delta"] == {"role": "assistant", "content": ""} and "weir" not in opening
    # An engine that is ahead of its reader sends several tokens in one chunk.
    assert 0 < len(parts) <= G and all(c["weir"]["scores"]["positions"] for c in parts)
    last = parts[-1]["weir"]["scores"]["positions"]
    assert last == list(range(len(last)))


def test_scores_of_sites_with_different_rows(client):
    (projection,) = SCORES["capture"]
    captures = [projection | {"layers": [1]}, projection | {"layers": [2], "positions": "last_prompt"}]
    scores = post(client, weir={"v": 1, "capture": captures})["choices"][0]["weir"]["scores"]
    assert "positions" not in scores
    for site, rows in scores["sites"].items():
        assert len(rows) == len(scores["positions_of"][site]) == len(scores["token_ids_of"][site])
    assert len(scores["sites"]["resid_post.2"]) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_scores_of_all_but_special_tokens(client, stream):
    """The chat template of the shipped model writes special tokens; the server's tokenizer says which they are."""
    capture = {"layers": [1], "positions": {"special": False}, "project": [1.0] * D}
    asked = {"path": CHAT, "weir": {"v": 1, "capture": [capture]}}
    answer = choices(events(client, **asked))[-1] if stream else post(client, **asked)["choices"][0]
    scores = answer["weir"]["scores"]
    special = AutoTokenizer.from_pretrained(weir.demo_model()).all_special_ids
    assert scores["positions"][0] == 2 and not set(special) & set(scores["token_ids"])
    assert scores["positions"][-1] == answer["weir"]["receipt"]["prompt_tokens"] + G - 2


def test_interventions_alone(client, offline):
    plain, steered = offline["rows", PROMPTS[0]][1], offline["steered", PROMPTS[0]][1]
    got = post(client, return_token_ids=True, weir=STEERED)["choices"][0]
    assert got["token_ids"] == steered and set(got["weir"]) == {"receipt"}
    assert sum(got["weir"]["receipt"]["steered"][0].values()) + got["weir"]["receipt"]["shared"][0] > G
    assert post(client, return_token_ids=True)["choices"][0]["token_ids"] == plain


@pytest.mark.parametrize("path", PATHS)
def test_what_is_refused_names_its_field(client, path):
    """`tests/unit/server/test_refusals.py` has all refusals; here are representatives, whole and streamed."""
    sent = [one for one in refusals(D, weir.SAE.load(weir.demo_sae()).d_sae) if one.sent]
    assert len({one.door for one in sent}) == 3
    for k, one in enumerate(sent):
        error = post(client, path, code=400, stream=k % 2 == 0, **one.asked)["error"]
        assert error["code"] == 400 and error["param"] == one.field, error
        assert error["message"].startswith(one.field) and one.why in error["message"], error


def in_xargs(weir_object):
    return {"vllm_xargs": {"weir": json.dumps(weir_object)}}


SCORING = {"query": "Tom was", "items": [" happy", " sad"], "label_token_ids": [5, 6]}


def test_the_fork_s_gates_and_patches(client, tmp_path):
    """A patch is in the rows; gates do what the same in Weir's own words does."""
    read = {"v": 1, "capture": [{"hook": "resid_post", "layers": [3]}], "response": INLINE}
    plain = rows_of(client, post(client, weir=read)["choices"][0], tmp_path)["resid_post", 3]
    row = np.linspace(-1, 1, D, dtype=np.float32)
    table = {"dtype": "float32", "shape": [1, D], "data": base64.b64encode(row.tobytes()).decode()}
    site = {"layer": 3, "hook": "post_block"}
    patch = [
        site | {"dest_position": 1, "source_module": "zeros"},
        site | {"dest_position": 2, "source_inline": 0, "alpha": 0.5},
        site | {"dest_position": 0, "source_inline": 0, "mask": {"indices": [5]}},
    ]
    got = post(client, patch=patch, patch_vectors=table, weir=read)["choices"][0]
    rows = rows_of(client, got, tmp_path)["resid_post", 3].float()
    want = plain[:3].float().clone()
    want[1], want[2], want[0, 5] = 0, 0.5 * want[2] + 0.5 * torch.from_numpy(row), float(row[5])
    assert rel_err(rows[:3], want) < 1e-5 and not rows[1].any()

    inline = {"kind": "inline", "packed": {"post_block": table | {"layer_indices": [1]}}}
    steer = {"kind": "inline", "packed": {"post_block": table | {"layer_indices": [3]}}}
    probe = {"kind": "linear", "name": "steering.0", "weight": row.tolist(), "layer": 1, "positions": "generated"}
    when = {"probe": "steering.0", "above": 0.0}
    add = {"op": "add", "vector": row.tolist(), "layers": [3], "scale": 9.0, "positions": "generated"}
    for scope, more in (("this_token", {"sharpness": 1.0}), ("rest_of_request", {"latch": True, "delay": 1})):
        gate = {"when": {"kind": "probe", "probe": inline, "threshold": 0.0}, "scope": scope}
        theirs = post(client, steering=[gate | {"apply": {"kind": "add", "steer": steer, "strength": 9.0}}])
        own = {"v": 1, "probes": [probe], "interventions": [add | {"when": when | more}]}
        ours = post(client, weir=own)["choices"][0]
        theirs = theirs["choices"][0]
        assert theirs["text"] == ours["text"]
        assert theirs["weir"]["receipt"]["gates"] == ours["weir"]["receipt"]["gates"] != [None]
        assert theirs["weir"]["scores"] == ours["weir"]["scores"]


SWEEP = {
    "model": "demo",
    "prompt": "Tom went to the garden. Tom was sad. Tom",
    "clean_prompt": "Tom went to the garden. Tom was happy. Tom",
    "source_run": "r",
    "hooks": ["post_block", "pre_attn"],
    "layers": [0, 5],
    "answer_token": " was",
    "foil_token": " went",
}


def sweep_events(client, **more):
    answer = client.post("/v1/patch_sweep", json=SWEEP | more | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_fork_s_sweep(client):
    """Of the last block's rows the last position's alone decides; others are what a request of their own says."""
    start, *cells, summary = sweep_events(client, metric="recovered")
    n = len(start["positions"])
    assert start["type"] == "start" and len(cells) == 2 * 2 * n and summary["type"] == "summary"
    assert summary["hook"] == "post_block" and summary["alignment"]["unaligned_positions"] == []
    after, before = (np.array(one["grid"]) for one in summary["hook_grids"])
    assert after.shape == (2, n) and after[1, -1] == pytest.approx(1, abs=1e-3)
    assert np.abs(after[1, :-1]).max() < 1e-3 and np.abs(before[0]).max() > 1e-3
    found = {(c["hook"], c["layer"], c["position"]): c["value"] for c in cells}
    assert all(found["post_block", layer, p] == after[i, p] for i, layer in enumerate((0, 5)) for p in range(n))
    assert summary["argmax"]["value"] == after.max() and summary["noise_floor"] < 1e-3
    left = sweep_events(client, metric="recovered", done=cells[: 3 * n])
    assert len(left) == 2 + n
    assert left[-1]["hook_grids"] == summary["hook_grids"] or rel_err(
        torch.tensor(left[-1]["grid"]), torch.tensor(summary["grid"])) < 1e-3  # fmt: skip


def test_the_fork_s_sweep_with_one_vector(client):
    """Zeros at some values, at the tokens of a text; the same as a patch in a request of its own."""
    asked = {key: SWEEP[key] for key in ("model", "prompt", "answer_token", "foil_token")}
    asked |= {"source_module": "zeros", "mask": {"indices": [3, 4]}, "hook": "post_block", "metric": "logit_diff"}
    asked |= {"layers": {"start": 1, "stop": 4, "step": 2}, "positions": [{"span": "garden"}, 1]}
    got = client.post("/v1/patch_sweep", json=asked)
    assert got.status_code == 200, got.text
    got = got.json()
    assert got["layers"] == [1, 3] and got["positions"][-1] == 1 and got["clean"] is None
    tokenize = {"model": "demo", "add_special_tokens": False}
    told = [client.post("/tokenize", json=tokenize | {"prompt": text}).json() for text in (" was", " went")]
    ids = [one["tokens"][0] for one in told]
    for i, layer in enumerate(got["layers"]):
        for j, position in enumerate(got["positions"]):
            site = {"layer": layer, "hook": "post_block", "dest_position": position, "source_module": "zeros"}
            more = {"patch": [site | {"mask": {"indices": [3, 4]}}], "max_tokens": 1, "logprobs": 2}
            one = post(client, prompt=asked["prompt"], logprob_token_ids=ids, return_tokens_as_token_ids=True, **more)
            said = one["choices"][0]["logprobs"]["top_logprobs"][0]
            alone = said[f"token_id:{ids[0]}"] - said[f"token_id:{ids[1]}"]
            assert got["grid"][i][j] == pytest.approx(alone, abs=1e-3)


WRONG_SWEEPS = {
    "clean_prompt": [{"clean_prompt": None, "source_run": None}, {"source_module": "zeros"}],
    "source_run": [{"clean_prompt": None}],
    "keep_source": [{"keep_source": True}],
    "model": [{"model": "adapter"}],
    "metric": [{"metric": "recovered", "clean_prompt": SWEEP["prompt"]}],
    "answer_token": [{"answer_token": None}, {"answer_token": " was happy"}, {"answer_token_id": 10**6}],
    "foil_token": [{"metric": "logit_diff", "foil_token": None}],
    "positions": [{"layers": []}, {"hooks": ["post_block"], "layers": list(range(16384))}],
    "positions[0]": [{"positions": [10**6]}, {"positions": [{"span": "zebra"}]}],
    "hooks": [{"hooks": ["nowhere"]}],
    "layers": [{"layers": [99]}],
    "prompt": [{"prompt": "Tom " * 5000, "clean_prompt": "Tom " * 5000, "positions": [0]}],
}


@pytest.mark.parametrize(("field", "more"), [(field, more) for field, each in WRONG_SWEEPS.items() for more in each])
def test_sweeps_that_are_refused(client, field, more):
    got = client.post("/v1/patch_sweep", json={k: v for k, v in (SWEEP | more).items() if v is not None})
    assert got.status_code == 400 and got.json()["error"]["param"] == field, got.text


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
XARGS_OF_MESSAGES = "vllm_xargs" in AnthropicMessagesRequest.model_fields  # not yet in 0.28
OTHER_ROUTES = {
    # Steering alone is served where a request may carry it; rows and what is read off them nowhere.
    "/v1/responses": ({"input": "hi", "max_output_tokens": 2}, True),
    "/v1/messages": (MESSAGES, XARGS_OF_MESSAGES),
    "/generative_scoring": (SCORING, False),
}


@pytest.mark.parametrize("path", OTHER_ROUTES)
def test_other_routes_refuse_what_they_cannot_answer(client, path):
    fields, steers = OTHER_ROUTES[path]
    asked = {"model": "demo"} | fields
    assert client.post(path, json=asked).status_code == 200
    assert client.post(path, json=asked | in_xargs(STEERED)).status_code == (200 if steers else 400)
    refused = [{"weir": ASKED}, in_xargs(ASKED), {"extra_args": {"weir": ASKED}}]
    refused += [in_xargs({"v": 1, "lens": {}}), {"steering_name": "a"}]
    if path == "/generative_scoring":
        refused.append({"extra_body": {"weir": ASKED}})
    for more in refused:
        got = client.post(path, json=asked | more)
        assert got.status_code == 400, (more, got.text)
        assert any(why in got.text for why in (COMPLETIONS, "extra_body", "steering_name")), (more, got.text)
    if path != "/generative_scoring":
        assert client.post(path, json=asked | {"wire": 1, "vllm_xargs": {"wire": 1}}).status_code == 200
        for slip in ({"wier": ASKED}, {"vllm_xargs": {"wier": json.dumps(ASKED)}}):
            got = client.post(path, json=asked | slip)
            assert got.status_code == 400 and "did you mean 'weir'?" in got.text, got.text


def test_no_route_serves_weir_s_keys_without_the_api_key(weir_server, client):
    """vLLM asks for its key below some paths alone; /invocations leads to the handlers of completions and chat."""
    paths = client.get(ROUTES).json()
    assert {"/invocations", *PATHS} <= set(paths)
    counted = "vllm:request_success_total", "weir_rows_captured_total", "weir_steered_tokens_total"
    before = list(map(weir_server.metric, counted))
    asked = [{"weir": ASKED}, in_xargs(ASKED), {"extra_args": {"weir": STEERED}}, {"steering_name": "a"}]
    lora = {"lora_request": {"lora_name": "tiny"}}  # elsewhere a field like any other that vLLM does not know
    nobody = {"Authorization": "Bearer wrong"}
    for path in paths:
        for k, more in enumerate([*asked, *[lora] * (path == "/invocations")]):
            headers = nobody if k % 2 else {"Authorization": ""}
            got = client.post(path, json=body(PATHS[k % 2]) | {"input": "hi", **SCORING} | more, headers=headers)
            assert "receipt" not in got.text, (path, more, got.text)
            if path == "/invocations":
                assert got.status_code == 401 and "API key" in got.json()["error"]["message"], got.text
    assert list(map(weir_server.metric, counted)) == before
    assert "receipt" in client.post("/invocations", json=body(weir=ASKED)).json()["choices"][0]["weir"]
    assert client.post("/invocations", json=body(), headers=nobody).status_code == 200  # as vLLM serves it


def test_large_bodies_keys_and_marks_of_nobody(client):
    """That the routes and the bounds of `tests/unit/server` are those of the server that runs."""
    large, json_ = json.dumps(body(user="x" * (5 << 20))), {"Content-Type": "application/json"}
    for content in (large, (large[i : i + 65536].encode() for i in range(0, len(large), 65536))):
        got = client.post(COMPLETIONS, content=content, headers=json_)
        assert got.status_code == 413 and got.json()["error"]["code"] == 413
    wrong, nobody = {"Authorization": "Bearer wrong"}, {"id": "cmpl-nobody"}
    for path in ("/v1/weir/info", f"/v1/activations/{'a' * 32}"):
        assert client.get(path, headers=wrong).status_code == 401
    assert client.get(f"/v1/activations/{'a' * 32}").status_code == 404
    assert client.post("/v1/marks", json=nobody, headers=wrong).status_code == 401
    got = client.post("/v1/marks", json=nobody)
    assert got.status_code == 404 and got.json()["error"]["param"] == "id"
    for path in ("/v1/vectors/a", "/v1/probes/a", "/v1/saes/a"):
        assert client.delete(path, headers={"X-Weir-Admin-Key": "no"}).status_code == 401
    post(client)


def test_info(client):
    found = client.get("/v1/weir/info").raise_for_status().json()
    assert (found["num_layers"], found["d_model"], found["dtype"]) == (6, D, "float32")
    assert found["version"] == weir.__version__ and found["admin"] is True
    served = {"hook": "resid_post", "layer": 5, "served": True, "why": "", "shape": [D], "read_only": ""}
    assert served in found["sites"]
    assert {s["hook"] for s in found["sites"] if s["served"]} >= {"resid_pre", "resid_mid", "resid_post"}
    assert found["limits"]["rows"] == 5000 and "directory" not in found["limits"] and ADMIN_KEY not in str(found)
    paths = client.get("/openapi.json").raise_for_status().json()["paths"]
    assert {"/v1/weir/info", "/v1/activations/{id}", "/v1/vectors/{name}", "/v1/steering/set"} <= set(paths)


def lens_tensor(field):
    """As vllm-lens's client decodes it."""
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(field["data"]))
    assert field["compression"] == "zstd" and field["original_dtype"] == "torch.float32"
    return torch.from_numpy(np.frombuffer(raw, np.dtype(field["dtype"])).reshape(field["shape"]).copy())


@pytest.mark.parametrize("path", PATHS)
def test_vllm_lens_s_keys_and_fields(client, offline, path):
    asked = {"vllm_xargs": {"output_residual_stream": "[0, 3]"}}
    got = post(client, path, **asked)
    tokens = got["usage"]["prompt_tokens"] + G - 1
    stream = lens_tensor(got["activations"]["residual_stream"])
    assert stream.shape == (2, tokens, D) and "activations" not in got["choices"][0]["weir"]
    if path == COMPLETIONS:
        for row, layer in zip(stream, (0, 3), strict=True):
            assert row.numpy().tobytes() == offline["rows", PROMPTS[0]][0]["resid_post", layer].numpy().tobytes()
    for place in ("vllm_xargs", "extra_args"):
        same = post(client, path, **{place: {"output_residual_stream": [0, 3]}})
        assert torch.equal(lens_tensor(same["activations"]["residual_stream"]), stream)
    every = post(client, path, vllm_xargs={"output_residual_stream": True})
    assert lens_tensor(every["activations"]["residual_stream"]).shape == (6, tokens, D)
    last = events(client, path, **asked)[-1]
    assert set(last) == {"activations"}
    assert torch.equal(lens_tensor(last["activations"]["residual_stream"]), stream)


@pytest.mark.parametrize("path", PATHS)
def test_vllm_lens_s_queries_and_keys(client, path):
    """In base64, fetched, and streamed the same bytes, which are those of Weir's own capture."""
    asked = {"output_qk": "[1, 4]", "output_residual_stream": "[4]"}
    inline = post(client, path, vllm_xargs=asked)["activations"]
    assert set(inline) == {"residual_stream", "attn_q", "attn_k", "qk_layers", "qk_meta"}
    assert inline["qk_layers"] == {"__json__": [1, 4]} and len(inline["qk_meta"]["__json__"]) == 2
    found = weir.decode_activations({"activations": inline})
    own = {"v": 1, "capture": [{"hook": "q_rot", "layers": [1, 4]}, {"hook": "k_rot", "layers": [1, 4]}]}
    (choice,) = post(client, path, weir=own | {"response": INLINE})["choices"]
    rows = activations_of(base64.b64decode(choice["weir"]["activations"]["b64"]))
    for name, hook in (("attn_q", "q_rot"), ("attn_k", "k_rot")):
        assert torch.equal(found[name], torch.stack([rows[hook, 1], rows[hook, 4]])), hook
    xargs = asked | {"activations_transport": "binary"}
    for told in (post(client, path, vllm_xargs=xargs), events(client, path, vllm_xargs=xargs)[-1]):
        told = told["activations"]
        assert "data" not in str(told) and told["attn_q"]["transport"] == "binary"
        fetched = weir.decode_activations({"activations": told}, fetch_bytes=lambda handle: frame(client, handle))
        for name, tensor in found.items():
            same = torch.equal(fetched[name], tensor) if isinstance(tensor, torch.Tensor) else fetched[name] == tensor
            assert same, name
        for name in ("residual_stream", "attn_q", "attn_k"):
            assert client.delete(f"/v1/activations/{told[name]['handle']}").status_code == 204
    with pytest.raises(weir.WeirError, match="fetch_bytes"):
        weir.decode_activations({"activations": told})
    every = post(client, path, extra_args={"output_qk": True})["activations"]
    assert every["qk_layers"]["__json__"] == list(range(6))
    for field, value in (("output_qk.layers", "[77]"), ("output_qk", 0.5), ("activations_transport", "zip")):
        told = post(client, path, 400, vllm_xargs={field.partition(".")[0]: value})["error"]
        assert told["param"] == field
    assert "activations" not in post(client, path, vllm_xargs={"activations_transport": "binary"})


def frame(client, handle):
    """The frame under a handle, fetched whole and by a range, as vllm-lens's own server describes it."""
    got = client.get(f"/v1/activations/{handle}").raise_for_status()
    assert got.headers["Content-Type"] == "application/octet-stream" and "no-store" in got.headers["Cache-Control"]
    assert got.headers["X-VLLM-Lens-Dtype"] == "float32" and got.headers["X-VLLM-Lens-Compression"] == "zstd"
    assert got.headers["X-VLLM-Lens-Original-Dtype"] == "torch.float32"
    raw = zstandard.ZstdDecompressor().decompress(got.content)
    assert 4 * np.prod(json.loads(got.headers["X-VLLM-Lens-Shape"])) == len(raw)
    part = client.get(f"/v1/activations/{handle}", headers={"Range": "bytes=4-9"})
    assert part.status_code == 206 and part.content == got.content[4:10]
    return got.content


FAILING = {"rows": ASKED, "steered": STEERED, "scores": SCORES | {"response": {"stream": True}}}


@pytest.mark.parametrize(
    ("kind", "path"), [("rows", COMPLETIONS), ("steered", CHAT), ("scores", COMPLETIONS), ("scores", CHAT)]
)
def test_what_a_worker_fails_is_no_mistake_of_the_client(client, path, kind):
    """It was answered with 400; a stream of scores was cut without a word."""
    asked = {"weir": FAILING[kind]}
    client.get(FAIL).raise_for_status()
    errors = [post(client, path, 500, **asked)["error"]]
    client.get(FAIL).raise_for_status()
    with client.stream("POST", path, json=body(path, stream=True, **asked)) as got:
        lines = [line for line in got.iter_lines() if line]
    if got.status_code == 500:  # a slow event loop gets all tokens at once: it has failed before a chunk was sent
        errors.append(json.loads("".join(lines))["error"])
    else:
        *begun, error, done = lines
        assert all('"choices"' in line for line in begun) and done == "data: [DONE]" and got.status_code == 200
        assert begun or (kind, path) == ("scores", COMPLETIONS)
        errors.append(json.loads(error[6:])["error"])
    for one in errors:
        assert WHY in one["message"] and (one["code"], one["type"]) == (500, "InternalServerError")


@needs(lens_source)
def test_vllm_lens_s_own_client(client):
    code = textwrap.dedent(
        """
        import sys, types, importlib.util, torch
        package = types.ModuleType("vllm_lens")  # its __init__ imports vLLM, which a client does not need
        package.__path__ = [sys.argv[1] + "/vllm_lens"]
        sys.modules["vllm_lens"] = package
        from vllm_lens.client import VLLMLensClient
        from vllm_lens._helpers.types import Hook, SteeringVector
        from vllm_lens.attention import attention_patterns
        client = VLLMLensClient(sys.argv[2], api_key=sys.argv[3])
        same = dict(max_tokens=6, ignore_eos=True)
        base = client.generate("Tom was sad", capture_layers=[2, 3], **same)
        rows = base.activations["residual_stream"]
        vector = SteeringVector(activations=torch.full((1, 256), 0.5), layer_indices=[2], scale=4.0)
        out = client.generate("Tom was sad", capture_layers=[2, 3], steering_vectors=[vector], **same)
        moved = out.activations["residual_stream"]
        error = (moved[0, 0] - rows[0, 0] - 2.0).abs().max() / moved[0, 0].abs().max()
        print(tuple(rows.shape), float(error) < 1e-5)
        low = SteeringVector(activations=torch.full((1, 256), 0.5).bfloat16(), layer_indices=[2], scale=4.0)
        lower = client.generate("Tom was sad", capture_layers=[2, 3], steering_vectors=[low], **same)
        print(torch.equal(lower.activations["residual_stream"], moved))
        said = client.chat([{"role": "user", "content": "hi"}], capture_layers=[1], **same)
        print(said.activations["residual_stream"].shape[0])
        wanted = dict(capture_layers=[1], capture_qk=[0, 2], **same)
        inline = client.generate("Tom was sad", **wanted).activations
        def free(out):
            handles = [entry["handle"] for entry in out.raw["activations"].values() if "handle" in entry]
            for handle in handles:
                client._session.delete(f"{client.base_url}/v1/activations/{handle}").raise_for_status()
            return len(handles)
        binary = client.generate("Tom was sad", activations_transport="binary", **wanted)
        fetched = binary.activations
        print(all(torch.equal(a, fetched[name]) if torch.is_tensor(a) else a == fetched[name]
              for name, a in inline.items()) and set(inline) == set(fetched), *inline)
        talk = client.chat([{"role": "user", "content": "hi"}], capture_qk=True, activations_transport="binary", **same)
        print(talk.activations["qk_layers"], "residual_stream" in talk.activations, free(binary), free(talk))
        body = {"model": client.model, "prompt": "Tom was sad", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        body["weir"] = {"v": 1, "capture": [{"hook": "pattern", "layers": 2}], "response": {"inline_bytes": 1 << 20}}
        told = client._session.post(sys.argv[2] + "/v1/completions", json=body).json()
        from safetensors.torch import load
        import base64
        pattern = load(base64.b64decode(told["choices"][0]["weir"]["activations"]["b64"]))["pattern.2"]
        print(float((attention_patterns(inline, 2) - pattern.transpose(0, 1)).abs().max()) < 1e-5)
        hook = Hook(fn=print, layer_indices=[1])
        for wrong in ({"capture_layers": [77]}, {"capture_qk": [77]}, {"hooks": [hook]}):
            try:
                client.generate("x", **wrong)
            except RuntimeError as e:
                print("refused", str(e).partition(":")[0])
        for call in (lambda: client.register_hooks([hook]), lambda: client.prefetch_params(["a"])):
            try:
                call()
            except RuntimeError as e:
                print("refused", "--weir-hook" in str(e))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, lens_folder(), str(client.base_url).rstrip("/"), API_KEY],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "(2, 9, 256) True",
        "True",
        "1",
        "True residual_stream attn_q attn_k qk_layers qk_meta",
        "[0, 1, 2, 3, 4, 5] False 3 2",
        "True",
        "refused output_residual_stream.layers",
        "refused output_qk.layers",
        "refused apply_hooks",
        "refused True",
        "refused True",
    ]


def ended(server):
    """How many sequences have come to an end by themselves."""
    return sum(server.metric("vllm:request_success_total", finished_reason=why) for why in ("stop", "length"))


def settle(server):
    """Wait until nothing is held but results; return how many of those are new."""
    eventually(lambda: server.held() | {"spool": 0}, {"store": 0, "requests": 0, "workers": 0, "spool": 0}, 10)
    new = server.held()["spool"] - server.left
    server.left += new
    return new


@pytest.mark.parametrize("path", [pytest.param(COMPLETIONS, marks=pytest.mark.thorough), CHAT])
def test_a_client_that_vanishes_leaves_nothing(weir_server, client, path):
    made = body(path, max_tokens=200, temperature=1.0, n=2, weir=ASKED | {"response": BY_REFERENCE})
    for _ in range(10):
        before = ended(weir_server)
        with client.stream("POST", path, json=made | {"stream": True}) as got:
            assert got.status_code == 200
            lines = got.iter_lines()
            seen = [next(lines) for _ in range(8)]
            under_way = weir_server.held()["requests"]
        eventually(lambda: weir_server.held()["requests"], 0, 10)
        # Of what has ended, each answer that went out before its client was gone can be fetched.
        new, done = settle(weir_server), ended(weir_server) - before
        assert 0 <= new <= done, "results of sequences that did not end"
        if not done:
            break
    assert not done, "they end before their client is gone, every time"
    assert under_way == 2 and not any('finish_reason":"' in line for line in seen)
    for _ in range(10):  # not streamed: gone while it waits
        before, gone = ended(weir_server), False
        try:
            client.post(path, json=made | {"n": 24}, timeout=httpx.Timeout(120, read=0.1))
        except httpx.ReadTimeout:
            gone = True
        eventually(lambda: weir_server.held()["requests"], 0, 10)
        new = settle(weir_server)
        if gone and ended(weir_server) == before:
            assert new == 0
            break  # otherwise it had its answer in time, or all but
    else:
        pytest.fail("they end before their client is gone, every time")


def test_fifty_at_once_leave_nothing(client, offline, tmp_path):
    """Plain, capturing, steering, streaming and aborted requests together; each gets its own."""

    async def read(http, until_end, **asked):
        last = None
        async with http.stream("POST", COMPLETIONS, json=body(stream=True, **asked)) as got:
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])["choices"][0]
                    if not until_end:
                        break
        return last

    async def one(http, i):
        prompt, kind = PROMPTS[i % 3], i % 5
        weir_object = ASKED | {"response": BY_REFERENCE if i % 2 else INLINE}
        if kind == 4:  # gone after its first token; one that has ended by then leaves nothing to be fetched
            await read(http, False, prompt=prompt, max_tokens=200, weir=ASKED | {"response": INLINE})
            return None
        if kind == 3:
            return "rows", prompt, await read(http, True, prompt=prompt, weir=weir_object)
        asked = body(prompt=prompt, return_token_ids=True)
        if kind:
            asked["weir"] = weir_object | (STEERED if kind == 2 else {})
        choice = (await http.post(COMPLETIONS, json=asked)).raise_for_status().json()["choices"][0]
        if kind == 0:
            assert "weir" not in choice and choice["token_ids"] == offline["rows", prompt][1]
            return None
        return "rows" if kind == 1 else "steered", prompt, choice

    async def many():
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=600) as http:
            return await asyncio.gather(*(one(http, i) for i in range(50)))

    found = [f for f in asyncio.run(many()) if f is not None]
    assert len(found) == 30
    for name, prompt, choice in found:
        expected = offline[name, prompt][0]
        acts = rows_of(client, choice, tmp_path)
        for site in expected.sites:
            assert acts.positions_of(*site).equal(expected.positions_of(*site))
            assert rel_err(acts[site], expected[site]) <= 1e-5  # batched with others, sums are in another order
