"""Inside a block: what one head looks at and gives, which neurons are active, and what happens without that head.

Head 3 of block 5 looks from the last token of a story to the word that says what it was like.

python examples/inside_block.py
"""

from __future__ import annotations

import math

import torch
from vllm import LLM, RequestOutput, SamplingParams

import vllm_weir as weir

STORY = "Tom went to the garden. Tom frowned sadly, for the garden was awful. Tom was so"
LAYER, HEAD = 5, 3


def likely(out: RequestOutput) -> str:
    """The likeliest next tokens and their probabilities."""
    (step,) = out.outputs[0].logprobs
    best = sorted(step.values(), key=lambda one: -one.logprob)
    return ", ".join(f"{one.decoded_token.strip()} {math.exp(one.logprob):.2f}" for one in best[:4])


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    plain = SamplingParams(max_tokens=1, temperature=0, logprobs=4)
    read = [
        weir.Capture("pattern", LAYER, "last_prompt", heads=[HEAD]),
        weir.Capture("z", LAYER, "last_prompt", heads=[HEAD]),
        weir.Capture("mlp_post", LAYER, "last_prompt"),
    ]
    (out,) = llm.generate([STORY], weir.params(plain, capture=read), use_tqdm=False)
    words = [llm.get_tokenizer().decode([token]).strip() for token in out.prompt_token_ids]

    pattern = out.activations["pattern", LAYER][0, 0]  # [queries, heads, keys]
    seen = ", ".join(f"{words[key]} {pattern[key]:.2f}" for key in pattern.topk(3).indices.tolist())
    z = out.activations["z", LAYER]  # [rows, heads, d_head]
    print(f"head {HEAD} of block {LAYER} looks from {words[-1]!r} at: {seen}")
    print(f"and gives z {list(z.shape)}, norm {z.float().norm():.1f}")
    neurons = out.activations["mlp_post", LAYER][0].float()
    active = neurons.abs().topk(3).indices.tolist()
    print("most active neurons: " + ", ".join(f"{n} ({neurons[n]:+.2f})" for n in active))

    silence = weir.Replace(torch.zeros(z.shape[-1]), LAYER, hook="z", heads=[HEAD], positions="last_prompt")
    (without,) = llm.generate([STORY], weir.params(plain, interventions=silence), use_tqdm=False)
    print(f"with it:    {likely(out)}\nwithout it: {likely(without)}")
    print(f"rows changed: {without.receipt.steered}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(weir.demo_model())
