"""Bodies of the steering routes; `vllm_weir.schema` checks the vectors in them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictBool

Floats = list[float] | Annotated[list[list[float]], Field(min_length=1, max_length=1)]
"""[d], or [1, d]; d is the width of a whole row of the hook point, so a row of heads is flat."""


class Strict(BaseModel):
    """A body that names nothing else."""

    model_config = ConfigDict(extra="forbid")


class VectorBytes(Strict):
    """Little-endian numbers; dtype float32, float16, bfloat16 or float64."""

    b64: str
    dtype: str
    shape: list[int]


class VectorRef(Strict):
    """A vector's name or digest."""

    ref: str


class Scaled(Strict):
    """A vector times a number."""

    vector: Floats | VectorBytes | VectorRef
    scale: float = 1.0


class Bound(Strict):
    """A clamp along a direction: to `value`, or into [`min`, `max`]."""

    vector: Floats | VectorBytes | VectorRef
    value: float | None = None
    min: float | None = None
    max: float | None = None
    strength: float = 1.0


class PackedVectors(Strict):
    """Rows of several blocks in one base64 string."""

    dtype: Literal["float32", "float16", "bfloat16", "float64"]
    shape: Annotated[list[int], Field(description="[rows, d_model], or of the width of the hook point's rows")]
    layer_indices: list[int]
    data: str
    scales: list[float] | None = None


class PackedBounds(Strict):
    """Clamps of several blocks in one base64 string; null for no bound."""

    dtype: Literal["float32", "float16", "bfloat16", "float64"]
    shape: list[int]
    layer_indices: list[int]
    data: str
    bounds: list[list[float | None]]
    strengths: list[float] | None = None


Vectors = Annotated[
    dict[str, dict[str, Floats | Scaled | VectorBytes | VectorRef] | PackedVectors] | None, SkipValidation
]
Clamps = Annotated[dict[str, dict[str, list[Bound]] | PackedBounds] | None, SkipValidation]
Wires = Annotated[list[dict[str, Any]] | None, SkipValidation]


class Fields(BaseModel):
    """Interventions by tier, hook point and block, and in Weir's wire form."""

    vectors: Annotated[Vectors, Field(description="Added at every position: {hook: {block: vector}}.")] = None
    prefill_vectors: Annotated[Vectors, Field(description="Added at the prompt's positions.")] = None
    decode_vectors: Annotated[Vectors, Field(description="Added at the generated positions.")] = None
    clamps: Annotated[Clamps, Field(description="Clamps at every position: {hook: {block: [clamp]}}.")] = None
    prefill_clamps: Annotated[Clamps, Field(description="Clamps at the prompt's positions.")] = None
    decode_clamps: Annotated[Clamps, Field(description="Clamps at the generated positions.")] = None
    interventions: Annotated[Wires, Field(description="Weir's wire form, applied after the others.")] = None


class SetSteering(Fields):
    """Steering for every request.

    Without `replace`, only the hook points and blocks of the given tiers change, and
    `interventions`, if given, replace earlier ones.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "vectors": {"resid_post": {"3": [0.5, -1.0]}},
                    "decode_vectors": {"resid_post": {"3": {"vector": {"ref": "happy"}, "scale": 2.0}}},
                    "replace": True,
                }
            ]
        },
    )
    replace: Annotated[StrictBool, Field(description="Whether to remove all earlier steering.")] = False
    target: Literal["main", "draft"] | None = None


class ClearSteering(BaseModel):
    """Which model to clear; only the main one can be steered."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})
    target: Literal["main", "draft"] | None = None


class RegisterModule(Fields):
    """Interventions under a name."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"name": "cheerful", "vectors": {"resid_post": {"3": {"vector": [0.5, -1.0], "scale": 2.0}}}}]
        },
    )
    name: Annotated[str, Field(min_length=1, max_length=256)]
    kind: Literal["additive", "sae_delta"] = "additive"
    sae_manifest: Annotated[dict[str, Any] | None, Field(description="Refused, as is kind `sae_delta`.")] = None


class UnregisterModule(BaseModel):
    """The module to delete."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "cheerful"}]})
    name: Annotated[str, Field(min_length=1, max_length=256)]


class Done(BaseModel):
    """The change was made."""

    status: Literal["ok"] = "ok"


class SteeringSet(Done):
    """The hook points, as the request named them, and blocks."""

    hook_points: list[str]
    layers_updated: list[int]


class ActiveHook(BaseModel):
    """Steering at one hook point of a block.

    L2 norms of what is added, by tier: at every position, in the prompt, and while generating; and
    the number of clamps.
    """

    norm: float | None = None
    prefill_norm: float | None = None
    decode_norm: float | None = None
    clamps: int


class SteeringState(BaseModel):
    """The steering of every request.

    `active_layers` has what was set by tier, by block and hook point; `interventions` has all, in
    order, in wire form. What the fork names otherwise stands under both names.
    """

    active_layers: dict[str, dict[str, ActiveHook]]
    interventions: list[dict[str, Any]]


class LayerPoints(BaseModel):
    """The hook points of a block, with the fork's names for them; `embed` and `final_norm` are listed with block 0."""

    hook_points: list[str]


class Layers(BaseModel):
    """Hook points by block."""

    layers: dict[str, LayerPoints]


class ModuleChanged(Done):
    """A change of one module; `modules` has all names after it."""

    name: str
    modules: list[str]


class Modules(BaseModel):
    """The names of the modules."""

    modules: list[str]
    count: int
