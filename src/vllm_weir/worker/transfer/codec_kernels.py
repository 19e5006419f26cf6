"""Triton kernels that pack records of full8 and rp8, from values or from rows and a projection."""

# Kernels have no annotations: Triton takes them for the types of parameters on the device.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_weir.codec import LARGEST

_LARGEST = tl.constexpr(LARGEST)
# Adding and taking away 1.5 * 2^23 rounds a float32 of magnitude below 2^22 to the nearest integer,
# halves to even.
_ROUND = tl.constexpr(12582912.0)
HEADER_BYTES = 8
"""Bytes of a record before its codes: scale and zero, float32."""


@triton.jit
def _affine(x, inside):
    """Return scale and smallest value, both [m, 1], and codes, [m, n].

    x is float32 [m, n], of which the columns `inside`, [1, n], count.
    """
    low = tl.min(tl.where(inside, x, float("inf")), axis=1, keep_dims=True)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=1, keep_dims=True)
    has_nan = tl.sum(tl.where(inside & (x != x), 1, 0), axis=1, keep_dims=True) > 0
    low = tl.where(has_nan, float("nan"), low)
    # NaN compares false.
    in_range = (low >= -_LARGEST) & (high <= _LARGEST) & (has_nan == 0)
    scale = tl.where(in_range, tl.div_rn(high - low, 255.0), float("nan"))
    # A scale of 0 must not divide; it is broadcast because div_rn takes operands of one shape only.
    steps = tl.div_rn(x - low, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))
    codes = tl.where(scale > 0, steps, 0.0)
    codes = tl.minimum(tl.maximum((codes + _ROUND) - _ROUND, 0.0), 255.0)
    return scale, low, codes.to(tl.uint8)


@triton.jit
def _pack(parts, records, k, record_bytes, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the parts of one row, and write its record."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)[None, :]
    inside = offsets < k
    x = tl.load(parts + row * (PARTS * k) + offsets, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts + row * (PARTS * k) + part * k + offsets, mask=inside, other=0.0).to(tl.float32)
    scale, low, codes = _affine(x, inside)
    to = records + row * record_bytes
    head = to.to(tl.pointer_type(tl.float32)) + tl.zeros([1, 1], tl.int32)
    tl.store(head, scale)
    tl.store(head + 1, low)
    tl.store(to + 8 + offsets, codes, mask=inside)


def pack(parts: torch.Tensor, k: int) -> torch.Tensor:
    """Return the records of values that are given as sums.

    `parts`: [n, m * k], contiguous, any float dtype: m addends of each row of k values, one after the other, which are
    added up in float32; `k`: a multiple of 4, so that every record's head lies on a word's boundary. Returns uint8 [n,
    8 + k], as `vllm_weir.codec.encode` packs the sums with ``full8``.
    """
    n, width = parts.shape
    if width % k or k % 4 or not parts.is_contiguous():
        raise ValueError(f"parts must be contiguous [n, m * k], k a multiple of 4; got {list(parts.shape)} and k = {k}")
    records = torch.empty(n, HEADER_BYTES + k, dtype=torch.uint8, device=parts.device)
    if n:
        block = triton.next_power_of_2(k)
        warps = min(max(block // 256, 1), 8)
        _pack[(n,)](parts, records, k, HEADER_BYTES + k, PARTS=width // k, BLOCK=block, num_warps=warps)
    return records


PROJECTED = (32, 64, 128)
"""Values of k that `project` takes."""
CHUNK, STEP = 512, 64
"""The order of summation: products of STEP values at a time are added up to the sum of a CHUNK, and
these to the whole. Both kernels keep to it, so they give the same bits."""
MAX_SPREAD_BYTES = 1 << 24
"""Up to this size of the chunks' sums, every chunk has a program of its own. With few rows, most of
the device would be idle otherwise."""
LaunchShape = tuple[int, int, int]
"""Rows of a program, stages and warps."""


@triton.jit
def _products(
    rows, halves, index, n, first, d, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return float32 [ROWS, K], products of the rows `index` [ROWS, 1] over one chunk.

    The chunk begins at value `first` of each row.
    """
    columns, exists = tl.arange(0, K)[None, :], index < n
    sums = tl.zeros([ROWS, K], tl.float32)
    for begin in tl.range(0, CHUNK, STEP, num_stages=STAGES):
        along, down = first + begin + tl.arange(0, STEP)[None, :], first + begin + tl.arange(0, STEP)[:, None]
        if EVEN:
            x = tl.load(rows + index * d + along, mask=exists, other=0.0)
            high = tl.load(halves + columns * d + down)
            low = tl.load(halves + (columns + K) * d + down)
        else:
            x = tl.load(rows + index * d + along, mask=exists & (along < d), other=0.0)
            high = tl.load(halves + columns * d + down, mask=down < d, other=0.0)
            low = tl.load(halves + (columns + K) * d + down, mask=down < d, other=0.0)
        sums = tl.dot(x, high, sums)
        sums = tl.dot(x, low, sums)
    return sums


@triton.jit(do_not_specialize=["n"])
def _project_chunk(
    rows, halves, parts, n, d, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the products of one chunk to `parts` [n, chunks, K]."""
    index = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    chunk = tl.program_id(0)
    sums = _products(rows, halves, index, n, chunk * CHUNK, d, K, ROWS, CHUNK, STEP, STAGES, EVEN)
    columns = tl.arange(0, K)[None, :]
    tl.store(parts + (index * tl.num_programs(0) + chunk) * K + columns, sums, mask=index < n)


@triton.jit(do_not_specialize=["n"])
def _project(
    rows, halves, records, n, d, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the records [n, 8 + K] of the products over all chunks."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    sums = tl.zeros([ROWS, K], tl.float32)
    for first in range(0, d, CHUNK):
        sums += _products(rows, halves, index, n, first, d, K, ROWS, CHUNK, STEP, STAGES, EVEN)
    columns, exists = tl.arange(0, K)[None, :], index < n
    scale, zero, codes = _affine(sums, columns >= 0)
    to = records + index * (8 + K)
    head = to.to(tl.pointer_type(tl.float32))
    tl.store(head, scale, mask=exists)
    tl.store(head + 1, zero, mask=exists)
    tl.store(to + 8 + columns, codes, mask=exists)


def project(
    rows: torch.Tensor, halves: torch.Tensor, spread: bool | None = None, shape: LaunchShape | None = None
) -> torch.Tensor:
    """Return the records of rows' projections, which are summed in float32.

    A row's record does not depend on the other rows.

    Args:
        rows: [n, d], contiguous, bfloat16 or float16.
        halves: the projection as a sum of two, [2 k, d], contiguous, of the rows' dtype; k is one
            of `PROJECTED`.
        spread: whether every chunk has a program of its own and a second launch packs; chosen by n
            if None.
        shape: of the launch; chosen by k if None.

    Returns:
        uint8 [n, 8 + k], as `vllm_weir.codec.encode` packs them with ``rp8``.
    """
    n, d = rows.shape
    k = halves.shape[0] // 2
    if k not in PROJECTED or halves.shape[1] != d or not (rows.is_contiguous() and halves.is_contiguous()):
        raise ValueError(
            f"no projection of rows {list(rows.shape)} by {list(halves.shape)}: both must be contiguous, "
            f"[n, d] and [2 k, d], k one of {PROJECTED}"
        )
    chunks = triton.cdiv(d, CHUNK)
    if spread is None:
        spread = n * chunks * k * 4 <= MAX_SPREAD_BYTES
    # A third stage of k = 128 would need more shared memory than GPUs of less than 100 kB a block
    # have.
    program_rows, stages, warps = shape or (64, 2 if k > 64 else 3, 4)
    options = {"K": k, "ROWS": program_rows, "CHUNK": CHUNK, "STEP": STEP, "STAGES": stages, "EVEN": d % CHUNK == 0}
    if spread:
        parts = torch.empty(n, chunks * k, dtype=torch.float32, device=rows.device)
        if n:
            _project_chunk[(chunks, triton.cdiv(n, program_rows))](
                rows, halves, parts, n, d, **options, num_warps=warps
            )
        return pack(parts, k)
    records = torch.empty(n, HEADER_BYTES + k, dtype=torch.uint8, device=rows.device)
    if n:
        _project[(triton.cdiv(n, program_rows),)](rows, halves, records, n, d, **options, num_warps=warps)
    return records
