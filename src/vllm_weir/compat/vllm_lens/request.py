"""vllm-lens's request keys, translated to captures and interventions."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import dumps, loads, refuse_unknown_keys, right_words
from vllm_weir.schema.functions import describe
from vllm_weir.schema.intervention_base import Intervention, at_most
from vllm_weir.schema.interventions import Add
from vllm_weir.schema.keys import (
    KEYS,
    LENS_CAPTURE_KEY,
    LENS_HOOKS_KEY,
    LENS_KEYS,
    LENS_QK_KEY,
    LENS_STEER_KEY,
    LENS_TRANSPORT_KEY,
    WIRE_KEY,
    refuse_lens,
)
from vllm_weir.schema.positions import MAX_LIST, Positions, check_listed
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.user_hooks import Hook
from vllm_weir.schema.vectors import MAX_ELEMENTS, Vector, number


@contextmanager
def in_lens_words() -> Iterator[None]:
    """Name the fields of errors as a caller of vllm-lens writes them."""
    try:
        yield
    except WeirError as e:
        raise WeirError(e.message, lens_field(e.field)) from None


def to_weir(extra_args: Mapping[str, Any], by_client: bool = False) -> Mapping[str, Any]:
    """Return extra arguments in which Weir's key stands for vllm-lens's too, see `read`."""
    if all(extra_args.get(key) is None for key in LENS_KEYS):
        return extra_args
    others = {key: value for key, value in extra_args.items() if key not in KEYS}
    return {**others, WIRE_KEY: read(extra_args, by_client)}


@in_lens_words()
def read(extra_args: Mapping[str, Any], by_client: bool = True) -> RequestSpec:
    """Return what a request, of a server's client or not, asks in Weir's key and then in vllm-lens's."""
    if by_client:
        refuse_lens(extra_args)
    is_binary(extra_args.get(LENS_TRANSPORT_KEY))  # in process it has no effect, and may still be wrong
    spec = RequestSpec.carried_by(extra_args)
    capture, steer, hooks = (extra_args.get(key) for key in (LENS_CAPTURE_KEY, LENS_STEER_KEY, LENS_HOOKS_KEY))
    if capture is not None and (stacked := lens_capture(capture)) is not None:
        spec = replace(spec, capture=(*spec.capture, stacked), stacked=stacked)
    if (qk := extra_args.get(LENS_QK_KEY)) is not None:
        spec = replace(spec, qk=lens_capture(qk, LENS_QK_KEY))
    if steer is not None:
        interventions = (*spec.interventions, *spec.hooks, *lens_interventions(steer))
        spec = replace(spec, interventions=interventions, hooks=())
    return spec if hooks is None else replace(spec, last_hooks=lens_hooks(hooks))


def lens_capture(value: object, key: str = LENS_CAPTURE_KEY) -> Capture | None:
    """Translate ``output_residual_stream`` or ``output_qk`` to a Capture; None for False or an empty list.

    `value`: a list (or array) of blocks, True for all of them, or either as JSON; `key`: which of the two.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise WeirError("expected true, a list of ints, or that as JSON", key) from None
    value = _to_list(value)
    if value is False or (isinstance(value, (list, tuple, range)) and not len(value)):
        return None
    hook = "q_rot" if key == LENS_QK_KEY else "resid_post"
    return Capture(hook, layers="all" if value is True else value, path=key)


def is_binary(value: object) -> bool:
    if value is not None and (not isinstance(value, str) or value not in ("base64", "binary")):
        raise WeirError(f"expected 'binary' or 'base64', got {brief(value)!r}", LENS_TRANSPORT_KEY)
    return value == "binary"


@right_words
@dataclass(frozen=True, eq=False)
class SteeringVector:
    """vllm-lens's steering vector.

    Args:
        activations: [layers, d_model] or [layers, 1, d_model], added at every position (or at each
            of `position_indices`), or [layers, positions, d_model], one row for each position.
        layer_indices: the block after which each ``activations[i]`` is added.
        scale: factor.
        norm_match: scale each row of `activations` to the L2 norm of the stream it is added to.
        position_indices: absolute positions; None means 0, 1, ... for activations by position, else
            all.
    """

    activations: Any
    layer_indices: Sequence[int]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: Sequence[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, which ``apply_steering_vectors`` takes like the object."""
        return {
            "activations": Vector.parse(self.activations, "activations", (2, 3)).to_json(),
            "layer_indices": Positions.parse(self.layer_indices, "layer_indices").to_json(),
            "scale": number(self.scale, "scale"),
            "norm_match": self.norm_match,
            "position_indices": None
            if self.position_indices is None
            else Positions.parse(self.position_indices, "position_indices").to_json(),
        }

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        """Return `to_json()`, for scripts of vllm-lens. Pydantic's options have no effect."""
        return self.to_json()

    def model_dump_json(self, **_options: Any) -> str:
        """Return `to_json()` as text; Pydantic's options have no effect."""
        return dumps(self.to_json(), LENS_STEER_KEY)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> SteeringVector:
        """Return a copy with the fields of `update` changed; `deep` copies what it holds, too."""
        return replace(deepcopy(self) if deep else self, **(update or {}))

    @classmethod
    def model_validate(cls, obj: Any, **_options: Any) -> SteeringVector:
        """Return the vector of `model_dump`'s, or vllm-lens's, data or object; Pydantic's options have no effect.

        Numbers that are not in a tensor yet come as one of float32.

        Raises:
            WeirError: naming the field, as for a request that carries it.
        """
        import torch

        lens_interventions([obj])
        fields = {name: obj[name] for name in _FIELDS if name in obj} if isinstance(obj, Mapping) else {}
        fields = fields or {name: getattr(obj, name) for name in _FIELDS if hasattr(obj, name)}
        if not isinstance(fields["activations"], torch.Tensor):
            content = _lens_tensor(fields["activations"], "activations")
            fields["activations"] = torch.tensor(Vector.parse(content, "activations", (2, 3)).array)
        return cls(**fields)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes, **_options: Any) -> SteeringVector:
        """Return `model_validate` of JSON text."""
        return cls.model_validate(loads(json_data, LENS_STEER_KEY))


def lens_interventions(value: object) -> tuple[Intervention, ...]:
    """Translate ``apply_steering_vectors`` to interventions.

    `value`: a list of SteeringVectors (Weir's or vllm-lens's own) or dicts, or that as JSON.
    """
    if isinstance(value, str):
        value = loads(value, LENS_STEER_KEY)
    if isinstance(value, Mapping) or hasattr(value, "activations"):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise WeirError(f"expected a list of steering vectors, got {type(value).__name__}", LENS_STEER_KEY)
    check_listed(
        (f"{LENS_STEER_KEY}[{k}].position_indices", one.get("position_indices"))
        for k, one in enumerate(value)
        if isinstance(one, Mapping)
    )
    additions = (add for k, vector in enumerate(value) for add in _additions(vector, f"{LENS_STEER_KEY}[{k}]"))
    return tuple(at_most(additions))


REGISTERED = "register_hooks"
"""Stands for `LENS_HOOKS_KEY` in what is said of hooks that act on every request."""


def lens_hooks(value: object, key: str = LENS_HOOKS_KEY, start: int = 0) -> tuple[Hook, ...]:
    """Translate ``apply_hooks``, or what ``register_hooks`` is given, to hooks.

    `value`: a list of `LensHook`, or of vllm-lens's own; `key`: where they are from; `start`: index of the first.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise WeirError(f"expected a list of hooks, got {type(value).__name__}; code never comes as text", key)
    return tuple(at_most(_hook(one, key, index) for index, one in enumerate(value, start)))


def _hook(one: Any, key: str, index: int) -> Hook:
    path = f"{key}[{index}]"
    if not all(hasattr(one, name) for name in ("fn", "layer_indices", "pre")):
        raise WeirError(f"expected a hook of fn, layer_indices and pre, got {type(one).__name__}", path)
    layers = _to_list(one.layer_indices)
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise WeirError("expected a list of ints that is not empty", f"{path}.layer_indices")
    function = describe(one.fn, f"{path}.fn", _ADAPTER)
    hook = "resid_pre" if one.pre else "resid_post"
    return Hook(function, hook, layers, args={"key": key, "index": index}, mode="eager", path=path)


_ADAPTER = "vllm_weir.compat.vllm_lens.functions:LensFunction"


def saved_name(key: str, index: int, name: object) -> str:
    """Return the name under which what a hook of `key` saved as `name` travels, see `by_authors`."""
    return f"{key} {json.dumps([index, name])}"


def hook_results(saved: Mapping[str, Any], key: str = LENS_HOOKS_KEY) -> dict[str, dict[Any, Any]]:
    """Return what hooks from `key` have saved: index, as text -> name -> value."""
    found: dict[str, dict[Any, Any]] = {}
    for name, value in saved.items():
        if name.startswith(f"{key} "):
            index, own = json.loads(name.removeprefix(key))
            found.setdefault(str(index), {})[own] = value
    return found


_OWN_FIELD = re.compile(
    rf"((?:{LENS_STEER_KEY}|{LENS_HOOKS_KEY}|{REGISTERED})\[\d+\])\.(layers|vector|positions)\b(.*)"
)
_LENS_NAMES = {"layers": "layer_indices", "vector": "activations", "positions": "position_indices"}


def lens_field(field: str) -> str:
    match = _OWN_FIELD.fullmatch(field)
    return field if match is None else f"{match[1]}.{_LENS_NAMES[match[2]]}{match[3]}"


_FIELDS = ("activations", "layer_indices", "scale", "norm_match", "position_indices")


def _additions(vector: Any, path: str) -> Iterator[Intervention]:
    """Yield one addition for each layer of a steering vector."""
    if not isinstance(vector, Mapping):
        vector = {name: getattr(vector, name) for name in _FIELDS if hasattr(vector, name)}
    refuse_unknown_keys(vector, _FIELDS, path)
    for key in ("activations", "layer_indices"):
        if key not in vector:
            raise WeirError("missing", f"{path}.{key}")
    array = _activations(vector["activations"], f"{path}.activations")
    layers = _layer_indices(vector["layer_indices"], len(array), f"{path}.layer_indices")
    position_indices = _to_list(vector.get("position_indices"))
    common = {"scale": vector.get("scale", 1.0), "norm_match": vector.get("norm_match", False), "path": path}
    if array.ndim == 2 and position_indices is None:
        yield from (Add(Vector(row), layer, **common) for row, layer in zip(array, layers, strict=True))
        return
    by_position = array.ndim == 3
    most = array.shape[1] if by_position else MAX_LIST
    if position_indices is None:
        position_indices = list(range(most))
    positions = _absolute(position_indices, most, by_position, f"{path}.position_indices")
    # `Add` gives the k-th row to the k-th position in ascending order.
    order = sorted(range(len(positions)), key=positions.__getitem__)
    common["positions"] = Positions("list", tuple(positions[k] for k in order))
    for entry, layer in zip(array, layers, strict=True):
        yield Add(Vector(entry[order] if by_position else entry), layer, **common)


def _activations(value: Any, path: str) -> np.ndarray:
    """Parse activations: [layers, d_model], or [layers, n, d_model] for n > 1 positions."""
    array = Vector.parse(_lens_tensor(value, path), path, (2, 3)).array
    if array is None:
        raise WeirError("vllm-lens has no references; give the numbers", path)
    return array[:, 0] if array.ndim == 3 and array.shape[1] == 1 else array


def _layer_indices(value: Any, count: int, path: str) -> Sequence[Any]:
    """Return the layers, of which there must be `count`."""
    layers = _to_list(value)
    if not isinstance(layers, Sequence):
        raise WeirError(f"expected a list of ints, got {type(layers).__name__}", path)
    if len(layers) != count:
        raise WeirError(f"activations hold {count} layers; name as many", path)
    return layers


def _to_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _absolute(value: Any, count: int, exact: bool, path: str) -> tuple[int, ...]:
    """Return absolute positions in the order given; `exact`: there must be `count` of them."""
    selector = Positions.parse(value, path)
    positions = selector.numbers
    if selector.kind != "list":
        raise WeirError("expected a list of ints", path)
    if any(position < 0 for position in positions):
        raise WeirError("positions are absolute here: they count from 0", path)
    if exact and len(positions) != count:
        raise WeirError(f"activations hold {count} positions; name as many", path)
    if len(set(positions)) != len(positions):
        raise WeirError("a position is named twice", path)
    return positions


def _lens_tensor(value: Any, path: str) -> Any:
    """Translate vllm-lens's {data, dtype, original_dtype, shape, compression} to Weir's."""
    if not isinstance(value, Mapping) or "data" not in value:
        return value
    dtype = str(value.get("dtype", "float32")).removeprefix("torch.")
    if dtype == "int16" and value.get("original_dtype") == "torch.bfloat16":
        dtype = "bfloat16"
    data = value["data"]
    if value.get("compression") == "zstd":
        data = _inflated(data, path)
    elif value.get("compression") is not None:
        raise WeirError(
            f"unknown compression {brief(value['compression'])!r}; only zstd is known", f"{path}.compression"
        )
    return {"b64": data, "dtype": dtype, "shape": value.get("shape")}


def _inflated(data: Any, path: str) -> str:
    """Decompress a zstd frame, base64 to base64; refuse one that is larger than any vector."""
    max_bytes = 8 * MAX_ELEMENTS
    try:
        frame = base64.b64decode(data, validate=True)
        if zstandard.frame_content_size(frame) > max_bytes:
            raise WeirError(f"more than {max_bytes} bytes", f"{path}.data")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes)
    except (binascii.Error, TypeError, ValueError, zstandard.ZstdError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError("not base64 of a zstd frame", f"{path}.data") from None
    return base64.b64encode(raw).decode("ascii")
