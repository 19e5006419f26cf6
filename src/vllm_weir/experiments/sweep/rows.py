"""Rows of unpatched runs, and the interventions that put them into others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import MODEL_HOOKS, Site
from vllm_weir.schema.interventions import Replace


class RunRows:
    """The captured rows of a run.

    Args:
        activations: its `Activations`.
    """

    def __init__(self, activations: Any) -> None:
        self._rows: dict[Site, np.ndarray] = {site: activations.numpy(*site) for site in activations.sites}
        self._ranks = {
            site: {position: k for k, position in enumerate(activations.positions_of(*site).tolist())}
            for site in activations.sites
        }

    def at(self, site: Site, positions: Sequence[int], heads: Sequence[int] | None = None) -> np.ndarray:
        """Return rows [n, ...] at n positions; with `heads`, [n, heads picked, d_head]."""
        ranks = self._ranks[site]
        rows = self._rows[site][[ranks[position] for position in positions]]
        return rows if heads is None else rows[:, list(heads)]


def capture(sites: Sequence[Site], positions: Sequence[int], heads: Sequence[int] | None = None) -> tuple[Capture, ...]:
    """Return captures of some sites at some positions."""
    layers: dict[str, list[int]] = {}
    for site in sites:
        layers.setdefault(site.hook, []).append(site.layer)
    return tuple(
        Capture(hook, _layers(hook, at), positions=list(positions), heads=None if heads is None else list(heads))
        for hook, at in layers.items()
    )


def put(site: Site, rows: np.ndarray, positions: Sequence[int], heads: Sequence[int] | None = None) -> Replace:
    """Return the intervention that puts rows [n, ...] at n positions, ascending."""
    if heads is None:
        rows = rows.reshape(len(rows), -1)
    return Replace(
        rows, _layers(site.hook, [site.layer]), hook=site.hook, positions=list(positions),
        heads=None if heads is None else list(heads),
    )  # fmt: skip


def _layers(hook: str, layers: list[int]) -> Any:
    return "all" if hook in MODEL_HOOKS else layers
