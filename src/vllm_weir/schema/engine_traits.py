"""`EngineTraits`: what admission has to know of how an engine is configured. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTraits:
    """How an engine is configured, as far as it decides what a request may ask.

    Attributes:
        draft_tokens: tokens that speculative decoding drafts for a sequence in a step, at most; 0
            without it.
        drafts_ahead: whether a step is planned before it is known which drafts of the one before it
            are accepted (asynchronous scheduling).
        kv_connector: the KV connector, if it is one of which Weir does not know how it tells a
            steered request's keys and values from a plain one's; "" if there is none.
        media_both_ways: whether positions of an image attend to later ones of the same image.
        media_whole: whether all positions of an image, or the like, are computed in one step.
        pickles: whether functions that cannot travel otherwise go to the workers by cloudpickle.
    """

    draft_tokens: int = 0
    drafts_ahead: bool = False
    kv_connector: str = ""
    media_both_ways: bool = False
    media_whole: bool = False
    pickles: bool = False

    @property
    def speculative(self) -> bool:
        return self.draft_tokens > 0

    @property
    def uncertainty(self) -> int:
        """How far ahead of its true position a generated token may be planned."""
        return self.draft_tokens if self.drafts_ahead else 0


PLAIN_ENGINE = EngineTraits()
