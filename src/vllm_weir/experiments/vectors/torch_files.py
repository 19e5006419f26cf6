"""Files of ``torch.save``: tensors, dictionaries, and the vector objects of other libraries.

They are read by torch's restricted unpickler, which runs no code of the file. Objects of
steering-vectors and repeng are read into plain holders of Weir's, so neither has to be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.vectors.codec import Found, Given
from vllm_weir.experiments.vectors.named import from_names, from_rows
from vllm_weir.util.foreign_files import load_torch

STEERING_VECTORS, REPENG = "steering-vectors", "repeng"
_LAYER_TYPES = {"decoder_block": "resid_post", "self_attn": "attn_out", "mlp": "mlp_out"}
_NORMS = {"input_layernorm": "attn_in", "post_attention_layernorm": "mlp_in"}
"""Outputs of norms -> the hook point they are in models where the norm is for one part of the block alone."""


class _SteeringVector:
    """Stands for ``steering_vectors.SteeringVector``; its fields are in ``vars()``."""


class _ControlVector:
    """Stands for ``repeng.ControlVector``; its fields are in ``vars()``."""


def read_torch(path: str | PathLike, given: Given, field: str = "file") -> Found:
    """Return the directions in a file of ``torch.save``."""
    content = load(path, field)
    if isinstance(content, _ControlVector):
        return _repeng(vars(content), given, field)
    if isinstance(content, _SteeringVector):
        return _steering_vectors(vars(content), given, field)
    if isinstance(content, Mapping):
        if set(content) == {"layer_activations", "layer_type"}:
            return _steering_vectors(content, given, field)
        if "rotate_layer" in content or "learned_source" in content:
            raise WeirError("this is one intervention of pyreft; give the folder that it lies in", "path")
        return from_names({_name(key, field): value for key, value in content.items()}, given, "torch", field)
    if isinstance(content, (list, tuple)):
        return from_rows(content, given, "torch", field)
    if hasattr(content, "detach") or isinstance(content, np.ndarray):
        return from_rows([content], given, "torch", field)
    raise WeirError(f"expected tensors, got {type(content).__name__}", field)


def load(path: str | PathLike, field: str) -> Any:
    """Return the content of a file of ``torch.save``; no code of it runs."""
    return load_torch(path, field, _CLASSES)


_CLASSES = {
    "steering_vectors.steering_vector.SteeringVector": _SteeringVector,
    "repeng.extract.ControlVector": _ControlVector,
}


def _name(key: Any, field: str) -> str:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise WeirError(f"expected names or the indices of blocks, got {type(key).__name__}", field)
    if isinstance(key, int) and key < 0:
        raise WeirError("blocks are counted from 0; how many there are from the end is not known", f"{field}.{key}")
    return str(key)


def _steering_vectors(content: Mapping[str, Any], given: Given, field: str) -> Found:
    """Read the fields of a ``SteeringVector``: {block: tensor}, and the module to whose output it is added."""
    given.refuse_layers(STEERING_VECTORS)
    layer_type, vectors = content.get("layer_type"), content.get("layer_activations")
    at = f"{field}.layer_type"
    if layer_type in _NORMS:
        if given.hook is None:
            raise WeirError(
                f"{layer_type} is {_NORMS[layer_type]} where that norm is for one part of the block alone, which "
                f"depends on the model; give hook={_NORMS[layer_type]!r} if it is",
                at,
            )
        hook = given.hook
    elif layer_type in _LAYER_TYPES:
        hook = given.hook_or(_LAYER_TYPES[layer_type], "resid_post", "the file")
    else:
        raise WeirError(f"unknown layer type {brief(layer_type)!r}", at)
    text = (
        f"steering-vectors: layer N is the N-th {layer_type} module, counted from 0, to whose output multiplier * "
        f"vector is added: {hook}[N], with the multiplier as scale."
    )
    return Found(hook, _by_block(vectors, f"{field}.layer_activations"), STEERING_VECTORS, text)


def _repeng(content: Mapping[str, Any], given: Given, field: str) -> Found:
    given.refuse_layers(REPENG)
    hook = given.hook_or("resid_post", "resid_post", "the file")
    details = {"model_type": str(content["model_type"])} if "model_type" in content else {}
    return Found(hook, _by_block(content.get("directions"), f"{field}.directions"), REPENG, CONVENTION, details)


CONVENTION = (
    "repeng and llama.cpp: direction N is added, times the coefficient, to what leaves block N, counted from 0: "
    "resid_post[N], with the coefficient as scale."
)


def _by_block(vectors: Any, field: str) -> dict[int, Any]:
    if not isinstance(vectors, Mapping) or not vectors:
        raise WeirError("expected {block: vector}", field)
    return {int(_name(layer, field)) if isinstance(layer, int) else layer: vector for layer, vector in vectors.items()}
