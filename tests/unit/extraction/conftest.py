"""What tests of runs share."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the disk is full."""
    state, real = [False], os.pwrite

    def pwrite(*args: Any) -> int:
        if state[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return state
