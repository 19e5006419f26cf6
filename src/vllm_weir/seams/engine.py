"""Seams in the caller's process: engines, requests on their way in, outputs on their way out."""

from __future__ import annotations

import asyncio
import copy
from contextlib import aclosing, suppress

from vllm.outputs import CompletionOutput, RequestOutput

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admit import KEYS, carries_keys
from vllm_weir.frontend.desk import Desk
from vllm_weir.frontend.holding import holding
from vllm_weir.frontend.reachable import Vocabulary
from vllm_weir.frontend.sinks.board import check_sinks
from vllm_weir.frontend.turns import entry_of
from vllm_weir.seams.limits import refusal_of
from vllm_weir.settings import Settings
from vllm_weir.spec.request import WIRE_KEY

try:
    from vllm.exceptions import VLLMClientError as _ClientError
    from vllm.exceptions import VLLMServerError as _ServerError
except ImportError:  # up to 0.28 a ValueError is what servers answer with 400
    _ClientError = _ServerError = Exception

_DESK, _TRACKER, _VIEW = "_weir_desk", "_weir_tracker", "_weir_view"


class WeirRequestError(WeirError, _ClientError):
    """A WeirError that vLLM, too, knows for the client's mistake (HTTP 400)."""

    def __init__(self, message: str, field: str = "") -> None:
        WeirError.__init__(self, message, field)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class WeirFailure(WeirError, _ServerError):
    """A WeirError that vLLM, too, knows for none of the client's (HTTP 500): what was admitted was not done."""


def add_request(original, status):
    def wrapper(self, request, *args, **kwargs):
        params = request.sampling_params
        tracker = observer = None
        desk = getattr(self, _DESK, None)
        if params is not None and (carries_keys(params.extra_args) or (desk is not None and desk.universal)):
            observer = None if desk is None else desk.observer
            try:
                tracker = _admit(self, request, status)
            except WeirError as e:
                if observer is not None:
                    observer.refused()
                raise WeirRequestError(e.message, e.field) from None
        original(self, request, *args, **kwargs)
        if tracker is not None:
            if (held := holding.get()) is not None:
                held.add(desk.store, tracker.pending)
            state = self.request_states[request.request_id]
            caller = getattr(state, "external_req_id", None) or request.request_id  # versions without one keep the id
            tracker.name(caller, state.request_index)
            if observer is not None:
                observer.admitted()
            setattr(state, _TRACKER, tracker)
            desk.turns.mine(state)

    return wrapper


def _admit(output_processor, request, status):
    if status.refusal is not None:
        raise WeirError(status.refusal, WIRE_KEY)
    desk: Desk | None = getattr(output_processor, _DESK, None)
    if desk is None:
        raise WeirError("this engine was built without Weir's knowledge", WIRE_KEY)
    if request.resumable:
        raise WeirError("streamed input is not served; send the whole prompt", WIRE_KEY)
    ids = request.prompt_token_ids
    length = len(ids) if ids is not None else len(request.prompt_embeds)
    if not all(getattr(request, "prompt_is_token_ids", None) or ()):
        ids = None  # of a prompt that is embeddings in part: the ids there are placeholders
    params = request.sampling_params
    streams = params.output_kind.name != "FINAL_ONLY"
    tracker, wire = desk.admit(request.request_id, params.extra_args or {}, ids, length, params.max_tokens, streams)
    # The engine gets a copy with its own wire form; the caller's object, and its siblings', stay as they are.
    params = copy.copy(params)
    params.extra_args = {k: v for k, v in (params.extra_args or {}).items() if k not in KEYS}
    if wire is not None:
        params.extra_args[WIRE_KEY] = wire
    request.sampling_params = params
    return tracker


def new_completion_output(original, _status):
    def wrapper(self, token_ids, finish_reason, *args, **kwargs):
        output = original(self, token_ids, finish_reason, *args, **kwargs)
        tracker = getattr(self, _TRACKER, None)
        if tracker is not None:
            delta = self.output_kind.name == "DELTA"
            generated = self.detokenizer.output_token_ids
            if not delta:
                # vLLM hands out the list that it goes on appending to; rows and tokens of one output must agree.
                output.token_ids = list(output.token_ids)
            reason = None if finish_reason is None else str(finish_reason)
            setattr(output, _VIEW, tracker.view(generated, delta, reason, self.num_cached_tokens))
        return output

    return wrapper


def run_engine(original, _status):
    def wrapper(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        # Not before: raising between two steps would leave the rest of the batch in the engine.
        try:
            for output in outputs:
                for completion in output.outputs if isinstance(output, RequestOutput) else ():
                    view = getattr(completion, _VIEW, None)
                    if view is not None:
                        _verify(view)
        except WeirError as e:
            e.outputs = outputs  # the others' are whole
            raise
        return outputs

    return wrapper


def merge_outputs(original, _status):
    def wrapper(self, next_output, aggregate, *args, **kwargs):
        original(self, next_output, aggregate, *args, **kwargs)
        later = {c.index: getattr(c, _VIEW, None) for c in next_output.outputs}
        for completion in self.outputs:
            view, new = getattr(completion, _VIEW, None), later.get(completion.index)
            if view is not None and new is not None and view is not new:
                view.extend(new)

    return wrapper


def _completion_part(part):
    def get(self):
        view = getattr(self, _VIEW, None)
        if view is None or (part == "activations" and not view.asked):
            return None
        return getattr(view, part)()

    return get


def _request_part(part):
    def get(self):
        first = min(self.outputs, key=lambda o: o.index, default=None)
        return None if first is None else getattr(first, part)

    return get


def _give_outputs_properties() -> None:
    for part, text in (
        ("activations", "Rows captured for this sequence (index 0's for a request), or None; see `weir.Activations`."),
        ("receipt", "What Weir did for this sequence (index 0's for a request), or None; see `weir.Receipt`."),
    ):
        setattr(CompletionOutput, part, property(_completion_part(part), doc=text))
        setattr(RequestOutput, part, property(_request_part(part), doc=text))


_give_outputs_properties()


def _make_desk(engine, status, hold: bool) -> Desk:
    config = engine.vllm_config
    settings = Settings.load(config.additional_config)
    parallel = config.parallel_config
    remote = parallel.nnodes > 1 or parallel.data_parallel_size > parallel.data_parallel_size_local
    host = None
    if remote:
        from vllm.utils.network_utils import get_ip

        host = get_ip()
    chunked = bool(config.scheduler_config.enable_chunked_prefill)
    refusal = status.refusal or refusal_of(config)
    model = config.model_config
    vocabulary = Vocabulary(model.get_vocab_size(), engine.output_processor.tokenizer)
    desk = Desk(settings, chunked, host, refusal, model.model, hold, vocabulary, model.max_model_len)
    setattr(engine.output_processor, _DESK, desk)
    desk.turns.live = engine.output_processor.request_states
    return desk


def llm_engine_init(original, status):
    def wrapper(self, *args, **kwargs):
        _check_settings(args, kwargs)
        original(self, *args, **kwargs)
        desk = _make_desk(self, status, hold=True)
        if desk.refusal is None:
            try:
                desk.learn(self.collective_rpc("weir_report"))
            except Exception as e:  # whatever a worker raises means that it cannot serve; requests are told
                desk.refusal = f"the workers did not report: {type(e).__name__}: {e}"

    return wrapper


def async_llm_init(original, status):
    def wrapper(self, *args, **kwargs):
        _check_settings(args, kwargs)
        original(self, *args, **kwargs)
        _make_desk(self, status, hold=False)  # its outputs are handed over in an event loop

    return wrapper


def _check_settings(args, kwargs) -> None:
    config = kwargs.get("vllm_config", args[0] if args else None)
    if config is not None:
        check_sinks(Settings.load(config.additional_config).sinks)


def async_llm_generate(original, _status):
    async def stream(self, held, *args, **kwargs):
        desk: Desk | None = getattr(self.output_processor, _DESK, None)
        outputs = original(self, *args, **kwargs)
        async for output in outputs if held is None else _held(held, outputs):
            for completion in output.outputs:
                view = getattr(completion, _VIEW, None)
                if view is not None and completion.finish_reason is not None:
                    observer = None if desk is None else desk.observer
                    # What plain requests wait for goes out first.
                    await (asyncio.sleep(0) if desk is None else desk.turns.answer())
                    # The worker's word comes before the last token, as a rule; who counts dropped rows waits for rows.
                    if view.concluded() and (desk is None or desk.settings.overflow == "wait"):
                        _conclude(view, observer)
                    else:
                        await asyncio.to_thread(_conclude, view, observer)
            yield output

    def wrapper(self, *args, **kwargs):
        desk: Desk | None = getattr(self.output_processor, _DESK, None)
        if desk is not None and desk.served:
            from vllm_weir.seams.server import check_answered

            check_answered(kwargs.get("sampling_params", args[1] if len(args) > 1 else None))
        return stream(self, holding.get(), *args, **kwargs)

    return wrapper


async def _held(held, outputs):
    """`outputs` of a request whose sequences `held` notes, in whatever context they are first asked for."""
    async with aclosing(outputs):
        token = holding.set(held)
        try:
            first = await anext(outputs, None)  # admits them
        finally:
            with suppress(ValueError):  # destroyed while it waited, in another context
                holding.reset(token)
        if first is not None:
            yield first
        async for output in outputs:
            yield output


def view_of(completion):
    """The view of a ``CompletionOutput``, or None."""
    return getattr(completion, _VIEW, None)


def _conclude(view, observer) -> None:
    try:
        _verify(view)
        if observer is not None:
            observer.finished(view)
    except WeirError:
        if observer is not None:
            observer.failed()
        raise


def _verify(view) -> None:
    try:
        view.verify()
        view.settle()
    except WeirError as e:
        raise WeirFailure(e.message, e.field) from None


def desk_of(llm) -> Desk:
    """The desk of an ``LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in; raises WeirError if it has none."""
    engine = llm
    for attribute in ("llm_engine", "engine"):
        engine = getattr(engine, attribute, engine)
    desk = getattr(getattr(engine, "output_processor", None), _DESK, None)
    if desk is None:
        raise WeirError(f"{type(llm).__name__} is no engine that Weir serves; see `weir doctor`", "llm")
    return desk


def has_desk(engine) -> bool:
    """Whether an engine client is one that Weir serves."""
    return getattr(getattr(engine, "output_processor", None), _DESK, None) is not None


def async_llm_add_request(original, _status):
    async def wrapper(self, *args, **kwargs):
        params = kwargs.get("params", args[2] if len(args) > 2 else None)
        desk: Desk | None = getattr(self.output_processor, _DESK, None)
        if carries_keys(getattr(params, "extra_args", None)) or (desk is not None and desk.universal):
            await ask_workers(self)
        try:
            return await original(self, *args, **kwargs)
        finally:
            if (entry := entry_of.get()) is not None:
                entry.leave()

    return wrapper


async def ask_workers(engine) -> None:
    """Have an ``AsyncLLM``'s workers asked what they serve, once."""
    engine = getattr(engine, "engine", engine)
    desk: Desk | None = getattr(getattr(engine, "output_processor", None), _DESK, None)
    if desk is not None and desk.facts is None and desk.refusal is None:
        try:
            desk.learn(await engine.collective_rpc("weir_report"))
        except Exception as e:  # as in llm_engine_init
            desk.refusal = f"the workers did not report: {type(e).__name__}: {e}"
