"""What fp32 itself is off: the reference in fp32 against the same reference in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.conformance.oracle import Oracle
from tests.support.measure import rel_err

ROUNDINGS = 4
"""Times the reference's own rounding that vLLM may be off from it: both round, in an order of their own."""
MOST = 1e-4
"""Where fp32 is off by more, nothing is told apart any more."""


def widened(bound: float, rounding: float) -> float:
    """The bound on max|d| / max|ref| where the reference's own rounding is `rounding`; never below `bound`."""
    return max(bound, min(MOST, ROUNDINGS * rounding))


class _Double(TorchFunctionMode):
    """float64 where float32 is asked for by name: norms, softmax and state spaces do so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@contextlib.contextmanager
def in_double(oracle: Oracle) -> Iterator[None]:
    """The oracle computes in float64."""
    experts = oracle.model.config._experts_implementation
    oracle.model.set_experts_implementation("eager")  # grouped products are for narrower numbers
    torch.set_default_dtype(torch.float64)
    oracle.model.double()
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        oracle.model.float()
        oracle.model.set_experts_implementation(experts)


def rounding_errors(oracle: Oracle, ids: Sequence[int], steer: tuple[Any, ...] | None = None) -> dict[Any, float]:
    """max|fp32 - float64| / max|float64| of every site {(hook, layer): ..} and of the log-probabilities, {"logprobs"}.

    `steer`: (hook, layer, vector) and, if not all, positions where it is added.
    """

    def run() -> dict[Any, torch.Tensor]:
        rows, logits = oracle.steer(ids, *steer) if steer else oracle.points(ids)
        return {**rows, "logprobs": logits.log_softmax(-1)}

    narrow = run()
    with in_double(oracle):
        wide = run()
    if any(value.dtype != torch.float64 for value in wide.values() if value.is_floating_point()):
        raise AssertionError("the reference did not stay in float64")
    return {at: rel_err(narrow[at], value) for at, value in wide.items()}
