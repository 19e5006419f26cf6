"""The device's copy engine, through the CUDA driver: many pieces with one call, and pieces with gaps between rows.

Copy engines leave the device's processors to the model; a kernel that wrote host memory would hold some of them up for
as long as the bus takes. PyTorch has neither call.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

_HOST, _DEVICE = 1, 2
_IN_STREAM_ORDER, _BESIDE_KERNELS = 1, 1


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_SIDE = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_void_p),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Memcpy2D(ctypes.Structure):
    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _SIDE),
        *((f"target_{name}", kind) for name, kind in _SIDE),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _batch():
    """The driver's batched copy (570 and later), or None."""
    try:
        function = _driver().cuMemcpyBatchAsync
    except AttributeError:
        return None
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
    return function


_ATTRIBUTES = _Attributes(_IN_STREAM_ORDER, (0, 0), (0, 0), _BESIDE_KERNELS)
_FIRST = (ctypes.c_size_t * 1)(0)


def copy_pieces(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
    """Copy pieces of memory from the device to the host.

    Args:
        targets, sources: addresses, int64 [n]; every target lies in one pinned range.
        sizes: bytes, int64 [n], all positive.
        stream: handle of a stream that is not the default one.
    """
    batch = _batch()
    if batch is None or len(targets) == 1:
        copy = _driver().cuMemcpyDtoHAsync_v2
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _check(
                copy(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_void_p(stream))
            )
        return
    arrays = [np.ascontiguousarray(a, np.int64) for a in (targets, sources, sizes)]
    failed = ctypes.c_size_t(0)
    _check(
        batch(
            *(a.ctypes.data for a in arrays),
            len(targets),
            ctypes.addressof(_ATTRIBUTES),
            ctypes.addressof(_FIRST),
            1,
            ctypes.addressof(failed),
            stream,
        )
    )


def copy_rows(target: int, target_pitch: int, source: int, row_bytes: int, rows: int, stream: int) -> None:
    """Copy `rows` rows that follow each other on the device to host addresses `target_pitch` bytes apart."""
    job = _Memcpy2D(
        source_type=_DEVICE,
        source_device=source,
        source_pitch=row_bytes,
        target_type=_HOST,
        target_host=target,
        target_pitch=target_pitch,
        width=row_bytes,
        height=rows,
    )
    _check(_driver().cuMemcpy2DAsync_v2(ctypes.byref(job), ctypes.c_void_p(stream)))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused a copy to host memory (error {code})")
