"""`SiteVerdict`: whether an engine serves a site, and why not."""

from __future__ import annotations

from typing import NamedTuple


class SiteVerdict(NamedTuple):
    """One hook point of one block (`embed` and `final_norm`: layer 0).

    Attributes:
        supported: whether it can be captured and steered.
        reason: why not, in one sentence; empty if it can.
    """

    hook: str
    layer: int
    supported: bool
    reason: str = ""
