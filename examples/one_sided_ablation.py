"""One-sided ablation: take a direction out of the rows that point along it, and leave the others alone.

python examples/one_sided_ablation.py
"""

from __future__ import annotations

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYER = 3
HAPPY, SAD = "Tom went to the garden. Tom was happy.", "Tom went to the garden. Tom was sad."
STORY = "Anna was happy at home. The soup was awful, and Anna was"


def main() -> None:
    model = weir.demo_model()
    llm = LLM(model, dtype="float32", max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)

    # The direction from sad to happy. It need not be of length one: a clamp's bounds are lengths along it.
    mean = weir.Capture(layers=LAYER, positions="-2:", reduce="mean")
    read = weir.params(SamplingParams(max_tokens=1), capture=mean)
    happy, sad = (out.activations["resid_post", LAYER][0] for out in llm.generate([HAPPY, SAD], read, use_tqdm=False))
    direction = (happy - sad) / (happy - sad).norm()

    kinds = {
        "as it is": [],
        "Ablate": weir.Ablate(direction, LAYER),
        "Clamp(max=0)": weir.Clamp(direction, LAYER, max=0.0),
        "Clamp(min=0)": weir.Clamp(direction, LAYER, min=0.0),
    }
    # The component along the direction at every token, after the intervention.
    score = weir.Capture(layers=LAYER, project=direction)
    plain = SamplingParams(max_tokens=12, temperature=0)
    params = [weir.params(plain, capture=score, interventions=kind) for kind in kinds.values()]
    outs = llm.generate([STORY] * len(params), params, use_tqdm=False)
    prompt = len(outs[0].prompt_token_ids)
    before = outs[0].activations["resid_post", LAYER][:prompt, 0]
    for name, out in zip(kinds, outs, strict=True):
        after = out.activations["resid_post", LAYER][:prompt, 0]
        changed = int((after - before).abs().gt(1e-4).sum())
        spread = f"{after.min():+6.1f} .. {after.max():+6.1f}, {changed:2} of {prompt} rows changed"
        print(f"{name:12} {spread}: ...Anna was{out.outputs[0].text}")
    one_sided = outs[2].activations["resid_post", LAYER][:prompt, 0]
    same = torch.allclose(one_sided[before < 0], before[before < 0], atol=1e-4)
    print(f"rows that pointed the other way are as they were: {same}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main()
