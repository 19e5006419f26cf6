"""Random tables of probes and gates, and runs of a step, in memory."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.worker.scoring.bench import LAYERS, D, Draw
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.resolved_probes import Scoring
from vllm_weir.schema.taps import num_taps, tap_of
from vllm_weir.worker.planning.columns import as_integers
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.scoring.probe_table import CONTROLLED, DELAYED, EARLY, FACTOR, FLAGS, STATE, STRIDE, ProbeTable
from vllm_weir.worker.scoring.scorer import RunWriter
from vllm_weir.worker.scoring.tensors import ScoreTensors
from vllm_weir.worker.steering.programs import ProgramTable

SIZES = TableSizes(vectors=400, programs=200, nodes=800, probes=40, gates=40, states=900, cells=40)


def random_step(seed: int, copies: int = 1) -> ScoreTensors:
    """What the score kernels find after the taps of a step of several requests, some of them fresh."""
    draw = Draw(seed)
    taps = [tap_of(Site("resid_post", k)) for k in range(LAYERS)]
    programs = ProgramTable(SIZES, num_taps(LAYERS), taps, D)
    probes = ProbeTable(SIZES, programs, copies)
    planner = Planner(frozenset(), 1, 1, programs, probes=probes)
    names, counts, starts = [], [], []
    for k in range(int(draw.random.integers(1, 6))):
        asked = draw.request(tokens=False)
        scoring = Scoring(asked.probes, asked.gates, asked.spec.steps)
        prompt_len = int(draw.random.integers(1, 6))

        def fetch(digests, asked=asked):
            return {digest: asked.vectors[digest] for digest in digests}

        planner.add_steering(f"r{k}", "reader", asked.moves, prompt_len, None, fetch, scoring=scoring)
        names.append(f"r{k}")
        counts.append(int(draw.random.integers(1, 8)))
        starts.append(int(draw.random.integers(0, 4)))
        planner.steered[f"r{k}"].scored.fresh = bool(draw.random.random() < 0.5)
    plan = planner.plan(names, counts, starts)
    writer = RunWriter(num_taps(LAYERS), SIZES.probes, torch.device("cpu"))
    tokens = sum(counts)
    of_tokens = np.full((tokens, 4), -1, np.int32)
    if plan is not None:
        assert len(as_integers(plan.runs)) == len(plan.runs)
        writer.write(plan.runs)
        of_tokens[:, 2] = plan.programs
    # Counts of scored positions are whole, and windows are full; weights kept of attention are above 0.
    states = np.abs(draw.random.standard_normal(SIZES.states * copies + 1)).astype(np.float32)
    for row in range(len(probes.probes)):
        if probes.probes[row, 0] >= 0:
            for copy in range(copies):
                states[probes.probes[row, STATE] + copy * probes.probes[row, STRIDE]] = draw.random.integers(4, 9)
    states[0] = 0
    for row in np.flatnonzero(probes.gates[:, FACTOR] >= 0).tolist():  # some are decided on by controllers
        probes.gates[row, FLAGS] |= CONTROLLED | EARLY | DELAYED if draw.random.random() < 0.3 else 0
    cells = draw.random.standard_normal((tokens, SIZES.cells)).astype(np.float32)
    return ScoreTensors(
        offsets=writer.offsets,
        runs=writer.runs,
        plan=torch.from_numpy(of_tokens),
        cells=torch.from_numpy(cells),
        states=torch.from_numpy(states),
        positions=torch.from_numpy(np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts)]).astype("i4")),
        copies=copies,
        **{name: torch.from_numpy(getattr(programs, name).copy()) for name in ("heads", "ints", "vectors")},
        **{name: torch.from_numpy(getattr(probes, name).copy()) for name in probes.changed},
    )
