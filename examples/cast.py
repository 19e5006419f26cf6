"""Conditional steering: the model declines stories about football, and tells all others bit by bit as ever.

A condition vector is compared with the prompt, and a behaviour vector is added only where it holds (CAST, Lee et al.
2024, arXiv:2409.05907). The condition is Fisher's linear discriminant, the behaviour a difference of means. Declining
is what this small model knows: to end the text.

python examples/cast.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from demo.stories import Story, make_stories
from vllm import LLM, SamplingParams

import vllm_weir as weir

TOPIC = "football"
CONDITION, BEHAVIOUR = 1, 3
"""The blocks that are read and steered: a probe has to read before the intervention that waits for it."""


def stories(seed: int, n: int = 60) -> list[Story]:
    """Return stories, half of them about the topic."""
    others = (story for story in make_stories(4 * n, seed + 1) if story.topic != TOPIC)
    return make_stories(n, seed, topic=TOPIC) + [next(others) for _ in range(n)]


def rows(llm: LLM, texts: Sequence[str], layer: int, **reading: Any) -> torch.Tensor:
    """Return one row of each text, [texts, d_model]."""
    params = weir.params(SamplingParams(max_tokens=1), capture=weir.Capture("resid_post", layer, **reading))
    outs = llm.generate(texts, params, use_tqdm=False)
    return torch.cat([out.activations["resid_post", layer].float() for out in outs])


def condition(llm: LLM, told: Sequence[Story]) -> weir.Probe:
    """Return a probe of the mean over the prompt: above 0 where the story is about the topic."""
    about = torch.tensor([story.topic == TOPIC for story in told])
    means = rows(llm, [story.opening for story in told], CONDITION, positions="prompt", reduce="mean")
    centres = means[about].mean(0), means[~about].mean(0)
    spread = torch.cov((means - torch.where(about[:, None], *centres)).T)
    spread += 1e-3 * spread.diagonal().mean() * torch.eye(len(spread))
    weight = torch.linalg.solve(spread, centres[0] - centres[1])
    middle = (centres[0] + centres[1]) @ weight / 2
    smooth = ("mean", 256)  # as long as any prompt here
    return weir.Probe("topic", weight, -float(middle), "resid_post", CONDITION, smooth=smooth, positions="prompt")


def behaviour(llm: LLM, told: Sequence[Story]) -> torch.Tensor:
    """Return the direction from stories that go on to those that are over."""
    over = rows(llm, [story.text for story in told], BEHAVIOUR, positions="last_prompt")
    goes_on = rows(llm, [story.opening for story in told], BEHAVIOUR, positions="last_prompt")
    return over.mean(0) - goes_on.mean(0)


def main() -> None:
    model = weir.demo_model()
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    llm = LLM(model, enable_prefix_caching=False, **options)

    known = stories(seed=1, n=200)
    probe, vector = condition(llm, known), behaviour(llm, known)
    # "sampled" begins at the prompt's last token, whose score is the mean over the whole prompt.
    decline = weir.Add(vector, BEHAVIOUR, 2.0, positions="sampled", when=weir.When("topic", above=0.0))

    new = stories(seed=1000)
    openings = [story.opening for story in new]
    plain = SamplingParams(max_tokens=24, temperature=0, logprobs=1)
    outs = llm.generate(openings, weir.params(plain, probes=probe, interventions=decline), use_tqdm=False)
    fired = [out.receipt.gates[0]["fired"] > 0 for out in outs]
    right = sum(f == (story.topic == TOPIC) for f, story in zip(fired, new, strict=True))
    declined = sum(not out.outputs[0].text.strip() for out, f in zip(outs, fired, strict=True) if f)
    print(f"the condition is right on {right} of {len(new)} new stories: {right / len(new):.1%}")
    print(f"where it holds, {declined} of {sum(fired)} stories are declined")
    for verdict in (True, False):
        k = next(k for k, story in enumerate(new) if fired[k] == verdict == (story.topic == TOPIC))
        score = float(outs[k].scores["topic"][-1])
        print(f"score {score:+.1f}: {openings[k]} | {outs[k].outputs[0].text.strip() or '(declined)'}")

    # Batches of equal shape, since the sums of a matrix product depend on it.
    others = [opening for opening, f in zip(openings, fired, strict=True) if not f]
    params = (plain, weir.params(plain, probes=probe, interventions=decline))
    stock, gated = (llm.generate(others, one, use_tqdm=False) for one in params)
    same = all(
        (a.outputs[0].token_ids, a.outputs[0].logprobs) == (b.outputs[0].token_ids, b.outputs[0].logprobs)
        for a, b in zip(stock, gated, strict=True)
    )
    print(f"the other {len(others)} stories are bit-identical to plain ones: {same}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main()
