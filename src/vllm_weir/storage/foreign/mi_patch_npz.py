"""Reading npz files that Vllm_mi_patch wrote.

Its code is ``q = x / scale + zero``, so the value is ``(q - zero) * scale``; its own inverse says otherwise. With
scales per dimension (its default) it takes the range over one row, which is nothing: such files hold no values any
more, and are refused. Rows of its rp8 are in the projected space, and the projection was not stored. Its topk8 does
not say how wide a row is, but its manifest does, if there is one.
"""

from __future__ import annotations

import json
import posixpath
from functools import cache, partial
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.schema.compression import MAX_WIDTH, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.index import Index, IndexBuilder, short_names
from vllm_weir.storage.layouts.npz import FILE, MANIFEST, add_own, add_request, home_of, unpack_own
from vllm_weir.storage.layouts.npz_file import read_npz, read_some
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import ArrayBlock, RecordBlock

NOTES = [
    "written by Vllm_mi_patch, which taps what a block returns first: in models that carry (hidden, residual) that is "
    "not the stream",
    "its random projection was not stored: rows of its rp8 can be compared with one another only",
]

NO_WIDTH = "its topk8 does not say how wide a row is, nor does a manifest: to decode rows pass hidden_size"


def read_foreign_npz(store: ObjectStore, names: dict[str, int], hidden_size: int | None = None) -> Index:
    """The index of an output directory, or of single files.

    Weir's own files of the layout `npz` may be among them, or all there is: a request's folder, or a copy of some. A
    damaged file is noted, and raises when its rows are asked for; at once, where there is no other.

    Args:
        hidden_size: d_model, which rows of topk8 need where no manifest says it. What else is known of them is read
            without.
    """
    out = IndexBuilder("npz")
    sequences: dict[str, set[str]] = {}
    found, errors = [], []
    widths = cache(partial(_widths, store))
    for name in sorted(names):
        match = FILE.fullmatch(posixpath.basename(name))
        if match:
            sequences.setdefault(posixpath.dirname(name), set()).add(match[1])
            found.append((name, match))
    called = short_names([*sequences, *(home_of(name)[0] for name, _ in found)])
    if any(match[3] != "0" for _, match in found):
        out.notes.append("files of tensor-parallel ranks other than 0 are left out")
    whole: set[str] = set()
    for name, match in found:
        if match[3] != "0" or not whole.isdisjoint({posixpath.dirname(name), home_of(name)[0]}):
            continue
        shapes, error = _look(store, name)
        if "weir" in shapes:
            _add_own(out, store, name, int(match[2]), names, called, whole)
            continue
        out.layout, out.lossy = "vllm_mi_patch", "Vllm_mi_patch to 8 bits"
        folder = posixpath.dirname(name)
        request = called[folder] or "request"
        if len(sequences[folder]) > 1:
            request = f"{request}/seq{match[1]}"
        place = out.request(request), Site("resid_post", int(match[2]))
        if error is None:
            width = hidden_size
            if "q" not in shapes and width is None:
                width = widths(folder).get((int(match[1]), int(match[2])))
            _add(out, store, name, *place, shapes, width)
        else:
            errors.append(error)
            out.notes.append(f"damaged: {error.message}")
            out.run(*place, out.block(_Damaged(store, name, error.message)), 0, np.arange(1))
    if errors and len(errors) == len(out.blocks):
        raise errors[0]
    return out.build()


def _look(store: ObjectStore, name: str) -> tuple[dict[str, Any], WeirError | None]:
    """(shape and dtype) of the arrays of a file by name, or what is wrong with it."""
    try:
        _, shapes = read_some(store, name, ())
    except StoreError:
        raise  # nothing is known of it
    except WeirError as e:
        return {}, e
    key = "q" if "q" in shapes else "values"
    if "weir" not in shapes and not ({key, "scale", "zero"} <= shapes.keys() and len(shapes[key][0]) == 2):
        return {}, store.error(name, "has not the fields q, scale, zero (or indices, values, scale, zero)")
    return shapes, None


def _widths(store: ObjectStore, folder: str) -> dict[tuple[int, int], int]:
    """(sequence, layer) -> values of a row, as the folder's manifest says, if it has one. Of rp8 these are its k."""
    try:
        data = store.read(posixpath.join(folder, MANIFEST))
    except MissingFile:
        return {}
    out = {}
    try:
        for sequence, one in json.loads(data)["sequences"].items():
            for layer, entry in one["layers"].items():
                width = entry["shape"][1]  # the other is no number of rows: it counts a token once a layer
                if type(width) is int and 0 < width <= MAX_WIDTH:
                    out[int(sequence), int(layer)] = width
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # as good as none: rows can do without
    return out


class _Damaged(ArrayBlock):
    """A file that could not be read: one row, since nobody knows how many, which raises."""

    def __init__(self, store: ObjectStore, name: str, message: str) -> None:
        super().__init__(store, name, Compression().header(1, "float32"), 1, partial(_unpack, width=1))
        self.message = message

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        raise WeirError(self.message)


def is_foreign(block: RecordBlock) -> bool:
    """Whether a block is a file of Vllm_mi_patch's that can be read."""
    return isinstance(block, ArrayBlock) and not isinstance(block, _Damaged) and block.unpack is not unpack_own


def _add_own(
    out: IndexBuilder,
    store: ObjectStore,
    name: str,
    layer: int,
    names: dict[str, int],
    called: dict[str, str],
    whole: set[str],
) -> None:
    """Add the request that one of Weir's files belongs to, once; or the file alone, where there is no manifest."""
    # A file does not say its hook point. It lies in a folder that does, which may itself be what was opened.
    home, hook = home_of(name)
    for folder in (posixpath.dirname(name), home):
        manifest = posixpath.join(folder, MANIFEST)
        if manifest in names and add_request(out, store, manifest, names, posixpath.dirname(called[folder])):
            whole.add(folder)
            return
    if "/" not in name:
        _, hook = home_of(store.describe(name))
    add_own(out, store, name, out.request(called[home] or "request"), Site(hook, layer))


def _add(
    out: IndexBuilder,
    store: ObjectStore,
    name: str,
    request: int,
    site: Site,
    shapes: dict[str, Any],
    width: int | None,
) -> None:
    """Add a file; `width`: of topk8, if it is known."""
    out.notes += [note for note in NOTES if note not in out.notes]
    n, stored = shapes["q" if "q" in shapes else "values"][0]
    if "q" in shapes:
        width = stored
    elif width is None and NO_WIDTH not in out.notes:
        out.notes.append(NO_WIDTH)
    header = Compression().header(width or max(1, stored), "float32")
    block = out.block(ArrayBlock(store, name, header, n, partial(_unpack, width=width)))
    out.run(request, site, block, 0, np.arange(n))


def _unpack(store: ObjectStore, name: str, *, width: int | None) -> np.ndarray:
    arrays = read_npz(store, name)
    try:
        rows = rebuild(arrays, width)
    except WeirError as e:
        where = f"{store.describe(name)}: {e.message}"
        raise WeirError(where, e.field if e.field == "hidden_size" else "") from None
    return np.ascontiguousarray(rows, "<f4").view(np.uint8)


def rebuild(arrays: dict[str, Any], width: int | None = None) -> np.ndarray:
    """Rows of the arrays of one file: float32 [n, k] (dense) or [n, width] (topk8).

    Vllm_mi_patch's scales are [n], or [k] if its function for scales per dimension was given all rows at once (of as
    many rows as values the former is meant); those of Weir's own files are [n, 1] and stand for ``q * scale + zero``.

    Raises WeirError if fields are missing or do not fit, or if the file keeps no values.
    """
    sparse = "indices" in arrays
    for key in ("indices", "values", "scale", "zero") if sparse else ("q", "scale", "zero"):
        if key not in arrays:
            raise WeirError(f"has no field {key}", key)
    codes = np.asarray(arrays["values" if sparse else "q"], np.float32)
    scale, zero = (np.asarray(arrays[key], np.float32) for key in ("scale", "zero"))
    if codes.ndim != 2:
        raise WeirError(f"codes are [rows, values], got {list(codes.shape)}", "q")
    if scale.shape == codes.shape and codes.shape[1] > 1:
        raise WeirError(
            "its scales are per dimension (VLLM_ACT_PER_DIM=1), each taken over a single row: it keeps no values",
            "scale",
        )
    if not sparse and scale.shape == zero.shape == codes.shape[1:] != (len(codes),):
        return (codes - zero) * scale
    if scale.size != len(codes) or zero.size != len(codes):
        raise WeirError(f"{len(codes)} rows want as many scales and zeros, got {scale.size} and {zero.size}", "scale")
    if scale.shape == zero.shape == (len(codes), 1):
        values = codes * scale + zero
    else:
        values = (codes - zero.reshape(-1, 1)) * scale.reshape(-1, 1)
    if not sparse:
        return values
    if width is None:
        raise WeirError("topk8 does not say how wide a row is; pass hidden_size", "hidden_size")
    return scatter(np.asarray(arrays["indices"]), values, width)


def scatter(indices: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """Sparse rows [n, k] as dense ones [n, width]; int16 indices that wrapped are taken as the uint16 they were."""
    if indices.shape != values.shape or indices.dtype.kind not in "iu":
        raise WeirError(
            f"indices {indices.dtype} {list(indices.shape)} do not fit values {list(values.shape)}", "indices"
        )
    if indices.dtype == np.int16:
        if width > 65_536:
            raise WeirError(f"int16 indices cannot reach {width} values: it keeps wrong places", "indices")
        indices = indices.view(np.uint16)
    if indices.size and (int(indices.max()) >= width or int(indices.min()) < 0):
        raise WeirError(f"index {int(indices.max())} is outside a row of {width} values", "indices")
    out = np.zeros((len(values), width), np.float32)
    np.put_along_axis(out, indices.astype(np.int64), values, axis=1)
    return out
