"""How far rows are from a reference, and how long something may take."""

from __future__ import annotations

import asyncio
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
        return torch.equal(one, other) if on_cpu() else rel_err(one, other) <= 1e-5
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
