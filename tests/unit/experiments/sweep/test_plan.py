"""`SweepPlan`: every cell has one key and one job, and plans that differ have other hashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.experiments.sweep.plan import BASE_RUN, SOURCE_RUN, Pair, Place, Receiver, SweepPlan, token_labels
from vllm_weir.experiments.sweep.result import Sweep
from vllm_weir.schema.hooks import Site


@st.composite
def plans(draw: Any) -> SweepPlan:
    hooks = draw(st.lists(st.sampled_from(["q", "z", "v"]), min_size=1, max_size=3, unique=True))
    layers = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    heads = draw(st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple))
    count, pairs = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    place = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True).map(lambda at: tuple(sorted(at)))
    places = tuple(tuple(Place(at, at) for at in (draw(place) for _ in range(count))) for _ in range(pairs))
    prompts = tuple(Pair(tuple(range(k, k + 8)), tuple(range(k + 1, k + 9))) for k in range(pairs))
    mode = draw(st.sampled_from(["denoise", "noise"]))
    return SweepPlan(prompts, tuple(hooks), tuple(layers), tuple(range(count)), places, heads, mode, num_layers=6)


@given(plans())
def test_every_key_has_one_job(plan: SweepPlan) -> None:
    keys = [plan.run_key(pair, run) for pair in range(len(plan.pairs)) for run in (SOURCE_RUN, BASE_RUN)]
    keys += [job.key for pair in range(len(plan.pairs)) for job in plan.jobs(pair)]
    assert sorted(keys) == list(range(plan.keys))


@given(plans())
def test_numbers_come_to_their_cells(plan: SweepPlan) -> None:
    """Each job's number is a code of what it patches; the grid has it where its labels say so."""

    def code(pair: int, site: Site, place: Place, head: int | None) -> float:
        return hash((pair, site, place, head)) % 10**9

    values: dict[int, float] = {}
    for pair in range(len(plan.pairs)):
        values |= {plan.run_key(pair, SOURCE_RUN): 3.0 + pair, plan.run_key(pair, BASE_RUN): 1.0}
        values |= {job.key: 1.5 if job.own else code(pair, job.site, job.place, job.head) for job in plan.jobs(pair)}
    found = Sweep.of(plan, values, "metric", tuple(map(str, plan.labels)))
    for pair in range(len(plan.pairs)):
        for hook in plan.hooks:
            for layer in plan.layers:
                for p in plan.labels:
                    for head in plan.heads or (None,):
                        labels = {} if head is None else {"head": head}
                        cell = found.by_pair.sel(pair=pair, hook=hook, layer=layer, position=p, **labels)
                        assert cell == code(pair, Site(hook, layer), plan.places[pair][int(p)], head)
    assert found.noise_floor == 0.5
    ends = (3.0 + (len(plan.pairs) - 1) / 2, 1.0)
    assert found.baseline == (ends if plan.mode == "denoise" else ends[::-1])
    assert np.allclose(found.normalised.array, (found.grid.array - 1.0) / (ends[0] - 1.0))


@given(plans())
def test_neighbouring_jobs_share_their_start(plan: SweepPlan) -> None:
    """Those of one place are together, and places that start later come first."""
    for pair in range(len(plan.pairs)):
        starts = [job.place.base[0] for job in plan.jobs(pair) if not job.own]
        assert starts == sorted(starts, reverse=True)


@given(plans(), plans())
def test_hashes(one: SweepPlan, other: SweepPlan) -> None:
    assert (one.digest("w") == other.digest("w")) == (one == other)


def test_all_that_matters_is_in_the_hash() -> None:
    place = Place((1,), (1,))
    plan = SweepPlan((Pair((1, 2), (3, 4)),), ("z",), (0, 1), (1,), ((place,),), None, num_layers=4)
    to = Receiver(Site("q", 3))
    changed = [
        replace(plan, pairs=(Pair((1, 2), (3, 5)),)), replace(plan, hooks=("q",)), replace(plan, layers=(0, 2)),
        replace(plan, labels=("1:2",)), replace(plan, places=((Place((0,), (0,)),),)), replace(plan, heads=(0,)),
        replace(plan, mode="noise"), replace(plan, to=to), replace(plan, to=replace(to, heads=(1,))),
        replace(plan, freeze=("mlp_out",)), replace(plan, num_layers=5), replace(plan, about=["other"]),
    ]  # fmt: skip
    assert len({p.digest("w") for p in [plan, *changed]} | {plan.digest("other")}) == 2 + len(changed)


def test_labels_have_tokens() -> None:
    places = [Place((0,), (0,)), Place((1, 2), (1, 2)), Place((2,), (2,))]
    assert token_labels([0, "1:3", -1], places, ["The", " cat", " sat"]) == ("0 The", "1:3", "-1 sat")
