"""Lowered interventions, run by the CPU tap, are what their formulas say."""

from __future__ import annotations

import json

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.check import expected_positions
from tests.support.properties import examples
from tests.support.steered import _apply, of_layer
from tests.unit.request_strategies import served
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.taps import STAGES, num_taps, tap_of
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap import cpu_kernel
from vllm_weir.worker.tap.device_tables import PlanWriter
from vllm_weir.worker.tap.op import numbered

D, LAYERS = 8, 3
TAPS = num_taps(LAYERS)
REPLY = "rows#vectors#token"


FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1000)


def admitted(*items) -> AdmittedRequest:
    """What a request with these interventions is to the engine."""
    return admit({"weir": RequestSpec((), items)}, FACTS)


def move_of(item: weir.Add) -> tuple[ResolvedIntervention | None, dict]:
    """(the move, its rows) of an intervention that does the same at all its layers."""
    found = admitted(item)
    (move,) = found.effective
    return move, found.rows


class Bench:
    """A planner, its tables, and a stream to run the taps on."""

    def __init__(self, vectors: int = 256, programs: int = 256, nodes: int = 2048, *, reports: bool = True) -> None:
        self.table = ProgramTable(TableSizes(vectors, programs, nodes), TAPS, range(TAPS), D)
        self.planner = Planner(frozenset(range(TAPS * STAGES)), TAPS * STAGES, 8, self.table, reports=reports)

    def join(self, name: str, items, prompt_len: int, prompt_ids=None) -> None:
        self.enter(name, admitted(*items), prompt_len, prompt_ids)

    def enter(self, name: str, found: AdmittedRequest, prompt_len: int, prompt_ids=None) -> None:
        for some in found.by_position:
            some.check_rows(prompt_len)
        moves, rows = [ResolvedIntervention.from_wire(m.to_wire()) for m in found.effective], found.rows
        self.planner.add_steering(name, REPLY, moves, prompt_len, prompt_ids, lambda ds: {d: rows[d] for d in ds})

    def programs(self, names, counts, computed) -> np.ndarray:
        plan = self.planner.plan(names, counts, computed)
        return np.full(sum(counts), -1, np.int32) if plan is None else plan.programs

    def run(self, tap: int, programs: np.ndarray, h: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        n = len(h)
        plan = torch.full((n, 4), -1, dtype=torch.int32)
        plan[:, 2] = torch.from_numpy(programs)
        plan[:, 3] = 0  # no rows are reduced
        ranks, ring = torch.full((8, TAPS * STAGES), -1, dtype=torch.int32), torch.zeros(1, D)
        tables = [torch.from_numpy(getattr(self.table, t)) for t in ("heads", "ints", "floats", "vectors")]
        h, residual = h.clone(), None if residual is None else residual.clone()
        cpu_kernel.launch(h, residual, numbered(tap), plan, ranks, ring, *tables)
        return h if residual is None else h + residual


numbers = st.integers(-12, 12).map(lambda n: n / 4)
rows = st.lists(numbers, min_size=D, max_size=D).map(lambda r: torch.tensor(r, dtype=torch.float32))
nonzero = rows.map(lambda r: r if r.any() else torch.eye(D)[0])


def matrix(low: int, high: int, row=rows):
    return st.lists(row, min_size=low, max_size=high).map(torch.stack)


bounds = numbers.flatmap(
    lambda low: st.sampled_from([{"value": low}, {"min": low}, {"max": low}, {"min": low, "max": low + 1}])
)
where = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([0, 1, [0, 2], "all"]),
        "hook": st.sampled_from(STREAM_HOOKS),
        "positions": st.sampled_from(["all", "prompt", "generated", "last_prompt", 2, [0, -1, 5], "1:7:2", "sampled"]),
    }
)


EACH = {3: [[0, -1, 5], "1:7:2", "0:3", [6, 1, 2]], 2: [[4, 0], "-4:-2"], 4: ["0:4", [1, 2, 3, 0], "2:6"]}
"""Selectors of so many positions with prompts of 4 and of 5 tokens."""


@st.composite
def by_layer(draw, layers, *fields):
    """(vectors of each of `fields`, what else the intervention takes): for `layers`, in one of the ways to say so."""
    blocks = list(range(LAYERS)) if layers == "all" else np.atleast_1d(layers).tolist()
    how = draw(st.sampled_from(["same", "mapping", "strings", "stack"]))
    if how == "same":
        return [draw(one) for one in fields], {"layers": layers}
    each = [[draw(one) for _ in blocks] for one in fields]
    if how == "stack":
        given = layers if layers == "all" else draw(st.permutations(blocks))
        return [torch.stack(rows) for rows in each], {"layers": given, "per_layer": True}
    keys = draw(st.permutations(list(map(str, blocks)) if how == "strings" else blocks))
    return [dict(zip(keys, rows, strict=True)) for rows in each], {}


@st.composite
def interventions(draw):
    at = draw(where)
    kind = draw(st.sampled_from(["add", "ablate", "clamp", "replace", "low rank"]))
    layers = at.pop("layers")

    def by_position(row):
        """A row, a row as a matrix, or a row for each position; the same for each layer or not."""
        how = draw(st.sampled_from(["row", "matrix", "positions"]))
        if how == "positions":
            count = draw(st.sampled_from(sorted(EACH)))
            at["positions"] = draw(st.sampled_from(EACH[count]))
            row = matrix(count, count, row)
        return vectors(matrix(1, 1, row) if how == "matrix" else row)

    def vectors(row):
        (value,), more = draw(by_layer(layers, row))
        return value, at | more

    if kind == "add":
        matched = draw(st.booleans())
        value, more = by_position(nonzero if matched else rows)
        return weir.Add(value, scale=draw(numbers), norm_match=matched, keep_norm=draw(st.booleans()), **more)
    if kind == "ablate":
        k = draw(st.integers(1, 3))
        value, more = vectors(matrix(k, k, st.sampled_from(list(torch.eye(D) + 0.5))))
        return weir.Ablate(value, **more)
    if kind == "clamp":
        value, more = vectors(draw(st.sampled_from([nonzero, matrix(1, 1, nonzero)])))
        return weir.Clamp(value, strength=draw(numbers), **draw(bounds), **more)
    if kind == "replace":
        value, more = by_position(rows)
        return weir.Replace(value, alpha=draw(numbers), **more)
    k = draw(st.integers(1, 3))
    bias = st.lists(numbers, min_size=k, max_size=k).map(torch.tensor)
    bias = draw(st.sampled_from([bias, bias.map(lambda b: b[None])]))
    value, more = draw(by_layer(layers, matrix(k, k), matrix(k, k), bias))
    return weir.LowRank(*value, **at | more)


def naive(items, h: torch.Tensor, tap: int, prompt_len: int) -> tuple[torch.Tensor, float]:
    """A tap's stream [n, D] of positions 0 .. n-1: a block's resid_post, then the next one's resid_pre.

    With the largest value that it has had on its way, which the result's last digits are of.
    """
    h, largest = h.clone(), 1.0
    every = np.arange(len(h))
    for hook in ("embed", "attn_out", "resid_mid", "mlp_out", "resid_post", "resid_pre", "final_norm"):
        for item in items:
            layers = item.resolve_layers(LAYERS)
            for layer in (x for x in layers if item.hook == hook and tap == tap_of(Site(hook, x))):
                item = of_layer(item, layer, layers)
                at = np.flatnonzero(item.positions.mask(every, prompt_len))
                if isinstance(item, weir.Ablate):
                    basis = torch.linalg.svd(torch.atleast_2d(torch.tensor(item.directions.array)).double())
                    keep = basis.Vh[: len(basis.S)][1e-5 * basis.S[0] < basis.S]
                    h[at] = (h[at].double() - h[at].double() @ keep.T @ keep).float()
                elif isinstance(item, weir.Add) and item.norm_match and not item.vector.array.any():
                    pass
                else:
                    changed = _apply(item, h[at])
                    if getattr(item, "keep_norm", False):  # the direction of next to nothing is noise
                        object.__setattr__(item, "keep_norm", False)
                        assume((_apply(item, h[at]).norm(dim=1) >= 1e-2 * h[at].norm(dim=1)).all())
                    h[at] = changed
                largest = max(largest, float(h.abs().max()))
    return h, largest


@examples(60)
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
        wanted = [naive(items, part, tap, prompt_len) for items, part in parts]
        for one, (want, largest) in zip(got.split(lengths), wanted, strict=True):
            assert (one - want).abs().max() <= 1e-4 * largest, tap
        unsteered = torch.from_numpy(programs < 0)
        assert torch.equal(got[unsteered], whole[unsteered])


@examples(60)
@given(st.lists(interventions(), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_chunks_get_the_programs_of_the_whole(items, chunks):
    """Programs do the same if the same rows come out bit for bit."""
    whole, parts = Bench(), Bench()
    for bench in (whole, parts):
        bench.join("a", items, 5)
    stream = torch.randn(sum(chunks), D, generator=torch.Generator().manual_seed(1))
    programs, at = whole.programs(["a"], [sum(chunks)], [0]), 0
    for n in chunks:
        rows = stream[at : at + n]
        own = parts.programs(["a"], [n], [at])
        assert torch.equal(parts.run(1, own, rows, None), whole.run(1, programs[at : at + n], rows, None))
        at += n


@given(interventions())
def test_the_wire_keeps_every_intervention(item):
    (back,) = RequestSpec.parse(json.dumps(RequestSpec((), (item,)).to_json())).interventions
    assert type(back) is type(item) and back.to_json() == item.to_json()
    assert len(back.given) == len(item.given)
    assert all(np.array_equal(a.array, b.array) for a, b in zip(back.given, item.given, strict=True))
    a, b = admitted(item), admitted(back)
    assert [one.moves for one in a.interventions] == [
        one.moves for one in b.interventions
    ] and a.rows.keys() == b.rows.keys()
    assert [ResolvedIntervention.from_wire(m.to_wire()) for m in a.effective] == a.effective


def test_a_token_selector_beside_rows_by_position_waits_for_the_token():
    """Generated tokens are on the device only, so the plan must leave the choice to a lookup."""
    bench = Bench()
    rows = weir.Add(torch.ones(3, D), 1, positions=[4, 5, 6])
    bench.join("a", [rows, weir.Add(torch.ones(D), 1, positions={"token_ids": [7]})], 4, [1, 2, 3, 4])
    plan = bench.planner.plan(["a"], [1], [5])
    assert len(plan.programs_by_token) == 1 and plan.programs_by_token[0].tokens.tolist() == [0]
    without, with_it = plan.programs_by_token[0].programs.tolist()
    assert without != with_it and min(without, with_it) >= 0


token_selectors = st.one_of(
    st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 4), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"not_token_ids": st.lists(st.integers(0, 4), max_size=3)}),
)


@given(
    selectors=st.lists(
        st.one_of(token_selectors, token_selectors, where.map(lambda w: w["positions"])), min_size=1, max_size=4
    ),
    ids=st.lists(st.integers(0, 5), min_size=9, max_size=9),
    P=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 3), max_size=4),
)
def test_what_the_device_does_hangs_on_the_token(selectors, ids, P, cuts):
    """Prompts in chunks, then generated tokens, which the plan does not know: each is steered by those interventions
    whose selector takes its position or its token, and by no others."""
    items = [weir.Add(torch.eye(D)[k], 1, positions=at) for k, at in enumerate(selectors)]
    bench, tensor = Bench(), torch.full((8, 4), -1, dtype=torch.int32)
    bench.join("r", items, P, ids[:P])
    writer, at, done = PlanWriter(tensor), 0, []
    while at < len(ids):
        n = min(cuts.pop() if cuts else 2, P - at) if at < P else 1
        plan = bench.planner.plan(["r"], [n], [at])
        if plan is None:
            writer.silence()
        else:
            writer.write(plan, 0, torch.tensor(ids[at : at + n], dtype=torch.int32))
        tap = tap_of(Site("resid_post", 1))
        done.append(bench.run(tap, tensor[:n, 2].numpy(), torch.zeros(n, D), None))
        at += n
    chosen = [expected_positions(s, P, len(ids) - P + 1, ids) for s in selectors]
    wanted = torch.tensor(
        [[float(p in chosen[k]) if k < len(items) else 0.0 for k in range(D)] for p in range(len(ids))]
    )
    assert torch.equal(torch.cat(done), wanted)


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
    bench.table = ProgramTable(TableSizes(16, 16, 64), TAPS, range(tap_of(Site("resid_post", 0)) + 1), D)
    bench.planner.steering_planner.table = bench.table
    bench.join("r", [weir.Add(torch.ones(D), 0), weir.Add(torch.ones(D), 2)], 3)
    ((number, position, count, stride),) = bench.planner.plan(["r"], [3], [0]).steered[REPLY].tolist()
    assert (position, count, stride) == (0, 3, 1)
    (group,) = bench.planner.row_seqs.layout_updates[REPLY].groups
    assert (group.group, group.request_id, group.moves) == (number, "r", [0])


def test_a_rank_that_vouches_for_nothing_steers_all_the_same():
    """In the step that is planned by itself, in the first one with everybody's, and in its repetitions."""
    told, silent = Bench(), Bench(reports=False)
    for bench in (told, silent):
        bench.join("r", [weir.Add(torch.ones(D), 0)], 3)
    for count, at in ((3, 0), (1, 3), (1, 4), (1, 5)):
        plans = [bench.planner.plan(["r"], [count], [at]) for bench in (told, silent)]
        assert plans[0].programs.tolist() == plans[1].programs.tolist() == [0] * count
        assert plans[0].steered and not plans[1].steered
