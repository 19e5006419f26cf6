"""Beam search over HTTP, where vLLM takes each prompt's outputs in tasks of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm.utils.async_utils import merge_async_iterators

from vllm_weir.frontend.admission.reachable import current_search
from vllm_weir.patches import beam_search


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_each_search_has_its_own_prompt_in_whatever_task_it_goes_on(prompts):
    async def search(_self, prompt, _request_id, _params):
        for _ in range(3):
            await asyncio.sleep(0)
            this = current_search.get()
            # vLLM sends the beams of a step from tasks of their own.
            seen = await asyncio.create_task(asyncio.sleep(0, current_search.get()))
            yield len(prompt["prompt_token_ids"]), this.prompt_len, seen.prompt_len

    async def outputs():
        wrapped = beam_search.online(search, None)
        frontend = SimpleNamespace(universal=True)
        engine = SimpleNamespace(engine_client=SimpleNamespace(output_processor=SimpleNamespace()))
        setattr(engine.engine_client.output_processor, beam_search.FRONTEND, frontend)
        params = SimpleNamespace(max_tokens=4)
        generators = [
            wrapped(engine, {"type": "token", "prompt_token_ids": [0] * (5 + k)}, str(k), params)
            for k in range(prompts)
        ]
        found = [one async for one in merge_async_iterators(*generators)]
        return found, current_search.get(None)

    found, after = asyncio.run(outputs())
    assert sorted(found) == sorted((k, (5 + k,) * 3) for k in range(prompts) for _ in range(3))
    assert after is None, "what is sent later is no beam"
