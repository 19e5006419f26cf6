"""The same request offline, over HTTP, streamed, and through both clients: the same rows, to the byte."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import httpx
import openai
import pytest
import torch

import vllm_weir as weir
from tests.engine.serve_cases import ADAPTER, MAX_TOKENS, MESSAGES, cases, vector
from tests.support.machine import engine_processes, needs
from tests.support.measure import rel_err
from vllm_weir.client.payload import NOTHING, weir_object
from vllm_weir.client.response_fields import activations_of
from vllm_weir.client.results import Choice

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(900), needs(engine_processes)]
SAME = dict(max_tokens=MAX_TOKENS, temperature=0)


@pytest.fixture(scope="module")
def client(weir_server, offline_answers):
    with weir_server.client() as made:
        made.load_adapter(ADAPTER, offline_answers / "adapter")
        yield made


def bits(acts: weir.Activations) -> dict:
    """Everything that an Activations holds, comparable."""
    return {
        tuple(site): (acts[site].dtype, acts[site].shape, acts[site].contiguous().view(torch.uint8).numpy().tobytes(),
                      acts.positions_of(*site).tolist(), acts.token_ids_of(*site).tolist())
        for site in acts.sites
    }  # fmt: skip


def check(choice: Choice, prompt_token_ids: list[int] | None, name: str, offline: Path) -> None:
    """A choice is what the offline engine gave."""
    told = json.loads((offline / "told.json").read_text())[name]
    assert choice.text == told["text"] and choice.token_ids == told["token_ids"]
    assert prompt_token_ids == told["prompt_token_ids"]
    assert json.loads(json.dumps(choice.receipt.to_dict())) == told["receipt"]
    assert bits(choice.activations) == bits(weir.Activations.load(offline / f"{name}.safetensors"))


@pytest.mark.parametrize("name", list(cases()))
def test_every_way_gives_the_bytes_that_the_offline_engine_gives(client, weir_server, offline_answers, tmp_path, name):
    case = cases()[name]
    inline = client.chat(MESSAGES, **SAME, **case, inline_bytes=8 << 20)
    kept = client.chat(MESSAGES, **SAME, **case, inline_bytes=0, save_to=tmp_path)
    *_, last = client.stream(MESSAGES, **SAME, **case)
    for out in (inline, kept, last.result):
        check(out.choices[0], out.prompt_token_ids, name, offline_answers)
    assert name == "scores" or kept.choices[0].path.parent == tmp_path

    async def both():
        async with weir_server.client(weir.AsyncClient) as other:
            one = await other.chat(MESSAGES, **SAME, **case, inline_bytes=0)
            many = [chunk async for chunk in other.stream(MESSAGES, **SAME, **case)]
            return one, many[-1].result

    for out in asyncio.run(both()):
        check(out.choices[0], out.prompt_token_ids, name, offline_answers)


def test_openais_own_client_gets_them_too(client, weir_server, offline_answers):
    """Without any of Weir's code on this side, but for reading the file."""
    case = cases()["steer"]
    asked = weir_object(NOTHING.asking(**case), 8 << 20, False)
    plain = openai.OpenAI(base_url=f"{weir_server.url}/v1", api_key=weir_server.api_key, max_retries=0)
    out = plain.chat.completions.create(model=weir_server.model, messages=MESSAGES, **SAME, extra_body={"weir": asked})
    acts = activations_of(base64.b64decode(out.choices[0].weir["activations"]["b64"]))
    assert bits(acts) == bits(weir.Activations.load(offline_answers / "steer.safetensors"))


def test_streamed_scores_are_the_scores_row_by_row(client, offline_answers):
    for _ in range(10):
        *parts, last = client.stream(MESSAGES, **SAME, **cases()["scores"])
        come = [chunk.scores for chunk in parts if chunk.scores is not None]
        if len(come) > 1:
            break  # otherwise the engine was so far ahead of its reader that all tokens came in one chunk
    assert 1 < len(come) <= MAX_TOKENS  # they came with the tokens, not all at the end
    whole = weir.Activations.load(offline_answers / "scores.safetensors")
    for site in whole.sites:
        assert torch.equal(torch.cat([c[site] for c in come if site in c]), whole[site])
        assert torch.equal(torch.cat([c.positions_of(*site) for c in come if site in c]), whole.positions_of(*site))
    assert "".join(chunk.text for chunk in parts) == last.result.text


def test_a_list_of_prompts_keeps_its_order_among_neighbours(client):
    """Different wishes at once: each gets its own rows, as it would alone."""
    names = ["Tom", "Anna", "Mia", "Ben"]
    prompts = [f"{names[k % 4]} went to the garden." + " And then." * (k // 4) for k in range(12)]
    capture = weir.Capture(layers=[2, 5])
    steer = weir.Add(vector(9), layers=1, norm_match=True)
    told = []
    many = client.generate(prompts, **SAME, capture=capture, interventions=steer, progress=lambda *at: told.append(at))
    assert told == [(k + 1, 12) for k in range(12)]
    for prompt, out in list(zip(prompts, many))[::3]:
        alone = client.generate(prompt, **SAME, capture=capture, interventions=steer)
        assert alone.prompt_token_ids == out.prompt_token_ids and alone.token_ids == out.token_ids
        for site in alone.activations.sites:
            assert rel_err(out.activations[site], alone.activations[site]) <= 1e-5
        assert out.receipt.steered == ({weir.Site("resid_post", 1): len(out.activations.positions)},)


class Cutting(httpx.HTTPTransport):
    """Breaks every download of activations after some bytes, until it has done so `times` times."""

    def __init__(self, after: int, times: int) -> None:
        super().__init__()
        self.after, self.times, self.asked = after, times, []

    def handle_request(self, request):
        response = super().handle_request(request)
        if request.method == "GET" and "/v1/activations/" in request.url.path:
            self.asked.append(request.headers.get("range"))
            if self.times:
                self.times -= 1
                return httpx.Response(response.status_code, headers=response.headers, stream=_Cut(response, self.after))
        return response


class _Cut(httpx.SyncByteStream):
    def __init__(self, response, after: int) -> None:
        self._response, self._after = response, after

    def __iter__(self):
        left = self._after
        for piece in self._response.stream:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._response.close()


def test_a_download_goes_on_after_the_line_was_cut(client, weir_server, offline_answers):
    transport = Cutting(after=20_000, times=3)
    with weir_server.client(transport=transport) as cut:
        out = cut.chat(MESSAGES, **SAME, **cases()["capture"], inline_bytes=0)
    check(out.choices[0], out.prompt_token_ids, "capture", offline_answers)
    assert transport.asked == [None, "bytes=20000-", "bytes=40000-", "bytes=60000-"]


def test_results_are_freed_when_they_are_fetched(weir_server):
    seen = []
    with weir_server.client() as client:
        client._http.event_hooks["request"] = [lambda request: seen.append((request.method, request.url.path))]
        client.generate("Tom", max_tokens=2, capture=weir.Capture(), inline_bytes=0)
    places = [path for method, path in seen if method == "DELETE"]
    assert len(places) == 1 and places[0].startswith("/v1/activations/")
    assert weir_server.http.get(places[0]).status_code == 404


def test_the_servers_refusals_are_typed_and_name_the_field(client, weir_server):
    for wrong, field in (
        (dict(capture=weir.Capture(layers=99)), "capture[0].layers"),
        (dict(interventions=weir.Add("deep", per_layer=True)), "interventions[0].vector"),
        (dict(interventions=weir.Add(vector(3, 7), layers=1, positions="prompt")), "interventions[0].positions"),
    ):
        for ask in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
            with pytest.raises(weir.WeirError) as e:
                ask("Tom", **wrong)
            assert e.value.field == field and type(e.value) is weir.WeirError
    with pytest.raises(weir.NotFound, match="nobody"):
        client.generate("Tom", model="nobody")
    with weir.Client(weir_server.url, "another key") as stranger, pytest.raises(weir.AuthError):
        stranger.generate("Tom", model="demo")
    with weir.Client("http://127.0.0.1:9", retries=0) as nobody, pytest.raises(weir.ServerError, match="ConnectError"):
        nobody.info()
