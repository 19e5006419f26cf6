"""The mood of stories, changed by one feature of a sparse autoencoder; all else in the rows is kept."""

from __future__ import annotations

import torch
from demo.stories import make_stories, openings, sentiment_of
from vllm import LLM, SamplingParams

import vllm_weir as weir
from vllm_weir.demo.probe import auc

VALUES = (-4.0, 0.0, 4.0)


def happy_feature(llm: LLM, sae: weir.SAE) -> int:
    """Return the feature whose mean activation over a story tells happy stories from sad ones best."""
    stories = make_stories(40, seed=5)
    every = weir.Features("stories", ids=range(sae.d_sae), positions="prompt")
    outputs = llm.generate([s.text for s in stories], weir.params(SamplingParams(max_tokens=1), features=every))
    means = torch.stack([out.features["stories"].values.mean(0) for out in outputs])
    happy = torch.tensor([s.sentiment == "positive" for s in stories])
    scores = torch.tensor([auc(means[:, feature], happy) for feature in range(sae.d_sae)])
    best = int(scores.argmax())
    print(f"feature {best} tells happy stories from sad ones with AUC {scores[best]:.2f}")
    return best


def main() -> None:
    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    sae = weir.SAE.load(weir.demo_sae())
    weir.load_sae(llm, "stories", sae)
    feature = happy_feature(llm, sae)

    # Requests of one batch, each with a value of its own.
    starts, sampling = openings(8, seed=6), SamplingParams(max_tokens=32, temperature=0)
    edits = [weir.SetFeature("stories", feature, value=value) for value in VALUES]
    params = [weir.params(sampling, interventions=edit) for edit in edits for _ in starts]
    texts = [out.outputs[0].text for out in llm.generate(starts * len(VALUES), params)]

    happy = {}
    for k, value in enumerate(VALUES):
        written = texts[k * len(starts) : (k + 1) * len(starts)]
        happy[value] = sum((sentiment_of(text) or 0) > 0 for text in written) / len(written)
        print(f"held at {value:+g}, {happy[value]:.0%} are happy: {starts[0]}{written[0]}")
    assert happy[-4.0] <= 0.25 and happy[4.0] >= 0.75, happy


if __name__ == "__main__":
    main()
