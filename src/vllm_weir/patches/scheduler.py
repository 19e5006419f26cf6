"""Patches in the engine core (scheduler, prefix cache) and in the compile cache."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_weir.config.settings import Settings
from vllm_weir.core.cache_keys import CacheKeys, hit_limit
from vllm_weir.core.step_budget import StepBudget
from vllm_weir.core.waiting_queue import WaitingQueue
from vllm_weir.schema.engine_request import EngineRequest
from vllm_weir.schema.engine_spec import EngineSpec

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus

WAITING = "weir_waiting"
"""Attribute of a SchedulerOutput: how many requests wait for table space."""


def engine_request_of(request: Any) -> EngineRequest | None:
    """Return what one of vLLM's requests asks of Weir, or None."""
    params = request.sampling_params
    return None if params is None else EngineRequest.carried_by(params.extra_args)


def compute_hash(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original(self, *args, **kwargs)
        identity = Settings.load(self.additional_config).graph_identity()
        return hashlib.sha256(f"{plain} {identity}".encode()).hexdigest()[: len(plain)]

    return wrapper


def needs_kv_cache_zeroing(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any) -> Any:
        return original(self) or _zeroes_blocks_on_cpu()

    return wrapper


@functools.cache
def _zeroes_blocks_on_cpu() -> bool:
    """Attention on a CPU multiplies what an earlier request has left in a block by zero, and a steered one whose values
    overflow leaves NaN. vLLM can empty blocks (it does so for other models); versions that cannot on a CPU do not."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return "_zero_block_ids" in vars(CPUModelRunner)


def get_computed_blocks(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        limit = hit_limit(engine_request_of(request))
        if limit is None:
            return original(self, request, *args, **kwargs)
        coordinator = self.coordinator
        longest = coordinator.find_longest_cache_hit

        def capped(block_hashes: Any, max_cache_hit_length: int, *rest: Any, **more: Any) -> Any:
            return longest(block_hashes, min(max_cache_hit_length, limit), *rest, **more)

        coordinator.find_longest_cache_hit = capped
        try:
            return original(self, request, *args, **kwargs)
        finally:
            del coordinator.find_longest_cache_hit

    return wrapper


class _SchedulerState:
    """What Weir keeps beside one scheduler. `enqueue`: the scheduler's own add_request, unbound."""

    def __init__(self, config: Any, enqueue: Callable[[Any, Any], None]) -> None:
        settings = Settings.load(config.additional_config)
        d_model = config.model_config.get_hidden_size()
        size = (d_model, config.model_config.dtype.itemsize)
        self.budget = StepBudget(
            settings.ring_rows(*size),
            settings.step_rows(*size),
            _streams_above(config),
            config.scheduler_config.max_num_seqs,
            config.scheduler_config.long_prefill_token_threshold,
        )
        self.waiting = WaitingQueue(settings.table_sizes(d_model))
        self._enqueue = enqueue

    def let_in(self, scheduler: Any, request: Any) -> None:
        """Hand a request that has its place in the tables, or needs none, to the scheduler."""
        engine_request = engine_request_of(request)
        if engine_request is not None and engine_request.rows_per_token:  # it captures something
            self.budget.join(request.request_id, engine_request)
        self._enqueue(scheduler, request)


def _streams_above(config: Any) -> int | None:
    """Tokens of the largest step that can be replayed from a CUDA graph; None if no step's rows are streamed."""
    if config.device_config.device_type != "cuda" or not config.use_v2_model_runner:
        return None
    compilation = config.compilation_config
    return compilation.max_cudagraph_capture_size or 0 if compilation.cudagraph_mode.name != "NONE" else 0


_rooms: weakref.WeakKeyDictionary[object, _SchedulerState] = weakref.WeakKeyDictionary()
_keys: weakref.WeakKeyDictionary[object, CacheKeys] = weakref.WeakKeyDictionary()


def block_hash_extra_keys(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    def wrapper(request: Any, start_token_idx: int, end_token_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, *rest = original(request, start_token_idx, end_token_idx, *args, **kwargs)
        engine_request = engine_request_of(request)
        if engine_request is None or engine_request.table_needs is None:
            return keys, *rest
        if request not in _keys:
            _keys[request] = CacheKeys(EngineSpec.from_wire(engine_request.spec).moves, request.num_prompt_tokens)
        tokens = request.all_token_ids[start_token_idx:end_token_idx]
        digest = _keys[request].of_block(start_token_idx, tokens)
        if digest is not None:
            salt = engine_request.cache_salt
            keys = (*(keys or ()), ("weir", digest, salt) if salt else ("weir", digest))
        return keys, *rest

    return wrapper


def scheduler_add_request(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        engine_request = engine_request_of(request)
        if engine_request is None:
            return original(self, request, *args, **kwargs)
        engine_request.core_refusal = status.refusal or ""
        if self not in _rooms:
            _rooms[self] = _SchedulerState(self.vllm_config, original)
        room = _rooms[self]
        needs = engine_request.table_needs
        if needs is None or room.waiting.enter(request.request_id, request, needs):
            room.let_in(self, request)
        return None

    return wrapper


def schedule(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        room = _rooms.get(self)
        if room is None:
            return original(self, *args, **kwargs)
        for request in room.waiting.release(self.requests):
            room.let_in(self, request)
        limit = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = room.budget.tokens(self.requests, limit)
        try:
            output = original(self, *args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = limit
        if len(room.waiting):
            setattr(output, WAITING, len(room.waiting))
        return output

    return wrapper


def finish_requests(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
        room, left = _rooms.get(self), []
        if room is not None and len(room.waiting):
            if request_ids is None:
                leaving = room.waiting.ids()
            else:
                request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
                leaving = request_ids
            left = [request for request in map(room.waiting.leave, leaving) if request is not None]
            for request in left:
                request.status = finished_status
        # Whoever ends all requests (a pause, a sleep) tells their callers, and knows them from what is returned.
        return [*original(self, request_ids, finished_status, *args, **kwargs), *left]

    return wrapper
