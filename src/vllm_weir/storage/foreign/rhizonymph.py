"""Reading the captures of the fork RhizoNymph/vllm: ``.bin`` files of raw rows and ``.json`` files that describe them.

Layouts ``per_file`` (one pair for a request's layer and hook), ``packed`` (one pair a request, with ``entries``) and
``sharded`` (``shard-*``, of many requests). Its hooks: ``pre_attn``, ``post_attn``, ``post_mlp``, ``post_block``; its
``mlp_in``, what enters the MLP behind the norm, is no hook point of Weir: what was captured there is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import ITEMSIZE, ROW_DTYPES, Compression
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.storage.index import Index, IndexBuilder, text_field
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock

_HOOKS = {"post_mlp": "resid_post"}


class _Part(NamedTuple):
    """Consecutive rows of one site in a .bin file; `seq` orders the parts of a request."""

    request: str
    site: Site
    file: str
    seq: int
    offset: int
    rows: int
    width: int
    dtype: str
    positions: list[int] | None


class _Unnamed(NamedTuple):
    """A capture at a point that has no name in Weir; `file` describes it."""

    request: str
    hook: str
    layer: int
    file: str


def read_fork(store: ObjectStore, names: dict[str, int]) -> Index:
    """The index of a capture root, a tag, a request's folder, or one file.

    Raises:
        WeirError: if a file is damaged, or all that is there was captured at points that Weir has no name for.
    """
    parts: list[_Part] = []
    unnamed: list[_Unnamed] = []
    for name in sorted(names):
        data = name.removesuffix(".json") + ".bin"
        if name.endswith(".json") and data in names:
            for part in _describe(store, name, data):
                if isinstance(part, _Part):
                    parts.append(part)
                else:
                    unnamed.append(part)
    out = IndexBuilder("fork")
    if unnamed:
        if not parts:
            raise store.error(unnamed[0].file, f"no capture is left to read; {_left_out(unnamed, parts)}")
        out.notes.append(_left_out(unnamed, parts))
    blocks: dict[tuple[str, int, str], int] = {}
    called = _names(parts)
    by_site: dict[tuple[str, Site], list[_Part]] = {}
    for part in sorted(parts, key=lambda p: (p.seq, p.file, p.offset)):
        by_site.setdefault((called[_home(part)], part.site), []).append(part)
    for (request, site), some in by_site.items():
        if any(p.positions is None for p in some) and "rows without positions are numbered from 0" not in out.notes:
            out.notes.append("rows without positions are numbered from 0")
        _add(out, store, names, blocks, out.request(request), site, some)
    return out.build()


def _left_out(unnamed: list[_Unnamed], parts: list[_Part]) -> str:
    """What is not read, and why."""
    where: dict[str, list[int]] = {}
    for one in unnamed:
        where.setdefault(one.hook[:40], []).append(one.layer)
    points = (
        f"{len(layers)} x {hook!r} (blocks {', '.join(map(str, sorted({*layers})))})"[:200]
        for hook, layers in sorted(where.items())
    )
    gone = {_home(one) for one in unnamed} - {_home(part) for part in parts}
    nothing_else = f"; requests that hold nothing else: {len(gone)}" if gone else ""
    return f"left out, as Weir has no such hook point: {', '.join(points)}{nothing_else}"


def _home(part: _Part | _Unnamed) -> tuple[str, str]:
    """Whose rows these are: tags may use an id each."""
    return part.file.rpartition("/")[0], part.request


def _names(parts: list[_Part]) -> dict[tuple[str, str], str]:
    """What requests are called: by their ids, with the folder in front where several folders have one of that id."""
    homes = {_home(part) for part in parts}
    times = Counter(request for _, request in homes)
    return {
        (folder, request): request if times[request] == 1 else f"{folder.removesuffix(f'/{request}')}/{request}"
        for folder, request in homes
    }


def _add(
    out: IndexBuilder, store: ObjectStore, names: dict[str, int], blocks: dict[tuple[str, int, str], int], request: int,
    site: Site, parts: list[_Part],
) -> None:  # fmt: skip
    positions, counted = [], 0
    for part in parts:
        known = part.positions if part.positions is not None else range(counted, counted + part.rows)
        positions.append(np.asarray(known, np.int64))
        counted += part.rows
    # A recomputed position comes again; the last row is the one that counts.
    flat = np.concatenate(positions)
    _, last = np.unique(flat[::-1], return_index=True)
    final = np.zeros(len(flat), bool)
    final[len(flat) - 1 - last] = True
    begin = 0
    for part, some in zip(parts, positions):
        keep = final[begin : begin + len(some)]
        begin += len(some)
        key = (part.file, part.width, part.dtype)
        if key not in blocks:
            header = Compression().header(part.width, part.dtype)
            blocks[key] = out.block(FileBlock(store, part.file, header, names[part.file]))
        width = out.blocks[blocks[key]].width
        edges = np.flatnonzero(np.diff(keep.astype(np.int8), prepend=0, append=0))
        for a, b in zip(edges[::2].tolist(), edges[1::2].tolist()):
            out.run(request, site, blocks[key], part.offset + a * width, some[a:b])


def _describe(store: ObjectStore, name: str, data: str) -> list[_Part | _Unnamed]:
    raw = store.read(name)
    try:
        content = json.loads(raw)
        if "entries" in content:
            seq = int(content.get("seq", 0))
            return [_part(data, {**content, **e}, seq, int(e["offset"])) for e in content["entries"]]
        return [_part(data, content, 0, 0)]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise store.error(name, f"is no description of captured rows: {str(e)[:120]}") from None


def _part(data: str, entry: dict[str, Any], seq: int, offset: int) -> _Part | _Unnamed:
    given, layer = text_field(entry, "hook"), int(entry["layer"])
    try:
        hook = normalise_hook(_HOOKS.get(given, given), "hook")
    except WeirError:
        return _Unnamed(str(entry["request_id"]), given, layer, data.removesuffix(".bin") + ".json")
    site = Site(hook, layer)
    rows, width = (int(n) for n in entry["shape"])
    dtype, positions = entry.get("dtype", "float32"), entry.get("positions")
    if dtype not in ROW_DTYPES:
        raise ValueError(f"dtype {str(dtype)[:20]!r} is none of {', '.join(ROW_DTYPES)}")
    if min(site.layer, rows, offset) < 0 or width < 1:
        raise ValueError("negative numbers")
    if entry.get("nbytes", rows * width * ITEMSIZE[dtype]) != rows * width * ITEMSIZE[dtype]:
        raise ValueError(f"nbytes {entry['nbytes']} does not fit the shape")
    if positions is not None:
        positions = [int(p) for p in positions]
        if len(positions) != rows or min(positions, default=0) < 0:
            raise ValueError("its positions do not fit its rows")
    return _Part(str(entry["request_id"]), site, data, seq, offset, rows, width, dtype, positions)


def is_fork(store: ObjectStore, names: dict[str, int]) -> bool:
    """Whether a folder holds the fork's pairs of files."""
    return any(n.endswith(".json") and n.removesuffix(".json") + ".bin" in names for n in names)
