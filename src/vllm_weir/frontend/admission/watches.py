"""`Watch`: what is counted of a probe that scores every request."""

from __future__ import annotations

from typing import NamedTuple


class Watch(NamedTuple):
    """What is counted of a probe that scores every request.

    Attributes:
        name: of the probe, the metrics' label ``probe``.
        buckets: upper bounds of the histogram of scores, ascending, without infinity.
        alerts: a threshold for each output, or None; a sequence counts as an alert if a score is above it. Empty for
            none.
    """

    name: str
    buckets: tuple[float, ...]
    alerts: tuple[float | None, ...] = ()
