"""The largest values of rows, with ties in the order of their indices, and their records."""

from __future__ import annotations

import torch


def top_values(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest values of each row and where they are, the largest first.

    Of equal values the one with the smallest index comes first; NaN comes before all numbers.

    Args:
        values: float32 [n, m].
        k: at most m.

    Returns:
        (indices int64 [n, k], values float32 [n, k]).
    """
    # Integers in the order of the values, with the index in the lower half: no two are equal.
    bits = (values + 0.0).contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    backwards = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    keys = (ordered << 32 | backwards).topk(k, dim=1).values
    ids = values.shape[1] - 1 - (keys & 0xFFFFFFFF)
    return ids, values.gather(1, ids)


def as_records(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ids [n, k] and values float32 [n, k] side by side, bit for bit, as int32 [n, 2 k]."""
    return torch.cat([ids.int(), values.view(torch.int32)], 1)
