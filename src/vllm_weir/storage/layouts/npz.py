"""The `npz` layout: folders, file names and fields of Vllm_mi_patch, for use with its tools.

``req_<id>/seq0_layer<L>_rank0.npz`` with ``q``, ``scale``, ``zero`` (rp8, full8) or ``indices``,
``values``, ``scale``, ``zero`` (topk8), and ``manifest.json`` once the request is complete. ``q *
scale + zero`` is the value. For methods that Vllm_mi_patch does not have there are ``activations``
(none, fp16; bfloat16, which numpy lacks, as the equal float32), and ``codes`` with ``scale`` (fp8).
Weir adds ``positions``, ``token_ids`` and ``weir`` (the header as JSON bytes). Rows of several
dimensions are flat in the arrays, and the header has their shape. File names can
express resid_post only; files of other hook points are in a folder of the hook's name.

The folder may contain other files and folders, which are neither read nor changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.schema.compression import EXACT_DTYPES
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.layouts.buffered import BufferedWriter, SiteRows, safe_name
from vllm_weir.storage.layouts.npz_arrays import to_arrays
from vllm_weir.storage.layouts.npz_file import read_some, write_npz
from vllm_weir.storage.object_store import ObjectStore

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
