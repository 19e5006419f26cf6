"""The kernels of CUDA's taps in Triton's interpreter, against the CPU's: what is recorded, written, reduced, peeked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.unit.interpreted import compile_for_hopper, interpreted
from vllm_weir.schema import instructions as kinds
from vllm_weir.schema.rows import GROUP, MAXIMUM, SEEDED
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.planning.columns import JOIN, as_integers
from vllm_weir.worker.steering.programs import AFTER_POST, CELL_BIT, LAST
from vllm_weir.worker.tap import cpu_kernel, peek_kernel, reduction_kernel, reductions, triton_kernel
from vllm_weir.worker.tap.op import numbered
from vllm_weir.worker.transfer import direction_kernel

TAPS, PROFILES, PROGRAMS, VECTORS = 3, 3, 6, 5
KINDS = (
    kinds.CONST,
    kinds.NORM,
    kinds.AFFINE,
    kinds.CLAMP,
    kinds.BLEND,
    kinds.KEEP_NORM,
    kinds.FEATURE,
    kinds.SCORE,
    kinds.ACTIVATE,
    kinds.HELD,
    kinds.ENCODE,
    kinds.HOOK,
)
WRITES = (kinds.SCORE, kinds.ACTIVATE, kinds.DOSE, kinds.ENCODE)
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""A few units in the last place: sums over a row are taken in another order."""


def programs(draw, d, width, plain=False):
    """Chains of one to four instructions; a group ends with LAST, and those after the post stage come last.

    Half of the instructions act on all columns. A vector has as many table rows as a row has ring rows.
    Cells 1 and 2 of a token hold factors, and scores, activations and doses are written into 3 to 5; `plain`: no
    node has a cell.
    """
    times = -(-width // d)
    heads, ints, floats = np.full((PROGRAMS, TAPS), -1, np.int32), [], []
    for at in np.ndindex(*heads.shape):
        length = int(draw.integers(0, 5))
        post = int(draw.integers(0, length + 1))
        for k in range(length):
            kind = KINDS[draw.integers(KINDS.index(kinds.SCORE) if plain else len(KINDS))]
            w = (
                times * int(draw.integers(VECTORS))
                if kind in (kinds.AFFINE, kinds.CLAMP, kinds.FEATURE, kinds.SCORE, kinds.ACTIVATE)
                else -1
            )
            lo, hi, shift = 0, width, 0
            if draw.random() < 0.5:
                lo, hi = sorted(draw.choice(width + 1, 2, replace=False).tolist())
                shift = int(draw.integers(-lo, width - hi + 1))
            if kind == kinds.SCORE and k % 2:
                kind, w = kinds.DOSE, -1
            ends = k in (length - 1, post - 1) or draw.random() < 0.4
            flags = (LAST if ends else 0) | (AFTER_POST if k >= post else 0)
            flags |= 0 if plain else int(draw.integers(3, 6) if kind in WRITES else draw.integers(0, 3)) << CELL_BIT
            if k == 0:
                heads[at] = len(ints)
            u = -1 if kind in (*WRITES, kinds.HOOK) else times * int(draw.integers(VECTORS))
            ints.append((kind, u, w, len(ints) + 1 if k < length - 1 else -1, flags, lo, hi, shift))
            # The cell that it reads, or the place of its row among those that are held.
            low = (
                float(draw.integers({kinds.HELD: 5, kinds.HOOK: 2}[kind])) if kind in (kinds.HELD, kinds.HOOK) else -0.5
            )
            floats.append((draw.normal(), draw.normal(), low, 0.5))
    vectors = draw.standard_normal((VECTORS * times, d)) / width**0.5
    integers = (torch.from_numpy(np.asarray(x, np.int32)) for x in (heads, ints))
    return *integers, *(torch.from_numpy(np.asarray(x, np.float32)) for x in (floats, vectors))


def chain_of(tables, node):
    """Return the nodes (number, kind, cell, whether an intervention begins there) of a chain."""
    found, after_last = [], True
    while node >= 0:
        kind, _, _, following, flags, *_ = tables[1][node].tolist()
        found.append((node, kind, flags >> CELL_BIT, after_last))
        node, after_last = following, bool(flags & LAST)
    return found


def random_plan(draw, tokens, times, words, reduces):
    """Return a step's plan, its ranks, and how many rows of the ring hold groups, and all; `reduces`: some are."""
    ranks = np.full((PROFILES, TAPS * STAGES), -1, np.int32)
    for profile in range(PROFILES):
        columns = np.flatnonzero(draw.random(TAPS * STAGES) < 0.5)
        ranks[profile, columns] = times * np.arange(len(columns))
    rows_of = times * (ranks >= 0).sum(1)
    plan, row = np.full((tokens + 2, 4), [-1, -1, -1, 0], np.int32), 0
    first = int(draw.integers(tokens))
    while reduces and first < tokens:
        end, profile = int(draw.integers(first, tokens)) + 1, int(draw.integers(PROFILES))
        members = [first, *(t for t in range(first + 1, end - 1) if draw.random() < 0.6), end - 1]
        plan[members, :2], plan[members, 3] = (row, profile), -1
        plan[first, 3] = end - first + MAXIMUM * draw.integers(2) + SEEDED * draw.integers(2)
        row += words * int(rows_of[profile])
        first = end + int(draw.integers(2))
    cells = row
    for token in range(tokens):
        if plan[token, 0] < 0 and draw.random() < 0.7:
            plan[token, :2] = row, draw.integers(PROFILES)
            row += int(rows_of[plan[token, 1]])
        plan[token, 2] = draw.integers(-1, PROGRAMS)
    return torch.from_numpy(plan), torch.from_numpy(ranks), cells, row


def assert_close(got, want, dtype):
    if not len(want):
        return
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1)
    assert got.dtype == want.dtype and error <= BOUNDS[dtype], float(error)


def check_seed(seed, seen):
    """One step of random requests through three taps, by both kernels; counts in `seen` what it came to."""
    draw = np.random.default_rng(seed)
    dtype = [*BOUNDS][seed % 3]
    tokens, d = int(draw.integers(1, 6)), int(draw.integers(1, 12))
    most = d + 1 if seed % 5 == 3 else 25
    width, around = (int(draw.integers(1, most)), draw.integers(0, 3, 2).tolist()) if seed % 5 > 2 else (d, (0, 0))
    times, words = -(-width // d), 4 // dtype.itemsize
    plan, ranks, cells, rows = random_plan(draw, tokens, times, words, seed % 2)
    plain = seed % 4 == 2
    tables = programs(draw, d, width, plain)
    smaller = {"groups": False} if seed % 2 == 0 else {}
    form = ("alone", "residual", "offset")[seed // 3 % 3]
    scale = 1.0 if form == "offset" else float(draw.choice([1.0, 0.22, 3.0]))
    ratio = float(draw.choice([1.0, 0.7])) if form == "residual" else 1.0
    seen.update(wide=times > 1, narrow=width < d)
    own, program = slice(around[0], around[0] + width), plan[:tokens, 2].numpy()
    held = torch.from_numpy(draw.standard_normal((tokens, 2, width))).float()
    for tap in range(TAPS):
        hidden = torch.from_numpy(draw.standard_normal((tokens, sum(around) + width))).to(dtype)
        other = None if form == "alone" else torch.from_numpy(draw.standard_normal((tokens, width))).to(dtype)
        if form == "offset":
            other = other[:1].clone().expand(tokens, width)
        ring = torch.full((rows + words, d), 7.0, dtype=dtype)
        sums = torch.from_numpy(draw.standard_normal((cells // words, d))).float()
        ring[:cells].view(-1).view(torch.float32)[:] = sums.view(-1)
        number = numbered(tap, scale, scale * ratio, form == "offset")
        numbers = torch.from_numpy(draw.choice([0.0, 1.0, 0.5], (tokens, 5))).float()
        starts = np.where(program >= 0, tables[0].numpy()[program, tap], -1).astype(np.int64)
        chains = [chain_of(tables, start) for start in starts.tolist()]
        at = np.flatnonzero(starts >= 0)
        begins = [[node for node, *_, begin in chains[k] if begin] for k in at]
        stops = np.array([some[draw.integers(len(some))] for some in begins], np.int64)
        if len(at):
            chosen = hidden[:, own], other, number, at, starts[at], stops, *tables[1:]
            got, want = (kernel.rows_at(*chosen, numbers.clone(), held) for kernel in (peek_kernel, cpu_kernel))
            assert_close(got, want, dtype)
            seen["peeked"] += int((want != hidden[at][:, own]).any(1).sum())
        for place in range(2):
            step = hidden[:, own], other, number, plan, tables[0], *tables[1:]
            (got, nodes), (want, wanted) = (
                kernel.rows_at_hook(*step, numbers.clone(), held, place) for kernel in (peek_kernel, cpu_kernel)
            )
            assert torch.equal(nodes, wanted)
            assert_close(got[nodes >= 0], want[nodes >= 0], dtype)
            seen["found"] += int((nodes >= 0).sum())
        for stage in range(STAGES - 1):
            read = [numbers.clone() for _ in "ab"]
            for kernel, into in zip((peek_kernel, cpu_kernel), read, strict=True):
                kernel.read_early(*step, into, held, stage)
            assert_close(*read, dtype)
            seen[f"read at stage {stage}"] += int((read[1] != numbers).sum())
        given = hidden, None if form == "alone" else other, ring, numbers
        ours, theirs = (
            [x if x is None or (x is other and form == "offset") else x.clone() for x in given] for _ in "ab"
        )
        acts = (plan[:tokens, 2] >= 0) | ((plan[:tokens, 0] >= 0) & (plan[:tokens, 3] >= 0))
        listed = acts.nonzero()[:, 0].int().flip(0) if seed % 4 > 1 else None
        for kernel, (h, o, r, n), more in (
            (triton_kernel, ours, {"listed": listed} | smaller),
            (cpu_kernel, theirs, {}),
        ):
            kernel.launch(h[:, own], o, number, plan, ranks, r, *tables, *([] if plain else [n]), held=held, **more)
        for got, want in zip(ours, theirs, strict=True):
            if want is None:
                continue
            if want is theirs[2] and cells:
                got, want = (x[:cells].reshape(-1).view(torch.float32) for x in (got, want))
                assert torch.allclose(got, want, rtol=BOUNDS[dtype], atol=10 * BOUNDS[dtype])
                seen["folded"] += int((got.view(-1, d) != sums).any(1).sum())
                got, want = (x[cells:] for x in (ours[2], theirs[2]))
            assert_close(got, want, dtype)
        still = []
        for token, chain in enumerate(chains):
            writes = [k for _, k, cell, _ in chain if k not in WRITES and (not cell or numbers[token, cell - 1] != 0)]
            still += [] if writes else [token]
            seen["kept"] += bool(chain) and not writes
        assert torch.equal(ours[0][still], hidden[still]), "neighbours are bit-identical"
        seen["scored"] += int((ours[3] != numbers).sum())
        seen["recorded"] += int((ours[2][cells:] != 7).any(1).sum())
        seen["steered"] += tokens - len(still)
    for kind, name in ((kinds.KEEP_NORM, "turned"), (kinds.DOSE, "measured")):
        seen[name] += int((tables[1][:, 0] == kind).sum())


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 60), marks=pytest.mark.thorough)])
def test_the_kernel_does_what_the_cpu_s_tap_does(seeds):
    seen: Counter[str] = Counter()
    with interpreted(triton_kernel, peek_kernel):
        for seed in seeds:
            check_seed(seed, seen)
    few = {name: seen[name] for name in ("wide", "narrow", "kept") if seen[name] < len(seeds) / 12}
    many = ("recorded", "steered", "turned", "folded", "scored", "measured", "peeked", "found", "read at stage 1")
    assert seen["read at stage 0"]
    assert not few | {name: seen[name] for name in many if seen[name] < len(seeds) / 3}, "the cases say little"


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_joined_as_on_a_cpu(seed):
    draw = np.random.default_rng(seed)
    n, d = int(draw.integers(1, 5)), int(draw.integers(1, 12))
    work, cell, kept = np.zeros(n, JOIN), 0, 0
    for k in range(n):
        groups, columns = (int(x) for x in draw.integers(1, 5, 2))
        resumed, done = int(draw.integers(3)), int(draw.integers(2))
        place, kept = kept, kept + 2 * columns
        work[k] = (
            cell, groups, columns, resumed, draw.integers(1, 90), done, draw.integers(2), place if resumed else -1,
            -1 if done else place,
        )  # fmt: skip
        cell += groups * columns
    tables = [torch.from_numpy(draw.standard_normal((size, d))).float() for size in (cell, kept)]
    ours, theirs = ([x.clone() for x in tables] for _ in range(2))
    with interpreted(reduction_kernel):
        reduction_kernel.join(torch.from_numpy(as_integers(work)), int(work["columns"].max()), *ours)
    reductions._join(work, *theirs)
    done = [slice(a, a + c) for a, _, c, _, _, over, *_ in work.tolist() if over]
    assert all(torch.equal(ours[0][at], theirs[0][at]) for at in done) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("seed", range(6))
def test_products_with_directions(seed):
    draw = torch.Generator().manual_seed(seed)
    n, m, d = (int(torch.randint(1, most, (), generator=draw)) for most in (70, 12, 150))
    rows, matrix = torch.randn(n, d, generator=draw), torch.randn(m, d, generator=draw)
    with interpreted(direction_kernel):
        got = direction_kernel.products(rows, matrix)
    want, terms = rows.double() @ matrix.double().T, rows.double().abs() @ matrix.double().abs().T
    assert got.shape == want.shape and ((got - want).abs() <= d * 2**-24 * terms).all()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_kernels_compile_for_hopper(dtype):
    types = dict.fromkeys(("hidden", "other", "ring", "out"), f"*{dtype}")
    types |= dict.fromkeys(("floats", "vectors", "cells", "held"), "*fp32")
    types |= dict.fromkeys(("tap", "plan", "ranks", "heads", "ints", "listed", "places"), "*i32")
    constants = {"HAS_OTHER": True, "BLOCK": 1024}
    assert compile_for_hopper(peek_kernel._peek, types, constants, num_warps=4)
    assert compile_for_hopper(peek_kernel._peek_hook, types | {"nodes": "*i32"}, constants, num_warps=4)
    for stage in range(STAGES - 1):
        assert compile_for_hopper(peek_kernel._read_early, types, constants | {"STAGE": stage}, num_warps=4)
    constants |= {"STAGES": STAGES, "GROUP": GROUP, "LISTED": False, "AHEAD": True}
    for cells, groups in ((True, True), (True, False), (False, False)):
        constants |= {"CELLS": cells, "GROUPS": groups}
        assert compile_for_hopper(triton_kernel._tap, types, constants, num_warps=4, maxnreg=96)
