"""Rows of the stream in the middle of a tap's chains, on CUDA: what `cpu_kernel.rows_at` does."""

# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_weir.util.h2d import upload
from vllm_weir.worker.tap.triton_kernel import _ACTIVATE, _FLOATS, _HOOK, _INTS, _SCORE, _follow, _load, _stream


@triton.jit
def _store_row(
    hidden,
    other,
    tap,
    token,
    start,
    stop,
    ints,
    floats,
    vectors,
    cells,
    held,
    out,
    hidden_stride,
    other_stride,
    num_cells,
    held_stride,
    width,
    d_model,
    HAS_OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a token's row as it is where the chain from `start`, -1 for none, reaches `stop`."""
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    row, other_row = _load(hidden, other, token, hidden_stride, other_stride, offsets, inside, HAS_OTHER)
    scale = tl.load(tap + 1).to(tl.float32, bitcast=True)
    row = _stream(row, other_row, scale, tl.load(tap + 2).to(tl.float32, bitcast=True), HAS_OTHER)
    _, h, _ = _follow(
        start, row.to(tl.float32), True, cells + token * num_cells, held + token * held_stride, ints, floats, vectors,
        width, d_model, offsets, inside, row.dtype, stop,
    )  # fmt: skip
    tl.store(out + offsets, h.to(row.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_cells", "held_stride"])
def _peek(
    hidden,
    other,
    tap,
    places,
    ints,
    floats,
    vectors,
    cells,
    held,
    out,
    hidden_stride,
    other_stride,
    num_cells,
    held_stride,
    width,
    d_model,
    HAS_OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    k = tl.program_id(0).to(tl.int64)
    token = tl.load(places + k * 3).to(tl.int64)
    node = tl.load(places + k * 3 + 1).to(tl.int64)
    stop = tl.load(places + k * 3 + 2).to(tl.int64)
    _store_row(
        hidden, other, tap, token, node, stop, ints, floats, vectors, cells, held, out + k * width, hidden_stride,
        other_stride, num_cells, held_stride, width, d_model, HAS_OTHER, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["plan_size", "num_taps", "num_cells", "held_stride", "place"])
def _peek_hook(
    hidden,
    other,
    tap,
    plan,
    heads,
    ints,
    floats,
    vectors,
    cells,
    held,
    out,
    nodes,
    hidden_stride,
    other_stride,
    plan_size,
    num_taps,
    num_cells,
    held_stride,
    place,
    width,
    d_model,
    HAS_OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.load(plan + token * 4 + 2, mask=token < plan_size, other=-1).to(tl.int64)
    tap_index = tl.load(tap).to(tl.int64)
    start = tl.load(heads + program * num_taps + tap_index, mask=program >= 0, other=-1).to(tl.int64)
    stop, found = start, -1
    while (stop >= 0) & (found < 0):
        is_hook = tl.load(ints + stop * _INTS) == _HOOK
        if is_hook & (tl.load(floats + stop * _FLOATS + 2).to(tl.int32) == place):
            found = stop.to(tl.int32)
        stop = tl.load(ints + stop * _INTS + 3).to(tl.int64)
    tl.store(nodes + token, found)
    start = tl.where(found >= 0, start, -1)
    _store_row(
        hidden, other, tap, token, start, found, ints, floats, vectors, cells, held, out + token * width,
        hidden_stride, other_stride, num_cells, held_stride, width, d_model, HAS_OTHER, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["plan_size", "num_taps", "num_cells", "held_stride"])
def _read_early(
    hidden,
    other,
    tap,
    plan,
    heads,
    ints,
    floats,
    vectors,
    cells,
    held,
    hidden_stride,
    other_stride,
    plan_size,
    num_taps,
    num_cells,
    held_stride,
    width,
    d_model,
    HAS_OTHER: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.load(plan + token * 4 + 2, mask=token < plan_size, other=-1).to(tl.int64)
    tap_index = tl.load(tap).to(tl.int64)
    node = tl.load(heads + program * num_taps + tap_index, mask=program >= 0, other=-1).to(tl.int64)
    if node >= 0:
        stop = node * 0 - 1
        if STAGE == 0:
            stop = node
            kind = tl.load(ints + stop * _INTS)
            while (stop >= 0) & ((kind == _SCORE) | (kind == _ACTIVATE)):
                stop = tl.load(ints + stop * _INTS + 3).to(tl.int64)
                kind = tl.load(ints + stop * _INTS, mask=stop >= 0, other=0)
        offsets = tl.arange(0, BLOCK)
        inside = offsets < width
        row, other_row = _load(hidden, other, token, hidden_stride, other_stride, offsets, inside, HAS_OTHER)
        scale = tl.load(tap + 1).to(tl.float32, bitcast=True)
        row = _stream(row, other_row, scale, tl.load(tap + 2).to(tl.float32, bitcast=True), HAS_OTHER)
        _follow(
            node, row.to(tl.float32), STAGE == 0, cells + token * num_cells, held + token * held_stride, ints, floats,
            vectors, width, d_model, offsets, inside, row.dtype, stop,
        )  # fmt: skip


def read_early(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    plan: torch.Tensor,
    heads: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor,
    held: torch.Tensor | None,
    stage: int,
) -> None:
    """Write the raw numbers of probes that read at an early stage of a tap; see `cpu_kernel.read_early`."""
    n, width = hidden.shape
    block = triton.next_power_of_2(width)
    _read_early[(n,)](
        hidden,
        hidden if other is None else other,
        number,
        plan,
        heads,
        ints,
        floats,
        vectors,
        cells,
        floats if held is None else held,
        hidden.stride(0),
        0 if other is None else other.stride(0),
        plan.shape[0],
        heads.shape[1],
        cells.shape[1],
        0 if held is None else held.stride(0),
        width,
        vectors.shape[1],
        HAS_OTHER=other is not None,
        STAGE=stage,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )


def rows_at_hook(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    plan: torch.Tensor,
    heads: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor,
    held: torch.Tensor,
    place: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the stream as they are where their chains reach a HOOK node; see `cpu_kernel.rows_at_hook`."""
    n, width = hidden.shape
    out = torch.empty(n, width, dtype=hidden.dtype, device=hidden.device)
    nodes = torch.empty(n, dtype=torch.int32, device=hidden.device)
    block = triton.next_power_of_2(width)
    _peek_hook[(n,)](
        hidden,
        hidden if other is None else other,
        number,
        plan,
        heads,
        ints,
        floats,
        vectors,
        cells,
        held,
        out,
        nodes,
        hidden.stride(0),
        0 if other is None else other.stride(0),
        plan.shape[0],
        heads.shape[1],
        cells.shape[1],
        held.stride(0),
        place,
        width,
        vectors.shape[1],
        HAS_OTHER=other is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )
    return out, nodes


def rows_at(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    tokens: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor,
    held: torch.Tensor,
) -> torch.Tensor:
    """Return rows of the stream as they are where their chains reach some node; see `cpu_kernel.rows_at`."""
    width = hidden.shape[1]
    out = torch.empty(len(tokens), width, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(width)
    _peek[(len(tokens),)](
        hidden,
        hidden if other is None else other,
        number,
        upload(np.stack([tokens, starts, stops], 1).astype(np.int32), hidden.device),
        ints,
        floats,
        vectors,
        cells,
        held,
        out,
        hidden.stride(0),
        0 if other is None else other.stride(0),
        cells.shape[1],
        held.stride(0),
        width,
        vectors.shape[1],
        HAS_OTHER=other is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )
    return out
