"""`open_writer` and `load`: writers and datasets by URL; `load` recognises the format."""

from __future__ import annotations

import contextlib
import importlib
import posixpath
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

from vllm_weir.errors import MissingFile, WeirError, brief
from vllm_weir.storage.atomic_file import split_url
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.index import Index
from vllm_weir.storage.layouts.base import MARKER, Writer, read_marker
from vllm_weir.storage.layouts.npz import FILE, FOLDER, read_npz_layout
from vllm_weir.storage.layouts.packed import is_pack, read_packed
from vllm_weir.storage.layouts.per_request import read_per_request
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.safetensors_io import read_container

_WRITERS = {
    "sharded": ("sharded", "ShardedWriter"),
    "packed": ("packed", "PackedWriter"),
    "per_request": ("per_request", "PerRequestWriter"),
    "npz": ("npz", "NpzWriter"),
    "speculators": ("per_request", "SpeculatorsWriter"),
}
"""Layout -> (module, class). They are imported when they are used, since `sharded` needs
pyarrow."""
LAYOUTS = ("sharded", "packed", "per_request", "npz")
"""Those that take any rows."""
_OPTIONS = {
    "sharded": {"shard_bytes"},
    "packed": {"pack_bytes", "buffer_bytes"},
    "per_request": {"buffer_bytes"},
    "npz": {"buffer_bytes"},
    "speculators": {"buffer_bytes"},
}


def open_writer(
    url: str | PathLike,
    layout: str = "sharded",
    *,
    compress: object = None,
    fsync: bool = False,
    storage_options: dict[str, Any] | None = None,
    **options: Any,
) -> Writer:
    """Open a writer into a new or an existing dataset.

    Args:
        url: Folder: a local path or any fsspec URL (``s3://bucket/run``).
        layout: ``"sharded"``, ``"packed"``, ``"per_request"`` or ``"npz"``, or ``"speculators"`` for
            whole rows of resid_post alone; an existing dataset keeps its layout.
        compress: Compression of rows that come without a header; see `Compression.parse`.
        fsync: Wait until published files are on the disk (local only).
        storage_options: Options for fsspec.
        **options: ``shard_bytes`` (sharded), ``pack_bytes`` (packed), ``buffer_bytes`` (all but
            sharded).

    Raises:
        WeirError: For unknown layouts and options, an empty URL (the current directory is ``"."``),
            and if the folder cannot be written or holds something else.
    """
    check_layout(layout, options)
    module, name = _WRITERS[layout]
    return getattr(_layout_module(module), name)(ObjectStore(url, storage_options, fsync=fsync), compress, **options)


def _layout_module(module: str) -> Any:
    try:
        return importlib.import_module(f"vllm_weir.storage.layouts.{module}")
    except ImportError as e:
        raise WeirError(f"the layout 'sharded' needs pyarrow ({e}): pip install 'vllm-weir[keep]'", "layout") from e


def foreign(module: str) -> Any:
    return importlib.import_module(f"vllm_weir.compat.{module}")


def _read_sharded(store: ObjectStore, names: dict[str, int], incomplete: bool = False) -> Index:
    table = _layout_module("manifest").read_manifest(store, names)
    return _layout_module("sharded_reader").index_of(store, table, names, incomplete=incomplete)


def check_layout(layout: str, options: Iterable[str] = ()) -> None:
    if layout not in _WRITERS:
        raise WeirError(f"unknown layout {brief(layout)!r}; choose from {', '.join(_WRITERS)}", "layout")
    for name in options:
        if name not in _OPTIONS[layout]:
            raise WeirError(f"unknown option of layout {layout!r}; it has {', '.join(sorted(_OPTIONS[layout]))}", name)


def load(
    url: str | PathLike,
    *,
    storage_options: dict[str, Any] | None = None,
    incomplete: bool = False,
    layer_ids: Sequence[int] | None = None,
    hidden_size: int | None = None,
) -> ActivationDataset:
    """Open activations: Weir's own layouts, files of `Activations.save`, and foreign formats.

    Args:
        url: Folder or file: a local path or any fsspec URL.
        storage_options: Options for fsspec.
        incomplete: Include requests that were begun and never finished (layout ``sharded``).
        layer_ids: Layers of vLLM's own hidden states, whose files do not say them.
        hidden_size: d_model of Vllm_mi_patch's topk8, whose files do not say it.

    Raises:
        MissingFile: If there is nothing at the URL.
        StoreError: If it cannot be read; it names the file.
        WeirError: If no activations are found there, or a file is damaged; it names the file.
    """
    store = ObjectStore(url, storage_options)
    if store.is_file():
        parent, name = split_url(store.url)
        store = ObjectStore(parent, storage_options)
        names = {name: store.size(name)}
        if name.endswith((".bin", ".json")):  # files of RhizoNymph/vllm come in pairs
            stem = posixpath.splitext(name)[0]
            names = {n: size for n, size in store.names().items() if posixpath.splitext(n)[0] == stem}
        index = _recognise(store, names, layer_ids, hidden_size, str(url))
    else:
        names = store.names()
        if MARKER in names:
            index = _read(store, read_marker(store), names, incomplete)
        else:
            index = _recognise(store, store.names(deep=True), layer_ids, hidden_size, str(url))
    return ActivationDataset(index, str(url))


def _read(store: ObjectStore, layout: str, names: dict[str, int], incomplete: bool) -> Index:
    """Read the index of a dataset of a known layout; folders in it are other datasets."""
    if layout == "sharded":
        return _read_sharded(store, names, incomplete)
    if layout == "npz":
        return read_npz_layout(store, store.names(deep=True, folder_prefix=FOLDER))
    if layout == "speculators":
        return foreign("hidden_states").read_hidden_states(store, names, None)
    readers = {"packed": read_packed, "per_request": read_per_request}
    if layout == "features":
        raise WeirError(f"{store.url} holds features of a sparse autoencoder; open it with weir.load_features")
    if layout not in readers:
        raise store.error(MARKER, f"unknown layout {layout[:40]!r}")
    return readers[layout](store, names)


def _recognise(
    store: ObjectStore, names: dict[str, int], layer_ids: Sequence[int] | None, hidden_size: int | None, url: str
) -> Index:
    """Read the index of a file, or of a folder without a marker, and recognise its format."""
    files = sorted(n for n in names if n.endswith(".safetensors"))
    if files:
        container = read_container(store, files[0], names[files[0]])
        kind = container.metadata.get("weir")
        if kind in ("1", "records"):
            return read_per_request(store, names)
        if kind == "pack":
            _refuse_renamed(store, files, is_pack)
            return read_packed(store, names)
        if kind == "shard":
            _refuse_renamed(store, files, _layout_module("manifest").is_shard)
            return _read_sharded(store, names)
        if "hidden_states" in container.tensors:
            return foreign("hidden_states").read_hidden_states(store, names, layer_ids)
        raise store.error(files[0], "holds no activations that Weir knows")
    if any(FILE.fullmatch(n.rpartition("/")[2]) for n in names):
        return foreign("mi_patch.files").read_foreign_npz(store, names, hidden_size)
    if (fork := foreign("rhizonymph.files")).is_rhizonymph(names):
        return fork.read_rhizonymph(store, names)
    if not store.exists():
        if not store.local:
            with contextlib.suppress(MissingFile):
                # Raises the reason, if `exists` took a refused connection for a no.
                store.read("", 0, 1)
        raise MissingFile(f"{url} does not exist")
    raise WeirError(f"{url} holds no activations that Weir knows")


def _refuse_renamed(store: ObjectStore, files: list[str], has_name: Callable[[str], bool]) -> None:
    """Raise WeirError for a file that would not be read because of its name."""
    for name in files:
        if not has_name(name):
            raise store.error(name, "was renamed, or is in a folder that must be loaded by itself")
