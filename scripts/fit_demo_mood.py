#!/usr/bin/env python3
"""Make the vector and the probe named ``mood`` that `weir serve demo` starts with, from rows of transformers in fp32.

The vector is the mean row of happy stories minus that of sad ones, after block 3. The probe is fitted to the tokens of
each story's second half, where its mood is clear, and reads the mean score of the last 16. Half a minute on one core:

    python scripts/fit_demo_mood.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vllm_weir as weir
from examples.demo.stories import make_stories
from vllm_weir.demo.probe import auc, fit_probe, mean_difference
from vllm_weir.util.shipped import demo_mood
from vllm_weir.util.transformers_reference import TransformersReference

LAYER, WINDOW = 3, 16
TRAIN, HELD_OUT = 2001, 2002


def rows(stories: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the rows of each story, [tokens, d], and whether it is happy, [stories]."""
    model = TransformersReference.from_pretrained(weir.demo_model())
    encode = AutoTokenizer.from_pretrained(weir.demo_model())
    told = make_stories(stories, seed)
    happy = torch.tensor([story.sentiment == "positive" for story in told])
    return [model.streams(encode(story.text).input_ids)[1][LAYER] for story in told], happy


def main() -> None:
    vector_file, probe_file = map(Path, demo_mood())
    vector_file.parent.mkdir(exist_ok=True)
    streams, happy = rows(300, TRAIN)
    vector = mean_difference(torch.stack([rows[1:].mean(0) for rows in streams]), happy).float()
    vector_file.write_bytes(save({"vector": vector}))
    halves = [rows[len(rows) // 2 :] for rows in streams]
    counts = torch.tensor([len(half) for half in halves])
    fitted = fit_probe(torch.cat(halves), happy.repeat_interleave(counts), l2=0.001)
    weir.Probe(
        "mood", fitted.weight.float(), fitted.bias, layer=LAYER, activation="sigmoid", smooth=("mean", WINDOW)
    ).save(probe_file)
    held, labels = rows(100, HELD_OUT)
    area = auc(torch.stack([fitted.score(rows[-WINDOW:]).mean() for rows in held]), labels)
    print(f"norm of the vector {vector.norm():.1f}; AUC of the probe at the end of held-out stories {area:.3f}")


if __name__ == "__main__":
    main()
