"""Probe scores and mean rows instead of activations: what is not wanted never leaves the device."""

from pathlib import Path

from vllm import LLM, SamplingParams

import vllm_weir as weir

STORIES = ["Tom was happy and the garden was lovely.", "Tom was sad and the soup was cold."]


def main() -> None:
    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)

    # One row a story: the mean over its tokens, reduced in the worker.
    mean = weir.Capture("resid_post", layers=2, positions="prompt", reduce="mean")
    happy, sad = (
        out.activations["resid_post", 2][0].float()
        for out in llm.generate(STORIES, weir.params(SamplingParams(max_tokens=1), capture=mean))
    )

    # The direction between them is a probe. Its score at every token, instead of the token's row:
    weir.register(llm, "happy", (happy - sad) / (happy - sad).norm())
    score = weir.Capture("resid_post", layers=2, project="happy")
    params = weir.params(SamplingParams(max_tokens=12, temperature=0), capture=score)
    for out in llm.generate(["Anna was happy.", "Anna was sad."], params):
        scores = out.activations["resid_post", 2]
        print(out.prompt, "->", out.outputs[0].text.strip())
        print(f"  {len(scores)} scores, mean {scores.mean():+.2f}; bytes: {scores.numel() * 4}")

    # A notebook shows `out.activations` as its tokens, red where the score is above 0 and blue below. As a page:
    page = Path("scores.html")
    page.write_text(out.activations._repr_html_(), encoding="utf-8")
    print("written:", page, "| 'sad' is in it:", ">sad<" in page.read_text().replace("> ", ">"))

    # Or only the highest one.
    peak = weir.Capture("resid_post", layers=2, project="happy", reduce="max")
    (out,) = llm.generate("Anna was happy.", weir.params(SamplingParams(max_tokens=12, temperature=0), capture=peak))
    print("highest score", out.activations["resid_post", 2].tolist(), "by position", out.activations.positions.tolist())


if __name__ == "__main__":
    main()
