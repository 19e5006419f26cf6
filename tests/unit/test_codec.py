"""Packed rows: the header, the bounds of every method, and the same result as a plain numpy reading of the header."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.properties import examples
from vllm_weir import codec
from vllm_weir.codec import decode, encode, project, projection
from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import METHODS, Compression, header_bytes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy at the ends of float32
FINITE = st.floats(-3.4028234663852886e38, 3.4028234663852886e38, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=FINITE)


def there_and_back(rows: torch.Tensor, compression: Compression) -> torch.Tensor:
    header = compression.header(rows.shape[-1], str(rows.dtype).removeprefix("torch."))
    records = encode(rows, compression)
    assert records.dtype == torch.uint8
    assert records.shape[-1] == header_bytes(header) == compression.record_bytes(rows.shape[-1], rows.itemsize)
    return decode(records, json.loads(json.dumps(header)))


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """The first of equal magnitudes, which is what a stable sort keeps."""
    return np.sort(np.argsort(-np.abs(x), axis=-1, kind="stable")[:, :k], axis=-1)


@pytest.mark.parametrize("method", ["full8", "topk8"])
@given(x=ROWS, k=st.integers(1, 40))
@examples(80)
def test_codes_are_within_half_a_step_of_every_value(method: str, x: np.ndarray, k: int) -> None:
    """Of those that are kept, which are exactly the largest."""
    k = min(k, x.shape[1]) if method == "topk8" else x.shape[1]
    how = Compression(method, k if method == "topk8" else None)
    got, kept = there_and_back(torch.from_numpy(x), how).numpy(), largest(x, k)
    if method == "topk8":
        indices = encode(torch.from_numpy(x), how)[:, 8 : 8 + 4 * k].numpy().copy().view("<i4")
        assert (indices == kept).all()
    huge = np.abs(x).max(axis=-1) > 1.5e38
    assert np.isnan(got[huge]).all()
    x, got, kept = x[~huge], got[~huge], kept[~huge]
    outside = np.ones_like(x, bool)
    np.put_along_axis(outside, kept, False, axis=-1)
    assert (got[outside] == 0).all()
    exact = np.take_along_axis(x, kept, -1).astype(np.float64)
    step = (exact.max(-1, keepdims=True) - exact.min(-1, keepdims=True)) / 255
    rounding = 4 * np.spacing(np.abs(x).max(axis=-1, keepdims=True)).astype(np.float64)
    error = np.abs(np.take_along_axis(got, kept, -1) - exact)
    assert (error <= step / 2 * (1 + 1e-4) + rounding + 1e-37).all()


@pytest.mark.parametrize("method", METHODS)
@given(value=FINITE)
@examples(25)
def test_constant_rows_are_exact(method: str, value: float) -> None:
    if method == "fp16":
        value = float(np.float16(value)) if abs(value) < 6e4 else 1.0
    x = torch.full((2, 64), value)
    got = there_and_back(x, Compression(method, seed=0))
    if abs(value) > np.float32(1.5e38) and method not in ("none", "rp8"):
        assert got.isnan().all()
    elif method == "rp8":
        pass  # the projection of a constant row is not constant
    elif method == "fp8":
        assert torch.allclose(got, x, rtol=2**-4, atol=1e-37)
    else:
        assert torch.equal(got, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(data=st.data())
@examples(40)
def test_none_and_fp16_are_exact_to_the_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    bits = data.draw(hnp.arrays(np.int16, (3, 8), elements=st.integers(-(2**15), 2**15 - 1)))
    x = torch.from_numpy(bits).view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).to(dtype)
    records = encode(x, Compression())
    assert torch.equal(records.view(torch.uint8), x.contiguous().view(torch.uint8))
    torch.testing.assert_close(there_and_back(x, Compression()), x.float(), equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(
        there_and_back(x, Compression("fp16")), x.half().float(), equal_nan=True, rtol=0, atol=0
    )  # fmt: skip


@pytest.mark.parametrize("method", ["full8", "topk8", "rp8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_or_inf_is_marked_whole_and_its_neighbours_are_not(method: str, bad: float) -> None:
    x = torch.randn(3, 128)
    x[1, 5] = bad
    got = there_and_back(x, Compression(method, 32 if method in ("rp8", "topk8") else None))
    assert got[1].isnan().all()
    assert got[0].isfinite().all() and got[2].isfinite().all()


@pytest.mark.parametrize("method", ["fp8", "full8", "topk8"])
@pytest.mark.parametrize("ulps", [1, 50, 127, 150, 224, 300, 400, 700, 2000, 10**5, 2**23, 2**30])
def test_bounds_near_the_end_of_float32(method: str, ulps: int) -> None:
    """A scale rounds to a multiple of 2^-149 there, and each of its up to 255 (448) steps is off by half of that."""
    x = (torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * ulps).round() * 2.0**-149
    got = there_and_back(x, Compression(method, 40 if method == "topk8" else None)).double()
    x = x.double()
    if method == "fp8":
        most = x.abs() * 2**-4 + x.abs().amax(-1, keepdim=True) / 448 * 2**-10 * 1.01 + 448 * 2.0**-150
    else:
        most = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 510 * 1.001 + 255 * 2.0**-150
    assert ((got - x).abs() <= most + 2.0**-149).all()  # NaN would be in no bounds


def test_indices_count_further_than_16_bits() -> None:
    rows = 100 + torch.randn(3, 70_000, generator=torch.Generator().manual_seed(1))
    rows[:, -8:] += 50
    got = there_and_back(rows, Compression("topk8", 16))
    assert (got[:, -8:] != 0).all() and ((got != 0).sum(-1) == 16).all()


def test_fp8_keeps_its_relative_precision() -> None:
    x = torch.randn(64, 256) * torch.logspace(-20, 20, 64)[:, None]
    got = there_and_back(x, Compression("fp8"))
    largest = x.abs().amax(-1, keepdim=True)
    # e4m3: 3 bits of mantissa, subnormals of 2**-9 of a scale whose largest is 448
    assert ((got - x).abs() <= x.abs() * 2**-4 + largest / 448 * 2**-10 * 1.01).all()


@pytest.mark.parametrize("k", [32, 64, 256, 512])
def test_rp8_inner_products_are_within_the_johnson_lindenstrauss_bound(k: int) -> None:
    d, n = 1024, 40
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(n, d, generator=generator)
    x /= x.norm(dim=-1, keepdim=True)
    compression = Compression("rp8", k, seed=5)
    header = compression.header(d, "float32")
    small = project(encode(x, compression), header)
    error = (small @ small.T - x @ x.T).abs()
    # For all n(n+1)/2 pairs at once with probability 0.999, by the union bound over 2 exp(-k e**2 / 8); and the codes'
    # rounding, at most half a step of each of the k values.
    pairs = n * (n + 1) / 2
    bound = (8 / k * np.log(2 * pairs / 1e-3)) ** 0.5
    step = (small.amax(-1) - small.amin(-1)).max().item() / 255
    assert error.max().item() <= bound + step * k**0.5 * 1.5
    assert error.pow(2).mean().sqrt().item() <= 1.6 * k**-0.5


def test_rp8_decodes_to_the_least_squares_estimate() -> None:
    d, k = 256, 64
    compression = Compression("rp8", k, seed=1)
    x = torch.randn(20, d)
    got = there_and_back(x, compression)
    matrix = projection(1, k, d)
    small = project(encode(x, compression), compression.header(d, "float32"))
    torch.testing.assert_close(got @ matrix.T, small, rtol=1e-4, atol=1e-4)
    expected = torch.from_numpy(np.linalg.pinv(matrix.double().numpy())).float()
    torch.testing.assert_close(got, small @ expected.T, rtol=1e-3, atol=1e-4)
    assert (got - x).norm() < x.norm()


def test_the_projection_follows_from_the_header_alone() -> None:
    matrix = projection(12345, 64, 300)
    # Written down once: if this changes, stored data can no longer be read.
    assert matrix[0, :3].tolist() == pytest.approx(EXPECTED, rel=1e-6)
    assert torch.equal(matrix, projection(12345, 64, 300))
    assert not torch.equal(matrix, projection(12346, 64, 300))
    big = projection(0, 512, 2048)
    assert big.mean().abs() < 1e-3
    assert big.std().item() == pytest.approx(512**-0.5, rel=1e-2)
    matrix[0, 0] = 7.0  # a copy, not the cache
    assert projection(12345, 64, 300)[0, 0] != 7.0


EXPECTED = [0.017736734822392464, -0.11542049050331116, 0.04661274701356888]


@pytest.mark.parametrize("method", ["full8", "topk8", "fp8"])
@given(x=ROWS)
@examples(60)
def test_records_read_as_the_header_says_with_numpy(method: str, x: np.ndarray) -> None:
    compression = Compression(method, min(8, x.shape[1]) if method == "topk8" else None)
    header = compression.header(x.shape[1], "float32")
    records = encode(torch.from_numpy(x), compression).numpy()
    kinds = {"float32": "<f4", "uint8": "u1", "int32": "<i4", "float8_e4m3fn": "u1"}
    record = np.dtype(
        {
            "names": [f["name"] for f in header["fields"]],
            "formats": [(kinds[f["dtype"]], tuple(f["shape"])) for f in header["fields"]],
            "offsets": [f["offset"] for f in header["fields"]],
            "itemsize": header_bytes(header),
        }
    )
    read = np.ascontiguousarray(records).view(record)[:, 0]
    scale = read["scale"][:, None]
    if method == "fp8":
        codes = torch.from_numpy(read["values"].copy()).view(torch.float8_e4m3fn).float().numpy()
        expected = codes * scale
    else:
        low = x if method == "full8" else np.take_along_axis(x, read["indices"], -1)
        assert (read["zero"] == low.min(-1)).all()
        codes = read["codes"].astype(np.float32)
        values = codes * scale + read["zero"][:, None]
        expected = values
        if method == "topk8":
            expected = np.broadcast_to(scale * 0, x.shape).copy()  # NaN where the row is marked
            np.put_along_axis(expected, read["indices"].astype(np.int64), values, -1)
    np.testing.assert_array_equal(decode(torch.from_numpy(records), header).numpy(), expected)


def test_affine_codes_equal_numpys() -> None:
    x = np.random.default_rng(0).normal(size=(50, 96)).astype(np.float32)
    records = encode(torch.from_numpy(x), Compression("full8")).numpy()
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = (high - low) / np.float32(255)
    np.testing.assert_array_equal(records[:, 8:], np.rint((x - low) / scale).astype(np.uint8))
    np.testing.assert_array_equal(records[:, :4].copy().view("<f4"), scale)


def test_leading_dimensions_stay() -> None:
    x = torch.randn(2, 3, 5, 64)
    for method in METHODS:
        assert there_and_back(x, Compression(method)).shape == x.shape
    assert there_and_back(torch.zeros(0, 64), Compression("full8")).shape == (0, 64)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("rp9", "at.method"), (7, "at"), ({}, "at.method"), ({"method": "rp8", "K": 3}, "at.K"),
        ({"method": "rp8", "k": 31}, "at.k"), ({"method": "rp8", "k": 513}, "at.k"),
        ({"method": "rp8", "k": 64.0}, "at.k"),
        ({"method": "topk8", "k": 0}, "at.k"), ({"method": "full8", "k": 8}, "at.k"),
        ({"method": "rp8", "k": True}, "at.k"),
        ({"method": "rp8", "seed": -1}, "at.seed"), ({"method": "full8", "seed": 1}, "at.seed"),
        ({"method": ["rp8"]}, "at.method"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_its_field(value: object, field: str) -> None:
    with pytest.raises(WeirError) as e:
        Compression.parse(value, "at")
    assert e.value.field == field


def test_parse_and_json_agree() -> None:
    assert Compression.parse(None) == Compression()
    assert Compression.parse("rp8") == Compression("rp8", 64)
    for value in ("none", "topk8", {"method": "rp8", "k": 128, "seed": 9}):
        parsed = Compression.parse(value)
        assert Compression.parse(json.loads(json.dumps(parsed.to_json()))) == parsed
    x = torch.randn(3, 96)
    for value in ("full8", {"method": "rp8", "k": 32, "seed": 2}):
        assert torch.equal(encode(x, value), encode(x, Compression.parse(value))), "named as in a capture"
    with pytest.raises(WeirError, match="k = 64 is more than the row's 32"):
        Compression("topk8").check(32)


@pytest.mark.parametrize("k", [32, 96, 512])
def test_rp8_is_within_half_a_step_of_the_projection(k: int) -> None:
    """Which may have more values than the row, and follows from the header alone."""
    d = 96
    x = torch.randn(50, d, generator=torch.Generator().manual_seed(1))
    header = json.loads(json.dumps(Compression("rp8", k, 7).header(d, "float32")))
    records = encode(x, Compression("rp8", k, 7))
    codec._gaussian.cache_clear()
    codec._inverse.cache_clear()
    projected, exact = project(records, header), x.double() @ projection(7, k, d).double().T
    step = (exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)) / 255
    assert projected.shape == (50, k) and ((projected - exact).abs() <= step * 0.51 + 1e-5).all()
    if k > d:  # nothing but the rounding is lost; a square projection magnifies that too much to bound
        assert (decode(records, header) - x).abs().max() < 0.05


def test_a_header_that_was_tampered_with_is_refused() -> None:
    header = Compression("rp8", 64, 3).header(512, "bfloat16")
    assert Compression.from_header(json.loads(json.dumps(header, sort_keys=True))) == Compression("rp8", 64, 3)
    changes = [("k", 65), ("k", True), ("seed", "3"), ("d_model", 0), ("dtype", "int8"), ("axis", "column"),
               ("version", 2), ("format", "x"), ("fields", []),
               ("fields", None), ("method", "full8"), ("more", 1)]  # fmt: skip
    for key, value in changes:
        with pytest.raises(WeirError):
            Compression.from_header(header | {key: value})
    for key in header:
        with pytest.raises(WeirError):
            Compression.from_header({k: v for k, v in header.items() if k != key})
    with pytest.raises(WeirError):
        decode(torch.zeros(2, 71, dtype=torch.uint8), header)
