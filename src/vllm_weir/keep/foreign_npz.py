"""Reading npz files that Vllm_mi_patch wrote.

Its code is ``q = x / scale + zero``, so the value is ``(q - zero) * scale``; its own inverse says otherwise. With
scales per dimension (its default) it takes the range over one row, which is nothing: such files hold no values any
more, and are refused. Rows of its rp8 are in the projected space, and the projection was not stored.
"""

from __future__ import annotations

import posixpath
from functools import partial
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.keep.atomic import Store
from vllm_weir.keep.blocks import ArrayBlock
from vllm_weir.keep.index import Builder, Index, short_names
from vllm_weir.keep.npz import FILE, MANIFEST, add_own, add_request, home_of
from vllm_weir.keep.npzfile import read_npz, read_some
from vllm_weir.spec.compress import Compression
from vllm_weir.spec.hooks import Site

NOTES = [
    "written by Vllm_mi_patch, which taps what a block returns first: in models that carry (hidden, residual) that is "
    "not the stream",
    "its random projection was not stored: rows of its rp8 can be compared with one another only",
]


def read_foreign_npz(store: Store, names: dict[str, int], hidden_size: int | None = None) -> Index:
    """The index of an output directory, or of single files. `hidden_size`: d_model, which topk8 needs.

    Weir's own files of the layout `npz` may be among them, or all there is: a request's folder, or a copy of some.
    """
    out = Builder("npz")
    sequences: dict[str, set[str]] = {}
    found = []
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
        _, shapes = read_some(store, name, ())
        if "weir" in shapes:
            _add_own(out, store, name, int(match[2]), names, called, whole)
            continue
        out.layout, out.lossy = "vllm_mi_patch", "Vllm_mi_patch to 8 bits"
        folder = posixpath.dirname(name)
        request = called[folder] or "request"
        if len(sequences[folder]) > 1:
            request = f"{request}/seq{match[1]}"
        _add(out, store, name, out.request(request), Site("resid_post", int(match[2])), shapes, hidden_size)
    return out.build()


def _add_own(
    out: Builder, store: Store, name: str, layer: int, names: dict[str, int], called: dict[str, str], whole: set[str]
) -> None:
    """Add the request that one of Weir's files belongs to, once; or the file alone, where there is no manifest."""
    # A file does not say its hook point. It lies in a folder that does, which may itself be what was opened.
    home, hook = home_of(name)
    for folder in (posixpath.dirname(name), home):
        manifest = posixpath.join(folder, MANIFEST)
        if manifest in names:
            whole.add(folder)
            add_request(out, store, manifest, names, posixpath.dirname(called[folder]))
            return
    if "/" not in name:
        _, hook = home_of(store.describe(name))
    add_own(out, store, name, out.request(called[home] or "request"), Site(hook, layer))


def _add(
    out: Builder, store: Store, name: str, request: int, site: Site, shapes: dict[str, Any], hidden_size: int | None
) -> None:
    out.notes += [note for note in NOTES if note not in out.notes]
    key = "q" if "q" in shapes else "values"
    if key not in shapes or "scale" not in shapes or "zero" not in shapes or len(shapes[key][0]) != 2:
        raise store.fail(name, "has not the fields q, scale, zero (or indices, values, scale, zero)")
    n, width = shapes[key][0]
    if key == "values":
        if hidden_size is None:
            raise WeirError(
                f"{store.describe(name)} is topk8, which does not say how wide a row is; pass hidden_size=",
                "hidden_size",
            )
        width = hidden_size
    header = Compression().header(width, "float32")
    block = out.block(ArrayBlock(store, name, header, n, partial(_unpack, width=width)))
    out.run(request, site, block, 0, np.arange(n))


def _unpack(store: Store, name: str, *, width: int) -> np.ndarray:
    arrays = read_npz(store, name)
    try:
        rows = rebuild(arrays, width)
    except WeirError as e:
        raise store.fail(name, e.message) from None
    return np.ascontiguousarray(rows, "<f4").view(np.uint8)


def rebuild(arrays: dict[str, Any], width: int | None = None) -> np.ndarray:
    """Rows of the arrays of one file: float32 [n, k] (dense) or [n, width] (topk8).

    Vllm_mi_patch's scales are [n]; those of Weir's own files are [n, 1] and stand for ``q * scale + zero``.

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
