"""The body of ``POST /v1/patch_sweep``, and the positions that it names. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictInt

from vllm_weir.errors import WeirError, brief

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
