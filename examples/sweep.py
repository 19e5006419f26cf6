"""Where the mood of a story is: every block and every token of a sad prompt gets the rows of a happy one.

The prompts differ in three words. A cell's number is how far the patch takes the model from saying "sad" to "happy".

python examples/sweep.py
"""

from __future__ import annotations

import torch
from vllm import LLM

import vllm_weir as weir

HAPPY = "Tom went to the garden. Tom grinned happily, for the garden was lovely. Tom was so"
SAD = "Tom went to the garden. Tom frowned sadly, for the garden was awful. Tom was so"


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, dtype="float32", max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    metric = weir.logit_diff(" happy", " sad")

    swept = weir.sweep(llm, HAPPY, SAD, metric=metric, checkpoint="mood.cells", progress=False)
    print(swept)
    shares = swept.normalised.sel(hook="resid_post")
    for layer in shares.axes["layer"]:
        row = shares.sel(layer=layer).array
        best = row.argsort()[::-1][:2]
        print(f"block {layer}:", ", ".join(f"{row[i]:+.2f} at '{swept.position_labels[i]}'" for i in best))
    print("written:", swept.plot("mood.png")[0], swept.plot("mood.html")[0], swept.save("mood.npz"))

    # Which heads bring it to the last token, straight into the stream that is unembedded?
    last = len(shares.axes["layer"]) - 1
    path = weir.sweep(
        llm, HAPPY, SAD, "z", positions=[-1], heads="all", metric=metric, to=("resid_post", last), progress=False
    )
    direct = path.normalised.sel(hook="z", position=-1)
    top = sorted(((direct[n, h], layer, h) for n, layer in enumerate(direct.axes["layer"]) for h in range(4)))[-3:]
    print("direct effects of heads:", ", ".join(f"{layer}.{head} {share:+.3f}" for share, layer, head in top[::-1]))


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(weir.demo_model())
