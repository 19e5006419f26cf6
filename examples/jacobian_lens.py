"""Fit a Jacobian lens on the shipped model, read what each block is about to say, and steer along what the lens reads.

python examples/jacobian_lens.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from vllm import LLM, SamplingParams

import vllm_weir as weir

TEXTS = [
    "Tom went to the garden. Tom was happy. Tom saw a red ball and took it home to his mother.",
    "Anna took the boat out. Anna was sad. The boat was small and the wind was cold that day.",
    "Once upon a time there was a cat. The cat was sad because it had no ball to play with.",
]
PROMPT = "Tom went to the garden. Tom was so"
LAYER = 3


def main() -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    tokenizer = llm.get_tokenizer()
    with TemporaryDirectory() as folder:
        fitted = weir.fit_lens("demo", TEXTS, out=Path(folder) / "lens.pt", skip_first=4, progress=False)
        lens = weir.load_lens(llm, "stories", fitted)

        asked = weir.Lens(name="stories", top_k=3, positions="last_prompt")
        (out,) = llm.generate([PROMPT], weir.params(SamplingParams(max_tokens=1, temperature=0), lens=asked))
        for layer, likely in out.lens.items():
            print(f"after block {layer}:", [tokenizer.decode([int(token)]) for token in likely.token_ids[0]])

        sad, happy = (tokenizer.encode(f" {word}", add_special_tokens=False)[-1] for word in ("sad", "happy"))
        direction = lens.direction(sad, LAYER) - lens.direction(happy, LAYER)
        direction = direction / direction.norm()
        chosen = weir.Lens(name="stories", layers=LAYER, tokens=[sad, happy], positions="last_prompt")
        for scale in (-24, 0, 24):
            add = weir.Add(direction, layers=LAYER, scale=scale)
            params = weir.params(SamplingParams(max_tokens=1, temperature=0), interventions=[add], lens=chosen)
            (out,) = llm.generate([PROMPT], params)
            read_sad, read_happy = out.lens[LAYER].logprobs[0].tolist()
            print(
                f"{scale:+d}: sad over happy {read_sad - read_happy:+.1f} in the lens; it says{out.outputs[0].text!r}"
            )


if __name__ == "__main__":
    main()
