"""Requests that only warm an engine up: how short they may be, and how the rest of the frontend knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.schema.by_position import ByPosition

warming: ContextVar[bool] = ContextVar("weir_warming", default=False)
"""Whether requests that enter the engine only warm it up: nothing of them is counted, or goes to sinks."""
SHORTEST = 4
"""Tokens of the shortest prompt: with what is generated, a block of the KV cache is not full."""
EACH_UP_TO = 64
"""Lengths of prompts that are tried one by one; longer ones are powers of two."""


@contextmanager
def warming_up() -> Iterator[None]:
    """While this holds, requests of this task only warm the engine up."""
    token = warming.set(True)
    try:
        yield
    finally:
        warming.reset(token)


def prompt_lengths(admitted: AdmittedRequest, max_tokens: int, longest: int, largest_graph: int) -> list[int]:
    """Return how many tokens the prompts of a warm-up have: few, and more than a CUDA graph takes, if there are any.

    The first is the shortest prompt with which every position that the request asks for is reached. If none
    of up to `longest` tokens is enough, it is `SHORTEST`, with which the request is refused. The second is
    left out if positions do not let the prompt be so long.
    """
    lengths = {*range(SHORTEST, EACH_UP_TO), *(2**k for k in range(longest.bit_length())), longest}
    lengths |= {rows.rows for rows in admitted.by_position}
    tried = (length for length in sorted(lengths) if SHORTEST <= length <= longest)
    shortest = next((length for length in tried if _fits(admitted, length, max_tokens)), min(SHORTEST, longest))
    eager = min(largest_graph + 1, longest)
    if largest_graph and eager > shortest and _fits(admitted, eager, max_tokens):
        return [shortest, eager]
    return [shortest]


def _fits(admitted: AdmittedRequest, length: int, max_tokens: int) -> bool:
    end = length + max_tokens - 1
    reached = all(positions.reaches(length, end) for positions, _ in admitted.asked)
    return reached and all(_has_row_each(rows, length) for rows in admitted.by_position)


def _has_row_each(rows: ByPosition, length: int) -> bool:
    try:
        rows.check(length)
    except WeirError:
        return False
    return True
