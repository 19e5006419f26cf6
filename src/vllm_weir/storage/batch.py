"""`Batch`: rows of one site of one request, for a `Writer`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.codec import as_bytes, encode
from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import EXACT_DTYPES, STORED_DTYPES, Compression, header_bytes
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.schema.rows import RowShape, row_width


@dataclass(eq=False)
class Batch:
    """Rows of one site of one request.

    Attributes:
        request_id: Any string.
        hook, layer: The site.
        positions: int64 [n] (tensor, array or list); no position of a site may come twice.
        token_ids: int64 [n], the token at each position; -1 where unknown.
        rows: Tensor [n, d], or [n, heads, d_head]: float32, float16 or bfloat16, or int64, which is
            stored as it is; with a header, records: uint8 [n, record_bytes].
        header: What `Compression.header` returned, for records.
    """

    request_id: str
    hook: str
    layer: int
    positions: Any
    token_ids: Any
    rows: torch.Tensor
    header: Mapping[str, Any] | None = None

    @property
    def site(self) -> Site:
        return Site(self.hook, self.layer)

    @property
    def row_count(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, as they are given."""
        return self.rows.nbytes


@dataclass(eq=False)
class CheckedBatch:
    """A checked batch, compressed and on the host.

    Attributes:
        request_id, site: As in `Batch`.
        positions, token_ids: int64 [n].
        records: uint8 [n, record_bytes]; the bytes of each record follow each other, the records may not.
        header: Header of the records as JSON text.
        ascending: Whether the positions ascend.
    """

    request_id: str
    site: Site
    positions: np.ndarray
    token_ids: np.ndarray
    records: np.ndarray
    header: str
    ascending: bool

    @property
    def nbytes(self) -> int:
        return self.records.nbytes


def pack(batch: Batch, compression: Compression) -> CheckedBatch:
    """Check a batch, compress it and copy it to the host; raise WeirError naming the field."""
    check_id(batch.request_id, "batch.request_id")
    if isinstance(batch.layer, bool) or not isinstance(batch.layer, int) or not 0 <= batch.layer < 2**31:
        raise WeirError("a layer is an int, counted from 0", "batch.layer")
    site = Site(normalise_hook(batch.hook, "batch.hook"), batch.layer)
    rows = batch.rows
    if not isinstance(rows, torch.Tensor) or rows.ndim < 2 or (rows.ndim > 2 and batch.header is not None):
        raise WeirError("rows is a tensor [n, d] or [n, heads, d_head], and records are [n, bytes]", "batch.rows")
    n = rows.shape[0]
    positions, token_ids = _ints(batch.positions, n, "batch.positions"), _ints(batch.token_ids, n, "batch.token_ids")
    ascending = bool((positions[1:] > positions[:-1]).all())
    if n and (positions[0] if ascending else positions.min()) < 0:
        raise WeirError("a position is never negative", "batch.positions")
    if batch.header is None:
        rows, header = _packed_rows(rows, compression)
    else:
        header = header_text(batch.header)
        width = _record_bytes(header)
        if rows.dtype != torch.uint8 or rows.shape[1] != width:
            raise WeirError(
                f"records are uint8 [n, {width}] by their header, got {rows.dtype} {list(rows.shape)}", "batch.rows"
            )
    host = rows.detach().cpu()
    records = (host if host.stride(1) == 1 else host.contiguous()).numpy()
    return CheckedBatch(batch.request_id, site, positions, token_ids, records, header, ascending)


def _packed_rows(rows: torch.Tensor, compression: Compression) -> tuple[torch.Tensor, str]:
    """Return rows [n, ...] as records, uint8 [n, record_bytes], and the header of these."""
    dtype = _dtype_name(rows.dtype)
    if dtype not in STORED_DTYPES:
        raise WeirError(f"rows are {', '.join(STORED_DTYPES)}, got {dtype}; records need their header", "batch.rows")
    if dtype in EXACT_DTYPES:
        compression = Compression()
    header = _new_header(compression, tuple(rows.shape[1:]), dtype)
    rows = rows.flatten(1)
    if compression.method != "none":
        return encode(rows, compression), header
    # Rows of one site among others are copied only once, to where they are written from.
    return (rows.view(torch.uint8) if rows.numel() and rows.stride(1) == 1 else as_bytes(rows)), header


def check_id(request_id: object, field: str) -> None:
    """Raise WeirError unless this is a string of 1 to 4096 characters that UTF-8 can encode."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= 4096:
        raise WeirError("a request id is a string of 1 to 4096 characters", field)
    if not request_id.isascii():
        try:
            request_id.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which could not be written
            raise WeirError(f"a request id is text, got {request_id[:80]!a}", field) from None


def header_text(header: Mapping[str, Any]) -> str:
    """Return a header as JSON text; equal headers give equal text."""
    try:
        return json.dumps(header, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):
        raise WeirError("a header is plain JSON data", "batch.header") from None


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def _new_header(compression: Compression, shape: RowShape, dtype: str) -> str:
    return header_text(compression.header(row_width(shape), dtype, shape))


@functools.lru_cache(maxsize=64)
def _record_bytes(text: str) -> int:
    header = json.loads(text)
    Compression.from_header(header, "batch.header")
    return header_bytes(header)


def metadata_text(metadata: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(metadata or {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise WeirError(f"metadata is plain JSON data: {e}", "metadata") from None


def _ints(values: Any, n: int, field: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise WeirError("a flat list of ints", field) from None
    if array.shape != (n,) or (n and array.dtype.kind not in "iu"):
        raise WeirError(f"{n} rows want {n} ints, got {array.dtype} {list(array.shape)}", field)
    return array.astype(np.int64)
