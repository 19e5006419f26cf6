"""Contents of a probe's file: its vectors, and its other fields. Which kinds of probes there are is not known here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.json_text import is_json, loads
from vllm_weir.schema.vector_files import parse_safetensors
from vllm_weir.schema.vectors import Vector

METADATA = "weir_probe"
"""Key of the metadata under which a safetensors file has a probe's other fields, as JSON."""


def encode(plain: Mapping[str, Any], vectors: Mapping[str, Vector], path: str, form: str) -> bytes:
    """Return the contents of a file of a probe, in the form ``"safetensors"`` or ``"json"``.

    `plain` are the fields of the wire form that hold no vectors, with ``kind``; `vectors` the others.

    Raises:
        WeirError: naming a field under `path`, if one of the vectors is only a name.
    """
    for name, vector in vectors.items():
        if vector.array is None:
            raise WeirError("it names a registered vector; a file holds the numbers themselves", f"{path}.{name}")
    if form == "json":
        numbers = {name: vector.to_json() for name, vector in vectors.items()}
        return json.dumps({**plain, **numbers}, allow_nan=False).encode()
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(vector.array) for name, vector in vectors.items()}
    return save(arrays, {METADATA: json.dumps(plain, allow_nan=False)})


def decode(data: bytes, field: str) -> dict[str, Any]:
    """Return the fields of a probe: those that `encode` wrote, or the tensors of any safetensors file.

    Args:
        data: contents of the file.
        field: named by errors, followed by the place in the file.

    Raises:
        WeirError: for a file that is damaged or foreign.
    """
    found = loads(data, field) if is_json(data) else _safetensors(data, field)
    if not isinstance(found, dict):
        raise WeirError(f"a probe is an object, got {type(found).__name__}", field)
    return found


def _safetensors(data: bytes, field: str) -> dict[str, Any]:
    """Return the tensors of a file, and the fields in its metadata."""
    tensors, metadata = parse_safetensors(data, field)
    text = metadata.get(METADATA)
    found = {} if text is None else loads(text, f"{field}.{METADATA}")
    if not isinstance(found, dict):
        raise WeirError(f"expected an object, got {type(found).__name__}", f"{field}.{METADATA}")
    return {**found, **tensors}
