"""Rows from the ring to the host's memory, wherever they belong there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 24
"""Enough to fill PCIe, few enough to leave the device to the model."""


@triton.jit
def _scatter(ring, jobs, host, num_jobs, max_width, row_words, BLOCK: tl.constexpr):
    total = num_jobs * max_width
    base = host.to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    at = tl.program_id(0)
    while at < total:
        job = jobs + (at // max_width) * 4
        column = at % max_width
        if column < tl.load(job + 3):
            source = ring + (tl.load(job) + column) * row_words
            target = base + (tl.load(job + 1) + column * tl.load(job + 2)) * row_words
            for first in range(0, row_words, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                inside = offsets < row_words
                tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)
        at += tl.num_programs(0)


@triton.jit
def _scatter_column(ring, jobs, ranks, host, num_jobs, rank_width, column, row_words, BLOCK: tl.constexpr):
    base = tl.multiple_of(host.to(tl.pointer_type(tl.int32)), 16)
    at = tl.program_id(0)
    while at < num_jobs:
        job = jobs + at * 4
        place = tl.load(ranks + tl.load(job + 3) * rank_width + column)
        if place >= 0:
            source = ring + tl.load(job) * row_words
            target = base + (tl.load(job + 1) + place * tl.load(job + 2)) * row_words
            for first in range(0, row_words, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                inside = offsets < row_words
                tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)
        at += tl.num_programs(0)


def scatter(ring: torch.Tensor, jobs: torch.Tensor, max_width: int, host: int) -> None:
    """Copy rows on the current stream.

    Args:
        ring: [rows, d_model].
        jobs: int64 [n, 4] on the device, see `StepPlan.jobs`.
        max_width: the largest number of columns.
        host: address of pinned memory in which rows of the same size are counted.
    """
    if not max_width:
        return
    words = _words(ring)
    _scatter[(PROGRAMS,)](
        ring.view(torch.int32),
        jobs,
        host,
        len(jobs),
        max_width,
        words,
        BLOCK=min(2048, triton.next_power_of_2(words)),
        num_warps=8,
    )


def scatter_column(ring: torch.Tensor, jobs: torch.Tensor, ranks: torch.Tensor, column: int, host: int) -> None:
    """Copy the rows of one column on the current stream; see `CudaOutlet.send`."""
    words = _words(ring)
    _scatter_column[(min(PROGRAMS, len(jobs)),)](
        ring.view(torch.int32),
        jobs,
        ranks,
        host,
        len(jobs),
        ranks.shape[1],
        column,
        words,
        BLOCK=min(2048, triton.next_power_of_2(words)),
        num_warps=8,
    )


def _words(ring: torch.Tensor) -> int:
    row_bytes = ring.shape[1] * ring.element_size()
    if row_bytes % 4:
        raise ValueError(f"rows of {row_bytes} bytes are not made of whole words")
    return row_bytes // 4
