"""The host buffer on CUDA, by a driver that remembers what is pinned: when, and that a closed buffer leaves nothing."""

from __future__ import annotations

import mmap

import pytest
import torch

from vllm_weir.errors import WeirError
from vllm_weir.worker.transfer import pinned_buffer
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer

ROW = 2048


class Driver:
    """CUDA's registry of host memory: addresses that are registered stay so until somebody says otherwise."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        overlaps = any(a < address + size and address < a + n for a, n in self.registered.items())
        if overlaps:
            return 712
        self.registered[address] = size
        self.calls.append("register")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0 if self.registered.pop(address, None) else 713

    def synchronize(self, device: int) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(pinned_buffer, "BLOCK", 16 * mmap.PAGESIZE)
    for name, fake in {
        "cudart": lambda: driver,
        "check_error": check,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": driver.synchronize,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return driver


def test_a_closed_buffer_leaves_nothing_registered(driver: Driver) -> None:
    """Or the next engine of the process, whose buffer falls on the same addresses, cannot pin it."""
    buffer = HostBuffer(10 * 16 * mmap.PAGESIZE // ROW, ROW, pin=True)
    buffer.prepare(0, 3)
    buffer.prepare(8 * 16 * mmap.PAGESIZE // ROW, 1)
    assert driver.registered
    buffer.close()
    assert not driver.registered
    assert driver.calls.index("synchronize") > max(i for i, c in enumerate(driver.calls) if c == "register")
    assert driver.calls.index("synchronize") < driver.calls.index("unregister")
    buffer.close()  # again


def test_one_buffer_after_the_other_on_the_same_addresses(driver: Driver) -> None:
    for _ in range(4):
        buffer = HostBuffer(4 * 16 * mmap.PAGESIZE // ROW, ROW, pin=True)
        buffer.prepare(0, buffer.rows)
        assert sum(driver.registered.values()) == len(buffer.bytes) and len(driver.registered) == -(
            -len(buffer.bytes) // (16 * mmap.PAGESIZE)
        )
        buffer.close()
        del buffer


def test_memory_that_cannot_be_pinned_fails_the_request_that_needs_it(driver: Driver, monkeypatch) -> None:
    """And no other: the next one gets its rows once there is memory again. Any other error ends the engine."""
    pin = driver.cudaHostRegister
    monkeypatch.setattr(HostBuffer, "_pin_ahead", lambda self: None)
    buffer = HostBuffer(4 * 16 * mmap.PAGESIZE // ROW, ROW, pin=True)

    def refused(says: str) -> None:
        def fail(*_: int) -> int:
            raise RuntimeError(says)

        monkeypatch.setattr(driver, "cudaHostRegister", fail)

    refused("CUDA error: out of memory (2)")
    with pytest.raises(WeirError, match="no memory left that can be pinned"):
        buffer.prepare(0, 3)
    refused("CUDA error: invalid argument (1)")
    with pytest.raises(RuntimeError, match="invalid argument"):
        buffer.prepare(0, 3)
    monkeypatch.setattr(driver, "cudaHostRegister", pin)
    buffer.prepare(0, 3)
    assert driver.registered
    buffer.close()


def test_no_device_no_driver(driver: Driver) -> None:
    buffer = HostBuffer(4, ROW, pin=False)
    buffer.prepare(0, 4)
    buffer.close()
    assert not driver.calls
