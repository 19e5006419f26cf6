"""The layout npz: arrays as Vllm_mi_patch names them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import re
import zlib
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError, brief
from vllm_weir.schema.compression import EXACT_DTYPES, Compression, header_bytes
from vllm_weir.schema.hooks import HOOKS, Site, normalise_hook
from vllm_weir.storage.index import Index, IndexBuilder
from vllm_weir.storage.layouts.site_tensors import BufferedWriter, SiteRows, safe_name
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import ArrayBlock
from vllm_weir.util.foreign_files import DAMAGE, npz_arrays


def read_npz(store: ObjectStore, name: str) -> dict[str, np.ndarray]:
    return read_some(store, name, None)[0]


def read_some(
    store: ObjectStore, name: str, wanted: tuple[str, ...] | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays `wanted` of a file, None for all, and the (shape, dtype) of every array.

    Rows may be compressed to any part of their size.
    """
    file = io.BytesIO(store.read(name))
    try:
        return npz_arrays(file, wanted, bounded=False)
    except DAMAGE as e:
        raise store.error(name, f"is not an npz file, or is damaged: {type(e).__name__}: {str(e)[:120]}") from None


def write_npz(arrays: dict[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


CODES = ("q", "indices", "codes")
"""Names of arrays one of which is in every file of compressed rows."""
_STORED_DTYPES = {
    "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4", "uint8": "u1",
    "float8_e4m3fn": "u1",
}  # fmt: skip
_ARRAY_NAMES = {
    "none": {"values": "activations"},
    "fp16": {"values": "activations"},
    "fp8": {"values": "codes"},
    "rp8": {"codes": "q"},
    "full8": {"codes": "q"},
    "topk8": {"codes": "values"},
}
"""Method -> name of a record's field -> name of its array, where that differs."""


def to_arrays(records: np.ndarray, header: dict[str, Any]) -> dict[str, np.ndarray]:
    """Split records [n, record_bytes] into arrays by field, each [n, ...].

    Scale and zero are [n, 1]; bfloat16 becomes float32.
    """
    arrays = {}
    for field, end in _fields_with_ends(header):
        values = np.ascontiguousarray(records[:, field["offset"] : end]).view(_STORED_DTYPES[field["dtype"]])
        if field["dtype"] == "bfloat16":
            values = (values.astype("<u4") << 16).view("<f4")
        arrays[_array_name(field, header)] = values
    return arrays


def to_records(arrays: dict[str, np.ndarray], header: dict[str, Any]) -> np.ndarray:
    """Join arrays to records: uint8 [n, record_bytes], the inverse of `to_arrays`.

    Also reads bfloat16 as the uint16 of its bits, and the codes of fp8 under the name
    ``activations``.
    """
    parts = []
    for field, end in _fields_with_ends(header):
        name = _array_name(field, header)
        array = arrays["activations" if name == "codes" and name not in arrays else name]
        if array.ndim == 2 and field["dtype"] == "bfloat16" and array.dtype == np.dtype("<f4"):
            array = _bfloat16_bits(array, name)
        if array.dtype != np.dtype(_STORED_DTYPES[field["dtype"]]) or array.ndim != 2:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
        parts.append(np.ascontiguousarray(array).view(np.uint8))
        if parts[-1].shape[1] != end - field["offset"]:
            raise ValueError(f"{name} has the wrong width")
    return np.concatenate(parts, axis=1)


def _bfloat16_bits(array: np.ndarray, name: str) -> np.ndarray:
    """Return the bits of bfloat16 values stored as float32: uint16; raise ValueError for others."""
    bits = np.ascontiguousarray(array).view("<u4")
    if (bits & 0xFFFF).any():
        raise ValueError(f"{name} has values that are no bfloat16, although the header says they are")
    return (bits >> 16).astype("<u2")


def _array_name(field: dict[str, Any], header: dict[str, Any]) -> str:
    return _ARRAY_NAMES[header["method"]].get(field["name"], field["name"])


def _fields_with_ends(header: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    fields = header["fields"]
    return list(zip(fields, [f["offset"] for f in fields[1:]] + [header_bytes(header)]))


MANIFEST = "manifest.json"
FOLDER = "req_"
"""Prefix of the folders of requests; Vllm_mi_patch's loader looks for it."""
FILE = re.compile(r"seq(\d{1,18})_layer(\d{1,9})_rank(\d{1,9})\.npz")
"""File names: sequence, layer, rank."""


class NpzWriter(BufferedWriter):
    """The writer of the layout ``npz``."""

    layout = "npz"
    folder_prefix = FOLDER

    def __init__(self, store: ObjectStore, compress: object = None, buffer_bytes: int = 4 << 30) -> None:
        super().__init__(store, compress, buffer_bytes)
        self._files = set(store.names(deep=True, folder_prefix=FOLDER))

    def holds(self, request_id: str) -> bool:
        return f"{folder_of(request_id)}/{MANIFEST}" in self._files

    def _check_open(self, request_id: str) -> None:
        if self.holds(request_id):
            self._finished.add(request_id)
        super()._check_open(request_id)

    def _publish_request(self, request_id: str, sites: list[SiteRows], metadata: str) -> None:
        folder = folder_of(request_id)
        self._refuse_foreign(folder, sites)
        written: list[str] = []
        try:
            self._write_request(request_id, sites, metadata, written)
        except Exception:
            self._remove_written(folder, sites, written)
            raise

    def _refuse_foreign(self, folder: str, sites: list[SiteRows]) -> None:
        """Raise WeirError rather than overwrite another program's files."""
        for name in (f"{folder}/{file_of(s.site)}" for s in sites):
            if name in self._files and not _is_own(self.store, name):
                raise self.store.error(name, "is another program's, or damaged; choose another id, or another place")

    def _remove_written(self, folder: str, sites: list[SiteRows], written: list[str]) -> None:
        """Remove the files of an incomplete request: programs that look at no manifests would take them for one."""
        try:
            self.store.size(f"{folder}/{MANIFEST}")
        except MissingFile:
            pass
        except StoreError:
            return
        else:
            return  # a complete request of another writer
        for name in written:
            with contextlib.suppress(StoreError):
                self.store.remove(name)
        if self.store.local:
            for path in (*sorted({f"{folder}/{s.site.hook}" for s in sites}), folder):
                with contextlib.suppress(OSError):  # it does not exist, or is not empty
                    os.rmdir(self.store.path(path))

    def _write_request(self, request_id: str, sites: list[SiteRows], metadata: str, written: list[str]) -> None:
        """Write a request's files, then its manifest, and append the files' names to `written`."""
        folder = folder_of(request_id)
        layers: dict[str, Any] = {}
        files = []
        for s in sites:
            name = file_of(s.site)
            arrays = to_arrays(s.records, s.header)
            arrays["positions"], arrays["token_ids"] = s.positions, s.token_ids
            arrays["weir"] = np.frombuffer(json.dumps(s.header).encode(), np.uint8)
            self.store.put(f"{folder}/{name}", write_npz(arrays))
            written.append(f"{folder}/{name}")
            files.append([name, s.site.hook, s.site.layer])
            if s.site.hook == "resid_post":
                width = s.header["k"] if s.header["method"] == "rp8" else s.header["d_model"]
                layers[str(s.site.layer)] = {
                    "path": self.store.describe(f"{folder}/{name}"),
                    "shape": [len(s.positions), width],
                }
        output_dir = self.store.describe(folder)
        self.store.put(f"{folder}/{MANIFEST}", _manifest(request_id, sites, files, layers, metadata, output_dir))
        self._files.add(f"{folder}/{MANIFEST}")
        self.held_bytes -= sum(s.records.nbytes for s in sites)


def folder_of(request_id: str) -> str:
    return f"{FOLDER}{safe_name(request_id)}"


def file_of(site: Site) -> str:
    name = f"seq0_layer{site.layer}_rank0.npz"
    return name if site.hook == "resid_post" else f"{site.hook}/{name}"


def manifest_crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _is_own(store: ObjectStore, name: str) -> bool:
    """Return whether an npz file is one of Weir's, or does not exist any more."""
    try:
        _, shapes = read_some(store, name, ())
    except MissingFile:
        return True
    except StoreError:
        raise
    except WeirError:
        return False
    return "weir" in shapes


def _manifest(
    request_id: str, sites: list[SiteRows], files: list, layers: dict[str, Any], metadata: str, output_dir: str
) -> bytes:
    request_metadata = json.loads(metadata)
    headers = sorted((s.header for s in sites), key=lambda h: h["dtype"] in EXACT_DTYPES)  # others say more
    header = headers[0] if headers else {"method": "none", "k": None, "seed": 0}
    method = header["method"]
    content = {
        "request_id": request_id,
        "tp_rank": 0,
        "tp_world_size": 1,
        "mode": method,
        "return_mode": "gathered",
        "compression": {
            "rp_k": header["k"] if method == "rp8" else None,
            "topk_k": header["k"] if method == "topk8" else None,
            "quant_bits": 8,
            "per_dim_scale": False,
            "rp_seed": header["seed"],
        },
        "output_dir": output_dir,
        "sequences": {
            "0": {
                "prompt_len": request_metadata.get("prompt_tokens"),
                "total_len": max((len(s.positions) for s in sites), default=0),
                "layers": layers,
            }
        },
        "weir": {"version": 1, "files": files, "metadata": request_metadata},
    }
    return json.dumps(content | {"weir_crc": manifest_crc(content)}, indent=1).encode()


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
