"""Reading the `sharded` layout: its manifest as an index, without reading records."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.storage.index import Index, site_order
from vllm_weir.storage.layouts.manifest import (
    MANIFEST,
    SCHEMA,
    codes,
    column,
    flat,
    from_parquet,
    is_shard,
    lengths,
    read_shard_manifest,
)
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock, RecordBlock
from vllm_weir.storage.safetensors_io import read_container


def index_of(store: ObjectStore, table: pa.Table, names: dict[str, int], *, incomplete: bool = False) -> Index:
    """Return the index that a manifest describes; `incomplete`: with requests that were not finished."""
    try:
        return _index(store, table, names, incomplete)
    except WeirError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, pa.ArrowException) as e:
        raise store.error(MANIFEST, f"the manifest is not valid: {str(e)[:200]}") from None


def _index(store: ObjectStore, table: pa.Table, names: dict[str, int], incomplete: bool) -> Index:
    """Build the index; entries of the manifest are runs, or say that a request is finished."""
    request, requests = codes(table, "request")
    is_finish = table["finished"].to_numpy().astype(bool)
    rows = column(table, "rows").astype(np.int64)
    row_counts = np.where(is_finish, 0, rows)
    if any((lengths(table, name) != row_counts).any() for name in ("position", "token_id")):
        raise ValueError("its counts do not match its positions")
    of_chosen_writer, request_finished = _chosen_entries(table, request, len(requests), is_finish)
    is_used_run = of_chosen_writer & ~is_finish & (request_finished[request] | incomplete)
    is_used_finish = of_chosen_writer & is_finish
    _check_complete(store, request, requests, rows, is_used_run, is_used_finish)

    metadata = [""] * len(requests)
    texts = table["metadata"].take(pa.array(np.flatnonzero(is_used_finish))).to_pylist()
    for code, text in zip(request[is_used_finish].tolist(), texts):
        metadata[code] = text or ""
    included = np.flatnonzero(request_finished | incomplete)
    new_codes = np.full(len(requests), -1)
    new_codes[included] = np.arange(len(included))

    runs = np.flatnonzero(is_used_run)
    run_site, sites = _sites(store, table, runs)
    run_block, blocks = _blocks(store, table, runs, names)
    positions, tokens = flat(table, "position"), flat(table, "token_id")
    sums, has_checksums = _checksums(table, row_counts)
    if not is_used_run.all():
        row_used = np.repeat(is_used_run, row_counts)
        positions, tokens, sums = positions[row_used], tokens[row_used], sums[row_used]
    return Index(
        layout="sharded",
        requests=[requests[code] for code in included],
        sites=sites,
        blocks=blocks,
        metadata=[metadata[code] for code in included],
        run_request=new_codes[request[runs]],
        run_site=run_site,
        run_block=run_block,
        run_offset=column(table, "offset")[runs].astype(np.int64),
        run_stride=column(table, "stride")[runs].astype(np.int64),
        run_rows=rows[runs],
        positions=positions,
        token_ids=tokens,
        checksums=sums,
        run_has_checksums=has_checksums[runs],
        incomplete=[requests[code] for code in np.flatnonzero(~request_finished)],
        store=store,
        files=[name for name in names if name == MANIFEST or is_shard(name)],
    )


def _chosen_entries(
    table: pa.Table, request: np.ndarray, num_requests: int, is_finish: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose a writer for each request: the first to finish it, or else the last to write to it.

    Names of writers sort by time.

    Returns whether each entry of the manifest is of the chosen writer, bool [entries]; and whether each request is
    finished, bool [requests].
    """
    writer, writers = codes(table, "writer")
    writer_rank = np.argsort(np.argsort(writers))[writer] if len(writers) else writer
    none = np.iinfo(np.int64).max
    first_to_finish = np.full(num_requests, none)
    np.minimum.at(first_to_finish, request[is_finish], writer_rank[is_finish])
    finished = first_to_finish < none
    last_to_write = np.full(num_requests, -1)
    np.maximum.at(last_to_write, request, writer_rank)
    chosen = np.where(finished, first_to_finish, last_to_write)
    return chosen[request] == writer_rank, finished


def _check_complete(
    store: ObjectStore,
    request: np.ndarray,
    requests: list[str],
    rows: np.ndarray,
    is_used_run: np.ndarray,
    is_used_finish: np.ndarray,
) -> None:
    found = np.bincount(request, np.where(is_used_run, rows, 0), len(requests)).astype(np.int64)
    short = np.flatnonzero(is_used_finish & (rows != found[request]))
    if len(short):
        i = int(short[0])
        raise store.error(
            MANIFEST,
            f"request {requests[request[i]][:80]!r} has {found[request[i]]} of its {rows[i]} rows; a shard is missing",
        )


def _checksums(table: pa.Table, row_counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows' checksums, uint32 (0 for none), and which entries have them, bool."""
    has_checksums = table["checksum"].is_valid().to_numpy()
    if (lengths(table, "checksum") != row_counts)[has_checksums].any():
        raise ValueError("its counts do not match its checksums")
    sums = np.zeros(int(row_counts.sum()), np.uint32)
    sums[np.repeat(has_checksums, row_counts)] = flat(table, "checksum")
    return sums, has_checksums


def _sites(store: ObjectStore, table: pa.Table, runs: np.ndarray) -> tuple[np.ndarray, list[Site]]:
    """Return the code of each run's site, int64 [runs], and the sites, sorted."""
    hook, hooks = codes(table, "hook")
    layer = column(table, "layer").astype(np.int64)
    if len(runs) and int(layer[runs].min()) < 0:
        raise ValueError("a layer is negative")
    pairs, pair_of_run = np.unique(layer[runs] * (len(hooks) + 1) + hook[runs], return_inverse=True)
    where = f"{store.describe(MANIFEST)}: hook"
    layers_and_hooks = (divmod(pair, len(hooks) + 1) for pair in pairs.tolist())
    pair_sites = [Site(normalise_hook(hooks[hook_code], where), number) for number, hook_code in layers_and_hooks]
    sites = sorted(set(pair_sites), key=site_order)
    site_codes = np.array([sites.index(site) for site in pair_sites], np.int64)
    pair_of_run = pair_of_run.reshape(-1)
    return (site_codes[pair_of_run] if pair_sites else pair_of_run), sites


def _blocks(
    store: ObjectStore, table: pa.Table, runs: np.ndarray, names: dict[str, int]
) -> tuple[np.ndarray, list[RecordBlock]]:
    """Return each run's block code, int64 [runs], and the blocks: one for each shard and header."""
    file, files = codes(table, "file")
    header, header_texts = codes(table, "compression")
    pairs, pair_of_run = np.unique(file[runs] * (len(header_texts) + 1) + header[runs], return_inverse=True)
    headers: dict[int, dict] = {}
    blocks: list[RecordBlock] = []
    checked: set[str] = set()
    for pair in pairs.tolist():
        file_code, header_code = divmod(pair, len(header_texts) + 1)
        name = files[file_code]
        if name not in names:
            raise store.error(name, "is missing, although the manifest names it")
        # For a remote store `verify` does this, since it takes a request for each shard.
        if store.local and name not in checked:
            read_container(store, name, names[name])
            checked.add(name)
        if header_code not in headers:
            headers[header_code] = json.loads(header_texts[header_code])
            Compression.from_header(headers[header_code], f"{store.describe(name)}: header")
        blocks.append(FileBlock(store, name, headers[header_code], names[name]))
    return pair_of_run.reshape(-1), blocks


def damaged_shards(store: ObjectStore, files: list[str]) -> Iterator[tuple[str, WeirError]]:
    """Yield the shards whose own manifest is damaged or differs from the joined one, and the error."""
    joined = from_parquet(store, MANIFEST, store.read(MANIFEST)) if MANIFEST in files else SCHEMA.empty_table()
    file, joined_names = codes(joined, "file")
    order = np.argsort(file, kind="stable")
    bounds = np.searchsorted(file[order], np.arange(len(joined_names) + 1))
    code_of = {name: code for code, name in enumerate(joined_names)}
    for name in sorted(filter(is_shard, files)):
        try:
            own = read_shard_manifest(store, name, store.size(name))
        except WeirError as e:
            if isinstance(e, StoreError) and not isinstance(e, MissingFile):
                raise
            yield name, e
            continue
        if name in code_of:
            code = code_of[name]
            if not _decoded(joined.take(order[bounds[code] : bounds[code + 1]])).equals(_decoded(own)):
                message = f"damaged: its own manifest and {MANIFEST} differ; restore both from a copy"
                yield name, store.error(name, message)


def _decoded(table: pa.Table) -> pa.Table:
    """Replace dictionary codes by strings: two tables may number the same strings differently."""
    for i, column_field in enumerate(table.schema):
        if pa.types.is_dictionary(column_field.type):
            table = table.set_column(i, column_field.name, table[column_field.name].cast(pa.string()))
    return table
