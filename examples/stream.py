"""Streaming: rows arrive with the tokens they belong to.

python examples/stream.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import vllm_weir as weir


async def read(engine: AsyncLLM) -> None:
    # DELTA: each output holds the new tokens only, and only the rows that no earlier output held.
    plain = SamplingParams(max_tokens=16, temperature=0, output_kind=RequestOutputKind.DELTA)
    params = weir.params(plain, capture=weir.Capture("resid_post", layers=3))
    parts = []
    async for out in engine.generate("Anna took the boat out early that morning.", params, request_id="story"):
        # Rows may still be on their way; waiting for them in a thread keeps the event loop free.
        acts = await asyncio.to_thread(lambda out=out: out.activations)
        parts.append(acts["resid_post", 3])
        print(f"{out.outputs[0].text!r:24} rows {acts.positions.tolist()}")
    print(f"{len(parts)} outputs, together {list(torch.cat(parts).shape)}")


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    arguments = AsyncEngineArgs(model=model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            await read(engine)
        finally:
            engine.shutdown()

    asyncio.run(run())


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
