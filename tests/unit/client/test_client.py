"""Both clients against a server in memory: what they send, what they make of answers and of failures."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import torch

import vllm_weir as weir
from tests.unit.fake_server import RECEIPT, SCORES, Body, FakeServer, rows, same
from vllm_weir.client.http import ConnectionLost, Download, RetryPolicy
from vllm_weir.client.response_fields import activations_of, projected_of, receipt_of
from vllm_weir.schema.request import RequestSpec

CAPTURE = weir.Capture("resid_post", layers=3)


class Driver:
    """One way to call both clients."""

    def __init__(self, kind: str, server: FakeServer, **options) -> None:
        self.kind = kind
        self._loop = asyncio.new_event_loop()
        cls = {"sync": weir.Client, "async": weir.AsyncClient}[kind]
        self.client = cls("http://fake:1/v1/", transport=server.transport, **options)
        object.__setattr__(self.client._options, "retries", RetryPolicy(self.client._options.retries.most, base=0.001))

    def wait(self, made):
        return self._loop.run_until_complete(made) if inspect.isawaitable(made) else made

    def __getattr__(self, name: str):
        return lambda *a, **k: self.wait(getattr(self.client, name)(*a, **k))

    def stream(self, *a, **k) -> list:
        made = self.client.stream(*a, **k)
        if self.kind == "sync":
            return list(made)

        async def all_of():
            return [chunk async for chunk in made]

        return self._loop.run_until_complete(all_of())

    def finish(self) -> None:
        self.wait(self.client.close())
        self._loop.close()


@pytest.fixture
def server(tmp_path) -> FakeServer:
    return FakeServer(tmp_path)


@pytest.fixture(params=["sync", "async"])
def driver(request, server) -> Iterator[Driver]:
    made = Driver(request.param, server, model="demo", admin_key="root", api_key="key")
    yield made
    made.finish()


def refused(match: str | None, call, *args, kind: type = weir.WeirError, **options) -> weir.WeirError:
    """The error of a call."""
    with pytest.raises(kind, match=match) as e:
        call(*args, **options)
    return e.value


def answers(server: FakeServer, *found: httpx.Response | Exception, to: str = "POST /v1/completions") -> None:
    """What the server says next."""
    server.plan[to] = list(found)


CHAT = [{"role": "user", "content": "hi"}]


def generations(server: FakeServer) -> list[dict]:
    return [body for method, path, body in server.seen if path.endswith("completions")]


def test_importing_weir_imports_neither_httpx_nor_openai_nor_vllm() -> None:
    """And its client no vLLM."""
    code = """
import sys, vllm_weir
print(sorted({"httpx", "openai", "vllm", "torch"} & set(sys.modules)))
vllm_weir.Client
print("vllm" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]


def test_a_request_carries_what_offline_params_would(server, driver) -> None:
    vector = torch.randn(8)
    driver.generate(
        "hello",
        max_tokens=5,
        temperature=0,
        n=2,
        capture=CAPTURE,
        interventions=[weir.Add(vector, layers=1, scale=2.0, positions="generated")],
        inline_bytes=77,
        extra_body={"min_p": 0.1},
    )
    (body,) = generations(server)
    spec = {"v": 1, "capture": [CAPTURE.to_json()]}
    spec["interventions"] = [weir.Add(vector, layers=1, scale=2.0, positions="generated").to_json()]
    assert body.pop("weir") == spec | {"response": {"inline_bytes": 77}}
    assert body == {
        "model": "demo", "prompt": "hello", "max_tokens": 5, "temperature": 0, "n": 2, "min_p": 0.1,
        "return_token_ids": True,
    }  # fmt: skip
    assert server.headers[0]["authorization"] == "Bearer key"
    assert "x-weir-admin-key" not in server.headers[0]


def test_vectors_by_layer_travel_as_json(server, driver) -> None:
    stack = torch.randn(2, 8)
    asked = [
        weir.Add({3: stack[0], 1: stack[1:]}, keep_norm=True),
        weir.Ablate("directions", layers=[3, 1], per_layer=True),
    ]
    driver.generate("hello", interventions=asked)
    (body,) = generations(server)
    assert body["weir"]["interventions"] == [item.to_json() for item in asked]
    first, second = RequestSpec.parse(body["weir"]).interventions
    assert {n: v.array.tolist() for n, v in first.vector.vectors.items()} == {
        1: stack[1].tolist(),
        3: stack[0].tolist(),
    }
    assert second.layers == (3, 1) and second.per_layer and second.directions.ref == "directions"
    driver.wait(driver.client.vectors.put("deep", stack[None]))
    assert server.seen[-1][2]["shape"] == [1, 2, 8]


def test_a_request_without_wishes_has_no_weir_key(server, driver) -> None:
    driver.generate("hello")
    driver.chat(CHAT)
    assert all("weir" not in body for body in generations(server))
    assert [path for _, path, _ in server.seen] == ["/v1/completions", "/v1/chat/completions"]


def test_an_echo_is_not_given_up_for_token_ids(server, driver) -> None:
    """vLLM answers a request for both without the prompt's text."""
    driver.generate("hello", echo=True)
    driver.generate("hello", extra_body={"echo": True})
    driver.generate("hello", echo=True, return_token_ids=True)
    driver.generate("hello")
    driver.chat(CHAT, echo=True)
    asked = [body.get("return_token_ids") for body in generations(server)]
    assert asked == [None, None, True, True, True]


def test_a_server_without_weir_is_told_from_one_that_has_it(server, driver) -> None:
    """vLLM alone passes over the field `weir`: what came was not steered, and nothing said so."""
    server.weir = lambda body: None
    for weir_object in (dict(capture=CAPTURE), dict(interventions=weir.Add([1.0] * 8, 3)), dict(modules="calm")):
        refused("has no Weir", driver.generate, "hello", kind=weir.ServerError, **weir_object)
        refused("has no Weir", driver.stream, CHAT, kind=weir.ServerError, **weir_object)
    assert driver.generate("hello").text and driver.stream("hello")


def test_wrong_wishes_are_refused_before_anything_is_sent(server, driver) -> None:
    for wrong, field in (
        (dict(capture={"hook": "resid_past"}), "capture[0].hook"),
        (dict(interventions=[weir.Add([1.0], 0), {"op": "add"}]), "interventions[1]"),
        (dict(inline_bytes=-1, capture=CAPTURE), "inline_bytes"),
        (dict(messages=[]), "messages"),
        (dict(extra_body={"weir": {}}), "weir"),
        (dict(captures=CAPTURE), "captures"),
        (dict(extra_body={"intervention": []}), "intervention"),
        (dict(modules=5), "modules"),
        (dict(modules=[{"nme": "calm"}]), "modules[0].nme"),
        (dict(probes=3), "probes"),
        (dict(stop_when="own"), "stop_when"),
        (dict(interventions={"op": "add", "vector": [[1.0]] * 3}), "interventions[0].positions"),
    ):
        assert refused(None, driver.generate, "hello", **wrong).field.startswith(field)
    for wrong in ("", 7, None):
        refused("base_url", type(driver.client), wrong)
    refused("timeout", type(driver.client), "http://fake:1", timeout=None)
    refused("prompt", driver.generate, 7)
    refused("dose is true or false, got int", driver.generate, "a", dose=1)
    for wrong in ("hi", ["hi", "ho"], [1, 2], [[1, 2]], CHAT[0]):
        refused("messages: expected chat messages", driver.chat, wrong)
    for wrong in (dict(temperature=float("nan")), dict(seed=torch.tensor(3)), dict(user="\ud800")):
        refused("as JSON", driver.generate, "hello", **wrong)
    infinite = {"resid_post": {3: torch.tensor([float("inf")])}}
    refused("as JSON", lambda: driver.wait(driver.client.steering.set(vectors=infinite)))
    assert not server.seen


def test_inline_activations_come_back_to_the_bit(server, driver) -> None:
    truth = rows()
    server.weir = lambda body: {"receipt": RECEIPT.to_dict(), "activations": server.inline(truth)}
    for out in (
        driver.generate("a", capture=CAPTURE),
        driver.chat([{"role": "user", "content": "a"}], capture=CAPTURE),
    ):
        assert out.text == "answer 0 to a"
        assert out.token_ids == [1, 2, 3] and out.prompt_token_ids == [7, 8, 9]
        assert same(out.activations, truth)
        assert out.receipt == RECEIPT
        assert type(out.raw).__module__.startswith("openai.types")
        assert out.raw.choices[0].finish_reason == "length"
    assert not any(path.startswith("/v1/activations") for _, path, _ in server.seen)


def test_every_choice_has_its_own(server, driver) -> None:
    server.weir = lambda body: {"receipt": RECEIPT.to_dict(), "activations": server.inline(rows())}
    out = driver.generate("a", n=3, capture=CAPTURE)
    assert [(c.index, c.token_ids[-1]) for c in out.choices] == [(0, 3), (1, 4), (2, 5)]
    assert all(same(c.activations, rows()) for c in out.choices)


def test_activations_by_reference_are_fetched_and_freed(server, driver) -> None:
    truth = rows(40)
    id = server.keep(truth)
    # An address elsewhere must not be followed: the client's key would go there.
    server.weir = lambda body: {"activations": {"id": id, "url": "http://evil/x", "expires_in": 60}}
    out = driver.generate("a", capture=CAPTURE)
    assert same(out.activations, truth)
    assert [(m, p) for m, p, _ in server.seen[1:]] == [
        ("GET", f"/v1/activations/{id}"),
        ("DELETE", f"/v1/activations/{id}"),
    ]
    assert not server.spool


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on_where_it_broke(server, driver, ranges, tmp_path) -> None:
    truth = rows(64)
    id = server.keep(truth)
    size = len(server.spool[id])
    server.ranges = ranges
    server.breaks = [100, 900] if ranges else [100]
    server.weir = lambda body: {"activations": {"id": id}}
    out = driver.generate("a", capture=CAPTURE)
    assert same(out.activations, truth)
    asked = [h.get("range") for h, (m, p, _) in zip(server.headers, server.seen) if m == "GET"]
    assert asked == ([None, "bytes=100-", "bytes=1000-"] if ranges else [None, "bytes=100-"])
    assert server.headers[2]["if-range"] == '"1"'
    assert size > 1000


def test_a_download_that_never_comes_is_given_up(server, driver) -> None:
    id = server.keep(rows(64))
    server.breaks = [100, 0, 0, 0, 0, 0, 0]
    server.weir = lambda body: {"activations": {"id": id}}
    refused("cut", driver.generate, "a", capture=CAPTURE, kind=weir.ServerError)
    assert len(server.breaks) == 3  # the first brought something; then three in a row did not
    assert len(generations(server)) == 1
    server.weir = lambda body: {"activations": {"id": "f" * 32}}
    refused("expired", driver.generate, "a", capture=CAPTURE, kind=weir.NotFound)


def test_a_result_that_cannot_be_freed_is_still_delivered(server, driver, caplog) -> None:
    id = server.keep(rows())
    server.plan[f"DELETE /v1/activations/{id}"] = [httpx.Response(500, text="no") for _ in range(3)]
    server.weir = lambda body: {"activations": {"id": id}}
    assert same(driver.generate("a", capture=CAPTURE).activations, rows())
    assert "could not free" in caplog.text


def test_activations_the_server_did_not_keep_say_why_and_the_text_is_there(server, driver) -> None:
    server.weir = lambda body: {"receipt": RECEIPT.to_dict(), "activations": {"reason": "larger than the spool"}}
    out = driver.generate("a", capture=CAPTURE)
    assert out.text == "answer 0 to a" and out.receipt == RECEIPT
    refused("larger than the spool", lambda: out.activations)


def test_save_to_leaves_files_and_reads_them_when_asked(server, driver, tmp_path) -> None:
    truth, place = rows(64), tmp_path / "kept" / "here"
    id = server.keep(truth)
    server.breaks = [300]
    server.weir = lambda body: {"activations": {"id": id} if body["prompt"] == "a" else server.inline(truth)}
    for prompt in ("a", "b"):
        completion = driver.generate(prompt, capture=CAPTURE, save_to=place)
        choice = completion.choices[0]
        assert completion.path == choice.path and completion.tool_calls is choice.tool_calls
        assert same(weir.Activations.load(choice.path), truth) and same(choice.activations, truth)
    assert sorted(p.name for p in place.iterdir()) == sorted([f"{id}.safetensors", "cmpl-1-0.safetensors"])


def test_scores(server, driver, tmp_path) -> None:
    """They are what a request that projects has for activations, also for `save_to`, which was ignored."""
    server.weir = lambda body: {"receipt": RECEIPT.to_dict(), "scores": SCORES}
    asked = weir.Capture(layers=3, project=torch.ones(2, 8))
    out = driver.generate("a", capture=asked)
    assert out.scores.positions.tolist() == [0, 1, 2] and out.scores.token_ids.tolist() == [5, 6, 7]
    assert out.activations is out.scores  # as offline, where a projection is what the request gets
    for name in (("resid_post", 3), "resid_post.3", "resid_post[3]"):  # what the server calls a site opens its rows
        site = name if isinstance(name, tuple) else (name,)
        assert out.scores[name].equal(torch.tensor(SCORES["sites"]["resid_post.3"]))
        assert out.scores.positions_of(*site).tolist() == [0, 1, 2]
        assert out.activations.token_ids_of(*site).tolist() == [5, 6, 7]
        assert out.scores.numpy(*site).tolist() == out.scores[name].tolist()
    kept = driver.generate("a", capture=asked, save_to=tmp_path)
    assert kept.path is not None and same(weir.Activations.load(kept.path), kept.scores)
    assert same(kept.activations, kept.scores)


def test_scores_that_are_not_finite_are_nan() -> None:
    """Of heads, too."""
    found = projected_of({"sites": {"embed.0": [[None, 1.0]]}, "positions": [0], "token_ids": [1]})
    assert found["embed", 0].isnan().tolist() == [[True, False]]
    rows = [[[1.0, None], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]
    found = projected_of({"sites": {"z.0": rows}, "positions": [0, 1], "token_ids": [1, 2]})["z", 0]
    assert found.shape == (2, 2, 2) and found[0, 0].isnan().tolist() == [False, True]
    assert found.nan_to_num(nan=-1.0).tolist() == [[[1.0, -1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


def test_scores_of_sites_with_rows_of_their_own() -> None:
    sites = {"resid_post.3": [[1.0]], "embed.0": [[2.0], [3.0]]}
    at = {"resid_post.3": [4], "embed.0": [0, 1]}
    found = projected_of({"sites": sites, "positions_of": at, "token_ids_of": at})
    assert found.positions_of("embed", 0).tolist() == [0, 1]
    assert found["embed", 0].tolist() == [[2.0], [3.0]]
    refused("positions_of", lambda: found.positions)


@pytest.mark.parametrize("chat", [False, True])
def test_streams(server, driver, chat) -> None:
    truth = rows(30)
    id = server.keep(truth)
    server.weir = lambda body: {"receipt": RECEIPT.to_dict(), "scores": SCORES, "activations": {"id": id}}
    prompt = [{"role": "user", "content": "é🌊"}] if chat else "é🌊"
    chunks = driver.stream(prompt, capture=weir.Capture(layers=3, project=[1.0] * 8), max_tokens=4)
    body = server.seen[0][2]
    assert body["stream"] is True and body["weir"]["response"] == {"stream": True}
    *parts, last = chunks
    assert [c.text for c in parts] == ["answer", " 0", " to", " é🌊"]
    assert last.result.text == "answer 0 to é🌊" and last.result.token_ids == [0, 1, 2, 3]
    assert same(last.result.activations, truth) and last.result.receipt == RECEIPT
    assert not server.spool
    assert all(c.result is None for c in parts)
    together = torch.cat([c.scores["resid_post", 3] for c in parts if c.scores is not None])
    assert torch.equal(together, last.result.scores["resid_post", 3])  # each row once, none missing
    assert [c.scores.positions.tolist() for c in parts if c.scores is not None] == [[0], [1], [2]]


def test_a_stream_that_breaks_is_an_error_and_is_not_begun_again(server, driver) -> None:
    event = json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
    for pieces, what in (
        ([f"data: {event}\n\n".encode(), httpx.ReadError("gone")], "broke: ReadError: gone"),
        ([f"data: {event}\n\n".encode()], "before the response was complete"),
        ([b"data: {oh\n\n"], "not JSON"),
        ([b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'], "out of memory"),
    ):
        server.seen.clear()
        answers(server, httpx.Response(200, stream=Body(pieces)))
        refused(what, driver.stream, "a", kind=weir.ServerError)
        assert len(server.seen) == 1
    error = {"error": {"message": "capture[0].layers: no", "param": "capture[0].layers", "code": 400}}
    answers(server, httpx.Response(400, json=error))
    e = refused(None, driver.stream, "a", capture=CAPTURE)
    assert e.field == "capture[0].layers" and e.message == "no"


def test_a_stream_whose_request_could_not_be_done_is_an_error_after_its_text(server, driver) -> None:
    server.weir = lambda body: {"error": "rows were lost"}
    texts: list[str] = []

    async def read():
        async for chunk in driver.client.stream("a", capture=CAPTURE):
            texts.append(chunk.text)

    def read_all():
        if driver.kind == "async":
            driver.wait(read())
        for chunk in driver.client.stream("a", capture=CAPTURE):
            texts.append(chunk.text)

    refused("rows were lost", read_all)
    assert "".join(texts) == "answer 0 to a"


PROBE = weir.Probe("own", [1.0] * 8, 0.5, layer=3, activation="sigmoid")
PROBE_SCORES = {
    "own": {"positions": [1, 2, 3], "values": [[0.25], [None], [0.75]]},
    "topic": {"positions": [3], "values": [[1.0, 2.0]]},
}


def test_probes_and_rules_travel_and_scores_come_back(server, driver) -> None:
    receipt = RECEIPT.to_dict() | {"gates": [None, {"probe": "own", "fired": 1, "of": 3, "spans": [[2, 3]]}]}
    server.weir = lambda body: {"receipt": receipt, "scores": PROBE_SCORES}
    out = driver.generate("a", probes=[PROBE, "topic"], stop_when="own > 0.9")
    (body,) = generations(server)
    assert body["weir"]["probes"] == [PROBE.to_json(), "topic"]
    spec = RequestSpec.parse(body["weir"])
    assert [rule.name for rule in spec.stop_when] == ["own"] and "response" not in body["weir"]
    assert list(out.scores) == ["own", "topic"] and out.scores["topic"].tolist() == [[1.0, 2.0]]
    assert out.scores["own"][[0, 2]].tolist() == [[0.25], [0.75]] and out.scores["own"].isnan().sum() == 1
    assert out.scores.positions["own"].tolist() == [1, 2, 3]
    assert out.activations is None and out.receipt.gates == tuple(receipt["gates"])
    server.weir = lambda body: {"receipt": receipt, "scores": PROBE_SCORES | SCORES}
    both = driver.generate("a", probes=PROBE, capture=weir.Capture(layers=3, project=[1.0] * 8))
    assert list(both.scores) == ["own", "topic"] and both.activations["resid_post", 3].shape == (3, 2)


def test_doses_are_asked_for_and_come_back(server, driver) -> None:
    server.weir = lambda body: {"receipt": RECEIPT.to_dict()}
    out = driver.generate("a", interventions=weir.Add([1.0] * 8, 3), dose=True)
    assert out.receipt.interventions[0].relative_dose == 0.25
    driver.generate("a", dose=True)  # of what the server does to every request
    driver.generate("a", interventions=weir.Add([1.0] * 8, 3))
    asked, alone, plain = (body["weir"] for body in generations(server))
    assert asked["dose"] is alone["dose"] is True and "dose" not in plain
    assert RequestSpec.parse(asked).dose and not RequestSpec.parse(plain).dose


def test_a_rule_that_ended_a_choice_is_its_stop_reason(server, driver) -> None:
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": "probe:own", "weir": {}}
    server.plan["POST /v1/completions"] = [httpx.Response(200, json={"choices": [choice]})]
    assert driver.generate("a", stop_when="own > 0.9", probes=PROBE).stop_reason == "probe:own"
    pieces = [f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()]
    server.plan["POST /v1/completions"] = [httpx.Response(200, stream=Body(pieces))]
    first, last = driver.stream("a", stop_when="own > 0.9", probes=PROBE)
    assert first.stop_reason == last.result.stop_reason == "probe:own"


def test_scores_of_probes_are_streamed_once(server, driver) -> None:
    def event(text, reason=None, **weir_object):
        choice = {"index": 0, "text": text, "finish_reason": reason, "weir": weir_object or None}
        return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()

    def part(first, end):
        return {"own": {key: values[first:end] for key, values in PROBE_SCORES["own"].items()}}

    pieces = [event("a", scores=part(0, 1)), event("b"), event("c", scores=part(1, 2))]
    pieces += [event("d", "length", receipt=RECEIPT.to_dict(), scores=PROBE_SCORES), b"data: [DONE]\n\n"]
    server.plan["POST /v1/completions"] = [httpx.Response(200, stream=Body(pieces))]
    *parts, last = driver.stream("a", probes=["own", "topic"])
    assert generations(server)[0]["weir"]["response"] == {"stream": True}
    assert [None if c.scores is None else dict(c.scores.positions) for c in parts] == [
        {"own": torch.tensor([1])},
        None,
        {"own": torch.tensor([2])},
        {"own": torch.tensor([3]), "topic": torch.tensor([3])},
    ]
    assert last.result.scores.positions["own"].tolist() == [1, 2, 3]


def test_administration_of_probes(server, driver, tmp_path) -> None:
    probes = driver.client.probes
    PROBE.save(tmp_path / "p.safetensors")
    wire = {key: value for key, value in PROBE.to_json().items() if key != "name"}
    for given in (PROBE, PROBE.to_json(), tmp_path / "p.safetensors"):
        driver.wait(probes.put("mood", given))
        assert server.seen[-1] == ("PUT", "/v1/probes/mood", wire)
        assert server.headers[-1]["x-weir-admin-key"] == "root"
    driver.wait(probes.put("mood", PROBE, everyone=True, alert=0.9, buckets=torch.tensor([0.25, 0.5])))
    assert server.seen[-1][2] == wire | {"everyone": True, "alert": 0.9, "buckets": [0.25, 0.5]}
    driver.wait(probes.get("mood"))
    driver.wait(probes.list())
    driver.wait(probes.delete("a b"))
    assert [(method, path) for method, path, _ in server.seen[-3:]] == [
        ("GET", "/v1/probes/mood"), ("GET", "/v1/probes"), ("DELETE", "/v1/probes/a b"),
    ]  # fmt: skip


def test_modules_travel_by_name(server, driver) -> None:
    driver.generate("a", modules="calm")
    driver.generate("a", modules=["calm", {"name": "loud", "scale": 2.0}], capture=CAPTURE)
    first, second = (body["weir"] for body in generations(server))
    assert first == {"v": 1, "capture": [], "interventions": [], "modules": ["calm"]}
    assert second["modules"] == ["calm", {"name": "loud", "scale": 2.0}] and second["capture"] == [CAPTURE.to_json()]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, weir.WeirError), (401, weir.AuthError), (403, weir.AuthError), (404, weir.NotFound), (413, weir.TooLarge),
     (422, weir.WeirError), (500, weir.ServerError), (507, weir.ServerError)],
)  # fmt: skip
def test_errors_are_typed_and_name_the_field(server, driver, status, kind) -> None:
    error = {
        "error": {"message": "capture[0].layers: block 9 does not exist", "type": "x", "param": "capture[0].layers"}
    }
    answers(server, *[httpx.Response(status, json=error)] * 5)
    e = refused(None, driver.generate, "a")
    assert type(e) is kind
    assert e.field == "capture[0].layers" and str(e) == "capture[0].layers: block 9 does not exist"
    again = pickle.loads(pickle.dumps(e))  # noqa: S301 - processes hand errors on this way
    assert type(again) is kind and str(again) == str(e) and getattr(again, "status", status) == status
    assert len(server.seen) == 1  # no generation is repeated after the server had it


def test_errors_in_other_shapes(server, driver) -> None:
    for body in ("plain text", '{"detail": "Unauthorized"}', '{"error": "Unauthorized"}', ""):
        answers(server, httpx.Response(401, text=body))
        refused(r"plain text|Unauthorized|401", driver.generate, "a", kind=weir.AuthError)


def test_a_generation_is_repeated_only_if_it_never_began(server, driver) -> None:
    later = {"retry-after": "0"}
    for failures in (
        [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow")],
        [httpx.Response(503, headers=later), httpx.Response(429, headers=later)],
    ):
        server.seen.clear()
        answers(server, *failures)
        assert driver.generate("a").text == "answer 0 to a" and len(server.seen) == 3
    for failure in (httpx.ReadTimeout("late"), httpx.ReadError("cut"), httpx.RemoteProtocolError("gone")):
        server.seen.clear()
        answers(server, failure)
        refused(type(failure).__name__, driver.generate, "a", kind=weir.ServerError)
        assert len(server.seen) == 1
    answers(server, *[httpx.ConnectError("refused")] * 3)
    refused("refused", driver.generate, "a", kind=weir.ServerError)


def test_what_can_be_repeated_is(server, driver) -> None:
    asked = "GET /v1/weir/info"
    answers(server, httpx.ReadTimeout("late"), httpx.Response(502), to=asked)
    assert driver.info()["path"] == "/v1/weir/info"
    answers(server, *[httpx.Response(500, text="no")] * 3, to=asked)
    refused("no", driver.info, kind=weir.ServerError)


def test_lists_keep_their_order_and_their_limit(server, driver) -> None:
    at_once, most, lock = 0, 0, threading.Lock()
    plain, told = server.handle, []

    def counting(request):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        return plain(request)

    server.transport.handler = counting
    prompts = [f"p{k}" for k in range(20)]
    out = driver.generate(prompts, concurrency=3, progress=lambda done, total: told.append((done, total)))
    assert [o.text for o in out] == [f"answer 0 to {p}" for p in prompts]
    assert told == [(k, 20) for k in range(1, 21)]
    assert most <= 3 and (driver.kind == "async" or most > 1)
    assert driver.generate([]) == []
    assert [o.text for o in driver.generate([[1, 2], [3]])] == ["answer 0 to [1, 2]", "answer 0 to [3]"]
    assert driver.generate([1, 2]).text == "answer 0 to [1, 2]"
    talks = [[{"role": "user", "content": str(k)}] for k in range(3)]
    assert [o.text for o in driver.chat(talks, progress=True)] == [f"answer 0 to {k}" for k in range(3)]


def test_the_first_failure_of_a_list_stops_it(server, driver) -> None:
    answers(server, httpx.Response(400, json={"error": {"message": "no", "param": "prompt"}}))
    refused("prompt: no", driver.generate, [f"p{k}" for k in range(50)], concurrency=1)
    assert len(generations(server)) < 5


def test_the_model_is_asked_for_once(server) -> None:
    with weir.Client("http://fake:1", transport=server.transport) as client:
        client.generate(["a", "b"])
        client.generate("c", model="adapter")
        assert client.model == "demo"
    assert [b["model"] for b in generations(server)] == ["demo", "demo", "adapter"]
    assert sum(path == "/v1/models" for _, path, _ in server.seen) == 1


def test_vectors_and_steering(server, driver, tmp_path) -> None:
    file = tmp_path / "v.gguf"
    file.write_bytes(b"GGUF...")
    vectors, steering = driver.client.vectors, driver.client.steering
    driver.wait(vectors.put("a/b", torch.ones(2)))
    driver.wait(vectors.put("c", file))
    driver.wait(vectors.get("c")), driver.wait(vectors.list()), driver.wait(vectors.delete("c"))
    driver.wait(steering.set(vectors={"resid_post": {3: torch.ones(2), 4: {"vector": [1.0, 2.0], "scale": 2.0}}}))
    driver.wait(steering.register("calm", weir.Add([1.0, 2.0], layers=3)))
    driver.wait(steering.modules()), driver.wait(steering.unregister("calm"))
    driver.wait(steering.get()), driver.wait(steering.layers()), driver.wait(steering.clear())
    said = [(m, p) for m, p, _ in server.seen]
    assert said == [
        ("PUT", "/v1/vectors/a/b"), ("PUT", "/v1/vectors/c"), ("GET", "/v1/vectors/c"), ("GET", "/v1/vectors"),
        ("DELETE", "/v1/vectors/c"), ("POST", "/v1/steering/set"), ("POST", "/v1/steering/modules/register"),
        ("GET", "/v1/steering/modules"), ("POST", "/v1/steering/modules/unregister"), ("GET", "/v1/steering"),
        ("GET", "/v1/steering/layers"), ("POST", "/v1/steering/clear"),
    ]  # fmt: skip
    admin = [h.get("x-weir-admin-key") for h in server.headers]
    assert admin == ["root", "root", None, None, "root", "root", "root", None, "root", None, None, "root"]
    assert server.seen[1][2] == b"GGUF..."
    assert server.seen[6][2] == {"name": "calm", "interventions": [weir.Add([1.0, 2.0], layers=3).to_json()]}
    assert server.seen[5][2] == {
        "vectors": {"resid_post": {"3": [1.0, 1.0], "4": {"vector": [1.0, 2.0], "scale": 2.0}}}
    }


def test_marks_name_an_answer_a_chunk_or_an_id(server, driver) -> None:
    whole, chunks = driver.generate("a"), driver.stream("a")
    server.seen.clear()
    for answer in (whole, chunks[0], chunks[-1], "cmpl-1"):
        driver.mark(answer, reason="odd", at=[1, 2])
    mark = ("POST", "/v1/marks", {"id": "cmpl-1", "metadata": {"reason": "odd", "at": [1, 2]}})
    assert server.seen == [mark] * 4
    for bad in (None, "", 5):
        assert refused(None, driver.mark, bad).field == "answer"
    for bad in (float("nan"), {1, 2}):
        assert refused(None, driver.mark, "cmpl-1", x=bad).field == "metadata"
    server.seen.clear()
    answers(server, httpx.ReadTimeout("late"), to="POST /v1/marks")
    refused(None, driver.mark, "cmpl-1", kind=weir.ServerError)  # a second one would be told that it is marked already
    assert len(server.seen) == 1


def test_admin_calls_need_the_admin_key(server) -> None:
    with weir.Client("http://fake:1", transport=server.transport) as client:
        for call in (lambda: client.vectors.put("a", [1.0]), client.steering.clear, lambda: client.vectors.delete("a")):
            refused("admin_key", call)
    assert not server.seen
    assert "secret" not in repr(weir.Client("http://fake:1", admin_key="secret")._options)


def test_keys_travel_as_their_bytes_and_are_never_shown(server) -> None:
    """One that was not ASCII ended in a codec's error, and one read with its line break was shown by h11's."""
    seen: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return server.transport.handle_request(request)

    with weir.Client("http://fake:1", "clé", "schlüssel", transport=httpx.MockTransport(answer)) as client:
        client.vectors.delete("a")
    assert (b"X-Weir-Admin-Key", "schlüssel".encode()) in seen[0].raw
    assert (b"Authorization", "Bearer clé".encode()) in seen[0].raw
    for wrong in ("secret\n", " secret", "sec\r\nret", b"secret"):
        for name in ("api_key", "admin_key"):
            e = refused(None, weir.Client, "http://fake:1", **{name: wrong})
            assert e.field == name and "sec" not in str(e)


def test_adapters_are_loaded_once(server, driver) -> None:
    driver.load_adapter("adapter")
    driver.load_adapter("oracle", "/lora")
    posts = [body for method, path, body in server.seen if method == "POST"]
    assert posts == [{"lora_name": "oracle", "lora_path": "/lora"}]
    error = {"error": {"message": "No adapter found for /lora", "code": 404}}
    for answer, why in (
        (httpx.Response(404), "enable-lora"),
        (httpx.Response(404, json=error), "path: No adapter found"),
    ):
        answers(server, answer, to="POST /v1/load_lora_adapter")
        refused(why, driver.load_adapter, "oracle", "/lora")


def test_receipts_make_the_round_trip_and_later_fields_do_not_matter() -> None:
    assert receipt_of(json.loads(json.dumps(RECEIPT.to_dict())) | {"later": 1}) == RECEIPT


def test_damaged_activations_are_an_error(server) -> None:
    data = server.file(rows())
    assert same(activations_of(data), rows())
    for cut in (0, 5, 60, -1):
        refused(None, activations_of, data[:cut])


def test_a_download_without_end_in_sight_stops_at_the_end() -> None:
    """Without Content-Length the end of the answer is the end."""
    download = Download("/x", io.BytesIO())
    assert download.begin(httpx.Response(200))
    download.sink.write(b"abc")
    assert not download.complete
    download.end()
    assert download.complete and download.sink.getvalue() == b"abc"


def test_a_download_never_leaves_a_hole() -> None:
    sink = io.BytesIO()
    download = Download("/x", sink)
    download.begin(httpx.Response(200, headers={"content-length": "10"}))
    sink.write(b"12345")
    download.end()
    assert not download.complete and download.fruitless == 0
    assert download.begin(httpx.Response(206, headers={"content-range": "bytes 5-9/10"})) and sink.tell() == 5
    assert download.begin(httpx.Response(200, headers={})) and sink.tell() == 0
    with pytest.raises(ConnectionLost, match="from 7"):
        download.begin(httpx.Response(206, headers={"content-range": "bytes 7-9/10"}))


def test_waits_grow_and_heed_the_server() -> None:
    retries = RetryPolicy(5, base=1.0, longest=4.0, chance=lambda: 0.0)
    assert [retries.wait(k) for k in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 4.0]
    assert retries.wait(1, {"retry-after": "7"}) == 7.0
    assert retries.wait(1, {"retry-after": "9999"}) == 60.0
    assert RetryPolicy(1, base=1.0, chance=lambda: 1.0).wait(1) == 1.5
