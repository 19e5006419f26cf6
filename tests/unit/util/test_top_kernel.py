"""The kernel that finds the largest values on CUDA, run by Triton's interpreter: what sorting finds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The interpreter is chosen when a kernel is defined, so in a process of its own.
CASES = """
import math
import torch
from vllm_weir.util import top_kernel
from vllm_weir.util.top import Rectifier, _sorted

source, fp32, bf16 = torch.Generator().manual_seed(0), torch.float32, torch.bfloat16
shapes = ((1, 1, 1), (3, 16, 5), (2, 17, 17), (3, 300, 7), (0, 40, 3))
cases = [(64, *shape, kind, fp32) for shape in shapes for kind in (2, 0)]
cases += [(256, 3, 300, 7, 2, fp32), (256, 3, 300, 7, 0, bf16), (64, 3, 300, 7, 0, bf16), (64, 2, 17, 17, 2, bf16)]
for chunk, n, m, k, kind, dtype in cases:
    top_kernel.TILE = chunk
    values = torch.randn(n, m, generator=source)
    if kind:
        values = torch.randint(kind, (n, m), generator=source).float() - kind // 2
    rows = values.to(dtype)
    wide = torch.cat([rows, rows.new_full((n, 5), 1e9)], 1)[:, :m]  # a row does not follow the last one
    ids, found, sums = top_kernel.largest(wide, k, sums=True)
    wanted_ids, wanted = _sorted(rows.float(), k)
    assert torch.equal(ids.long(), wanted_ids) and torch.equal(found, wanted), (chunk, n, m, k, kind, dtype)
    torch.testing.assert_close(sums, rows.float().logsumexp(1), rtol=1e-6, atol=1e-5)

top_kernel.TILE = 64
odd = torch.zeros(1, 90)
odd[0, 89], odd[0, 7], odd[0, 3] = math.nan, math.inf, -0.0
odd[0, 16:80] = -math.inf
ids, found, _ = top_kernel.largest(odd, 5)
assert ids.tolist() == [[89, 7, 0, 1, 2]], ids
assert math.isnan(found[0, 0]) and found[0, 1:].tolist() == [math.inf, 0.0, 0.0, 0.0]
odd[0, 89] = -odd[0, 89]  # a NaN with a sign, as a CPU makes them
assert top_kernel.largest(odd, 2)[0].tolist() == _sorted(odd, 2)[0].tolist() == [[89, 7]]
masked = torch.full((1, 50), -math.inf)
masked[0, 4] = 2.0
assert top_kernel.largest(masked, 1, sums=True)[2].tolist() == [2.0]

values, bias, thresholds = (torch.randn(shape, generator=source) for shape in ((4, 300), (300,), (300,)))
values[0], values[1, 5], values[2, 7] = -9.0, math.nan, math.inf
for rectifier in (Rectifier(bias), Rectifier(bias, thresholds)):
    for k in (1, 7, 40):
        ids, found, _ = top_kernel.largest(values, k, rectifier=rectifier)
        wanted_ids, wanted = _sorted(rectifier(values), k)
        assert torch.equal(ids.long(), wanted_ids), (k, rectifier)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
print("as sorting")
"""


def test_interpreted_kernel_finds_what_sorting_finds():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", CASES], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "as sorting" in ran.stdout, ran.stderr[-3000:]
