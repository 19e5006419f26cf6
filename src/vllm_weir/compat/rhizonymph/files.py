"""Captures of the fork RhizoNymph/vllm, read and written: ``.bin`` files of raw rows, described in JSON.

Its layouts are ``per_file`` (a pair of files for each layer and hook of a request), ``packed`` (a
pair for each request, with ``entries``) and ``sharded`` (``shard-*``, with many requests). Its
hooks are ``pre_attn``, ``post_attn``, ``mlp_in``, ``post_mlp`` and ``post_block``. Captures at points
that Weir has no name for are left out.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.compat.rhizonymph.tiers import FORK_HOOKS
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.compression import ITEMSIZE, ROW_DTYPES, Compression
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.storage.index import Index, IndexBuilder, text_field
from vllm_weir.storage.layouts.site_tensors import safe_name
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
    """A capture at a point that Weir has no name for; `file` is the .json file."""

    request: str
    hook: str
    layer: int
    file: str


def read_rhizonymph(store: ObjectStore, names: dict[str, int]) -> Index:
    """Read the index of a capture root, a tag, a request's folder, or a pair of files."""
    parts: list[_Part] = []
    unnamed: list[_Unnamed] = []
    for name in sorted(names):
        data = name.removesuffix(".json") + ".bin"
        if name.endswith(".json") and data in names:
            for part in _described_parts(store, name, data):
                if isinstance(part, _Part):
                    parts.append(part)
                else:
                    unnamed.append(part)
    builder = IndexBuilder("fork")
    if unnamed:
        if not parts:
            raise store.error(unnamed[0].file, f"no capture is left to read; {_left_out_note(unnamed, parts)}")
        builder.notes.append(_left_out_note(unnamed, parts))
    blocks: dict[tuple[str, int, str], int] = {}
    request_names = _request_names(parts)
    by_site: dict[tuple[str, Site], list[_Part]] = {}
    for part in sorted(parts, key=lambda p: (p.seq, p.file, p.offset)):
        by_site.setdefault((request_names[_request_key(part)], part.site), []).append(part)
    if any(part.positions is None for part in parts):
        builder.notes.append("rows without positions are numbered from 0")
    for (request, site), site_parts in by_site.items():
        _add(builder, store, names, blocks, builder.add_request(request), site, site_parts)
    return builder.build()


def _left_out_note(unnamed: list[_Unnamed], parts: list[_Part]) -> str:
    """Say which captures are left out, and why."""
    layers_by_hook: dict[str, list[int]] = {}
    for one in unnamed:
        layers_by_hook.setdefault(one.hook[:40], []).append(one.layer)
    points = (
        f"{len(layers)} x {hook!r} (blocks {', '.join(map(str, sorted({*layers})))})"[:200]
        for hook, layers in sorted(layers_by_hook.items())
    )
    only_unnamed = {_request_key(one) for one in unnamed} - {_request_key(part) for part in parts}
    nothing_else = f"; requests that hold nothing else: {len(only_unnamed)}" if only_unnamed else ""
    return f"left out, as Weir has no such hook point: {', '.join(points)}{nothing_else}"


def _request_key(part: _Part | _Unnamed) -> tuple[str, str]:
    """Return the folder and id of the request: several tags may have a request of the same id."""
    return part.file.rpartition("/")[0], part.request


def _request_names(parts: list[_Part]) -> dict[tuple[str, str], str]:
    """Name requests by their ids, after the folder if several folders have one of the same id."""
    keys = {_request_key(part) for part in parts}
    id_counts = Counter(request for _, request in keys)
    return {
        (folder, request): request if id_counts[request] == 1 else f"{folder.removesuffix(f'/{request}')}/{request}"
        for folder, request in keys
    }


def _add(
    builder: IndexBuilder, store: ObjectStore, names: dict[str, int], blocks: dict[tuple[str, int, str], int],
    request: int, site: Site, parts: list[_Part],
) -> None:  # fmt: skip
    """Add the parts of one site of a request. A recomputed position comes again; its last row is used."""
    positions, rows_before = [], 0
    for part in parts:
        numbered = range(rows_before, rows_before + part.rows)
        positions.append(np.asarray(numbered if part.positions is None else part.positions, np.int64))
        rows_before += part.rows
    joined = np.concatenate(positions)
    _, last_from_end = np.unique(joined[::-1], return_index=True)
    is_last = np.zeros(len(joined), bool)
    is_last[len(joined) - 1 - last_from_end] = True
    first_row = 0
    for part, part_positions in zip(parts, positions):
        used = is_last[first_row : first_row + len(part_positions)]
        first_row += len(part_positions)
        key = (part.file, part.width, part.dtype)
        if key not in blocks:
            header = Compression().header(part.width, part.dtype)
            blocks[key] = builder.add_block(FileBlock(store, part.file, header, names[part.file]))
        record_bytes = builder.blocks[blocks[key]].width
        edges = np.flatnonzero(np.diff(used.astype(np.int8), prepend=0, append=0))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist()):
            offset = part.offset + start * record_bytes
            builder.add_run(request, site, blocks[key], offset, part_positions[start:end])


def _described_parts(store: ObjectStore, name: str, data: str) -> list[_Part | _Unnamed]:
    """Parse a .json file; `data`: name of its .bin file."""
    raw = store.read(name)
    try:
        content = json.loads(raw)
        if "entries" in content:
            seq = int(content.get("seq", 0))
            return [_part(data, {**content, **e}, seq, int(e["offset"])) for e in content["entries"]]
        return [_part(data, content, 0, 0)]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise store.error(name, f"is not a description of captured rows: {str(e)[:120]}") from None


def _part(data: str, entry: dict[str, Any], seq: int, offset: int) -> _Part | _Unnamed:
    their_hook, layer = text_field(entry, "hook"), int(entry["layer"])
    try:
        hook = normalise_hook(_HOOKS.get(their_hook, their_hook), "hook")
    except WeirError:
        return _Unnamed(str(entry["request_id"]), their_hook, layer, data.removesuffix(".bin") + ".json")
    site = Site(hook, layer)
    rows, width = (int(n) for n in entry["shape"])
    dtype, positions = entry.get("dtype", "float32"), entry.get("positions")
    if dtype not in ROW_DTYPES:
        raise ValueError(f"dtype {str(dtype)[:20]!r} is none of {', '.join(ROW_DTYPES)}")
    if min(site.layer, rows, offset) < 0 or width < 1:
        raise ValueError("its numbers are out of range")
    if entry.get("nbytes", rows * width * ITEMSIZE[dtype]) != rows * width * ITEMSIZE[dtype]:
        raise ValueError(f"nbytes {entry['nbytes']} does not match the shape")
    if positions is not None:
        positions = [int(p) for p in positions]
        if len(positions) != rows or min(positions, default=0) < 0:
            raise ValueError("its positions do not match its rows")
    return _Part(str(entry["request_id"]), site, data, seq, offset, rows, width, dtype, positions)


def is_rhizonymph(names: dict[str, int]) -> bool:
    return any(n.endswith(".json") and n.removesuffix(".json") + ".bin" in names for n in names)


def write_rhizonymph(store: ObjectStore, request: str, acts: Activations) -> None:
    """Write a request's rows as the fork's ``per_file``, for its reader: a pair of files for each site.

    Rows are written decoded, and flat if they have several dimensions. The format has no token ids.
    """
    for site in acts.sites:
        rows = acts[site].flatten(1).contiguous()
        hook = FORK_HOOKS.get(site.hook, site.hook)  # its reader takes every name
        described = {
            "request_id": request,
            "layer": site.layer,
            "hook": hook,
            "shape": list(rows.shape),
            "dtype": str(rows.dtype).removeprefix("torch."),
            "positions": acts.positions_of(*site).tolist(),
        }
        name = f"{safe_name(request)}/{site.layer}_{hook}"
        store.put(f"{name}.bin", rows.view(torch.uint8).numpy().tobytes())
        store.put(f"{name}.json", json.dumps(described).encode())
