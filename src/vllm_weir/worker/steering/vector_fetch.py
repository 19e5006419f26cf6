"""Fetching vectors that requests refer to by digest from the processes that admitted them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np
import zmq

from vllm_weir import messages

TIMEOUT_MS = 10_000
MOST_SOCKETS = 16
"""Sockets that are kept open."""
MOST_AT_ONCE = 1024
"""Vectors in one message."""
MOST_VALUES = 1 << 20
"""Values of a vector at most; no model has rows as wide."""


class VectorFetcher:
    """One request-reply socket per caller, opened when first needed.

    Vectors that came along with requests or were prefetched are kept until `clear`.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: OrderedDict[str, zmq.Socket] = OrderedDict()
        """By address, the one that was used last at the end."""
        self._received: dict[str, dict[str, np.ndarray]] = {}
        """Endpoint -> digest -> vector."""
        self._errors: dict[str, str] = {}
        """Endpoint -> why its vectors could not be prefetched."""
        # If context and sockets are collected together, the context waits for ever for the sockets.
        self.close = weakref.finalize(self, _close, self._context, self._sockets)

    def add_inline(self, endpoint: str, vectors: Mapping[str, bytes]) -> None:
        """Keep vectors that came along with a request: digest -> float32 bytes."""
        self._received.setdefault(endpoint, {}).update(_parse(vectors))

    def prefetch(self, wanted: Mapping[str, Iterable[str]]) -> None:
        """Fetch what several requests will ask for, in one go per endpoint: endpoint -> digests.

        Keep errors for the requests' own `fetch` to raise.
        """
        for endpoint, digests in wanted.items():
            received = self._received.setdefault(endpoint, {})
            missing = [digest for digest in dict.fromkeys(digests) if digest not in received]
            try:
                for k in range(0, len(missing), MOST_AT_ONCE):
                    received.update(self._query(endpoint, missing[k : k + MOST_AT_ONCE]))
            except ValueError as e:
                self._errors[endpoint] = str(e)

    def clear(self) -> None:
        """Drop what came along with requests or was prefetched."""
        self._received.clear()
        self._errors.clear()

    def fetch(self, endpoint: str, digests: list[str]) -> dict[str, np.ndarray]:
        """Return vectors, float32 [width], by digest, possibly with others; raise ValueError if one cannot be had."""
        received = self._received.get(endpoint, {})
        missing = [digest for digest in digests if digest not in received]
        if not missing:
            return received
        if endpoint in self._errors:
            raise ValueError(self._errors[endpoint])
        vectors = received | self._query(endpoint, missing)
        for digest in missing:
            if digest not in vectors:
                raise ValueError(f"the caller's process does not know vector {digest}")
        return vectors

    def _query(self, endpoint: str, digests: list[str]) -> dict[str, np.ndarray]:
        """Return the vectors that the caller has; raise ValueError if it does not answer."""
        reader = messages.ReaderEndpoint.parse(endpoint)
        try:
            socket = self._socket(reader.vectors)
            socket.send(messages.encode(messages.VectorQuery(reader.token, digests)))
            frames = socket.recv_multipart()
        except zmq.ZMQError as e:
            self._close_socket(reader.vectors)
            raise ValueError(f"the caller's process did not answer: {e}") from None
        return _parse(dict(zip(digests, frames, strict=True)))

    def _socket(self, address: str) -> zmq.Socket:
        socket = self._sockets.get(address)
        if socket is None:
            if len(self._sockets) >= MOST_SOCKETS:
                self._close_socket(next(iter(self._sockets)))
            socket = self._sockets[address] = self._context.socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            socket.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
            socket.connect(address)
        self._sockets.move_to_end(address)
        return socket

    def _close_socket(self, address: str) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close(linger=0)


def _parse(frames: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return the frames that are vectors; an empty one stands for a vector that the caller does not have.

    Whether a vector is as wide as it has to be is known where it is used.
    """
    return {
        digest: np.frombuffer(frame, "<f4")
        for digest, frame in frames.items()
        if 0 < len(frame) <= 4 * MOST_VALUES and len(frame) % 4 == 0
    }


def _close(context: zmq.Context, sockets: OrderedDict[str, zmq.Socket]) -> None:
    for socket in sockets.values():
        socket.close(linger=0)
    context.term()
