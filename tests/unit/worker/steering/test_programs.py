"""Program tables, cache keys and the waiting room."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.properties import examples
from tests.unit.request_strategies import selectors
from tests.unit.schema.test_lowering import REPLY, Bench, D, admitted, move_of
from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import TableNeeds
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.positions import Positions
from vllm_weir.worker.planning.columns import as_integers
from vllm_weir.worker.steering.unsteered_kv import MOST_FAILED, SteeredKeys, UnsteeredKV

ROWS = torch.eye(D)
ITEMS = [weir.Add(ROWS[k % D] * (1 + k // D), k % 3, 1.0 + k % 2) for k in range(16)] + [
    weir.Ablate(ROWS[:3], "all"),
    weir.LowRank(ROWS[:2], ROWS[2:4], torch.ones(2), [0, 2], positions="generated"),
    weir.Add(ROWS[:4], 1, positions="prompt"),
    weir.Clamp(ROWS[0], 0, value=1.0, positions={"token_ids": [1, 2]}),
]
steps = st.lists(
    st.tuples(st.integers(0, 5), st.one_of(st.none(), st.lists(st.sampled_from(ITEMS), max_size=3))), max_size=30
)


def usage(bench):
    return bench.table.usage()


@examples(60)
@given(steps)
def test_joining_and_leaving_leaks_nothing(sequence):
    bench = Bench(vectors=40, programs=60, nodes=300)
    live = {}
    for who, items in sequence:
        name = f"r{who}"
        bench.planner.remove(name)
        live.pop(name, None)
        if items is not None:
            bench.join(name, items, 4, [0, 1, 2, 3])
            live[name] = items
        names = list(live)
        bench.programs(names, [7] * len(names), [0] * len(names))
        digests = {d for items in live.values() for i in items for d in move_of(i)[1]}
        assert usage(bench)["vectors"] == len(digests)
        table = bench.table
        used = [n for nodes in table._nodes_of.values() for n in nodes]
        assert len(set(used)) == len(used) and len(used) + len(table._free_nodes) == 300
        assert not set(used) & set(table._free_nodes)
        for digest, slot in table._vector_slots.slot_of.items():
            if digest in digests:
                assert np.array_equal(
                    table.vectors[slot],
                    next(move_of(i)[1][digest] for x in live.values() for i in x if digest in move_of(i)[1]),
                )
    for name in live:
        bench.planner.remove(name)
    assert usage(bench) == {"vectors": 0, "programs": 0, "nodes": 0}


def test_equal_content_is_stored_once():
    bench = Bench()
    for k in range(50):
        bench.join(f"r{k}", [weir.Add(torch.ones(D), 1), weir.Add(torch.ones(D), 2, 3.0)], 4)
    bench.programs([f"r{k}" for k in range(50)], [6] * 50, [0] * 50)
    assert usage(bench) == {"vectors": 1, "programs": 1, "nodes": 2}
    bench.planner.remove("r0")
    assert usage(bench) == {"vectors": 1, "programs": 1, "nodes": 2}


def test_only_changed_rows_are_written_again():
    bench = Bench()
    bench.join("a", [weir.Add(torch.ones(D), 1)], 4)
    bench.programs(["a"], [4], [0])
    first = bench.table.take_changes()
    assert {name: len(rows) for name, rows in first.items()} == {"heads": 1, "ints": 1, "floats": 1, "vectors": 1}
    bench.join("b", [weir.Add(torch.ones(D), 1)], 4)
    bench.programs(["a", "b"], [1, 4], [4, 0])
    assert bench.table.take_changes() == {}


def test_a_table_that_cannot_hold_a_request_is_left_as_it_was():
    bench = Bench(vectors=3)
    bench.join("a", [weir.Add(ROWS[0], 1)], 4)
    with pytest.raises(WeirError):
        bench.join("b", [weir.Ablate(ROWS[:4], 1)], 4)
    bench.planner.remove("b")
    assert usage(bench)["vectors"] == 1
    bench.join("c", [weir.Ablate(ROWS[5:7], 1)], 4)
    for name in "ac":
        bench.planner.remove(name)
    assert usage(bench) == {"vectors": 0, "programs": 0, "nodes": 0}


def test_a_vector_that_cannot_be_fetched_leaves_no_trace():
    bench = Bench()
    move, _ = move_of(weir.Add(ROWS[0], 1))

    def nothing(_digests):
        raise ValueError("gone")

    with pytest.raises(WeirError, match="gone"):
        bench.planner.add_steering("a", "x#y#z", [move], 4, None, nothing)
    bench.planner.remove("a")
    assert usage(bench)["vectors"] == 0
    bench.join("a", [weir.Add(ROWS[0], 1)], 4)  # and is fetched anew, not believed to be there
    assert np.array_equal(
        bench.table.vectors[bench.table._vector_slots.slot_of[move.instructions[0].u]], ROWS[0].numpy()
    )


def keys(items, prompt_len=70, total=128, block=32):
    """The keys of each whole block."""
    made = CacheKeys(admitted(*items).effective, prompt_len)
    ids = [(3 * p) % 50 for p in range(total)]
    return [made.of_block(s, ids[s : s + block]) for s in range(0, total, block)]


A, B = torch.ones(D), torch.arange(1.0, D + 1)


def test_blocks_before_the_first_touched_position_have_no_key():
    for first in (0, 31, 32, 40, 64, 100, 127):
        for positions in (f"{first}:", [first], [first, 126]):
            found = keys([weir.Add(A, 1, positions=positions)])
            assert [k is None for k in found[: first // 32 + 1]] == [True] * (first // 32) + [False]
    assert keys([weir.Add(A, 1, positions="generated")])[:2] == [None, None]
    assert keys([weir.Add(A, 1, positions={"token_ids": [999]})]) == [None] * 4
    assert keys([weir.Add(A, 1, positions={"not_token_ids": list(range(50))})]) == [None] * 4
    found = keys([weir.Add(A, 1, positions={"not_token_ids": [3 * p % 50 for p in range(33)]})])
    assert [k is None for k in found] == [True, False, False, False]
    assert keys([weir.Add(A, 1, positions=[70]), weir.Add(B, 1, positions=[33])])[0] is None


@pytest.mark.parametrize(
    "one, other",
    [
        ("prompt", list(range(70))),
        ("prompt", ":70"),
        ("all", ":128"),
        ("last_prompt", 69),
        ("last_prompt", -1),
        ("generated", "70:"),
        ("sampled", "69:"),
        ([1, 2, 2], "1:3"),
        ({"token_ids": [0]}, [p for p in range(128) if 3 * p % 50 == 0]),
        ({"not_token_ids": [0]}, [p for p in range(128) if 3 * p % 50 != 0]),
        ({"not_token_ids": [0]}, {"token_ids": list(range(1, 50))}),
        ({"not_token_ids": [999]}, "all"),
    ],
)
def test_the_same_effect_written_differently_shares(one, other):
    for make in (lambda p: [weir.Add(A, [1, 0], positions=p)], lambda p: [weir.Ablate(B, "all", positions=p)]):
        assert keys(make(one)) == keys(make(other))
    assert keys([weir.Add(A, [1, 2, 1])]) == keys([weir.Add(A.double().numpy(), (2, 1))])
    assert keys([weir.Add(A, [0, 1, 2])]) == keys([weir.Add(A, "all")])
    assert keys([weir.Add(A, 1), weir.Add(torch.zeros(D), 1)]) == keys([weir.Add(A, 1)])


def test_the_same_vectors_by_layer_written_differently_share():
    both, swapped = torch.stack([A, B]), torch.stack([B, A])
    assert keys([weir.Add(A[None], 1)]) == keys([weir.Add(A, 1)]) == keys([weir.Add({1: A})])
    alike = keys([weir.Add(A, [0, 2], 2.0)])
    for vector, more in (({2: A, 0: A[None]}, {}), (torch.stack([A, A]), {"layers": [2, 0], "per_layer": True})):
        assert keys([weir.Add(vector, scale=2.0, **more)]) == alike
    each = keys([weir.Add(A, 0), weir.Add(B, 2)])
    assert keys([weir.Add({2: B, 0: A})]) == each == keys([weir.Add({"0": A, "2": B})])
    assert keys([weir.Add(both, [0, 2], per_layer=True)]) == each == keys([weir.Add(swapped, [2, 0], per_layer=True)])
    assert keys([weir.Add({0: A, 2: torch.zeros(D)})]) == keys([weir.Add(A, 0)])
    matched = keys([weir.Add(A, [0, 1], norm_match=True)])
    assert keys([weir.Add({0: A, 1: 3 * A}, norm_match=True)]) == matched


@given(
    wanted=st.lists(st.tuples(st.sampled_from(range(16)), selectors()), min_size=1, max_size=3),
    prompt_len=st.integers(1, 90),
)
def test_keys_of_stretches_are_those_of_positions(wanted, prompt_len):
    moves = [move_of(weir.Add(ROWS[k % D] * (1 + k), k % 3, positions=at))[0] for k, at in wanted]
    ids = [(3 * p) % 21 for p in range(128)]
    quick, slow = CacheKeys(moves, prompt_len), CacheKeys(moves, prompt_len)
    slow._bounded = [(move, None, None) for move in moves]
    for start in range(0, 128, 16):
        block = ids[start : start + 16]
        assert quick.of_block(start, block) == slow.of_block(start, block)


def test_listed_positions_are_looked_up_not_gone_through_in_each_block(monkeypatch):
    """Of a prompt with many of them, each block would take longer the longer the prompt is."""
    listed = [*range(0, 64, 3), 3, -5]
    given = [weir.Add(A, 1, positions=listed), weir.Add(ROWS[:4], 1, positions=[40, 3, 41, 66])]
    moves = admitted(*given).effective
    slow = CacheKeys(moves, 70)
    slow._bounded = [(move, bounds, None) for move, bounds, _ in slow._bounded]
    ids = list(range(96))
    expected = [slow.of_block(s, ids[s : s + 16]) for s in range(0, 96, 16)]
    quick = CacheKeys(moves, 70)
    monkeypatch.setattr(Positions, "mask", None)
    assert [quick.of_block(s, ids[s : s + 16]) for s in range(0, 96, 16)] == expected
    assert [key is None for key in expected] == [False] * 5 + [True]


def test_prompt_and_all_share_the_blocks_of_the_prompt():
    one, other = keys([weir.Add(A, 1, positions="prompt")]), keys([weir.Add(A, 1, positions="all")])
    assert one[:2] == other[:2] and one[2] != other[2] and one[3] is None


DIFFERENT = [
    *([weir.Add(A, 1, **more)] for more in (
        {}, {"scale": 2.0}, {"norm_match": True}, {"hook": "resid_pre"}, {"positions": "1:"}, {"positions": "::2"},
        {"keep_norm": True}, {"norm_match": True, "keep_norm": True},
    )),
    [weir.Add(B, 1)], [weir.Add(A, 2)], [weir.Add(A, [1, 2])],
    [weir.Add(A, 1), weir.Ablate(B, 1)], [weir.Ablate(B, 1), weir.Add(A, 1)], [weir.Add(A, 1), weir.Add(A, 1)],
    [weir.Ablate(A, 1)], [weir.Replace(A, 1)], [weir.Replace(A, 1, alpha=0.5)],
    *([weir.Clamp(A, 1, **more)] for more in (
        {"value": 1.0}, {"value": 2.0}, {"min": 1.0}, {"max": 1.0}, {"value": 1.0, "strength": 0.5},
    )),
    *([weir.LowRank(A[None], B[None], s, 1)] for s in (torch.ones(1), torch.zeros(1))),
    [weir.Add({1: A, 2: B})], [weir.Add({1: B, 2: A})],
    [weir.Add(torch.stack([A, B]), 1, positions="0:2")], [weir.Add(torch.stack([B, A]), 1, positions="0:2")],
    [weir.Add(torch.stack([A, B]), 1, positions="2:4")],
    [weir.Add({1: torch.stack([A, B])}, positions="0:2", keep_norm=True)],
]  # fmt: skip


def test_what_differs_does_not_share():
    first = [keys(items)[0] for items in DIFFERENT]
    assert None not in first and len(set(first)) == len(first)


def test_rows_by_position_key_only_the_positions_that_have_one():
    found = keys([weir.Add(torch.stack([A, B]), 1, positions="40:42")])
    assert [k is None for k in found] == [True, False, True, True]
    same = keys([weir.Add(torch.stack([A, B]), 1, positions=[40, 41])])
    assert found == same
    skip = keys([weir.Add(torch.stack([A, torch.zeros(D), B]), 1, positions="40:43")])
    assert skip == keys([weir.Add(torch.stack([A, B]), 1, positions=[40, 42])])


needs = st.tuples(st.sets(st.sampled_from("abcdefgh"), max_size=4), st.integers(1, 4), st.integers(1, 8))


@given(st.lists(needs, min_size=1, max_size=20), st.lists(st.integers(0, 30), max_size=60))
def test_the_waiting_room_is_fair_and_never_over_capacity(wanted, choices):
    sizes = TableSizes(vectors=5, programs=6, nodes=12)
    room = WaitingQueue(sizes)
    inside: dict[str, tuple] = {}
    let_in: list[str] = []
    waiting = [f"r{k}" for k in range(len(wanted))]
    of = dict(zip(waiting, wanted, strict=True))
    outside = list(waiting)

    def enter(*names):
        for name in names:
            inside[name] = of[name]
            let_in.append(name)
            assert len(set().union(*(n[0] for n in inside.values()))) <= sizes.vectors
            assert sum(n[1] for n in inside.values()) <= sizes.programs
            assert sum(n[2] for n in inside.values()) <= sizes.nodes

    for choice in [*choices, *[0] * 200]:
        if outside and (choice % 2 or not inside):
            name = outside.pop(0)
            if room.enter(name, name, TableNeeds(sorted(of[name][0]), *of[name][1:])):
                enter(name)
        elif inside:
            del inside[sorted(inside)[choice % len(inside)]]
            enter(*room.release(dict(inside)))
    assert let_in == waiting  # first come, first served, and everybody in the end
    assert len(room) == 0


def keyed(items, ids, salt=""):
    return SteeredKeys(tuple(move_of(item)[0] for item in items), len(ids), ids, salt)


def test_what_a_failed_request_left_reaches_those_with_its_keys_only():
    """Equal keys, that is: the same done to the same tokens, however it was written down."""
    ids = list(range(40))
    left = UnsteeredKV()
    left.add(keyed([weir.Add(A, 1)], ids), 20)

    def reaches(items, ids=ids, end=32, salt=""):
        return left.may_reach(keyed(items, ids, salt), end)

    assert reaches([weir.Add(A, 1)]) and reaches([weir.Add(A, 1, positions="prompt")])
    assert reaches([weir.Add(A, 1, positions=":9"), weir.Add(A, 1, positions="9:")], ids[:25])
    assert not reaches([weir.Add(A, 1)], end=20), "it was steered up to there"
    assert not reaches([weir.Add(B, 1)]) and not reaches([weir.Add(A, 1, positions="3:")])
    assert not reaches([weir.Add(A, 1)], [*ids[:20], 99, *ids[21:]]) and reaches([weir.Add(A, 1)], [*ids[:21], 99] * 2)
    assert not reaches([weir.Add(A, 1)], salt="another")
    assert reaches([weir.Add(A, 1)], [*ids, 7, 7, 7], end=43), "its answer may be part of another's prompt"
    in_prompt = UnsteeredKV()
    in_prompt.add(keyed([weir.Add(A, 1, positions=":10")], ids), 20)
    assert not in_prompt.may_reach(keyed([weir.Add(A, 1, positions=":10")], ids), 32), (
        "all that was to be done was done"
    )
    for k in range(MOST_FAILED):
        left.add(keyed([weir.Add(A, 1)], [50 + k]), 0)
    assert reaches([weir.Add(A, 1)]), "what is no longer known one by one is not forgotten"


def test_what_is_left_is_found_whichever_way_its_tokens_were_chosen():
    """Of a generated position nobody here knows the token: with some tokens the keys are equal."""
    left = UnsteeredKV()
    left.add(keyed([weir.Add(A, 1, positions={"token_ids": [7]})], [1, 2]), 2)
    taker = keyed([weir.Add(A, 1, positions={"not_token_ids": [1, 2]})], [1, 2])
    assert left.may_reach(taker, 3), "both steer a 7 that the first one generated"
    assert left.may_reach(keyed([weir.Add(A, 1, positions={"not_token_ids": [1, 2]})], [1, 2, 7]), 3)
    assert not left.may_reach(keyed([weir.Add(A, 1, positions={"not_token_ids": [1, 2]})], [1, 2, 2]), 3)
    assert not left.may_reach(keyed([weir.Add(A, 1, positions={"not_token_ids": [2]})], [1, 2, 7]), 3)
    assert not left.may_reach(taker, 2), "up to there it was steered"


def test_a_failure_in_a_step_is_known_to_those_that_take_from_it():
    """Whatever their order in the batch: one computes in the step what the other has been given from the cache."""
    bench, ids = Bench(), list(range(40))
    for name in ("taker", "other", "fails"):
        bench.join(name, [weir.Add(A if name != "other" else B, 1)], 40, ids)
    make = bench.planner.steering_planner.program

    def program(steering, *args):
        if steering.request_id == "fails":
            raise WeirError("the program table is full", "interventions")
        return make(steering, *args)

    bench.planner.steering_planner.program = program
    plan = bench.planner.plan(["taker", "other", "fails"], [8, 8, 32], [32, 32, 0])
    assert [name for _, name, _ in plan.failures] == ["fails", "taker"]
    assert (plan.programs >= 0).nonzero()[0].tolist() == list(range(8, 16))
    assert sorted(as_integers(plan.steered[REPLY])[:, 1:].tolist())[-2:] == [[0, 32, 1], [32, 8, 1]], (
        "what it was given counts too"
    )


def test_what_a_request_computed_itself_is_not_taken_for_what_another_left():
    """However long it was planned with everybody's in between; once it was preempted, it may be another's."""
    bench, ids = Bench(), list(range(40))
    bench.join("goes on", [weir.Add(A, 1)], 40, ids)
    bench.planner.plan(["goes on"], [40], [0])
    for position in range(40, 50):
        bench.planner.plan(["goes on"], [1], [position])
    bench.planner.steering_planner.unsteered_kv.add(keyed([weir.Add(A, 1)], ids), 20)
    plan = bench.planner.plan(["goes on"], [2], [50])
    assert not plan.failures and (plan.programs >= 0).all()
    assert as_integers(plan.steered[REPLY])[:, 1:].tolist() == [[50, 2, 1]]
    bench.planner.plan(["goes on"], [1], [52])
    bench.planner.resume(["goes on", "nobody"])
    assert [name for _, name, _ in bench.planner.plan(["goes on"], [1], [53]).failures] == ["goes on"]
