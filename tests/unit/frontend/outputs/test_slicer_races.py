"""Rows come in one thread while requests are opened and outputs looked at in others; and rows that never come."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch

from tests.unit.delivery_harness import Post
from tests.unit.frontend.receive.test_delivery import EVERY, FACTS, LAYERS, D, Request, content, opened
from vllm_weir import Capture, Site, messages
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.pending_sequence import PendingSequence, TakenRows
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.schema.request import RequestSpec

LAST = [("resid_post", "all", "last_prompt")]


@pytest.fixture
def switching():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("header", [{}, {"broken": "it broke"}, {"spill": True}])
def test_requests_may_be_opened_while_rows_arrive(header, switching):
    """A message that is half taken in would keep its rows from whoever waits for them."""
    store, kept = RowStore(), []
    first, _ = opened(store, LAST, [1] * 4, "first")
    full = messages.MessageHeader("t", "w", D, "float32", messages.LayoutUpdate(), **header)
    marks = np.array([[0, -1, 0, 1, 1]], np.int32)
    stop = threading.Event()

    def admitting():
        while not stop.is_set():
            pending = PendingSequence(f"r{len(kept)}", first.admitted, [1] * 4, store)
            kept.append(pending)
            store.open(pending)
            store.prompt_slicer.add(pending, D)
            if len(kept) > 2000:
                kept.clear()

    thread = threading.Thread(target=admitting)
    thread.start()
    try:
        for _ in range(200):
            store.receive(full, MappedBuffer(), marks, np.zeros((0, 4), np.int32), b"")
    finally:
        stop.set()
        thread.join()


def test_marks_that_come_while_an_aborted_output_is_looked_at_are_not_lost():
    post = Post(LAYERS)
    request = Request(post, "r0", EVERY, 4, 2, [1] * 6)
    request.join()
    post.step([("r0", 4, 0)], content)
    _, late = post.step([("r0", 1, 4)], content, deliver=False)
    (row_view,) = request.pending.row_views
    threads = []

    class Parts(list):
        """Another message is taken in between the look at the marks and their removal."""

        def clear(self):
            if not threads:
                threads.append(threading.Thread(target=lambda: (post.deliver(late), post.store.read_arrivals())))
                threads[0].start()
                threads[0].join(0.05)
            super().clear()

    post.store.read_arrivals()
    row_view._new_positions = Parts(row_view._new_positions)
    assert request.tracker.view([1], False, "abort", 0).activations().positions.tolist()[:4] == [0, 1, 2, 3]
    if not threads:
        pytest.fail("nothing came meanwhile")
    threads[0].join()
    assert request.tracker.view([1, 1], False, None, 0).activations().positions.tolist() == [0, 1, 2, 3, 4]


class Few(PendingSequence):
    """Of the positions asked for, the worker had no room for some."""

    lost: frozenset = frozenset()

    def take(self, sites, positions, timeout, kind="rows", copy=False):
        out = []
        for k, site in enumerate(sites):
            at = np.array([p for p in positions if k or p not in self.lost], np.int64)
            out.append(TakenRows([site], at, {site: torch.ones(len(at), D) * at[:, None]} if len(at) else {}))
        return out


@pytest.mark.parametrize("how", ["mean", "max", "last"])
@pytest.mark.parametrize("lost", [{3}, {5}, {6}, set()])
def test_a_reduction_of_which_rows_are_missing_is_no_reduction(how, lost):
    """Position 3 is where the prompt's, reduced in the worker, come; 4 to 6 are generated."""
    spec = RequestSpec((Capture("resid_post", [0, 1], "all", reduce=how),))
    pending = Few("r0", admit({"weir": spec.to_json()}, FACTS), [1] * 4, RowStore())
    pending.lost = frozenset(lost)
    view = Tracker(pending, 0, D, 0.2).view([1] * 4, False, "length", 0)
    receipt, acts = view.receipt(), view.activations()
    one, other = Site("resid_post", 0), Site("resid_post", 1)
    assert acts[other].shape == (1, D) and acts.positions_of(*other).tolist() == [6]
    assert receipt.captured == {one: int(not lost), other: 1} and len(acts[one]) == int(not lost)
    assert receipt.dropped == ({one: 1} if lost else {})
