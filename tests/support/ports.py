"""Ports for servers that tests and examples start."""

from __future__ import annotations

import os
import random
import socket

BELOW_EPHEMERAL = range(20_000, 32_000)
"""Ports that no outgoing connection of a test that runs beside takes in the meantime."""
_RANDOM = random.SystemRandom()
"""Engines seed the generator of the module, so it would give the same ports in every process."""


def free_port() -> int:
    """Return a port of this machine on which nobody listens, and which no other process of this test run returns.

    A server begins to listen a minute later, and shares a port with another of vLLM's without an error.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for port in _RANDOM.sample(BELOW_EPHEMERAL[number::processes], 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports in a row are taken")
