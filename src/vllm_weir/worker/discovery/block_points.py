"""The result of the search in one block, and the identities that its points must satisfy."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_weir.schema.hooks import INNER_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor


@dataclass(frozen=True)
class Identity:
    """``whole == sum of parts``; for resid_post, the sum is multiplied by the block's gain."""

    whole: str
    parts: tuple[str, ...]

    @property
    def hooks(self) -> tuple[str, ...]:
        return (self.whole, *self.parts)


IDENTITIES = {
    "sequential": (
        Identity("resid_mid", ("resid_pre", "attn_out")),
        Identity("resid_post", ("resid_mid", "mlp_out")),
    ),
    "parallel": (Identity("resid_post", ("resid_pre", "attn_out", "mlp_out")),),
    "attention only": (Identity("resid_post", ("resid_pre", "attn_out")),),
    "MLP only": (Identity("resid_post", ("resid_pre", "mlp_out")),),
}
"""Kind of block -> what holds between its points on any input."""


@dataclass
class BlockPoints:
    """What was found in one block."""

    # hook point inside the block -> where it is, for those that were found
    anchors: dict[str, Anchor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    kind: str = "unknown"  # a key of `IDENTITIES`; "described" if a description names the points; or "unknown"
    gain: float = 1.0  # factor of the stream after the last addition, as it leaves the block

    @classmethod
    def none(cls, reason: str) -> BlockPoints:
        return cls(refused=dict.fromkeys(INNER_HOOKS, reason))

    @property
    def explained(self) -> bool:
        """Whether the block's output was found to be its input plus what its parts add."""
        return self.kind != "unknown"

    @property
    def complete(self) -> bool:
        """Whether every point that a block of this kind can have was found."""
        return len(self.anchors) == {"sequential": 3, "parallel": 2}.get(self.kind)
