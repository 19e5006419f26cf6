"""The codecs' kernels in Triton's interpreter: the bytes that the plain codec packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.unit.interpreted import interpreted
from vllm_weir import codec
from vllm_weir.schema.compression import Compression
from vllm_weir.worker.transfer import codec_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy about NaN
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def in_the_interpreter():
    with interpreted(codec_kernels):
        yield


@pytest.mark.parametrize("addends", [1, 2])
@pytest.mark.parametrize("k", [4, 32, 64, 100, 512])
def test_bytes_are_the_plain_codec_s(k, addends):
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if k in (4, 100) else (torch.float32,):
        rows = torch.randn(40, addends * k, generator=draw) * torch.logspace(-30, 30, 40)[:, None]
        rows[0], rows[1] = 0, 2.5
        for row, value in enumerate((NAN, INF, -INF, 1.6e38, -1.6e38), start=2):
            rows[row, k - 1] = value
        rows[7] = (torch.arange(addends * k) % k) * 0.5  # many halves between two codes
        rows = rows.to(dtype) + 0.0  # which of two zeros is the smallest is open
        sums = rows.float().view(40, addends, k).sum(1)
        assert torch.equal(codec_kernels.pack(rows, k), codec.encode(sums, Compression("full8"))), dtype


def test_rows_that_are_no_multiple_of_4_are_refused():
    assert codec_kernels.pack(torch.zeros(0, 8), 4).shape == (0, 12)
    for wrong in ((torch.zeros(2, 6), 3), (torch.zeros(2, 6), 4), (torch.zeros(8, 2).T, 4)):
        with pytest.raises(ValueError, match="multiple of 4"):
            codec_kernels.pack(*wrong)


@pytest.mark.parametrize(
    ("d", "k"),
    [
        (100, 32),
        (512, 128),
        *(pytest.param(d, k, marks=pytest.mark.thorough) for d, k in ((100, 64), (1200, 32), (1200, 128))),
    ],
)
def test_projected_and_packed_in_one(d, k, monkeypatch):
    """The records of rp8, within half a step of the exact projection; whatever rows and programs are beside."""
    # The interpreter's products are the BLAS's, which may sum in an order that depends on the shape (a GPU's do not);
    # in float64 sums of halves' products are exact.
    multiply = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: multiply(a.astype("f8"), b.astype("f8")).astype(dtype))
    matrix = codec.projection(3, k, d)
    high = matrix.half()  # the interpreter multiplies no bfloat16
    halves = torch.cat([high, (matrix - high.float()).half()])
    rows = torch.randn(37, d, generator=torch.Generator().manual_seed(0)).half()
    rows[3, 5], rows[4, 7], rows[5] = NAN, INF, 0
    records = codec_kernels.project(rows, halves)
    for spread in (True, False):
        for n in (16, 32, 64):
            assert codec_kernels.project(rows, halves, spread, (n, 2, 4)).equal(records), "it depends on how it is made"
    alone = codec_kernels.project(rows[7:8].contiguous(), halves)
    assert alone.equal(records[7:8]), "a row's record depends on the rows beside it"
    got = codec.project(records, Compression.parse({"method": "rp8", "k": k, "seed": 3}).header(d, "float16"))
    assert got[3:5].isnan().all() and not got[5].any()
    sums = rows.double() @ matrix.double().T
    sound = [i for i in range(37) if i not in (3, 4)]
    step = (sums.amax(1) - sums.amin(1))[sound] / 255
    assert ((got - sums)[sound].abs().amax(1) / step.clamp(min=1e-9)).max() <= 0.51


def test_what_has_no_projection_is_refused():
    rows, halves = torch.zeros(37, 1200).half(), torch.zeros(256, 1200).half()
    assert codec_kernels.project(rows[:0], halves).shape == (0, 8 + 128)
    for wrong in ((rows, halves[:-2]), (rows[:, 1:].contiguous(), halves), (rows.T.contiguous().T, halves)):
        with pytest.raises(ValueError, match="no projection"):
            codec_kernels.project(*wrong)
