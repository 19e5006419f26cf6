"""vllm-lens's request keys, read as the same in Weir's own words."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import Add
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.keys import LENS_CAPTURE_KEY, LENS_REFUSED, LENS_STEER_KEY
from vllm_weir.schema.positions import MAX_LIST, Positions
from vllm_weir.schema.vectors import MAX_ELEMENTS, Vector, number


def refuse_lens(extra_args: Mapping[str, Any]) -> None:
    """Raise WeirError if a request carries one of `LENS_REFUSED`."""
    for key, why in LENS_REFUSED.items():
        if extra_args.get(key) is not None:
            raise WeirError(why, key)


def lens_capture(value: object) -> Capture | None:
    """``output_residual_stream``: a list (or array) of blocks, True for all of them, or either as JSON; None for False
    or []."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise WeirError("expected true, a list of ints, or that as JSON", LENS_CAPTURE_KEY) from None
    value = _listed(value)
    if value is False or (isinstance(value, (list, tuple, range)) and not len(value)):
        return None
    return Capture("resid_post", layers="all" if value is True else value, path=LENS_CAPTURE_KEY)


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """vllm-lens's steering vector.

    Args:
        activations: [layers, d_model] or [layers, 1, d_model], added at every position (or at each of
            `position_indices`), or [layers, positions, d_model].
        layer_indices: the block after which each ``activations[i]`` is added.
        scale: factor.
        norm_match: scale each row of `activations` to the L2 norm of the stream it is added to.
        position_indices: absolute positions; None means 0, 1, ... for activations by position, else all.
    """

    activations: Any
    layer_indices: Sequence[int]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: Sequence[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON data; ``apply_steering_vectors`` takes it as it takes the object."""
        return {
            "activations": Vector.parse(self.activations, "activations", (2, 3)).to_json(),
            "layer_indices": Positions.parse(self.layer_indices, "layer_indices").to_json(),
            "scale": number(self.scale, "scale"),
            "norm_match": self.norm_match,
            "position_indices": None
            if self.position_indices is None
            else Positions.parse(self.position_indices, "position_indices").to_json(),
        }

    def model_dump(self, **_how: Any) -> dict[str, Any]:
        """`to_json` by the name that vllm-lens's scripts call; pydantic's options are taken and change nothing."""
        return self.to_json()


def lens_interventions(value: object) -> tuple[Intervention, ...]:
    """``apply_steering_vectors``: a list of SteeringVectors (Weir's or vllm-lens's own), dicts, or that as JSON."""
    if isinstance(value, str):
        value = loads(value, LENS_STEER_KEY)
    if isinstance(value, Mapping) or hasattr(value, "activations"):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise WeirError(f"expected a list of steering vectors, got {type(value).__name__}", LENS_STEER_KEY)
    return tuple(i for k, v in enumerate(value) for i in _lens_one(v, f"{LENS_STEER_KEY}[{k}]"))


_MEANT = re.compile(rf"({LENS_STEER_KEY}\[\d+\])\.(layers|vector|positions)\b(.*)")
_WRITTEN = {"layers": "layer_indices", "vector": "activations", "positions": "position_indices"}


def in_lens_words(error: WeirError) -> WeirError:
    """The error, with the field named as vllm-lens's caller has written it."""
    field = lens_field(error.field)
    return error if field == error.field else WeirError(error.message, field)


def lens_field(field: str) -> str:
    """A field, named as vllm-lens's caller has written it."""
    found = _MEANT.fullmatch(field)
    return field if found is None else f"{found[1]}.{_WRITTEN[found[2]]}{found[3]}"


_FIELDS = ("activations", "layer_indices", "scale", "norm_match", "position_indices")


def _lens_one(vector: Any, path: str) -> list[Intervention]:
    if not isinstance(vector, Mapping):
        vector = {name: getattr(vector, name) for name in _FIELDS if hasattr(vector, name)}
    for key in vector:
        if key not in _FIELDS:
            raise WeirError(f"unknown key; known are {', '.join(_FIELDS)}", f"{path}.{brief(key)}")
    for key in ("activations", "layer_indices"):
        if key not in vector:
            raise WeirError("missing", f"{path}.{key}")
    array = Vector.parse(
        _lens_tensor(vector["activations"], f"{path}.activations"), f"{path}.activations", (2, 3)
    ).array
    layers, positions = _listed(vector["layer_indices"]), _listed(vector.get("position_indices"))
    if array is None:
        raise WeirError("a reference is not a vllm-lens form", f"{path}.activations")
    if not isinstance(layers, Sequence):
        raise WeirError(f"expected a list of ints, got {type(layers).__name__}", f"{path}.layer_indices")
    if len(layers) != len(array):
        raise WeirError(f"activations hold {len(array)} layers; name as many", f"{path}.layer_indices")
    same = {"scale": vector.get("scale", 1.0), "norm_match": vector.get("norm_match", False), "path": path}
    if array.ndim == 3 and array.shape[1] == 1:
        array = array[:, 0]  # one vector for all positions, as [1, d] is everywhere
    if array.ndim == 2 and positions is None:
        return [Add(Vector(row), layer, **same) for row, layer in zip(array, layers, strict=True)]
    most = array.shape[1] if array.ndim == 3 else MAX_LIST
    positions = list(range(most)) if positions is None else positions
    absolute = _absolute(positions, most, array.ndim == 3, f"{path}.position_indices")
    order = sorted(range(len(absolute)), key=absolute.__getitem__)
    ascending = [absolute[k] for k in order]
    if array.ndim == 2:
        return [Add(Vector(row), layer, positions=ascending, **same) for row, layer in zip(array, layers, strict=True)]
    return [
        Add(Vector(rows[order]), layer, positions=ascending, **same) for rows, layer in zip(array, layers, strict=True)
    ]


def _listed(values: Any) -> Any:
    """An array or a tensor as a list."""
    return values.tolist() if hasattr(values, "tolist") else values


def _absolute(positions: Any, most: int, exact: bool, path: str) -> tuple[int, ...]:
    at = Positions.parse(positions, path)
    absolute = at.numbers
    if at.kind != "list":
        raise WeirError("expected a list of ints", path)
    if any(p < 0 for p in absolute):
        raise WeirError("positions are absolute here: they count from 0", path)
    if exact and len(absolute) != most:
        raise WeirError(f"activations hold {most} positions; name as many", path)
    if len(set(absolute)) != len(absolute):
        raise WeirError("a position is named twice", path)
    return absolute


def _lens_tensor(value: Any, path: str) -> Any:
    """vllm-lens's tensor form {data, dtype, original_dtype, shape, compression} as Weir's; anything else as it is."""
    if not isinstance(value, Mapping) or "data" not in value:
        return value
    dtype = str(value.get("dtype", "float32")).removeprefix("torch.")
    if dtype == "int16" and value.get("original_dtype") == "torch.bfloat16":
        dtype = "bfloat16"
    data = value["data"]
    if value.get("compression") == "zstd":
        data = _inflated(data, path)
    elif value.get("compression") is not None:
        raise WeirError("known is zstd", f"{path}.compression")
    return {"b64": data, "dtype": dtype, "shape": value.get("shape")}


def _inflated(data: Any, path: str) -> str:
    """Base64 of what base64 of a zstd frame holds; a frame that grows beyond any vector is refused."""
    most = 8 * MAX_ELEMENTS
    try:
        frame = base64.b64decode(data, validate=True)
        if zstandard.frame_content_size(frame) > most:
            raise WeirError(f"more than {most} bytes", f"{path}.data")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=most)
    except (binascii.Error, TypeError, ValueError, zstandard.ZstdError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError("not base64 of a zstd frame", f"{path}.data") from None
    return base64.b64encode(raw).decode("ascii")
