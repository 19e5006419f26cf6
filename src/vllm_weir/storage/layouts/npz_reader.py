"""Reading the `npz` layout."""

from __future__ import annotations

import json
import posixpath

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import HOOKS, Site, normalise_hook
from vllm_weir.storage.index import Index, IndexBuilder
from vllm_weir.storage.layouts.npz import FOLDER, MANIFEST, file_of, manifest_crc
from vllm_weir.storage.layouts.npz_arrays import to_records
from vllm_weir.storage.layouts.npz_file import read_npz, read_some
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import ArrayBlock


def read_npz_layout(store: ObjectStore, names: dict[str, int]) -> Index:
    """Read the index of what `NpzWriter` wrote; `names`: the files in folders of requests."""
    builder = IndexBuilder("npz")
    foreign = 0
    for name in sorted(names):
        if name.count("/") == 1 and name.startswith(FOLDER) and name.endswith("/" + MANIFEST):
            foreign += not add_request(builder, store, name, names)
    if foreign:
        folders = "a folder is" if foreign == 1 else f"{foreign} folders are"
        builder.notes.append(f"{folders} left out whose manifests other programs wrote; load them by themselves")
    return builder.build()


def add_request(
    builder: IndexBuilder, store: ObjectStore, manifest: str, names: dict[str, int], id_prefix: str = ""
) -> bool:
    """Add the request that a manifest describes; return False, and add nothing, if it is another program's.

    `id_prefix` is put before the request's id, where several folders have a request of the same id.
    """
    folder = posixpath.dirname(manifest)
    data = store.read(manifest)
    try:
        content = json.loads(data)
        if isinstance(content, dict) and content and not {"weir", "weir_crc"} & content.keys():
            return False
        crc = content.pop("weir_crc", None)  # optional
        request, own = content["request_id"], content["weir"]
        files = [(name, Site(normalise_hook(hook), int(layer))) for name, hook, layer in own["files"]]
        metadata = json.dumps(own["metadata"])
        if not isinstance(request, str) or not isinstance(own["metadata"], dict):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise store.error(manifest, "damaged: it is not a valid manifest") from None
    if crc is not None and crc != manifest_crc(content):
        raise store.error(manifest, "damaged or edited: its checksum does not match")
    for name, site in files:
        if name != file_of(site):  # which also keeps paths inside the folder
            raise store.error(manifest, f"damaged: it names {brief(name, 80)!r} for {site}")
    request = posixpath.join(id_prefix, request)
    code = builder.add_request(folder if request in builder.requests else request, metadata)
    for short_name, site in files:
        name = posixpath.join(folder, short_name)
        if name not in names:
            raise store.error(name, "is missing, although the manifest names it")
        add_own_file(builder, store, name, code, site)
    return True


def add_own_file(builder: IndexBuilder, store: ObjectStore, name: str, request: int, site: Site) -> None:
    """Add an npz file that Weir wrote to a request, by its code."""
    arrays, _ = read_some(store, name, ("weir", "positions", "token_ids"))
    try:
        header = json.loads(arrays["weir"].tobytes())
        positions, tokens = arrays["positions"], arrays["token_ids"]
    except (KeyError, ValueError, RecursionError):
        raise store.error(name, "was not written by Weir, or is damaged") from None
    Compression.from_header(header, f"{store.describe(name)}: header")
    if positions.ndim != 1 or positions.shape != tokens.shape or {positions.dtype, tokens.dtype} != {np.dtype("int64")}:
        raise store.error(name, "damaged: its positions and tokens do not match")
    block = builder.add_block(ArrayBlock(store, name, header, len(positions), unpack_own))
    builder.add_run(request, site, block, 0, positions, tokens)


def home_of(path: str) -> tuple[str, str]:
    """Return the folder of the request and the hook point of an npz file that Weir wrote."""
    folder = posixpath.dirname(path)
    hook = posixpath.basename(folder)
    return (posixpath.dirname(folder), hook) if hook in HOOKS else (folder, "resid_post")


def unpack_own(store: ObjectStore, name: str) -> np.ndarray:
    """Return the records of an npz file that Weir wrote: uint8 [n, record_bytes]."""
    arrays = read_npz(store, name)
    try:
        return to_records(arrays, json.loads(arrays["weir"].tobytes()))
    except (KeyError, ValueError) as e:
        if isinstance(e, WeirError):
            raise
        raise store.error(name, f"damaged: {str(e)[:120]}") from None
