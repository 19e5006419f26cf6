"""Bodies of the fork's routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictBool, StrictInt

from vllm_weir.errors import WeirError, brief

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


MAX_PROMPT = 1 << 16
"""Characters; prompts are split into tokens in the event loop, as the tokenizer serves one caller at a time."""
MAX_AXIS = 1 << 14
MAX_SPANS = 64


class LayerRange(BaseModel):
    """Blocks from `start` to before `stop`."""

    model_config = ConfigDict(extra="forbid")
    start: Annotated[StrictInt, Field(ge=0, le=MAX_AXIS)]
    stop: Annotated[StrictInt, Field(ge=0, le=MAX_AXIS)]
    step: Annotated[StrictInt, Field(ge=1)] = 1

    def range(self) -> range:
        return range(self.start, self.stop, self.step)


class SpanPosition(BaseModel):
    """The tokens that cover a text in the prompt; `occurrence` counts from 0."""

    model_config = ConfigDict(extra="forbid")
    span: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    occurrence: Annotated[StrictInt, Field(ge=0, le=1000)] = 0


class KnownCell(BaseModel):
    """A cell that an interrupted stream has told already."""

    model_config = ConfigDict(extra="ignore")
    hook: str
    layer: StrictInt
    position: StrictInt
    value: Annotated[float, Field(allow_inf_nan=False)]


class PatchSweep(BaseModel):
    """Activation patching over hook points, blocks and positions of a prompt, as in RhizoNymph's fork.

    Rows come from the run of `clean_prompt`, or are one vector: `source_module` or `source_inline`. `done` has cells
    of an interrupted stream, which are not run again. `source_run` names nothing here, `logprobs` and
    `clean_baseline` are not needed.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    clean_prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)] | None = None
    source_run: str | None = None
    source_module: str | None = None
    source_inline: int | None = None
    mask: Annotated[dict[str, Any] | None, SkipValidation] = None
    patch_vectors: Annotated[dict[str, Any] | None, SkipValidation] = None
    hook: str = "post_block"
    hooks: Annotated[list[str], Field(min_length=1, max_length=64)] | None = None
    layers: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=MAX_AXIS)] | LayerRange
    positions: Annotated[list[StrictInt | SpanPosition], Field(max_length=MAX_AXIS)] | Literal["all_prompt"] = (
        "all_prompt"
    )
    alpha: float = 1.0
    answer_token: str | None = None
    answer_token_id: StrictInt | None = None
    foil_token: str | None = None
    foil_token_id: StrictInt | None = None
    metric: Literal["logprob", "logit_diff", "recovered"] = "logprob"
    logprobs: Annotated[int, Field(ge=1)] = 20
    stream: bool = False
    clean_baseline: float | None = None
    keep_source: bool = False
    done: Annotated[list[KnownCell], Field(max_length=MAX_AXIS)] = []


def align(clean: Sequence[int], corrupt: Sequence[int]) -> tuple[dict[int, int], dict[str, Any]]:
    """Return where each position of the corrupt prompt is in the clean one, and a summary.

    Prompts of one length agree position by position. Of others the first tokens that are the same do, and the
    last; positions between have no counterpart.
    """
    same = len(clean) == len(corrupt)
    first = len(corrupt) if same else _shared(clean, corrupt)
    last = 0 if same else _shared(clean[first:][::-1], corrupt[first:][::-1])
    shift = len(clean) - len(corrupt)
    sources = {p: p for p in range(first)} | {p: p + shift for p in range(len(corrupt) - last, len(corrupt))}
    unaligned = [p for p in range(len(corrupt)) if p not in sources]
    lengths = {"n_clean": len(clean), "n_corrupt": len(corrupt), "prefix_len": first, "suffix_len": last}
    return sources, {**lengths, "unaligned_positions": unaligned}


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def positions_of(body: PatchSweep, ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return the positions of the grid, each once; spans are those of the tokens that cover their text."""
    if body.positions == "all_prompt":
        return list(range(len(ids)))
    found: dict[int, None] = {}
    offsets = None
    if sum(not isinstance(one, int) for one in body.positions) > MAX_SPANS:
        raise WeirError(f"more than {MAX_SPANS} texts", "positions")
    for k, one in enumerate(body.positions):
        if isinstance(one, int):
            if not 0 <= one < len(ids):
                raise WeirError(f"the prompt has {len(ids)} tokens", f"positions[{k}]")
            found[one] = None
            continue
        start = -1
        for _ in range(one.occurrence + 1):
            start = body.prompt.find(one.span, start + 1) if one.span else -1
            if start < 0:
                raise WeirError(f"{brief(one.span)!r} is not so often in the prompt", f"positions[{k}]")
        if offsets is None:
            offsets = tokenizer(body.prompt, return_offsets_mapping=True)["offset_mapping"]
        end = start + len(one.span)
        found |= {p: None for p, (low, high) in enumerate(offsets) if low < end and high > start}
    return list(found)
