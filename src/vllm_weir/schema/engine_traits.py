"""`EngineTraits`: what admission has to know of how an engine is configured. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTraits:
    """How an engine is configured, as far as it decides what a request may ask.

    Attributes:
        kv_connector: the KV connector, if it is one of which Weir does not know how it tells a
            steered request's keys and values from a plain one's; "" if there is none.
    """

    kv_connector: str = ""
