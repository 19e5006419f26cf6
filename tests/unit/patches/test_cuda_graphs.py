"""Two sets of CUDA graphs: which steps are live, what is captured when, and that vLLM's own graphs come back."""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.config.settings import Settings
from vllm_weir.patches import cuda_graph_sets
from vllm_weir.patches.cuda_graph_sets import MAX_SETS, GraphSets, LiveGraph
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ENCODE, HELD, Instruction, ResolvedIntervention, Source
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec, SiteRequest
from vllm_weir.schema.taps import NO_GRAPH, SCORES, tap_of
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.runtime import WorkerRuntime
from vllm_weir.worker.tap.op import ALL, EVERYTHING, TapSwitch, TapTensors, numbered


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Live graphs are captured when they are first asked for, even if another would do."""
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_CAPTURE", {"FULL": 1, "PIECEWISE": 1})
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_NARROW", {"FULL": 1, "PIECEWISE": 1})


@pytest.fixture
def none_at_start(monkeypatch):
    """No live graph is captured at start-up."""
    monkeypatch.setattr(cuda_graph_sets, "_sizes_at_start", lambda descs: [])


class Mode(enum.Enum):
    NONE, PIECEWISE, FULL = 0, 1, 2


@dataclass(frozen=True)
class Desc:
    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None = None
    num_active_loras: int = 0


class FakeManager:
    """As vLLM's CudaGraphManager: sizes 1, 2, 4 for decode (FULL) and 8 for the rest (PIECEWISE)."""

    def __init__(self, runtime, pieces):
        self.graphs, self.runtime, self.pieces = {}, runtime, pieces
        self._capture_descs = {
            Mode.PIECEWISE: [Desc(Mode.PIECEWISE, 8)],
            Mode.FULL: [Desc(Mode.FULL, n) for n in (4, 2, 1)],
        }
        self.captured, self.fail, self.fail_live = [], None, None

    def capture(self, model, has_lora=False):
        assert model == "model"
        live = self.runtime.switch.live
        for mode, descs in self._capture_descs.items():
            for desc in descs:
                for piece in self.pieces if mode is Mode.PIECEWISE else ():
                    piece.concrete_cudagraph_entries[desc.num_tokens] = live
                if error := self.fail or (live and self.fail_live):
                    raise error
                if mode is Mode.FULL:
                    assert desc not in self.graphs
                    self.graphs[desc] = live
                self.captured.append((desc.num_tokens, live))

    def dispatch(self, num_reqs, num_tokens):
        for descs in reversed(self._capture_descs.values()):
            for desc in reversed(descs):
                if desc.num_tokens >= num_tokens:
                    return desc
        return Desc(Mode.NONE, num_tokens, num_reqs)

    def replay(self, desc):
        """Whether the graph's taps are live; every piece must agree."""
        if desc.cg_mode is Mode.FULL:
            return self.graphs[desc]
        (found,) = {piece.concrete_cudagraph_entries[desc.num_tokens] for piece in self.pieces}
        return found


class FakePiece:
    def __init__(self):
        self.concrete_cudagraph_entries = {}


class FakeStation:
    def __init__(self):
        self.switch = TapSwitch(tensors())
        self.silenced = 0
        self.boundary_taps, self.taps = ALL, tuple(range(70))
        self.all_live = True

    def silence(self):
        self.switch.turn(0)
        self.silenced += 1


def build(lazy=True, agreed=lambda done: done):
    runtime = FakeStation()
    pieces = [FakePiece() for _ in range(3)]
    manager = FakeManager(runtime, pieces)
    sets = GraphSets(manager, runtime, lazy, lambda: pieces, contextlib.nullcontext, agreed)
    manager.capture("model", has_lora=False)
    return sets, manager, runtime


def step(sets, manager, runtime, live, num_tokens):
    """One step; returns the descriptor and whether the graph that was replayed is a live one."""
    runtime.switch.turn(ALL if live else 0)
    desc = manager.dispatch(num_tokens, num_tokens)
    used = None if desc.cg_mode is Mode.NONE else manager.replay(desc)
    assert runtime.switch.live is live
    sets.restore()
    return desc, used


def test_start_up_captures_the_silent_set_and_a_few_live_graphs():
    sets, manager, runtime = build()
    assert manager.captured == [(8, False), (4, False), (2, False), (1, False), (8, True), (4, True)]
    assert sets.report()["live"] == 2 and not runtime.switch.live and not sets.report()["captured_late"]


def test_a_wider_graph_serves_until_a_capture_is_worth_it(monkeypatch):
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_NARROW", {"FULL": 3, "PIECEWISE": 9})
    sets, manager, runtime = build()
    del manager.captured[:]
    sizes = [step(sets, manager, runtime, True, n) for n in (1, 2, 1, 4, 1, 1)]
    assert [(desc.num_tokens, live) for desc, live in sizes] == [(4, True)] * 4 + [(1, True)] * 2
    assert manager.captured == [(1, True)]
    runtime.switch.turn(0b10)  # a graph with more taps than are needed
    assert manager.dispatch(4, 4).num_tokens == 4
    sets.restore()
    assert sets.report()["steps"] == {"wider": 4, "exact": 3} and manager.captured == [(1, True)]


def test_where_plain_requests_share_the_step_a_capture_has_to_save_much_more(monkeypatch):
    """They would wait for it, and have asked for nothing."""
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_NARROW", {"FULL": 2, "PIECEWISE": 2})
    monkeypatch.setattr(cuda_graph_sets, "TOKENS_TO_NARROW", 30)
    sets, manager, runtime = build()
    del manager.captured[:]
    runtime.all_live = False
    sizes = [step(sets, manager, runtime, True, 1)[0].num_tokens for _ in range(11)]
    assert sizes == [4] * 9 + [1, 1] and manager.captured == [(1, True)], "3 tokens a step"
    runtime.switch.turn(0b1)  # 69 taps more than needed: as 3.45 tokens
    wanted, wide = LiveGraph(0b1, Desc(Mode.FULL, 4)), LiveGraph(ALL, Desc(Mode.FULL, 4))
    for _ in range(8):
        assert not sets._is_due(wanted, sets._capture_share(wanted, wide))
    runtime.all_live = True
    assert sets._capture_share(wanted, wide) == 1 / 2
    assert sets._capture_share(wanted, None) == 1 / cuda_graph_sets.REQUESTS_TO_CAPTURE["FULL"]


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)], [512, 352, 240, 168, 112, 72, 48, 32, 16]),
        ([1], [1]),
        ([], []),
        ([3, 20, 10], [20, 10]),
    ],
)
def test_sizes_at_start_up(sizes, chosen):
    descs = [Desc(Mode.FULL, n) for n in sizes]
    assert [d.num_tokens for d in cuda_graph_sets._sizes_at_start(descs)] == chosen


def test_only_a_graph_of_the_same_kind_serves():
    sets, _, _ = build()
    assert sets._substitute(LiveGraph(0b1, Desc(Mode.FULL, 3))) == (ALL, Desc(Mode.FULL, 4))
    assert sets._substitute(LiveGraph(0b1, Desc(Mode.FULL, 3, num_active_loras=1))) is None
    assert (
        sets._substitute(LiveGraph(0b1, Desc(Mode.FULL, 5))) is None
        and sets._substitute(LiveGraph(0b1, Desc(Mode.NONE, 3))) is None
    )
    captured = {(0b110, Desc(Mode.FULL, 8, 4)), (ALL, Desc(Mode.FULL, 8, 6)), (ALL, Desc(Mode.FULL, 16, 16))}
    sets._captured = {LiveGraph(*graph) for graph in captured}
    assert sets._substitute(LiveGraph(0b10, Desc(Mode.FULL, 8, 4))) == (0b110, Desc(Mode.FULL, 8, 4))
    assert sets._substitute(LiveGraph(0b1, Desc(Mode.FULL, 8, 4))) == (ALL, Desc(Mode.FULL, 8, 6))
    assert sets._substitute(LiveGraph(0b10, Desc(Mode.FULL, 8, 7))) == (ALL, Desc(Mode.FULL, 16, 16))


def test_a_failure_at_start_up_leaves_the_silent_set(caplog):
    runtime, pieces = FakeStation(), [FakePiece()]
    manager = FakeManager(runtime, pieces)
    sets = GraphSets(manager, runtime, True, lambda: pieces, contextlib.nullcontext, lambda done: done)
    manager.fail_live = torch.OutOfMemoryError("no memory left")
    manager.capture("model", has_lora=False)
    assert sets.report()["live"] == 0 and sets.report()["failed"] == 2 and len(caplog.records) == 1
    assert step(sets, manager, runtime, False, 4)[1] is False
    assert step(sets, manager, runtime, True, 8)[0].cg_mode is Mode.NONE


def test_a_step_replays_the_set_it_needs_and_captures_a_bucket_once(none_at_start):
    sets, manager, runtime = build()
    del manager.captured[:]
    for live, n in [(False, 1), (True, 1), (False, 1), (True, 1), (True, 7), (False, 7), (True, 8), (True, 2)] * 3:
        desc, used = step(sets, manager, runtime, live, n)
        assert used is live and desc.num_tokens >= n
    assert manager.captured == [(1, True), (8, True), (2, True)]
    assert sets.report()["live"] == 3 and len(sets.report()["captured_late"]) == 3


def test_outside_a_live_step_all_is_as_vllm_left_it():
    sets, manager, runtime = build()
    own, entries = manager.graphs, [p.concrete_cudagraph_entries for p in manager.pieces]
    descs = manager._capture_descs
    for n in (1, 8):
        step(sets, manager, runtime, True, n)
        assert manager.graphs is own and not any(own.values())
        assert all(p.concrete_cudagraph_entries is e for p, e in zip(manager.pieces, entries, strict=True))
        assert manager._capture_descs is descs


def test_what_may_never_come_again_is_not_captured(none_at_start, monkeypatch):
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_CAPTURE", {"FULL": 2, "PIECEWISE": 3})
    sets, manager, runtime = build()
    del manager.captured[:]
    used = [step(sets, manager, runtime, True, n)[1] for n in (1, 8, 1, 8, 8, 8)]
    assert used == [None, None, True, None, True, True] and manager.captured == [(1, True), (8, True)]


def test_a_batch_too_large_for_a_graph_runs_without_one():
    sets, manager, runtime = build()
    assert step(sets, manager, runtime, True, 100) == (Desc(Mode.NONE, 100, 100), None)


def test_eager_captures_both_sets_at_start_up():
    sets, manager, runtime = build(lazy=False)
    assert manager.captured == [(n, live) for live in (False, True) for n in (8, 4, 2, 1)]
    assert not runtime.switch.live
    for n in (1, 2, 4, 8):
        assert step(sets, manager, runtime, True, n)[1] is True
    assert len(manager.captured) == 8


@pytest.mark.parametrize("num_tokens", [2, 3, 7])
def test_a_failed_capture_runs_the_step_without_a_graph(none_at_start, num_tokens, caplog):
    sets, manager, runtime = build()
    manager.fail = torch.OutOfMemoryError("no memory left")
    own = manager.graphs
    for _ in range(3):
        desc, used = step(sets, manager, runtime, True, num_tokens)
        assert desc == Desc(Mode.NONE, num_tokens, num_tokens) and used is None, "it must not be padded"
        assert manager.graphs is own
    assert len(caplog.records) == 1 and sets.report()["failed"] == 1
    manager.fail = None
    assert step(sets, manager, runtime, False, num_tokens)[1] is False
    assert step(sets, manager, runtime, True, 1)[1] is True


def test_a_capture_that_another_rank_failed_is_not_used(none_at_start):
    sets, manager, runtime = build(agreed=lambda done: False)
    assert step(sets, manager, runtime, True, 8)[0].cg_mode is Mode.NONE
    assert sets._swaps["PIECEWISE"][0].sets == {ALL: {}}


def test_capturing_again_starts_over(none_at_start):
    sets, manager, runtime = build()
    step(sets, manager, runtime, True, 1)
    manager.graphs.clear()
    manager.capture("model")
    assert sets.report()["live"] == 0
    assert step(sets, manager, runtime, True, 1)[1] is True


def test_an_engine_on_runner_v1_before_it_forbids_no_capture(monkeypatch):
    """V1 turns a flag of the process off once it has captured, and V2 never turns it on."""
    from vllm.compilation import monitor

    from vllm_weir.patches.cuda_graphs import patch_runner

    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)
    runner = SimpleNamespace(
        cudagraph_manager=SimpleNamespace(use_breakable_cg=True),
        capture_model=monitor.validate_cudagraph_capturing_enabled, execute_model=None, shutdown=None,
    )  # fmt: skip
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1), lora_config=None)
    with pytest.raises(RuntimeError, match="inappropriate"):
        runner.capture_model()
    runner.execute_model = runner.shutdown = lambda: None
    patch_runner(runner, SimpleNamespace(switch=SimpleNamespace(pin=lambda: None)), config, eager=False)
    runner.capture_model()
    assert not monitor.cudagraph_capturing_enabled


def test_closing_lets_go_of_everything():
    sets, manager, runtime = build()
    step(sets, manager, runtime, True, 1)
    sets.close()
    assert sets._capture_again is None and not sets._swaps
    assert step(sets, manager, runtime, True, 1)[1] is None and step(sets, manager, runtime, False, 1)[1] is False


def wire(*positions, moves=(), captured=("resid_post", [0]), moved=("resid_post", [0])):
    """As a worker reads it."""
    site_requests = [
        SiteRequest(Site(captured[0], k), Positions.parse(p), False) for p in positions for k in captured[1]
    ]
    made = tuple(ResolvedIntervention(moved[0], tuple(moved[1]), Positions.parse(p), False, ()) for p in moves)
    return EngineSpec.from_wire(EngineSpec(ResolvedSpec(tuple(site_requests)), made).wire)


@pytest.mark.parametrize(
    ("form", "prompt_only"),
    [
        (wire("all"), False),
        (wire("prompt"), True),
        (wire("last_prompt", [0, -1]), True),
        (wire([0, 10]), False),
        (wire("2:10"), True),
        (wire("2:11"), False),
        (wire(":-1:2"), True),
        (wire("2:"), False),
        (wire({"token_ids": [7]}), False),
        (wire("prompt", moves=["generated"]), False),
        (wire(moves=["prompt"]), True),
    ],
)
def test_a_request_is_live_as_long_as_something_of_it_can_be_selected(form, prompt_only):
    live = ActiveTaps()
    live.join("a", form, 10)
    assert taps_in(live, ("b", 0), ("a", 0)) == taps_in(live, ("a", 9)) == mask(("resid_post", 0))
    assert bool(taps_in(live, ("a", 10))) is not prompt_only
    assert bool(taps_in(live, ("b", 0), ("aa", 3))) is not prompt_only
    live.leave("a")
    assert not taps_in(live, ("a", 0))
    live.leave("a")


def taps_in(live, *starts):
    ids, positions = zip(*starts, strict=True)
    return live.taps_in(([], []), (ids[1:], positions[1:]), (ids[:1], positions[:1]))


def mask(*sites):
    return sum(1 << tap_of(Site(*s)) for s in sites)


def test_a_step_needs_the_taps_of_everyone_in_it():
    live = ActiveTaps()
    live.join("a", wire("all", captured=("resid_post", [2])), 5)
    live.join("b", wire(moves=["prompt"], moved=("resid_pre", [0, 4])), 5)
    always, prompt = mask(("resid_post", 2)), mask(("resid_pre", 0), ("resid_pre", 4))
    assert taps_in(live, ("a", 0), ("b", 0)) == always | prompt and taps_in(live, ("a", 0), ("b", 5)) == always
    live.leave("a")
    assert taps_in(live, ("b", 0)) == prompt and taps_in(live, ("b", 5)) == 0


def test_a_step_is_known_to_be_shared_with_requests_that_asked_for_nothing():
    runtime = SimpleNamespace(switch=TapSwitch(tensors()), _active_taps=ActiveTaps())
    runtime._active_taps.join("a", wire("all"), 5)
    runtime._active_taps.join("b", wire("prompt"), 5)
    new, going_on = (["a"], [0]), (["b"], [5])
    WorkerRuntime.begin_step(runtime, new, going_on)
    assert runtime.all_live and runtime.switch.mask == mask(("resid_post", 0))
    WorkerRuntime.begin_step(runtime, new, (["b", "plain"], [5, 9]))
    assert not runtime.all_live
    runtime._active_taps.leave("b")
    WorkerRuntime.begin_step(runtime, new, ([], []))
    assert runtime.all_live


@given(
    joins=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.integers(1, 9)), max_size=12),
    data=st.data(),
)
def test_taps_of_a_step_however_requests_came_and_went(joins, data):
    live, inside = ActiveTaps(), {}
    for who, layer, always, length in joins:
        name = f"r{who}"
        if data.draw(st.booleans()):
            live.leave(name)
            inside.pop(name, None)
        else:
            live.join(name, wire("all" if always else "prompt", captured=("resid_post", [layer])), length)
            inside[name] = (layer, always, length)
        starts = [(f"r{k}", data.draw(st.integers(0, 10))) for k in range(6)]
        needed = {layer for layer, always, _ in inside.values() if always}
        needed |= {inside[r][0] for r, start in starts if r in inside and not inside[r][1] and start < inside[r][2]}
        assert taps_in(live, *starts) == mask(*(("resid_post", layer) for layer in needed))
    assert live._longest_prompt == max((n for _, always, n in inside.values() if not always), default=0)


def test_sets_for_particular_taps(none_at_start):
    """Up to a number of sets; then the smallest that has the taps needed, or the one with all of them."""
    sets, manager, runtime = build()
    del manager.captured[:]

    def used(mask):
        runtime.switch.turn(mask)
        desc = manager.dispatch(1, 1)
        found = manager.replay(desc)
        assert manager.graphs is sets._swaps["FULL"][0].sets[sets._mask_for(mask)]
        sets.restore()
        return found

    masks = [1 << k for k in range(MAX_SETS - 1)] + [0b111]
    for mask in masks * 2:
        assert used(mask)
    assert len(manager.captured) == MAX_SETS
    assert sets._mask_for(0b11) == 0b111 and sets._mask_for(0b1) == 0b1 and sets._mask_for(1 << 60) == ALL
    assert sets._mask_for(1 << SCORES | 1) == EVERYTHING, "and no other graph launches what scores"
    assert sets._substitute(LiveGraph(EVERYTHING, Desc(Mode.FULL, 4))) is None
    assert used(0b101) and len(manager.captured) == MAX_SETS
    assert used(1 << 60) and used(1 << 61) and len(manager.captured) == MAX_SETS + 1
    assert sets.report()["sets"] == MAX_SETS + 1


def test_a_step_that_encodes_rows_has_no_graph():
    """Whatever is captured; the steps after it replay as before."""
    sets, manager, runtime = build()
    captured = list(manager.captured)
    runtime.switch.turn(1 << NO_GRAPH | 0b10)
    assert manager.dispatch(1, 1) == Desc(Mode.NONE, 1, 1)
    assert manager.dispatch(2, 7) == Desc(Mode.NONE, 7, 2)
    sets.restore()
    assert manager.captured == captured and sets.report()["steps"] == {"without": 2}
    assert step(sets, manager, runtime, False, 3) == (Desc(Mode.FULL, 4), False)
    assert step(sets, manager, runtime, True, 3) == (Desc(Mode.FULL, 4), True)


@pytest.mark.parametrize("source", [False, True])
def test_a_request_that_encodes_rows_says_so_while_it_acts(source):
    encode, held = Instruction(ENCODE, "", a=3.0, sae="key"), Instruction(HELD, "u")
    move = ResolvedIntervention("mlp_out", (1,), Positions.parse("prompt"), 0, (encode, held))
    if source:
        move = replace(move, instructions=(held,), source=Source("mlp_in", 1, encode))
    live = ActiveTaps()
    live.join("a", EngineSpec(ResolvedSpec(()), (move,)), 10)
    mask = live.taps_in((["a"], [0]))
    assert mask >> NO_GRAPH == 1 and mask >> tap_of(Site("mlp_out", 1)) & 1
    assert mask >> tap_of(Site("mlp_in", 1)) & 1 == source
    assert not live.taps_in((["a"], [10])), "past its prompt"


def test_a_request_that_wants_nothing_is_not_live():
    live = ActiveTaps()
    live.join("a", wire(), 10)
    assert not taps_in(live, ("a", 0))


def tensors(d=4):
    return TapTensors(
        plan=torch.zeros(2, 4, dtype=torch.int32),
        ranks=torch.zeros(1, 3, dtype=torch.int32),
        ring=torch.full((4, d), -1.0),
        heads=torch.full((1, 1), -1, dtype=torch.int32),
        ints=torch.zeros(1, 8, dtype=torch.int32),
        floats=torch.zeros(1, 4),
        vectors=torch.zeros(1, d),
    )


def acts(switch, number):
    switch.tensors.ring.fill_(-1)
    torch.ops.weir.tap(torch.ones(2, 4), number)
    return bool((switch.tensors.ring == 1).any())


def test_the_op_asks_the_switch_of_its_own_engine():
    switches, numbers = [TapSwitch(tensors()) for _ in range(2)], [numbered(0) for _ in range(2)]
    for switch, number in zip(switches, numbers):
        switch.enrol(number, 0)
    one, other = switches
    one.turn(ALL)
    assert acts(one, numbers[0]) and not acts(other, numbers[1])
    other.pin()
    other.turn(0)
    assert acts(other, numbers[1])
    one.turn(0)
    assert not acts(one, numbers[0])


def test_setting():
    assert Settings.load({}, {}).graphs == "lazy"
    assert Settings.load({}, {"WEIR_GRAPHS": "eager"}).graphs == "eager"


def test_only_the_taps_asked_for_act():
    switch, number = TapSwitch(tensors()), numbered(0)
    switch.enrol(number, 3)  # what its own entries say is where this engine's tables have it
    for mask in (0b1000, 0b0111, ALL, 0):
        switch.turn(mask)
        assert acts(switch, number) is bool(mask >> 3 & 1)
