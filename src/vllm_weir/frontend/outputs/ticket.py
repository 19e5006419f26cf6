"""Tickets: what has become of one sequence's rows at one sink."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.sinks import Sink

_OPEN = ("queued", "held")
LONGEST = 200


def labels_of(ways: Sequence[tuple[Sink, str]]) -> list[str]:
    """What sinks are called beside one another: by name; where several have one, with their options, and whether rows
    wait there to be marked."""
    out = [sink.name for sink, _ in ways]
    for more in (
        [f"{sink.name} {sink.own.options[:LONGEST]}" if sink.own is not None else sink.name for sink, _ in ways],
        [f"{sink.name} (marked)" if keep == "marked" else "" for sink, keep in ways],
        [f"{sink.name} #{k}" for k, (sink, _) in enumerate(ways, 1)],
    ):
        times = Counter(out)
        out = [
            label if times[label] == 1 or not new else label + new.removeprefix(sink.name)
            for label, new, (sink, _) in zip(out, more, ways, strict=True)
        ]
    return out


class Ticket:
    """Made when a sequence finishes; a consumer's thread writes in it, outputs read it.

    Attributes:
        sink: the sink's name.
        required: whether the request fails with it.
        state: ``"queued"``, ``"held"``, ``"written"``, ``"dropped"``, ``"evicted"`` or ``"failed: <why>"``.
        files: what was written.
        missing: site -> rows that the worker had no room for, and that the sink therefore has not got.
    """

    def __init__(self, sink: str, required: bool, state: str = "queued") -> None:
        self.sink, self.required, self.state = sink, required, state
        self.files: tuple[str, ...] = ()
        self.missing: dict[Site, int] = {}
        self._over = threading.Event()
        self._settled = False

    def close(self, state: str, files: tuple[str, ...] = ()) -> None:
        """This is how it ended."""
        self.files, self.state = files, state
        self._over.set()

    def revise(self, state: str) -> None:
        """It ended otherwise than it seemed: rows that were taken could not be published, or now are."""
        self.state = state

    def settle(self, timeout: float) -> None:
        """Wait for rows that are on their way to the sink; not for those that are held until they are marked.

        Whoever was let through once is not stopped by what fails later: `state` tells.

        Raises:
            WeirError: if the sink has failed and the request depends on it, or takes longer than `timeout` seconds.
        """
        if self.state == "held":
            return
        if not self._over.wait(timeout):
            raise WeirError(f"the sink {self.sink!r} did not take the rows within {timeout:g} s", "sink")
        if self.required and self.state.startswith("failed") and not self._settled:
            raise WeirError(f"the sink {self.sink!r} {self.state}", "sink")
        self._settled = True

    def wait(self, timeout: float | None = None) -> tuple[str, ...]:
        """Wait until the rows are written; returns the files.

        Raises:
            WeirError: if they were not written, or not within `timeout` seconds.
        """
        if not self._over.wait(timeout):
            raise WeirError(f"the sink {self.sink!r} did not take the rows within {timeout:g} s", "sink")
        if self.state != "written":
            raise WeirError(f"the sink {self.sink!r} {self.state}", "sink")
        return self.files
