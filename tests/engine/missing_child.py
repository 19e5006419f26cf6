"""``python -m tests.engine.missing_child MODEL_DIR MODE [MODULE]``: requests with Weir's keys where Weir cannot load.

Prints ``FOUND`` and JSON: what becomes of them.

Modes: ``missing`` (Weir cannot import MODULE), ``core`` (it cannot in the process of the engine core and its worker),
``bare`` (that one does not load the plugin), ``async`` (``missing``, by ``AsyncLLM``), ``broken`` (Weir's own code
raises), ``plain`` (as the environment says), ``renamed`` (vLLM has another name for a function that Weir patches),
``unguarded`` (vLLM has no place for the guard).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from tests.support.engines import DEFAULTS, close_all, get_llm
from tests.support.without import WITHOUT, block
from vllm_weir.guard.refuse import cause_of

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": [11, 12, 13]}]
CAPTURE = {"v": 1, "capture": [{"hook": "resid_post", "layers": [1]}]}
KEYS: dict[str, dict[str, Any]] = {
    "weir": {"weir": CAPTURE},
    "text": {"weir": json.dumps(CAPTURE)},
    "lens": {"output_residual_stream": [1]},
    "steer": {"apply_steering_vectors": [{}]},
}


def sampling(extra: dict | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args=extra)


def offline(llm: Any) -> dict[str, Any]:
    """What each way to ask comes to, and the tokens of plain requests before and after."""
    import vllm_weir as weir

    def tokens() -> list:
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, sampling(), use_tqdm=False)]

    found: dict[str, Any] = {"tokens": tokens()}
    for name, extra in KEYS.items():
        try:
            out = llm.generate(PROMPTS, sampling(dict(extra)), use_tqdm=False)[0]
            found[name] = ["served", len(out.activations["resid_post", 1])]
        except weir.WeirError as e:
            found[name] = ["refused", e.field, e.message]
    for name in ("sites", "list"):
        try:
            getattr(weir, name)(llm)
            found[name] = ["served"]
        except weir.WeirError as e:
            found[name] = ["refused", e.field, e.message]
        except ImportError as e:  # a name that is imported when it is used says what Python says
            found[name] = ["refused", "import", cause_of(e)]
    found["goes_on"] = tokens() == found["tokens"]
    return found


def over_http() -> dict[str, Any]:
    """What vLLM's serving classes make of bodies, without a server: (code, field, message) of the refusal."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    import vllm_weir as weir

    bodies: dict[str, dict[str, Any]] = {
        "body": {"weir": CAPTURE},
        "xargs": {"vllm_xargs": {"weir": json.dumps(CAPTURE)}},
        "lens": {"vllm_xargs": {"output_residual_stream": [1]}},
        "extra_args": {"extra_args": {"apply_steering_vectors": [{}]}},
        "fork": {"steering_name": "happy"},
        "lora": {"lora_request": {"lora_name": "x"}},
    }
    status = OpenAIServingCompletion.create_completion.__weir_status__
    if status.serving_refusal is None:
        return {}
    found: dict[str, Any] = {}
    for name, body in bodies.items():
        completion = CompletionRequest(model="m", prompt="x", **body)
        answer = asyncio.run(object.__new__(OpenAIServingCompletion).create_completion(completion))
        found[f"completion {name}"] = [answer.error.code, answer.error.param, answer.error.message]
        chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **body)
        answer = asyncio.run(object.__new__(OpenAIServingChat).create_chat_completion(chat))
        found[f"chat {name}"] = [answer.error.code, answer.error.param, answer.error.message]
        if name != "lora":
            try:
                ResponsesRequest(model="m", input="x", **body).to_sampling_params(4)
                found[f"responses {name}"] = None
            except weir.WeirError as e:
                found[f"responses {name}"] = [400, e.field, e.message]
    return found


async def by_async_llm(model_dir: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import vllm_weir as weir

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model_dir, **DEFAULTS))
    found: dict[str, Any] = {}
    try:
        for name, extra in {"plain": None, **KEYS}.items():
            try:
                async for out in engine.generate(PROMPTS[0], sampling(extra), name):
                    found[name] = ["served", len(out.outputs[0].token_ids)]
            except weir.WeirError as e:
                found[name] = ["refused", e.field, e.message]
    finally:
        engine.shutdown()
    return found


def twice(model_dir: str) -> list[str]:
    """What two attempts to start an engine say, where the guard finds no place."""
    from vllm.v1.engine.output_processor import OutputProcessor

    del OutputProcessor.add_request
    said = []
    for _ in range(2):
        try:
            get_llm(model_dir)
            said.append("started")
        except RuntimeError as e:
            said.append(str(e))
    return said


def rename_a_patch_point() -> None:
    """As a later version of vLLM might, which goes on by itself."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    found = KVCacheManager.get_computed_blocks
    del KVCacheManager.get_computed_blocks
    start = Scheduler.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.kv_cache_manager.get_computed_blocks = found.__get__(self.kv_cache_manager)

    Scheduler.__init__ = init


def main(model_dir: str, mode: str, module: str = "") -> None:
    if mode in ("missing", "async"):
        block(module)
    elif mode == "core":
        os.environ[WITHOUT] = module
    elif mode == "bare":
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        os.environ["VLLM_PLUGINS"] = "another"
    elif mode == "broken":
        from vllm_weir.patches import registry

        def install(active: bool) -> None:
            raise ZeroDivisionError("of our own making")

        registry.install = install
    elif mode == "renamed":
        rename_a_patch_point()
    found: Any
    if mode == "unguarded":
        found = twice(model_dir)
    elif mode == "async":
        found = asyncio.run(by_async_llm(model_dir))
    else:
        found = offline(get_llm(model_dir, in_process=mode not in ("core", "bare")))
        found["http"] = (
            {} if mode == "renamed" else over_http()
        )  # there Weir's own serving answers, which wants an engine
    print("FOUND " + json.dumps(found))
    close_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
