"""Fetching vectors that a request refers to by digest from the process that admitted it."""

from __future__ import annotations

import numpy as np
import zmq

from vllm_weir import mail

TIMEOUT_MS = 10_000


class Fetcher:
    """One request-reply socket per caller, opened when first needed."""

    def __init__(self, d_model: int) -> None:
        self._d_model = d_model
        self._context = zmq.Context()

    def fetch(self, reply: str, digests: list[str]) -> dict[str, np.ndarray]:
        """Rows [d_model] float32 by digest; raises ValueError if one cannot be had."""
        to = mail.Reply.parse(reply)
        socket = self._context.socket(zmq.REQ)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            socket.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
            socket.connect(to.vectors)
            socket.send(mail.encode(mail.Wanted(to.token, digests)))
            frames = socket.recv_multipart()
        except zmq.ZMQError as e:
            raise ValueError(f"the caller's process did not answer: {e}") from None
        finally:
            socket.close()
        rows = {}
        for digest, frame in zip(digests, frames, strict=True):
            row = np.frombuffer(frame, "<f4")
            if row.shape != (self._d_model,):
                raise ValueError(f"the caller's process does not know vector {digest}")
            rows[digest] = row
        return rows
