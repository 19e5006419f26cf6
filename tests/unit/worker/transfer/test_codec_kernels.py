"""The affine code's kernel, run by Triton's interpreter: the bytes that the plain codec packs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The interpreter is chosen when a kernel is defined, so in a process of its own.
CASES = """
import torch
from vllm_weir import codec
from vllm_weir.schema.compression import Compression
from vllm_weir.worker.transfer.codec_kernels import pack

torch.manual_seed(0)
inf, nan = float("inf"), float("nan")
tried = 0
for k in (4, 32, 64, 100, 512):
    for addends in (1, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if k in (4, 100) else (torch.float32,):
            rows = torch.randn(40, addends * k) * torch.logspace(-30, 30, 40)[:, None]
            rows[0], rows[1] = 0, 2.5
            for row, value in enumerate((nan, inf, -inf, 1.6e38, -1.6e38), start=2):
                rows[row, k - 1] = value
            rows[7] = (torch.arange(addends * k) % k) * 0.5  # many halves between two codes
            rows = rows.to(dtype) + 0.0  # which of two zeros is the smallest is open
            sums = rows.float().view(40, addends, k).sum(1)
            assert torch.equal(pack(rows, k), codec.encode(sums, Compression("full8"))), (k, addends, dtype)
            tried += 1
assert pack(torch.zeros(0, 8), 4).shape == (0, 12)
for wrong in ((torch.zeros(2, 6), 3), (torch.zeros(2, 6), 4), (torch.zeros(8, 2).T, 4)):
    try:
        pack(*wrong)
    except ValueError as e:
        assert "multiple of 4" in str(e)
        tried += 1
print("packed", tried)
"""


def test_bytes_are_the_plain_codec_s():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "packed 21\n", done.stderr[-3000:]


PROJECTIONS = """
import numpy
import torch
from vllm_weir import codec
from vllm_weir.schema.compression import Compression
from vllm_weir.worker.transfer.codec_kernels import PROJECTED, project

# The interpreter's products are the BLAS's, which may sum in an order that depends on the shape (a GPU's do not); in
# float64 sums of halves' products are exact.
multiply = numpy.matmul
numpy.matmul = lambda a, b, dtype: multiply(a.astype(numpy.float64), b.astype(numpy.float64)).astype(dtype)

torch.manual_seed(0)
for d, some in ((100, (32, 64)), (512, (128,)), (1200, (32, 128))):
    for k in (k for k in PROJECTED if k in some):
        matrix = codec.projection(3, k, d)
        high = matrix.half()  # the interpreter multiplies no bfloat16
        halves = torch.cat([high, (matrix - high.float()).half()])
        rows = torch.randn(37, d).half()
        rows[3, 5], rows[4, 7], rows[5] = float("nan"), float("inf"), 0
        compression = Compression.parse({"method": "rp8", "k": k, "seed": 3}, "compress")
        header = compression.header(d, "float16")
        sums = rows.double() @ matrix.double().T
        ways = ((None,), *((spread, (n, 2, 4)) for spread in (True, False) for n in (16, 32, 64)))
        found = {way: project(rows, halves, *way) for way in ways}
        for records in found.values():
            assert records.equal(found[ways[0]]), "a row's record depends on how it is made"
        got = codec.project(found[ways[0]], header)
        assert got[3:5].isnan().all() and not got[5].any()
        sound = [i for i in range(37) if i not in (3, 4)]
        step = (sums.amax(1) - sums.amin(1))[sound] / 255
        far = ((got - sums)[sound].abs().amax(1) / step.clamp(min=1e-9)).max()
        assert far <= 0.51, (d, k, far)
        alone = project(rows[7:8].contiguous(), halves)
        assert alone.equal(found[ways[0]][7:8]), "a row's record depends on the rows beside it"
assert project(rows[:0], halves).shape == (0, 8 + k)
for wrong in ((rows, halves[:-2]), (rows[:, 1:].contiguous(), halves), (rows.T.contiguous().T, halves)):
    try:
        project(*wrong)
    except ValueError as e:
        print(str(e)[:13])
"""


def test_projected_and_packed_in_one():
    """The records of rp8, within half a step of the exact projection; whatever rows and programs are beside."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROJECTIONS], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "no projection\n" * 3, done.stderr[-3000:]
