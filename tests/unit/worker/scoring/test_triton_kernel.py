"""The CUDA score kernel in Triton's interpreter: what the CPU's computes."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton")

from tests.unit.interpreted import compile_for_hopper, interpreted
from tests.unit.worker.scoring.tables import random_step
from vllm_weir.worker.scoring import cpu_kernel, triton_kernel
from vllm_weir.worker.scoring.tensors import ScoreTensors


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.thorough)])
def test_the_kernel_computes_what_the_cpu_s_does(seeds, monkeypatch):
    monkeypatch.setattr(triton_kernel, "PROGRAMS", 3)
    written = kept = 0
    for seed in seeds:
        ours = random_step(seed, copies=1 + seed % 4)
        theirs = replace(ours, cells=ours.cells.clone(), states=ours.states.clone())
        before = ours.cells.clone()
        with interpreted(triton_kernel):
            for tap, stages in itertools.product(range(ours.heads.shape[1]), (7,) if seed % 2 else (2, 5)):
                triton_kernel.launch(tap, ours, stages)
                cpu_kernel.launch(tap, theirs, stages)
        for name in ("cells", "states"):
            got, want = getattr(ours, name), getattr(theirs, name)
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True), (seed, name)
        changed = (ours.cells != before) & ~(ours.cells.isnan() & before.isnan())
        written, kept = written + int(changed.sum()), kept + int((~changed).sum())
    assert min(written, kept) > 50 * len(seeds)


@pytest.mark.thorough
def test_the_kernel_compiles_for_hopper():
    floats = {"vectors", "cells", "decays", "bounds", "biases", "states"}
    types = {entry.name: "*fp32" if entry.name in floats else "*i32" for entry in fields(ScoreTensors)}
    for stages in (7, 2, 5):
        constants = {"BLOCK": 64, "PROGRAMS": 128, "STAGES": stages}
        assert compile_for_hopper(triton_kernel._score, types, constants, num_warps=1)
