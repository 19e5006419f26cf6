"""Probes and gates on a worker against the plain reading of their rules, however requests are cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.worker.scoring.bench import Bench, D, Draw, blocks
from tests.unit.worker.scoring.plain_scores import PlainModel


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    made.close()


def expected(asked, prompt_len, token_ids, rows):
    model = PlainModel(blocks(), asked.vectors, asked.moves, asked.probes, asked.gates, prompt_len, token_ids)
    return model.run(rows, list(asked.layout.factors)), model


def check(got, asked, prompt_len, token_ids, rows):
    """Rows, scores and factors are what the rules say; what is not scored is marked."""
    assert not got.failures
    want, model = expected(asked, prompt_len, token_ids, rows)
    found = torch.stack([got.rows[k] for k in range(len(rows))]).double().numpy()
    assert np.abs(found - want).max() <= 2e-5 * max(1, np.abs(want).max())
    gated = [move for move in asked.moves if any(one.cell for one in move.instructions)]
    for position in range(len(rows)):
        asked_there = any(model.selects(one.positions, position) for one in (*asked.probes, *gated))
        if asked_there:
            assert position in got.cells
        if position not in got.cells:
            continue
        cells = got.cells[position]
        for probe, first in zip(model.probes, asked.layout.scores, strict=True):
            mine = cells[first : first + probe.probe.outputs]
            if position in probe.scores:
                assert np.abs(mine - probe.scores[position]).max() <= 2e-5 * max(1, np.abs(mine).max())
            else:
                assert np.isnan(mine).all()
        for g, cell in enumerate(asked.layout.factors):
            assert abs(cells[cell] - model.factors[g][position]) <= 1e-4
    return model


def cut(draw, total, prompt_len):
    """Random chunks of the prompt, and then single tokens."""
    edges = sorted({0, prompt_len, *draw.integers(0, prompt_len + 1, 3).tolist()})
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False)] + [(k, k + 1) for k in range(prompt_len, total)]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_scores_factors_and_rows_are_what_the_rules_say(bench, seed, requests):
    draw = Draw(seed)
    live, token_ids, todo = {}, {}, {}
    for k in range(requests):
        name = f"r{k}"
        prompt_len, total = int(draw.random.integers(1, 9)), int(draw.random.integers(9, 14))
        live[name] = draw.request(), prompt_len, torch.from_numpy(draw.random.standard_normal((total, D))).float()
        token_ids[name] = draw.random.integers(0, 4, total).tolist()
        bench.join(name, live[name][0], token_ids[name][:prompt_len])
        todo[name] = cut(draw.random, total, prompt_len)
    plain = torch.from_numpy(draw.random.standard_normal((2, D))).float()
    token_ids["plain"] = [0] * 100
    bench.got["plain"] = type(bench.got["r0"])()
    steps = 0
    while any(todo.values()):
        names = [name for name in todo if todo[name] and (draw.random.random() < 0.8 or steps > 60)]
        spans = {name: todo[name].pop(0) for name in names}
        batch = {"plain": (2 * steps, plain)} | {name: (a, live[name][2][a:b]) for name, (a, b) in spans.items()}
        alone = plain
        for block in bench.model:
            alone = alone * (0.7 + 0.1 * block.layer) + 0.05 * block.layer
        token_ids["plain"] = [0] * (2 * steps + 2)
        out = bench.step(batch, token_ids)
        assert torch.equal(out[:2], alone), "neighbours are bit-identical"
        steps += 1
    for name, (asked, prompt_len, rows) in live.items():
        check(bench.got[name], asked, prompt_len, token_ids[name], rows)
        bench.leave(name)
    bench.step({"plain": (2 * steps, plain)}, {"plain": [0] * (2 * steps + 2)})
    assert not any(bench.runtime.usage().values())
