"""What has become of one sequence's rows at one sink."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.sinks import Sink

MAX_OPTIONS_CHARS = 200
"""Characters of a sink's options in its label."""


def labels_of(destinations: Sequence[tuple[Sink, str]]) -> list[str]:
    """Return a label for each sink of a request, by which a receipt tells them apart.

    A label is the sink's name; where several sinks share one, their options follow, then whether
    rows wait to be marked, then a number.

    Args:
        destinations: sinks, and ``"always"`` or ``"marked"``.
    """
    labels = [sink.name for sink, _ in destinations]
    for longer_labels in (
        [
            f"{sink.name} {sink.own.options[:MAX_OPTIONS_CHARS]}" if sink.own is not None else sink.name
            for sink, _ in destinations
        ],
        [f"{sink.name} (marked)" if keep == "marked" else "" for sink, keep in destinations],
        [f"{sink.name} #{k}" for k, (sink, _) in enumerate(destinations, 1)],
    ):
        times = Counter(labels)
        labels = [
            label if times[label] == 1 or not longer else label + longer.removeprefix(sink.name)
            for label, longer, (sink, _) in zip(labels, longer_labels, destinations, strict=True)
        ]
    return labels


class Ticket:
    """The state of a finished sequence's rows at a sink.

    The sink's thread writes it, outputs read it.

    Attributes:
        required: whether the request fails with it.
        state: ``"queued"``, ``"held"``, ``"written"``, ``"dropped"``, ``"evicted"`` or
            ``"failed: <why>"``.
        files: what was written.
        missing: site -> rows that the worker had no room for, so that the sink did not get them.

    Args:
        served: whether it is read by clients of a server, who must not learn where a sink lies: then files have
            their last names only, and a failure's reason is left to the log.
    """

    def __init__(self, sink: str, required: bool, state: str = "queued", served: bool = False) -> None:
        self.sink, self.required, self.state, self._served = sink, required, state, served
        self.files: tuple[str, ...] = ()
        self.missing: dict[Site, int] = {}
        self._closed = threading.Event()
        self._settled = False

    def close(self, state: str, files: tuple[str, ...] = ()) -> None:
        """Set the state, final but for `revise`, and wake whoever waits for it."""
        self.files = tuple(os.path.basename(file.rstrip("/")) for file in files) if self._served else files
        self.revise(state)
        self._closed.set()

    def revise(self, state: str) -> None:
        """Correct the final state: rows that were taken were not published, or were after all."""
        hidden = self._served and state.startswith("failed: ")
        self.state = "failed: the server's log has the reason" if hidden else state

    def settle(self, timeout: float) -> None:
        """Wait until the sink has taken the rows; not for rows that are held until they are marked.

        Once the sink has taken the rows, a later failure is not raised: `state` tells.

        Raises:
            WeirError: if the sink has failed and the request depends on it, or takes longer than
                `timeout` seconds.
        """
        if self.state == "held":
            return
        self._await_close(timeout)
        if self.required and self.state.startswith("failed") and not self._settled:
            raise WeirError(f"the sink {self.sink!r} {self.state}", "sink")
        self._settled = True

    def wait(self, timeout: float | None = None) -> tuple[str, ...]:
        """Wait until the rows are written, and return the files.

        Raises:
            WeirError: if they were not written, or not within `timeout` seconds.
        """
        self._await_close(timeout)
        if self.state != "written":
            raise WeirError(f"the sink {self.sink!r} {self.state}", "sink")
        return self.files

    def _await_close(self, timeout: float | None) -> None:
        if not self._closed.wait(timeout):
            raise WeirError(f"the sink {self.sink!r} did not take the rows within {timeout:g} s", "sink")
