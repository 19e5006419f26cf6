"""The `npz` layout: Vllm_mi_patch's folders, file names and fields, holding values that its own inverse gets right.

``req_<id>/seq0_layer<L>_rank0.npz`` with ``q``, ``scale``, ``zero`` (rp8, full8) or ``indices``, ``values``, ``scale``,
``zero`` (topk8), and ``manifest.json`` once the request is whole. There ``q * scale + zero`` is the value. Methods that
Vllm_mi_patch does not have: ``activations`` (none, fp16; bfloat16, which numpy lacks, as the equal float32), and
``codes`` with ``scale`` (fp8). Weir adds ``positions``, ``token_ids`` and ``weir`` (the header as JSON bytes). Sites
other than resid_post, which the file names have no room for, lie in a folder of the hook's name.

The directory may hold other files and folders: what is not Weir's is neither read nor touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import zlib
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError, brief
from vllm_weir.schema.compression import Compression, header_bytes
from vllm_weir.schema.hooks import HOOKS, Site, normalise_hook
from vllm_weir.storage.index import Index, IndexBuilder
from vllm_weir.storage.layouts.buffered import BufferedWriter, SiteRows, safe_name
from vllm_weir.storage.layouts.npz_file import read_npz, read_some, write_npz
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import ArrayBlock

MANIFEST = "manifest.json"
FOLDER = "req_"
"""How the folders of requests begin."""
FILE = re.compile(r"seq(\d{1,18})_layer(\d{1,9})_rank(\d{1,9})\.npz")
_NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "uint8": "u1", "float8_e4m3fn": "u1"}
_NAMES = {
    "none": {"values": "activations"},
    "fp16": {"values": "activations"},
    "fp8": {"values": "codes"},
    "rp8": {"codes": "q"},
    "full8": {"codes": "q"},
    "topk8": {"codes": "values"},
}
CODES = ("q", "indices", "codes")
"""Arrays that a file of compressed rows has one of."""


class NpzWriter(BufferedWriter):
    """Layout ``npz``."""

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
        put: list[str] = []
        try:
            self._put_request(request_id, sites, metadata, put)
        except Exception:
            self._clear(folder, sites, put)
            raise

    def _refuse_foreign(self, folder: str, sites: list[SiteRows]) -> None:
        """Raise WeirError rather than write over another program's files; Weir's own are of an attempt that failed."""
        for name in (f"{folder}/{file_of(s.site)}" for s in sites):
            if name in self._files and not _is_own(self.store, name):
                raise self.store.error(name, "is another program's, or damaged; choose another id, or another place")

    def _clear(self, folder: str, sites: list[SiteRows], put: list[str]) -> None:
        """Take away what was `put` of a request that could not be written: programs that know no manifests would take
        its folder for a request."""
        try:
            self.store.size(f"{folder}/{MANIFEST}")
        except MissingFile:
            pass
        except StoreError:
            return
        else:
            return  # another writer's request, which is whole
        for name in put:
            with contextlib.suppress(StoreError):
                self.store.remove(name)
        if self.store.local:
            for path in (*sorted({f"{folder}/{s.site.hook}" for s in sites}), folder):
                with contextlib.suppress(OSError):  # it is not there, or holds something else
                    os.rmdir(self.store.path(path))

    def _put_request(self, request_id: str, sites: list[SiteRows], metadata: str, put: list[str]) -> None:
        """Write a request's files and then its manifest; `put` grows by what is written."""
        folder = folder_of(request_id)
        layers: dict[str, Any] = {}
        files = []
        for s in sites:
            name = file_of(s.site)
            arrays = to_arrays(s.records, s.header)
            arrays["positions"], arrays["token_ids"] = s.positions, s.token_ids
            arrays["weir"] = np.frombuffer(json.dumps(s.header).encode(), np.uint8)
            self.store.put(f"{folder}/{name}", write_npz(arrays))
            put.append(f"{folder}/{name}")
            files.append([name, s.site.hook, s.site.layer])
            if s.site.hook == "resid_post":
                width = s.header["k"] if s.header["method"] == "rp8" else s.header["d_model"]
                layers[str(s.site.layer)] = {
                    "path": self.store.describe(f"{folder}/{name}"),
                    "shape": [len(s.positions), width],
                }
        self.store.put(f"{folder}/{MANIFEST}", _manifest(request_id, sites, files, layers, metadata, self, folder))
        self._files.add(f"{folder}/{MANIFEST}")
        self.held_bytes -= sum(s.records.nbytes for s in sites)


def _is_own(store: ObjectStore, name: str) -> bool:
    """Whether an npz file is one of Weir's."""
    try:
        _, shapes = read_some(store, name, ())
    except MissingFile:
        return True  # it is gone
    except StoreError:
        raise
    except WeirError:
        return False
    return "weir" in shapes


def _manifest(
    request_id: str, sites: list[SiteRows], files: list, layers: dict[str, Any], metadata: str,
    writer: NpzWriter, folder: str,
) -> bytes:  # fmt: skip
    kept = json.loads(metadata)
    header = sites[0].header if sites else {"method": "none", "k": None, "seed": 0}
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
        "output_dir": writer.store.describe(folder),
        "sequences": {
            "0": {
                "prompt_len": kept.get("prompt_tokens"),
                "total_len": max((len(s.positions) for s in sites), default=0),
                "layers": layers,
            }
        },
        "weir": {"version": 1, "files": files, "metadata": kept},
    }
    return json.dumps(content | {"weir_crc": _crc(content)}, indent=1).encode()


def _crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def folder_of(request_id: str) -> str:
    """The folder of a request; Vllm_mi_patch's loader looks for folders that begin with ``req_``."""
    return f"{FOLDER}{safe_name(request_id)}"


def file_of(site: Site) -> str:
    """The file of a site, in the folder of its request."""
    name = f"seq0_layer{site.layer}_rank0.npz"
    return name if site.hook == "resid_post" else f"{site.hook}/{name}"


def to_arrays(records: np.ndarray, header: dict[str, Any]) -> dict[str, np.ndarray]:
    """Records [n, record_bytes] as arrays by field, each [n, ...]: scale and zero are [n, 1], bfloat16 is float32."""
    out = {}
    for field, end in _spans(header):
        values = np.ascontiguousarray(records[:, field["offset"] : end]).view(_NUMPY[field["dtype"]])
        if field["dtype"] == "bfloat16":
            values = (values.astype("<u4") << 16).view("<f4")
        out[_array_of(field, header)] = values
    return out


def to_records(arrays: dict[str, np.ndarray], header: dict[str, Any]) -> np.ndarray:
    """The inverse of `to_arrays`; raises KeyError or ValueError if the arrays do not fit.

    Earlier versions stored bfloat16 as the uint16 of its bits, and the codes of fp8 as ``activations``.
    """
    parts = []
    for field, end in _spans(header):
        name = _array_of(field, header)
        array = arrays["activations" if name == "codes" and name not in arrays else name]
        if array.ndim == 2 and field["dtype"] == "bfloat16" and array.dtype == np.dtype("<f4"):
            array = _narrowed(array, name)
        if array.dtype != np.dtype(_NUMPY[field["dtype"]]) or array.ndim != 2:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
        parts.append(np.ascontiguousarray(array).view(np.uint8))
        if parts[-1].shape[1] != end - field["offset"]:
            raise ValueError(f"{name} has the wrong width")
    return np.concatenate(parts, axis=1)


def _narrowed(array: np.ndarray, name: str) -> np.ndarray:
    """The bits of bfloat16 values that are stored as float32, uint16; raises ValueError if some are none."""
    bits = np.ascontiguousarray(array).view("<u4")
    if (bits & 0xFFFF).any():
        raise ValueError(f"{name} has values that are no bfloat16, as the header says they are")
    return (bits >> 16).astype("<u2")


def _array_of(field: dict[str, Any], header: dict[str, Any]) -> str:
    """What a field's array is called."""
    return _NAMES[header["method"]].get(field["name"], field["name"])


def _spans(header: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    fields = header["fields"]
    return list(zip(fields, [f["offset"] for f in fields[1:]] + [header_bytes(header)]))


def read_npz_layout(store: ObjectStore, names: dict[str, int]) -> Index:
    """The index of what NpzWriter wrote. `names`: the files in folders of requests."""
    out = IndexBuilder("npz")
    others = 0
    for name in sorted(names):
        if name.count("/") == 1 and name.startswith(FOLDER) and name.endswith("/" + MANIFEST):
            others += not add_request(out, store, name, names)
    if others:
        what = "a folder is" if others == 1 else f"{others} folders are"
        out.notes.append(f"{what} left out whose manifests other programs wrote; load them by themselves")
    return out.build()


def add_request(out: IndexBuilder, store: ObjectStore, manifest: str, names: dict[str, int], run: str = "") -> bool:
    """Add what a request's manifest names; False if it is another program's.

    `run` stands before an id that several runs have.
    """
    folder = posixpath.dirname(manifest)
    data = store.read(manifest)
    try:
        content = json.loads(data)
        if isinstance(content, dict) and content and not {"weir", "weir_crc"} & content.keys():
            return False
        crc = content.pop("weir_crc", None)  # which earlier versions did not write
        request, own = content["request_id"], content["weir"]
        files = [(name, Site(normalise_hook(hook), int(layer))) for name, hook, layer in own["files"]]
        metadata = json.dumps(own["metadata"])
        if not isinstance(request, str) or not isinstance(own["metadata"], dict):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise store.error(manifest, "damaged: it makes no sense") from None
    if crc is not None and crc != _crc(content):
        raise store.error(manifest, "damaged or edited: its checksum does not fit")
    for name, site in files:
        if name != file_of(site):  # above all no path that leads out of the folder
            raise store.error(manifest, f"damaged: it names {brief(name, 80)!r} for {site}")
    request = posixpath.join(run, request)
    code = out.request(folder if request in out.requests else request, metadata)
    for short, site in files:
        name = posixpath.join(folder, short)
        if name not in names:
            raise store.error(name, "is missing, and the manifest names it")
        add_own(out, store, name, code, site)
    return True


def add_own(out: IndexBuilder, store: ObjectStore, name: str, request: int, site: Site) -> None:
    """Add one of Weir's npz files."""
    some, _ = read_some(store, name, ("weir", "positions", "token_ids"))
    try:
        header = json.loads(some["weir"].tobytes())
        positions, tokens = some["positions"], some["token_ids"]
    except (KeyError, ValueError, RecursionError):
        raise store.error(name, "was not written by Weir, or is damaged") from None
    Compression.from_header(header, f"{store.describe(name)}: header")
    if positions.ndim != 1 or positions.shape != tokens.shape or {positions.dtype, tokens.dtype} != {np.dtype("int64")}:
        raise store.error(name, "damaged: its positions do not fit")
    block = out.block(ArrayBlock(store, name, header, len(positions), unpack_own))
    out.run(request, site, block, 0, positions, tokens)


def home_of(path: str) -> tuple[str, str]:
    """(folder of its request, hook point) of one of Weir's npz files."""
    folder = posixpath.dirname(path)
    hook = posixpath.basename(folder)
    return (posixpath.dirname(folder), hook) if hook in HOOKS else (folder, "resid_post")


def unpack_own(store: ObjectStore, name: str) -> np.ndarray:
    """The records of one of Weir's npz files."""
    arrays = read_npz(store, name)
    try:
        return to_records(arrays, json.loads(arrays["weir"].tobytes()))
    except (KeyError, ValueError) as e:
        if isinstance(e, WeirError):
            raise
        raise store.error(name, f"damaged: {str(e)[:120]}") from None
