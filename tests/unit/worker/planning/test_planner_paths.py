"""The planner's short ways give what the long ones give."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.properties import examples
from tests.unit.request_strategies import selectors, sensible_captures
from tests.unit.schema.test_lowering import REPLY, Bench, D
from tests.unit.worker.planning.test_planner import (
    COLUMNS,
    LAYERS,
    assert_free,
    flat,
    places_of,
    planner_of,
    rows_of,
    spec_of,
    step,
)
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.selectors import MOST_STEPS, NEVER, Selectors, SelectorSet
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.columns import ROW_COPY, STEERED
from vllm_weir.worker.planning.step_plan import AdvancedPlan, ProgramsByToken, StepPlan
from vllm_weir.worker.tap.device_tables import PlanWriter


class Scattered(Selectors):
    """Has every position looked at by itself."""

    def __init__(self, like: Selectors, prompt_ids) -> None:
        super().__init__(like.distinct, like.prompt_len, prompt_ids)

    def runs(self, start, end):
        return None


@given(selector=selectors(), P=st.integers(1, 60))
def test_bounds_are_those_of_the_mask(selector, P):
    parsed = Positions.parse(selector)
    bounds = parsed.bounds(P)
    if bounds is not None:
        every = np.arange(200)
        assert ((every >= bounds[0]) & (every < bounds[1])).tolist() == parsed.mask(every, P).tolist()
        steady = parsed.steady(P)
        assert steady is not None and steady[1] == (bounds[1] == NEVER)
    else:
        assert parsed.needs_token_ids or parsed.kind in ("list", "slice")


@given(
    chosen=st.lists(selectors(), min_size=1, max_size=6), P=st.integers(1, 40), start=st.integers(0, 60), data=st.data()
)
def test_stretches_are_those_of_the_codes(chosen, P, start, data):
    distinct = tuple(dict.fromkeys(map(Positions.parse, chosen)))
    ids = data.draw(st.lists(st.integers(0, 20), min_size=P, max_size=P))
    end = start + data.draw(st.integers(1, 50))
    some = SelectorSet(distinct).of(P, ids)
    codes = some.codes(np.arange(start, end))
    runs = some.runs(start, end)
    if runs is not None:
        found = np.zeros(end - start, np.int64)
        for code, a, b in runs:
            assert start <= a < b <= end and not found[a - start : b - start].any()
            found[a - start : b - start] = code
        assert found.tolist() == codes.tolist()
    for code in set(codes.tolist()):
        assert some.count(code, start, end) == Scattered(some, ids).count(code, start, end) or not code
    if not some.by_token:
        assert SelectorSet(distinct).of(P, None) is some


def test_what_a_choice_comes_to_belongs_to_its_prompt_length():
    choice, other = (SelectorSet((Positions.parse("-2:"), Positions.parse("sampled"))) for _ in range(2))
    for P in (3, 9, 3, *range(1, 3 * MOST_STEPS), 3):
        some = choice.of(P, None)
        assert some.prompt_len == P and some is other.of(P, [5] * P)
        assert [int(x) for x in some.codes(np.arange(P + 1))] == [0] * (P - 2) + [1] * min(P - 1, 1) + [3, 3]
    by_token = SelectorSet((Positions.parse({"token_ids": [7]}),))
    assert by_token.of(2, [7, 1]).codes(np.arange(2)).tolist() == [1, 0]
    assert by_token.of(2, [1, 7]).codes(np.arange(2)).tolist() == [0, 1]


@given(data=st.data(), scattered=st.booleans(), seed=st.integers(0, 2**31))
def test_planning_by_stretches_and_all_at_once_changes_nothing(data, scattered, seed):
    """Chunks, preempted, repeated and skipped steps, against a planner that plans every request by itself, and looks at
    every position if it is `scattered`: the same rows, arrivals and places."""
    quick, slow = planner_of(COLUMNS, 512), planner_of(COLUMNS, 512)
    state, turn = {}, np.random.default_rng(seed)
    for i in range(data.draw(st.integers(1, 4))):
        P, G = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 16))
        ids = data.draw(st.lists(st.integers(0, 20), min_size=P, max_size=P))
        how = None if scattered else data.draw(st.sampled_from([None, "full8", "fp16"]))
        spec = spec_of(data.draw(sensible_captures(LAYERS)), how)
        for planner in (quick, slow):
            planner.add_capture(f"r{i}", "ab"[i % 2], spec, P, ids, G, -1 if how is None else int(how == "fp16"))
        if scattered:
            slow.capturing[f"r{i}"].selectors = Scattered(slow.capturing[f"r{i}"].selectors, ids)
        state[f"r{i}"] = [P, G, 0]
    while state:
        batch = []
        for name, (P, _, at) in state.items():
            if len(state) > 1 and turn.random() < 0.2:
                continue  # it sits this step out
            if at > 1 and turn.random() < 0.07:
                at = int(turn.integers(at))
            batch.append((name, int(turn.integers(1, P - at + 1)) if at < P else 1, at))
        if not batch:
            continue
        slow.steady.ready[:] = NEVER
        slow._repeated = None
        a, b = (step(planner, batch) for planner in (quick, slow))
        assert (a is None) == (b is None)
        if a is not None:
            columns = [
                [planner.site_sets.columns_of.get(p) for p in plan.site_sets.tolist()]
                for planner, plan in ((quick, a), (slow, b))
            ]
            assert columns[0] == columns[1] and a.rows == b.rows
            skip = int(scattered)  # then requests find their places in another order
            assert {t: x[skip:] for t, x in places_of(a).items()} == {t: x[skip:] for t, x in places_of(b).items()}
            for planner, plan in ((quick, a), (slow, b)):
                rows_of(plan, planner, batch)
                whole = sorted((s + k, r + k) for s, r, n in plan.segments.tolist() for k in range(n))
                assert whole == sorted((s + k, r + k) for s, r, n in plan.copies.tolist() for k in range(n))
            assert positions_told(a, scattered) == positions_told(b, scattered)
        for name, n, at in batch:
            state[name][2] = at + n
            if at + n >= sum(state[name][:2]) - 1:
                del state[name]
                quick.remove(name)
                slow.remove(name)
    assert_free(quick, 512)


def positions_told(plan, scattered):
    """Reply -> what arrives: of `scattered` ones the positions alone, as row sequences are numbered as they are met."""
    return {
        reply: sorted(row[2:] if scattered else row for row in flat(arrivals))
        for reply, arrivals in plan.arrivals.items()
        if len(arrivals)
    }


where = st.sampled_from(["all", "prompt", "generated", "last_prompt", 2, [0, -1, 5], "1:7:2", "3:9", "sampled"])
items = st.lists(
    st.tuples(st.integers(0, 3), where, st.sampled_from([0, [0, 2], "all"]), st.booleans()), min_size=1, max_size=4
)


def rows_for(selector, P):
    """As many as the positions it selects, where that can be: else one."""
    chosen = Positions.parse(selector)
    count = chosen.count(P)
    return 1 if chosen.is_open or count is None or chosen.count() not in (None, count) else count


@examples(80)
@given(wanted=st.lists(items, min_size=1, max_size=3), P=st.integers(1, 9), cuts=st.lists(st.integers(1, 4)))
def test_steering_by_stretches_changes_nothing(wanted, P, cuts):
    quick, slow = Bench(), Bench()
    for i, some in enumerate(wanted):
        asked = []
        for k, at, layers, by_position in some:
            count = rows_for(at, P) if by_position else 1
            rows = torch.eye(D)[[(k + j) % D for j in range(count)]] * torch.arange(1, count + 1)[:, None]
            asked.append(weir.Add(rows, layers, positions=at))
        for bench in (quick, slow):
            bench.join(f"r{i}", asked, P)
        slow.planner.steered[f"r{i}"].selectors = Scattered(slow.planner.steered[f"r{i}"].selectors, None)
    at, groups = 0, ({}, {})
    while at < P + 6:
        n = min(cuts.pop() if cuts else 3, P - at) if at < P else 1
        told = []
        for bench, known in zip((quick, slow), groups, strict=True):
            if bench is slow:
                slow.planner.steady.ready[:] = NEVER
                slow.planner._repeated = None
            plan = bench.planner.plan([f"r{i}" for i in range(len(wanted))], [n] * len(wanted), [at] * len(wanted))
            for layout_updates in bench.planner.row_seqs.take_layout_updates().values():
                known.update({g.group: (g.request_id, *g.moves) for g in layout_updates.groups})
            keys = {number: key for key, number in bench.table._program_slots.slot_of.items()}
            programs = [keys.get(p) for p in ([] if plan is None else plan.programs.tolist())]
            steered = [] if plan is None else plan.steered.get(REPLY, np.zeros(0, STEERED)).tolist()
            told.append((programs, sorted((known[g], p + k * s) for g, p, c, s in steered for k in range(c))))
        assert [p for p in told[0][0] if p] == [p for p in told[1][0] if p] and told[0][1] == told[1][1]
        at += n


def test_steps_in_which_nothing_happens_are_known_by_their_batch():
    planner = planner_of(COLUMNS, 8)
    planner.add_capture("r", "a", spec_of([("resid_post", [1], "last_prompt")]), 3, None, 400)
    assert step(planner, [("r", 3, 0), ("s", 1, 0)]).rows == 1
    assert all(step(planner, [("r", 1, p), ("s", 1, p)]) is None for p in range(3, 20))
    assert planner._repeated is not None and planner._repeated._times == 16
    assert step(planner, [("r", 1, 2), ("s", 1, 20)]).rows == 1, "computed again after a preemption"
    assert step(planner, [("r", 1, 3), ("s", 1, 21)]) is None and step(planner, [("r", 2, 1), ("s", 1, 22)]).rows == 1


def test_a_batch_in_another_order_or_of_others_is_no_repetition():
    planner = planner_of(COLUMNS, 8)
    for name in "rst":
        planner.add_capture(name, "a", spec_of([("resid_post", [1], "all")]), 1, None, 400)
    step(planner, [("r", 1, 0), ("s", 1, 0)])
    for batch in (
        [("r", 1, 1), ("s", 1, 1)],
        [("s", 1, 2), ("r", 1, 2)],
        [("s", 1, 3)],
        [("s", 1, 4), ("t", 1, 4)],
        [("s", 1, 5), ("t", 1, 6)],
        [("s", 1, 6), ("t", 1, 7)],
        [("s", 2, 7), ("t", 1, 8)],
    ):
        plan = step(planner, batch)
        told = sorted(p for _, _, p in flat(plan.arrivals["a"]))
        assert told == sorted(p + k for _, n, p in batch for k in range(n))
        assert plan.rows == sum(n for _, n, _ in batch) and isinstance(plan, AdvancedPlan) == (batch[0] == ("s", 1, 6))


@examples(60)
@given(data=st.data())
def test_the_device_holds_every_step_s_plan(data):
    """Whatever was written before, and though a plan that is there already is not written again."""
    planner, tensor = planner_of(COLUMNS, 64), torch.full((40, 4), 7, dtype=torch.int32)
    writer = PlanWriter(tensor)
    writer._num_written = 40
    names = [f"r{i}" for i in range(data.draw(st.integers(1, 5)))]
    for name in names:
        if data.draw(st.booleans()):
            planner.add_capture(name, "a", spec_of(data.draw(sensible_captures(LAYERS))), 4, [1, 2, 3, 4], 60)
    batch = [(name, 4, 0) for name in names]
    for at in range(4, 24):
        plan = step(planner, batch)
        if plan is None or not data.draw(st.integers(0, 5)):
            writer.silence()
            expected = torch.full((40, 4), -1)
        else:
            start = data.draw(st.integers(0, 3))
            writer.write(plan, start, torch.zeros(40, dtype=torch.int32))
            expected = torch.full((40, 4), -1)
            slots = plan.slots + np.where(plan.slots >= 0, start, 0)
            expected[: len(slots)] = torch.from_numpy(np.stack([slots, plan.site_sets, plan.programs, plan.spans], 1))
        assert tensor.tolist() == expected.tolist()
        if not data.draw(st.integers(0, 4)):
            data.draw(st.permutations(names))
            names = names[::-1]
        batch = [(name, 1, at) for name in names]


@given(
    ids=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    sets=st.lists(st.lists(st.sampled_from([*range(12), 2**31 + 3, 2**40]), max_size=6), max_size=3),
)
def test_programs_are_chosen_by_the_tokens_that_only_the_device_knows(ids, sets):
    """Sets of any order, empty ones too, with repeats and with ids that no token has."""
    n = len(ids)
    nothing = np.full(n, -1, np.int32)
    programs = np.arange(100, 100 + (1 << len(sets)), dtype=np.int32)
    lookup = ProgramsByToken(np.arange(n), tuple(map(tuple, sets)), programs)
    none, copies = np.zeros(0, np.int64), np.zeros(0, ROW_COPY)
    plan = StepPlan(nothing, nothing, nothing, 0, none, copies, programs_by_token=[lookup], spans=nothing)
    tensor = torch.full((n, 4), 7, dtype=torch.int32)
    PlanWriter(tensor).write(plan, 0, torch.tensor(ids, dtype=torch.int32))
    want = [100 + sum((token in some) << j for j, some in enumerate(sets)) for token in ids]
    assert tensor[:, 2].tolist() == want


def test_the_only_request_fails_after_some_of_its_rows_were_placed():
    planner = planner_of(COLUMNS, 8)
    planner.row_seqs.arena = Arena(2 * LAYERS)
    planner.add_capture("r", "a", spec_of([("resid_post", "all", "0:2"), ("resid_post", [1], "2:")]), 3, None, 1)
    plan = step(planner, [("r", 3, 0)])
    ((reply, name, reason),) = plan.failures
    assert (reply, name) == ("a", "r") and "host_bytes" in reason and plan.rows == 0
    assert list(plan.arrivals) == ["a"] and (plan.slots == -1).all() and not planner.capturing
    assert step(planner, [("r", 1, 3)]) is None


def test_a_step_that_is_streamed_leaves_its_successors_their_slots():
    planner = planner_of(COLUMNS, 8)
    for name in "rs":
        planner.add_capture(name, "a", spec_of([("resid_post", "all", "all")]), 1, None, 400)
    plans = [step(planner, [("r", 1, p), ("s", 1, p)]) for p in range(4)]
    assert isinstance(plans[-1], AdvancedPlan)
    lanes = plans[-1].in_lanes(2)
    assert lanes.slots.tolist() == [0, 2] and lanes.copies.tolist() == plans[-1].copies.tolist()
    again = step(planner, [("r", 1, 4), ("s", 1, 4)])
    assert isinstance(again, AdvancedPlan) and again.slots.tolist() == [0, LAYERS]
