"""Hooks and lenses that a server's operator has loaded: named by requests, what they give comes back, streamed too."""

from __future__ import annotations

import asyncio

import pytest
import torch

import vllm_weir as weir
from tests.engine.serving import COMPLETIONS, HOOKS, LENS, PATHS, choices, events, jacobians, post, rows_of
from tests.support.machine import engine_processes, needs
from tests.support.measure import close_logits, rel_err
from vllm_weir.errors import WeirError

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(900), needs(engine_processes)]
PROMPT, MAX_TOKENS = "Anna took the boat out.", 12
SAME = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "return_token_ids": True}
OWN = torch.randn(256, generator=torch.Generator().manual_seed(8)) / 8
STEER = {"name": "steer", "args": {"w": OWN.tolist(), "scale": 2}, "layers": [1]}
WATCH = {"name": "watch", "layers": [3], "positions": "generated"}
ROWS = [{"hook": "resid_post", "layers": [1], "before": before} for before in (True, False)]


@pytest.fixture(scope="module")
def server(weir_server):
    return weir_server.http


def ask(server, path=COMPLETIONS, **weir_object):
    return post(server, path, weir={"v": 1, **weir_object}, **SAME)["choices"][0]


def text_of(choice):
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


@pytest.mark.parametrize("path", PATHS)
def test_a_named_function_with_args_of_the_request(server, path, tmp_path):
    """Its arithmetic on the rows, what it says of them, and a receipt."""
    before, after = (
        rows_of(server, ask(server, path, hooks=[STEER], capture=[one], response={"inline_bytes": 1 << 22}), tmp_path)
        for one in ROWS
    )
    choice = ask(server, path, hooks=[STEER])
    h, out = before["resid_post", 1], after["resid_post", 1]
    assert rel_err(out, h + 2 * torch.relu(h @ OWN)[:, None] * OWN) < 1e-5 < rel_err(out, h)
    told = choice["weir"]["values"]["probe"]
    assert told["positions"] == before.positions_of("resid_post", 1).tolist()
    assert rel_err(torch.tensor(told["values"]), h @ OWN) < 1e-4
    (receipt,) = choice["weir"]["receipt"]["interventions"]
    assert receipt["op"] == "hook" and receipt["acted"] == len(h)
    assert ask(server, path, interventions=[{"op": "hook", **STEER}])["weir"] == choice["weir"], "at its place"


@pytest.mark.parametrize("path", PATHS)
def test_values_come_with_the_tokens(server, path):
    asked = {"v": 1, "hooks": [WATCH, STEER], "response": {"stream": True}}
    *parts, last = choices(events(server, path, weir=asked, **SAME))
    whole = ask(server, path, hooks=[WATCH, STEER])
    assert "".join(map(text_of, [*parts, last])) == text_of(whole)
    for name in ("norm", "probe"):
        told = whole["weir"]["values"][name]
        assert last["weir"]["values"][name] == told
        found = [part["weir"]["values"][name] for part in parts if name in part.get("weir", {}).get("values", {})]
        streamed = [at for one in found for at in one["positions"]]
        assert streamed == told["positions"][: len(streamed)] and len(streamed) >= len(told["positions"]) // 2
    assert last["weir"]["saved"]["last"]["layer"] == 3 and last["weir"]["saved"]["last"]["none"] is None
    assert last["weir"]["saved"]["last"]["row"]["shape"] == [256]


def test_the_client(weir_server):
    """Values in float32, tensors among what is saved, and the list of hooks."""
    hooks = [weir.Use("watch", layers=3, positions="generated"), weir.Use("steer", args={"w": OWN, "scale": 2.0})]
    with weir_server.client() as client:
        asked = dict(max_tokens=MAX_TOKENS, temperature=0, hooks=hooks, ignore_eos=True)
        out = client.generate(PROMPT, **asked)
        *chunks, last = client.stream(PROMPT, **asked)
        assert out.text == last.result.text
        assert out.values["row"].shape == (MAX_TOKENS - 1, 256) and out.values["row"].dtype == torch.float32
        assert rel_err(out.values["norm"], out.values["row"].norm(dim=1)) < 1e-5
        assert torch.equal(out.saved["last"]["row"], out.values["row"][-1])
        assert out.saved["last"]["at"].tolist() == [int(out.values.positions["row"][-1])]
        streamed = torch.cat([one.values["row"] for one in chunks if one.values is not None and "row" in one.values])
        assert torch.equal(streamed, out.values["row"]) and torch.equal(last.result.values["row"], streamed)
        told = {one["name"]: one for one in client.hooks.list()["hooks"]}
        assert told.keys() == HOOKS.keys() and told["steer"]["layers"] == [1, 2]
        assert told["steer"]["args"] == {"w": {"dtype": "float32", "shape": [256]}, "scale": 3.0}
        with pytest.raises(WeirError, match="--weir-hook"):
            client.generate(PROMPT, hooks=weir.Hook(lambda rows, ctx: rows))
    assert asyncio.run(chat(weir_server)).values["probe"].shape[1] == 2


async def chat(weir_server):
    async with weir_server.client(weir.AsyncClient) as client:
        return await client.chat([{"role": "user", "content": PROMPT}], hooks="steer", max_tokens=4)


def test_a_function_that_raises_fails_its_own_request(weir_server):
    error = post(weir_server.http, code=500, weir={"v": 1, "hooks": ["fail"]}, **SAME)["error"]
    assert "ValueError: enough" in error["message"]
    assert post(weir_server.http, **SAME)["choices"][0]["text"]
    weir_server.check_nothing_held()


def test_modules_and_what_is_set_for_all_name_hooks(weir_server):
    """As requests do, with the same tokens, rows and values."""
    capture = [{"hook": "resid_post", "layers": [1]}]
    own = ask(weir_server.http, hooks=[STEER], capture=capture)
    steered = {"interventions": [{"op": "hook", **STEER}]}
    weir_server.admin("POST", "/v1/steering/modules/register", json={"name": "m", **steered}).raise_for_status()
    by_module = ask(weir_server.http, modules=["m"], capture=capture)
    weir_server.admin("POST", "/v1/steering/set", json=steered).raise_for_status()
    (told,) = weir_server.http.get("/v1/steering").json()["interventions"]
    assert (told["name"], told["layers"], told["args"]["scale"]) == ("steer", [1], 2.0) and "function" not in told
    by_all = ask(weir_server.http, capture=capture)
    for one in (by_module, by_all):
        assert one["text"] == own["text"] and one["weir"]["values"] == own["weir"]["values"]
        assert one["weir"]["activations"] == own["weir"]["activations"]
    weir_server.restore()


def test_a_named_lens(weir_server, server, tmp_path):
    """Logits of the named lens at its blocks, streamed too; its path is no client's matter."""
    with weir_server.client() as client:
        (told,) = client.lenses.list()["lenses"]
        assert told == {"name": LENS, "kind": "jacobian", "layers": [0, 2], "d_model": 256, "n_prompts": 3}
        out = client.generate(PROMPT, max_tokens=3, temperature=0, lens=weir.Lens(name=LENS, layers=[2, 5], top_k=4))
    asked = {"name": LENS, "layers": [2, 5], "top_k": 4}
    rows = rows_of(server, ask(server, capture=[{"hook": "resid_post"}], response={"inline_bytes": 1 << 22}), tmp_path)
    for layer in (2, 5):
        h = rows["resid_post", layer]
        mapped = h @ jacobians()[2].float().T if layer == 2 else h
        expected = reference_logprobs(mapped)
        got = out.lens[layer]
        n = len(got.positions)
        assert close_logits(got.logprobs, expected[:n].gather(1, got.token_ids), expected)
    streamed = choices(events(server, COMPLETIONS, weir={"v": 1, "lens": asked, "response": {"stream": True}}, **SAME))
    assert any("lens" in part.get("weir", {}) for part in streamed)
    for wrong, field in (({"name": LENS}, "lens.layers"), ({"name": "x"}, "lens.name"),
                         ({"kind": "jacobian", "path": "/etc/passwd"}, "lens.path")):  # fmt: skip
        error = post(server, code=400, weir={"v": 1, "lens": wrong}, **SAME)["error"]
        assert error["message"].startswith(field) or error.get("param") == field, error


def test_several_lenses_beside_rows(weir_server):
    """By label and block, and in a stream each row once; the rows are those of the request without lenses."""
    lenses = [weir.Lens(top_k=2, positions="sampled"), weir.Lens(name=LENS, layers=[2], tokens=[5, 9])]
    capture = weir.Capture("resid_post", layers=[2])
    asked = {"max_tokens": 4, "temperature": 0, "capture": capture}
    with weir_server.client() as client:
        alone = [client.generate(PROMPT, lens=one, **asked) for one in lenses]
        whole = client.generate(PROMPT, lens=lenses, **asked)
        rows = client.generate(PROMPT, **asked).activations
        *chunks, last = client.stream(PROMPT, lens=lenses, **asked)
    streamed = last.result
    assert list(whole.lens) == list(streamed.lens) == ["logit", LENS]
    for label, one in zip(whole.lens, alone, strict=True):
        assert list(whole.lens[label]) == list(one.lens) == ([2] if label == LENS else [0, 1, 2, 3, 4, 5])
        for layer, tokens in whole.lens[label].items():
            assert torch.equal(tokens.token_ids, one.lens[layer].token_ids)
            assert close_logits(tokens.logprobs, one.lens[layer].logprobs, one.lens[layer].logprobs)
            pieces = [chunk.lens[label][layer] for chunk in chunks if layer in chunk.lens.get(label, {})]
            assert torch.equal(torch.cat([piece.positions for piece in pieces]), tokens.positions)
            assert torch.equal(torch.cat([piece.token_ids for piece in pieces]), tokens.token_ids)
    assert rel_err(whole.activations["resid_post", 2].float(), rows["resid_post", 2].float()) <= 1e-5


def reference_logprobs(rows):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weir.demo_model()).double()
    with torch.no_grad():
        return model.lm_head(model.model.norm(rows.double())).log_softmax(-1)
