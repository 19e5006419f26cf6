"""The positions of a sweep: those that a body names, and where they are in the clean prompt. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_weir.compat.rhizonymph.sweep_schemas import PatchSweep
from vllm_weir.errors import WeirError, brief

MAX_SPANS = 64


def align(clean: Sequence[int], corrupt: Sequence[int]) -> tuple[dict[int, int], dict[str, Any]]:
    """Return where each position of the corrupt prompt is in the clean one, and a summary.

    Prompts of one length agree position by position. Of others the first tokens that are the same do, and the
    last; positions between have no counterpart.
    """
    same = len(clean) == len(corrupt)
    first = len(corrupt) if same else _shared(clean, corrupt)
    last = 0 if same else _shared(clean[first:][::-1], corrupt[first:][::-1])
    shift = len(clean) - len(corrupt)
    sources = {p: p for p in range(first)} | {p: p + shift for p in range(len(corrupt) - last, len(corrupt))}
    unaligned = [p for p in range(len(corrupt)) if p not in sources]
    lengths = {"n_clean": len(clean), "n_corrupt": len(corrupt), "prefix_len": first, "suffix_len": last}
    return sources, {**lengths, "unaligned_positions": unaligned}


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def positions_of(body: PatchSweep, ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return the positions of the grid, each once; spans are those of the tokens that cover their text."""
    if body.positions == "all_prompt":
        return list(range(len(ids)))
    found: dict[int, None] = {}
    offsets = None
    if sum(not isinstance(one, int) for one in body.positions) > MAX_SPANS:
        raise WeirError(f"more than {MAX_SPANS} texts", "positions")
    for k, one in enumerate(body.positions):
        if isinstance(one, int):
            if not 0 <= one < len(ids):
                raise WeirError(f"the prompt has {len(ids)} tokens", f"positions[{k}]")
            found[one] = None
            continue
        start = -1
        for _ in range(one.occurrence + 1):
            start = body.prompt.find(one.span, start + 1) if one.span else -1
            if start < 0:
                raise WeirError(f"{brief(one.span)!r} is not so often in the prompt", f"positions[{k}]")
        if offsets is None:
            offsets = tokenizer(body.prompt, return_offsets_mapping=True)["offset_mapping"]
        end = start + len(one.span)
        found |= {p: None for p, (low, high) in enumerate(offsets) if low < end and high > start}
    return list(found)
