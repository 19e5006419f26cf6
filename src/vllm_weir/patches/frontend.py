"""Wrappers in the caller's process: of engines, requests and outputs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm_weir.compat.mi_patch.environment import settings_of
from vllm_weir.compat.vllm_lens.request import lens_field, read, to_weir
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import warming
from vllm_weir.frontend.admission.reachable import Vocabulary, current_search
from vllm_weir.frontend.controllers import check_controllers
from vllm_weir.frontend.controllers import set_up as set_up_controllers
from vllm_weir.frontend.engine import Engine
from vllm_weir.frontend.engine_frontend import EngineFrontend, RequestObserver
from vllm_weir.frontend.lookup import FRONTEND, TRACKER, ask_workers, parts_of, unreported
from vllm_weir.frontend.pacing import entry_of
from vllm_weir.frontend.receive.release import HeldSequences, holding
from vllm_weir.frontend.sinks.manager import check_sinks
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.guard.outputs import VIEW as _VIEW
from vllm_weir.guard.request_errors import WeirFailure, WeirRequestError
from vllm_weir.guard.request_extras import extras_in, extras_of, replace_extras
from vllm_weir.patches.held_outputs import READER, OutputReader, StoppableDetokenizer
from vllm_weir.patches.kv_connectors import unknown_connector
from vllm_weir.patches.media import RENDERER, forget_items, media_of
from vllm_weir.patches.model.unembedding import refuse_adapter
from vllm_weir.patches.speculation import traits_of
from vllm_weir.patches.unsupported import refusal_of
from vllm_weir.schema.keys import KEYS, WIRE_KEY, carries_keys, refuse_slips

if TYPE_CHECKING:
    from vllm_weir.frontend.outputs.view import OutputView
    from vllm_weir.frontend.tracing import RequestTrace
    from vllm_weir.patches.registry import PatchStatus


def add_request(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``OutputProcessor.add_request``: admit or refuse requests that carry Weir's keys."""

    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        extras = extras_of(request)
        tracker = observer = traced = None
        frontend = getattr(self, FRONTEND, None)
        if extras or (frontend is not None and frontend.universal):
            observer, traced = _observer_of(frontend), _trace_of(self, request)
            try:
                if extras:
                    refuse_slips(extras)
                if carries_keys(extras) or (frontend is not None and frontend.universal):
                    tracker = _admit(self, request, status)
            except WeirError as e:
                _count_refusal(observer, traced, e)
                forget_items(self, request)
                raise WeirRequestError(e.message, lens_field(e.field)) from None
        original(self, request, *args, **kwargs)
        if tracker is not None:
            assert frontend is not None, "only an engine frontend admits"
            if (held := holding.get()) is not None:
                held.add(frontend.store, tracker.pending)
            state = self.request_states[request.request_id]
            caller = getattr(state, "external_req_id", None) or request.request_id  # older versions lack the attribute
            tracker.name(caller, state.request_index)
            if observer is not None:
                observer.admitted()
            if traced is not None:
                traced.span("admission")
                tracker.pending.trace = traced
            setattr(state, TRACKER, tracker)
            if tracker.held is not None:
                state.detokenizer = StoppableDetokenizer(state.detokenizer, tracker.held)
            frontend.pacing.add_own(state)

    return wrapper


def _observer_of(frontend: EngineFrontend | None) -> RequestObserver | None:
    return None if frontend is None or warming.get() else frontend.observer


def _count_refusal(observer: RequestObserver | None, traced: RequestTrace | None, error: WeirError) -> None:
    if observer is not None:
        observer.refused()
    if traced is not None:
        traced.span("admission", error)


def _trace_of(output_processor: Any, request: Any) -> RequestTrace | None:
    """Return what records a request's spans; None where vLLM does not trace requests."""
    if not getattr(output_processor, "tracing_enabled", False) or warming.get():
        return None
    from vllm_weir.frontend.tracing import RequestTrace

    return RequestTrace(getattr(request, "external_req_id", None) or request.request_id, request.trace_headers)


def _admit(output_processor: Any, request: Any, status: PatchStatus) -> Tracker:
    if status.refusal is not None:
        raise WeirError(status.refusal, WIRE_KEY)
    frontend: EngineFrontend | None = getattr(output_processor, FRONTEND, None)
    if frontend is None:
        raise WeirError("this engine was built without Weir's knowledge", WIRE_KEY)
    if request.resumable:
        raise WeirError("streamed input is not served; send the whole prompt", WIRE_KEY)
    ids, continuation = request.prompt_token_ids, None
    length = len(ids) if ids is not None else len(request.prompt_embeds)
    if (search := current_search.get()) is not None:
        continuation, length = search.continuation(ids), search.prompt_len
    if not all(getattr(request, "prompt_is_token_ids", None) or ()):
        ids = None  # where a part of the prompt is embeddings, its ids are placeholders
    params, extras = request.sampling_params, extras_of(request) or {}
    if params is None:
        max_tokens, streams = 1, False
    else:
        max_tokens, streams = params.max_tokens, params.output_kind.name != "FINAL_ONLY"
    if continuation is not None:
        ids, max_tokens = None if ids is None else ids[:length], max_tokens + len(continuation.token_ids)
    has_embeddings, media = request.prompt_embeds is not None, media_of(request)
    wire = extras.get(WIRE_KEY)
    if request.lora_request is not None and isinstance(wire, dict) and wire.get("lens") is not None:
        refuse_adapter(request.lora_request, "lens")
    try:
        asked = to_weir(extras, frontend.served)
    except WeirError:
        frontend.engine.require_capabilities()  # why nothing is served comes before what is wrong in the request
        raise
    tracker, engine_request = frontend.admit(
        request.request_id,
        asked,
        ids,
        length,
        max_tokens,
        streams,
        has_embeddings,
        params is None,
        continuation,
        media,
    )
    # The engine gets a copy that carries the EngineRequest; the caller may use its own params
    # again.
    carried: dict[str, Any] = {k: v for k, v in extras.items() if k not in KEYS}
    if engine_request is not None:
        carried[WIRE_KEY] = engine_request
    replace_extras(request, carried)
    return tracker


def new_completion_output(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``RequestState._new_completion_output``: give the output its `OutputView`."""

    def wrapper(self: Any, token_ids: list[int], finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, token_ids, finish_reason, *args, **kwargs)
        tracker = getattr(self, TRACKER, None)
        if tracker is not None:
            delta = self.output_kind.name == "DELTA"
            generated = self.detokenizer.output_token_ids
            if not delta:
                # vLLM hands out the list that it goes on appending to; rows and tokens of one
                # output must agree.
                output.token_ids = list(output.token_ids)
            reason = None if finish_reason is None else str(finish_reason)
            setattr(output, _VIEW, tracker.view(generated, delta, reason, self.num_cached_tokens))
        return output

    return wrapper


def run_engine(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``LLM._run_engine`` or its like for pooling: raise once the batch is done if a request failed."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        # Raising between two steps would leave the rest of the batch in the engine.
        try:
            for output in outputs:
                for completion in parts_of(output):
                    view = getattr(completion, _VIEW, None)
                    if view is not None:
                        _verify(view)
        except WeirError as e:
            e.outputs = outputs  # those of the other requests are complete
            raise
        return outputs

    return wrapper


def new_pooling_output(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``RequestState._new_pooling_output``: give the output its `OutputView`."""

    def wrapper(self: Any, pooling_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, pooling_output, *args, **kwargs)
        tracker = getattr(self, TRACKER, None)
        if tracker is not None:
            reason = "stop" if pooling_output.numel() else "abort"  # vLLM's placeholder is empty
            setattr(output, _VIEW, tracker.view((), False, reason, self.num_cached_tokens))
        return output

    return wrapper


def from_base(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``from_base`` of an output of pooling, which makes it of a plainer one: it keeps the view."""

    def wrapper(request_output: Any) -> Any:
        made = original(request_output)
        view = getattr(request_output.outputs, _VIEW, None)
        if view is not None:
            setattr(made.outputs, _VIEW, view)
        return made

    return wrapper


def score(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``LLM.score``: what Weir returns has a place only where a pair of texts is one prompt."""

    def wrapper(self: Any, *args: Any, pooling_params: Any = None, **kwargs: Any) -> Any:
        if carries_keys(extras_in(pooling_params)) and getattr(self, "pooling_task", None) != "classify":
            raise WeirRequestError(
                "this model embeds the texts of a pair one by one, so a score has no rows of its own; use LLM.embed, "
                "and compare the embeddings",
                "pooling_params",
            )
        return original(self, *args, pooling_params=pooling_params, **kwargs)

    return wrapper


def merge_outputs(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``RequestOutput.add``: outputs merged for a slow reader keep their rows."""

    def wrapper(self: Any, next_output: Any, aggregate: Any, *args: Any, **kwargs: Any) -> None:
        later = {c.index: getattr(c, _VIEW, None) for c in next_output.outputs}
        for completion in next_output.outputs:  # vLLM looks at `routed_experts`, which would wait for the view's rows
            vars(completion).pop(_VIEW, None)
        original(self, next_output, aggregate, *args, **kwargs)
        for completion in next_output.outputs:
            if later[completion.index] is not None:
                setattr(completion, _VIEW, later[completion.index])
        for completion in self.outputs:
            view, new = getattr(completion, _VIEW, None), later.get(completion.index)
            if view is not None and new is not None and view is not new:
                view.extend(new)

    return wrapper


def _make_frontend(engine: Any, status: PatchStatus, hold: bool) -> EngineFrontend:
    config = engine.vllm_config
    settings = settings_of(config.additional_config)
    parallel = config.parallel_config
    host = None
    if may_be_remote(parallel):
        from vllm.utils.network_utils import get_ip

        host = get_ip()
    chunked = bool(config.scheduler_config.enable_chunked_prefill)
    refusal = status.refusal or refusal_of(config)
    model = config.model_config
    vocabulary = Vocabulary(model.get_vocab_size(), engine.output_processor.tokenizer)
    both_ways = bool(model.is_mm_prefix_lm)
    traits = replace(
        traits_of(config),
        kv_connector=unknown_connector(config),
        media_both_ways=both_ways,
        media_whole=both_ways or config.scheduler_config.disable_chunked_mm_input,
        pickles=settings.functions == "cloudpickle",
    )
    frontend = EngineFrontend(
        settings, chunked, host, refusal, model.model, hold, vocabulary, model.max_model_len, traits
    )
    set_up_controllers(frontend, settings.controllers)
    setattr(engine.output_processor, FRONTEND, frontend)
    setattr(engine.output_processor, RENDERER, getattr(engine, "renderer", None))  # not in every version
    setattr(engine.engine_core, READER, OutputReader(frontend.holder))
    frontend.pacing.live = engine.output_processor.request_states
    if config.device_config.device_type == "cuda" and config.compilation_config.cudagraph_mode.name != "NONE":
        frontend.largest_graph = config.compilation_config.max_cudagraph_capture_size or 0
    frontend.uncounted = functools.partial(_uncounted, engine)
    return frontend


@contextmanager
def _uncounted(engine: Any) -> Iterator[None]:
    """While this holds, vLLM's statistics leave out requests that only warm the engine up, and their steps."""
    output_processor, loggers = engine.output_processor, engine.logger_manager
    with ExitStack() as patches:
        for name in ("_update_stats_from_output", "_update_stats_from_finished"):
            counted = _of_others(getattr(output_processor, name))
            patches.enter_context(patch.object(output_processor, name, counted))
        if loggers is not None:
            patches.enter_context(patch.object(loggers, "record", _of_tokens(loggers.record)))
        yield


def _of_others(update: Callable[..., None]) -> Callable[..., None]:
    def wrapper(req_state: Any, *args: Any, **kwargs: Any) -> None:
        tracker: Tracker | None = getattr(req_state, TRACKER, None)
        if tracker is None or not tracker.warms:
            update(req_state, *args, **kwargs)

    return wrapper


def _of_tokens(record: Callable[..., None]) -> Callable[..., None]:
    """Let what records a step leave out one whose tokens are nobody's."""

    def wrapper(scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        found = iteration_stats
        if found is not None and not (found.num_generation_tokens or found.finished_requests):
            found = None
        record(scheduler_stats, found, *args, **kwargs)

    return wrapper


def may_be_remote(parallel: Any) -> bool:
    """Return whether workers may run on other machines, under a ParallelConfig; Ray decides where they do."""
    if parallel.nnodes > 1 or parallel.data_parallel_size > parallel.data_parallel_size_local:
        return True
    backend = parallel.distributed_executor_backend  # a name, a class or None
    return backend == "ray" or bool(getattr(backend, "uses_ray", False))


def llm_engine_init(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``LLMEngine.__init__``: make its `EngineFrontend`, ask its workers what they serve."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_settings(args, kwargs)
        original(self, *args, **kwargs)
        frontend = _make_frontend(self, status, hold=True)
        if frontend.engine.refusal is None:
            try:
                frontend.learn(self.collective_rpc("weir_report"))
            except Exception as e:  # whatever a worker raises becomes the refusal
                frontend.engine.refusal = unreported(e)

    return wrapper


def async_llm_init(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.__init__``: make its `EngineFrontend`."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_settings(args, kwargs)
        original(self, *args, **kwargs)
        _make_frontend(self, status, hold=False)  # its outputs are read in an event loop, which must not block

    return wrapper


def collective_rpc(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``LLMEngine.collective_rpc``: what workers were told to do may have replaced weights."""

    def wrapper(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        _note_weights(self, method)
        results = original(self, method, *args, **kwargs)
        if (frontend := _knowing_weights(self, method)) is not None:
            frontend.learn_weights(original(self, "weir_new_weights"))
        return results

    return wrapper


def async_collective_rpc(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.collective_rpc``: what workers were told to do may have replaced weights."""

    async def wrapper(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        results = await original(self, method, *args, **kwargs)
        if (frontend := _knowing_weights(self, method)) is not None:
            frontend.learn_weights(await original(self, "weir_new_weights"))
        return results

    return wrapper


def _frontend_called(engine: Any, method: Any) -> EngineFrontend | None:
    """Return an engine's frontend if its workers are told to do what may replace weights."""
    if isinstance(method, str) and method.startswith("weir_"):
        return None
    return getattr(getattr(engine, "output_processor", None), FRONTEND, None)


def _knowing_weights(engine: Any, method: Any) -> EngineFrontend | None:
    """Return an engine's frontend if Weir holds values of weights that a call may have replaced.

    The frontend knows sinks and biases; ranks beside others have the whole unembedding while a request reads a lens.
    """
    frontend = _frontend_called(engine, method)
    if frontend is None or frontend.engine.refusal is not None or frontend.engine.capabilities is None:
        return None
    several = engine.vllm_config.parallel_config.world_size > 1
    return frontend if several or frontend.engine.knows_weights else None


def _note_weights(engine: Any, method: Any) -> None:
    """Note which weights the engine was started with, before the first call that may replace them."""
    frontend = _frontend_called(engine, method)
    if frontend is None or frontend.engine.capabilities is None or frontend.engine.first_weights is not None:
        return
    try:
        frontend.engine.first_weights = Engine(engine).weights()
    except WeirError:
        frontend.engine.first_weights = ""  # unlike any that is read later


def _check_settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    config = kwargs.get("vllm_config", args[0] if args else None)
    if config is not None:
        settings = settings_of(config.additional_config)
        check_sinks(settings.sinks)
        check_controllers(settings.controllers)


def async_llm_generate(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.generate``: raise on a request's last output if the request failed."""

    async def stream(self: Any, held: HeldSequences | None, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        frontend: EngineFrontend | None = getattr(self.output_processor, FRONTEND, None)
        outputs = original(self, *args, **kwargs)
        async for output in outputs if held is None else _held(held, outputs):
            for completion in parts_of(output):
                view = getattr(completion, _VIEW, None)
                if view is not None and view.finished:
                    observer = _observer_of(frontend)
                    # Let outputs of plain requests go first.
                    await (asyncio.sleep(0) if frontend is None else frontend.pacing.wait_to_respond())
                    # Usually the worker has reported by now. With other overflow settings, counting
                    # dropped rows waits for rows.
                    if view.concluded() and (frontend is None or frontend.settings.overflow == "wait"):
                        _finish_view(view, observer)
                    else:
                        await asyncio.to_thread(_finish_view, view, observer)
            yield output

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        frontend: EngineFrontend | None = getattr(self.output_processor, FRONTEND, None)
        if frontend is not None and frontend.served:
            from vllm_weir.server.context import check_answered

            params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
            check_answered(params, read, frontend.manager.takes_scores)
        return stream(self, holding.get(), *args, **kwargs)

    return wrapper


async def _held(held: HeldSequences, outputs: AsyncGenerator[Any, Any]) -> AsyncIterator[Any]:
    """Yield `outputs` of a request; its sequences are added to `held` with the first of them."""
    async with aclosing(outputs):
        token = holding.set(held)
        try:
            first = await anext(outputs, None)  # admits the sequences
        finally:
            with suppress(ValueError):  # the generator was destroyed in another context
                holding.reset(token)
        if first is not None:
            yield first
        async for output in outputs:
            yield output


def _finish_view(view: OutputView, observer: RequestObserver | None) -> None:
    """Check a finished sequence, and tell the observer and its trace how it ended."""
    traced = view.pending.trace
    try:
        _verify(view)
        if observer is not None:
            observer.finished(view)
    except WeirError as e:
        if observer is not None:
            observer.failed()
        if traced is not None:
            traced.span("capture", e)
        raise
    if traced is not None:
        whole = view.with_start(0)
        traced.span("capture", rows=whole.rows, bytes=whole.size)


def _verify(view: OutputView) -> None:
    """Raise if rows were lost, steering failed, or a required sink failed."""
    try:
        view.verify()
        view.settle()
        view.routing()
    except WeirError as e:
        raise WeirFailure(e.message, e.field) from None


def async_llm_add_request(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.add_request``: ask the workers what they serve before the first with Weir's keys."""

    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("params", args[2] if len(args) > 2 else None)
        frontend: EngineFrontend | None = getattr(self.output_processor, FRONTEND, None)
        if carries_keys(extras_in(params)) or (frontend is not None and frontend.universal):
            await ask_workers(self)
        try:
            return await original(self, *args, **kwargs)
        finally:
            if (entry := entry_of.get()) is not None:
                entry.leave()

    return wrapper
