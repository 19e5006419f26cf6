"""Ports for servers that tests and examples start."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(20_000, 32_000)
"""Ports that no outgoing connection of a test that runs beside takes in the meantime."""


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    for port in random.sample(BELOW_EPHEMERAL, 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports in a row are taken")
