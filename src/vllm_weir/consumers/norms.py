"""The consumer ``logging``, which logs running norms of each site's rows."""

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
    """Statistics of the norms of one site's rows."""

    rows: int = 0  # how many
    total: float = 0.0  # sum of the norms
    squares: float = 0.0  # sum of their squares
    highest: float = 0.0  # the largest

    @property
    def mean(self) -> float:
        return self.total / self.rows

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.rows - self.mean**2))


def _set_up_logger() -> None:
    """Send reports where vLLM's log goes, unless the program has set up logging itself."""
    if logger.hasHandlers():
        return
    vllm_logger = logging.getLogger("vllm")
    for handler in vllm_logger.handlers or [logging.StreamHandler()]:
        logger.addHandler(handler)
    logger.setLevel(vllm_logger.level or logging.INFO)


class Norms(Consumer):
    """A consumer that logs the Euclidean norms of rows per site (INFO, logger ``vllm_weir.norms``).

    Args:
        seconds: least time between two reports; 0 reports after every sequence.
    """

    def __init__(self, seconds: float = 10.0, **unknown: Any) -> None:
        super().__init__(**unknown)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise WeirError("expected a number of seconds, at least 0", "seconds")
        _set_up_logger()
        self._seconds, self._reported_at = seconds, time.monotonic()
        self.sites: dict[Site, RunningNorms] = {}
        self._changed = False

    def take(self, rows: Rows) -> None:
        if not len(rows.positions):
            return
        norms = rows.decoded().double().flatten(1).norm(dim=-1)  # of all heads together
        running = self.sites.setdefault(rows.site, RunningNorms())
        running.rows += len(norms)
        running.total += float(norms.sum())
        running.squares += float(norms.square().sum())
        running.highest = max(running.highest, float(norms.max()))
        self._changed = True

    def finish(self, request: Finished) -> Sequence[str]:
        if time.monotonic() - self._reported_at >= self._seconds:
            self.report()
        return ()

    def flush(self) -> None:
        self.report()

    def close(self) -> None:
        self.report()

    def report(self) -> None:
        """Log every site, if rows have come since the last report."""
        if not self._changed:
            return
        for site, norms in sorted(self.sites.items(), key=lambda item: (item[0].layer, HOOKS.index(item[0].hook))):
            logger.info(
                "%s: %d rows, norm mean %.4g, std %.3g, highest %.4g",
                site,
                norms.rows,
                norms.mean,
                norms.std,
                norms.highest,
            )
        self._reported_at, self._changed = time.monotonic(), False
