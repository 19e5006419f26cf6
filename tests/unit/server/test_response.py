"""What goes out for whom: chunks, what nobody gets, scores that are not finite."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import zstandard

from tests.support import machine
from tests.support.measure import becomes, eventually
from tests.unit.stored import shaped_rows
from vllm_weir.client.response_fields import activations_of
from vllm_weir.compat.http import activations_field
from vllm_weir.compat.vllm_lens.tensors import serialize_tensor as encode
from vllm_weir.errors import WeirError
from vllm_weir.frontend.pacing import Pacing
from vllm_weir.results.activations import Activations
from vllm_weir.results.scores import Scores
from vllm_weir.results.site_slices import Stacked
from vllm_weir.schema.hooks import Site
from vllm_weir.server import response as module
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.response import ResponseBuilder
from vllm_weir.server.response_body import projected
from vllm_weir.server.shared.directory import locked
from vllm_weir.server.shared.result_files import ResultFiles, frame_key
from vllm_weir.server.state import ServerState


def acts(rows=3):
    at = torch.arange(rows)
    return Activations(
        {Site("resid_post", 0): torch.ones(rows, 8)}, {Site("resid_post", 0): at}, {Site("resid_post", 0): at}
    )


class View(SimpleNamespace):
    """Stands for a view whose rows are there."""

    start, end, scored_end = 0, 3, 3
    pending = SimpleNamespace(admitted=SimpleNamespace(told=0, calls={}), trace=None)
    part = SimpleNamespace(spec=SimpleNamespace(postprocess=None, site_requests=(1,)), has_rows=True, read_outs=())

    def activations(self):
        self.wait()
        return acts()

    def scores(self):
        return None

    def routing(self):
        return None

    def values(self):
        return None

    def saved(self):
        return None

    def receipt(self):
        return SimpleNamespace(to_dict=lambda: {"complete": True})

    def wait(self):
        pass

    def drop(self):
        pass


def failing(message="3 rows did not arrive", field=""):
    """Something that raises."""

    def fail(*_):
        raise WeirError(message, field)

    return fail


def rewritten(made, *data):
    """What becomes of a stream's chunks."""

    async def go():
        return [c async for c in made.rewrite(chunks(*data))]

    return asyncio.run(go())


def told_of(event):
    return json.loads(event[6:])


@pytest.fixture
def server(tmp_path):
    made = ServerState(None, SimpleNamespace(serve=lambda rows: None, observer=None, pacing=Pacing()), ServerLimits())
    made.spool = ResultFiles(tmp_path, 1 << 20, 60.0)
    return made


def reply(server, view, inline=0, **more):
    made = ResponseBuilder(WeirRequest({}, inline, own=True, **more), server)
    made.add_view(0, view)
    return made


DONE = "data: [DONE]\n\n"


async def chunks(*data):
    for d in data:
        yield d if isinstance(d, str) else f"data: {json.dumps(d)}\n\n"


def chunk(reason=None, **more):
    return {"choices": [{"index": 0, "text": "é", "finish_reason": reason, **more}]}


def test_only_the_last_chunk_of_a_choice_changes(server):
    more = ['data: {"choices": [], "usage": {}}\n\n', DONE]
    out = rewritten(reply(server, View(), 1 << 20), chunk(), chunk("stop"), *more)
    assert out[0] == f"data: {json.dumps(chunk())}\n\n" and out[2:] == more
    choice = told_of(out[1])["choices"][0]
    assert choice["weir"]["activations"]["sites"] == ["resid_post.0"] and choice["text"] == "é"
    assert len(server.spool) == 0


def test_scores_come_with_their_token_and_not_before_it(server, monkeypatch):
    """The chunk that opens a chat had those of the first token, whose own chunk then had none."""
    monkeypatch.setattr(module, "projects", lambda _: True)
    monkeypatch.setattr(module, "new_values", lambda view, start, *_: {"scores": {"positions": [start]}})
    deltas = ({"role": "assistant", "content": ""}, {"content": "é"})
    sent = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    opening, token = map(told_of, rewritten(reply(server, View(), stream=True), *sent))
    assert "weir" not in opening["choices"][0] and token["choices"][0]["weir"] == {"scores": {"positions": [0]}}


def test_an_id_that_nobody_gets_is_freed_and_one_that_went_out_stays(server):
    async def go(take):
        stream = reply(server, View()).rewrite(chunks(chunk(), chunk("stop"), DONE))
        for _ in range(take):
            await anext(stream)
        await stream.aclose()

    asyncio.run(go(2))
    eventually(lambda: len(server.spool), 0, 60)
    asyncio.run(go(3))
    assert len(server.spool) == 1


def test_rows_that_come_too_late_are_freed(server):
    waits, go_on = threading.Event(), threading.Event()
    view = View()
    view.wait = lambda: (waits.set(), go_on.wait(60))
    put, made = server.spool.put, []
    server.spool.put = lambda *what: made.append(put(*what)) or made[-1]

    async def go():
        task = asyncio.create_task(reply(server, view).weir_objects())
        assert await asyncio.to_thread(waits.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not made
        go_on.set()
        await becomes(lambda: (len(made), len(server.spool)), (1, 0), 20)

    asyncio.run(go())
    assert len(made) == 1 and len(server.spool) == 0


def test_each_choice_gets_its_own_answer(server):
    views = {k: View(receipt=lambda k=k: SimpleNamespace(to_dict=lambda: {"choice": k})) for k in (1, 0, 3)}
    made = reply(server, views[0])
    for choice in (3, 1):
        made.add_view(choice, views[choice])
    told = asyncio.run(made.weir_objects())
    assert {choice: found["receipt"]["choice"] for choice, found in told.items()} == {0: 0, 1: 1, 3: 3}


def test_lost_rows_are_said_on_the_choice_of_a_stream(server):
    view = View(activations=failing())
    (out,) = rewritten(reply(server, view), chunk("stop"))
    assert told_of(out)["choices"][0]["weir"] == {"error": "3 rows did not arrive"}
    with pytest.raises(WeirError):
        asyncio.run(reply(server, view).weir_objects())


def test_scores_that_are_lost_end_the_stream_with_an_error(server, monkeypatch):
    """It was cut without a word; and what failed was not counted."""
    told = []
    server.frontend.observer = SimpleNamespace(failed=lambda: told.append("failed"))
    monkeypatch.setattr(module, "projects", lambda _: True)
    monkeypatch.setattr(module, "new_values", failing())

    async def go():
        source = chunks(chunk(), chunk(), chunk("stop"), DONE)
        return [c async for c in reply(server, View(), stream=True).rewrite(source)], [c async for c in source]

    (event, done), left = asyncio.run(go())
    error = {"message": "3 rows did not arrive", "type": "InternalServerError", "param": None, "code": 500}
    assert told_of(event)["error"] == error
    assert done == DONE and not left and told == ["failed"]


def test_an_error_event_names_the_field(server):
    made, named = reply(server, View()), {"message": "no", "param": "capture[0].hook"}
    made.failure = WeirError("no", "capture[0].hook")
    for failed, more in ((False, {}), (True, {"type": "InternalServerError", "code": 500})):
        made.failed = failed  # as vLLM 0.26 words it, it is the client's
        (event,) = rewritten(made, {"error": {"message": "no", "param": None}})
        assert told_of(event)["error"] == named | more


def test_too_much_for_vllm_lens_is_refused(server, monkeypatch):
    held = acts()
    held.stacked = Stacked((0,))
    made = reply(server, View(activations=lambda: held), answer=activations_field)
    server.limits = ServerLimits(lens_bytes=10)
    with pytest.raises(WeirError, match="WEIR_SERVE_LENS_BYTES") as e:
        asyncio.run(made.weir_objects())
    assert e.value.field == "output_residual_stream"
    assert activations_field(held, ServerLimits())[0]


def test_frames_of_one_answer_do_not_make_room_for_each_other(server):
    frames, keys = {frame_key(torch.zeros(2, n)): bytes(700_000) for n in (3, 4)}, []
    with pytest.raises(WeirError, match="other results of this response"):
        server.keep_frames(frames, keys)
    assert keys == [next(iter(frames))] and server.spool.open(keys[0]).close() is None


def test_trap_13_tensors_that_are_compressed_side_by_side_are_whole():
    """Answers are made in several threads; a compressor that they shared would mix their bytes."""
    tensors = [torch.randn(2, 300, 256, generator=torch.Generator().manual_seed(k)) for k in range(16)]
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(encode, tensors * 4))
    for field, tensor in zip(made, tensors * 4, strict=True):
        raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(field["data"]))
        assert raw == tensor.numpy().tobytes()


@machine.needs(machine.module("vllm"))
def test_a_choice_that_ends_before_the_next_begins_is_one_of_several(server):
    """Of several prompts, streamed, the first to end had its rows in vllm-lens's field alone."""
    from vllm_weir.patches import server as patches

    async def results():
        for prompt in range(2):
            held = acts()
            held.stacked = Stacked((0,))
            view = View(activations=lambda held=held: held)
            yield prompt, SimpleNamespace(outputs=[SimpleNamespace(index=0, _weir_view=view)])

    async def vllm_s(self, request, result_generator, num_prompts):
        async for prompt, _ in result_generator:
            yield f"data: {json.dumps({'choices': [{'index': prompt, 'text': '', 'finish_reason': 'stop'}]})}\n\n"

    async def go():
        patches.current_response.set(ResponseBuilder(WeirRequest({}, 1 << 20, answer=activations_field), server))
        stream = patches.stream(vllm_s, None)(None, SimpleNamespace(n=None), results(), num_prompts=2)
        return [json.loads(c[6:])["choices"][0] async for c in stream]

    assert all("activations" in choice["weir"] for choice in asyncio.run(go()))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("site_requests", "concluded", "threads"), [((), True, 0), ((), False, 1), ((1,), True, 1), ((1,), False, 1)]
)
def test_a_receipt_alone_is_answered_without_a_thread_if_nothing_is_to_be_waited_for(
    server, monkeypatch, site_requests, concluded, threads, streamed
):
    view = View(concluded=lambda: concluded)
    spec = SimpleNamespace(postprocess=None, site_requests=site_requests)
    view.part = SimpleNamespace(spec=spec, has_rows=bool(site_requests), read_outs=())
    ran, run = [], ServerState.run
    monkeypatch.setattr(ServerState, "run", lambda *args: ran.append(1) or run(*args))

    made = reply(server, view)
    if streamed:
        (only,) = rewritten(made, chunk("stop"))
        found = told_of(only)["choices"][0]["weir"]
    else:
        found = asyncio.run(made.weir_objects())[0]
    assert found["receipt"] == {"complete": True} and len(ran) == threads


def test_one_answer_at_a_time_is_made_and_none_waits_for_rows_of_another(server, monkeypatch):
    """Threads that copy and write at the same time leave the event loop little of the interpreter."""
    arrive, at_work, most = threading.Event(), [], []

    def make(held, pieces=Activations.pieces):
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.01)
        at_work.pop()
        return pieces(held)

    monkeypatch.setattr(Activations, "pieces", make)

    async def go():
        late = asyncio.create_task(reply(server, View(wait=lambda: arrive.wait(60))).weir_objects())
        await asyncio.gather(*(reply(server, View()).weir_objects() for _ in range(6)))
        assert not late.done()
        arrive.set()
        await late

    asyncio.run(go())
    assert most == [1] * 7


def test_who_waits_for_another_processs_file_holds_no_other_answer_up(server):
    put, tries = server.spool.put, threading.Event()
    server.spool.put = lambda *what: (tries.set(), put(*what))[1]

    async def go():
        with locked(server.spool._lock):
            kept = asyncio.create_task(reply(server, View()).weir_objects())
            assert await asyncio.to_thread(tries.wait, 60)
            inline = (await asyncio.wait_for(reply(server, View(), 1 << 20).weir_objects(), 60))[0]["activations"]
            assert "b64" in inline and not kept.done()
        assert "id" in (await kept)[0]["activations"]

    asyncio.run(go())


class Serving:
    """Stands for vLLM's; notes whose turn it is."""

    def __init__(self, server):
        self.engine_client, self.begun = SimpleNamespace(_weir_server=server), []

    async def create_completion(self, request):
        from vllm_weir.server.context import current_response

        self.begun.append((request.name, current_response.get() is not None))
        return SimpleNamespace()


@machine.needs(machine.module("vllm"))
def test_plain_requests_that_come_at_the_same_time_go_first(server):
    """On their way in; each a task of its own, as in a server."""
    from vllm_weir.patches import server as patches

    create = patches.create(Serving.create_completion, SimpleNamespace(serving_refusal=None))
    serving = Serving(server)

    def request(name):
        asked = {"weir": {"v": 1}} if name.startswith("weir") else {}
        return SimpleNamespace(name=name, model_extra=asked, vllm_xargs=None, use_beam_search=False)

    async def go():
        await asyncio.gather(*(create(serving, request(name)) for name in ("weir 1", "a", "weir 2", "b")))

    asyncio.run(go())
    assert serving.begun == [("a", False), ("b", False), ("weir 1", True), ("weir 2", True)]


def test_scores_that_are_not_finite_are_null():
    site = Site("resid_post", 0)
    rows = torch.tensor([[1.5, float("nan")], [float("inf"), -2.0]])
    found = projected(Activations({site: rows}, {site: torch.arange(2)}, {site: torch.arange(2)}))
    assert found["sites"] == {"resid_post.0": [[1.5, None], [None, -2.0]]}
    json.dumps(found, allow_nan=False)
    heads = torch.stack([rows, rows.flip(1)], dim=1)
    found = projected(Activations({site: heads}, {site: torch.arange(2)}, {site: torch.arange(2)}))
    assert found["sites"] == {"resid_post.0": [[[1.5, None], [None, 1.5]], [[None, -2.0], [-2.0, None]]]}


def test_scores_of_probes_stand_under_their_names(server):
    """Beside those of captures, without the probes that have no rows, and null for what is not finite."""
    scores = {"mood": torch.tensor([[0.5], [float("nan")]]), "late": torch.zeros(0, 2)}
    view = View()
    view.scores = lambda: Scores(scores, {"mood": torch.tensor([4, 6]), "late": torch.zeros(0, dtype=torch.int64)})
    out = asyncio.run(reply(server, view, 1 << 20).weir_objects())[0]
    assert out["scores"] == {"mood": {"positions": [4, 6], "values": [[0.5], [None]]}}
    assert out["activations"]["sites"] == ["resid_post.0"]
    view.part = SimpleNamespace(
        spec=SimpleNamespace(postprocess=SimpleNamespace(directions=(1,)), site_requests=(1,)),
        has_rows=True,
        read_outs=(),
    )
    both = asyncio.run(reply(server, view).weir_objects())[0]
    assert set(both["scores"]) == {"positions", "token_ids", "sites", "mood"} and "activations" not in both
    assert both["scores"]["mood"] == out["scores"]["mood"]


def test_scores_of_probes_are_streamed_from_where_the_last_ended(server, monkeypatch):
    """The last token has a score already and no row, where the stream waits for scores."""
    asked = []
    monkeypatch.setattr(module, "new_values", lambda view, *starts: asked.append(starts[:2]) or {"scores": {"p": {}}})
    views = [View(end=3, scored_end=4), View(end=3, scored_end=4), View(end=4, scored_end=5)]
    for view in views:
        view.part = SimpleNamespace(spec=View.part.spec, has_rows=False, read_outs=())
        view.pending = SimpleNamespace(admitted=SimpleNamespace(told=1, calls={}), trace=None)
        view.concluded = lambda: True

    async def go():
        made = reply(server, views[0], stream=True)
        found = []
        for view in views:
            made.add_view(0, view)
            found.append(json.loads((await made._rewrite(f"data: {json.dumps(chunk())}\n\n"))[6:])["choices"][0])
        return found

    first, again, second = asyncio.run(go())
    assert asked == [(0, 0), (3, 4)] and "weir" in first and "weir" in second and "weir" not in again


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_rows_of_every_shape_arrive(server, inline):
    """Inline or by reference, as a client reads them."""
    rows = {Site(*site): r for site, r in shaped_rows(3).items()}
    rows[Site("attn_scores", 1)] = torch.zeros(3, 6, 3).masked_fill(
        torch.ones(3, 3).triu(1).bool()[:, None], -torch.inf
    )
    at = dict.fromkeys(rows, torch.arange(3))
    view = View()
    view.activations = lambda: Activations(rows, at, at)
    out = asyncio.run(reply(server, view, inline).weir_objects())[0]["activations"]
    assert out["sites"] == [f"{hook}.{layer}" for hook, layer in rows]
    if inline:
        data = base64.b64decode(out["b64"])
        assert len(data) == out["bytes"]
    else:
        assert out["bytes"] == sum(r.nbytes for r in rows.values())
        with server.spool.open(out["id"]) as file:
            data = file.read()
    got = activations_of(data)
    assert got.sites == list(rows)
    assert all(torch.equal(got[site], r) and got[site].dtype == r.dtype for site, r in rows.items())


def test_without_routes_rows_go_inline_up_to_the_bound(server):
    server.spool = None
    out = asyncio.run(reply(server, View(), 0).weir_objects())[0]["activations"]
    assert "b64" in out
    server.limits = ServerLimits(inline_bytes=10)
    out = asyncio.run(reply(server, View(), 0).weir_objects())[0]["activations"]
    assert "b64" not in out and "`weir serve`" in out["error"] and out["bytes"] == 96


def test_what_was_kept_for_an_answer_that_fails_is_freed(server, monkeypatch):
    """Of several choices, one after another of which rows were kept; and where vllm-lens's field is too large."""
    made = reply(server, View())
    made.add_view(1, View(activations=failing()))
    with pytest.raises(WeirError, match="did not arrive"):
        asyncio.run(made.weir_objects())
    eventually(lambda: len(server.spool), 0, 60)
    answer = failing("too much", "output_residual_stream")
    (out,) = rewritten(reply(server, View(), answer=answer), chunk("stop"))
    assert "too much" in told_of(out)["choices"][0]["weir"]["error"]
    eventually(lambda: len(server.spool), 0, 60)


def test_delivery_ends_when_the_answer_is_made(server, tmp_path):
    """By then a result by reference is kept."""
    told = []
    trace = SimpleNamespace(span=lambda name: told.append((name, len(server.spool))))
    view = View(pending=SimpleNamespace(admitted=SimpleNamespace(told=0, calls={}), trace=trace))
    asyncio.run(reply(server, view).weir_objects())
    assert told == [("delivery", 1)]
