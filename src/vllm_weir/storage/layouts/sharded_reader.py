"""Reading the `sharded` layout: the manifest as an index, without a look into the shards."""

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
    """The index of a manifest. `names`: files and their bytes; `incomplete`: with requests that were not finished."""
    try:
        return _index(store, table, names, incomplete)
    except WeirError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, pa.ArrowException) as e:
        raise store.error(MANIFEST, f"the manifest makes no sense: {str(e)[:200]}") from None


def _index(store: ObjectStore, table: pa.Table, names: dict[str, int], incomplete: bool) -> Index:
    request, requests = codes(table, "request")
    writer, writers = codes(table, "writer")
    finished = table["finished"].to_numpy().astype(bool)
    rows = column(table, "rows").astype(np.int64)
    counts = np.where(finished, 0, rows)
    if any((lengths(table, name) != counts).any() for name in ("position", "token_id")):
        raise ValueError("its counts do not fit its positions")
    # The writer whose rows count, for each request: the first that finished it; of unfinished ones the last that tried.
    rank = np.argsort(np.argsort(writers))[writer] if len(writers) else writer
    chosen = np.full(len(requests), np.iinfo(np.int64).max)
    np.minimum.at(chosen, request[finished], rank[finished])
    done = chosen < np.iinfo(np.int64).max
    last = np.full(len(requests), -1)
    np.maximum.at(last, request, rank)
    chosen = np.where(done, chosen, last)
    keep = (chosen[request] == rank) & ~finished & (done[request] | incomplete)
    mark = finished & (chosen[request] == rank)
    _check_complete(store, request, requests, counts, rows, keep, mark)

    metadata = [""] * len(requests)
    texts = table["metadata"].take(pa.array(np.flatnonzero(mark))).to_pylist()
    for code, text in zip(request[mark].tolist(), texts):
        metadata[code] = text or ""
    shown = np.flatnonzero(done | incomplete)
    place = np.full(len(requests), -1)
    place[shown] = np.arange(len(shown))

    runs = np.flatnonzero(keep)
    site, sites = _sites(store, table, runs)
    block, blocks = _blocks(store, table, runs, names)
    positions, tokens = flat(table, "position"), flat(table, "token_id")
    sums, summed = _checksums(table, counts)
    if not keep.all():
        picked = np.repeat(keep, counts)
        positions, tokens, sums = positions[picked], tokens[picked], sums[picked]
    return Index(
        "sharded",
        [requests[i] for i in shown],
        sites,
        blocks,
        [metadata[i] for i in shown],
        place[request[runs]],
        site,
        block,
        column(table, "offset")[runs].astype(np.int64),
        column(table, "stride")[runs].astype(np.int64),
        rows[runs],
        positions,
        tokens,
        sums,
        summed[runs],
        incomplete=[requests[i] for i in np.flatnonzero(~done)],
        store=store,
        files=[name for name in names if name == MANIFEST or is_shard(name)],
    )


def damaged_shards(store: ObjectStore, files: list[str]) -> Iterator[tuple[str, WeirError]]:
    """Shards whose own manifest is damaged, or is not what the joined one says of them. `files`: of `Index`.

    Raises StoreError if a file cannot be read.
    """
    joined = from_parquet(store, MANIFEST, store.read(MANIFEST)) if MANIFEST in files else SCHEMA.empty_table()
    file, known = codes(joined, "file")
    order = np.argsort(file, kind="stable")
    bounds = np.searchsorted(file[order], np.arange(len(known) + 1))
    place = {name: i for i, name in enumerate(known)}
    for name in sorted(filter(is_shard, files)):
        try:
            own = read_shard_manifest(store, name, store.size(name))
        except WeirError as e:
            if isinstance(e, StoreError) and not isinstance(e, MissingFile):
                raise
            yield name, e
            continue
        if name in place:
            i = place[name]
            if not _plain(joined.take(order[bounds[i] : bounds[i + 1]])).equals(_plain(own)):
                what = f"damaged: its own manifest and {MANIFEST} differ; whatever is whole, restore both from a copy"
                yield name, store.error(name, what)


def _plain(table: pa.Table) -> pa.Table:
    """With strings for places in dictionaries, which two tables number differently."""
    texts = {i: f for i, f in enumerate(table.schema) if pa.types.is_dictionary(f.type)}
    for i, f in texts.items():
        table = table.set_column(i, f.name, table[f.name].cast(pa.string()))
    return table


def _checksums(table: pa.Table, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(checksums of all rows, uint32, 0 for those that have none; which runs have them, bool)."""
    summed = table["checksum"].is_valid().to_numpy()
    if (lengths(table, "checksum") != counts)[summed].any():
        raise ValueError("its counts do not fit its checksums")
    sums = np.zeros(int(counts.sum()), np.uint32)
    sums[np.repeat(summed, counts)] = flat(table, "checksum")
    return sums, summed


def _check_complete(
    store: ObjectStore,
    request: np.ndarray,
    requests: list[str],
    counts: np.ndarray,
    rows: np.ndarray,
    keep: np.ndarray,
    mark: np.ndarray,
) -> None:
    """Every finished request must have as many rows as its mark says."""
    have = np.bincount(request, np.where(keep, counts, 0), len(requests)).astype(np.int64)
    short = np.flatnonzero(mark & (rows != have[request]))
    if len(short):
        i = int(short[0])
        raise store.error(
            MANIFEST,
            f"request {requests[request[i]][:80]!r} has {have[request[i]]} of its {rows[i]} rows; a shard is missing",
        )


def _sites(store: ObjectStore, table: pa.Table, runs: np.ndarray) -> tuple[np.ndarray, list[Site]]:
    hook, hooks = codes(table, "hook")
    layer = column(table, "layer").astype(np.int64)
    if len(runs) and int(layer[runs].min()) < 0:
        raise ValueError("a layer is negative")
    pairs, inverse = np.unique(layer[runs] * (len(hooks) + 1) + hook[runs], return_inverse=True)
    where = f"{store.describe(MANIFEST)}: hook"
    split = (divmod(pair, len(hooks) + 1) for pair in pairs.tolist())
    found = [Site(normalise_hook(hooks[name], where), block) for block, name in split]
    sites = sorted(set(found), key=site_order)
    place = np.array([sites.index(s) for s in found], np.int64)
    return (place[inverse.reshape(-1)] if len(found) else inverse.reshape(-1)), sites


def _blocks(
    store: ObjectStore, table: pa.Table, runs: np.ndarray, names: dict[str, int]
) -> tuple[np.ndarray, list[RecordBlock]]:
    file, files = codes(table, "file")
    kind, kinds = codes(table, "compression")
    pairs, inverse = np.unique(file[runs] * (len(kinds) + 1) + kind[runs], return_inverse=True)
    headers: dict[int, dict] = {}
    blocks: list[RecordBlock] = []
    whole: set[str] = set()
    for pair in pairs.tolist():
        name, code = files[pair // (len(kinds) + 1)], pair % (len(kinds) + 1)
        if name not in names:
            raise store.error(name, "the manifest names it, and it is not there")
        if store.local and name not in whole:  # elsewhere `verify` does: it takes a request for each shard
            read_container(store, name, names[name])
            whole.add(name)
        if code not in headers:
            headers[code] = json.loads(kinds[code])
            Compression.from_header(headers[code], f"{store.describe(name)}: header")
        blocks.append(FileBlock(store, name, headers[code], names[name]))
    return inverse.reshape(-1), blocks
