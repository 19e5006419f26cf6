"""Codecs that live requests have their rows compressed with, on the device, each made once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir import codec
from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import Compression

IDLE = 4
"""Codecs that are kept ready though no live request uses them."""
CHUNK = 1 << 24
"""Values that are encoded at once: what bounds the float32 copies that encoding makes."""
PROOFS = 8
"""Rows that kernels are tried on."""


@dataclass(frozen=True)
class Codec:
    """A way to compress rows [n, d_model], ready to be used.

    Attributes:
        projection: float32 [k, d_model] on the device, None for a method without one.
        halves: the projection as a sum of two in the rows' own dtype, [2 k, d_model]; None where none is used.
        record_bytes: bytes of a compressed row.
        d_model: values of a row.
    """

    compression: Compression
    projection: torch.Tensor | None
    halves: torch.Tensor | None
    record_bytes: int
    d_model: int

    @property
    def quick(self) -> bool:
        """Whether kernels of Weir's pack a step's rows on CUDA, in microseconds."""
        return bool(self._packed_at_once())

    def encode(self, rows: torch.Tensor, spread: bool | None = None) -> torch.Tensor:
        """uint8 [n, record_bytes] of rows [n, d_model]; `spread`: as in `codec_triton.project`, where that is used."""
        if rows.is_cuda and (width := self._packed_at_once()):
            from vllm_weir.worker.transfer.codec_kernels import PROJECTED, pack, project

            if self.halves is not None and width in PROJECTED:
                return project(rows.contiguous(), self.halves, spread)
            return pack(rows.contiguous() if self.projection is None else self._project(rows), width)
        step = max(1, CHUNK // rows.shape[1])
        if len(rows) <= step:
            return codec.encode(rows, self.compression, self.projection)
        out = torch.empty(len(rows), self.record_bytes, dtype=torch.uint8, device=rows.device)
        for first in range(0, len(rows), step):
            out[first : first + step] = codec.encode(rows[first : first + step], self.compression, self.projection)
        return out

    def prove(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compare what kernels make of a few rows with what the plain code does; waits for the device.

        Raises:
            WeirError: if they differ by more than rounding can explain.
        """
        if not self.quick:
            return
        d = self.d_model
        rows = torch.randn(PROOFS, d, generator=torch.Generator().manual_seed(0)).to(dtype)
        rows[0], rows[1, d // 2] = 2.5, torch.nan
        want = _values(codec.encode(rows, self.compression))
        # Two ways of adding up differ a little, and the codes by one for it.
        step = (want.amax(1, keepdim=True) - want.amin(1, keepdim=True)) / 255
        allowed = 1.5 * step + 1e-4 * want.abs().amax(1, keepdim=True)
        for spread in (None,) if self.halves is None else (True, False):
            got = _values(self.encode(rows.to(device), spread).cpu())
            if not (((got - want).abs() <= allowed) | (got.isnan() & want.isnan())).all():
                raise WeirError(
                    f"the kernel that packs {self.compression.method} does not agree with the plain code on this "
                    "device; ask for another compression, and report this",
                    "compress",
                )

    def _packed_at_once(self) -> int:
        """Values of a record of the affine code, if one launch can pack them; else 0."""
        width = {"full8": self.d_model, "rp8": self.compression.k or 0}.get(self.compression.method, 0)
        return 0 if width % 4 else width

    def _project(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, k] or, as a sum of two, [n, 2 k]."""
        if self.halves is None:
            assert self.projection is not None
            return rows.float() @ self.projection.T
        # Tensor cores read the rows as they are and add up in float32.
        return torch.mm(rows, self.halves.T, out_dtype=torch.float32)


def _values(records: torch.Tensor) -> torch.Tensor:
    """float32 [n, k] of records of the affine code."""
    scale, low = records[:, :8].contiguous().view(torch.float32).T
    return records[:, 8:] * scale[:, None] + low[:, None]


class Codecs:
    """Codecs by number, counted by the requests that use them."""

    def __init__(self, d_model: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._d_model, self._device, self._dtype = d_model, device, dtype
        self._numbers = itertools.count()
        self._of: dict[Compression, int] = {}
        self._codecs: dict[int, Any] = {}
        self._users: dict[Compression, set[str]] = {}
        self._held: dict[str, Compression] = {}

    def __getitem__(self, number: int) -> Any:
        return self._codecs[number]

    def enter(self, codec: Any) -> int:
        """The number of a codec that somebody else keeps count of: something that encodes as `Codec` does."""
        number = next(self._numbers)
        self._codecs[number] = codec
        return number

    def strike(self, number: int) -> None:
        """It is not used any more."""
        del self._codecs[number]

    def hold(self, request_id: str, compression: Compression) -> int:
        """The number of a codec that `request_id` uses from now on."""
        number = self._of.pop(compression, None)
        if number is None:
            number = next(self._numbers)
            self._codecs[number] = self._make(compression)
        self._of[compression] = number  # the last used is the last to go
        self._users.setdefault(compression, set()).add(request_id)
        self._held[request_id] = compression
        return number

    def _make(self, compression: Compression) -> Codec:
        matrix = halves = None
        if compression.method == "rp8":
            matrix = codec.projection(compression.seed, compression.k or 0, self._d_model)
            if self._dtype.itemsize == 2 and self._device.type == "cuda":
                high = matrix.to(self._dtype)
                halves = torch.cat([high, (matrix - high.float()).to(self._dtype)]).to(self._device)
            matrix = matrix.to(self._device)
        made = Codec(compression, matrix, halves, compression.record_bytes(self._d_model), self._d_model)
        if self._device.type == "cuda":
            self._try(made)
        return made

    def _try(self, made: Codec) -> None:
        """Compile a codec's kernels, and see that they are right; raises WeirError if not."""
        from triton.errors import TritonError

        try:
            made.prove(self._dtype, self._device)
        except (TritonError, RuntimeError) as e:
            raise WeirError(f"{made.compression.method} cannot be computed on this device: {e}", "compress") from e

    def release(self, request_id: str) -> None:
        """A request has left; unknown ids are fine."""
        compression = self._held.pop(request_id, None)
        if compression is None:
            return
        self._users[compression].discard(request_id)
        if not self._users[compression]:
            del self._users[compression]
        for idle in [c for c in self._of if c not in self._users][:-IDLE]:
            del self._codecs[self._of.pop(idle)]
