"""How far rows and logits may be from a reference, and how long something may take.

A bound on a difference of floats follows from what float32 rounds and from how large the summed terms are, never from
the size of the difference itself: two logits of 14 that differ by 0.3 are each rounded as numbers of 14.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch

from tests.support.machine import on_cpu

T = TypeVar("T")
SHARED = 8
"""How much longer things may take where other test processes, with engines of their own, share the machine's cores."""


def patience(seconds: float) -> float:
    """How long that may take here which takes at most so many seconds on a machine of its own."""
    return seconds * (SHARED if "PYTEST_XDIST_WORKER" in os.environ else 1)


def eventually(read: Callable[[], T], expected: T, seconds: float) -> None:
    """`read()` is `expected` within so many seconds of a machine of its own."""
    deadline = time.monotonic() + patience(seconds)
    while (now := read()) != expected:
        assert time.monotonic() < deadline, f"still {now} after {seconds} s, not {expected}"
        time.sleep(0.02)


async def becomes(read: Callable[[], T], expected: T, seconds: float) -> None:
    """As `eventually`, where an event loop goes on meanwhile."""
    deadline = time.monotonic() + patience(seconds)
    while (now := read()) != expected:
        assert time.monotonic() < deadline, f"still {now} after {seconds} s, not {expected}"
        await asyncio.sleep(0.005)


async def nothing_held(engine: Any, seconds: float, step: Callable[[], Awaitable[Any]] | None = None) -> None:
    """Workers of an `AsyncLLM` hold nothing of any request within so many seconds of a machine of its own.

    `step` has the engine do one between two looks: only then does a worker learn which requests have ended.
    """
    deadline = time.monotonic() + patience(seconds)
    while held := [n for worker in await engine.collective_rpc("weir_usage") for n in worker.items() if n[1]]:
        assert time.monotonic() < deadline, f"still {held} after {seconds} s"
        await (asyncio.sleep(0.02) if step is None else step())


def alike(one: Any, other: Any) -> bool:
    """Whether two tensors, or log probabilities of two sequences, are equal: to the bit where vLLM runs on a processor.

    A GPU's kernels order sums by how many tokens a step has, so there it is up to the rounding of float32.
    """
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) if on_cpu() or not one.numel() else rel_err(one, other) <= 1e-5
    if on_cpu():
        return one == other
    pairs = ((a[token], b[token]) for a, b in zip(one, other, strict=True) for token in a.keys() & b.keys())
    return all(abs(getattr(a, "logprob", a) - getattr(b, "logprob", b)) <= 1e-4 for a, b in pairs)


def rel_err(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|, where b is the reference; shapes must agree, and nan counts as infinite.

    Where b is infinite (a score of a key out of reach) a has to be the same, and neither maximum sees it.
    """
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} against the reference's {tuple(b.shape)}")
    a, b = a.double(), b.double()
    infinite = b.isinf()
    if infinite.any():
        if not torch.equal(a[infinite], b[infinite]):
            return float("inf")
        a, b = a[~infinite], b[~infinite]
    error = float((a - b).abs().max() / b.abs().max())
    return error if error == error else float("inf")


UNIT = 2.0**-24
"""What float32 rounds a number by, of its size."""
SAFETY = 8
"""Six products a block instead of one (a factor of 2.4 in the root), and the largest of many numbers instead of their
root mean square (3.3)."""


def rounding(depth: int = 5, width: int = 512) -> float:
    """How far two computations in float32 may be from each other, of the size of what is summed.

    A sum of `width` products rounds by about `UNIT * sqrt(width)` of the root sum of their squares, and `depth` blocks
    round independently of each other: together `UNIT * sqrt(depth * width)`. Kernels sum in orders of their own, so
    that no two processors round alike.

    Args:
        depth: how many blocks the model has; 1 for a single operation. The default is that of the tiny models.
        width: the longest sum: the stream's or the MLP's width.
    """
    return SAFETY * UNIT * math.sqrt(depth * width)


def logit_bound(logits: Any, depth: int = 5, width: int = 512) -> float:
    """How far a logit, or a difference of logits, may be from another computation of it in float32.

    Args:
        logits: of the computation, all of a row or several: their largest is the size that counts.
        depth, width: as for `rounding`.
    """
    size = float(torch.as_tensor(logits).double().abs().max())
    if not math.isfinite(size):
        raise AssertionError(f"the logits' size is {size}")
    return rounding(depth, width) * size


def close_logits(a: Any, b: Any, logits: Any, depth: int = 5, width: int = 512) -> bool:
    """Whether logits, differences of them or log-probabilities are the same but for rounding (`logit_bound`)."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    return bool(((a - b).abs() <= logit_bound(logits, depth, width)).all())  # nan is not close


def close_products(got: torch.Tensor, rows: torch.Tensor, directions: torch.Tensor) -> bool:
    """Whether `got` [n, k] are the products of rows [n, d] with directions [k, d], of a row and a direction each.

    A product may be near zero itself, so it is held to the lengths of what is multiplied.
    """
    rows, directions = rows.double(), directions.double()
    exact = rows @ directions.T
    if got.shape != exact.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} and {tuple(exact.shape)}")
    room = rounding() * rows.norm(dim=1, keepdim=True) * directions.norm(dim=1)
    return bool(((got.double() - exact).abs() <= room).all())
