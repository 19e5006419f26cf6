"""Lowered interventions, run by the CPU tap, are what their formulas say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.steered import _apply
from vllm_weir.frontend.admit import unknown_reference
from vllm_weir.spec.hooks import BLOCK_HOOKS, Site
from vllm_weir.spec.interventions import Move
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import RequestSpec
from vllm_weir.spec.sizes import Sizes
from vllm_weir.worker import tap_cpu
from vllm_weir.worker.plan import Planner
from vllm_weir.worker.programs import ProgramTable
from vllm_weir.worker.select import STAGES, num_taps, tap_of
from vllm_weir.worker.tap import numbered

D, LAYERS = 8, 3
TAPS = num_taps(LAYERS)
REPLY = "rows#vectors#token"


def move_of(item: weir.Add) -> tuple[Move | None, dict]:
    lowered = item.lower(D, unknown_reference)
    if not lowered.instructions:
        return None, {}
    layers = item.resolve_layers(LAYERS)
    return Move(item.hook, layers, item.positions, lowered.per_position, lowered.instructions), lowered.rows


class Bench:
    """A planner, its tables, and a stream to run the taps on."""

    def __init__(self, vectors: int = 256, programs: int = 256, nodes: int = 2048) -> None:
        self.table = ProgramTable(Sizes(vectors, programs, nodes), TAPS, range(TAPS), D)
        self.planner = Planner(frozenset(range(TAPS * STAGES)), TAPS * STAGES, 8, self.table)

    def join(self, name: str, items, prompt_len: int, prompt_ids=None) -> None:
        pairs = [move_of(i) for i in items]
        rows = {k: v for _, r in pairs for k, v in r.items()}
        moves = [Move.from_wire(m.to_wire()) for m, _ in pairs if m is not None]
        self.planner.steer(name, REPLY, moves, prompt_len, prompt_ids, lambda ds: {d: rows[d] for d in ds})

    def programs(self, names, counts, computed) -> np.ndarray:
        plan = self.planner.plan(names, counts, computed)
        return np.full(sum(counts), -1, np.int32) if plan is None else plan.programs

    def run(self, tap: int, programs: np.ndarray, h: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        n = len(h)
        plan = torch.tensor([[-1, -1, -1, 0]] * n, dtype=torch.int32)
        plan[:, 2] = torch.from_numpy(programs)
        ranks, ring = torch.full((8, TAPS * STAGES), -1, dtype=torch.int32), torch.zeros(1, D)
        tables = [torch.from_numpy(getattr(self.table, t)) for t in ("heads", "ints", "floats", "vectors")]
        h, residual = h.clone(), None if residual is None else residual.clone()
        tap_cpu.launch(h, residual, numbered(tap), plan, ranks, ring, *tables)
        return h if residual is None else h + residual


numbers = st.integers(-12, 12).map(lambda n: n / 4)
rows = st.lists(numbers, min_size=D, max_size=D).map(lambda r: torch.tensor(r, dtype=torch.float32))
nonzero = rows.map(lambda r: r if r.any() else torch.eye(D)[0])


def matrix(low: int, high: int, row=rows):
    return st.lists(row, min_size=low, max_size=high).map(torch.stack)


where = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([0, 1, [0, 2], "all"]),
        "hook": st.sampled_from(BLOCK_HOOKS),
        "positions": st.sampled_from(["all", "prompt", "generated", "last_prompt", 2, [0, -1, 5], "1:7:2", "sampled"]),
    }
)


@st.composite
def interventions(draw):
    at = draw(where)
    kind = draw(st.sampled_from(["add", "ablate", "clamp", "replace", "low rank"]))
    if kind == "add":
        matched = draw(st.booleans())
        row = nonzero if matched else rows
        return weir.Add(draw(st.one_of(row, matrix(1, 4, row))), scale=draw(numbers), norm_match=matched, **at)
    if kind == "ablate":
        return weir.Ablate(draw(st.one_of(nonzero, matrix(1, 3, st.sampled_from(list(torch.eye(D) + 0.5))))), **at)
    if kind == "clamp":
        low = draw(numbers)
        bounds = draw(st.sampled_from([{"value": low}, {"min": low}, {"max": low}, {"min": low, "max": low + 1}]))
        return weir.Clamp(draw(nonzero), strength=draw(numbers), **bounds, **at)
    if kind == "replace":
        return weir.Replace(draw(st.one_of(rows, matrix(1, 4))), alpha=draw(numbers), **at)
    k = draw(st.integers(1, 3))

    def pick():
        return draw(matrix(k, k))

    return weir.LowRank(pick(), pick(), torch.tensor(draw(st.lists(numbers, min_size=k, max_size=k))), **at)


def naive(items, h: torch.Tensor, tap: int, prompt_len: int) -> torch.Tensor:
    """A tap's stream [n, D] of positions 0 .. n-1: a block's resid_post, then the next one's resid_pre."""
    h = h.clone()
    every = np.arange(len(h))
    for hook in ("embed", "attn_out", "resid_mid", "mlp_out", "resid_post", "resid_pre", "final_norm"):
        for item in items:
            if item.hook == hook and tap in {tap_of(Site(hook, x)) for x in item.resolve_layers(LAYERS)}:
                at = np.flatnonzero(item.positions.mask(every, prompt_len))
                if isinstance(item, weir.Ablate):
                    basis = torch.linalg.svd(torch.atleast_2d(torch.tensor(item.directions.array)).double())
                    keep = basis.Vh[: len(basis.S)][1e-5 * basis.S[0] < basis.S]
                    h[at] = (h[at].double() - h[at].double() @ keep.T @ keep).float()
                elif isinstance(item, weir.Add) and item.norm_match and not item.vector.array.any():
                    pass
                else:
                    h[at] = _apply(item, h[at])
    return h


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(interventions(), max_size=4), min_size=1, max_size=3), st.integers(0, 2**31), st.booleans())
def test_the_tap_does_what_the_formulas_say(requests, seed, split):
    bench = Bench()
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(1, 10, (1,), generator=generator).item() for _ in requests]
    prompt_len = 4
    names = [f"r{k}" for k in range(len(requests))]
    for name, items in zip(names, requests, strict=True):
        bench.join(name, items, prompt_len)
    programs = bench.programs(names, lengths, [0] * len(names))
    stream = torch.randn(sum(lengths), D, generator=generator)
    residual = torch.randn(sum(lengths), D, generator=generator) if split else None
    whole = stream if residual is None else stream + residual
    for tap in range(TAPS):
        got = bench.run(tap, programs, stream, residual)
        parts = zip(requests, whole.split(lengths), strict=True)
        want = torch.cat([naive(items, part, tap, prompt_len) for items, part in parts])
        assert (got - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max())), tap
        unsteered = torch.from_numpy(programs < 0)
        assert torch.equal(got[unsteered], whole[unsteered])


@settings(max_examples=60, deadline=None)
@given(st.lists(interventions(), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_chunks_get_the_programs_of_the_whole(items, chunks):
    whole, parts = Bench(), Bench()
    for bench in (whole, parts):
        bench.join("a", items, 5)
    stream = torch.randn(sum(chunks), D, generator=torch.Generator().manual_seed(1))
    at, pieces = 0, []
    for n in chunks:
        pieces.append(parts.run(1, parts.programs(["a"], [n], [at]), stream[at : at + n], None))
        at += n
    together = whole.run(1, whole.programs(["a"], [at], [0]), stream, None)
    assert torch.allclose(torch.cat(pieces), together, atol=1e-5, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(interventions())
def test_the_wire_keeps_every_intervention(item):
    spec = RequestSpec((), (item,))
    (back,) = RequestSpec.parse(spec.to_json()).interventions
    assert type(back) is type(item) and back.to_json() == item.to_json()
    for name in item.vectors:
        assert np.array_equal(getattr(back, name).array, getattr(item, name).array)
    a, b = move_of(item), move_of(back)
    assert a[0] == b[0] and a[1].keys() == b[1].keys()
    if a[0] is not None:
        assert Move.from_wire(a[0].to_wire()) == a[0]


def test_the_wire_is_json():
    import json

    item = weir.Clamp(torch.ones(D), [1], min=-1.0, positions={"token_ids": [4]})
    text = json.dumps(RequestSpec((), (item,)).to_json())
    assert RequestSpec.parse(text).interventions[0].to_json() == item.to_json()


def test_rows_by_position_need_positions_known_beforehand():
    for item in (
        weir.Add(torch.ones(2, D), positions={"token_ids": [1]}),
        weir.Replace(torch.ones(2, D), positions={"token_ids": [1]}),
    ):
        with pytest.raises(weir.WeirError, match="positions"):
            item.lower(D, unknown_reference)


def test_a_token_selector_beside_rows_by_position_waits_for_the_token():
    """Generated tokens are on the device only, so the plan must leave the choice to a lookup."""
    bench = Bench()
    bench.join(
        "a",
        [
            weir.Add(torch.ones(3, D), 1, positions="generated"),
            weir.Add(torch.ones(D), 1, positions={"token_ids": [7]}),
        ],
        4,
        [1, 2, 3, 4],
    )
    plan = bench.planner.plan(["a"], [1], [5])
    assert len(plan.lookups) == 1 and plan.lookups[0].tokens.tolist() == [0]
    without, with_it = plan.lookups[0].programs.tolist()
    assert without != with_it and min(without, with_it) >= 0


def test_positions_of_a_planner_are_those_of_the_selector():
    bench = Bench()
    for k, selector in enumerate(["all", "prompt", "generated", [3, -1], "2::2"]):
        bench.join(f"r{k}", [weir.Add(torch.ones(D) * (k + 1), 1, positions=selector)], 6)
        programs = bench.programs([f"r{k}"], [10], [0])
        assert (programs >= 0).tolist() == Positions.parse(selector).mask(np.arange(10), 6).tolist()


def test_rows_by_position_of_two_moves_do_not_take_each_other_s_program():
    """At 1 only the first move acts and at 2 only the second, each with the same rank and the same selectors around."""
    x, y, nothing = torch.ones(D), 2 * torch.eye(D)[0], torch.zeros(D)
    first = weir.Add(torch.stack([x, x, nothing, x]), 1, positions=[0, 1, 2, 3])
    second = weir.Add(torch.stack([nothing, y, y]), 1, positions=[1, 2, 3])
    bench = Bench()
    bench.join("r", [first, second], 4)
    h = torch.zeros(4, D)
    got = bench.run(tap_of(Site("resid_post", 1)), bench.programs(["r"], [4], [0]), h, None)
    assert torch.equal(got, torch.stack([x, x, y, x + y]))
    bench.planner.remove("r")
    assert not any(bench.table.usage().values())


def test_a_pipeline_stage_vouches_for_its_own_moves_only():
    bench = Bench()
    bench.table = ProgramTable(Sizes(16, 16, 64), TAPS, range(7), D)
    bench.planner.steerer.table = bench.table
    bench.join("r", [weir.Add(torch.ones(D), 0), weir.Add(torch.ones(D), 2)], 3)
    ((number, position, count, stride),) = bench.planner.plan(["r"], [3], [0]).steered[REPLY].tolist()
    assert (position, count, stride) == (0, 3, 1)
    (group,) = bench.planner.strands.news[REPLY].groups
    assert (group.group, group.request_id, group.moves) == (number, "r", [0])


def test_a_rank_that_vouches_for_nothing_steers_all_the_same():
    """In the step that is planned by itself, in the first one with everybody's, and in its repetitions."""
    told, silent = Bench(), Bench()
    silent.planner.steerer.vouches = False
    for bench in (told, silent):
        bench.join("r", [weir.Add(torch.ones(D), 0)], 3)
    for count, at in ((3, 0), (1, 3), (1, 4), (1, 5)):
        plans = [bench.planner.plan(["r"], [count], [at]) for bench in (told, silent)]
        assert plans[0].programs.tolist() == plans[1].programs.tolist() == [0] * count
        assert plans[0].steered and not plans[1].steered
