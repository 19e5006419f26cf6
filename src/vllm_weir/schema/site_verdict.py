"""`SiteVerdict`: whether an engine serves a site, and why not."""

from __future__ import annotations

from typing import NamedTuple


class SiteVerdict(NamedTuple):
    """Whether one hook point of one block is served.

    Attributes:
        hook: hook point.
        layer: block index; 0 for `embed` and `final_norm`.
        supported: whether it can be captured and steered.
        reason: why not, in one sentence; empty if it can.
    """

    hook: str
    layer: int
    supported: bool
    reason: str = ""
