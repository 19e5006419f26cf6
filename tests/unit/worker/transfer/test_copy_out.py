"""Copies out of the ring: what the driver is told. No device is needed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from vllm_weir.worker.transfer import cuda_memcpy


class FakeDriver:
    """Copies within this process's memory; counts the calls."""

    def __init__(self, code=0):
        self.code, self.calls = code, []

    def cuMemcpyDtoHAsync_v2(self, target, source, size, stream):
        self.calls.append((size.value, stream.value))
        ctypes.memmove(target.value, source.value, size.value)
        return self.code

    def cuMemcpy2DAsync_v2(self, job, stream):
        job = job._obj
        self.calls.append((job.source_type, job.target_type, stream.value))
        for k in range(job.height):
            ctypes.memmove(job.target_host + k * job.target_pitch, job.source_device + k * job.source_pitch, job.width)
        return self.code


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(cuda_memcpy, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_memcpy, "_copy_batch", lambda: None)
    return fake


def test_pieces_without_the_batched_call(driver):
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    at, to, sizes = np.array([0, 50]), np.array([10, 60]), np.array([5, 20])
    cuda_memcpy.copy_pieces(target.ctypes.data + to, source.ctypes.data + at, sizes, 7)
    assert driver.calls == [(5, 7), (20, 7)]
    assert target[10:15].tolist() == [0, 1, 2, 3, 4] and target[60:80].tolist() == list(range(50, 70))
    assert target.sum() == source[:5].sum() + source[50:70].sum()


def test_the_batched_call_is_told_all_pieces(monkeypatch):
    told = {}

    def batch(targets, sources, sizes, count, attributes, first, kinds, failed, stream):
        def read(address):
            return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).tolist()

        told.update(targets=read(targets), sources=read(sources), sizes=read(sizes), kinds=kinds, stream=stream)
        told["order"] = ctypes.c_int.from_address(attributes).value
        return 0

    monkeypatch.setattr(cuda_memcpy, "_copy_batch", lambda: batch)
    strided = np.arange(6, dtype=np.int64).reshape(3, 2)
    cuda_memcpy.copy_pieces(strided[:, 0], strided[:, 1], np.array([8, 9, 10]), 3)
    assert told == dict(targets=[0, 2, 4], sources=[1, 3, 5], sizes=[8, 9, 10], kinds=1, stream=3, order=1)


def test_rows_with_gaps(driver):
    source, target = np.arange(24, dtype=np.uint8), np.zeros(60, np.uint8)
    cuda_memcpy.copy_run(target.ctypes.data, 15, source.ctypes.data, 6, 5, 4, 9)
    assert driver.calls == [(2, 1, 9)]
    for k in range(4):
        assert target[15 * k : 15 * k + 5].tolist() == source[6 * k : 6 * k + 5].tolist()
        assert not target[15 * k + 5 : 15 * k + 15].any()


def test_a_refused_copy_is_an_error(driver):
    driver.code = 1
    row = np.zeros(8, np.uint8)
    with pytest.raises(RuntimeError, match="error 1"):
        cuda_memcpy.copy_run(row.ctypes.data, 4, row.ctypes.data, 4, 4, 1, 0)
    with pytest.raises(RuntimeError, match="error 1"):
        cuda_memcpy.copy_pieces(*[np.array([row.ctypes.data])] * 2, np.array([1]), 0)


def test_structures_have_the_size_that_the_driver_expects():
    assert ctypes.sizeof(cuda_memcpy._Memcpy2D) == 128 and ctypes.sizeof(cuda_memcpy._Attributes) == 24
    assert cuda_memcpy._RUN.itemsize == 112


def test_runs_without_the_batched_call(driver, monkeypatch):
    monkeypatch.setattr(cuda_memcpy, "_copy_batch_of_runs", lambda: None)
    source, target = np.arange(24, dtype=np.uint8), np.zeros(60, np.uint8)
    to, at = target.ctypes.data + np.array([0, 40]), source.ctypes.data + np.array([0, 12])
    cuda_memcpy.copy_runs(to, np.array([10, 6]), at, 6, np.array([6, 4]), np.array([2, 1]), 9)
    assert driver.calls == [(2, 1, 9)] * 2
    wanted = np.zeros(60, np.uint8)
    wanted[0:6], wanted[10:16], wanted[40:44] = range(6), range(6, 12), range(12, 16)
    assert target.tolist() == wanted.tolist()


def test_the_batched_call_is_told_all_runs(monkeypatch):
    told = []

    def batch(count, runs, failed, flags, stream):
        told.append((flags, stream))
        told.extend(
            np.ctypeslib.as_array((ctypes.c_uint8 * (count * 112)).from_address(runs)).view(cuda_memcpy._RUN).tolist()
        )
        return 0

    monkeypatch.setattr(cuda_memcpy, "_copy_batch_of_runs", lambda: batch)
    one, two = np.array([100, 64, 1, 16, 3]), np.array([200, 32, 2, 8, 4])
    targets, pitches, sources, widths, counts = np.stack([one, two], 1)
    cuda_memcpy.copy_runs(targets, pitches, sources, 24, widths, counts, 5)
    assert told == [
        (0, 5),
        ((1, 0, 1, 24, 3, 0), (1, 0, 100, 64, 3, 0), 16, 3, 1, 1, 1),
        ((1, 0, 2, 24, 4, 0), (1, 0, 200, 32, 4, 0), 8, 4, 1, 1, 1),
    ]
    monkeypatch.setattr(cuda_memcpy, "_copy_batch_of_runs", lambda: lambda *_: 1)
    with pytest.raises(RuntimeError, match="error 1"):
        cuda_memcpy.copy_runs(targets, pitches, sources, 24, widths, counts, 5)
