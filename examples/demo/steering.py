"""Stories steered towards one mood or the other, and how far the steering works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import vllm_weir as weir
from examples.demo.stories import openings, sentiment_of, well_formed
from vllm_weir.demo.probe import LogisticProbe

SCALES = (-6.0, -3.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 3.0, 6.0)
OPENINGS, EACH, SEED, MAX_TOKENS = 200, 20, 2003, 28
"""Openings that are tried, and how many of them are steered that go on happy, and that go on sad."""
MIN_SHARE = 0.9
"""Of the stories, what must have the mood, and be well-formed, at some scale in each direction; else the exit code is
1."""


@dataclass(frozen=True)
class SteeredStory:
    """A story's steered continuation.

    Attributes:
        opening: the prompt, which has no mood.
        text: the model's continuation.
        score: mean log-odds of the probe over the rows of `text`, captured again without steering.
        well_formed: whether the grammar of the training stories could have produced the story.
    """

    opening: str
    text: str
    score: float
    well_formed: bool

    @property
    def sign(self) -> int:
        """1 for a happy continuation, -1 for a sad one, 0 for neither."""
        return sign_of(self.text)


@dataclass(frozen=True)
class DoseResult:
    """All stories written at one scale of the steering vector."""

    scale: float
    stories: list[SteeredStory]

    def count(self, sign: int) -> int:
        """Return how many stories are happy (1), or sad (-1)."""
        return sum(story.sign == sign for story in self.stories)

    @property
    def well_formed(self) -> int:
        """Stories that the grammar could have produced."""
        return sum(story.well_formed for story in self.stories)

    @property
    def score(self) -> float:
        """Mean of the stories' probe scores."""
        return sum(story.score for story in self.stories) / len(self.stories)

    @property
    def works(self) -> bool:
        """Whether stories have the mood that they were steered to, and the language is intact."""
        least = MIN_SHARE * len(self.stories)
        return bool(self.scale) and self.count(1 if self.scale > 0 else -1) >= least and self.well_formed >= least


def sign_of(text: str) -> int:
    """Return 1 for a happy text, -1 for a sad one, and 0 for one that is neither, by its words."""
    mood = sentiment_of(text) or 0
    return (mood > 0) - (mood < 0)


def choose(llm: Any) -> list[str]:
    """Return openings of which as many go on happy as go on sad, without steering."""
    prompts = openings(OPENINGS, SEED)
    written = llm.generate(prompts, _unsteered(), use_tqdm=False)
    by_sign: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for prompt, out in zip(prompts, written, strict=True):
        by_sign[sign_of(out.outputs[0].text)].append(prompt)
    chosen = by_sign[-1][:EACH] + by_sign[1][:EACH]
    # A model that was not trained on these stories may write few with a mood.
    return chosen + by_sign[0][: 2 * EACH - len(chosen)]


def _unsteered() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0)


def write_stories(
    llm: Any, vector: torch.Tensor, layer: int, probe: LogisticProbe, console: Console
) -> list[DoseResult]:
    """Continue openings at every scale, all in one batch.

    Args:
        llm: the engine.
        vector: float [d], added times the scale to ``resid_post[layer]`` at every position.
        layer: the block that `vector` and `probe` belong to.
        probe: of mood, for single rows.
        console: where a summary is printed.
    """
    began = choose(llm)
    steered = [
        weir.params(_unsteered(), interventions=weir.Add(vector, layer, scale, positions="all")) for scale in SCALES
    ]
    started = time.perf_counter()
    outputs = llm.generate(began * len(SCALES), [p for p in steered for _ in began], use_tqdm=False)
    seconds = time.perf_counter() - started
    changed = sum(n for out in outputs for sites in out.receipt.steered for n in sites.values())
    console.print(
        f"Wrote {len(outputs)} stories at {len(SCALES)} scales in one batch in {seconds:.1f} s; Weir changed "
        f"{changed:,} rows of resid_post[{layer}]"
    )
    texts = [out.outputs[0].text for out in outputs]
    scores = _scores(llm, outputs, layer, probe)
    stories = [
        SteeredStory(opening, text, score, well_formed(opening + text))
        for opening, text, score in zip(began * len(SCALES), texts, scores, strict=True)
    ]
    return [DoseResult(s, stories[i * len(began) : (i + 1) * len(began)]) for i, s in enumerate(SCALES)]


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
    for head in ("scale", "happy", "sad", "probe's\nlog-odds", *(["sentences of\nthe grammar"] if grammar else [])):
        table.add_column(head, justify="right")
    for dose in doses:
        total = len(dose.stories)
        cells = [_signed(dose.scale), *(f"{dose.count(sign)} of {total}" for sign in (1, -1)), f"{dose.score:+.1f}"]
        cells += [f"{dose.well_formed} of {total}"] if grammar else []
        table.add_row(*cells, style="bold" if dose.works else None)
    console.print(table)


def print_story(console: Console, doses: Sequence[DoseResult]) -> None:
    """Print a story that goes on sad without steering, and at the smallest scale that works."""
    plain = next(dose for dose in doses if not dose.scale)
    up = [dose for dose in doses if dose.scale > 0]
    best = next((dose for dose in up if dose.works), up[-1])
    pairs = list(zip(plain.stories, best.stories, strict=True))
    shown = next((pair for pair in pairs if pair[0].sign < 0 < pair[1].sign), pairs[0])
    table = Table(title=f"[italic]{shown[0].opening}[/] ...", title_justify="left", width=116)
    for dose in (plain, best):
        table.add_column(f"scale {_signed(dose.scale)}", ratio=1)
    table.add_row(*(story.text.strip() for story in shown))
    console.print(table)


def failures(doses: Sequence[DoseResult]) -> list[str]:
    """Return which expectations of the shipped model were not met, as sentences."""
    return [
        f"at no {name} scale {MIN_SHARE} of the stories are {mood} and {MIN_SHARE} sentences of the grammar"
        for name, mood, sign in (("positive", "happy", 1), ("negative", "sad", -1))
        if not any(dose.works for dose in doses if dose.scale * sign > 0)
    ]
