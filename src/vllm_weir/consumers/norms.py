"""The consumer ``logging``: running norms of the rows, site by site, in the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_weir.consumers.base import Consumer, Finished, Rows
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import HOOKS, Site

logger = logging.getLogger("vllm_weir.norms")


@dataclass
class RunningNorms:
    """Norms of one site's rows so far."""

    rows: int = 0
    total: float = 0.0
    squares: float = 0.0
    highest: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.rows

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.rows - self.mean**2))


def _be_heard() -> None:
    """Reports go where vLLM's log goes, unless the program has set up logging itself."""
    if logger.hasHandlers():
        return
    theirs = logging.getLogger("vllm")
    for handler in theirs.handlers or [logging.StreamHandler()]:
        logger.addHandler(handler)
    logger.setLevel(theirs.level or logging.INFO)


class Norms(Consumer):
    """Counts rows and their Euclidean norms per site, and logs them (INFO, logger ``vllm_weir.norms``).

    Args:
        seconds: least time between two reports; 0 reports after every sequence.
    """

    def __init__(self, seconds: float = 10.0, **unknown: Any) -> None:
        super().__init__(**unknown)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise WeirError("a number of seconds, at least 0", "seconds")
        _be_heard()
        self._seconds, self._last = seconds, time.monotonic()
        self.sites: dict[Site, RunningNorms] = {}
        self._fresh = False

    def take(self, rows: Rows) -> None:
        if not len(rows.positions):
            return
        norms = rows.decoded().double().norm(dim=-1)
        running = self.sites.setdefault(rows.site, RunningNorms())
        running.rows += len(norms)
        running.total += float(norms.sum())
        running.squares += float(norms.square().sum())
        running.highest = max(running.highest, float(norms.max()))
        self._fresh = True

    def finish(self, request: Finished) -> Sequence[str]:
        if time.monotonic() - self._last >= self._seconds:
            self.report()
        return ()

    def flush(self) -> None:
        self.report()

    def close(self) -> None:
        self.report()

    def report(self) -> None:
        """Log every site, if anything is new."""
        if not self._fresh:
            return
        for site, r in sorted(self.sites.items(), key=lambda item: (item[0].layer, HOOKS.index(item[0].hook))):
            logger.info("%s: %d rows, norm mean %.4g, std %.3g, highest %.4g", site, r.rows, r.mean, r.std, r.highest)
        self._last, self._fresh = time.monotonic(), False
