"""Sinks without an engine: definitions, the queue and its policies, marks, and a runner whose consumer misbehaves."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import threading
import time
import tomllib
import weakref
from contextlib import contextmanager, nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.support.measure import eventually
from tests.unit.refusals import pairs, refused
from tests.unit.stored import shaped_rows
from vllm_weir import Capture, Site, WeirError, codec, consumers
from vllm_weir.compat.mi_patch.environment import act_sink, settings_of
from vllm_weir.config.settings import Settings
from vllm_weir.consumers import Consumer, EngineInfo, Finished, Rows
from vllm_weir.controllers import AsyncController
from vllm_weir.frontend.outputs.ticket import Ticket, labels_of
from vllm_weir.frontend.sinks.delivery import Delivery
from vllm_weir.frontend.sinks.manager import SinkManager, check_sinks
from vllm_weir.frontend.sinks.mark_buffer import MarkBuffer
from vllm_weir.frontend.sinks.queue import BoundedQueue
from vllm_weir.frontend.sinks.runner import SinkRunner
from vllm_weir.results.activations import Activations, CompressedRows
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.sinks import Sink, SinkDefinition, parse_sinks
from vllm_weir.storage import LAYOUTS, load
from vllm_weir.util import plugins

ENGINE = EngineInfo("m", 3, 4, "float32")


class Box:
    """Stands in for a delivery."""

    def __init__(self, size=1, name="r"):
        self.size = size
        self.request = Finished(name, 0, name, 3, 2, "length")
        self.ticket = Ticket("s", True)
        self.events = []

    def rows(self):
        self.events.append("rows")
        yield Rows(self.request, Site("resid_post", 1), torch.arange(2), torch.arange(2), torch.ones(2, 4))

    def discard(self):
        self.events.append("over")

    def evict(self):
        self.events.append("evicted")


# Definitions


def test_definitions_round_trip():
    for data in (
        {"filesystem": {"url": "/tmp/x", "layout": "sharded"}},
        {"logging": {}, "policy": "drop", "queue_bytes": 5, "capture": [{"hook": "resid_post"}], "keep": "marked"},
        {"mine": {"a": [1, {"b": None}]}, "required": False, "capture": []},
    ):
        one = SinkDefinition.parse(data, "s")
        assert SinkDefinition.parse(one.to_json(), "s") == one
        assert hash(one) == hash(SinkDefinition.parse(dict(reversed(data.items())), "s"))
    assert SinkDefinition.parse({"logging": {}, "capture": Capture("resid_pre", 1)}, "s").captures
    assert Sink.parse("memory", "s").memory and not Sink.parse("archive", "s").memory
    own = Sink.parse({"filesystem": {"url": "x"}}, "s")
    assert own.name == "filesystem" and Sink.parse(own.to_json(), "s") == own
    assert Sink.parse({"memory": {}}, "s") == Sink.parse("memory", "s")
    assert Capture("resid_post", sink={"memory": {}}) == Capture("resid_post")
    for wrong in ({"memory": {"x": 1}}, {"memory": {}, "policy": "drop"}):
        with refused("s.memory", "no options"):
            Sink.parse(wrong, "s")


WRONG = {
    "s": [{}, [], {"a": {}, "b": {}}, {"../a": {}}],
    "s.a": [{"a": options} for options in (3, {"x": float("nan")}, {"x": object()}, {"x": "y" * 70_000})],
    "s.policy": [{"a": {}, "policy": "wait"}],
    "s.queue_bytes": [{"a": {}, "queue_bytes": size} for size in (0, True)],
    "s.keep": [{"a": {}, "keep": "maybe"}],
    "s.required": [{"a": {}, "required": 1}],
    "s.capture": [{"a": {}, "capture": 3}],
    "s.capture[0]": [{"a": {}, "capture": [3]}],
}
WRONG_CAPTURES = {
    "capture.sink": [{"sink": sink} for sink in (3, "", {"a": {}, "b": {}})],
    "capture.keep": [{"sink": "x", "keep": "sometimes"}, {"keep": "marked"}],
}


@pytest.mark.parametrize(("field", "data"), pairs(WRONG))
def test_bad_definitions_are_refused(field, data):
    with refused(field):
        SinkDefinition.parse(data, "s")


def test_a_request_cannot_bind_others():
    for key, value in (("capture", []), ("keep", "always"), ("required", True)):
        with pytest.raises(WeirError):
            SinkDefinition.parse({"filesystem": {}, key: value}, "s", by_request=True)


@pytest.mark.parametrize(("field", "fields"), pairs(WRONG_CAPTURES))
def test_captures_with_bad_sinks_are_refused(field, fields):
    with refused(field):
        Capture(**fields)


def test_settings():
    load = Settings.load
    one = {"archive": {"filesystem": {"url": "/x"}}}
    assert load({"weir": {"sinks": one}}, {}).sinks == parse_sinks(one)
    assert load({}, {"WEIR_SINKS": '{"archive": {"filesystem": {"url": "/x"}}}'}).sinks == parse_sinks(one)
    assert load({}, {}).sinks == {}
    for bad in ("{", "[]", '{"memory": {"logging": {}}}', '{"a": {}}'):
        with pytest.raises(WeirError, match=r"settings\.sinks"):
            load({}, {"WEIR_SINKS": bad})
    for name, value in (("marked_seconds", 0), ("marked_bytes", -1)):
        with pytest.raises(WeirError, match=name):
            load({"weir": {name: value}}, {})


# VLLM_ACT_*


def act(**values):
    return act_sink({f"VLLM_ACT_{name}": value for name, value in values.items()})


WRONG_ACT = {
    "CAPTURE": ["maybe"], "MODE": ["rp9"], "RP_K": ["0", "x", "16", "1024"], "RETURN": ["all"], "PER_DIM": ["x"],
}  # fmt: skip


def test_act_environment():
    assert act() is None and act(CAPTURE="0", MODE="nonsense") is None
    every = {"hook": "resid_post", "layers": "all"}
    found = act(CAPTURE="1")
    assert found["filesystem"] == {"url": "/tmp/vllm_activations", "layout": "npz"} and found["required"]
    assert found["capture"] == [every | {"compress": {"method": "rp8", "k": 512, "seed": 12345}}]
    found = act(CAPTURE="on", MODE="topk8", TOPK_K="9", OUTDIR="/d", RETURN="gathered", PER_DIM="0")
    assert found["filesystem"]["url"] == "/d" and found["capture"][0]["compress"] == {"method": "topk8", "k": 9}
    assert act(CAPTURE="1", MODE="rp8", RP_K="64", RP_SEED="0")["capture"][0]["compress"]["seed"] == 0
    assert "compress" not in act(CAPTURE="1", MODE="none")["capture"][0]
    assert act(CAPTURE="1", RETURN="summary") == {"logging": {}, "capture": [every], "required": False}
    for name, wrong in pairs(WRONG_ACT):
        with pytest.raises(WeirError, match=f"VLLM_ACT_{name}"):
            act(**{"CAPTURE": "1", name: wrong})
    narrow = board(**settings_of({}, {"VLLM_ACT_CAPTURE": "1", "VLLM_ACT_MODE": "topk8"}).sinks)
    (capture,) = narrow.everyone
    assert capture.compress.k == ENGINE.d_model, "Vllm_mi_patch keeps what there is"
    narrow.close()
    sinks = settings_of({"weir": {"sinks": {"own": {"logging": {}}}}}, {"VLLM_ACT_CAPTURE": "1"}).sinks
    assert set(sinks) == {"own", "VLLM_ACT"}
    check_sinks(sinks)


def board(**sinks):
    """A manager whose sinks are open."""
    manager = SinkManager(parse_sinks(sinks), 1 << 20, 60.0, 1.0)
    manager.open(ENGINE)
    return manager


# The queue


def test_queue_drops_and_spills_without_room():
    for policy in ("drop", "spill"):
        queue = BoundedQueue(10, policy)
        assert [queue.put(Box(n), 0) for n in (50, 1, 1)] == ["in", policy, policy], "one may always wait"
        assert len(queue) == (1 if policy == "drop" else 3) and queue.bytes == 50
        queue.take()
        assert queue.bytes == 0 and not queue.idle
        queue.done()
        assert queue.idle == (policy == "drop")


def test_queue_blocks_until_there_is_room():
    queue = BoundedQueue(10, "block")
    queue.put(Box(9), 0)
    threading.Timer(0.03, queue.take).start()
    start = time.monotonic()
    assert queue.put(Box(9), 90) == "in" and 0.02 < time.monotonic() - start < 60
    assert queue.put(Box(9), 0.01) == "in", "whoever may not wait is let in: rows are not lost by that"


def test_what_could_not_be_spilled_counts_while_it_waits():
    queue, boxes = BoundedQueue(10, "spill"), [Box(n) for n in (5, 7, 3)]
    assert [queue.put(box, 0) for box in boxes] == ["in", "spill", "in"] and queue.bytes == 8
    queue.count(boxes[1])
    assert queue.bytes == 15 and queue.put(Box(1), 0) == "spill"
    assert [queue.take() for _ in boxes] == boxes and queue.bytes == 0
    queue.count(boxes[1])
    assert queue.bytes == 0, "it waits no more"


def test_what_comes_meanwhile_does_not_hold_a_flush_up():
    slow, busy, over = runner(wait=0.002), threading.Event(), threading.Event()

    def traffic():
        for count in itertools.count():
            slow.offer(Box(size=0), 0)
            if count == 20:
                busy.set()
            if over.wait(0.0005):
                return

    sender = threading.Thread(target=traffic)
    sender.start()
    try:
        assert busy.wait(60)
        slow.flush(60)  # a hundred times what is there takes
    finally:
        over.set()
        sender.join()
    slow.close()


def test_queue_ends():
    queue = BoundedQueue(10, "block")
    box = Box()
    queue.put(box, 0)
    queue.stop()
    assert queue.put(Box(), 0) == "drop"
    assert queue.take() is box and queue.take() is None
    assert not queue.wait_done(0.01)
    queue.done()
    assert queue.wait_done(0.01)


# Marks


def test_marks_in_time_too_late_and_early():
    now = [0.0]
    marks = MarkBuffer(10, 5.0, lambda: now[0])
    a, b = Box(4), Box(4)
    marks.join("a-1", "a")
    marks.join("b-1", "b")
    assert marks.add("a-1", [a]) is None and marks.bytes == 4
    now[0] = 3.0
    assert marks.add("b-1", [b]) is None and marks.due == 5.0
    assert marks.has("a") and marks.has("a-1") and not marks.has("c")
    assert marks.mark("a", {}) == [a] and marks.bytes == 4
    with pytest.raises(WeirError, match="marked already"):
        marks.mark("a", {})
    now[0] = 8.5
    with pytest.raises(WeirError, match="marked_seconds is 5"):
        marks.mark("b-1", {})
    assert b.events and marks.bytes == 0 and marks.due is None and marks.had("b")
    with pytest.raises(WeirError, match="known here"):
        marks.mark("c", {})
    marks.join("d-1", "d")
    assert marks.mark("d", {"x": 1}) == [] and marks.mark("d", {"y": 2}) == []
    assert marks.add("d-1", [Box()]) == {"x": 1, "y": 2} and marks.bytes == 0


def test_one_answer_s_requests_are_found_by_its_id():
    """Live, held and gone; of several prompts in their order; and nobody else's."""
    marks = MarkBuffer(100, 100.0)
    for k in (10, 2, 0):
        marks.join(f"cmpl-a-{k}-77", f"cmpl-a-{k}")
    for other in ("cmpl-a-0-1", "cmpl-ab-0", "cmpl-a-x", "chat-a", "cmpl-b", "cmpl-b-0"):
        marks.join(f"{other}-88", other)
    marks.add("cmpl-a-2-77", [Box()])
    marks.add("cmpl-a-0-77", [Box()])
    marks.mark("cmpl-a-0", {})
    assert marks.answered_as("cmpl-a") == ["cmpl-a-0", "cmpl-a-2", "cmpl-a-10"]
    for one in ("cmpl-a-2", "chat-a", "cmpl-b"):
        assert marks.answered_as(one) == [one]
    for nobody in ("cmpl", "a", "", "cmpl-.", "cmpl-a-"):
        assert marks.answered_as(nobody) == []


def test_marks_are_bounded():
    marks, boxes, large = MarkBuffer(10, 100.0), [Box(4) for _ in range(4)], Box(11)
    for k, box in enumerate(boxes):
        marks.add(f"r{k}", [box])
    assert [bool(b.events) for b in boxes] == [True, True, False, False] and marks.bytes == 8
    with pytest.raises(WeirError, match="marked_bytes is 10"):
        marks.mark("r0", {})
    marks.add("r9", [large])
    assert large.events and len(marks) == 0


def test_aborted_requests_are_not_kept():
    marks = MarkBuffer(10, 100.0)
    marks.join("a-1", "a")
    marks.mark("a", {"x": 1})
    marks.leave("a-1")
    marks.leave("unknown")
    with pytest.raises(WeirError, match="aborted"):
        marks.mark("a", {})


def test_garbage_that_is_collected_while_marks_are_looked_at_holds_nothing_up():
    """A request that is dropped in a cycle goes whenever Python finds it, also in a thread that holds the buffer."""
    marks, found = MarkBuffer(100, 100.0), []

    class Tracker:
        def __init__(self, name):
            self.me = self
            marks.join(name, name)
            weakref.finalize(self, marks.leave, name).atexit = False

    class Collecting(Box):
        size = property(lambda self: min(1, 1 + gc.collect(0)), lambda self, _: None)

    def look():
        Tracker("dropped")
        marks.join("kept", "kept")
        marks.add("kept", [Collecting()])
        Tracker("dropped too")
        found.append(len(marks.mark("kept", {})))

    gc.disable()
    try:
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(60)
    finally:
        gc.enable()
    assert found == [1], "it waits for itself"
    assert not marks.has("dropped") and not marks.has("dropped too") and marks.had("dropped too")
    with pytest.raises(WeirError, match="was aborted"):
        marks.mark("dropped", {})


def test_all_sequences_of_a_request_are_marked():
    marks = MarkBuffer(100, 100.0)
    boxes = [Box(), Box()]
    for k, box in enumerate(boxes):
        marks.join(f"{k}_a", "a")
        marks.add(f"{k}_a", [box])
    marks.join("2_a", "a")
    assert marks.mark("a", {"x": 1}) == boxes and marks.add("2_a", [Box()]) == {"x": 1}


# Runners


class Recorder(Consumer):
    """Notes what it is called with; `trouble` names the method that fails."""

    required = True
    made: ClassVar[list] = []

    error: ClassVar[BaseException] = OSError(28, "No space left on device")

    def __init__(self, trouble="", wait=0.0, note=""):
        self.calls, self.trouble, self.wait, self.may_take = [], trouble, wait, threading.Event()
        self.may_take.set()
        Recorder.made.append(self)

    def _note(self, name, *rest):
        self.calls.append((name, *rest))
        if name == self.trouble:
            raise self.error

    def open(self, engine):
        self._note("open")

    def take(self, rows):
        time.sleep(self.wait)
        self.may_take.wait(60)
        self._note("take", rows.site)

    def finish(self, request):
        self._note("finish", request.name)
        return [f"/x/{request.name}"]

    def abort(self, request):
        self._note("abort", request.name)

    def flush(self):
        self._note("flush")

    def close(self):
        self._note("close")


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    monkeypatch.setitem(consumers._SHIPPED, "recorder", f"{__name__}:Recorder")
    monkeypatch.setitem(consumers._SHIPPED, "broken", f"{__name__}:Missing")
    monkeypatch.setitem(consumers._SHIPPED, "strange", "builtins:dict")
    Recorder.made.clear()


def runner(**options):
    policy = options.pop("policy", "block")
    definition = SinkDefinition.parse({"recorder": options, "policy": policy, "queue_bytes": 1}, "s")
    return SinkRunner("s", definition, ENGINE, "s")


def test_a_runner_feeds_its_consumer():
    one = runner()
    boxes = [Box(name=f"r{k}") for k in range(3)]
    for box in boxes:
        one.offer(box, 5)
    assert [box.ticket.wait(60) for box in boxes] == [(f"/x/r{k}",) for k in range(3)]
    one.flush(60)
    one.close()
    assert calls_of(Recorder.made[0]) == ["open", *["take", "finish"] * 3, "flush", "close"]
    assert all(box.events == ["rows", "over"] for box in boxes)
    late = Box()
    one.offer(late, 0)
    assert late.ticket.state == "dropped" and late.events == ["over"]


@pytest.mark.parametrize("error", [Recorder.error, SystemExit(3)], ids=["OSError", "SystemExit"])
@pytest.mark.parametrize("trouble", ["take", "finish"])
def test_a_consumer_that_fails(trouble, error, monkeypatch):
    """`SystemExit` ended the sink's thread without a word, and everything that was sent to it waited."""
    monkeypatch.setattr(Recorder, "error", error)
    one, box, again = runner(trouble=trouble), Box(), Box()
    one.offer(box, 0)
    with pytest.raises(WeirError, match=f"{type(error).__name__}: .*{error.args[-1]}"):
        box.ticket.settle(60)
    assert box.ticket.state.startswith(f"failed: {type(error).__name__}") and box.events == ["rows", "over"]
    assert Recorder.made[0].calls[-1] == ("abort", "r")
    report = one.report()
    assert report["failed"] == 1 and str(error.args[-1]) in report["last_error"] and report["sequences"] == 0
    Recorder.made[0].trouble = ""
    one.offer(again, 0)
    assert again.ticket.wait(60) == ("/x/r",), "the next request is none the worse"
    one.close()


def test_a_sink_that_is_not_required_fails_nobody():
    optional = Ticket("s", False)
    optional.close("failed: x")
    optional.settle(0)


@pytest.mark.parametrize("trouble", ["abort", "flush", "close", "tick"])
@pytest.mark.parametrize("error", [Recorder.error, SystemExit(3)], ids=["OSError", "SystemExit"])
def test_a_consumer_that_cannot_even_end(trouble, error, monkeypatch):
    monkeypatch.setattr(Recorder, "error", error)
    monkeypatch.setattr(Recorder, "tick", lambda self: self._note("tick"))
    monkeypatch.setattr("vllm_weir.frontend.sinks.runner.TICK", 0.01)
    if trouble == "flush":  # which is called in the asker's thread
        monkeypatch.setattr(Recorder, "error", OSError())
    if trouble == "abort":
        monkeypatch.setattr(Recorder, "take", full)
    one, box = runner(trouble=trouble), Box()
    one.offer(box, 0)
    if trouble == "tick":
        eventually(lambda: bool(one.failed), True, 10)
    with pytest.raises(WeirError, match="No space left") if trouble == "abort" else nullcontext():
        box.ticket.settle(60)
    with pytest.raises(WeirError, match="could not be flushed") if trouble == "flush" else nullcontext():
        one.flush(60)
    assert not one.ended
    one.close()
    assert one.ended


def test_every_sink_is_flushed_whatever_becomes_of_the_others():
    manager = board(**{name: {"recorder": {"trouble": "flush" if name in "bd" else ""}} for name in "abcde"})
    with pytest.raises(WeirError) as e:
        manager.flush(60)
    assert [calls_of(made).count("flush") for made in Recorder.made] == [1] * 5
    assert "'b' could not" in str(e.value) and "'d' could not" in str(e.value) and "'a'" not in str(e.value)
    manager.close()


def test_a_controller_is_always_found_while_it_is_removed():
    """A sequence that was to go there may finish at any time."""
    manager, found = board(), []
    manager.add_controller("controller:a", SinkDefinition.parse({"recorder": {}}, "s"), AsyncController(), "s")

    class Watched(dict):
        def pop(self, *args):
            popped = super().pop(*args)
            found.append(manager._runner(Sink("controller:a")))
            return popped

        def __delitem__(self, key):
            super().__delitem__(key)
            found.append(manager._runner(Sink("controller:a")))

    (runner,) = manager._runners.values()
    manager._runners = Watched(manager._runners)
    manager.remove_controller("controller:a")
    assert found == [runner] and runner.ended and not manager.report()


@pytest.mark.parametrize("name", ["x" * 4001, "\ud800"])
def test_an_id_under_which_nothing_can_be_kept_is_refused_before_anything_is_generated(name):
    to, manager = SimpleNamespace(sink=sink_of("a")), board()
    with refused("request_id"):
        manager.prepare([to], name)
    assert not Recorder.made
    manager.prepare([SimpleNamespace(sink=Sink.parse("memory", "s"))], name)
    manager.prepare([to], "x" * 4000)
    manager.close()


def test_a_slow_consumer_drops_or_holds():
    slow, boxes = runner(policy="drop"), [Box(name=str(k)) for k in range(12)]
    Recorder.made[-1].may_take.clear()
    for box in boxes:
        slow.offer(box, 0)
    Recorder.made[-1].may_take.set()
    slow.flush(60)
    states = [box.ticket.state for box in boxes]
    assert states.count("dropped") >= 10, "one may wait while another is taken"
    assert states.count("written") == 12 - states.count("dropped")
    assert slow.report()["dropped"] == states.count("dropped")
    slow.close()
    held = runner(policy="block")
    Recorder.made[-1].may_take.clear()
    threading.Timer(0.05, Recorder.made[-1].may_take.set).start()
    start = time.monotonic()
    for _ in range(8):
        held.offer(Box(), 60)
    assert time.monotonic() - start > 0.04
    held.close()


WRONG_SINKS = {
    "": [{"nobody": {}}, {"broken": {}}, {"strange": {}}],
    ".recorder": [{"recorder": options} for options in ({"nonsense": 1}, {"trouble": "open"})],
    ".logging.seconds": [{"logging": {"seconds": -1}}],
    ".logging": [{"logging": {"colour": 1}}],
    ".capture[0].hook": [{"recorder": {}, "capture": [{"hook": "nonsense"}]}],
    ".capture[0]": [{"recorder": {}, "capture": [{"sink": "y"}]}],
}


@pytest.mark.parametrize(("field", "definition"), pairs(WRONG_SINKS))
def test_sinks_that_cannot_be_set_up(field, definition):
    with refused(f"settings.sinks.x{field}"):
        board(x=definition)


class Declaring(Recorder):
    """Says which captures it wants when it is made, as a property, or too late; see `late`."""

    def __init__(self, layer=2, how="init"):
        super().__init__()
        self.layer, self.how = layer, how
        self.wanted = [Capture("resid_post", layer)] if how == "init" else ()

    @property
    def captures(self):
        return self.wanted if self.how != "property" else {"hook": "resid_post", "layers": [self.layer]}

    def open(self, engine):
        if self.how == "open":
            self.wanted = [Capture("resid_post", self.layer)]


@pytest.mark.parametrize("how", ["init", "property"])
def test_captures_that_a_consumer_declares_when_it_is_made_are_served(monkeypatch, how):
    monkeypatch.setitem(consumers._SHIPPED, "declaring", f"{__name__}:Declaring")
    sinks = {"x": {"declaring": {"layer": 3, "how": how}}, "y": {"declaring": {}, "capture": []}}
    check_sinks(parse_sinks(sinks))
    manager = SinkManager(parse_sinks(sinks), 1 << 20, 60.0, 1.0)
    for _ in range(2):  # known before the workers have reported, too, or plain requests would pass
        assert [(c.sink.name, c.layers) for c in manager.everyone] == [("x", (3,))]
        manager.open(ENGINE)
    manager.close()


def test_captures_that_come_too_late_are_refused_at_the_start(monkeypatch):
    monkeypatch.setitem(consumers._SHIPPED, "declaring", f"{__name__}:Declaring")
    with refused("settings.sinks.x.declaring", "set them in __init__"):
        board(x={"declaring": {"how": "open"}})


def test_clients_of_a_server_do_not_see_where_a_sink_lies():
    for served in (False, True):
        ticket = Ticket("s", False, served=served)
        ticket.close("written", ("/srv/acts/r1.safetensors", "s3://bucket/acts/"))
        assert ("/srv/acts/r1.safetensors" in ticket.files) is not served
        if served:
            assert ticket.files == ("r1.safetensors", "acts")
        ticket.revise("failed: OSError: [Errno 28] No space left on device: '/srv/acts/r2'")
        assert ticket.state.startswith("failed: ") and ("/srv" in ticket.state) is not served


def test_a_board_closes_its_sinks():
    manager = board(x={"recorder": {}})
    assert manager.report()["x"]["consumer"] == "recorder" and not manager.everyone
    manager.flush(60)
    del manager
    assert calls_of(Recorder.made[0]) == ["open", "flush", "close"]


@pytest.mark.parametrize("ids", ["unique", "caller"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_kept_always_and_rows_that_are_marked_go_to_one_sink(tmp_path, layout, ids):
    """The second of them found its name taken, and was lost."""
    manager = board(x={"filesystem": {"url": str(tmp_path), "layout": layout, "ids": ids}})
    views = [Looked(acts_of()), Looked(acts_of())]
    for view, keep in zip(views, ("always", "marked"), strict=True):
        view.part = SimpleNamespace(sink=Sink("x"), keep=keep, notes=())
    manager.marks.join("r-1", "r")
    tickets = manager.deliver("r-1", views, Finished("r", 1, "r-1", 1, 3, "stop"), lambda: None, False)
    manager.mark("r", {"reason": "odd"})
    for ticket in tickets:
        ticket.wait(60)
    manager.close()
    found, name = load(tmp_path), "r-1" if ids == "unique" else "r.1"
    assert sorted(found) == [name, f"{name}.marked"]
    assert found.metadata(f"{name}.marked")["mark"] == {"reason": "odd"} and "mark" not in found.metadata(name)
    for view, stored in zip(views, (found[name], found[f"{name}.marked"]), strict=True):
        assert stored["resid_post", 1].equal(view.acts["resid_post", 1])


def test_a_sink_that_is_slow_to_end_holds_nobody_up(monkeypatch):
    """Until it is asked for again: two consumers at once would write the same files."""
    may_end, asked = threading.Event(), [SimpleNamespace(sink=sink_of(x)) for x in "abc"]
    monkeypatch.setattr("vllm_weir.frontend.sinks.manager.MAX_OWN_SINKS", 1)
    monkeypatch.setattr(Recorder, "close", lambda self: (may_end.wait(90), self._note("close")))
    one = board()
    one.prepare(asked[:1])
    began = time.monotonic()
    for part in asked[1:]:
        one.prepare([part])
        assert len(one.report()) == 1
    assert time.monotonic() - began < 60 and not any("close" in calls_of(made) for made in Recorder.made)
    threading.Timer(0.05, may_end.set).start()
    one.prepare(asked[:1])
    assert calls_of(Recorder.made[0]) == ["open", "close"] and calls_of(Recorder.made[3]) == ["open"]
    one.close()
    assert [calls_of(made) for made in Recorder.made] == [["open", "close"]] * 4


def sink_of(note):
    return Sink.parse({"recorder": {"note": note}}, "s")


def calls_of(recorder):
    return [call[0] for call in recorder.calls]


# Jobs


class Looked:
    """Stands in for a view."""

    size = 100

    def __init__(self, acts):
        self.acts = acts

    def activations(self):
        if isinstance(self.acts, Exception):
            raise self.acts
        return self.acts

    def missing(self, acts):
        return {Site("resid_post", 1): 2}


def acts_of(packed=False):
    sites = [Site("resid_post", 1), Site("resid_pre", 2)]
    at = {site: torch.arange(3) for site in sites}
    rows = {site: torch.randn(3, 4).to(torch.bfloat16) for site in sites}
    if not packed:
        return Activations(rows, at, at)
    how = Compression("full8")
    records = {site: codec.encode(r, how) for site, r in rows.items()}
    dtypes = dict.fromkeys(sites, "float32")
    return Activations({}, at, at, (), CompressedRows(how.header(4, "bfloat16"), records, dtypes))


def delivery(acts, name="r", released=None):
    release = (lambda: None) if released is None else lambda: released.append(name)
    return Delivery(Looked(acts), Finished(name, 0, name, 3, 2, "length"), Ticket("s", True), release)


def shaped():
    """Rows of every shape."""
    rows = {Site(*site): r for site, r in shaped_rows(3).items()}
    at = dict.fromkeys(rows, torch.arange(3))
    return Activations(rows, at, at)


@pytest.mark.parametrize("make", [acts_of, lambda: acts_of(packed=True), shaped], ids=["plain", "packed", "shaped"])
def test_spilled_rows_are_the_same(tmp_path, make):
    acts, released = make(), []
    jobs = [delivery(acts, released=released) for _ in range(2)]
    jobs[1].spill(tmp_path)
    jobs[1].spill(tmp_path)
    assert len(released) == 1 and len(list(tmp_path.iterdir())) == 1
    taken = [list(job.rows()) for job in jobs]
    assert [a.site for a in taken[0]] == list(acts.sites)
    for a, b in zip(*taken, strict=True):
        assert a.site == b.site and a.compression == b.compression
        assert a.positions.equal(b.positions) and a.token_ids.equal(b.token_ids)
        assert a.data.equal(b.data) and a.data.dtype == b.data.dtype and a.decoded().equal(b.decoded())
        assert a.decoded().shape == acts[a.site].shape
        assert a.compression is not None or a.data.equal(acts[a.site])
    assert jobs[0].ticket.missing == jobs[1].ticket.missing == {Site("resid_post", 1): 2}
    for job in jobs:
        job.discard()
        job.discard()
    assert len(released) == 2 and not list(tmp_path.iterdir()) and not list(jobs[0].rows())


@pytest.mark.parametrize("hook", ["pattern", "attn_scores"])
def test_patterns_go_to_no_sink(hook):
    """Not by a request, nor by the settings; they come back on the output."""
    with refused("capture.sink", f"rows of {hook} have a value for each key"):
        Capture(hook, 1, sink="archive")
    assert Capture(hook, 1).sink.memory and not Capture("expert_ids", 1, sink="archive").sink.memory
    with pytest.raises(WeirError, match="no sink takes them"):
        check_sinks({"s": SinkDefinition.parse({"logging": {}, "capture": [{"hook": hook}]}, "s")})


def test_rows_that_cannot_be_spilled_stay(tmp_path):
    job = delivery(WeirError("lost"))
    for take in (lambda: job.spill(tmp_path), lambda: list(job.rows())):
        with pytest.raises(WeirError, match="lost"):
            take()
        assert not list(tmp_path.iterdir())


def test_a_temporary_file_that_cannot_be_removed_ends_no_sink(tmp_path, monkeypatch, caplog):
    job = delivery(acts_of(), "r7")
    job.spill(tmp_path)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "I/O error")))
    job.discard()
    job.discard()
    assert caplog.text.count("r7") == 1 and "I/O error" in caplog.text


FULL = [  # safetensors has an error of its own for a full disk, torch and numpy have theirs for no memory
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", [None, *FULL])
def test_a_runner_spills_though_the_machine_is_full_for_a_while(monkeypatch, caplog, error):
    calls, counted, released = [], [], []

    def save(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1 and error is not None:
            raise error
        return save_file(*args, **kwargs)

    monkeypatch.setattr("vllm_weir.frontend.sinks.delivery.save_file", save)
    slow = runner(policy="spill")
    Recorder.made[-1].may_take.clear()
    monkeypatch.setattr(slow._queue, "count", lambda job, count=slow._queue.count: counted.append(job) or count(job))
    jobs = [delivery(acts_of(), f"r{k}", released) for k in range(8)]
    for job in jobs:
        slow.offer(job, 0)
    eventually(lambda: len(calls) > 1, True, 60)
    Recorder.made[-1].may_take.set()
    slow.flush(60)
    assert [(job.ticket.state, job.ticket.files) for job in jobs] == [("written", (f"/x/r{k}",)) for k in range(8)]
    assert sorted(released) == [f"r{k}" for k in range(8)]
    assert caplog.text.count("could not spill") == (error is not None) == len(counted)
    if error is not None:
        assert f"{type(error).__name__}: {error}" in caplog.text and counted[0] in jobs
    slow.close()


def test_sinks_of_one_name_are_told_apart():
    x, y = (Sink.parse({"filesystem": {"url": f"/{name}"}}, "sink") for name in "xy")
    named, at = Sink("filesystem"), 'filesystem {"url": "/%s"}'
    for asked, labels in (
        ([(x, "always"), (Sink("kept"), "marked")], ["filesystem", "kept"]),
        ([(x, "always"), (y, "always"), (named, "always")], [at % "x", at % "y", "filesystem"]),
        ([(x, "always"), (x, "marked"), (named, "always")], [at % "x", at % "x" + " (marked)", "filesystem"]),
        ([(named, "always"), (named, "marked")], ["filesystem", "filesystem (marked)"]),
    ):
        assert labels_of(asked) == labels


@pytest.mark.parametrize("configured", [False, True])
def test_norms_are_heard_where_vllm_is(monkeypatch, caplog, configured):
    own, theirs = logging.getLogger("vllm_weir.norms"), logging.getLogger("vllm")
    for logger, handlers in ((own, []), (own.parent, []), (theirs, [caplog.handler])):
        monkeypatch.setattr(logger, "handlers", handlers)
    monkeypatch.setattr(theirs, "level", logging.INFO)
    monkeypatch.setattr(own, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if configured else [])
    norms = consumers.find("logging", "sink")(seconds=0)
    request = Finished("r", 0, "r", 1, 1, "length")
    norms.take(Rows(request, Site("resid_post", 1), torch.arange(2), torch.arange(2), torch.full((2, 4), 2.0)))
    norms.finish(request)
    assert caplog.messages == ([] if configured else ["resid_post[1]: 2 rows, norm mean 4, std 0, highest 4"])


# Rows that are taken and not published yet


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def full_disk(monkeypatch, *calls):
    with monkeypatch.context() as patch:
        for call in calls or ("pwrite", "posix_fallocate"):
            patch.setattr(os, call, full)
        yield


def files_into(path, layout, **options):
    definition = SinkDefinition.parse({"filesystem": {"url": str(path), "layout": layout, **options}}, "s")
    return SinkRunner("s", definition, ENGINE, "s")


def served(one, name, kind=Box):
    box = kind(name=name)
    one.offer(box, 5)
    assert box.ticket._closed.wait(60)
    return box.ticket


class WideBox(Box):
    """Rows of several sites."""

    n = 2

    def rows(self):
        at = torch.arange(self.n)
        for layer in range(3):
            yield Rows(self.request, Site("resid_post", layer), at, at, torch.ones(self.n, 256))


class BigBox(WideBox):
    """Of each site few enough to be gathered first, and together more than was set aside before."""

    n = 900


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*((layout, Box) for layout in LAYOUTS), *((layout, BigBox) for layout in ("sharded", "packed"))],
)
def test_a_disk_that_gets_full_fails_who_does_not_fit(tmp_path, monkeypatch, layout, kind):
    """With layouts that collect, the rows had not reached the disk when the request was told that they were written."""
    one = files_into(tmp_path, layout)
    first = served(one, "a", Box if kind is Box else WideBox)
    first.settle(60)
    if kind is Box:
        one.flush(60)  # with it goes the room that was set aside for more
    with full_disk(monkeypatch):
        failed = served(one, "b", kind)
        with pytest.raises(WeirError, match=r"failed: StoreError: cannot write .*No space left on device"):
            failed.settle(60)
    last = served(one, "c")
    one.flush(60)
    assert (first.state, last.state) == ("written", "written") and failed.state.startswith("failed: StoreError")
    assert sorted(load(tmp_path)) == ["a", "c"]
    one.close()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("how", ["tick", "flush", "close"])
@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_rows_that_cannot_be_published_later_are_told_their_requests(tmp_path, monkeypatch, caplog, layout, how):
    """Nobody but the log heard of it: the receipts went on saying "written"."""
    monkeypatch.setattr("vllm_weir.frontend.sinks.runner.TICK", 0.01)
    one = files_into(tmp_path, layout, flush_seconds=0.1 if how == "tick" else 1e6)
    with full_disk(monkeypatch, "replace"):
        tickets = [served(one, name) for name in "ab"]
        for ticket in tickets:
            ticket.settle(60)
        if how == "tick":
            eventually(lambda: all(t.state.startswith("failed") for t in tickets), True, 10)
            eventually(lambda: "No space left" in caplog.text, True, 10)  # logged after the tickets have failed
        elif how == "flush":
            with pytest.raises(WeirError, match=r"could not be flushed: StoreError: cannot write .*No space left"):
                one.flush(60)
        else:
            one.close()
        for ticket in tickets:
            assert ticket.state.startswith("failed: StoreError: cannot write") and "No space left" in ticket.state
            ticket.settle(0)  # a receipt that is read now says so; it does not raise what `generate` did not
            with pytest.raises(WeirError, match="No space left"):
                ticket.wait(0)
        assert "No space left" in one.report()["last_error"]
        assert how == "flush" or "No space left" in caplog.text
    if how == "close":
        assert sorted(path.name for path in tmp_path.iterdir()) == ["weir.json"]
        return
    one.flush(60)  # there is room again
    assert [ticket.state for ticket in tickets] == ["written", "written"]
    assert sorted(load(tmp_path)) == ["a", "b"] and not one._pending
    one.close()


@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_a_request_that_fails_is_not_the_others_failure(tmp_path, layout):
    """Nor does a second one of a name undo the first, which has been told that it is written."""
    one = files_into(tmp_path, layout)
    first, again, last = (served(one, name) for name in "aab")
    assert "holds request 'a' already" in again.state and (first.state, last.state) == ("written", "written")
    one.close()
    assert sorted(load(tmp_path)) == ["a", "b"] and not one._pending


def test_a_busy_sink_ticks_too(monkeypatch):
    monkeypatch.setattr("vllm_weir.frontend.sinks.runner.TICK", 0.005)
    monkeypatch.setattr(Recorder, "tick", lambda self: self._note("tick"))
    one = runner(wait=0.003)
    one._queue._limit = 1000
    boxes = [Box(name=f"r{k}") for k in range(12)]
    for box in boxes:
        one.offer(box, 5)
    boxes[-1].ticket.wait(60)
    assert calls_of(Recorder.made[0])[:-1].count("tick") >= 3
    one.close()


def test_an_explicit_flush_joins_the_manifest(tmp_path, monkeypatch):
    """Other programs read `manifest.parquet`; it came with the engine's end."""
    monkeypatch.setattr("vllm_weir.frontend.sinks.runner.TICK", 0.01)
    one = files_into(tmp_path, "sharded", flush_seconds=0.05)
    served(one, "a")
    eventually(lambda: bool(list(tmp_path.glob("shard-*"))), True, 10)
    assert not (tmp_path / "manifest.parquet").exists(), "which takes long where there is much already"
    one.flush(60)
    before = (tmp_path / "manifest.parquet").stat()
    assert sorted(load(tmp_path)) == ["a"]
    one.flush(60)
    assert (tmp_path / "manifest.parquet").stat().st_ino == before.st_ino, "there was nothing new"
    served(one, "b")
    one.flush(60)
    shards = {path.name for path in tmp_path.glob("shard-*")}
    assert len(shards) == 2
    assert set(parquet.read_table(tmp_path / "manifest.parquet")["file"].to_pylist()) == shards
    one.close()


# What is installed


def test_npz_by_name(tmp_path):
    make = lambda **options: SinkRunner("s", SinkDefinition.parse({"npz": options}, "s"), ENGINE, "s")
    one = make(url=str(tmp_path))
    assert one.required and served(one, "a").wait(0) == (str(tmp_path),)
    one.close()
    assert load(tmp_path).layout == "npz" and list(tmp_path.glob("req_a/*.npz"))
    for options, field in (({"url": str(tmp_path), "layout": "sharded"}, "s.npz.layout"), ({}, "s.npz.url")):
        with refused(field):
            make(**options)


def test_shipped_consumers_are_entry_points():
    """As others' are, so that whoever lists the group finds them."""
    declared = tomllib.loads((Path(__file__).resolve().parents[4] / "pyproject.toml").read_text())
    table = declared["project"]["entry-points"]["vllm_weir.consumers"]
    assert table == {name: value for name, value in consumers._SHIPPED.items() if value.startswith("vllm_weir.")}
    assert {"filesystem", "logging", "npz", "stream"} <= set(table)


def test_a_plugin_with_the_name_of_a_shipped_consumer_is_warned_of(monkeypatch, caplog):
    shipped = consumers._SHIPPED["filesystem"]
    given = {"filesystem": ("other:Files", shipped), "mine": ("other:Mine", "another:Mine")}
    found = [EntryPoint(name, where, consumers.GROUP) for name, places in given.items() for where in places]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    plugins.warn_unused.cache_clear()
    for _ in range(2):
        known = consumers.names()
    assert known["filesystem"] == shipped and known["mine"] == "other:Mine"
    assert [record.args[3] for record in caplog.records] == ["other:Files", "another:Mine"]
