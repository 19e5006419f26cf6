"""The largest values of rows on CUDA, and the logarithm of the sum of their exponentials.

A row is cut into chunks. One program finds the k largest values of a chunk by taking the largest
one k times; programs of the next launch do the same with what these have found, until one chunk is
left. Values are compared as integers in the same order, so ties and NaN are ordered too.
"""

# Kernels have no annotations: Triton takes them for the types of parameters on the device.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Values of a row that a program looks at."""
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _keys(values):
    """Return integers in the order of float32 values; NaN is the largest, and -0 is 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["m", "k"])
def _largest_of_chunks(
    values, ids, out_keys, out_ids, sums, m, stride, k, FIRST: tl.constexpr, SUMS: tl.constexpr, CHUNK: tl.constexpr
):
    """Find the k largest of one chunk of one row, the largest first.

    The first launch reads values and, with SUMS, writes each chunk's log-sum-exp; later ones read keys and ids.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, CHUNK)
    at = chunk * CHUNK + place
    inside = at < m
    if FIRST:
        given = tl.load(values + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
        keys = tl.where(inside, _keys(given), _LOWEST)
        if SUMS:
            largest = tl.max(given, axis=0)
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            total = shift + tl.log(tl.sum(tl.exp(given - shift), axis=0))
            tl.store(sums + row * tl.num_programs(1) + chunk, total)
    else:
        keys = tl.load(values + row * stride + at, mask=inside, other=_LOWEST)
    out = (row * tl.num_programs(1) + chunk) * k
    for i in range(k):
        best, where = tl.max(keys, axis=0, return_indices=True, return_indices_tie_break_left=True)
        found = chunk * CHUNK + where
        if not FIRST:
            found = tl.load(ids + row * stride + found, mask=found < m, other=0)
        tl.store(out_keys + out + i, best)
        tl.store(out_ids + out + i, found)
        keys = tl.where(place == where, _LOWEST, keys)


def largest(values: torch.Tensor, k: int, sums: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the k largest values of each row and, with `sums`, each row's log-sum-exp.

    Args:
        values: [n, m] on CUDA, any float dtype, values of a row side by side.
        k: at most m; its time grows with k.
        sums: whether the sums are wanted.

    Returns:
        (ids int32 [n, k], values float32 [n, k], sums float32 [n] or None), in the order that
        `vllm_weir.util.top.top_values` has.
    """
    n, m = values.shape
    chunks = triton.cdiv(m, CHUNK)
    logs = torch.empty(n, chunks, dtype=torch.float32, device=values.device) if sums else None
    keys, ids, first = values, None, True
    while True:
        chunks = triton.cdiv(m, CHUNK)
        size = CHUNK if chunks > 1 else max(16, triton.next_power_of_2(m))
        found = torch.empty(2, n, chunks * k, dtype=torch.int32, device=values.device)
        if n:
            _largest_of_chunks[(n, chunks)](
                keys, ids, found[0], found[1], logs, m, keys.stride(0), k, FIRST=first, SUMS=sums and first, CHUNK=size
            )
        (keys, ids), m, first = found, chunks * k, False
        if chunks == 1:
            break
    bits = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return ids, bits.view(torch.float32), None if logs is None else logs.logsumexp(1)
