"""Files of probes: safetensors with the other fields in the metadata, or the wire form as JSON. No code runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError, brief
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.probe_base import ProbeBase
from vllm_weir.schema.probes import KINDS, AnyProbe, parse_probe
from vllm_weir.util.atomic_write import atomic_write

METADATA = "weir_probe"
"""Key of the metadata under which a safetensors file has a probe's other fields, as JSON."""


def probe_bytes(probe: ProbeBase, kind: str = "safetensors") -> bytes:
    """Return the contents of a file of a probe.

    Args:
        probe: the probe.
        kind: ``"safetensors"`` or ``"json"``.

    Raises:
        WeirError: if one of its vectors is only a name.
    """
    for name in probe.vectors:
        if getattr(probe, name).array is None:
            raise WeirError("it names a registered vector; a file holds the numbers themselves", f"{probe.path}.{name}")
    if kind == "json":
        return json.dumps(probe.to_json(), allow_nan=False).encode()
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(getattr(probe, name).array) for name in probe.vectors}
    return save(arrays, {METADATA: json.dumps({"kind": probe.kind, **probe.plain_fields()}, allow_nan=False)})


def read_probe(data: bytes, field: str, **fields: Any) -> AnyProbe:
    """Read a probe from the contents of a file.

    Args:
        data: of a file that `probe_bytes` wrote; or of any safetensors file whose tensors have the
            names of a probe's fields, such as ``weight`` and ``bias``.
        field: named by errors, followed by the place in the file.
        **fields: fields of the probe that replace those of the file, or that it lacks.

    Raises:
        WeirError: for a file that is damaged or foreign.
    """
    # The first bytes of a safetensors file are the length of its header, which the first letters of a text are not.
    is_text = data.lstrip()[:1] in (b"{", b"[") and int.from_bytes(data[:8], "little") > len(data)
    found = loads(data, field) if is_text else _safetensors(data, field)
    if not isinstance(found, Mapping):
        raise WeirError(f"a probe is an object, got {type(found).__name__}", field)
    found = {"kind": KINDS["linear"].kind, **found, **fields}
    kind = KINDS.get(found["kind"]) if isinstance(found["kind"], str) else None
    for name in kind.vectors if kind is not None else ():
        if isinstance(found.get(name), str) or (isinstance(found.get(name), Mapping) and "b64" not in found[name]):
            raise WeirError("expected numbers: a file cannot name a registered vector", f"{field}.{name}")
    return parse_probe(found, field)


def load_probe(path: str | os.PathLike, **fields: Any) -> AnyProbe:
    """Read a probe that its `save` wrote, or any safetensors file with the tensors of one.

    Args:
        path: of the file.
        **fields: fields of the probe that replace those of the file, or that it lacks: a file that
            holds a ``weight`` and a ``bias`` alone needs `name` and `layer`.

    Raises:
        WeirError: for a file that is damaged or foreign; StoreError if it cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise MissingFile(f"there is no file {brief(path, 200)}", "path") from None
    except (OSError, ValueError) as e:
        raise StoreError(f"cannot read {brief(path, 200)}: {str(e)[:80]}", "path") from None
    return read_probe(data, "probe", **fields)


def write_probe(probe: ProbeBase, path: str | os.PathLike) -> None:
    """Write a probe to a file, see `ProbeBase.save`."""
    data = probe_bytes(probe, "json" if Path(path).suffix.lower() == ".json" else "safetensors")
    try:
        with atomic_write(path) as file:
            file.write(data)
    except (OSError, ValueError) as e:
        raise StoreError(f"cannot write {brief(path, 200)}: {str(e)[:80]}", "path") from None


def _safetensors(data: bytes, field: str) -> dict[str, Any]:
    """Return the tensors of a file, and the fields in its metadata."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, OverflowError) as e:
        raise WeirError(f"truncated, damaged or no file of a probe ({str(e)[:80]})", field) from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = header.get("__metadata__", {}).get(METADATA)
    found = {} if text is None else loads(text, f"{field}.{METADATA}")
    if not isinstance(found, dict):
        raise WeirError(f"expected an object, got {type(found).__name__}", f"{field}.{METADATA}")
    return {**found, **tensors}
