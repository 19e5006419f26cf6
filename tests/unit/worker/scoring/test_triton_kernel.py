"""The CUDA score kernel, run by Triton's interpreter: what the CPU's computes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest

pytest.importorskip("triton")

# The interpreter is chosen when a kernel is defined, so in a process of its own.
CASES = """
from dataclasses import fields, replace
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder
from tests.unit.worker.scoring.tables import random_step
from vllm_weir.worker.scoring import cpu_kernel, triton_kernel

store, load = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_masked_load


def masked_store(self, pointers, value, mask, *more):
    mask.data = mask.data.astype(bool)  # `mask & scalar` is int32 to the interpreter, and then refused
    return store(self, pointers, value, mask, *more)


def masked_load(self, pointers, mask, *more, **kwargs):
    mask.data = mask.data.astype(bool)
    return load(self, pointers, mask, *more, **kwargs)


InterpreterBuilder.create_masked_store, InterpreterBuilder.create_masked_load = masked_store, masked_load
triton_kernel.PROGRAMS = 3
written = kept = 0
for seed in range(40):
    ours = random_step(seed, copies=1 + seed % 4)
    theirs = replace(ours, cells=ours.cells.clone(), states=ours.states.clone())
    before = ours.cells.clone()
    for tap in range(ours.heads.shape[1]):
        triton_kernel.launch(tap, ours)
        cpu_kernel.launch(tap, theirs)
    for name in ("cells", "states"):
        got, want = getattr(ours, name), getattr(theirs, name)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True), (seed, name)
    changed = (ours.cells != before) & ~(ours.cells.isnan() & before.isnan())
    written, kept = written + int(changed.sum()), kept + int((~changed).sum())
print("same", written > 2000, kept > 2000)
"""


def test_the_kernel_computes_what_the_cpu_s_does():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, env=env, timeout=500)
    assert done.stdout == "same True True\n", done.stdout + done.stderr[-3000:]


def test_the_kernel_compiles_for_hopper():
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_weir.worker.scoring.tensors import ScoreTensors
    from vllm_weir.worker.scoring.triton_kernel import _score

    floats = {"vectors", "cells", "decays", "bounds", "biases", "states"}
    types = {entry.name: "*fp32" if entry.name in floats else "*i32" for entry in fields(ScoreTensors)}
    constants = {"BLOCK": 64, "PROGRAMS": 128}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in _score.arg_names}
    places = {(_score.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=_score, signature=signature, constexprs=places)
    assert compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
