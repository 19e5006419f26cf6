"""The affine code of full8 and rp8 on CUDA: from values to packed records in one launch."""

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
def _pack(parts, records, k, record_bytes, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < k
    x = tl.load(parts + row * (PARTS * k) + offsets, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts + row * (PARTS * k) + part * k + offsets, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(inside, x, float("inf")), axis=0)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=0)
    unknown = tl.sum(tl.where(inside & (x != x), 1, 0), axis=0) > 0
    low = tl.where(unknown, float("nan"), low)
    # NaN compares false.
    sound = (low >= -_LARGEST) & (high <= _LARGEST) & (unknown == 0)
    scale = tl.where(sound, tl.div_rn(high - low, 255.0), float("nan"))
    steps = tl.div_rn(x - low, tl.where(scale > 0, scale, 1.0))
    codes = tl.where(scale > 0, steps, 0.0)
    codes = tl.minimum(tl.maximum((codes + _ROUND) - _ROUND, 0.0), 255.0)
    to = records + row * record_bytes
    words = to.to(tl.pointer_type(tl.float32))
    tl.store(words, scale)
    tl.store(words + 1, low)
    tl.store(to + 8 + offsets, codes.to(tl.uint8), mask=inside)


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
