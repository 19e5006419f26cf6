"""Directions in files that Weir writes (GGUF, safetensors), and what a reader found in a file of any kind."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import dumps, is_int, loads, plain, set_fields
from vllm_weir.schema.gguf import ARCHITECTURE, write_gguf
from vllm_weir.schema.hooks import normalise_hook
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


BLOCKS, HIDDEN_STATES = "blocks", "hidden_states"


@dataclass(frozen=True)
class Given:
    """What a caller says about a file that does not say it itself."""

    layers: Any = None  # block of the one vector, or of each of several, in their order; None if not given
    hook: Any = None  # hook point; None if not given
    # how layers are counted, in the file and in `layers`: ``"blocks"`` or ``"hidden_states"``; None if not given
    numbering: Any = None

    def __post_init__(self) -> None:
        if self.hook is not None:
            set_fields(self, hook=normalise_hook(self.hook, "hook"))
        if self.numbering not in (None, BLOCKS, HIDDEN_STATES):
            raise WeirError(f"choose {BLOCKS!r} or {HIDDEN_STATES!r}, got {brief(self.numbering)!r}", "numbering")
        if self.layers is None:
            return
        layers = plain(self.layers)
        layers = [plain(layer) for layer in layers] if isinstance(layers, Iterable) else [layers]
        if not layers or not all(is_int(layer) and layer >= 0 for layer in layers):
            raise WeirError("expected the index of a block, or several, counted from 0", "layers")
        set_fields(self, layers=tuple(map(int, layers)))

    def refuse_layers(self, source: str) -> None:
        """Raise WeirError if layers or their numbering were given for a file that says them itself."""
        if self.layers is not None:
            raise WeirError(f"{source} says which blocks its vectors are for; leave it out, and use .only()", "layers")
        if self.numbering == HIDDEN_STATES:
            raise WeirError(f"{source} counts blocks; leave it out", "numbering")

    def hook_or(self, said: str | None, default: str, source: str) -> str:
        """Return the hook point that the file says, the caller gave, or the default; refuse two that differ."""
        if said is not None and self.hook is not None and said != self.hook:
            raise WeirError(f"{source} says {said}", "hook")
        return said or self.hook or default


@dataclass(frozen=True)
class Found:
    """What was found in a file: the fields of `Directions`."""

    hook: str
    vectors: Mapping[int, Any]
    method: str
    convention: str
    details: Mapping[str, Any] = field(default_factory=dict)
    auc_by_layer: Mapping[int, float] | None = None
    bias: Mapping[int, float] | None = None
    head: int | None = None
