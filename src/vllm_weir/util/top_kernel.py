"""The largest values of rows on CUDA, and the logarithm of the sum of their exponentials.

Each row is cut into groups of values that stand side by side. One launch reads every value once and keeps the maximum
of each group. A second launch, one program a row, takes the k groups with the largest maxima (of equal ones the
first), which hold the k largest values, reads these groups again and takes the k largest of them. What takes the
values in comes with it: a bias, a ReLU and thresholds are applied as values are read, so that activations of an
autoencoder are never written.

Values are compared as integers in the same order, with the index in the lower half: no two are equal.
"""

# Kernels have no annotations: Triton takes them for the types of parameters on the device.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

TILE = 4096
"""Values that a program of the first launch reads."""
MAX_GROUPS = 4096
"""Maxima that a program of the second launch has in registers."""
_NONE = tl.constexpr(-(2**63))


@triton.jit
def _read(row, bias, thresholds, at, inside, RECTIFIED: tl.constexpr, THRESHOLDS: tl.constexpr):
    """Return values of a row in float32, -inf outside of it."""
    values = tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32)
    if RECTIFIED:
        values += tl.load(bias + at, mask=inside, other=0.0)
        active = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if THRESHOLDS:
            # NaN times 0 is NaN, as in torch.
            active *= (values > tl.load(thresholds + at, mask=inside, other=0.0)).to(tl.float32)
        values = tl.where(inside, active, float("-inf"))
    return values


@triton.jit
def _keys(values):
    """Return integers, int64, in the order of float32 values; NaN is the largest, and -0 is 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, ordered).to(tl.int64)


@triton.jit
def _keyed(values, at, inside):
    return tl.where(inside, (_keys(values) << 32) | (0x7FFFFFFF - at), _NONE)


@triton.jit(do_not_specialize=["m", "groups"])
def _maxima(
    values, bias, thresholds, maxima, sums, m, stride, groups,
    RECTIFIED: tl.constexpr, THRESHOLDS: tl.constexpr, SUMS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the maxima [groups] of a part of one row and, with SUMS, the part's log-sum-exp."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = part * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    given = _read(values + row * stride, bias, thresholds, at, at < m, RECTIFIED, THRESHOLDS)
    tl.store(maxima + row * groups + group, tl.max(_keys(given), axis=1).to(tl.int32), mask=group < groups)
    if SUMS:
        largest = tl.max(tl.max(given, axis=1), axis=0)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total = shift + tl.log(tl.sum(tl.sum(tl.exp(given - shift), axis=1), axis=0))
        tl.store(sums + row * tl.num_programs(1) + part, total)


@triton.jit(do_not_specialize=["m", "groups", "taken", "k"])
def _largest(
    values, bias, thresholds, maxima, out_ids, out_values, m, stride, groups, taken, k,
    RECTIFIED: tl.constexpr, THRESHOLDS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the k largest values of one row and where they are, the largest first."""
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS), tl.arange(0, K)
    keys = tl.load(maxima + row * groups + group, mask=group < groups, other=0).to(tl.int64)
    keys = tl.where(group < groups, (keys << 32) | (0x7FFFFFFF - group), _NONE)
    chosen = tl.full((K,), -1, tl.int32)
    for i in range(taken):  # all groups, or k
        best = tl.max(keys, axis=0)
        chosen = tl.where(place == i, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32), chosen)
        keys = tl.where(keys == best, _NONE, keys)
    at = chosen[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (chosen[:, None] >= 0) & (at < m)
    given = _read(values + row * stride, bias, thresholds, at, inside, RECTIFIED, THRESHOLDS)
    keys = _keyed(given, at, inside)
    for i in range(k):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        keys = tl.where(keys == best, _NONE, keys)
        bits = (best >> 32).to(tl.int32)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        tl.store(out_ids + row * k + i, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32))
        tl.store(out_values + row * k + i, bits.to(tl.float32, bitcast=True))


def largest(
    values: torch.Tensor, k: int, sums: bool = False, rectifier: tuple[torch.Tensor, torch.Tensor | None] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the k largest values of each row and, with `sums`, each row's log-sum-exp.

    Args:
        values: [n, m] on CUDA, any float dtype, values of a row side by side.
        k: at most m; the time of the second launch grows with k.
        sums: whether the sums are wanted.
        rectifier: what the values go through as they are read, a `vllm_weir.util.top.Rectifier`.

    Returns:
        (ids int32 [n, k], values float32 [n, k], sums float32 [n] or None), in the order that
        `vllm_weir.util.top.top_values` has.
    """
    n, m = values.shape
    # Only two sizes, since each is a kernel of its own, which a first call has to compile.
    most = 16 if k <= 16 else max(64, triton.next_power_of_2(k))
    size = max(16, 1 << round(math.log2(max(1, m / most)) / 2))  # about as many maxima as candidates
    while triton.cdiv(m, size) > MAX_GROUPS:
        size *= 2
    groups, held = triton.cdiv(m, size), max(1, TILE // size)
    parts = triton.cdiv(groups, held)
    bias, thresholds = rectifier or (None, None)
    options = {"RECTIFIED": rectifier is not None, "THRESHOLDS": thresholds is not None, "SIZE": size}
    maxima = torch.empty(n, groups, dtype=torch.int32, device=values.device)
    logs = torch.empty(n, parts, dtype=torch.float32, device=values.device) if sums else None
    ids = torch.empty(n, k, dtype=torch.int32, device=values.device)
    found = torch.empty(n, k, dtype=torch.float32, device=values.device)
    if n:
        given = values, bias, thresholds, maxima
        _maxima[(n, parts)](*given, logs, m, values.stride(0), groups, SUMS=sums, GROUPS=held, **options)
        powers = {"GROUPS": triton.next_power_of_2(groups), "K": most}
        _largest[(n,)](*given, ids, found, m, values.stride(0), groups, min(k, groups), k, **powers, **options)
    return ids, found, None if logs is None else logs.logsumexp(1)
