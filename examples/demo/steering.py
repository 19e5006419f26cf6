"""Stories steered towards one sentiment or the other, and how far the steering works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import vllm_weir as weir
from vllm_weir.demo.probe import LogisticProbe
from vllm_weir.demo.stories import openings, sentiment_of, well_formed

SCALES = (-6.0, -3.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 3.0, 6.0)
SHOWN = (-1.0, 0.0, 1.0)
OPENINGS, SEED, MAX_TOKENS = 30, 2003, 28
MIN_FLIPPED = MIN_WELL_FORMED = 0.8
"""What the shipped model must reach at some scale in each direction, else the exit code is 1."""


@dataclass(frozen=True)
class SteeredStory:
    """A story's steered continuation.

    Attributes:
        opening: the neutral prompt.
        text: the model's continuation.
        mood: balance of positive and negative words in `text`, see `sentiment_of`; None if it has
            none.
        score: mean log-odds of the probe over the rows of `text`, captured again without steering.
        well_formed: whether the grammar of the training stories could have produced the story.
    """

    opening: str
    text: str
    mood: float | None
    score: float
    well_formed: bool

    @property
    def sign(self) -> int:
        """1 for a positive story, -1 for a negative one, 0 for neither."""
        return 0 if not self.mood else 1 if self.mood > 0 else -1


@dataclass(frozen=True)
class DoseResult:
    """All stories written at one scale.

    Attributes:
        scale: the vector's factor.
        stories: one for each opening.
        flipped: of the stories that have the opposite sentiment without steering, the share that
            has the intended one; None without steering, or if there are no such stories.
    """

    scale: float
    stories: list[SteeredStory]
    flipped: float | None

    def share(self, sign: int) -> float:
        """Return the share of stories with this sign."""
        return sum(s.sign == sign for s in self.stories) / len(self.stories)

    @property
    def well_formed(self) -> float:
        """Share of stories that the grammar could have produced."""
        return sum(s.well_formed for s in self.stories) / len(self.stories)

    @property
    def score(self) -> float:
        """Mean of the stories' probe scores."""
        return sum(s.score for s in self.stories) / len(self.stories)

    @property
    def keeps_promise(self) -> bool:
        """Whether the sentiment flips while the language stays intact."""
        return self.flipped is not None and self.flipped >= MIN_FLIPPED and self.well_formed >= MIN_WELL_FORMED


def write_stories(
    llm: Any, vector: torch.Tensor, layer: int, probe: LogisticProbe, console: Console
) -> list[DoseResult]:
    """Continue neutral openings at every scale, all in one batch.

    Args:
        llm: the engine.
        vector: float [d], added times the scale to ``resid_post[layer]`` at every position.
        layer: the block that `vector` and `probe` belong to.
        probe: of sentiment, for single rows.
        console: where a summary is printed.
    """
    from vllm import SamplingParams

    unsteered = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    steered = [
        weir.params(unsteered, interventions=weir.Add(vector, layer, scale, positions="all")) for scale in SCALES
    ]
    prompts = openings(OPENINGS, SEED)
    started = time.perf_counter()
    outputs = llm.generate(prompts * len(SCALES), [p for p in steered for _ in prompts], use_tqdm=False)
    seconds = time.perf_counter() - started
    changed = sum(n for out in outputs for sites in out.receipt.steered for n in sites.values())
    console.print(
        f"Wrote {len(outputs)} stories at {len(SCALES)} scales in one batch in {seconds:.1f} s; Weir changed "
        f"{changed:,} rows of resid_post[{layer}]"
    )
    stories = [
        SteeredStory(prompt, text, sentiment_of(text), score, well_formed(prompt + text))
        for prompt, text, score in zip(
            prompts * len(SCALES),
            (o.outputs[0].text for o in outputs),
            _scores(llm, outputs, layer, probe),
            strict=True,
        )
    ]
    by_scale = {scale: stories[i * OPENINGS : (i + 1) * OPENINGS] for i, scale in enumerate(SCALES)}
    return [DoseResult(scale, steered, flipped(steered, by_scale[0.0], scale)) for scale, steered in by_scale.items()]


def _scores(llm: Any, outputs: Sequence[Any], layer: int, probe: LogisticProbe) -> list[float]:
    """Return the mean probe score over each output's tokens, read without steering."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    one_token = SamplingParams(max_tokens=1, temperature=0)
    prompts, params = [], []
    for out in outputs:
        # No rows of the opening are captured, so it may come from the prefix cache.
        start = len(out.prompt_token_ids)
        prompts.append(TokensPrompt(prompt_token_ids=[*out.prompt_token_ids, *out.outputs[0].token_ids]))
        params.append(weir.params(one_token, capture=weir.Capture("resid_post", layer, f"{start}:")))
    again = llm.generate(prompts, params, use_tqdm=False)
    return [float(probe.score(out.activations["resid_post", layer]).mean()) for out in again]


def flipped(steered: Sequence[SteeredStory], unsteered: Sequence[SteeredStory], scale: float) -> float | None:
    """Return the share of stories that steering turned, among those that it could turn.

    Args:
        steered: stories written at `scale`.
        unsteered: the same openings without steering.
        scale: its sign is that of the intended sentiment.
    """
    sign = 1 if scale > 0 else -1
    opposite = [new for new, old in zip(steered, unsteered, strict=True) if old.sign == -sign]
    return sum(s.sign == sign for s in opposite) / len(opposite) if scale and opposite else None


def _signed(scale: float) -> str:
    return f"{scale:+g}" if scale else "0"


def print_doses(console: Console, doses: Sequence[DoseResult], layer: int, norm: float, grammar: bool) -> None:
    """Print a table with a row for each scale.

    Args:
        console: where to print.
        doses: the stories by scale.
        layer: that was steered.
        norm: of the steering vector.
        grammar: whether the model was trained on the stories, and should keep to their grammar.
    """
    table = Table(
        title=f"Steered: scale x (mean of happy rows - mean of sad rows), norm {norm:.1f}, after block {layer}",
        title_justify="left",
    )
    for head in ("scale", "positive\nstories", "negative\nstories", "flipped", "probe's\nlog-odds"):
        table.add_column(head, justify="right")
    if grammar:
        table.add_column("well-\nformed", justify="right")
    for dose in doses:
        flipped_share = "" if dose.flipped is None else f"{dose.flipped:.0%}"
        cells = [
            _signed(dose.scale),
            f"{dose.share(1):.0%}",
            f"{dose.share(-1):.0%}",
            flipped_share,
            f"{dose.score:+.1f}",
        ]
        if grammar:
            cells.append(f"{dose.well_formed:.0%}")
        table.add_row(*cells, style="bold" if dose.keeps_promise else None)
    console.print(table)


def print_story(console: Console, doses: Sequence[DoseResult]) -> None:
    """Print one opening's continuations at three scales; if possible one that turned both ways."""
    shown = [dose for dose in doses if dose.scale in SHOWN]
    columns = list(zip(*(dose.stories for dose in shown), strict=True))
    stories = next((c for c in columns if c[0].sign == -1 and c[-1].sign == 1), columns[0])
    table = Table(title=f"[italic]{stories[0].opening}[/] ...", title_justify="left", width=116)
    for dose in shown:
        table.add_column(f"scale {_signed(dose.scale)}", ratio=1)
    table.add_row(*(s.text.strip() for s in stories))
    console.print(table)


def failures(doses: Sequence[DoseResult]) -> list[str]:
    """Return which expectations of the shipped model were not met, as sentences."""
    return [
        f"no {name} scale flips {MIN_FLIPPED:.0%} of the stories with {MIN_WELL_FORMED:.0%} of them well-formed"
        for name, sign in (("positive", 1), ("negative", -1))
        if not any(dose.keeps_promise for dose in doses if dose.scale * sign > 0)
    ]
