"""The table of patches: which attributes of vLLM are wrapped, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.compat.vllm_lens.methods import METHODS
from vllm_weir.config.env import OFF
from vllm_weir.guard import refuse as guard
from vllm_weir.guard.import_hook import when_imported

logger = logging.getLogger(__name__)

RAN = ("0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""vLLM versions that ran; docs/explanation/limits.md says what was tested on each."""
READ: tuple[str, ...] = ()
"""vLLM versions whose source has every patch point (scripts/check_patch_points.py); nothing was run
on them."""

WORKER, CORE, FRONTEND, SERVER, EVERYWHERE = "worker", "engine core", "caller", "API server", "everywhere"


@dataclass(frozen=True)
class Patch:
    """One patch point: an attribute of vLLM that Weir wraps.

    Attributes:
        module, name: where it is, e.g. ``vllm.v1.engine.llm_engine`` and ``LLMEngine.__init__``.
        process: where the wrapper acts.
        purpose: what it is for, as `weir doctor` shows it.
        wrapper: ``module:function`` in `vllm_weir.patches`: takes the original and returns its
            replacement. None for what is only checked here, and wrapped on an instance once that
            exists (see `vllm_weir.patches.worker`).
        needs: parameters that the original must have.
        guard: whether the engine must not start without it.
        serving: whether only a server needs it; without it, requests over HTTP with Weir's keys are
            refused.
        variant: the model runner it belongs to, of which an engine uses one; empty for patches that
            every engine needs.
        recent: whether it belongs to a route or method whose module older versions of vLLM lack.
        cuda: whether its module can only be imported with vLLM's CUDA kernels.
    """

    module: str
    name: str
    process: str
    purpose: str
    wrapper: str | None = None
    needs: tuple[str, ...] = ()
    guard: bool = False
    serving: bool = False
    variant: str = ""
    recent: bool = False
    cuda: bool = False

    @property
    def path(self) -> str:
        return f"{self.module}:{self.name}"

    def find(self) -> Any:
        """Return the attribute of the installed vLLM.

        Raises:
            ImportError, AttributeError: if this vLLM does not have it.
            TypeError: if it has lost a parameter.
        """
        target: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            target = getattr(target, part)
        missing = set(self.needs) - set(inspect.signature(target).parameters) if self.needs else set()
        if missing:
            raise TypeError(f"it has no parameter {', '.join(sorted(missing))}")
        return target


_V1 = "vllm.v1"
_COMPLETION, _CHAT = "vllm.entrypoints.openai.completion", "vllm.entrypoints.openai.chat_completion"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_GENERATE = "vllm.entrypoints.generate"
_BEAMS = f"{_GENERATE}.beam_search"
_GRAPHS = f"{_V1}.worker.gpu.cudagraph_utils"
_RUNNER_1, _RUNNER_2 = f"{_V1}.worker.gpu_model_runner", f"{_V1}.worker.gpu.model_runner"
# fmt: off
PATCHES: tuple[Patch, ...] = (
    Patch("vllm.config.vllm", "VllmConfig.compute_hash", EVERYWHERE,
         "the traced graph's identity enters the compile-cache key", "scheduler:compute_hash"),
    Patch("vllm.sampling_params", "SamplingParams.clone", FRONTEND,
         "the copy of a request's params is made quickly", "sampling_params:clone"),
    Patch(f"{_V1}.engine.output_processor", "OutputProcessor.add_request", FRONTEND,
         "a request is checked before it enters the engine, or refused while Weir is off",
         "frontend:add_request", ("request",), guard=True),
    Patch(f"{_V1}.engine.output_processor", "OutputProcessor.__init__", FRONTEND,
         "the engine's tokenizer says which tokens are special", None, ("tokenizer",)),
    *(
        Patch(f"{_V1}.engine.output_processor", f"OutputProcessor.{name}", FRONTEND,
              "requests that only warm the engine up are not counted", None, ("req_state",))
        for name in ("_update_stats_from_output", "_update_stats_from_finished")
    ),
    Patch(f"{_V1}.metrics.loggers", "StatLoggerManager.record", FRONTEND,
         "steps of such requests are not counted", None, ("scheduler_stats", "iteration_stats")),
    Patch(f"{_V1}.engine.output_processor", "RequestState.__init__", FRONTEND,
         "sinks learn which of a request's sequences they get", None, ("request_index",)),
    Patch(f"{_V1}.engine.output_processor", "RequestState._new_completion_output", FRONTEND,
         "an output gets its rows", "frontend:new_completion_output", ("finish_reason",)),
    Patch(f"{_V1}.engine.output_processor", "RequestState._new_pooling_output", FRONTEND,
         "an output of pooling gets its rows", "frontend:new_pooling_output", ("pooling_output",)),
    *(
        Patch("vllm.outputs", f"{kind}RequestOutput.from_base", FRONTEND,
              "an output of pooling keeps its rows", "frontend:from_base", ("request_output",))
        for kind in ("Embedding", "Classification", "Scoring")
    ),
    Patch("vllm.entrypoints.llm", "LLM.score", FRONTEND,
         "scores whose texts are embedded one by one have no rows", "frontend:score", ("pooling_params",)),
    Patch("vllm.entrypoints.pooling.offline", "PoolingOfflineMixin._run_tiling_engine", FRONTEND,
         "a pooling request that was not steered as asked, or whose sink failed, fails once the batch is done",
         "frontend:run_engine", recent=True),
    Patch(f"{_V1}.engine.async_llm", "AsyncLLM.encode", FRONTEND,
         "a pooling request that was not steered as asked, or whose sink failed, fails",
         "frontend:async_llm_generate"),
    Patch("vllm.entrypoints.pooling.base.serving", "PoolingBaseServing.__call__", SERVER,
         "a route whose responses cannot carry rows refuses Weir's keys", "server:pooling", ("request", "raw_request"),
         serving=True, recent=True),
    Patch(f"{_V1}.engine.detokenizer", "IncrementalDetokenizer.update", FRONTEND,
         "a probe ends a sequence as a stop string does", None, ("new_token_ids", "stop_terminated")),
    Patch(f"{_V1}.engine.core_client", "InprocClient.get_output", FRONTEND,
         "tokens wait for the scores of probes that may end the sequence", "held_outputs:get_output"),
    Patch(f"{_V1}.engine.core_client", "SyncMPClient.get_output", FRONTEND,
         "tokens wait for the scores of probes that may end the sequence", "held_outputs:get_output"),
    Patch(f"{_V1}.engine.core_client", "AsyncMPClient.get_output_async", FRONTEND,
         "tokens wait for the scores of probes that may end the sequence", "held_outputs:get_output_async"),
    Patch("vllm.outputs", "RequestOutput.add", FRONTEND,
         "outputs merged for a slow reader keep their rows", "frontend:merge_outputs", ("next_output", "aggregate")),
    Patch(f"{_V1}.engine.llm_engine", "LLMEngine.__init__", FRONTEND,
         "settings are checked and the workers asked what they serve", "frontend:llm_engine_init"),
    Patch(f"{_V1}.engine.llm_engine", "LLMEngine.collective_rpc", FRONTEND,
         "hook points that are computed from weights follow new weights", "frontend:collective_rpc", ("method",)),
    Patch("vllm.entrypoints.llm", "LLM._run_engine", FRONTEND,
         "a request that was not steered as asked, or whose sink failed, fails once the batch is done",
         "frontend:run_engine"),
    Patch("vllm.entrypoints.llm", "LLM.beam_search", FRONTEND,
         "beams are steered, and those that are returned get their rows", "beam_search:beam_search",
         ("prompts", "params")),
    Patch(f"{_BEAMS}.utils", "BeamSearchSequence.get_prompt", FRONTEND,
         "the request of a beam says where its prompt ends", "beam_search:get_prompt", recent=True),
    Patch(f"{_BEAMS}.online", "BeamSearchOnlineMixin.beam_search", SERVER,
         "what steers every request acts on beams where it should", "beam_search:online",
         ("prompt", "request_id", "params"), serving=True, recent=True),
    Patch(f"{_V1}.engine.async_llm", "AsyncLLM.__init__", FRONTEND,
         "settings are checked", "frontend:async_llm_init"),
    Patch(f"{_V1}.engine.async_llm", "AsyncLLM.add_request", FRONTEND,
         "the workers are asked what they serve, once", "frontend:async_llm_add_request", ("params",)),
    Patch(f"{_V1}.engine.async_llm", "AsyncLLM.collective_rpc", FRONTEND,
         "hook points that are computed from weights follow new weights", "frontend:async_collective_rpc", ("method",)),
    Patch(f"{_V1}.engine.async_llm", "AsyncLLM.generate", FRONTEND,
         "a request that was not steered as asked, or whose sink failed, fails", "frontend:async_llm_generate"),
    Patch(f"{_COMPLETION}.serving", "OpenAIServingCompletion.__init__", SERVER,
         "the server's limits are read when it starts", "server:init", serving=True),
    Patch(f"{_COMPLETION}.serving", "OpenAIServingCompletion.create_completion", SERVER,
         "what the body asks of Weir is read, and the result added to the response", "server:create", ("request",),
         serving=True),
    Patch(f"{_COMPLETION}.serving", "OpenAIServingCompletion.request_output_to_completion_response", SERVER,
         "a completion's rows are collected", "server:completion_response", ("final_res_batch",), serving=True),
    Patch(f"{_COMPLETION}.serving", "OpenAIServingCompletion.completion_stream_generator", SERVER,
         "a streamed completion's rows are collected and sent", "server:stream", ("request", "result_generator"),
         serving=True),
    Patch(f"{_COMPLETION}.protocol", "CompletionRequest.to_sampling_params", SERVER,
         "what the body asks of Weir enters the sampling parameters", "server:to_sampling_params", serving=True),
    Patch(f"{_CHAT}.serving", "OpenAIServingChat.create_chat_completion", SERVER,
         "what the body asks of Weir is read, and the result added to the response", "server:create", ("request",),
         serving=True),
    Patch(f"{_CHAT}.serving", "OpenAIServingChat.chat_completion_full_generator", SERVER,
         "a chat's rows are collected", "server:chat_response", ("result_generator",), serving=True),
    Patch(f"{_CHAT}.serving", "OpenAIServingChat.chat_completion_stream_generator", SERVER,
         "a streamed chat's rows are collected and sent", "server:stream", ("request", "result_generator"),
         serving=True),
    Patch(f"{_CHAT}.protocol", "ChatCompletionRequest.to_sampling_params", SERVER,
         "what the body asks of Weir enters the sampling parameters", "server:to_sampling_params", serving=True),
    Patch(f"{_TOKENS}.serving", "ServingTokens.serve_tokens", SERVER,
         "what extra_args ask of Weir is read, and the result added to the response", "server:serve_tokens",
         ("request",), serving=True, recent=True),
    Patch(f"{_TOKENS}.serving", "ServingTokens.serve_tokens_full_generator", SERVER,
         "rows of generated tokens are collected", "server:chat_response", ("result_generator",), serving=True,
         recent=True),
    Patch("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest.to_sampling_params", SERVER,
         "a route whose responses cannot carry rows refuses Weir's keys", "server:to_sampling_params",
         serving=True),
    Patch("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages.create_messages", SERVER,
         "a route that ignores unknown fields refuses Weir's keys", "server:without_room",
         ("request", "raw_request"), serving=True),
    Patch(f"{_GENERATE}.generative_scoring.serving", "ServingGenerativeScoring.create_generative_scoring", SERVER,
         "a route that cannot serve Weir's keys refuses them", "server:without_room", ("request", "raw_request"),
         serving=True, recent=True),
    Patch(f"{_GENERATE}.structured_decisions.serving", "ServingStructuredDecisions.create_decision", SERVER,
         "a route that cannot serve Weir's keys refuses them", "server:without_room", ("request", "raw_request"),
         serving=True, recent=True),
    Patch(f"{_V1}.core.kv_cache_manager", "KVCacheManager.get_computed_blocks", CORE,
         "a prefix-cache hit never passes a wanted position", "scheduler:get_computed_blocks", ("request",)),
    Patch(f"{_V1}.core.kv_cache_utils", "generate_block_hash_extra_keys", CORE,
         "blocks of the KV cache that an intervention changed have keys of their own",
         "scheduler:block_hash_extra_keys", ("request", "start_token_idx", "end_token_idx")),
    Patch(f"{_V1}.kv_cache_interface", "KVCacheConfig.needs_kv_cache_zeroing", CORE,
         "on a CPU, blocks of the KV cache are zeroed before a request gets them", "scheduler:needs_kv_cache_zeroing"),
    Patch(f"{_V1}.core.sched.scheduler", "Scheduler.add_request", CORE,
         "requests wait while the steering tables are full", "scheduler:scheduler_add_request", ("request",)),
    Patch(f"{_V1}.core.sched.scheduler", "Scheduler.finish_requests", CORE,
         "waiting requests can be aborted", "scheduler:finish_requests", ("request_ids", "finished_status")),
    Patch(f"{_V1}.core.sched.scheduler", "Scheduler.schedule", CORE,
         "waiting requests enter; a step never records more rows than the ring holds", "scheduler:schedule"),
    Patch(f"{_V1}.core.sched.scheduler", "Scheduler._try_schedule_encoder_inputs", CORE,
         "images whose positions attend to later ones are not split", None, ("request", "num_computed_tokens")),
    Patch(f"{_V1}.core.sched.scheduler", "Scheduler._handle_invalid_blocks", CORE,
         "requests whose KV was not loaded are planned anew", None),
    Patch(_CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens", CORE,
         "a KV connector's hit never passes a wanted position", None, ("request", "num_computed_tokens")),
    Patch(_CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc", CORE,
         "a KV connector that goes by token ids is not told of steered requests", None, ("request",)),
    Patch(_CONNECTOR, "KVConnectorBase_V1.build_connector_meta", CORE,
         "a KV connector that goes by token ids is not told of steered requests", None, ("scheduler_output",)),
    Patch(_CONNECTOR, "KVConnectorBase_V1.request_finished", CORE,
         "steered keys and values are not handed to other engines", None, ("request",)),
    Patch(f"{_V1}.worker.worker_base", "WorkerWrapperBase.init_device", WORKER,
         "the worker and its runner are patched", "worker:init_device"),
    Patch(f"{_V1}.worker.gpu_worker", "Worker.load_model", WORKER, "the taps are placed once the model is loaded"),
    Patch(f"{_V1}.worker.gpu_worker", "Worker.determine_available_memory", WORKER,
         "the garbage collector skips what is older than tracing"),
    Patch(f"{_V1}.worker.gpu_worker", "Worker.compile_or_warm_up_model", WORKER,
         "the taps' kernels are compiled before CUDA graphs are captured"),
    Patch(f"{_V1}.worker.gpu_worker", "Worker.shutdown", WORKER, "threads and host memory are released", None),
    Patch(_RUNNER_1, "GPUModelRunner._prepare_inputs", WORKER, "runner V1: the batch's order and spans", None,
         ("scheduler_output", "num_scheduled_tokens"), variant="V1"),
    Patch(_RUNNER_1, "GPUModelRunner.execute_model", WORKER, "runner V1: requests join and leave, rows are sent", None,
         ("scheduler_output",), variant="V1"),
    Patch(_RUNNER_1, "GPUModelRunner.sample_tokens", WORKER, "runner V1: which drafts were accepted", None,
         variant="V1"),
    Patch(_RUNNER_1, "GPUModelRunner._dummy_run", WORKER, "runner V1: dummy passes record nothing", None,
         ("num_tokens",), variant="V1"),
    Patch(_RUNNER_2, "GPUModelRunner.prepare_inputs", WORKER, "runner V2: the batch's order and spans", None,
         ("scheduler_output", "batch_desc"), variant="V2"),
    Patch(_RUNNER_2, "GPUModelRunner.execute_model", WORKER, "runner V2: requests join and leave, rows are sent", None,
         ("scheduler_output", "dummy_run"), variant="V2"),
    Patch(_RUNNER_2, "GPUModelRunner.sample_tokens", WORKER, "runner V2: which drafts were accepted", None,
         variant="V2"),
    Patch(_RUNNER_2, "GPUModelRunner._dummy_run", WORKER, "runner V2: dummy passes record nothing", None,
         ("num_tokens",), variant="V2"),
    Patch(_RUNNER_2, "GPUModelRunner.capture_model", WORKER, "runner V2: the capture of its graphs is patched", None,
         variant="V2"),
    Patch(_RUNNER_2, "GPUModelRunner.shutdown", WORKER, "runner V2: the live graphs are released", None, variant="V2"),
    Patch(_GRAPHS, "ModelCudaGraphManager.capture", WORKER, "runner V2: a second set of graphs, with live taps", None,
         variant="V2"),
    Patch(_GRAPHS, "CudaGraphManager.dispatch", WORKER, "runner V2: a step replays from the set it needs", None,
         ("num_reqs", "num_tokens"), variant="V2"),
    Patch("vllm.compilation.passes.fusion.allreduce_rms_fusion", "AllReduceFusionPass.__call__", WORKER,
         "taps do not keep vLLM from fusing all-reduce and norm", "allreduce_fusion:apply", ("graph",),
         cuda=True),
    Patch("vllm.compilation.cuda_graph", "CUDAGraphWrapper.clear_graphs", WORKER,
         "runner V2: the piecewise graphs of both sets", variant="V2"),
    Patch("vllm.compilation.monitor", "validate_cudagraph_capturing_enabled", WORKER,
         "runner V2: live graphs may be captured while the engine serves", variant="V2"),
)
# fmt: on


@dataclass
class PatchStatus:
    """Whether Weir works in this process, and what failed if not."""

    active: bool  # False when Weir is disabled: only the guard is installed, and it refuses
    # path of a patch -> what is wrong. Any entry refuses every request with Weir's keys.
    problems: dict[str, str] = field(default_factory=dict)
    # likewise, of patches that only a server needs; refuses requests over HTTP
    serving_problems: dict[str, str] = field(default_factory=dict)
    # why Weir's own code could not be loaded, or None. It refuses every request with Weir's keys.
    failure: str | None = None
    serving_failure: str | None = None  # likewise, of code that only a server needs; refuses requests over HTTP

    def note(self, patch: Patch, why: str) -> None:
        (self.serving_problems if patch.serving else self.problems)[patch.path] = why

    def fail(self, patch: Patch, e: Exception) -> None:
        """Record that Weir's own code for a patch could not be loaded."""
        why = guard.cause_of(e)
        if why not in (self.failure, self.serving_failure):
            logger.error("requests with Weir's keys are refused: %s", why, exc_info=e)
        if patch.serving:
            self.serving_failure = self.serving_failure or why
        else:
            self.failure = self.failure or why

    @property
    def refusal(self) -> str | None:
        """Why requests with Weir's keys are refused in this process; None if they are served."""
        if not self.active:
            return OFF
        return self.failure or _problem_text(self.problems)

    @property
    def serving_refusal(self) -> str | None:
        return self.refusal or self.serving_failure or _problem_text(self.serving_problems)


def _problem_text(problems: dict[str, str]) -> str | None:
    if not problems:
        return None
    first, why = next(iter(problems.items()))
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"Weir could not patch {first} of this vLLM ({why}){more}; `weir doctor` shows every patch point"


def install(active: bool) -> PatchStatus:
    """Make every patch of this process, each as soon as its module is imported.

    With `active` False only the guard. Raises Unguarded if the guard cannot be installed, because then the engine would
    ignore Weir's keys.
    """
    status = PatchStatus(active)
    if active:
        when_imported("vllm.entrypoints.llm", _add_methods)
    for patch in PATCHES:
        if patch.wrapper is None or not (active or patch.path in guard.GUARDS):
            continue
        if _module_exists(patch.module):
            when_imported(patch.module, functools.partial(_apply, patch, status))
        elif not patch.recent:
            status.note(patch, "the module does not exist")
        if patch.guard and patch.path in status.problems:
            raise guard.Unguarded(f"Weir cannot guard this vLLM: {patch.path}: {status.problems[patch.path]}")
    return status


def _add_methods(llm: Any) -> None:
    for method in METHODS:
        setattr(llm.LLM, method.__name__, method)


def _apply(patch: Patch, status: PatchStatus, _module: object) -> None:
    try:
        found = guard.unguarded(patch.find())
        original: Any = found.fget if isinstance(found, property) else found
        if getattr(original, "__weir__", None) == patch.path:
            return
        wrapper = _wrapped(patch, original, status)
        if wrapper is None:
            return
        owner_name, _, attribute = patch.name.rpartition(".")
        module = importlib.import_module(patch.module)
        owner = getattr(module, owner_name) if owner_name else module
        replacement = property(wrapper) if isinstance(found, property) else wrapper
        if isinstance(inspect.getattr_static(owner, attribute), staticmethod):
            replacement = staticmethod(wrapper)
        setattr(owner, attribute, replacement)
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        status.note(patch, str(e))
        logger.error("Weir could not patch %s: %s", patch.path, e)
        if patch.guard:
            raise guard.Unguarded(f"Weir cannot guard this vLLM: {patch.path}: {e}") from e


def _wrapped(patch: Patch, original: Any, status: PatchStatus) -> Any:
    """Return what replaces `original`: Weir's wrapper, else the guard's; None if nothing is guarded there."""
    if status.active and status.failure is None:
        try:
            wrapper: Any = functools.wraps(original)(_load_wrapper(patch)(original, status))
            wrapper.__weir__, wrapper.__weir_status__ = patch.path, status
            return wrapper
        except Exception as e:  # noqa: BLE001 - whatever a missing or broken package raises becomes the refusal
            status.fail(patch, e)
    return guard.guarded(patch.path, original, status) if patch.path in guard.GUARDS else None


def _load_wrapper(patch: Patch) -> Callable[[Any, PatchStatus], Any]:
    module, _, function = (patch.wrapper or "").partition(":")
    return getattr(importlib.import_module(f"vllm_weir.patches.{module}"), function)


def unloadable() -> list[str]:
    """Return why wrappers' modules cannot be imported, each cause once."""
    causes: dict[str, None] = {}
    for patch in PATCHES:
        if patch.wrapper is not None and _module_exists(patch.module):
            try:
                _load_wrapper(patch)
            except Exception as e:  # noqa: BLE001 - as in `_wrapped`
                causes[guard.cause_of(e)] = None
    return list(causes)


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def verify() -> list[tuple[Patch, str]]:
    """Return every patch with what is wrong with it (empty: nothing).

    Imports all modules of the table that can be imported on this platform.
    """
    from vllm.platforms import current_platform

    found = []
    for patch in PATCHES:
        absent = patch.recent and not _module_exists(patch.module)
        if absent or (patch.cuda and not current_platform.is_cuda()):
            found.append((patch, ""))
            continue
        try:
            patch.find()
            found.append((patch, ""))
        except (ImportError, AttributeError, TypeError, ValueError) as e:
            found.append((patch, f"{type(e).__name__}: {e}"))
    return found
