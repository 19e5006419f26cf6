"""Options of an engine that decide what Weir does there, and the sizes of its tables."""

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


@dataclass(frozen=True)
class TableSizes:
    """Rows of the device tables.

    Attributes:
        vectors: of the table of vectors.
        programs: of the table of programs.
        nodes: of the table of instructions.
        probes: of the table of live requests' probes, which has a row for each.
        gates: of the table of their gates, likewise.
        states: numbers that probes and gates keep from step to step (`ResolvedProbe.state_size`; a gate has one).
        cells: of each token.
    """

    vectors: int
    programs: int
    nodes: int
    probes: int = 4096
    gates: int = 4096
    states: int = 1 << 18
    cells: int = 64
