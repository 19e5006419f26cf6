"""Wrappers in the engine core (scheduler, prefix cache) and of the compile cache's key."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_weir.config.settings import Settings
from vllm_weir.core.cache_keys import CacheKeys, hit_limit, own_from
from vllm_weir.core.step_budget import StepBudget
from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.guard.request_extras import extras_of
from vllm_weir.patches.kv_connectors import ConnectorGuard
from vllm_weir.patches.media import item_at, longest_item, tokens_before_cut
from vllm_weir.schema.engine_spec import EngineRequest, EngineSpec, TableNeeds
from vllm_weir.schema.positions import ENDLESS

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus

WAITING = "weir_waiting"
"""Attribute of a SchedulerOutput: how many requests wait for space in the device tables."""
ENGINE_KEY = secrets.token_hex(8)
"""Part of the keys of steered blocks. What a request that failed has left in a store which outlives
this process is never found again."""


def engine_request_of(request: Any) -> EngineRequest | None:
    """Return what one of vLLM's requests asks of Weir, or None."""
    return EngineRequest.carried_by(extras_of(request))


def compute_hash(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``VllmConfig.compute_hash``: what Weir changes in the traced graph enters the compile-cache key."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original(self, *args, **kwargs)
        identity = Settings.load(self.additional_config).graph_identity()
        return hashlib.sha256(f"{plain} {identity}".encode()).hexdigest()[: len(plain)]

    return wrapper


def needs_kv_cache_zeroing(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``KVCacheConfig.needs_kv_cache_zeroing``: on a CPU, zero blocks before they are used again."""

    def wrapper(self: Any) -> Any:
        return original(self) or _zeroes_blocks_on_cpu()

    return wrapper


@functools.cache
def _zeroes_blocks_on_cpu() -> bool:
    """Return whether this is a CPU engine whose vLLM can zero blocks of the KV cache.

    Attention on a CPU multiplies what an earlier request has left in a block by zero, and a steered
    request whose values overflow leaves NaN there.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return "_zero_block_ids" in vars(CPUModelRunner)


def get_computed_blocks(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``KVCacheManager.get_computed_blocks``: a prefix-cache hit never passes the first wanted position."""

    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        limit = hit_limit(engine_request_of(request))
        if limit is None:
            return original(self, request, *args, **kwargs)
        with _capped(self.coordinator, limit):
            return original(self, request, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _capped(coordinator: Any, limit: int) -> Iterator[None]:
    """While this holds, lookups in the prefix cache find at most `limit` tokens."""
    lookups = ("find_longest_cache_hit", "find_longest_cache_hit_per_group")
    before = {name: vars(coordinator).get(name) for name in lookups if hasattr(coordinator, name)}
    for name in before:
        setattr(coordinator, name, _capped_lookup(getattr(coordinator, name), limit))
    try:
        yield
    finally:
        for name, wrapped in before.items():
            if wrapped is None:
                delattr(coordinator, name)
            else:  # one lookup of the cache manager calls the other
                setattr(coordinator, name, wrapped)


def _capped_lookup(lookup: Callable[..., Any], limit: int) -> Callable[..., Any]:
    def capped(block_hashes: Any, max_cache_hit_length: int, *rest: Any, **more: Any) -> Any:
        return lookup(block_hashes, min(max_cache_hit_length, limit), *rest, **more)

    return capped


class _SchedulerState:
    """What Weir keeps beside one scheduler."""

    def __init__(self, scheduler: Any, add_request: Callable[[Any, Any], None]) -> None:
        config = scheduler.vllm_config
        settings = Settings.load(config.additional_config)
        d_model = config.model_config.get_hidden_size()
        itemsize = config.model_config.dtype.itemsize
        self.budget = StepBudget(
            settings.ring_rows(d_model, itemsize),
            settings.step_rows(d_model, itemsize),
            _streams_above(config),
            config.scheduler_config.max_num_seqs,
            config.scheduler_config.long_prefill_token_threshold,
        )
        self.most_whole = _most_whole(scheduler)
        if self.most_whole:
            _keep_items_whole(scheduler, self.most_whole)
        self.waiting = WaitingQueue(settings.table_sizes(d_model))
        self.connectors = None if scheduler.connector is None else _guard_connectors(scheduler)
        self._by_priority = config.scheduler_config.policy == "priority"
        self._add_request = add_request

    def enter(self, request: Any, needs: TableNeeds) -> bool:
        """Return whether a request has space in the tables; if not, it waits in the scheduler's order."""
        rank = (request.priority, request.arrival_time) if self._by_priority else ()
        return self.waiting.enter(request.request_id, request, needs, rank)

    def schedule(self, scheduler: Any, request: Any) -> None:
        """Hand a request that has space in the tables, or needs none, to the scheduler."""
        engine_request = engine_request_of(request)
        if engine_request is not None and engine_request.rows_per_token:  # it captures something
            self.budget.join(request.request_id, engine_request)
        if engine_request is not None and self.connectors is not None:
            self.connectors.enter(request, engine_request)
        self._add_request(scheduler, request)


def _guard_connectors(scheduler: Any) -> ConnectorGuard:
    """Put Weir between a scheduler and its KV connector."""
    manager = scheduler.kv_cache_manager
    if hasattr(manager, "get_computed_blocks_for_connector"):  # which versions before 0.32 lack
        lookup = manager.get_computed_blocks_for_connector

        def capped(request: Any, *args: Any, **kwargs: Any) -> Any:
            limit = hit_limit(engine_request_of(request))
            with contextlib.nullcontext() if limit is None else _capped(manager.coordinator, limit):
                return lookup(request, *args, **kwargs)

        manager.get_computed_blocks_for_connector = capped
    return ConnectorGuard(scheduler)


def _streams_above(config: Any) -> int | None:
    """Return above how many tokens a step's rows are streamed; None if they never are.

    That is the size of the largest step that replays a CUDA graph; 0 if none does.
    """
    if config.device_config.device_type != "cuda" or not config.use_v2_model_runner:
        return None
    compilation = config.compilation_config
    return compilation.max_cudagraph_capture_size or 0 if compilation.cudagraph_mode.name != "NONE" else 0


_states: weakref.WeakKeyDictionary[object, _SchedulerState] = weakref.WeakKeyDictionary()
"""By vLLM's scheduler."""
_cache_keys: weakref.WeakKeyDictionary[object, CacheKeys] = weakref.WeakKeyDictionary()
"""By vLLM's request."""


def block_hash_extra_keys(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``generate_block_hash_extra_keys``: add the digest of what is done in the block."""

    def wrapper(request: Any, start_token_idx: int, end_token_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, *rest = original(request, start_token_idx, end_token_idx, *args, **kwargs)
        engine_request = engine_request_of(request)
        if engine_request is None or engine_request.table_needs is None:
            return keys, *rest
        own_keys = _cache_keys.get(request)
        if own_keys is None:
            spec = EngineSpec.from_wire(engine_request.spec)
            prompt_len = engine_request.prompt_len or request.num_prompt_tokens
            own_keys = _cache_keys[request] = CacheKeys(
                spec.moves, prompt_len, own_from(engine_request, spec, prompt_len), engine_request.replay
            )
        tokens = request.all_token_ids[start_token_idx:end_token_idx]
        digest = own_keys.of_block(start_token_idx, tokens)
        if digest is not None:
            salt = engine_request.cache_salt
            # One field: of a tagged key, vLLM's KV events tell the first alone.
            keys = (*(keys or ()), ("weir", ":".join((ENGINE_KEY, digest, salt or ""))))
        return keys, *rest

    return wrapper


def scheduler_add_request(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``Scheduler.add_request``: a steered request waits until the device tables have room for it."""

    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        engine_request = engine_request_of(request)
        if engine_request is None:
            return original(self, request, *args, **kwargs)
        engine_request.core_refusal = status.refusal or ""
        if self not in _states:
            _states[self] = _SchedulerState(self, original)
        state = _states[self]
        needs = engine_request.table_needs
        if needs is None or state.enter(request, needs):
            state.schedule(self, request)
        return None

    return wrapper


def schedule(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``Scheduler.schedule``: add requests that have waited, and bound the step by the ring's room."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = _states.get(self)
        if state is None:
            return original(self, *args, **kwargs)
        for request in state.waiting.release(self.requests):
            state.schedule(self, request)
        with _bounded(self, state.budget, state.most_whole):
            output = original(self, *args, **kwargs)
        if len(state.waiting):
            setattr(output, WAITING, len(state.waiting))
        if state.connectors is not None:
            state.connectors.leave(output)
        return output

    return wrapper


@contextlib.contextmanager
def _bounded(scheduler: Any, budget: StepBudget, most_whole: int) -> Iterator[None]:
    """While this holds, a step of vLLM's has as many tokens as have room for what they record.

    Where prompts, or images, are not split, one that is longer than that, because of what requests
    behind it record, would wait for ever, and they with it. It gets a step of its own, for which
    admission has found room.
    """
    limit = scheduler.max_num_scheduled_tokens
    tokens = budget.tokens(scheduler.requests, limit)
    alone = _unsplit(tokens, scheduler, most_whole)
    scheduler.max_num_scheduled_tokens = alone or tokens
    try:
        with _one_request(scheduler) if alone else contextlib.nullcontext():
            yield
    finally:
        scheduler.max_num_scheduled_tokens = limit


def _unsplit(tokens: int, scheduler: Any, most_whole: int) -> int:
    """Return how many tokens of the next request must be computed in one step if `tokens` are too few, else 0."""
    if scheduler.running:
        if not most_whole:
            return 0
        needs = [item_at(request, request.num_computed_tokens, most_whole) for request in scheduler.running]
        return needs[0] if min(needs) > tokens else 0
    if not scheduler.waiting:
        return 0
    request = scheduler.waiting.peek_request()
    if not scheduler.scheduler_config.enable_chunked_prefill:
        length = request.num_tokens
    else:
        length = longest_item(request, most_whole)
    return length if tokens < length <= scheduler.max_num_scheduled_tokens else 0


def _most_whole(scheduler: Any) -> int:
    """Return how many positions an image may have that is to be computed in one step; 0 if images may be split.

    They must not where its positions attend to later ones. vLLM sees to that on a GPU alone, and cuts
    an image all the same if a step has too few tokens left when it is at the image's start. What is
    longer than a step is always cut.
    """
    config = scheduler.vllm_config
    if not (config.model_config.is_mm_prefix_lm or config.scheduler_config.disable_chunked_mm_input):
        return 0
    return min(scheduler.max_num_scheduled_tokens, config.scheduler_config.long_prefill_token_threshold or ENDLESS)


def _keep_items_whole(scheduler: Any, most: int) -> None:
    """End steps before an image, or the like, of up to `most` positions that does not fit into them."""
    original = scheduler._try_schedule_encoder_inputs

    @functools.wraps(original)
    def wrapper(request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> Any:
        inputs, num_new_tokens, *rest = original(request, num_computed_tokens, *args, **kwargs)
        return inputs, tokens_before_cut(request, num_computed_tokens, num_new_tokens, most), *rest

    scheduler._try_schedule_encoder_inputs = wrapper


@contextlib.contextmanager
def _one_request(scheduler: Any) -> Iterator[None]:
    """While this holds, a step of vLLM's has one request."""
    most = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
    before = getattr(scheduler, most)
    setattr(scheduler, most, 1)
    try:
        yield
    finally:
        setattr(scheduler, most, before)


def finish_requests(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``Scheduler.finish_requests``: requests that wait can be aborted too."""

    def wrapper(self: Any, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
        state, aborted = _states.get(self), []
        if state is not None and len(state.waiting):
            if request_ids is None:
                leaving = state.waiting.ids()
            else:
                request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
                leaving = request_ids
            aborted = [request for request in map(state.waiting.leave, leaving) if request is not None]
            for request in aborted:
                request.status = finished_status
        # vLLM's own callers that end all requests (a pause, a sleep) notify the clients of those
        # that are returned.
        return [*original(self, request_ids, finished_status, *args, **kwargs), *aborted]

    return wrapper
