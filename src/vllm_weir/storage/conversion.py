"""Copying a dataset into another layout or compression, request by request, each exactly once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np
import torch

from vllm_weir.codec import encode
from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.schema.compression import EXACT_DTYPES, Compression, header_shape
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.batch import Batch, header_text
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.index import Index
from vllm_weir.storage.layouts.base import Writer
from vllm_weir.storage.loading import foreign, load, open_writer
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.provenance import SOURCE

_Rows = tuple[np.ndarray, np.ndarray]
"""Rows as `Index.expand` names them: the run of each, and its row id."""
PIECE_BYTES = 64 << 20
"""Rows are copied in pieces of about this many decoded bytes."""


def convert(
    source: str | PathLike | ActivationDataset,
    target: str | PathLike,
    layout: str = "sharded",
    *,
    compress: object = None,
    again: bool = False,
    progress: Callable[[int, int], Any] | None = None,
    **options: Any,
) -> int:
    """Copy a dataset, without requests that the target already has.

    Notes on the source (`Index.notes`, of foreign formats) are stored in the requests' metadata,
    under ``"source"``.

    Args:
        source: What `load` takes, or a dataset.
        target: As `url` of `open_writer`.
        layout: As for `open_writer`; or ``"fork"``, files for the reader of RhizoNymph/vllm, into a
            place where nothing is yet.
        compress: Compression of the target; None copies the records bit for bit. Integers are always
            copied as they are.
        again: Allow compressing rows that are already compressed with loss.
        progress: Called with (rows done, rows in all) after every piece.
        **options: As for `open_writer`.

    Returns:
        Number of requests copied.

    Raises:
        WeirError: If rows would be compressed with loss a second time; if the target has another
            request of the same id, or one that is compressed in another way; and as `load` and
            `open_writer` do.
    """
    dataset = source if isinstance(source, ActivationDataset) else load(source)
    wanted = None if compress is None else Compression.parse(compress)
    if wanted is not None and not again:
        _check_lossless(dataset, wanted)
    copied = 0
    index = dataset.index
    if layout == "fork":
        return _write_fork(dataset, target, wanted, progress, **options)
    notes = {SOURCE: {"layout": index.layout, "notes": index.notes}} if index.notes else {}
    rows_done, total = 0, dataset.count()
    request_rows = np.bincount(index.run_request, index.run_rows, len(dataset)).astype(np.int64)
    with open_writer(target, layout, **options) as writer:
        held = {request for request in dataset.requests if writer.holds(request)}
        _check_held(dataset, load(target, storage_options=options.get("storage_options")), held, wanted)
        for code, request in enumerate(dataset.requests):
            if request not in held:
                report = functools.partial(_report, progress, total, rows_done)
                _copy_request(dataset, code, writer, wanted, report)
                writer.finish_request(request, notes | dataset.metadata(request))
                copied += 1
            rows_done += int(request_rows[code])
            if progress is not None:
                progress(rows_done, total)
    return copied


def _write_fork(
    dataset: ActivationDataset, target: str | PathLike, wanted: Compression | None,
    progress: Callable[[int, int], Any] | None, storage_options: dict[str, Any] | None = None, fsync: bool = False,
) -> int:  # fmt: skip
    """Write the fork's files, of which a request's are not known to be complete, so that it starts anew."""
    if wanted is not None and wanted.method != "none":
        raise WeirError("the fork's files hold plain rows; leave compress out", "compress")
    store = ObjectStore(target, storage_options, fsync=fsync)
    if store.is_file() or store.names(deep=True):
        raise WeirError(f"{store.url} is not empty; files for the fork are written into a new place", "target")
    write = foreign("rhizonymph.files").write_rhizonymph
    rows_done, total = 0, dataset.count()
    for request in dataset.requests:
        acts = dataset[request]
        write(store, request, acts)
        rows_done += sum(acts.count(site) for site in acts.sites)
        _report(progress, total, 0, rows_done)
    return len(dataset)


def _check_lossless(dataset: ActivationDataset, wanted: Compression) -> None:
    """Raise WeirError if the rows are already compressed with loss in another way."""
    lossy = {dataset.index.lossy} if dataset.index.lossy and wanted.method != "none" else set()
    for compression in map(Compression.from_header, dataset.headers):
        if compression.method not in ("none", "fp16") and compression != wanted:
            lossy.add(compression.method)
    if lossy:
        raise WeirError(
            f"{dataset.url} is compressed by {', '.join(sorted(lossy))} already; to lose more, pass again=True "
            "(--again)",
            "compress",
        )


def _check_held(
    dataset: ActivationDataset, target: ActivationDataset, held: set[str], wanted: Compression | None
) -> None:
    """Raise WeirError unless the target has the requests `held` as they would be copied."""
    if not held:
        return
    allowed = {wanted} if wanted is not None else {Compression.from_header(h) for h in dataset.headers}
    index = target.index
    held_codes = [index.request_codes[request] for request in held if request in index.request_codes]
    held_runs = np.isin(index.run_request, held_codes)
    for block in np.unique(index.run_block[held_runs]).tolist():
        header = index.blocks[block].header
        found = Compression.from_header(header)
        if found not in allowed and header["dtype"] not in EXACT_DTYPES:
            raise WeirError(
                f"{target.url} holds requests of this dataset already, compressed by {found.method}; choose another "
                "place, or the same compression",
                "compress",
            )
    for request in sorted(held & set(target.requests)):
        source_rows, target_rows = _rows_of(dataset, request), _rows_of(target, request)
        same = source_rows.keys() == target_rows.keys() and all(
            _same_rows(dataset.index, rows, index, target_rows[site]) for site, rows in source_rows.items()
        )
        if not same:
            raise WeirError(
                f"{target.url} holds another request {request[:80]!r}: its rows are not those of {dataset.url}; choose "
                "another place for one of the two",
                "target",
            )


def _rows_of(dataset: ActivationDataset, request: str) -> dict[Site, _Rows]:
    index = dataset.index
    runs = index.runs_of(index.request_codes[request])
    codes = np.unique(index.run_site[runs]).tolist()
    rows = {code: dataset.ordered(runs[index.run_site[runs] == code]) for code in codes}
    return {index.sites[code]: site_rows for code, site_rows in rows.items() if len(site_rows[0])}


def _same_rows(index: Index, rows: _Rows, other_index: Index, other_rows: _Rows) -> bool:
    """Return whether rows agree in positions, tokens and, if compressed alike, records."""
    if not np.array_equal(index.positions[rows[1]], other_index.positions[other_rows[1]]):
        return False
    if not np.array_equal(index.token_ids[rows[1]], other_index.token_ids[other_rows[1]]):
        return False
    if _headers(index, rows[0]) != _headers(other_index, other_rows[0]):
        return True  # the records differ by their compression
    return np.array_equal(_row_checksums(index, *rows), _row_checksums(other_index, *other_rows))


def _headers(index: Index, row_runs: np.ndarray) -> set[str]:
    return {header_text(index.blocks[block].header) for block in np.unique(index.run_block[row_runs]).tolist()}


def _row_checksums(index: Index, row_runs: np.ndarray, row_ids: np.ndarray) -> np.ndarray:
    """Return checksums of the records, uint32 [rows]; records that were stored without are read."""
    row_sums = index.checksums[row_ids].copy()
    missing = np.flatnonzero(~index.run_has_checksums[row_runs])
    if len(missing):
        for chosen, records in index.gather(row_runs[missing], row_ids[missing]).values():
            row_sums[missing[chosen]] = checksums(records)
    return row_sums


def _report(progress: Callable[[int, int], Any] | None, total: int, rows_before: int, rows_done: int) -> None:
    if progress is not None:
        progress(rows_before + rows_done, total)


def _copy_request(
    dataset: ActivationDataset, code: int, writer: Writer, wanted: Compression | None, progress: Callable[[int], Any]
) -> None:
    index = dataset.index
    runs = index.runs_of(code)
    rows_done = 0
    for site in np.unique(index.run_site[runs]).tolist():
        site_runs = runs[index.run_site[runs] == site]
        row_runs, row_ids = dataset.ordered(site_runs)
        widest = max(index.blocks[b].header["d_model"] for b in np.unique(index.run_block[site_runs]).tolist())
        size = max(1, PIECE_BYTES // (4 * widest))
        # Once for a site without rows, so that it is kept.
        for start in range(0, max(1, len(row_runs)), size):
            piece = slice(start, start + size)
            _copy_rows(dataset, code, site_runs, row_runs[piece], row_ids[piece], writer, wanted)
            rows_done += len(row_runs[piece])
            progress(rows_done)


def _differs(wanted: Compression, header: dict[str, Any]) -> bool:
    """Return whether records with this header have to be changed to be compressed as wanted."""
    return header["dtype"] not in EXACT_DTYPES and wanted != Compression.from_header(header)


def _copy_rows(
    dataset: ActivationDataset, code: int, site_runs: np.ndarray, row_runs: np.ndarray, row_ids: np.ndarray,
    writer: Writer, wanted: Compression | None,
) -> None:  # fmt: skip
    """Copy rows of one site of a request, or an empty batch; `site_runs`: all its runs."""
    index = dataset.index
    first = int(index.run_block[site_runs[0]])
    no_records = np.zeros((0, index.blocks[first].width), np.uint8)
    for block, (chosen, records) in (index.gather(row_runs, row_ids) or {first: (row_runs, no_records)}).items():
        header: dict[str, Any] | None = index.blocks[block].header
        rows = torch.from_numpy(records)
        if wanted is not None and _differs(wanted, index.blocks[block].header):
            rows, header = dataset.decoded(rows, index.blocks[block]), None
            if wanted.method != "none":
                rows = rows.flatten(1)
                shape = header_shape(index.blocks[block].header)
                header = wanted.header(rows.shape[1], str(rows.dtype).removeprefix("torch."), shape)
                rows = encode(rows, wanted)
        writer.write(
            Batch(
                index.requests[code],
                *index.sites[int(index.run_site[site_runs[0]])],
                index.positions[row_ids[chosen]],
                index.token_ids[row_ids[chosen]],
                rows,
                header,
            )
        )
