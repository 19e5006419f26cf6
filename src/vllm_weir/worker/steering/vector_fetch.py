"""Fetching vectors that requests refer to by digest from the processes that admitted them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np
import zmq

from vllm_weir import messages

TIMEOUT_MS = 10_000
MOST_LINES = 16
"""Sockets that are kept open."""
MOST_AT_ONCE = 1024
"""Vectors in one message."""


class VectorFetcher:
    """One request-reply socket per caller, opened when first needed."""

    def __init__(self, d_model: int) -> None:
        self._d_model = d_model
        self._context = zmq.Context()
        self._lines: OrderedDict[str, zmq.Socket] = OrderedDict()
        self._ahead: dict[str, dict[str, np.ndarray]] = {}
        """Reply address -> what came along or was fetched ahead, by digest."""
        self._failed: dict[str, str] = {}
        """Reply address -> why nothing can be had from there at present."""
        # The context would wait for ever for lines that were garbage together with it.
        self.close = weakref.finalize(self, _close, self._context, self._lines)

    def take(self, reply: str, rows: Mapping[str, bytes]) -> None:
        """Vectors that came along with a request."""
        self._ahead.setdefault(reply, {}).update(self._rows(rows))

    def fetch_ahead(self, wanted: Mapping[str, Iterable[str]]) -> None:
        """Ask for what several requests will ask for, once per reply address; what cannot be had is left to them."""
        for reply, digests in wanted.items():
            here = self._ahead.setdefault(reply, {})
            asked = [digest for digest in dict.fromkeys(digests) if digest not in here]
            try:
                for k in range(0, len(asked), MOST_AT_ONCE):
                    here.update(self._ask(reply, asked[k : k + MOST_AT_ONCE]))
            except ValueError as e:
                self._failed[reply] = str(e)

    def forget(self) -> None:
        """Drop what came along or was fetched ahead."""
        self._ahead.clear()
        self._failed.clear()

    def fetch(self, reply: str, digests: list[str]) -> dict[str, np.ndarray]:
        """Rows [d_model] float32 by digest; raises ValueError if one cannot be had."""
        here = self._ahead.get(reply, {})
        missing = [digest for digest in digests if digest not in here]
        if not missing:
            return here
        if reply in self._failed:
            raise ValueError(self._failed[reply])
        found = here | self._ask(reply, missing)
        for digest in missing:
            if digest not in found:
                raise ValueError(f"the caller's process does not know vector {digest}")
        return found

    def _ask(self, reply: str, digests: list[str]) -> dict[str, np.ndarray]:
        """Those of the rows that the caller's process has; raises ValueError if it does not answer."""
        to = messages.ReaderEndpoint.parse(reply)
        try:
            line = self._line(to.vectors)
            line.send(messages.encode(messages.VectorQuery(to.token, digests)))
            frames = line.recv_multipart()
        except zmq.ZMQError as e:
            self._hang_up(to.vectors)
            raise ValueError(f"the caller's process did not answer: {e}") from None
        return self._rows(dict(zip(digests, frames, strict=True)))

    def _rows(self, frames: Mapping[str, bytes]) -> dict[str, np.ndarray]:
        """Those that are vectors of the model's width; an empty one stands for a vector that nobody has."""
        size = self._d_model * 4
        return {digest: np.frombuffer(frame, "<f4") for digest, frame in frames.items() if len(frame) == size}

    def _line(self, address: str) -> zmq.Socket:
        line = self._lines.get(address)
        if line is None:
            if len(self._lines) >= MOST_LINES:
                self._hang_up(next(iter(self._lines)))
            line = self._lines[address] = self._context.socket(zmq.REQ)
            line.setsockopt(zmq.LINGER, 0)
            line.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            line.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
            line.connect(address)
        self._lines.move_to_end(address)
        return line

    def _hang_up(self, address: str) -> None:
        line = self._lines.pop(address, None)
        if line is not None:
            line.close(linger=0)


def _close(context: zmq.Context, lines: OrderedDict[str, zmq.Socket]) -> None:
    for line in lines.values():
        line.close(linger=0)
    context.term()
