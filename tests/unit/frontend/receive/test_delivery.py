"""From plan to tensor: every wanted row arrives once, whatever the batches, the memory and the order of things."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.check import expected_positions
from tests.support.properties import examples
from tests.unit.delivery_harness import Post
from tests.unit.request_strategies import sensible_captures, served
from vllm_weir import Capture, Site, WeirError, codec, messages
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.outputs import slicers
from vllm_weir.frontend.outputs.slicers import captures_only_prompt, presliceable_kind
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.receiver import deliver
from vllm_weir.frontend.receive.release import HeldSequences
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.taps import column_of

LAYERS, D = 3, 4
FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1000)


def opened(store, captures, prompt_ids, name="r", timeout=0.2, compress=None):
    spec = RequestSpec(tuple(Capture(h, layers, p, compress=compress) for h, layers, p in captures))
    admitted = admit({"weir": spec.to_json()}, FACTS)
    pending = PendingSequence(name, admitted, np.asarray(prompt_ids), store)
    store.open(pending)
    if captures_only_prompt(pending.memory, len(prompt_ids)):
        store.prompt_slicer.add(pending, D)
    return pending, Tracker(pending, 0, D, timeout)


@pytest.fixture(scope="module")
def cut_at_once():
    """Rows are cut ahead as soon as they have a place."""
    later, slicers.DELAY = slicers.DELAY, 0
    yield
    slicers.DELAY = later


class Request:
    """A sequence on its way through a `Post`."""

    def __init__(self, post, name, captures, P, G, ids):
        self.post, self.name, self.captures, self.P, self.G, self.ids = post, name, captures, P, G, ids
        self.at, self.version = 0, {}
        self.pending = self.tracker = None
        if captures is not None:
            self.pending, self.tracker = opened(post.store, captures, ids[:P], name, compress=post.compression)
            self.pending.expected_end = self.end if presliceable_kind(self.pending.memory) else 0

    def join(self):
        if self.captures is not None:
            number = -1 if self.post.compression is None else 0
            spec = self.pending.admitted.spec
            self.post.planner.add_capture(self.name, "here", spec, self.P, self.ids[: self.P], self.G, number)

    @property
    def end(self):
        return self.P + self.G - 1

    def view(self, generated, delta=False, reason="length"):
        return self.tracker.view([1] * generated, delta, reason, 0)

    def rows(self, generated):
        return self.view(generated).activations()

    def verify(self):
        acts = self.tracker.view(self.ids[self.P :], False, "length", 0).activations()
        wanted = {}
        for hook, layers, selector in self.captures:
            for layer in range(LAYERS) if layers == "all" else layers:
                wanted.setdefault(Site(hook, layer), set()).update(
                    expected_positions(selector, self.P, self.G, self.ids)
                )
        assert set(acts.sites) == set(wanted)
        for site, at in wanted.items():
            assert acts.positions_of(*site).tolist() == sorted(at)
            assert acts.token_ids_of(*site).tolist() == [self.ids[p] for p in sorted(at)]
            column = column_of(site, False)
            expected = [[column, p, self.version[p], float(self.name[1:])] for p in sorted(at)]
            if self.post.compression is None:
                assert acts[site].tolist() == expected, "a wrong row, or an older one"
                continue
            records = torch.zeros(0, self.post.compression.record_bytes(D), dtype=torch.uint8)
            if expected:
                rows = torch.tensor(expected, dtype=torch.float32)
                records = codec.encode(rows, self.post.compression)
            assert acts.compressed(site)[0].equal(records), "a wrong row, or an older one"


@examples(30)
@given(
    near=st.booleans(), rows=st.sampled_from([700, 4000]), how=st.sampled_from([None, None, "full8"]), data=st.data()
)
def test_every_wanted_row_exactly_once(cut_at_once, near, rows, how, data):
    """Random wishes, chunkings, batch orders, joins, leaves, preemptions, neighbours, late messages, small memory."""
    post = Post(LAYERS, rows, near)
    post.compression = how and Compression.parse(how, "compress")
    count = data.draw(st.integers(1, 5))
    requests = {}
    for i in range(count):
        P, G = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
        ids = data.draw(st.lists(st.integers(0, 20), min_size=P + G, max_size=P + G))
        captures = data.draw(sensible_captures(LAYERS)) if data.draw(st.integers(0, 3)) else None
        requests[f"r{i}"] = Request(post, f"r{i}", captures, P, G, ids)
    joined, late = set(), []

    def content(name, column, position):
        return torch.tensor([column, position, requests[name].version[position], float(name[1:])])

    def flush():
        while late:
            post.deliver(late.pop(0), spill=post.arena.pressure > 0.4 or data.draw(st.booleans()))

    for clock in range(300):
        live = [r for r in requests.values() if r.at < r.end]
        if not live:
            break
        batch = []
        for r in data.draw(st.permutations(live)):
            if r.name not in joined:
                if data.draw(st.booleans()):
                    continue
                joined.add(r.name)
                r.join()
            if r.at > 1 and not data.draw(st.integers(0, 9)):
                r.at = data.draw(st.integers(0, r.at - 1))  # preempted: computed again from there
            n = data.draw(st.integers(1, r.P - r.at)) if r.at < r.P else 1
            batch.append((r.name, n, r.at))
            for p in range(r.at, r.at + n):
                r.version[p] = clock
        plan, message = post.step(batch, content, deliver=False)
        assert plan is None or not plan.failures
        late.append(message)
        for name, n, at in batch:
            requests[name].at = at + n
            if at + n >= requests[name].end:
                post.planner.remove(name)
        late.append(post.step([], content, deliver=False)[1])
        if post.arena.pressure > 0.4:
            post.row_seqs.retire_all()
            late.append(post.step([], content, deliver=False)[1])
        if data.draw(st.booleans()) or post.arena.pressure > 0.4:
            flush()
    flush()
    for r in requests.values():
        if r.captures is not None:
            r.verify()
    assert not post.planner.capturing and not len(post.planner.site_sets) and not post.row_seqs.live
    requests.clear()
    del r
    gc.collect()
    assert post.arena.used == 0, "memory that nobody refers to is still held"


@examples(60)
@given(
    captures=sensible_captures(LAYERS), P=st.integers(1, 12), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6)
)
def test_deltas_partition_the_rows(captures, P, cuts):
    """Looked at after the list of tokens has grown on."""
    post, ids = Post(LAYERS), [7 * p % 21 for p in range(P + sum(cuts))]
    request = Request(post, "r0", captures, P, sum(cuts), ids)
    request.join()
    post.step([("r0", P + sum(cuts) - 1, 0)], content)
    generated, parts = [], []
    for k in cuts:
        generated += ids[P + len(generated) :][:k]
        parts.append(request.tracker.view(generated, True, None, 0))
    whole = request.tracker.view(generated, False, "length", 0).activations()
    request.version = dict.fromkeys(range(P + sum(cuts)), 0)
    request.verify()
    for view in parts:
        assert view.rows == sum(len(view.activations()[site]) for site in whole.sites)
    for site in whole.sites:
        assert torch.cat([v.activations().positions_of(*site) for v in parts]).equal(whole.positions_of(*site))
        assert torch.cat([v.activations()[site] for v in parts]).equal(whole[site])
    for later in parts[1:]:
        parts[0].extend(later)
    for site in whole.sites:
        assert parts[0].activations()[site].equal(whole[site])


def content(name, column, position):
    return torch.tensor([column, position, 0.0, 0.0])


EVERY = [("resid_post", "all", "all")]


def run_one(captures=EVERY, P=5, G=1, end=None, how=None, **post):
    """A `Post` in which a request has run: its prompt in one step, its generated tokens one by one."""
    post = Post(LAYERS, **post)
    post.compression = how and Compression.parse(how, "compress")
    request = Request(post, "r0", captures, P, G, [1] * (P + G))
    request.join()
    post.step([("r0", P, 0)], content)
    for p in range(P, request.end if end is None else end):
        post.step([("r0", 1, p)], content)
    request.version = dict.fromkeys(range(P + G), 0)
    return post, request


def inside(post, rows):
    """Whether they lie in the worker's memory."""
    low = post.rows.data_ptr()
    return low <= rows.data_ptr() < low + post.rows.numel() * post.rows.element_size()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])  # noqa: S301
@pytest.mark.parametrize("how", [None, "full8"])
def test_an_output_that_was_pickled_or_copied_has_its_rows_and_its_receipt(copied, how):
    _, request = run_one([("resid_post", "all", "prompt"), ("final_norm", "all", "all")], G=3, how=how)
    view = request.view(3)
    twin = copied(view)
    assert twin.asked and twin.receipt() == view.receipt()
    acts, again = view.activations(), twin.activations()
    assert again.sites == acts.sites and len(again) == LAYERS + 1
    for site in acts.sites:
        assert again.positions_of(site).equal(acts.positions_of(site)) and again[site].equal(acts[site])
        assert again.token_ids_of(site).equal(acts.token_ids_of(site))


ASKED = {
    "all": EVERY,
    "some": [("resid_post", [0, 2], "prompt")],
    "several": [("resid_post", [0, 1], "all"), ("resid_post", [2], "prompt")],
}


@pytest.mark.parametrize("how", [None, "full8"])
@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_a_pickle_is_about_as_large_as_its_rows(how, looked, asked):
    """A tensor is pickled with all the memory that it is a part of: the extent of its strand, once for each block."""
    acts = run_one(ASKED[asked], 40, 300, end=40, how=how)[1].rows(1)
    if looked:
        assert all(len(acts[site]) == 40 for site in acts.sites)
    size = sum(acts[site].nbytes for site in acts.sites) + 2 * 8 * 40 * len(acts.sites)
    for twin in (acts, copy.deepcopy(acts)):
        written = pickle.dumps(twin)
        assert len(written) < 1.2 * size + 3000 * len(acts.sites), (len(written), size)
        again = pickle.loads(written)  # noqa: S301
        assert all(again[site].equal(acts[site]) for site in acts.sites)


def test_what_was_changed_in_rows_is_in_their_copies():
    acts = run_one(P=4)[1].rows(1)
    acts["resid_post", 1][2] = 7.0
    for twin in (copy.deepcopy(acts), pickle.loads(pickle.dumps(acts))):  # noqa: S301
        assert twin["resid_post", 1].equal(acts["resid_post", 1]) and (twin["resid_post", 1][2] == 7).all()


def test_rows_are_copied_out_of_a_crowded_buffer_and_when_the_worker_asks():
    """Else they are handed out where they lie."""
    post, request = run_one(G=20)
    acts = request.rows(20)
    assert all(inside(post, acts[site]) and acts[site].stride(1) == 1 and len(acts[site]) == 24 for site in acts.sites)
    post, request = run_one(P=15, rows=60)
    assert post.arena.pressure > 0.5
    acts = request.rows(1)
    post.rows.zero_()
    assert acts["resid_post", 1][:, 1].tolist() == list(range(15)), "handed out while crowded, so a copy"
    post, request = run_one(P=6)
    post.row_seqs.retire_all()
    post.deliver(post.step([], content, deliver=False)[1], spill=True)
    post.rows.zero_()
    acts = request.rows(1)
    assert acts["resid_post", 2][:, 1].tolist() == list(range(6)), "taken out before it was overwritten"


@pytest.mark.parametrize("patience", [0.0, None])
def test_no_room(patience):
    """Rows that find no room fail their request, or are dropped and said to be; the neighbour has its rows."""
    post = Post(LAYERS, rows=40, patience=patience)
    small = Request(post, "r1", [("resid_post", [0], "all")], 2, 2, [1] * 4)
    large = Request(post, "r0", EVERY, 30, 1, [1] * 31)
    rows = lambda name, column, position: torch.tensor([column, position, 0.0, float(name[1:])])
    small.join()
    large.join()
    small.version = dict.fromkeys(range(3), 0)
    plan, _ = post.step([("r1", 2, 0), ("r0", 30, 0)], rows)
    post.step([("r1", 1, 2)], rows)
    small.verify()
    if patience is None:
        assert not plan.failures
        view = large.view(1)
        receipt, rows = view.receipt(), view.activations()
        site = Site("resid_post", 0)
        assert 0 < receipt.captured[site] < 30 and receipt.captured[site] + receipt.dropped[site] == 30
        assert rows[site][:, 1].tolist() == rows.positions.tolist()
    else:
        ((reply, name, reason),) = plan.failures
        assert (reply, name) == ("here", "r0") and "host buffer is full" in reason and "host_bytes" in reason
        assert (plan.site_sets[2:] == -1).all() and "r0" not in post.planner.capturing


def test_missing_rows_are_an_error_that_names_them():
    post = Post(LAYERS)
    request = Request(post, "r0", [("resid_post", [0], "all")], 4, 1, [1] * 5)
    request.join()
    post.step([("r0", 2, 0)], content)
    with pytest.raises(WeirError, match=r"2 of 4 rows of resid_post\[0\] .* position 2"):
        request.rows(1)
    aborted = request.view(1, reason="abort")
    assert aborted.activations().positions.tolist() == [0, 1] and not aborted.receipt().complete


def test_rows_are_waited_for():
    post = Post(LAYERS)
    request = Request(post, "r0", [("resid_post", [0], "all")], 1, 1, [1] * 2)
    request.join()
    threading.Timer(0.03, post.step, ([("r0", 1, 0)], content)).start()
    (taken,) = request.pending.take([Site("resid_post", 0)], np.arange(1), 60)
    assert taken.rows[Site("resid_post", 0)].shape == (1, D)


def frames(header, marks=b"", steered=b"", *rest):
    return [messages.encode(header), marks, steered, *rest]


def test_a_failure_is_raised_not_waited_for():
    store = RowStore()
    pending, _ = opened(store, [("resid_post", [0], "all")], [1])
    header = messages.MessageHeader("t", "w", D, "float32", failures={"r": "the disc is full", "x": "-"})
    deliver(store, "t", frames(header), lambda w: MappedBuffer())
    with pytest.raises(WeirError, match="the disc is full"):
        pending.take([Site("resid_post", 0)], np.arange(1), 60)


@pytest.mark.parametrize("token", ["", "T", "tt", "é", "\ud7ff"])
def test_strangers_are_turned_away(token):
    store = RowStore()
    opened(store, [("resid_post", [0], "all")], [1])
    with pytest.raises(ValueError, match="token"):
        deliver(store, "t", frames(messages.MessageHeader(token, "w", D, "float32")), lambda w: MappedBuffer())


def test_the_store_holds_nothing_by_itself():
    post, request = run_one([("resid_post", [0], "all")], 1)
    post.store.read_arrivals()
    view = request.view(1, reason="stop")
    request.tracker = request.pending = None
    gc.collect(1)
    assert len(post.store) == 1 and len(post.store._row_views) == 1
    del view
    gc.collect(1)
    assert len(post.store) == 0 and not post.store._row_views and not post.store._groups


@given(
    name=st.text(),
    columns=st.lists(st.integers(0, 2**31), max_size=5),
    numbers=st.lists(st.integers(0, 2**40), min_size=4, max_size=4),
    failures=st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_mail_round_trip(name, columns, numbers, failures):
    opened, placed = messages.SequenceOpened(1, name, columns), messages.ExtentPlaced(*numbers)
    updates = messages.LayoutUpdate([opened], [placed], [messages.ExtentRetired(*numbers)], [3])
    sent = messages.MessageHeader("token", "w", D, "bfloat16", updates, failures, 0.5, True)
    header = messages.decode(messages.encode(sent))
    assert (header.token, header.worker, header.dtype, header.failures) == ("token", "w", "bfloat16", failures)
    assert header.layout_updates == updates and header.pressure == 0.5 and header.spill


def test_reply_addresses():
    reply = messages.ReaderEndpoint("ipc:///a#b/rows", "ipc:///a#b/vectors", "/a#b/arenas", "secret")
    assert messages.ReaderEndpoint.parse(str(reply)) == reply


@pytest.mark.parametrize("claims", [0, 2])
def test_rows_are_let_go_when_nobody_needs_them_whoever_holds_the_output(claims):
    """As of a server's answer that is out; sinks that have not taken them yet keep them."""
    post, request = run_one(P=4)
    view, pending = request.view(1), post.store.get("r0")
    pending.claim(claims)
    held = HeldSequences()
    held.add(post.store, pending)
    held.release()
    held.release()
    if claims:
        assert len(post.store) == 1 and len(view.activations()["resid_post", 0]) == 4
        pending.unclaim()
    assert not pending.row_views
    with pytest.raises(WeirError):
        replace(view, timeout=0.01, _cached_activations=None).activations()
    assert len(post.store) == 0


def test_who_waits_for_rows_that_are_let_go_waits_no_longer():
    post = Post(LAYERS)
    request = Request(post, "r0", EVERY, 4, 1, [1] * 4)
    view = request.view(1)
    view.timeout = 60.0
    held = HeldSequences()
    held.add(post.store, post.store.get("r0"))
    threading.Timer(0.03, held.release).start()
    with pytest.raises(WeirError, match="nobody waited for its answer"):
        view.activations()


def test_one_that_nobody_holds_any_more_is_let_go_of_by_itself():
    post, held = Post(LAYERS), HeldSequences()
    request = Request(post, "r0", EVERY, 4, 1, [1] * 4)
    held.add(post.store, post.store.get("r0"))
    del request
    gc.collect(1)
    assert len(post.store) == 0
    held.release()
