"""Ports for servers: two processes of a test run never get the same one."""

from __future__ import annotations

import random
import socket

import pytest

from tests.support import ports
from tests.support.ports import BELOW_EPHEMERAL, free_port


def taken(monkeypatch: pytest.MonkeyPatch, worker: str) -> set[int]:
    """The ports that a process gets which an engine has seeded."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    random.seed(0)
    return {free_port() for _ in range(200)}


def test_processes_share_no_port(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    first, again, other = (taken(monkeypatch, worker) for worker in ("gw0", "gw0", "gw1"))
    assert not (first | again) & other
    assert first != again, "engines seed the generator"
    assert (first | again | other) <= set(BELOW_EPHEMERAL)


def test_a_port_on_which_somebody_listens_is_passed_over(monkeypatch):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", free_port()))
        listening.listen()
        used = listening.getsockname()[1]
        monkeypatch.setattr(ports, "BELOW_EPHEMERAL", [used] * 99 + [free_port()])
        monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
        assert free_port() != used
