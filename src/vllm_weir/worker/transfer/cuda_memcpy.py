"""Copies to the host by the device's copy engine, through the CUDA driver.

One call copies many pieces, or pieces with gaps between their rows; PyTorch has neither. A kernel
that writes host memory would keep some of the device's processors busy for as long as the bus
takes; the copy engine leaves them to the model.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

_HOST, _DEVICE = 1, 2
_IN_STREAM_ORDER, _BESIDE_KERNELS = 1, 1


class _Attributes(ctypes.Structure):
    """The driver's CUmemcpyAttributes."""

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
    """The driver's CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _SIDE),
        *((f"target_{name}", kind) for name, kind in _SIDE),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_OPERAND = [
    ("type", "<i4"),
    ("_", "<i4"),
    ("address", "<u8"),
    ("pitch", "<u8"),
    ("rows", "<u8"),
    ("hint", "<i8"),
]
_RUN = np.dtype(
    [
        ("source", _OPERAND),
        ("target", _OPERAND),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("order", "<i4"),
        ("flags", "<u4"),
    ]
)
"""The driver's CUDA_MEMCPY3D_BATCH_OP, with operands that are addresses."""
_ADDRESS = 1
"""The operand type for that."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver_function(name: str, *argument_types: Any) -> Any:
    """Return a function that drivers have from version 570 on, or None."""
    function = getattr(_driver(), name, None)
    if function is not None:
        function.argtypes = argument_types
    return function


@functools.cache
def _copy_batch() -> Any:
    """Return the driver's function that copies many pieces, or None."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return _driver_function(
        "cuMemcpyBatchAsync", pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )


@functools.cache
def _copy_batch_of_runs() -> Any:
    """Return the driver's function that copies many runs of pieces with gaps, or None."""
    pointer = ctypes.c_void_p
    return _driver_function("cuMemcpy3DBatchAsync", ctypes.c_size_t, pointer, pointer, ctypes.c_ulonglong, pointer)


_ATTRIBUTES = _Attributes(_IN_STREAM_ORDER, (0, 0), (0, 0), _BESIDE_KERNELS)
_ATTRIBUTES_FROM = (ctypes.c_size_t * 1)(0)
"""The first copy that the attributes are for."""


def copy_pieces(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
    """Copy pieces of memory from the device to the host.

    Args:
        targets: addresses on the host, int64 [n]; each piece lies in one pinned range.
        sources: addresses on the device, int64 [n].
        sizes: bytes, int64 [n], all positive.
        stream: handle of a stream that is not the default one.
    """
    batch = _copy_batch()
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
            ctypes.addressof(_ATTRIBUTES_FROM),
            1,
            ctypes.addressof(failed),
            stream,
        )
    )


def copy_runs(
    targets: np.ndarray,
    target_pitches: np.ndarray,
    sources: np.ndarray,
    source_pitch: int,
    widths: np.ndarray,
    counts: np.ndarray,
    stream: int,
) -> None:
    """Copy runs of pieces of memory, with gaps between the pieces, from the device to the host.

    Args:
        targets: addresses of the first pieces on the host, int64 [n]; each run lies in one pinned
            range.
        target_pitches: bytes from one piece of a run to the next on the host, int64 [n], at least
            its width.
        sources: addresses of the first pieces on the device, int64 [n].
        source_pitch: bytes from one piece of a run to the next on the device, the same for all
            runs.
        widths: bytes of a piece, int64 [n].
        counts: pieces of each run, int64 [n], all positive.
        stream: handle of a stream that is not the default one.
    """
    batch = _copy_batch_of_runs()
    if batch is None:
        columns = np.stack([targets, target_pitches, sources, widths, counts], 1)
        for target, target_pitch, source, width, count in columns.tolist():
            copy_run(target, target_pitch, source, source_pitch, width, count, stream)
        return
    runs = np.zeros(len(targets), _RUN)
    for side, addresses, pitch in (("source", sources, source_pitch), ("target", targets, target_pitches)):
        operand = runs[side]
        operand["type"], operand["address"], operand["pitch"], operand["rows"] = _ADDRESS, addresses, pitch, counts
    runs["width"], runs["height"], runs["depth"] = widths, counts, 1
    runs["order"], runs["flags"] = _IN_STREAM_ORDER, _BESIDE_KERNELS
    failed = ctypes.c_size_t(0)
    _check(batch(len(runs), runs.ctypes.data, ctypes.addressof(failed), 0, stream))


def copy_run(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int, stream: int
) -> None:
    """Copy one run; for the arguments see `copy_runs`."""
    copy = _Memcpy2D(
        source_type=_DEVICE,
        source_device=source,
        source_pitch=source_pitch,
        target_type=_HOST,
        target_host=target,
        target_pitch=target_pitch,
        width=width,
        height=count,
    )
    _check(_driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream)))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused a copy to host memory: CUDA error {code}")
