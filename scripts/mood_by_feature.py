#!/usr/bin/env python3
"""Draw how the mood of stories changes with the value at which a feature of the shipped autoencoder is held.

The features are found by the labels of the demo's stories: those whose mean activation over a story tells happy
stories from sad ones best. Each is then held at one value after another, in the prompt and in what is generated, and
the model continues neutral openings. Five minutes on one core:

    python scripts/mood_by_feature.py
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # importing vLLM twice takes most of the time on a CPU

import torch  # noqa: E402

import vllm_weir as weir  # noqa: E402
from examples.demo.pictures import MoodShares, moods_by_value  # noqa: E402
from examples.demo.stories import make_stories, openings, sentiment_of, well_formed  # noqa: E402
from vllm_weir.demo.probe import auc  # noqa: E402

VALUES = (-4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0)
LABELLED, OPENINGS = 20_005, 20_006  # seeds; the model and the autoencoder were trained on others
MAX_TOKENS = 40
NAME = "demo"


def mood_features(llm: Any, sae: weir.SAE, stories: int) -> dict[str, int]:
    """Return the feature that tells happy stories best, and the one that tells sad ones."""
    from vllm import SamplingParams

    labelled = make_stories(stories, LABELLED)
    every = weir.Features(NAME, ids=range(sae.d_sae), positions="prompt")
    params = weir.params(SamplingParams(max_tokens=1), features=every)
    outputs = llm.generate([story.text for story in labelled], params, use_tqdm=False)
    means = torch.stack([out.features[NAME].values.mean(0) for out in outputs])
    happy = torch.tensor([story.sentiment == "positive" for story in labelled])
    scores = torch.tensor([auc(means[:, feature], happy) for feature in range(sae.d_sae)])
    return {"happy": int(scores.argmax()), "sad": int(scores.argmin())}


def shares(llm: Any, starts: list[str], intervention: weir.SetFeature | None = None) -> tuple[float, float, float]:
    """Return the shares of happy, sad and well-formed stories among continuations of these openings."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    if intervention is not None:
        params = weir.params(params, interventions=intervention)
    texts = [out.outputs[0].text for out in llm.generate(starts, params, use_tqdm=False)]
    moods = [sentiment_of(text) or 0 for text in texts]
    kept = sum(well_formed(start + text) for start, text in zip(starts, texts, strict=True))
    return sum(m > 0 for m in moods) / len(texts), sum(m < 0 for m in moods) / len(texts), kept / len(texts)


def main() -> None:
    from vllm import LLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/mood_by_feature.png")
    parser.add_argument("--stories", type=int, default=200, help="labelled ones, by which the features are found")
    parser.add_argument("--openings", type=int, default=50, help="continued at every value")
    args = parser.parse_args()
    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    sae = weir.SAE.load(weir.demo_sae())
    weir.load_sae(llm, NAME, sae)
    features, starts = mood_features(llm, sae, args.stories), openings(args.openings, OPENINGS)
    plain = shares(llm, starts)
    print(f"as it is: {plain[0]:.0%} happy, {plain[1]:.0%} sad, {plain[2]:.0%} well-formed")
    panels = []
    for mood, feature in features.items():
        found = []
        for value in VALUES:
            found.append(shares(llm, starts, weir.SetFeature(NAME, feature, value=value)))
            happy, sad, kept = found[-1]
            print(f"{mood} feature {feature} = {value:+g}: {happy:.0%} happy, {sad:.0%} sad, {kept:.0%} well-formed")
        panels.append(MoodShares(f"feature {feature}, active in {mood} stories", *zip(*found, strict=True)))
    print(moods_by_value(VALUES, panels, plain[0], args.out))


if __name__ == "__main__":
    main()
