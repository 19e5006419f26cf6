"""Files that Weir writes: GGUF control vectors and safetensors, with what else is known in the metadata."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.gguf import ARCHITECTURE, write_gguf
from vllm_weir.schema.json_text import dumps, loads
from vllm_weir.schema.vector_files import BLOCK_0, METADATA
from vllm_weir.schema.vectors import Vector
from vllm_weir.util.foreign_files import MAX_NAMES

KNOWN = ("hook", "method", "convention", "auc_by_layer", "bias", "details", "head")
"""What is kept of `Directions` beside its vectors."""
_BY_LAYER = ("auc_by_layer", "bias")


def to_safetensors(vectors: Mapping[int, np.ndarray], known: Mapping[str, Any]) -> bytes:
    """Return the bytes of a safetensors file: ``direction.N`` float32 [d] for block N, the rest in the metadata."""
    from safetensors.numpy import save

    arrays = {f"direction.{layer}": np.ascontiguousarray(vector) for layer, vector in vectors.items()}
    return save(arrays, {METADATA: describe(known)})


def to_gguf(vectors: Mapping[int, np.ndarray], known: Mapping[str, Any], model_hint: str) -> bytes:
    """Return the bytes of a control vector that llama.cpp and repeng read; WeirError for other hooks than `resid_post`.

    llama.cpp has no direction of block 0 and refuses files with one, so that is kept in the metadata, where only Weir
    reads it.
    """
    check_gguf_hook(known["hook"], "path")
    if len(vectors) > MAX_NAMES:
        raise WeirError(f"{len(vectors)} directions, more than the limit of {MAX_NAMES}", "path")
    tensors = {f"direction.{layer}": vector for layer, vector in vectors.items() if layer}
    metadata: dict[str, str | int] = {
        ARCHITECTURE: "controlvector",
        "controlvector.model_hint": model_hint,
        "controlvector.layer_count": len(tensors),
        METADATA: describe(known),
    }
    if 0 in vectors:
        metadata[BLOCK_0] = dumps(Vector(vectors[0]).to_json(), BLOCK_0)
        warnings.warn("llama.cpp and repeng will not see the direction of block 0: GGUF has none", stacklevel=3)
    return write_gguf(metadata, tensors)


def check_gguf_hook(hook: str, field: str) -> None:
    """Raise WeirError naming `field` unless a control vector can have directions of that hook point."""
    if hook != "resid_post":
        raise WeirError(
            f"a control vector is added to what leaves a block, resid_post, not {hook}; save safetensors", field
        )


def describe(known: Mapping[str, Any]) -> str:
    return dumps({name: known[name] for name in KNOWN if known[name] is not None}, "directions")


def described(text: str | bytes, field: str) -> dict[str, Any]:
    """Return what `describe` wrote; raise WeirError for anything else."""
    out = loads(text, field)
    if not isinstance(out, dict) or set(out) - set(KNOWN):
        raise WeirError(f"expected an object with {', '.join(KNOWN)}", field)
    for name in _BY_LAYER:
        if name in out:
            out[name] = _by_layer(out[name], f"{field}.{name}")
    return out


def _by_layer(values: Any, field: str) -> dict[int, Any]:
    if not isinstance(values, dict):
        raise WeirError("expected {layer: number}", field)
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise WeirError("expected the index of a block", f"{field}.{brief(key)}")
    return {int(key): value for key, value in values.items()}
