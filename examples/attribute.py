"""Attribution patching: gradients of a transformers twin say where to look, patches in the engine say what is there.

Two prompts differ in three words. Estimated is what each row of the happy prompt, put into the sad one, does to
logit(happy) - logit(sad); the ten places with the largest estimates are then patched in the engine.

python examples/attribute.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from vllm import LLM

import vllm_weir as weir

HAPPY = "Tom went to the garden. Tom grinned happily, for the garden was lovely. Tom was so"
SAD = "Tom went to the garden. Tom frowned sadly, for the garden was awful. Tom was so"


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    metric = weir.logit_diff(" happy", " sad")

    found = weir.attribute(llm, HAPPY, SAD, metric=metric)
    print(f"logit difference: clean {found.baseline.clean:+.2f}, corrupt {found.baseline.corrupt:+.2f}")
    print(f"rows of the engine differ from the twin's by {found.twin_error:.0e} at most\n\n{found.table()}\n")

    heads = weir.attribute(llm, HAPPY, SAD, metric=metric, hooks="z", heads="all", positions="last_prompt", top_k=3)
    for head in heads.verified:
        print(f"block {head.site.layer}, head {head.head}: estimate {head.estimate:+.2f}, effect {head.effect:+.2f}")

    with tempfile.TemporaryDirectory() as folder:
        print([path.name for path in found.plot(Path(folder) / "attribution.png")])


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(weir.demo_model())
