"""Arrays with names, as files of safetensors, numpy and torch hold them, to directions by block.

Files of ``torch.save`` are read by torch's restricted unpickler, which runs no code of the file. Objects of
steering-vectors and repeng are read into plain holders of Weir's, so neither has to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.vectors.codec import BLOCKS, HIDDEN_STATES, Found, Given
from vllm_weir.schema.hooks import ALIASES, HOOKS, parse_site, split_transformer_lens
from vllm_weir.schema.vector_files import number_in
from vllm_weir.schema.vectors import KEPT, Vector
from vllm_weir.util.foreign_files import load_torch

_SITE = re.compile(r"(\w+)(?:\.\d{1,9}|\[\d{1,9}\])", re.ASCII)
_MODULE = re.compile(r"(?:.*\.)?(?:layers|h|blocks?)\.(\d{1,9})(?:\.(\w+))?", re.ASCII)
_MODULE_HOOKS = {
    None: "resid_post",
    "self_attn": "attn_out",
    "attn": "attn_out",
    "attention": "attn_out",
    "mlp": "mlp_out",
}
_PLAIN = re.compile(r"(?:(?:direction|layer|block)s?[._])?\d{1,9}", re.ASCII)
"""Names that say a block and nothing else."""
_HOOK_WORDS = "|".join(sorted((name for name in (*HOOKS, *ALIASES) if re.fullmatch(r"\w+_\w+", name)), key=len)[::-1])
_HOOK_IN = re.compile(rf"(?:.*[^A-Za-z0-9])??({_HOOK_WORDS})(?![A-Za-z0-9])", re.ASCII | re.DOTALL)
_HIDDEN_STATES = re.compile(r"hidden[_.-]?states?", re.ASCII | re.IGNORECASE)
_NUMPY = re.compile(r"arr_(\d{1,9})", re.ASCII)
"""What numpy calls arrays without a name; the number is their place in the call."""


def from_names(arrays: Mapping[str, Any], given: Given, source: str, field: str = "file") -> Found:
    """Return the directions of one array, [d] or [n, d], or of several of [d] whose names say their blocks."""
    if not arrays:
        raise WeirError("there is no vector in it", field)
    places = {name: place_of(name, given, f"{field}.{brief(name)}") for name in arrays}
    if all(_NUMPY.fullmatch(name) for name in arrays):
        ordered = sorted(arrays, key=lambda name: int(name.removeprefix("arr_")))
        return from_rows([arrays[name] for name in ordered], given, source, field)
    if len(arrays) == 1 and _is_free(*next(iter(places.items())), given):
        return from_rows(list(arrays.values()), given, source, field)
    for name, place in places.items():
        if place is None:
            raise WeirError(
                "expected one array, or names that say a block: layer.5, resid_post.5, blocks.5.hook_resid_post, "
                "model.layers.5",
                f"{field}.{brief(name)}",
            )
    given_layers, hooks = given.layers, {place[0] for place in places.values() if place}
    if given_layers is not None:
        raise WeirError("the names of the arrays say their blocks; leave it out, and use .only()", "layers")
    if len(hooks) > 1:
        raise WeirError(f"vectors of several hook points: {sorted(map(str, hooks))}", field)
    said = next(iter(hooks))
    vectors: dict[int, Any] = {}
    for name, place in places.items():
        assert place is not None
        if place[1] in vectors:
            raise WeirError(f"there are two directions of layer {place[1]}", f"{field}.{brief(name)}")
        vectors[place[1]] = arrays[name]
    hook = given.hook_or(said, "resid_post", "the file")
    return _found(vectors, hook, given, source, "the numbers in its names", field)


def from_rows(arrays: Sequence[Any], given: Given, source: str, field: str = "file") -> Found:
    """Return the directions of one array [d] or [n, d], or several [d], whose blocks the caller gives."""
    rows: list[Any] = []
    for array in arrays:
        whole = Vector.parse(array, field, KEPT).array
        if whole is None:
            raise WeirError("expected numbers, got a name", field)
        if whole.ndim == 3:
            raise WeirError(f"expected [d] or [layers, d], got {list(whole.shape)}", field)
        rows += [whole] if whole.ndim == 1 else list(whole)
    if given.layers is None and given.numbering == HIDDEN_STATES and len(rows) > 1:
        # As persona_vectors writes them: a row for each of transformers' hidden states, the embedding's first.
        left = dict(enumerate(rows[1:], 1))
        whence = (
            "the places of its rows, of which row 0, the embedding's, is left out and the last one is behind the final "
            "norm"
        )
        return _found(left, given.hook_or(None, "resid_post", source), given, source, whence, field)
    if given.layers is None:
        count = "one vector" if len(rows) == 1 else f"{len(rows)} vectors"
        hint = "" if len(rows) == 1 else (
            ", or numbering='hidden_states' if there is one for the embedding and each block, as persona_vectors "
            "writes them"
        )  # fmt: skip
        raise WeirError(f"{source} has {count} and does not say for which blocks; give layers={hint}", "layers")
    if len(given.layers) != len(rows) or len(set(given.layers)) != len(rows):
        raise WeirError(f"{len(rows)} vectors in the file, layers {list(given.layers)[:9]}", "layers")
    hook = given.hook_or(None, "resid_post", source)
    return _found(dict(zip(given.layers, rows, strict=True)), hook, given, source, "layers=", field)


def _is_free(name: str, place: tuple[str | None, int] | None, given: Given) -> bool:
    """Return whether the caller says the block of the only array: a number after other words may be a version."""
    if place is None:
        return True
    says_block = place[0] is not None or _PLAIN.fullmatch(name) or _MODULE.fullmatch(name)
    return given.layers is not None and not says_block


def place_of(name: str, given: Given, field: str) -> tuple[str | None, int] | None:
    """Return the (hook point, layer) that a name says, with None for a hook point it does not say."""
    site = split_transformer_lens(name, field)
    if site is not None:
        return site
    match = _SITE.fullmatch(name)
    if match and (match[1] in HOOKS or match[1] in ALIASES):
        return parse_site(name)
    module = _MODULE.fullmatch(name)
    if module:
        if module[2] not in _MODULE_HOOKS:
            raise WeirError(f"the output of {module[2]} is no hook point", field)
        return (_MODULE_HOOKS[module[2]] if name.count(".") > 1 else None), int(module[1])
    number = number_in(name)
    if number is None:
        return None
    hook = _hook_in(name)
    if hook is not None and hook != (given.hook or "resid_post"):
        raise WeirError(f"{hook}, and the number is not clearly its block: write {hook}.{number}", field)
    if given.numbering is None and _HIDDEN_STATES.search(name):
        raise WeirError(
            f"{brief(name)} may count transformers' hidden states, of which number N leaves block N - 1, or blocks; "
            f"give {HIDDEN_STATES!r} or {BLOCKS!r}",
            "numbering",
        )
    return hook, number


def _hook_in(name: str) -> str | None:
    """Return the hook point that the words before a name's number say; one word must be all between two dots."""
    words = name.rstrip("0123456789")
    match = _HOOK_IN.match(words)
    found = [match[1]] if match else [part.strip("_") for part in re.split(r"\W+", words)]
    return next((ALIASES.get(word, word) for word in found if ALIASES.get(word, word) in HOOKS), None)


def _found(vectors: dict[int, Any], hook: str, given: Given, source: str, whence: str, field: str) -> Found:
    """Return what was found; where layers count hidden states, they become blocks."""
    how = f"{source}: layers are {whence}"
    if given.numbering != HIDDEN_STATES:
        return Found(hook, vectors, source, f"{how}, read as blocks counted from 0: {hook}[N]; not scaled.")
    if hook != "resid_post":
        raise WeirError(f"hidden states are what leaves blocks, resid_post, not {hook}", "numbering")
    if 0 in vectors:
        raise WeirError(
            "hidden state 0 is the embedding, which no block leaves; leave it out, or add it at resid_pre of block 0",
            f"{field}.0",
        )
    shifted = {layer - 1: vector for layer, vector in vectors.items()}
    text = f"{how}, read as transformers' hidden_states: N is what leaves block N - 1, {hook}[N - 1]; not scaled."
    return Found(hook, shifted, source, text)


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
