"""Taps and columns: the numbers of the places where sites are read."""

from __future__ import annotations

from vllm_weir.schema.hooks import Site

STAGES = 3
"""Stages of a tap at which rows are read: before its interventions, after them, and at a boundary
of two blocks also after those at the next block's `resid_pre`."""

_IN_BLOCK = {"attn_out": 3, "resid_mid": 4, "mlp_out": 5}


def tap_of(site: Site) -> int:
    """Return the tap that serves a site.

    Tap 0 is `embed`, 1 `final_norm`, 2 what enters block 0. Each block L has four: 4L+3 `attn_out`,
    4L+4 `resid_mid`, 4L+5 `mlp_out`, and 4L+6, which is its `resid_post` and the next block's
    `resid_pre`.
    """
    if site.hook == "embed":
        return 0
    if site.hook == "final_norm":
        return 1
    if site.hook in _IN_BLOCK:
        return 4 * site.layer + _IN_BLOCK[site.hook]
    return 4 * site.layer + (2 if site.hook == "resid_pre" else 6)


def is_boundary(tap: int) -> bool:
    """Return whether a tap is between two blocks, before the first or after the last."""
    return tap >= 2 and tap % 4 == 2


def num_taps(num_layers: int) -> int:
    """Return the number of taps of a model of `num_layers` blocks, placed or not."""
    return 4 * num_layers + 3


def column_of(site: Site, before: bool) -> int:
    """Return the site's column in the rank table, which has one for each tap and stage."""
    stage = (1 if before else 2) if site.hook == "resid_pre" else (0 if before else 1)
    return tap_of(site) * STAGES + stage
