"""Sinks on a live engine: who gets which rows, what marks do, and that nothing a consumer does harms the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import ClassVar

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, frontend, prompts, sampling
from tests.support.engines import async_llm, get_llm
from tests.support.machine import engine_processes, needs
from tests.support.measure import eventually
from vllm_weir import codec, consumers
from vllm_weir.consumers import Consumer

pytestmark = pytest.mark.engine


class Notes(Consumer):
    """Keeps what it gets; `fail` has the prompt lengths of requests, alone or behind its label, that it cannot take.

    `gate` holds it up.
    """

    required = True
    rows: ClassVar[list] = []
    finished: ClassVar[list] = []
    aborted: ClassVar[list] = []
    fail: ClassVar[set] = set()
    gate = threading.Event()

    def __init__(self, label="notes"):
        self.label = label

    def take(self, rows):
        Notes.gate.wait(120)
        if {rows.request.prompt_tokens, (self.label, rows.request.prompt_tokens)} & Notes.fail:
            raise OSError(28, "No space left on device")
        tensors = [tensor.clone() for tensor in (rows.positions, rows.token_ids, rows.data)]
        Notes.rows.append((self.label, rows.request, rows.site, *tensors, rows.compression))

    def finish(self, request):
        Notes.finished.append((self.label, request))
        return [f"/notes/{self.label}/{request.name}"]

    def abort(self, request):
        Notes.aborted.append(request)


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    monkeypatch.setitem(consumers._SHIPPED, "notes", f"{__name__}:Notes")
    for kept in (Notes.rows, Notes.finished, Notes.aborted, Notes.fail):
        kept.clear()
    Notes.gate.set()


@pytest.fixture
def llm(root, notes):
    """An engine with a named sink, and one with little room."""
    sinks = {
        "kept": {"notes": {"label": "kept"}},
        "small": {"notes": {"label": "small"}, "policy": "drop", "queue_bytes": 1},
    }
    return get_llm(directory(root), additional_config={"weir": {"sinks": sinks, "marked_seconds": 3600.0}})


def to(sink, layers=(1, 2), positions="all", max_tokens=4, **more):
    return weir.params(sampling(max_tokens), capture=weir.Capture("resid_post", layers, positions, sink=sink, **more))


def of(request_id):
    return {
        (rows[2], name): value
        for rows in Notes.rows
        if rows[1].request_id == request_id
        for name, value in zip(("positions", "token_ids", "data", "header"), rows[3:])
    }


@pytest.mark.parametrize("compress", [None, pytest.param("full8", marks=pytest.mark.thorough)])
def test_rows_reach_their_sinks(llm, compress):
    """Each request's own, beside memory captures, an own sink and a request without keys, all in one batch."""
    own = {"notes": {"label": "own"}}
    both = [
        weir.Capture("resid_post", [1, 2], sink="kept", compress=compress),
        weir.Capture("resid_post", [2, 3], "generated", compress=compress),
        weir.Capture("resid_pre", 1, "prompt", sink=own, compress=compress),
    ]
    params = [
        to("kept", compress=compress),
        weir.params(sampling(4), capture=both),
        weir.params(
            sampling(4),
            capture=[weir.Capture("resid_post", compress=compress), weir.Capture("resid_pre", compress=compress)],
        ),
        sampling(4),
    ]
    outs = llm.generate(prompts([9, 9, 9, 9])[:1] * 4, params, use_tqdm=False)
    first, second, plain, none = outs
    assert none.activations is None and none.receipt is None
    assert first.activations.sites == [] and first.receipt.sinks == {"kept": "written"}
    assert [f.rsplit("-", 1)[0] for f in first.receipt.files] == [f"/notes/kept/{first.request_id}"]
    assert second.receipt.sinks == {"kept": "written", "notes": "written"} and len(second.receipt.files) == 2
    value = (lambda acts, site: acts[site]) if compress is None else (lambda acts, site: acts.compressed(site)[0])
    for out in (first, second):
        got = of(out.request_id)
        for layer in (1, 2):
            site = weir.Site("resid_post", layer)
            assert got[site, "positions"].equal(plain.activations.positions)
            assert got[site, "token_ids"].equal(plain.activations.token_ids)
            assert got[site, "data"].equal(value(plain.activations, site))
            assert (got[site, "header"] is None) == (compress is None)
    pre = weir.Site("resid_pre", 1)
    assert of(second.request_id)[pre, "data"].equal(value(plain.activations, pre)[:9])
    assert set(second.activations.sites) == {weir.Site("resid_post", 2), weir.Site("resid_post", 3)}
    assert second.activations.positions.tolist() == [9, 10, 11]
    assert {label for label, request in Notes.finished if request.request_id == second.request_id} == {"kept", "own"}
    finished = Notes.finished[0][1]
    assert (finished.prompt_tokens, finished.generated_tokens, finished.finish_reason) == (9, 4, "length")
    del outs, first, second, plain, none, out
    assert_nothing_is_held(llm)


def test_rows_that_were_written_hold_no_memory(llm):
    outs = llm.generate(prompts([40] * 6), to("kept", "all"), use_tqdm=False)
    llm.llm_engine.step()
    eventually(lambda: sum(u["host_rows"] for u in llm.collective_rpc("weir_usage")), 0, 5)
    assert len(outs) == 6, "they are still held here"


def test_sequences_have_names_of_their_own(llm):
    params = weir.params(sampling(3, n=3, temperature=1.0, seed=1), capture=weir.Capture("resid_post", 0, sink="kept"))
    out = llm.generate(prompts([5]), params, use_tqdm=False)[0]
    assert sorted(r.index for _, r in Notes.finished) == [0, 1, 2]
    assert len({c.receipt.files for c in out.outputs}) == 3
    for label, request, site, positions, ids, data, _ in Notes.rows:
        assert ids.tolist() == (list(out.prompt_token_ids) + list(out.outputs[request.index].token_ids))[:-1]


def test_a_sink_that_fails_fails_its_request(llm):
    Notes.fail.add(13)
    with pytest.raises(weir.WeirError, match="No space left"):
        llm.generate(prompts([13]), to("kept"), use_tqdm=False)
    assert [r.prompt_tokens for r in Notes.aborted] == [13]
    for n, sink in ((13, "memory"), (12, "kept")):
        assert llm.generate(prompts([n]), to(sink), use_tqdm=False)[0].receipt.complete
    assert weir.sinks(llm)["kept"]["failed"] == 1 and "No space" in weir.sinks(llm)["kept"]["last_error"]
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_sink_without_room_drops_and_says_so(llm):
    Notes.gate.clear()
    before, over = weir.sinks(llm)["small"]["dropped"], threading.Event()

    def open_when_dropped():
        while weir.sinks(llm)["small"]["dropped"] < before + 3 and not over.wait(0.01):
            pass
        Notes.gate.set()

    watcher = threading.Thread(target=open_when_dropped)
    watcher.start()
    try:
        outs = llm.generate(prompts([8] * 5), to("small"), use_tqdm=False)
    finally:
        over.set()
        watcher.join()
    states = [o.receipt.sinks["small"] for o in outs]
    assert set(states) == {"written", "dropped"} and states.count("dropped") >= 3
    assert all(bool(o.receipt.files) == (s == "written") for o, s in zip(outs, states))


def test_marks(llm, monkeypatch):
    outs = llm.generate(prompts([6, 7, 8]), to("kept", keep="marked"), use_tqdm=False)
    assert not Notes.rows and all(o.receipt.sinks == {"kept": "held"} for o in outs)
    (ticket,) = weir.mark(outs[1].request_id, llm=llm, why="odd", score=0.5)
    assert ticket.wait(60) == outs[1].receipt.files and len(ticket.files) == 1
    assert [dict(r.metadata) for _, r in Notes.finished] == [{"why": "odd", "score": 0.5}]
    assert {rows[1].prompt_tokens for rows in Notes.rows} == {7}
    monkeypatch.setattr(frontend(llm).manager.marks, "_clock", lambda: time.monotonic() + 3601)
    eventually(lambda last=outs[2]: last.receipt.sinks, {"kept": "evicted"}, 10)
    monkeypatch.undo()
    with pytest.raises(weir.WeirError, match="marked_seconds"):
        weir.mark(outs[0].request_id)
    with pytest.raises(weir.WeirError, match="known here"):
        weir.mark("nobody")
    with pytest.raises(weir.WeirError, match="JSON"):
        weir.mark(outs[0].request_id, llm=llm, what=object())
    # While it runs:
    llm.llm_engine.add_request("early", prompts([5])[0], to("kept", keep="marked"))
    llm.llm_engine.step()
    assert weir.mark("early", llm=llm, late=False) == []
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            assert out.receipt.sinks == ({"kept": "written"} if out.finished else {})
    del outs, ticket, out
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("positions", ["all", pytest.param("prompt", marks=pytest.mark.thorough)])
def test_what_an_output_s_owner_does_to_its_rows_is_not_what_a_sink_gets(llm, positions):
    """Marked rows are kept for long after their output; streamed outputs are there before any sink has rows."""
    from vllm.sampling_params import RequestOutputKind

    both = [
        weir.Capture("resid_post", [1, 2], positions),
        weir.Capture("resid_post", [2, 3], positions, sink="kept", keep="marked"),
        weir.Capture("resid_post", [1, 3], positions, sink="kept"),
    ]
    params = weir.params(sampling(4), capture=both)
    params.output_kind = RequestOutputKind.CUMULATIVE
    llm.llm_engine.add_request("mine", prompts([9])[0], params)
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            if not out.finished:
                for site in out.activations.sites:
                    out.activations[site].zero_()
    reference = llm.generate(prompts([9]), to("kept", "all", positions, keep="marked"), use_tqdm=False)[0]
    rows = {tuple(site): out.activations[site] for site in out.activations.sites}
    for held in rows.values():
        held.zero_()
    for request in ("mine", reference.request_id):
        for ticket in weir.mark(request, llm=llm):
            ticket.wait(60)
    wanted = of(reference.request_id)
    got = of("mine")
    for layer in (1, 2, 3):
        assert torch.equal(got[("resid_post", layer), "data"], wanted[("resid_post", layer), "data"])


@pytest.mark.parametrize(
    ("capture", "field"),
    [
        ({"sink": "nowhere"}, "capture[0].sink"),
        ({"sink": {"notes": {"colour": 1}}}, "capture[0].sink.notes"),
        ({"sink": "kept", "keep": "never"}, "capture[0].keep"),
    ],
)
def test_what_cannot_be_done_is_refused(llm, capture, field):
    wire = {"v": 1, "capture": [{"hook": "resid_post", "layers": 0, **capture}]}
    params = sampling(2)
    params.extra_args = {"weir": wire}
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([4]), params, use_tqdm=False)
    assert e.value.field == field
    assert not llm.llm_engine.has_unfinished_requests()


def test_text_from_outside_sets_up_no_sink(llm):
    params = sampling(2)
    params.extra_args = {"weir": '{"v": 1, "capture": [{"layers": 0, "sink": {"notes": {}}}]}'}
    with pytest.raises(weir.WeirError, match="may only name one of the engine's sinks"):
        llm.generate(prompts([4]), params, use_tqdm=False)
    params.extra_args = {"weir": '{"v": 1, "capture": [{"layers": 0, "sink": "kept"}]}'}
    assert llm.generate(prompts([4]), params, use_tqdm=False)[0].receipt.files


def test_a_sink_for_every_request(root):
    """Requests without keys are captured too; a request's own capture of the same site keeps its own positions."""
    sinks = {
        "all": {
            "notes": {"label": "all"},
            "capture": [{"hook": "resid_post", "layers": [1], "positions": "last_prompt"}],
        },
        "norms": {"logging": {"seconds": 0}, "capture": {"layers": [2]}, "policy": "spill", "queue_bytes": 1},
        "optional": {"notes": {"label": "optional"}, "capture": {"layers": [3]}, "required": False},
    }
    llm = get_llm(directory(root), additional_config={"weir": {"sinks": sinks}})
    plain, own = llm.generate(prompts([9, 9])[:1] * 2, [sampling(3), to("memory", [1], max_tokens=3)], use_tqdm=False)
    assert plain.activations is None and plain.receipt.sinks == dict.fromkeys(sinks, "written")
    assert own.activations.positions.tolist() == list(range(11))
    site = weir.Site("resid_post", 1)
    for out in (plain, own):
        assert of(out.request_id)[site, "positions"].tolist() == [8]
        assert torch.equal(of(out.request_id)[site, "data"], own.activations[site][8:9])
    check_treated_beside_plain(llm, own, sinks)
    weir.flush(llm)
    norms = frontend(llm).manager._runners["norms"]._consumer
    assert norms.sites[weir.Site("resid_post", 2)].rows == 22 + 5 * 11
    # The same consumer, failing: where requests do not depend on it, and where they do.
    Notes.fail.add(("optional", 17))
    out = llm.generate(prompts([17]), sampling(2), use_tqdm=False)[0]
    assert "No space" in out.receipt.sinks["optional"] and len(out.outputs[0].token_ids) == 2
    Notes.fail.add(17)
    with pytest.raises(weir.WeirError, match="No space"):
        llm.generate(prompts([17]), sampling(2), use_tqdm=False)
    assert weir.sinks(llm)["all"]["failed"] == 1


def check_treated_beside_plain(llm, own, sinks):
    """What a request makes of its rows takes nothing from what sinks get of every request, nor the reverse."""
    rows, v = own.activations["resid_post", 1], torch.randn(2, 128)
    kinds = [{"reduce": "mean"}, {"project": v}, {"project": v, "reduce": "max"}]
    kinds += [{"compress": "full8"}, {"compress": "rp8"}]
    asked = [to("memory", [1], max_tokens=3, **kind) for kind in kinds]
    mean, scores, best, full, rp8 = llm.generate(prompts([9, 9])[:1] * len(asked), asked, use_tqdm=False)
    # Sums of up to 128 products in another order: of their magnitudes' sum.
    near = {"rtol": 0, "atol": 1e-6 * max(1.0, float((rows.abs() @ v.abs().T).max()))}
    torch.testing.assert_close(mean.activations["resid_post", 1], rows.mean(0, keepdim=True), **near)
    torch.testing.assert_close(scores.activations["resid_post", 1], rows @ v.T, **near)
    torch.testing.assert_close(best.activations["resid_post", 1], (rows @ v.T).amax(0, keepdim=True), **near)
    for out, method in ((full, "full8"), (rp8, "rp8")):
        records, header = out.activations.compressed("resid_post", 1)
        assert header == out.receipt.compression and header["method"] == method
        assert torch.equal(records, codec.encode(rows, method))
    for out in (mean, scores, best, full, rp8):
        plain = of(out.request_id)
        assert torch.equal(plain[weir.Site("resid_post", 1), "data"], rows[8:9])
        assert out.receipt.sinks == dict.fromkeys(sinks, "written")


@pytest.mark.thorough
@needs(engine_processes)
def test_an_async_engine(root):
    async def run():
        weird = {"weir": {"sinks": {"kept": {"notes": {"label": "kept"}}}}}
        engine = async_llm(directory(root), additional_config=weird)
        try:

            async def one(k, params):
                last = None
                async for out in engine.generate(prompts([5 + k])[0], params, f"r{k}"):
                    last = out
                return last

            Notes.fail.add(7)
            outs = await asyncio.gather(*(one(k, to("kept")) for k in range(4)), return_exceptions=True)
            assert [isinstance(o, weir.WeirError) for o in outs] == [False, False, True, False]
            for out in outs[:2]:
                receipt = await asyncio.to_thread(lambda out=out: out.receipt)
                assert receipt.sinks == {"kept": "written"} and len(receipt.files) == 1
        finally:
            engine.shutdown()

    asyncio.run(run())
