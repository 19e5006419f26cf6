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
from vllm_weir.schema.instructions import (
    AFFINE,
    CONST,
    ENCODE,
    FEATURE,
    HELD,
    HOOK,
    Instruction,
    ResolvedIntervention,
    Source,
)
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.resolved_probes import ResolvedGate, ResolvedProbe
from vllm_weir.schema.taps import (
    CELLS,
    FUNCTIONS,
    GROUPS,
    NO_GRAPH,
    SCORES,
    Place,
    early_stages,
    function_bits,
    places_in,
    tap_of,
)
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
    uniform_token_count: int | None = None


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
        live = self.runtime.parts.switch.live
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


class Engine:
    """A runner's manager of graphs, the sets around it, and what stands for the worker's runtime."""

    def __init__(self, lazy=True, agreed=lambda done: done, fail_live=None):
        self.switch = TapSwitch(tensors())
        self.parts = SimpleNamespace(switch=self.switch)
        self.boundary_taps, self.taps, self.all_live = ALL, tuple(range(70)), True
        pieces = [SimpleNamespace(concrete_cudagraph_entries={}) for _ in range(3)]
        self.manager = FakeManager(self, pieces)
        self.manager.fail_live = fail_live
        self.sets = GraphSets(self.manager, self, lazy, lambda: pieces, contextlib.nullcontext, agreed)
        self.manager.capture("model", has_lora=False)
        self.at_start = list(self.manager.captured)
        del self.manager.captured[:]

    def silence(self):
        self.switch.set_active(0)

    def step(self, live, num_tokens):
        """One step; returns the descriptor and whether the graph that was replayed is a live one."""
        self.switch.set_active(ALL if live else 0)
        desc = self.manager.dispatch(num_tokens, num_tokens)
        used = None if desc.cg_mode is Mode.NONE else self.manager.replay(desc)
        assert self.switch.live is live
        self.sets.restore()
        return desc, used

    @property
    def captured(self):
        """What was captured after start-up."""
        return self.manager.captured

    def report(self, name):
        return self.sets.report()[name]


def decoding(n):
    """The graph of a batch in which `n` requests decode."""
    return Desc(Mode.FULL, n, n, uniform_token_count=1)


def with_graphs_for_decoding(engine):
    """As vLLM's FULL_AND_PIECEWISE: steps with prompts replay pieces, others whole graphs."""
    engine.manager._capture_descs = {
        Mode.PIECEWISE: [Desc(Mode.PIECEWISE, n) for n in (8, 4)],
        Mode.FULL: [decoding(n) for n in (4, 2, 1)],
    }
    return engine


def captured_of(engine, mask):
    """(mode, tokens) of the graphs of a set."""
    return sorted((d.cg_mode.name, d.num_tokens) for m, d in engine.sets._captured if m == mask)


PIECES, WHOLE = [("PIECEWISE", 4), ("PIECEWISE", 8)], [("FULL", 1), ("FULL", 2), ("FULL", 4)]


@pytest.mark.parametrize(
    ("in_prompts", "most", "wanted"),
    [
        (False, None, WHOLE + PIECES),
        (True, None, PIECES),
        (False, 1, WHOLE[:1] + PIECES),
        (False, 3, WHOLE + PIECES),  # three decode with the graph of four
        (False, 9, WHOLE + PIECES),
        (True, 1, PIECES),
    ],
)
def test_warming_captures_every_size_that_such_requests_need_once(none_at_start, in_prompts, most, wanted):
    engine = with_graphs_for_decoding(Engine())
    done = engine.sets.warm([(0b110, in_prompts)], most)
    assert done == {"graphs": len(wanted), "bytes": 0, "failed": 0, "without": 0}
    assert captured_of(engine, 0b110) == wanted and not engine.switch.live
    assert engine.sets.warm([(0b110, in_prompts)], most)["graphs"] == 0
    assert engine.report("warmed") == engine.report("live") == len(wanted)
    assert engine.report("captured_late") == []


def test_after_warming_no_step_of_such_requests_captures(none_at_start):
    engine = with_graphs_for_decoding(Engine())
    engine.sets.warm([(0b110, False)])
    at_first = list(engine.captured)
    for n in (1, 2, 3, 4, 8) * 3:
        engine.switch.set_active(0b110)
        desc = engine.manager.dispatch(n, n)
        assert engine.manager.replay(desc) is True
        engine.sets.restore()
    assert engine.captured == at_first and engine.report("steps") == {"exact": 15}
    assert all(live for _, live in at_first)


def test_warming_leaves_the_start_as_it_was(none_at_start):
    """vLLM's own graphs, its list of sizes, and the plan's switch."""
    engine = with_graphs_for_decoding(Engine())
    silent, descs = dict(engine.manager.graphs), engine.manager._capture_descs
    engine.sets.warm([(0b1, False), (0b10, True)])
    assert engine.manager.graphs == silent and engine.manager._capture_descs is descs and engine.switch.mask == 0


def test_warming_has_as_many_sets_as_steps_have(none_at_start):
    """Beyond those one that has the taps, or all taps, is captured; what is called in them has no graph there."""
    engine = with_graphs_for_decoding(Engine())
    done = engine.sets.warm([(1 << t, True) for t in range(MAX_SETS)])
    assert done["graphs"] == 2 * MAX_SETS
    assert engine.sets.warm([(0b1 << MAX_SETS, True)])["graphs"] == 2 and captured_of(engine, ALL) == PIECES
    called = 1 << Place(0, 3, False).bit
    assert engine.sets.warm([(1 << NO_GRAPH | 0b1, False)]) == {"graphs": 0, "bytes": 0, "failed": 0, "without": 1}
    assert engine.sets.warm([(called | 0b1000, True)])["graphs"] == 2
    for number in range(1, MAX_SETS):
        engine.sets.warm([(1 << Place(number, 3, False).bit | 0b1000, True)])
    assert engine.sets.warm([(1 << Place(99, 3, False).bit | 0b1000, True)])["without"] == 1


def test_warming_an_engine_with_all_graphs_captures_nothing():
    engine = Engine(lazy=False)
    called = 1 << Place(0, 3, False).bit
    done = engine.sets.warm([(0b1, False), (1 << SCORES | 1, False), (called, True)])
    assert done == {"graphs": 0, "bytes": 0, "failed": 0, "without": 1} and not engine.captured


@pytest.mark.parametrize("by_peer", [False, True])
def test_what_cannot_be_captured_ahead_may_be_later(none_at_start, by_peer, caplog):
    votes = []
    engine = with_graphs_for_decoding(Engine(agreed=lambda done: votes.pop() if votes else done))
    votes[:] = [False, False] if by_peer else []
    engine.manager.fail_live = None if by_peer else torch.OutOfMemoryError("no memory left")
    done = engine.sets.warm([(0b1, False)])
    assert done["failed"] == 5 and done["graphs"] == 0 and engine.report("failed") == 0
    engine.manager.fail_live = None
    engine.switch.set_active(0b1)
    assert engine.manager.replay(engine.manager.dispatch(2, 2)) is True
    engine.sets.restore()
    assert captured_of(engine, 0b1) == [("FULL", 2)]


SILENT, ALIVE = ([(n, live) for n in (8, 4, 2, 1)] for live in (False, True))


@pytest.mark.parametrize(("lazy", "live"), [(True, ALIVE[:2]), (False, ALIVE)])
def test_start_up_captures_the_silent_set_and_a_few_live_graphs_or_all(lazy, live):
    engine = Engine(lazy)
    assert engine.at_start == SILENT + live and not engine.switch.live
    assert engine.report("live") == len(live) and not engine.report("captured_late")
    for n in (1, 2, 4, 8) if not lazy else ():
        assert engine.step(True, n)[1] is True
    assert not engine.captured


def test_a_wider_graph_serves_until_a_capture_is_worth_it(monkeypatch):
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_NARROW", {"FULL": 3, "PIECEWISE": 9})
    engine = Engine()
    sizes = [engine.step(True, n) for n in (1, 2, 1, 4, 1, 1)]
    assert [(desc.num_tokens, live) for desc, live in sizes] == [(4, True)] * 4 + [(1, True)] * 2
    assert engine.captured == [(1, True)]
    engine.switch.set_active(0b10)  # a graph with more taps than are needed
    assert engine.manager.dispatch(4, 4).num_tokens == 4
    engine.sets.restore()
    assert engine.report("steps") == {"wider": 4, "exact": 3} and engine.captured == [(1, True)]


def test_where_plain_requests_share_the_step_a_capture_has_to_save_much_more(monkeypatch):
    """They would wait for it, and have asked for nothing."""
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_NARROW", {"FULL": 2, "PIECEWISE": 2})
    monkeypatch.setattr(cuda_graph_sets, "TOKENS_TO_NARROW", 30)
    engine = Engine()
    engine.all_live, sets = False, engine.sets
    sizes = [engine.step(True, 1)[0].num_tokens for _ in range(11)]
    assert sizes == [4] * 9 + [1, 1] and engine.captured == [(1, True)], "3 tokens a step"
    engine.switch.set_active(0b1)  # 69 taps more than needed, and all 70 with the largest kernel: as 6.95 tokens
    wanted, wide = LiveGraph(0b1, Desc(Mode.FULL, 4)), LiveGraph(ALL, Desc(Mode.FULL, 4))
    for _ in range(4):
        assert not sets._is_due(wanted, sets._capture_share(wanted, wide))
    engine.all_live = True
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


@pytest.mark.parametrize(
    ("wanted", "graph"),
    [
        ((0b1, Desc(Mode.FULL, 3)), (ALL, Desc(Mode.FULL, 4))),
        ((0b1, Desc(Mode.FULL, 3, num_active_loras=1)), None),
        ((0b1, Desc(Mode.FULL, 17)), None),
        ((0b1, Desc(Mode.NONE, 3)), None),
        ((EVERYTHING, Desc(Mode.FULL, 4)), None),  # no other graph launches what scores
        ((0b10, Desc(Mode.FULL, 8, 4)), (0b110, Desc(Mode.FULL, 8, 4))),
        ((0b1, Desc(Mode.FULL, 8, 4)), (ALL, Desc(Mode.FULL, 8, 6))),
        ((0b10, Desc(Mode.FULL, 8, 7)), (ALL, Desc(Mode.FULL, 16, 16))),
    ],
)
def test_only_a_graph_of_the_same_kind_serves(wanted, graph):
    sets = Engine().sets
    captured = (0b110, Desc(Mode.FULL, 8, 4)), (ALL, Desc(Mode.FULL, 8, 6)), (ALL, Desc(Mode.FULL, 16, 16))
    sets._captured = {LiveGraph(ALL, Desc(Mode.FULL, 4)), *(LiveGraph(*one) for one in captured)}
    assert sets._substitute(LiveGraph(*wanted)) == graph


def test_a_failure_at_start_up_leaves_the_silent_set(caplog):
    engine = Engine(fail_live=torch.OutOfMemoryError("no memory left"))
    assert engine.report("live") == 0 and engine.report("failed") == 2 and len(caplog.records) == 1
    assert engine.step(False, 4)[1] is False
    assert engine.step(True, 8)[0].cg_mode is Mode.NONE


def test_a_step_replays_the_set_it_needs_and_captures_a_bucket_once(none_at_start):
    engine = Engine()
    for live, n in [(False, 1), (True, 1), (False, 1), (True, 1), (True, 7), (False, 7), (True, 8), (True, 2)] * 3:
        desc, used = engine.step(live, n)
        assert used is live and desc.num_tokens >= n
    assert engine.captured == [(1, True), (8, True), (2, True)]
    assert engine.report("live") == 3 and len(engine.report("captured_late")) == 3
    assert engine.step(True, 100) == (Desc(Mode.NONE, 100, 100), None), "too large for any"


def test_outside_a_live_step_all_is_as_vllm_left_it():
    engine = Engine()
    manager = engine.manager
    own, descs, entries = manager.graphs, manager._capture_descs, [p.concrete_cudagraph_entries for p in manager.pieces]
    for n in (1, 8):
        engine.step(True, n)
        assert manager.graphs is own and not any(own.values())
        assert all(p.concrete_cudagraph_entries is e for p, e in zip(manager.pieces, entries, strict=True))
        assert manager._capture_descs is descs


def test_what_may_never_come_again_is_not_captured(none_at_start, monkeypatch):
    monkeypatch.setattr(cuda_graph_sets, "REQUESTS_TO_CAPTURE", {"FULL": 2, "PIECEWISE": 3})
    engine = Engine()
    used = [engine.step(True, n)[1] for n in (1, 8, 1, 8, 8, 8)]
    assert used == [None, None, True, None, True, True] and engine.captured == [(1, True), (8, True)]


@pytest.mark.parametrize("num_tokens", [2, 3, 7])
def test_a_failed_capture_runs_the_step_without_a_graph(none_at_start, num_tokens, caplog):
    engine = Engine()
    engine.manager.fail = torch.OutOfMemoryError("no memory left")
    own = engine.manager.graphs
    for _ in range(3):
        desc, used = engine.step(True, num_tokens)
        assert desc == Desc(Mode.NONE, num_tokens, num_tokens) and used is None, "it must not be padded"
        assert engine.manager.graphs is own
    assert len(caplog.records) == 1 and engine.report("failed") == 1
    engine.manager.fail = None
    assert engine.step(False, num_tokens)[1] is False
    assert engine.step(True, 1)[1] is True


def test_a_capture_that_another_rank_failed_is_not_used(none_at_start):
    engine = Engine(agreed=lambda done: False)
    assert engine.step(True, 8)[0].cg_mode is Mode.NONE
    assert engine.sets._swaps["PIECEWISE"][0].sets == {ALL: {}}


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
    patch_runner(
        runner,
        SimpleNamespace(parts=SimpleNamespace(switch=SimpleNamespace(activate_always=lambda: None))),
        config,
        eager=False,
    )
    runner.capture_model()
    assert not monitor.cudagraph_capturing_enabled


def test_capturing_again_starts_over_and_closing_lets_go_of_everything(none_at_start):
    engine = Engine()
    engine.step(True, 1)
    engine.manager.graphs.clear()
    engine.manager.capture("model")
    assert engine.report("live") == 0
    assert engine.step(True, 1)[1] is True
    engine.sets.close()
    assert engine.sets._capture_again is None and not engine.sets._swaps
    assert engine.step(True, 1)[1] is None and engine.step(False, 1)[1] is False


def wire(*positions, moves=(), captured=("resid_post", [0]), moved=("resid_post", [0]), reduce=None):
    """As a worker reads it."""
    site_requests = [
        SiteRequest(Site(captured[0], k), Positions.parse(p), False) for p in positions for k in captured[1]
    ]
    made = tuple(ResolvedIntervention(moved[0], tuple(moved[1]), Positions.parse(p), False, ()) for p in moves)
    return EngineSpec.from_wire(EngineSpec(ResolvedSpec(tuple(site_requests), Postprocess(reduce)), made).wire)


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
        (wire(), None),  # it wants nothing
    ],
)
def test_a_request_is_live_as_long_as_something_of_it_can_be_selected(form, prompt_only):
    live = ActiveTaps()
    live.join("a", form, 10)
    wanted = 0 if prompt_only is None else mask(("resid_post", 0))
    assert taps_in(live, ("b", 0), ("a", 0)) == taps_in(live, ("a", 9)) == wanted
    assert bool(taps_in(live, ("a", 10))) is bool(taps_in(live, ("b", 0), ("aa", 3))) is (prompt_only is False)
    live.leave("a")
    assert not taps_in(live, ("a", 0))
    live.leave("a")


def taps_in(live, *starts):
    ids, positions = zip(*starts, strict=True)
    return live.taps_in(([], []), (ids[1:], positions[1:]), (ids[:1], positions[:1]))


def mask(*sites):
    return sum(1 << tap_of(Site(*s)) for s in sites)


def test_taps_that_requests_need_alone_and_together():
    """Those of prompts alone are not on in steps that only decode."""
    taps = ActiveTaps()
    forms = {"all": 1, "prompt": 2, "40:41": 3}
    always, prompt, other = (wire(form, captured=("resid_post", [layer])) for form, layer in forms.items())
    a, p, o = (mask(("resid_post", layer)) for layer in (1, 2, 3))
    assert taps.needed_by([]) == []
    assert taps.needed_by([(always, 10)]) == [(a, False)] == taps.needed_by([(always, 10)] * 2)
    assert taps.needed_by([(prompt, 10)]) == [(p, True)]
    assert taps.needed_by([(other, 10), (prompt, 10)]) == [(o, False), (p, True), (o | p, True)]
    assert taps.needed_by([(other, 41), (prompt, 10)]) == [(o, True), (p, True), (o | p, True)]
    assert taps.needed_by([(always, 10), (prompt, 10), (other, 10)]) == [
        (a, False), (p, True), (o, False), (a | o, False), (a | p | o, True),
    ]  # fmt: skip
    assert len(taps) == 0 and taps.taps_in((["a"], [0])) == 0


def test_a_step_needs_the_taps_of_everyone_in_it():
    live = ActiveTaps()
    live.join("a", wire("all", captured=("resid_post", [2])), 5)
    live.join("b", wire(moves=["prompt"], moved=("resid_pre", [0, 4])), 5)
    always, prompt = mask(("resid_post", 2)), mask(("resid_pre", 0), ("resid_pre", 4))
    assert taps_in(live, ("a", 0), ("b", 0)) == always | prompt and taps_in(live, ("a", 0), ("b", 5)) == always
    live.leave("a")
    assert taps_in(live, ("b", 0)) == prompt and taps_in(live, ("b", 5)) == 0


def test_a_step_is_known_to_be_shared_with_requests_that_asked_for_nothing():
    runtime = SimpleNamespace(parts=SimpleNamespace(switch=TapSwitch(tensors()), active_taps=ActiveTaps()))
    runtime.parts.active_taps.join("a", wire("all"), 5)
    runtime.parts.active_taps.join("b", wire("prompt"), 5)
    new, going_on = (["a"], [0]), (["b"], [5])
    WorkerRuntime.begin_step(runtime, new, going_on)
    assert runtime.all_live and runtime.parts.switch.mask == mask(("resid_post", 0))
    WorkerRuntime.begin_step(runtime, new, (["b", "plain"], [5, 9]))
    assert not runtime.all_live
    runtime.parts.active_taps.leave("b")
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
    engine = Engine()
    sets, manager = engine.sets, engine.manager

    def used(mask):
        engine.switch.set_active(mask)
        found = manager.replay(manager.dispatch(1, 1))
        assert manager.graphs is sets._swaps["FULL"][0].sets[sets._mask_for(mask)]
        sets.restore()
        return found

    masks = [1 << k for k in range(MAX_SETS - 1)] + [0b111]
    assert all(used(mask) for mask in masks * 2) and len(engine.captured) == MAX_SETS
    assert sets._mask_for(0b11) == 0b111 and sets._mask_for(0b1) == 0b1 and sets._mask_for(1 << 60) == ALL
    assert sets._mask_for(1 << SCORES | 1) == EVERYTHING
    assert used(0b101) and len(engine.captured) == MAX_SETS
    assert used(1 << 60) and used(1 << 61) and len(engine.captured) == MAX_SETS + 1 == engine.report("sets")


def test_a_set_is_for_the_functions_that_it_was_captured_with(none_at_start):
    """Graphs of all taps have none; where there is no room for another set, a step runs without a graph."""
    engine = Engine()
    sets, function = engine.sets, 1 << FUNCTIONS
    assert sets._mask_for(function | 1) == function | 1
    sets._captured = {LiveGraph(EVERYTHING, Desc(Mode.FULL, 4)), LiveGraph(ALL, Desc(Mode.FULL, 4))}
    assert sets._substitute(LiveGraph(function | 1, Desc(Mode.FULL, 4))) is None
    sets._masks = [function << 2 * k | 0b11 for k in range(2 * MAX_SETS)]
    assert sets._mask_for(function | 1) == function | 0b11
    assert sets._mask_for(function << 100 | 1) is None and sets._mask_for(1 << 60) == ALL
    engine.switch.set_active(function << 100 | 1)
    assert engine.manager.dispatch(2, 7) == Desc(Mode.NONE, 7, 2)
    sets.restore()
    sets.lazy = False
    assert sets._mask_for(function | 1) is None and sets._mask_for(1) == ALL


@pytest.mark.parametrize(
    ("instruction", "cells"),
    [
        (Instruction(CONST, "u"), False),
        (Instruction(AFFINE, "u", "w"), False),
        (Instruction(FEATURE, "u", "w"), False),
        (Instruction(CONST, "u", cell=1), True),
        (Instruction(HELD, "u"), True),
        (Instruction(HOOK, "", key="f:a"), True),
    ],
)
def test_bits_of_what_the_kernel_has_to_do(instruction, cells):
    """A gate's factor, a number from elsewhere, a function's row, a dose: the larger kernel; also what is reduced."""

    def bits(spec):
        live = ActiveTaps(lambda _: 0)
        live.join("a", spec, 10)
        mask = live.taps_in((["a"], [0]))
        return bool(mask >> CELLS & 1), bool(mask >> GROUPS & 1)

    move = ResolvedIntervention("resid_pre", (0,), Positions.parse("all"), 0, (instruction,))
    for captures, groups in ((ResolvedSpec(()), False), (wire("prompt", reduce="mean").captures, True)):
        assert bits(EngineSpec(captures, (move,))) == (cells, groups)
        assert bits(EngineSpec(captures, (move,), dose=True)) == (True, groups)
    assert bits(wire("prompt", reduce="last")) == (False, True) and bits(wire("prompt")) == (False, False)


@pytest.mark.parametrize("keys", [("f:a",), ("f:a", "g:b"), ("f:a", "f:b"), ("a",), ("f:a", "a")])
def test_bits_of_functions(keys):
    """A function that is called twice at a tap, and one that only the host calls, take a step without a graph."""
    hooks = [Instruction(HOOK, "", key=key) for key in keys]
    moves = tuple(ResolvedIntervention("resid_pre", (0, 2), Positions.parse("all"), 0, (one,)) for one in hooks)
    numbers: dict[str, int] = {}
    live = ActiveTaps(lambda identity: numbers.setdefault(identity, len(numbers)))
    live.join("a", EngineSpec(ResolvedSpec(()), moves), 10)
    mask = live.taps_in((["a"], [0]))
    if keys in (("f:a",), ("f:a", "g:b")):
        wanted = [Place(k, tap_of(Site("resid_pre", layer)), True) for k in range(len(keys)) for layer in (0, 2)]
        assert list(places_in(mask)) == wanted and not mask >> NO_GRAPH & 1
        assert sum(1 << one.bit for one in wanted) == mask >> FUNCTIONS << FUNCTIONS
    else:
        assert mask >> NO_GRAPH & 1


GATED = {  # where a probe reads, whether before interventions, and where its gate acts -> the stage that is early
    ("resid_post", 1, False, "resid_pre", 2, 0): 1, ("resid_post", 1, True, "resid_post", 1, 0): 0,
    ("resid_post", 1, True, "resid_pre", 2, 0): 0, ("resid_pre", 2, True, "resid_pre", 2, 0): 1,
    ("mlp_out", 1, True, "mlp_out", 1, 1): 0, ("resid_post", 1, False, "resid_post", 2, 0): None,
    ("resid_post", 1, False, "resid_post", 1, 1): None,
}  # fmt: skip


@pytest.mark.parametrize(("case", "stage"), GATED.items())
def test_a_gate_at_its_probe_s_tap_is_decided_between_the_stages(none_at_start, case, stage):
    """A set of graphs with that bit, or a step without a graph: those of all taps do not do it."""
    hook, layer, before, acts, at, delay = case
    add = Instruction(CONST, "u", cell=2)
    move = ResolvedIntervention(acts, (at,), Positions.parse("all"), 0, (add,))
    probe = ResolvedProbe("p", hook, layer, Positions.parse("all"), 0, 1, ("w",), (0.0,), before=before)
    live = ActiveTaps()
    live.join("a", EngineSpec(ResolvedSpec(()), (move,), (probe,), (ResolvedGate(0, 0, 0.0, delay=delay),)), 10)
    mask, tap = live.taps_in((["a"], [0])), tap_of(Site(hook, layer))
    assert early_stages(mask, tap) == (0 if stage is None else 1 << stage) and not function_bits(mask)
    assert early_stages(EVERYTHING, tap) == early_stages(ALL, tap) == 0
    assert mask >> SCORES + tap & 1
    sets = Engine().sets
    assert sets._mask_for(mask) == mask
    sets._masks = [1 << k for k in range(2 * MAX_SETS)]
    assert sets._mask_for(mask) == (EVERYTHING if stage is None else None)


def test_a_step_that_encodes_rows_has_no_graph():
    """Whatever is captured; the steps after it replay as before."""
    engine = Engine()
    engine.switch.set_active(1 << NO_GRAPH | 0b10)
    assert engine.manager.dispatch(1, 1) == Desc(Mode.NONE, 1, 1)
    assert engine.manager.dispatch(2, 7) == Desc(Mode.NONE, 7, 2)
    engine.sets.restore()
    assert not engine.captured and engine.report("steps") == {"without": 2}
    for live in (False, True):
        assert engine.step(live, 3) == (Desc(Mode.FULL, 4), live)


@pytest.mark.parametrize("source", [False, True])
def test_a_request_that_encodes_rows_says_so_while_it_acts(source):
    encode, held = Instruction(ENCODE, "", a=3.0, key="key"), Instruction(HELD, "u")
    move = ResolvedIntervention("mlp_out", (1,), Positions.parse("prompt"), 0, (encode, held))
    if source:
        move = replace(move, instructions=(held,), source=Source("mlp_in", 1, encode))
    live = ActiveTaps()
    live.join("a", EngineSpec(ResolvedSpec(()), (move,)), 10)
    mask = live.taps_in((["a"], [0]))
    assert mask >> NO_GRAPH == 1 | 1 << CELLS - NO_GRAPH and mask >> tap_of(Site("mlp_out", 1)) & 1
    assert mask >> tap_of(Site("mlp_in", 1)) & 1 == source
    assert not live.taps_in((["a"], [10])), "past its prompt"


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
        switch.register(number, 0)
    one, other = switches
    one.set_active(ALL)
    assert acts(one, numbers[0]) and not acts(other, numbers[1])
    other.activate_always()
    other.set_active(0)
    assert acts(other, numbers[1])
    one.set_active(0)
    assert not acts(one, numbers[0])


def test_live_graphs_are_captured_lazily_unless_asked_for_at_start_up():
    assert Settings.load({}, {}).graphs == "lazy"
    assert Settings.load({}, {"WEIR_GRAPHS": "eager"}).graphs == "eager"


def test_only_the_taps_asked_for_act():
    switch, number = TapSwitch(tensors()), numbered(0)
    switch.register(number, 3)  # what its own entries say is where this engine's tables have it
    for mask in (0b1000, 0b0111, ALL, 0):
        switch.set_active(mask)
        assert acts(switch, number) is bool(mask >> 3 & 1)
