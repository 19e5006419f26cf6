"""What interventions do to parts of rows, by the formulas of `tests.support.steered`, head by head."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.steered import _apply


def apply_to_rows(item: Any, h: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows [n, width] under an intervention that acts on all of them.

    Args:
        item: with plain vectors; if they are for heads, [..., heads picked or 1, d_head], or [d_head].
        h: the rows.
        shape: of one row.
    """
    out = h.clone()
    if item.heads is not None:
        for k, head in enumerate(item.heads):
            columns = slice(head * shape[1], (head + 1) * shape[1])
            out[:, columns] = _apply(
                _with(item, lambda v, k=k: v if v.ndim < 3 else v[:, min(k, v.shape[1] - 1)]), h[:, columns]
            )
        return out
    if item.neurons is not None:
        out[:, list(item.neurons)] = _apply(item, h[:, list(item.neurons)])
        return out
    return _apply(
        _with(item, lambda v: v.reshape(*v.shape[: -len(shape)], -1) if v.shape[-len(shape) :] == shape else v), h
    )


def _with(item: Any, change: Any) -> Any:
    out = copy.copy(item)
    for name in item.vectors:
        if name != "b":
            value = change(getattr(item, name).array)
            object.__setattr__(out, name, SimpleNamespace(array=value))
    return out
