"""The CUDA tap's kernel, run by Triton's interpreter: what the CPU's tap records and writes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The interpreter is chosen when a kernel is defined, so in a process of its own.
CASES = """
import sys
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder
from vllm_weir.schema.instructions import (
    ACTIVATE, AFFINE, BLEND, CLAMP, CONST, DOSE, ENCODE, FEATURE, HELD, KEEP_NORM, NORM, SCORE,
)
from vllm_weir.schema.reductions import MAXIMUM, SEEDED
from vllm_weir.worker.planning.columns import JOIN, as_integers
from vllm_weir.worker.tap import reduction_kernel, reductions
from vllm_weir.worker.transfer import direction_kernel
from vllm_weir.worker.steering.programs import AFTER_POST, CELL_BIT, LAST
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.tap import cpu_kernel, peek_kernel
from vllm_weir.worker.tap.op import numbered
from vllm_weir.worker.tap.triton_kernel import launch

store, load = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_masked_load


def masked_store(self, pointers, value, mask, *more):
    mask.data = mask.data.astype(bool)  # `mask & scalar` is int32 to the interpreter, and then refused
    return store(self, pointers, value, mask, *more)


def masked_load(self, pointers, mask, *more, **kwargs):
    mask.data = mask.data.astype(bool)
    return load(self, pointers, mask, *more, **kwargs)


InterpreterBuilder.create_masked_store, InterpreterBuilder.create_masked_load = masked_store, masked_load
TAPS, PROFILES, PROGRAMS, VECTORS = 3, 3, 6, 5
KINDS = (CONST, NORM, AFFINE, CLAMP, BLEND, KEEP_NORM, FEATURE, SCORE, ACTIVATE, HELD, ENCODE)
WRITES = (SCORE, ACTIVATE, DOSE, ENCODE)
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def programs(draw, d, width):
    '''Chains of one to four instructions; a group ends with LAST, and those after the post stage come last.

    Half of the instructions act on all columns. A vector has as many table rows as a row has ring rows.
    Cells 1 and 2 of a token hold factors, and scores, activations and doses are written into 3 to 5.
    '''
    times = -(-width // d)
    heads, ints, floats = np.full((PROGRAMS, TAPS), -1, np.int32), [], []
    for program in range(PROGRAMS):
        for tap in range(TAPS):
            length = int(draw.integers(0, 5))
            post = int(draw.integers(0, length + 1))
            for k in range(length):
                kind = KINDS[draw.integers(len(KINDS))]
                w = times * int(draw.integers(VECTORS)) if kind in (AFFINE, CLAMP, FEATURE, SCORE, ACTIVATE) else -1
                lo, hi, shift = 0, width, 0
                if draw.random() < 0.5:
                    lo, hi = sorted(draw.choice(width + 1, 2, replace=False).tolist())
                    shift = int(draw.integers(-lo, width - hi + 1))
                if kind == SCORE and k % 2:
                    kind, w = DOSE, -1
                ends = k in (length - 1, post - 1) or draw.random() < 0.4
                flags = (LAST if ends else 0) | (AFTER_POST if k >= post else 0)
                flags |= int(draw.integers(3, 6) if kind in WRITES else draw.integers(0, 3)) << CELL_BIT
                follows = len(ints) + 1 if k < length - 1 else -1
                if k == 0:
                    heads[program, tap] = len(ints)
                u = -1 if kind in WRITES else times * int(draw.integers(VECTORS))
                ints.append((kind, u, w, follows, flags, lo, hi, shift))
                low = float(draw.integers(5)) if kind == HELD else -0.5  # the cell that it reads
                floats.append((draw.normal(), draw.normal(), low, 0.5))
    vectors = draw.standard_normal((VECTORS * times, d)) / width**0.5
    of = lambda x, t: torch.from_numpy(np.asarray(x)).to(t)
    return of(heads, torch.int32), of(ints, torch.int32), of(floats, torch.float32), of(vectors, torch.float32)


def chain_of(tables, node):
    '''The nodes of a chain before which an intervention begins: the first, and those after a LAST.'''
    begins, after_last = [], True
    while node >= 0:
        _, _, _, following, flags, *_ = tables[1][node].tolist()
        begins += [node] * after_last
        node, after_last = following, bool(flags & LAST)
    return begins


def acts_on(tables, program, tap, cells):
    node = int(tables[0][program, tap]) if program >= 0 else -1
    while node >= 0:
        kind, _, _, following, flags, *_ = tables[1][node].tolist()
        cell = flags >> CELL_BIT
        if kind not in WRITES and (not cell or cells[cell - 1] != 0):
            return True
        node = following
    return False


recorded = steered = turned = folded = wide = narrow = scored = kept = measured = peeked = 0
for seed in range(60):
    draw = np.random.default_rng(seed)
    dtype = [*DTYPES][seed % 3]
    tokens, d = int(draw.integers(1, 6)), int(draw.integers(1, 12))
    most = d + 1 if seed % 5 == 3 else 25
    width, around = (int(draw.integers(1, most)), draw.integers(0, 3, 2).tolist()) if seed % 5 > 2 else (d, (0, 0))
    times = -(-width // d)
    wide += times > 1
    narrow += width < d
    ranks = np.full((PROFILES, TAPS * STAGES), -1, np.int32)
    for profile in range(PROFILES):
        columns = np.flatnonzero(draw.random(TAPS * STAGES) < 0.5)
        ranks[profile, columns] = times * np.arange(len(columns))
    plan, row = np.full((tokens + 2, 4), [-1, -1, -1, 0], np.int32), 0
    words = 4 // dtype.itemsize
    first = int(draw.integers(tokens))
    while seed % 2 and first < tokens:  # groups of tokens whose rows are reduced
        end, profile = int(draw.integers(first, tokens)) + 1, int(draw.integers(PROFILES))
        members = [first, *(t for t in range(first + 1, end - 1) if draw.random() < 0.6), end - 1]
        plan[members, :2], plan[members, 3] = (row, profile), -1
        plan[first, 3] = end - first + MAXIMUM * draw.integers(2) + SEEDED * draw.integers(2)
        row += times * words * int((ranks[profile] >= 0).sum())
        first = end + int(draw.integers(2))
    cells = row
    for token in range(tokens):
        if plan[token, 0] < 0 and draw.random() < 0.7:
            plan[token, :2] = row, draw.integers(PROFILES)
            row += times * int((ranks[plan[token, 1]] >= 0).sum())
        plan[token, 2] = draw.integers(-1, PROGRAMS)
    plan, ranks = torch.from_numpy(plan), torch.from_numpy(ranks)
    tables = programs(draw, d, width)
    form = ("alone", "residual", "offset")[seed // 3 % 3]
    scale = float(draw.choice([1.0, 0.22, 3.0]))
    ratio = float(draw.choice([1.0, 0.7])) if form == "residual" else 1.0
    scale = 1.0 if form == "offset" else scale
    for tap in range(TAPS):
        hidden = torch.from_numpy(draw.standard_normal((tokens, sum(around) + width))).to(dtype)
        other = None if form == "alone" else torch.from_numpy(draw.standard_normal((tokens, width))).to(dtype)
        if form == "offset":
            other = other[:1].clone().expand(tokens, width)
        ring = torch.full((row + words, d), 7.0, dtype=dtype)
        sums = torch.from_numpy(draw.standard_normal((cells // words, d))).float()
        ring[:cells].view(-1).view(torch.float32)[:] = sums.view(-1)
        number = numbered(tap, scale, scale * ratio, form == "offset")
        numbers = torch.from_numpy(draw.choice([0.0, 1.0, 0.5], (tokens, 5))).float()
        given = [hidden, other, ring, numbers]
        own = slice(around[0], around[0] + width)
        held = plan[:tokens, 2].numpy()
        starts = np.where(held >= 0, tables[0].numpy()[held, tap], -1).astype(np.int64)
        at = np.flatnonzero(starts >= 0)
        chains = [chain_of(tables, start) for start in starts[at].tolist()]
        stops = np.array([chain[draw.integers(len(chain))] for chain in chains], np.int64)
        if len(at):
            chosen = hidden[:, own], other, number, at, starts[at], stops, *tables[1:]
            got, want = (rows_at(*chosen, numbers.clone()) for rows_at in (peek_kernel.rows_at, cpu_kernel.rows_at))
            error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1)
            assert got.dtype == want.dtype == dtype and error <= DTYPES[dtype], (seed, tap, form, float(error))
            peeked += int((want != hidden[at][:, own]).any(1).sum())
        ours, theirs = ([None if x is None else x.clone() for x in given] for _ in range(2))
        if form == "offset":
            ours[1] = theirs[1] = other
        acts = (plan[:tokens, 2] >= 0) | ((plan[:tokens, 0] >= 0) & (plan[:tokens, 3] >= 0))
        listed = acts.nonzero()[:, 0].int().flip(0) if seed % 4 > 1 else None
        launch(ours[0][:, own], ours[1], number, plan, ranks, ours[2], *tables, ours[3], listed=listed)
        cpu_kernel.launch(theirs[0][:, own], theirs[1], number, plan, ranks, theirs[2], *tables, theirs[3])
        for got, want in zip(ours, theirs):
            if want is None:
                continue
            if want is theirs[2] and cells:
                got, want = (x[:cells].reshape(-1).view(torch.float32) for x in (got, want))
                assert torch.allclose(got, want, rtol=DTYPES[dtype], atol=10 * DTYPES[dtype]), (seed, tap, form)
                folded += int((got.view(-1, d) != sums).any(1).sum())
                got, want = (x[cells:] for x in (ours[2], theirs[2]))
            # Sums over a row are taken in another order.
            error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1)
            assert error <= DTYPES[dtype], (seed, tap, form, dtype, float(error))
        still = [t for t in range(tokens) if not acts_on(tables, int(plan[t, 2]), tap, numbers[t])]
        kept += sum(int(plan[t, 2] >= 0 and tables[0][plan[t, 2], tap] >= 0) for t in still)
        scored += int((ours[3] != numbers).sum())
        assert torch.equal(ours[0][still], hidden[still]), "neighbours are bit-identical"
        recorded += int((ours[2][cells:] != 7).any(1).sum())
        steered += tokens - len(still)
        turned += int((tables[1][:, 0] == KEEP_NORM).sum())
        measured += int((tables[1][:, 0] == DOSE).sum())
for seed in range(20):
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
        )
        cell += groups * columns
    tables = [torch.from_numpy(draw.standard_normal((size, d))).float() for size in (cell, kept)]
    ours, theirs = ([x.clone() for x in tables] for _ in range(2))
    reduction_kernel.join(torch.from_numpy(as_integers(work)), int(work["columns"].max()), *ours)
    reductions._join(work, *theirs)
    done = [slice(a, a + c) for a, _, c, _, _, over, *_ in work.tolist() if over]
    assert all(torch.equal(ours[0][at], theirs[0][at]) for at in done) and torch.equal(ours[1], theirs[1]), seed
for seed in range(12):
    draw = torch.Generator().manual_seed(seed)
    n, m, d = (int(torch.randint(1, most, (), generator=draw)) for most in (70, 12, 150))
    rows, matrix = torch.randn(n, d, generator=draw), torch.randn(m, d, generator=draw)
    got, want = direction_kernel.products(rows, matrix), rows.double() @ matrix.double().T
    assert got.shape == want.shape and (got - want).abs().max() <= 1e-5 * want.abs().max(), seed
counts = (recorded > 300, steered > 200, turned > 300, folded > 50, wide > 9, narrow > 3, scored > 50, kept > 9)
print("same", *counts, measured > 100, peeked > 50)
"""


def test_the_kernel_does_what_the_cpu_s_tap_does():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, env=env, timeout=500)
    assert done.stdout == "same" + " True" * 10 + "\n", done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_kernel_compiles_for_hopper(dtype):
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_weir.schema.reductions import GROUP
    from vllm_weir.schema.taps import STAGES
    from vllm_weir.worker.tap.triton_kernel import _tap

    rows, floats = ("hidden", "other", "ring"), ("floats", "vectors", "cells")
    types = dict.fromkeys(rows, f"*{dtype}") | dict.fromkeys(floats, "*fp32")
    types |= dict.fromkeys(("tap", "plan", "ranks", "heads", "ints", "listed"), "*i32")
    constants = {"HAS_OTHER": True, "STAGES": STAGES, "BLOCK": 1024, "GROUP": GROUP, "LISTED": False, "AHEAD": True}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in _tap.arg_names}
    places = {(_tap.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=_tap, signature=signature, constexprs=places)
    assert compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 96}).asm["cubin"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_that_peeks_compiles_for_hopper(dtype):
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_weir.worker.tap.peek_kernel import _peek

    types = dict.fromkeys(("hidden", "other", "out"), f"*{dtype}")
    types |= dict.fromkeys(("floats", "vectors", "cells"), "*fp32") | dict.fromkeys(("tap", "places", "ints"), "*i32")
    constants = {"HAS_OTHER": True, "BLOCK": 1024}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in _peek.arg_names}
    places = {(_peek.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=_peek, signature=signature, constexprs=places)
    assert compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]
