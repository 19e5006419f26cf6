"""Taps and columns: numbers of the places where a site is read, shared by three processes."""

from __future__ import annotations

from vllm_weir.schema.hooks import Site

STAGES = 3
"""Moments at one tap: before its interventions, after them, and at a boundary of two blocks also after resid_pre's."""

_IN_BLOCK = {"attn_out": 3, "resid_mid": 4, "mlp_out": 5}


def tap_of(site: Site) -> int:
    """The tap that serves a site: 0 the embedding, 1 the final norm, 2 what enters block 0; then four for each block L.

    Those are 4L+3 `attn_out`, 4L+4 `resid_mid`, 4L+5 `mlp_out` and 4L+6, which is block L's `resid_post` and the next
    one's `resid_pre`.
    """
    if site.hook == "embed":
        return 0
    if site.hook == "final_norm":
        return 1
    if site.hook in _IN_BLOCK:
        return 4 * site.layer + _IN_BLOCK[site.hook]
    return 4 * site.layer + (2 if site.hook == "resid_pre" else 6)


def is_boundary(tap: int) -> bool:
    """Whether a tap is on the stream between two blocks, before the first or after the last."""
    return tap >= 2 and tap % 4 == 2


def num_taps(num_layers: int) -> int:
    """Taps of a model of `num_layers` blocks, those that are not placed included."""
    return 4 * num_layers + 3


def column_of(site: Site, before: bool) -> int:
    """Column of the rank table: the tap and the stage at which the site's row is read."""
    stage = (1 if before else 2) if site.hook == "resid_pre" else (0 if before else 1)
    return tap_of(site) * STAGES + stage
