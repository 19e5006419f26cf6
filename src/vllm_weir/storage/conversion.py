"""From one dataset to another: layout and compression, request by request, exactly once."""

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
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.batch import Batch, header_text
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.index import Index
from vllm_weir.storage.layouts.base import Writer
from vllm_weir.storage.loading import load, open_writer

_Rows = tuple[np.ndarray, np.ndarray]
CHUNK = 64 << 20
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
    """Copy a dataset. What the target holds already is skipped, so a conversion that was interrupted just goes on.

    What the source's reader should know (`Index.notes`, of foreign formats) comes along in the requests' metadata,
    under ``"source"``.

    Args:
        source: what `load` takes, or a dataset.
        target, layout, options: as for `open_writer`.
        compress: for the target; None keeps the records as they are, to the bit.
        again: allow to compress rows anew that are compressed with loss already.
        progress: called with (rows done, rows in all) after every piece.

    Returns:
        Requests copied.

    Raises:
        WeirError: if rows would be compressed with loss a second time; if the target holds another request of the same
            id, or one that is compressed in another way; and as `load` and `open_writer` do.
    """
    dataset = source if isinstance(source, ActivationDataset) else load(source)
    wanted = None if compress is None else Compression.parse(compress)
    if wanted is not None and not again:
        _check_lossless(dataset, wanted)
    copied = 0
    index = dataset.index
    told = {"source": {"layout": index.layout, "notes": index.notes}} if index.notes else {}
    done, total = 0, dataset.count()
    per_request = np.bincount(index.request, index.rows, len(dataset)).astype(np.int64)
    with open_writer(target, layout, **options) as writer:
        held = {request for request in dataset.requests if writer.holds(request)}
        _check_held(dataset, load(target, storage_options=options.get("storage_options")), held, wanted)
        for code, request in enumerate(dataset.requests):
            if request not in held:
                report = functools.partial(_report, progress, total, done)
                _copy_request(dataset, code, writer, wanted, report)
                writer.finish_request(request, told | dataset.metadata(request))
                copied += 1
            done += int(per_request[code])
            if progress is not None:
                progress(done, total)
    return copied


def _check_lossless(dataset: ActivationDataset, wanted: Compression) -> None:
    """Raise WeirError if this compression would come on top of another one that loses."""
    had = {dataset.index.lossy} if dataset.index.lossy and wanted.method != "none" else set()
    for have in map(Compression.from_header, dataset.headers):
        if have.method not in ("none", "fp16") and have != wanted:
            had.add(have.method)
    if had:
        raise WeirError(
            f"{dataset.url} is compressed by {', '.join(sorted(had))} already; to lose more, pass again=True (--again)",
            "compress",
        )


def _check_held(
    dataset: ActivationDataset, there: ActivationDataset, held: set[str], wanted: Compression | None
) -> None:
    """Raise WeirError unless what the target holds of these requests is what this conversion would put there."""
    if not held:
        return
    asked = {wanted} if wanted is not None else {Compression.from_header(h) for h in dataset.headers}
    index = there.index
    mine = np.isin(index.request, [index.code[request] for request in held if request in index.code])
    for block in np.unique(index.block[mine]).tolist():
        found = Compression.from_header(index.blocks[block].header)
        if found not in asked:
            raise WeirError(
                f"{there.url} holds requests of this dataset already, compressed by {found.method}; choose another "
                "place, or go on with the same",
                "compress",
            )
    for request in sorted(held & set(there.requests)):
        asked_for, found_there = _rows_of(dataset, request), _rows_of(there, request)
        alike = asked_for.keys() == found_there.keys() and all(
            _alike(dataset.index, rows, index, found_there[site]) for site, rows in asked_for.items()
        )
        if not alike:
            raise WeirError(
                f"{there.url} holds another request {request[:80]!r}: its rows are not those of {dataset.url}; choose "
                "another place for one of the two",
                "target",
            )


def _rows_of(dataset: ActivationDataset, request: str) -> dict[Site, _Rows]:
    """Sites that have rows -> the rows by position, as `Index.expand` names them."""
    index = dataset.index
    runs = index.runs_of(index.code[request])
    rows = {code: dataset.ordered(runs[index.site[runs] == code]) for code in np.unique(index.site[runs]).tolist()}
    return {index.sites[code]: found for code, found in rows.items() if len(found[0])}


def _alike(one: Index, ones: _Rows, other: Index, others: _Rows) -> bool:
    """Whether rows of two datasets are the same: positions, tokens, and records, where these are compressed alike."""
    if not np.array_equal(one.positions[ones[1]], other.positions[others[1]]):
        return False
    if not np.array_equal(one.token_ids[ones[1]], other.token_ids[others[1]]):
        return False
    if _headers(one, ones[0]) != _headers(other, others[0]):
        return True  # the same prompt: what was compressed anew is not compared
    return np.array_equal(_sums(one, *ones), _sums(other, *others))


def _headers(index: Index, which: np.ndarray) -> set[str]:
    return {header_text(index.blocks[block].header) for block in np.unique(index.block[which]).tolist()}


def _sums(index: Index, which: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Checksums of rows' records, uint32 [rows]; of rows that were stored without, their records are read."""
    out = index.checksums[at].copy()
    bare = np.flatnonzero(~index.summed[which])
    if len(bare):
        for mine, records in index.gather(which[bare], at[bare]).values():
            out[bare[mine]] = checksums(records)
    return out


def _report(progress: Callable[[int, int], Any] | None, total: int, start: int, done: int) -> None:
    if progress is not None:
        progress(start + done, total)


def _copy_request(
    dataset: ActivationDataset, code: int, writer: Writer, wanted: Compression | None, progress: Callable[[int], Any]
) -> None:
    index = dataset.index
    runs = index.runs_of(code)
    done = 0
    for site in np.unique(index.site[runs]).tolist():
        mine = runs[index.site[runs] == site]
        which, at = dataset.ordered(mine)
        widest = max(index.blocks[b].header["d_model"] for b in np.unique(index.block[mine]).tolist())
        size = max(1, CHUNK // (4 * widest))
        for begin in range(0, max(1, len(which)), size):  # a site without rows was asked for, too
            some = slice(begin, begin + size)
            _copy_rows(dataset, code, mine, which[some], at[some], writer, wanted)
            done += len(which[some])
            progress(done)


def _copy_rows(
    dataset: ActivationDataset, code: int, runs: np.ndarray, which: np.ndarray, at: np.ndarray, writer: Writer,
    wanted: Compression | None,
) -> None:  # fmt: skip
    """Some rows, or none, of a request's site, whose runs `runs` are."""
    index = dataset.index
    first = int(index.block[runs[0]])
    none = np.zeros((0, index.blocks[first].width), np.uint8)
    for block, (mine, records) in (index.gather(which, at) or {first: (which, none)}).items():
        header: dict[str, Any] | None = index.blocks[block].header
        rows = torch.from_numpy(records)
        if wanted is not None and wanted != Compression.from_header(header):
            rows, header = dataset.decoded(rows, index.blocks[block]), None
            if wanted.method != "none":
                header = wanted.header(rows.shape[1], str(rows.dtype).removeprefix("torch."))
                rows = encode(rows, wanted)
        writer.write(
            Batch(
                index.requests[code],
                *index.sites[int(index.site[runs[0]])],
                index.positions[at[mine]],
                index.token_ids[at[mine]],
                rows,
                header,
            )
        )
