"""The codecs of live requests: what their rows are compressed with on the device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir import codec
from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import Compression

MAX_IDLE = 4
"""Codecs that are kept ready though no live request uses them."""
MAX_VALUES = 1 << 24
"""Values that are encoded at once, which bounds the float32 copies that encoding makes."""
PROBE_ROWS = 8
"""Rows that a kernel is checked with."""


@dataclass(frozen=True)
class Codec:
    """A compression of rows [n, d_model], ready for use on the device.

    Attributes:
        compression: method and parameters.
        projection: float32 [k, d_model] on the device, None for a method without one.
        halves: the projection as a sum of two in the rows' own dtype, [2 k, d_model]; None where
            none is used.
        record_bytes: bytes of a compressed row.
        d_model: values of a row.
        by_column: whether what is done to a row depends on its column.
    """

    compression: Compression
    projection: torch.Tensor | None
    halves: torch.Tensor | None
    record_bytes: int
    d_model: int
    by_column = False

    @property
    def quick(self) -> bool:
        """Whether a kernel of Weir packs a step's rows on CUDA, in microseconds."""
        return bool(self._kernel_width())

    def encode(self, rows: torch.Tensor, spread: bool | None = None) -> torch.Tensor:
        """Return the records of rows [n, d_model], uint8 [n, record_bytes]; `spread`: see `codec_kernels.project`."""
        if rows.is_cuda and (width := self._kernel_width()):
            from vllm_weir.worker.transfer.codec_kernels import PROJECTED, pack, project

            if self.halves is not None and width in PROJECTED:
                return project(rows.contiguous(), self.halves, spread)
            return pack(rows.contiguous() if self.projection is None else self._project(rows), width)
        step = max(1, MAX_VALUES // rows.shape[1])
        if len(rows) <= step:
            return codec.encode(rows, self.compression, self.projection)
        out = torch.empty(len(rows), self.record_bytes, dtype=torch.uint8, device=rows.device)
        for first in range(0, len(rows), step):
            out[first : first + step] = codec.encode(rows[first : first + step], self.compression, self.projection)
        return out

    def check_kernel(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compare the kernel's records of a few rows with those of `vllm_weir.codec`.

        Waits for the device. Raises WeirError if they differ by more than rounding can explain.
        """
        if not self.quick:
            return
        d = self.d_model
        rows = torch.randn(PROBE_ROWS, d, generator=torch.Generator().manual_seed(0)).to(dtype)
        rows[0], rows[1, d // 2] = 2.5, torch.nan
        expected = _decode_affine(codec.encode(rows, self.compression))
        # Two orders of summation give slightly different sums, and so codes that differ by one.
        step = (expected.amax(1, keepdim=True) - expected.amin(1, keepdim=True)) / 255
        allowed = 1.5 * step + 1e-4 * expected.abs().amax(1, keepdim=True)
        for spread in (None,) if self.halves is None else (True, False):
            found = _decode_affine(self.encode(rows.to(device), spread).cpu())
            if not (((found - expected).abs() <= allowed) | (found.isnan() & expected.isnan())).all():
                raise WeirError(
                    f"the kernel that packs {self.compression.method} does not agree with the plain code on this "
                    "device; ask for another compression, and report this",
                    "compress",
                )

    def _kernel_width(self) -> int:
        """Return the values of a record if a kernel can pack them, else 0."""
        width = {"full8": self.d_model, "rp8": self.compression.k or 0}.get(self.compression.method, 0)
        return 0 if width % 4 else width

    def _project(self, rows: torch.Tensor) -> torch.Tensor:
        """Return projections, float32 [n, k], or [n, 2 k] of which the halves are to be added."""
        if self.halves is None:
            assert self.projection is not None
            return rows.float() @ self.projection.T
        # Tensor cores take the rows in their own dtype and sum in float32.
        return torch.mm(rows, self.halves.T, out_dtype=torch.float32)


def _decode_affine(records: torch.Tensor) -> torch.Tensor:
    """Return the values of records of the affine code, float32 [n, k]."""
    scale, low = records[:, :8].contiguous().view(torch.float32).T
    return records[:, 8:] * scale[:, None] + low[:, None]


class Codecs:
    """The codecs in use, by number. Those of compressions are made once for all requests that use them."""

    def __init__(self, d_model: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._d_model, self._device, self._dtype = d_model, device, dtype
        self._numbers = itertools.count()
        self._numbers_by_compression: dict[Compression, int] = {}
        self._codecs: dict[int, Any] = {}
        self._users: dict[Compression, set[str]] = {}
        self._held: dict[str, Compression] = {}

    def __getitem__(self, number: int) -> Any:
        return self._codecs[number]

    def add(self, codec: Any) -> int:
        """Add an object that encodes as `Codec` does; return its number, for `remove`."""
        number = next(self._numbers)
        self._codecs[number] = codec
        return number

    def remove(self, number: int) -> None:
        del self._codecs[number]

    def hold(self, request_id: str, compression: Compression) -> int:
        """Return the number of the compression's codec, which `request_id` uses until `release`.

        Raises WeirError if the device cannot compute it.
        """
        number = self._numbers_by_compression.pop(compression, None)
        if number is None:
            number = next(self._numbers)
            self._codecs[number] = self._make(compression)
        # At the end of the dict: the codec that was used last is removed last.
        self._numbers_by_compression[compression] = number
        self._users.setdefault(compression, set()).add(request_id)
        self._held[request_id] = compression
        return number

    def _make(self, compression: Compression) -> Codec:
        projection = halves = None
        if compression.method == "rp8":
            projection = codec.projection(compression.seed, compression.k or 0, self._d_model)
            if self._dtype.itemsize == 2 and self._device.type == "cuda":
                high = projection.to(self._dtype)
                halves = torch.cat([high, (projection - high.float()).to(self._dtype)]).to(self._device)
            projection = projection.to(self._device)
        record_bytes = compression.record_bytes(self._d_model)
        new_codec = Codec(compression, projection, halves, record_bytes, self._d_model)
        if self._device.type == "cuda":
            self._check_kernel(new_codec)
        return new_codec

    def _check_kernel(self, new_codec: Codec) -> None:
        """Compile a codec's kernel and check its results; raise WeirError if either fails."""
        from triton.errors import TritonError

        try:
            new_codec.check_kernel(self._dtype, self._device)
        except torch.OutOfMemoryError:
            raise  # says nothing of the kernel
        except (TritonError, RuntimeError) as e:
            method = new_codec.compression.method
            raise WeirError(f"{method} cannot be computed on this device: {e}", "compress") from e

    def release(self, request_id: str) -> None:
        """Release the codec of a request that has left, if it has one."""
        compression = self._held.pop(request_id, None)
        if compression is None:
            return
        self._users[compression].discard(request_id)
        if not self._users[compression]:
            del self._users[compression]
        for idle in [c for c in self._numbers_by_compression if c not in self._users][:-MAX_IDLE]:
            del self._codecs[self._numbers_by_compression.pop(idle)]
