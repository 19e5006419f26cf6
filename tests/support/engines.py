"""Live `vllm.LLM` engines, shared by the tests that ask for the same one.

A start costs seconds and memory, so an engine is kept until another is asked for: order tests by their engine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.support.without import WITHOUT, block
from tests.support.zygote import fork_instead_of_spawn, import_vllm, inspect_models_here, keep_frozen

if TYPE_CHECKING:
    from vllm import LLM

DEFAULTS: dict[str, Any] = dict(
    dtype="float32",
    max_model_len=256,
    enforce_eager=True,
    # With this and enforce_eager the CPU worker skips its warm-up run, and does not claim a share of the machine.
    kv_cache_memory_bytes=64 << 20,
    seed=0,
    disable_log_stats=True,
)
if torch.version.cuda is not None:
    # vLLM wants this share to be free at a start, and processes of an engine that was just closed may not be gone yet.
    # Several test processes on one GPU set less.
    DEFAULTS["gpu_memory_utilization"] = float(os.environ.get("WEIR_TEST_GPU_SHARE", "0.5"))
# So the tests of tests/engine run with CUDA graphs, too: CONTRIBUTING.md, "On a GPU".
DEFAULTS |= json.loads(os.environ.get("WEIR_TEST_ENGINE", "{}"))

# Set on import, because vLLM and the hub client read some of these on theirs: import this module first.
for _name, _value in {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it vLLM compiles what ranks logprobs, even if no model is compiled: seconds for each engine."""

_alive: dict[str, LLM] = {}


def get_llm(
    model_dir: str | Path,
    *,
    in_process: bool = True,
    env: Mapping[str, str] | None = None,
    keep: int = 1,
    **kw: Any,
) -> LLM:
    """An engine for `model_dir` with `DEFAULTS` overridden by `kw`; the same arguments give the same engine.

    `in_process` runs the scheduler and the worker in this process: the quickest start, and monkeypatching reaches all
    of it. Without it vLLM starts its usual processes, as in production; parallel sizes above 1 imply that.
    `env` holds while the engine starts (its child processes keep it). vLLM loads plugins once per process: in this one,
    what a plugin reads on loading is fixed by the first engine, so pass `in_process=False` to vary it.
    At most `keep` engines stay alive; one closed to make room must not be used again.
    """
    arguments = {"model": str(model_dir)} | DEFAULTS | kw
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    if any(arguments.get(size, 1) > 1 for size in sizes):
        in_process = False
    env = dict(env or {}) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
    if arguments["enforce_eager"] and torch.version.cuda is None:
        env = EAGER | env
    key = repr((sorted(arguments.items()), sorted((_settings() | env).items())))
    if key in _alive:
        _alive[key] = _alive.pop(key)  # the last used is the last to go
        return _alive[key]

    while len(_alive) >= max(1, keep):
        _close(next(iter(_alive)))
    with environment(env), quick_start() if in_process else quick_processes():
        from vllm import LLM

        llm = LLM(**arguments)
    _alive[key] = llm
    if in_process and (changed := _classes_of_transformers_that_vllm_changed()):
        close_all()
        raise AssertionError(f"{changed}: later tests of this process could not use them; pass in_process=False")
    return llm


@cache
def hold_graph_pool() -> torch.cuda.CUDAGraph:
    """Capture a graph into the pool of vLLM's graphs, and keep it.

    All engines of a process have one pool, and PyTorch does not take up one again whose last graph has gone before all
    of its tensors.
    """
    from vllm.platforms import current_platform

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=current_platform.get_global_graph_pool()):
        torch.zeros(1, device="cuda")
    return graph


def _classes_of_transformers_that_vllm_changed() -> list[str]:
    """Name the classes that vLLM's backend for models of transformers has changed in this process for good."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    changed = TorchCompileWithNoGuardsWrapper.__subclasses__()
    return [cls.__name__ for cls in changed if cls.__module__.startswith("transformers.")]


def close_all() -> None:
    """Stop every engine; safe to call at any time, and again."""
    while _alive:
        _close(next(iter(_alive)))


def _close(key: str) -> None:
    from vllm.utils import func_utils

    llm = _alive.pop(key)
    try:
        shut_down(llm)
    finally:
        # vLLM remembers the functions whose keywords it asked for: those that Weir puts around modules hold the ring.
        for name in ("supports_kw", "_supports_kw"):
            if (remembered := getattr(func_utils, name, None)) and hasattr(remembered, "cache_clear"):
                remembered.cache_clear()
        # The caller may still hold the engine; let go of what we can before the next one takes memory.
        del llm
        gc.collect()


def shut_down(llm: LLM) -> None:
    """End an engine; its memory is there for the next one once nobody holds it and garbage has been collected."""
    with _collector_at_rest():
        # Its processes do not end by themselves in the five seconds that it gives them.
        llm.llm_engine.engine_core.shutdown(timeout=0)


def _settings() -> dict[str, str]:
    """What the environment says about the engine, beyond its arguments (vLLM itself writes to other `VLLM_*` names)."""
    return {k: v for k, v in os.environ.items() if k.startswith("WEIR_") or k == "VLLM_PLUGINS"}


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """While this holds, an engine that starts in this process passes over what was there before.

    In a process that has imported transformers and all tests, collections of garbage take longer than the rest of a
    start. They pass over what is imported before the first engine.
    """
    if torch.version.cuda is None:
        import_vllm()
    else:
        hold_graph_pool()
    with _collector_at_rest():
        yield


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """While this holds, nobody collects garbage, and nobody freezes or unfreezes objects.

    vLLM collects several times during a start and an end. It freezes an engine with the rest, and unfreezes all when
    the engine ends: the collection that frees it would then visit everything that was ever imported.
    """
    with (
        mock.patch.object(gc, "collect"),
        mock.patch.object(gc, "freeze"),
        mock.patch.object(gc, "unfreeze"),
        mock.patch.object(gc, "get_freeze_count", lambda: 1),  # counting them visits each
    ):
        yield


@contextlib.contextmanager
def quick_processes() -> Iterator[None]:
    """While this holds, processes that vLLM spawns are forks of one that has imported vLLM.

    That is not this process, which has run engines and tests: like spawned ones, they have nothing of it but what they
    are handed and its environment.
    """
    from multiprocessing import context, popen_forkserver, set_forkserver_preload

    if torch.version.cuda is not None:
        # References may have used the driver here, which forks of this process could not use then.
        with environment({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}):
            yield
        return

    class Popen(popen_forkserver.Popen):
        def __init__(self, process: Any) -> None:
            process._args = (dict(os.environ), process._target, *process._args)
            process._target = _with_environment
            super().__init__(process)

    inspect_models_here()
    set_forkserver_preload(["tests.support.preload"])
    before = context.SpawnProcess._Popen
    context.SpawnProcess._Popen = staticmethod(Popen)  # type: ignore[assignment]
    try:
        yield
    finally:
        context.SpawnProcess._Popen = staticmethod(before)  # type: ignore[assignment]


def _with_environment(environment: Mapping[str, str], target: Any, *arguments: Any, **more: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    fork_instead_of_spawn()
    keep_frozen()
    if WITHOUT in os.environ:
        block(os.environ[WITHOUT])
    target(*arguments, **more)


def async_llm(model_dir: str | Path, **kw: Any) -> Any:
    """An `AsyncLLM` for `model_dir` with `DEFAULTS` overridden by `kw`; the caller shuts it down."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    close_all()
    with quick_processes():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model_dir), **DEFAULTS | kw))


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set `values` for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
