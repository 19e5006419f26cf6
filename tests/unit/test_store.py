"""Delivery: what workers send is assembled by position, whatever the order, and recomputed rows replace older ones."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.check import expected_positions
from tests.unit.wishes import sensible_captures
from vllm_weir import Capture, Site, WeirError, mail
from vllm_weir.frontend.admit import EngineFacts, admit
from vllm_weir.frontend.desk import Tracker
from vllm_weir.frontend.inbox import deliver
from vllm_weir.frontend.store import Pending, Store
from vllm_weir.spec.request import RequestSpec
from vllm_weir.worker.plan import column_of

LAYERS, D = 3, 4
FACTS = EngineFacts(frozenset(range(LAYERS + 1)), LAYERS, D, "float32", 1000)


def truth(column: int, position: int, version: int = 0) -> torch.Tensor:
    return torch.tensor([column, position, version, 1.0])


def opened(store, captures, P, name="r"):
    spec = RequestSpec(tuple(Capture(h, layers, p) for h, layers, p in captures))
    pending = Pending(name, admit({"weir": spec.to_json()}, FACTS), np.arange(P))
    store.open(pending)
    return pending, Tracker(pending, 0, D, 0.2)


def send(store, pieces, token="t"):
    """pieces: (request id, columns, positions, rows [n, columns, d])."""
    made, blobs, start = [], [], 0
    for name, columns, positions, rows in pieces:
        made.append(mail.Piece(name, columns, np.asarray(positions, "<i4").tobytes(), start))
        blobs.append(rows.reshape(-1, D))
        start += len(blobs[-1])
    head = mail.encode(mail.Header(token, D, "float32", made))
    deliver(store, "t", head, torch.cat(blobs).numpy().tobytes())


@settings(max_examples=200, deadline=None)
@given(captures=sensible_captures(LAYERS), P=st.integers(1, 20), G=st.integers(1, 6), data=st.data())
def test_rows_arrive_in_any_pieces_and_any_order(captures, P, G, data):
    store = Store()
    pending, tracker = opened(store, captures, P)
    columns = sorted({column_of(w.site, w.before) for w in pending.admitted.spec.wishes})
    latest = {}
    jobs = [(c, p) for c in columns for p in range(P + G - 1)]
    jobs += data.draw(st.lists(st.sampled_from(jobs), max_size=40)) if jobs else []
    for version, (column, position) in enumerate(data.draw(st.permutations(jobs))):
        latest[column, position] = version
        send(store, [("r", [column], [position], truth(column, position, version))])
    ids = list(range(P)) + [(3 * i) % 21 for i in range(G)]
    acts = tracker.view(ids[P:], False, "length", 0).activations()
    wanted = {}
    for hook, layers, selector in captures:
        for layer in range(LAYERS) if layers == "all" else layers:
            wanted.setdefault(Site(hook, layer), set()).update(expected_positions(selector, P, G, ids))
    assert set(acts.sites) == set(wanted)
    for site, at in wanted.items():
        assert acts.positions_of(*site).tolist() == sorted(at)
        assert acts.token_ids_of(*site).tolist() == [ids[p] for p in sorted(at)]
        column = column_of(site, False)
        for row, position in zip(acts[site], sorted(at), strict=True):
            assert row.equal(truth(column, position, latest[column, position])), "an older row won"


@settings(max_examples=100, deadline=None)
@given(
    captures=sensible_captures(LAYERS), P=st.integers(1, 12), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6)
)
def test_deltas_partition_the_rows(captures, P, cuts):
    store = Store()
    pending, tracker = opened(store, captures, P)
    columns = sorted({column_of(w.site, False) for w in pending.admitted.spec.wishes})
    n = P + sum(cuts) - 1
    rows = torch.stack([torch.stack([truth(c, p) for c in columns]) for p in range(n)])
    send(store, [("r", columns, range(n), rows)])
    generated, parts = [], []
    for k in cuts:
        generated += [5] * k
        parts.append(tracker.view(generated, True, None, 0))
    whole = tracker.view(generated, False, "length", 0).activations()
    for site in whole.sites:
        assert torch.cat([v.activations().positions_of(*site) for v in parts]).equal(whole.positions_of(*site))
        assert torch.cat([v.activations()[site] for v in parts]).equal(whole[site])
    for later in parts[1:]:
        parts[0].extend(later)
    for site in whole.sites:
        assert parts[0].activations()[site].equal(whole[site])


def test_several_requests_in_one_message():
    store, all_ = Store(), [("resid_post", [0], "all")]
    a, _ = opened(store, all_, 2, "a")
    b, _ = opened(store, all_, 3, "a-b")
    column = column_of(Site("resid_post", 0), False)
    rows = torch.arange(20.0).view(5, 1, D)
    send(
        store,
        [("a", [column], [0, 1], rows[:2]), ("nobody", [column], [0], rows[2:3]), ("a-b", [column], [1, 2], rows[3:])],
    )
    assert a.take(Site("resid_post", 0), np.arange(2), 1).equal(rows[:2, 0])
    assert b.arrived(Site("resid_post", 0), np.arange(3)).tolist() == [1, 2]


def test_missing_rows_are_an_error_that_names_them():
    store = Store()
    _pending, tracker = opened(store, [("resid_post", [0], "all")], 4)
    column = column_of(Site("resid_post", 0), False)
    send(store, [("r", [column], [0, 1, 3], torch.zeros(3, 1, D))])
    with pytest.raises(WeirError, match=r"1 of 4 rows of resid_post\[0\] .* position 2"):
        tracker.view([7], False, "length", 0).activations()
    aborted = tracker.view([7], False, "abort", 0)
    assert aborted.activations().positions.tolist() == [0, 1, 3] and not aborted.receipt().complete


def test_rows_are_waited_for():
    store = Store()
    pending, _ = opened(store, [("resid_post", [0], "all")], 1)
    late = threading.Timer(
        0.1, send, (store, [("r", [column_of(Site("resid_post", 0), False)], [0], torch.ones(1, 1, D))])
    )
    late.start()
    assert pending.take(Site("resid_post", 0), np.arange(1), 5).equal(torch.ones(1, D))


def test_a_failure_is_raised_not_waited_for():
    store = Store()
    pending, _ = opened(store, [("resid_post", [0], "all")], 1)
    deliver(store, "t", mail.encode(mail.Header("t", D, "float32", failures={"r": "the disc is full", "x": "-"})), b"")
    with pytest.raises(WeirError, match="the disc is full"):
        pending.take(Site("resid_post", 0), np.arange(1), 60)


@pytest.mark.parametrize("token", ["", "T", "tt", "é", "\ud7ff"])
def test_strangers_are_turned_away(token):
    store = Store()
    opened(store, [("resid_post", [0], "all")], 1)
    with pytest.raises(ValueError, match="token"):
        send(store, [("r", [4], [0], torch.ones(1, 1, D))], token)


def test_the_store_holds_nothing_by_itself():
    store = Store()
    pending, tracker = opened(store, [("resid_post", [0], "all")], 1)
    view = tracker.view([1], False, "stop", 0)
    del tracker, pending
    assert len(store) == 1
    del view
    assert len(store) == 0 and store.get("r") is None


@settings(max_examples=100, deadline=None)
@given(
    name=st.text(),
    columns=st.lists(st.integers(0, 2**31), max_size=5),
    positions=st.lists(st.integers(0, 2**31 - 1), max_size=9),
    failures=st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_mail_round_trip(name, columns, positions, failures):
    piece = mail.Piece(name, columns, np.asarray(positions, "<i4").tobytes(), 3)
    header = mail.decode(mail.encode(mail.Header("token", D, "bfloat16", [piece], failures=failures)))
    assert (header.token, header.d_model, header.dtype, header.failures) == ("token", D, "bfloat16", failures)
    (again,) = header.pieces
    assert again == piece and np.frombuffer(again.positions, "<i4").tolist() == positions


def test_reply_addresses():
    assert mail.split_reply("ipc:///a#b/rows\tipc:///a#b/vectors\tsecret") == (
        "ipc:///a#b/rows",
        "ipc:///a#b/vectors",
        "secret",
    )
