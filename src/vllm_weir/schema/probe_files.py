"""Reading files of probes: safetensors with the other fields in the metadata, or the wire form as JSON.

No code runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.schema.probe_codec import decode
from vllm_weir.schema.probes import KINDS, AnyProbe, parse_probe
from vllm_weir.util.foreign_files import read_regular


def read_probe(data: bytes, field: str, **fields: Any) -> AnyProbe:
    """Read a probe from the contents of a file.

    Args:
        data: of a file that `ProbeBase.to_bytes` made; or of any safetensors file whose tensors have the
            names of a probe's fields, such as ``weight`` and ``bias``.
        field: named by errors, followed by the place in the file.
        **fields: fields of the probe that replace those of the file, or that it lacks.

    Raises:
        WeirError: for a file that is damaged or foreign.
    """
    found = {"kind": KINDS["linear"].kind, **decode(data, field), **fields}
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
    return read_probe(read_regular(path), "probe", **fields)
