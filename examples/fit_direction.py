"""Fit a direction from pairs of prompts, see where it separates them, check that it does something, and steer with it.

python examples/fit_direction.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from demo.stories import make_stories
from vllm import LLM, SamplingParams

import vllm_weir as weir

PAIRS, LAYER = 40, 2


def stories(sentiment: str) -> list[str]:
    """Return stories; those of the two sentiments differ in single words."""
    return [" ".join(story.sentences[:-1]) for story in make_stories(PAIRS, seed=1, sentiment=sentiment)]


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)

    # Read at the end of a story about which all is known, where the model is about to say how it was.
    happy, sad = ([f"{text} It was the" for text in stories(sentiment)] for sentiment in ("positive", "negative"))
    found = weir.fit(llm, happy, sad, metric=weir.logit_diff(" best", " worst"), progress=False)
    for layer in found.layers:
        print(f"block {layer}: AUC {found.auc(layer):.2f}, dose {found.details['layers'][str(layer)]['gap']:.1f}")
    last = weir.fit(llm, happy, sad, layers=5, metric=weir.logit_diff(" best", " worst"), progress=False)
    check = last.details["causal"]
    print(f"logit of ' best' less that of ' worst', {sum(check['prompts'].values())} prompts that were held out")
    for name, value in check["means"].items():
        print(f"  {name.replace('_', ' ')}: {value:+.1f}")

    # A mean over the prompt finds the mood of a whole text, which steers stories from their first word on.
    mood = weir.fit(llm, stories("positive"), stories("negative"), layers=LAYER, positions="prompt", progress=False)
    opening = "Anna took the boat out early that morning. Anna"
    plain = SamplingParams(max_tokens=24, temperature=0)
    params = [weir.params(plain, interventions=mood.add(scale)) for scale in (-1.0, 1.0)]
    for scale, out in zip((-1.0, 1.0), llm.generate([opening] * 2, params, use_tqdm=False), strict=True):
        print(f"scale {scale:+g}: {opening}{out.outputs[0].text}")

    # The same direction as a probe: a score for every token, above 0 where the text is happy.
    probe = mood.probe(LAYER, name="mood")
    outs = llm.generate([happy[0], sad[0]], weir.params(SamplingParams(max_tokens=1), probes=probe), use_tqdm=False)
    for name, out in zip(("happy", "sad"), outs, strict=True):
        print(f"{name}: mean score {float(out.scores['mood'].mean()):+.1f}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
