"""Activation patching: rows of one prompt put into another, block by block, to find where the mood is.

The two prompts differ in three words. Patched into the sad prompt are the happy prompt's rows, either at the words that
differ or at the last token: low blocks hold the mood at the words, high blocks have moved it to the last token.

python examples/patch.py
"""

from __future__ import annotations

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

HAPPY = "Tom went to the garden. Tom grinned happily, for the garden was lovely. Tom was so"
SAD = "Tom went to the garden. Tom frowned sadly, for the garden was awful. Tom was so"


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    plain = SamplingParams(max_tokens=4, temperature=0)
    read = weir.params(plain, capture=weir.Capture("resid_post", positions="prompt"))
    happy, sad = llm.generate([HAPPY, SAD], read, use_tqdm=False)
    print(f"happy prompt: ...Tom was so{happy.outputs[0].text}\nsad prompt:   ...Tom was so{sad.outputs[0].text}\n")

    pairs = zip(happy.prompt_token_ids, sad.prompt_token_ids, strict=True)
    places = {"words": [i for i, (a, b) in enumerate(pairs) if a != b], "last": [len(sad.prompt_token_ids) - 1]}
    layers = range(len(happy.activations.sites))
    params = [
        # The k-th row of the values goes to the k-th of the positions.
        weir.params(plain, interventions=weir.Replace(happy.activations["resid_post", layer][at], layer, positions=at))
        for layer in layers
        for at in places.values()
    ]
    # Every request has its own patch; they share one batch.
    texts = [out.outputs[0].text.strip() for out in llm.generate([SAD] * len(params), params, use_tqdm=False)]
    print(f"{'block':6} {'words, at ' + str(places['words']):26} last token")
    for layer in layers:
        print(f"{layer:<6} {texts[2 * layer]:26} {texts[2 * layer + 1]}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(weir.demo_model())
