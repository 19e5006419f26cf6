"""`SiteVerdict`: whether an engine serves a site, and why not."""

from __future__ import annotations

from typing import NamedTuple

from vllm_weir.schema.row_shapes import RowShape


class SiteVerdict(NamedTuple):
    """Whether one hook point of one block is served.

    Attributes:
        hook: hook point.
        layer: block index; 0 for `embed` and `final_norm`.
        supported: whether it can be captured, and steered unless it is one of `READ_ONLY_HOOKS`.
        reason: why not, in one sentence; empty if it can.
        shape: of a row, say (d_model,) or (heads, d_head); a 0 in it stands for the number of keys,
            which differs from row to row. Empty if the site is not supported.
    """

    hook: str
    layer: int
    supported: bool
    reason: str = ""
    shape: RowShape = ()
