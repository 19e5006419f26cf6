"""Rows of unpatched runs, and the interventions that put them into others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.hooks import MODEL_HOOKS, Site
from vllm_weir.schema.interventions import Replace
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.vectors import Vector


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
        first = ranks[positions[0]]
        # A slice of one row is no copy; several positions need not follow each other.
        at = slice(first, first + 1) if len(positions) == 1 else [ranks[position] for position in positions]
        rows = self._rows[site][at]
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
    made = _replacing(site, None if heads is None else tuple(heads))
    values = Vector.parse(rows, f"{made.path}.values", (2, 3))
    return with_fields(made, values=values, positions=_selector(tuple(positions)))


@functools.lru_cache(maxsize=4096)
def _replacing(site: Site, heads: tuple[int, ...] | None) -> Replace:
    """Return the intervention at a site to which rows and positions are still to be given."""
    return Replace(np.zeros(1, np.float32), _layers(site.hook, [site.layer]), hook=site.hook, heads=heads)


@functools.lru_cache(maxsize=4096)
def _selector(positions: tuple[int, ...]) -> Positions:
    return Positions.parse(positions)


def _layers(hook: str, layers: list[int]) -> Any:
    return "all" if hook in MODEL_HOOKS else layers
