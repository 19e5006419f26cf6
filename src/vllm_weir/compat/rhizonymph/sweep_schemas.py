"""The body of ``POST /v1/patch_sweep``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictInt

MAX_PROMPT = 1 << 16
"""Characters; prompts are split into tokens in the event loop, as the tokenizer serves one caller at a time."""
MAX_AXIS = 1 << 14


class LayerRange(BaseModel):
    """Blocks from `start` to before `stop`."""

    model_config = ConfigDict(extra="forbid")
    start: Annotated[StrictInt, Field(ge=0, le=MAX_AXIS)]
    stop: Annotated[StrictInt, Field(ge=0, le=MAX_AXIS)]
    step: Annotated[StrictInt, Field(ge=1)] = 1

    def range(self) -> range:
        """Return the blocks."""
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
