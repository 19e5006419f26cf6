"""The affine code of full8 and rp8 on CUDA: from values, or from rows and a projection, to packed records."""

# Triton takes annotations of a kernel's parameters for their types on the device, so kernels have none.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_weir.codec import LARGEST

_LARGEST = tl.constexpr(LARGEST)
# Adding and taking away 1.5 * 2^23 rounds a float32 of magnitude below 2^22 to the nearest integer, halves to even.
_ROUND = tl.constexpr(12582912.0)
HEAD = 8
"""Bytes of a record before its codes: scale and zero, float32."""


@triton.jit
def _affine(x, inside):
    """Scale and smallest value, both [m, 1], and codes of x, float32 [m, n], of which `inside` [1, n] counts."""
    low = tl.min(tl.where(inside, x, float("inf")), axis=1, keep_dims=True)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=1, keep_dims=True)
    unknown = tl.sum(tl.where(inside & (x != x), 1, 0), axis=1, keep_dims=True) > 0
    low = tl.where(unknown, float("nan"), low)
    # NaN compares false.
    sound = (low >= -_LARGEST) & (high <= _LARGEST) & (unknown == 0)
    scale = tl.where(sound, tl.div_rn(high - low, 255.0), float("nan"))
    # A scale of 0 must not divide; both are as wide as x because the division takes no other shapes.
    steps = tl.div_rn(x - low, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))
    codes = tl.where(scale > 0, steps, 0.0)
    codes = tl.minimum(tl.maximum((codes + _ROUND) - _ROUND, 0.0), 255.0)
    return scale, low, codes.to(tl.uint8)


@triton.jit
def _pack(parts, records, k, record_bytes, PARTS: tl.constexpr, BLOCK: tl.constexpr):
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
    """Records of values that are given as sums.

    Args:
        parts: [n, m * k], contiguous, any float dtype: m addends of each row of k values, one after the other. They
            are added up in float32.
        k: a multiple of 4, so that every record's head lies on a word's boundary.

    Returns:
        uint8 [n, 8 + k], as `vllm_weir.codec.encode` packs the sums with ``full8``.
    """
    n, width = parts.shape
    if width % k or k % 4 or not parts.is_contiguous():
        raise ValueError(f"parts are contiguous [n, m * k] with k a multiple of 4, got {list(parts.shape)} and k = {k}")
    records = torch.empty(n, HEAD + k, dtype=torch.uint8, device=parts.device)
    if n:
        block = triton.next_power_of_2(k)
        warps = min(max(block // 256, 1), 8)
        _pack[(n,)](parts, records, k, HEAD + k, PARTS=width // k, BLOCK=block, num_warps=warps)
    return records


PROJECTED = (32, 64, 128)
"""Values of k that `project` takes."""
CHUNK, STEP = 512, 64
"""Values of a row whose products are added up before they meet those of others: of a chunk, a turn of a loop after the
other. Every program of either kernel does so, that is why all come to the same bits."""
SPREAD = 1 << 24
"""Bytes of chunks' sums up to which every chunk is a program's own (8,192 rows of 4,096 values with k = 64): a step's
few rows would leave most of the device idle otherwise."""
Shape = tuple[int, int, int]
"""Rows of a program, stages and warps."""


@triton.jit
def _products(
    rows, halves, at, n, first, d, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, K] of the rows `at` [ROWS, 1], over the chunk from `first` on."""
    columns, there = tl.arange(0, K)[None, :], at < n
    sums = tl.zeros([ROWS, K], tl.float32)
    for begin in tl.range(0, CHUNK, STEP, num_stages=STAGES):
        along, down = first + begin + tl.arange(0, STEP)[None, :], first + begin + tl.arange(0, STEP)[:, None]
        if EVEN:
            x = tl.load(rows + at * d + along, mask=there, other=0.0)
            high = tl.load(halves + columns * d + down)
            low = tl.load(halves + (columns + K) * d + down)
        else:
            x = tl.load(rows + at * d + along, mask=there & (along < d), other=0.0)
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
    """A chunk's products, to `parts` [n, chunks, K]."""
    at = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    chunk = tl.program_id(0)
    sums = _products(rows, halves, at, n, chunk * CHUNK, d, K, ROWS, CHUNK, STEP, STAGES, EVEN)
    columns = tl.arange(0, K)[None, :]
    tl.store(parts + (at * tl.num_programs(0) + chunk) * K + columns, sums, mask=at < n)


@triton.jit(do_not_specialize=["n"])
def _project(
    rows, halves, records, n, d, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All products, and records [n, 8 + K] of them."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    sums = tl.zeros([ROWS, K], tl.float32)
    for first in range(0, d, CHUNK):
        sums += _products(rows, halves, at, n, first, d, K, ROWS, CHUNK, STEP, STAGES, EVEN)
    columns, there = tl.arange(0, K)[None, :], at < n
    scale, zero, codes = _affine(sums, columns >= 0)
    to = records + at * (8 + K)
    head = to.to(tl.pointer_type(tl.float32))
    tl.store(head, scale, mask=there)
    tl.store(head + 1, zero, mask=there)
    tl.store(to + 8 + columns, codes, mask=there)


def project(
    rows: torch.Tensor, halves: torch.Tensor, spread: bool | None = None, shape: Shape | None = None
) -> torch.Tensor:
    """Records of rows' projections, which are added up in float32; a row's record does not depend on those beside it.

    Args:
        rows: [n, d], contiguous, bfloat16 or float16.
        halves: the projection as a sum of two, [2 k, d], contiguous, of the rows' dtype; k is one of `PROJECTED`.
        spread: whether every chunk is a program's own, and a second launch packs; chosen by n if None.
        shape: of the programs; chosen by k if None.

    Returns:
        uint8 [n, 8 + k], as `vllm_weir.codec.encode` packs them with ``rp8``.
    """
    n, d = rows.shape
    k = halves.shape[0] // 2
    if k not in PROJECTED or halves.shape[1] != d or not (rows.is_contiguous() and halves.is_contiguous()):
        raise ValueError(f"no projection of {list(rows.shape)} by {list(halves.shape)}; k is one of {PROJECTED}")
    chunks = triton.cdiv(d, CHUNK)
    if spread is None:
        spread = n * chunks * k * 4 <= SPREAD
    # A third stage of k = 128 would need more shared memory than GPUs of less than 100 kB a block have.
    own, stages, warps = shape or (64, 2 if k > 64 else 3, 4)
    options = {"K": k, "ROWS": own, "CHUNK": CHUNK, "STEP": STEP, "STAGES": stages, "EVEN": d % CHUNK == 0}
    if spread:
        parts = torch.empty(n, chunks * k, dtype=torch.float32, device=rows.device)
        if n:
            _project_chunk[(chunks, triton.cdiv(n, own))](rows, halves, parts, n, d, **options, num_warps=warps)
        return pack(parts, k)
    records = torch.empty(n, HEAD + k, dtype=torch.uint8, device=rows.device)
    if n:
        _project[(triton.cdiv(n, own),)](rows, halves, records, n, d, **options, num_warps=warps)
    return records
