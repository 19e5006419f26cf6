#!/usr/bin/env python3
"""Draw the pictures of the documentation that come from the shipped model and need no page or notebook.

Each is what a guide describes, on the model of the examples. Half a minute on one core:

    python scripts/docs_pictures.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # importing vLLM twice takes most of the time on a CPU

import torch  # noqa: E402

import vllm_weir as weir  # noqa: E402
from examples.demo.stories import make_stories, openings, sentiment_of, well_formed  # noqa: E402
from vllm_weir import analysis  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SCALES = (-6, -4, -3, -2, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 2, 3, 4, 6)
STORY = "Tom went to the garden. Tom smiled, and he was so happy that he laughed."
BLOCK = 3
HAPPY, SAD, FORMED = "tab:orange", "tab:blue", "0.6"


def directions(llm: Any) -> dict[int, torch.Tensor]:
    """Mean happy row minus mean sad row of 120 stories, by block."""
    from vllm import SamplingParams

    stories = make_stories(120, seed=1)
    happy = torch.tensor([story.sentiment == "positive" for story in stories])
    mean = weir.Capture("resid_post", positions="prompt", reduce="mean", dtype="float32")
    outputs = llm.generate([story.text for story in stories], weir.params(SamplingParams(max_tokens=1), capture=mean))
    rows = {site.layer: torch.cat([out.activations[site] for out in outputs]) for site in outputs[0].activations}
    return {layer: x[happy].mean(0) - x[~happy].mean(0) for layer, x in rows.items()}


def mood_by_scale(llm: Any, vector: torch.Tensor, path: Path) -> None:
    """The share of happy and sad stories by the scale of an addition."""
    import matplotlib.pyplot as plt
    from vllm import SamplingParams

    starts, greedy = openings(40, 20_006), SamplingParams(max_tokens=40, temperature=0)
    asked = [weir.params(greedy, interventions=weir.Add(vector, layers=BLOCK, scale=scale)) for scale in SCALES]
    outputs = llm.generate(starts * len(SCALES), [one for one in asked for _ in starts])
    texts = [out.outputs[0].text for out in outputs]
    runs = [texts[k : k + len(starts)] for k in range(0, len(texts), len(starts))]
    moods = [[sentiment_of(text) or 0 for text in run] for run in runs]
    formed = [sum(well_formed(a + b) for a, b in zip(starts, run, strict=True)) for run in runs]
    figure, axis = plt.subplots(figsize=(7, 2.9), layout="constrained")
    axis.plot(SCALES, [sum(m > 0 for m in run) for run in moods], "o-", color=HAPPY, label="happy")
    axis.plot(SCALES, [sum(m < 0 for m in run) for run in moods], "o-", color=SAD, label="sad")
    axis.plot(SCALES, formed, "--", color=FORMED, label="well-formed")
    axis.set(xlabel=f"scale of the addition after block {BLOCK}", ylabel=f"of {len(starts)} stories")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    found = directions(llm)
    mood_by_scale(llm, found[BLOCK], IMAGES / "mood_by_scale.png")
    captures = [weir.Capture("resid_post", dtype="float32"), weir.Capture("pattern", layers=2, positions="prompt")]
    (out,) = llm.generate(STORY, weir.params(SamplingParams(max_tokens=1), capture=captures))
    tokens = llm.get_tokenizer().convert_ids_to_tokens(out.prompt_token_ids)
    along = iter(found[layer] / found[layer].norm() ** 2 for layer in sorted(found))
    analysis.plot_heat_map(
        out.activations, IMAGES / "mood_by_token.png", tokens=tokens, value=lambda rows: rows @ next(along).numpy(),
        label="happy minus sad", title="How happy a story is, by block and token",
    )  # fmt: skip
    analysis.plot_attention(out.activations, IMAGES / "attention.png", layer=2, tokens=tokens)
    print(*sorted(IMAGES.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
