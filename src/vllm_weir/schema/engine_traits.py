"""`EngineTraits`: what admission has to know of how an engine is configured. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTraits:
    """How an engine is configured, as far as it decides what a request may ask.

    Attributes:
        draft_tokens: tokens that speculative decoding drafts for a sequence in a step; 0 without it.
    """

    draft_tokens: int = 0

    @property
    def speculative(self) -> bool:
        """Whether the engine verifies drafts."""
        return self.draft_tokens > 0
