"""Offline: rows that go to files instead of coming back, some of them only if they are marked.

python examples/sink.py [MODEL] [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

PROMPTS = ["Tom went to the garden.", "Anna took the boat out early that morning.", "The market was open."]


def main(model: str, directory: str) -> None:
    sinks = {
        "archive": {"filesystem": {"url": directory, "layout": "per_request"}},
        # Every request's norms at block 2, in the log; the request does not have to ask.
        "norms": {"logging": {}, "capture": {"hook": "resid_post", "layers": 2}},
    }
    llm = LLM(
        model,
        max_model_len=256,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=not torch.cuda.is_available(),
        additional_config={"weir": {"sinks": sinks}},
    )
    plain = SamplingParams(max_tokens=12, temperature=0)
    always = weir.params(plain, capture=weir.Capture("resid_post", layers=[1, 3], sink="archive"))
    marked = weir.params(plain, capture=weir.Capture("resid_post", layers=[1, 3], sink="archive", keep="marked"))
    outs = llm.generate(PROMPTS, [always, marked, marked], use_tqdm=False)
    for out in outs:
        print(f"request {out.request_id}: {out.receipt.sinks}, {len(out.receipt.files)} files")
    longest = max(outs[1:], key=lambda out: len(out.prompt_token_ids))
    (ticket,) = weir.mark(longest.request_id, reason="the longest prompt")
    print(f"marked {longest.request_id}: {len(ticket.wait(60))} files")
    weir.flush(llm)
    for name, state in weir.sinks(llm).items():
        print(f"{name}: {state['sequences']} sequences, {state['failed']} failed")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as somewhere:
        main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model(), sys.argv[2] if len(sys.argv) > 2 else somewhere)
