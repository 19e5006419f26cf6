"""Reading npz files that Vllm_mi_patch wrote.

It quantises by ``q = x / scale + zero``, so the value is ``(q - zero) * scale``; its own inverse
computes something else. With scales per dimension (its default) it takes the range of each
dimension over a single row, which is zero, so such files have lost their values and are refused.
Rows of its rp8 are in the projected space, and the projection is not stored. Files of its topk8 do
not say how wide a row is; a manifest does, if there is one.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.analysis.reconstruct import rebuild
from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.schema.compression import MAX_WIDTH, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.index import Index, IndexBuilder, short_names
from vllm_weir.storage.layouts.npz import FILE, MANIFEST, add_own_file, add_request, home_of, read_npz, read_some
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import ArrayBlock

NOTES = [
    "written by Vllm_mi_patch, which taps what a block returns first: in models that carry (hidden, residual) that is "
    "not the stream",
    "its random projection was not stored: rows of its rp8 can be compared with one another only",
]

NO_WIDTH_NOTE = "its topk8 does not say how wide a row is, nor does a manifest: to decode rows pass hidden_size"


def read_foreign_npz(store: ObjectStore, names: dict[str, int], hidden_size: int | None = None) -> Index:
    """Read the index of an output directory, or of single files.

    Weir's own files of the layout `npz` may be among them, or be all there is: a request's folder,
    or a copy of some files. A damaged file is noted, and raises when its rows are accessed; or at
    once, if there is no other.

    `store`: Store of the files; `names`: the files, and their sizes in bytes; `hidden_size`: d_model, which is needed
    to decode topk8 where no manifest says it.
    """
    files = []
    for name in sorted(names):
        match = FILE.fullmatch(posixpath.basename(name))
        if match:
            files.append(_File(name, posixpath.dirname(name), match[1], int(match[2]), match[3] == "0"))
    return _ForeignReader(store, names, files, hidden_size).read()


class _File(NamedTuple):
    """An npz file, with what its name says."""

    name: str
    folder: str
    sequence: str
    layer: int
    is_first_rank: bool


class _ForeignReader:
    """Builds the index of `read_foreign_npz`."""

    def __init__(self, store: ObjectStore, names: dict[str, int], files: list[_File], hidden_size: int | None) -> None:
        self._store, self._names, self._files, self._hidden_size = store, names, files, hidden_size
        self._builder = IndexBuilder("npz")
        self._sequences: dict[str, set[str]] = {}
        for file in files:
            self._sequences.setdefault(file.folder, set()).add(file.sequence)
        self._folder_names = short_names([*self._sequences, *(home_of(file.name)[0] for file in files)])
        self._folders_done: set[str] = set()
        """Folders of Weir's own requests that were added by their manifests."""
        self._manifest_widths = cache(partial(_widths, store))
        self._errors: list[WeirError] = []

    def read(self) -> Index:
        if not all(file.is_first_rank for file in self._files):
            self._builder.notes.append("files of tensor-parallel ranks other than 0 are left out")
        for file in self._files:
            in_done_folder = not self._folders_done.isdisjoint({file.folder, home_of(file.name)[0]})
            if not file.is_first_rank or in_done_folder:
                continue
            shapes, error = _shapes(self._store, file.name)
            if "weir" in shapes:
                self._add_own(file)
            else:
                self._add_foreign(file, shapes, error)
        if self._errors and len(self._errors) == len(self._builder.blocks):
            raise self._errors[0]
        return self._builder.build()

    def _add_own(self, file: _File) -> None:
        """Add the request of one of Weir's files, or the file alone if there is no manifest."""
        # The file does not name its hook point; its folder does, which may be the folder that was
        # opened.
        home, hook = home_of(file.name)
        for folder in (file.folder, home):
            manifest = posixpath.join(folder, MANIFEST)
            id_prefix = posixpath.dirname(self._folder_names[folder])
            if manifest in self._names and add_request(self._builder, self._store, manifest, self._names, id_prefix):
                self._folders_done.add(folder)
                return
        if "/" not in file.name:
            _, hook = home_of(self._store.describe(file.name))
        request = self._builder.add_request(self._folder_names[home] or "request")
        add_own_file(self._builder, self._store, file.name, request, Site(hook, file.layer))

    def _add_foreign(self, file: _File, shapes: dict[str, Any], error: WeirError | None) -> None:
        """Add a file of Vllm_mi_patch's; a damaged one as a row that raises."""
        builder = self._builder
        builder.layout, builder.lossy = "vllm_mi_patch", "Vllm_mi_patch to 8 bits"
        name = self._folder_names[file.folder] or "request"
        if len(self._sequences[file.folder]) > 1:
            name = f"{name}/seq{file.sequence}"
        request, site = builder.add_request(name), Site("resid_post", file.layer)
        if error is not None:
            self._errors.append(error)
            builder.notes.append(f"damaged: {error.message}")
            block: ArrayBlock = _Damaged(self._store, file.name, error.message)
            builder.add_run(request, site, builder.add_block(block), 0, np.arange(1))
            return
        builder.notes += [note for note in NOTES if note not in builder.notes]
        width = self._hidden_size
        rows, values = shapes["q" if "q" in shapes else "values"][0]
        if "q" in shapes:
            width = values
        elif width is None:
            width = self._manifest_widths(file.folder).get((int(file.sequence), file.layer))
            if width is None and NO_WIDTH_NOTE not in builder.notes:
                builder.notes.append(NO_WIDTH_NOTE)
        header = Compression().header(width or max(1, values), "float32")
        block = ArrayBlock(self._store, file.name, header, rows, partial(_unpack, width=width))
        builder.add_run(request, site, builder.add_block(block), 0, np.arange(rows))


def _shapes(store: ObjectStore, name: str) -> tuple[dict[str, Any], WeirError | None]:
    """Return the (shape, dtype) of each array of a file, or what is wrong with the file."""
    try:
        _, shapes = read_some(store, name, ())
    except StoreError:
        raise  # it says nothing about the content
    except WeirError as e:
        return {}, e
    key = "q" if "q" in shapes else "values"
    if "weir" not in shapes and not ({key, "scale", "zero"} <= shapes.keys() and len(shapes[key][0]) == 2):
        return {}, store.error(name, "lacks the fields q, scale, zero (or indices, values, scale, zero)")
    return shapes, None


def _widths(store: ObjectStore, folder: str) -> dict[tuple[int, int], int]:
    """Return (sequence, layer) -> width of a row (k of rp8), if the folder has a manifest."""
    try:
        data = store.read(posixpath.join(folder, MANIFEST))
    except MissingFile:
        return {}
    widths = {}
    # Widths are optional.
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        for sequence, content in json.loads(data)["sequences"].items():
            for layer, entry in content["layers"].items():
                # `shape[0]` is not the number of rows: it counts a token once for each layer.
                width = entry["shape"][1]
                if type(width) is int and 0 < width <= MAX_WIDTH:
                    widths[int(sequence), int(layer)] = width
    return widths


class _Damaged(ArrayBlock):
    """A damaged file: a single row that raises when it is read, since the number is unknown."""

    readable = False

    def __init__(self, store: ObjectStore, name: str, message: str) -> None:
        super().__init__(store, name, Compression().header(1, "float32"), 1, partial(_unpack, width=1))
        self.message = message

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        raise WeirError(self.message)


def _unpack(store: ObjectStore, name: str, *, width: int | None) -> np.ndarray:
    arrays = read_npz(store, name)
    try:
        rows = rebuild(arrays, width)
    except WeirError as e:
        message = f"{store.describe(name)}: {e.message}"
        raise WeirError(message, e.field if e.field == "hidden_size" else "") from None
    return np.ascontiguousarray(rows, "<f4").view(np.uint8)
