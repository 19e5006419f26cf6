"""Seams in the engine core (scheduler, prefix cache) and in the compile cache."""

from __future__ import annotations

import hashlib
import weakref

from vllm_weir.scheduler import StepBudget, hit_limit
from vllm_weir.settings import Settings
from vllm_weir.spec.request import WIRE_KEY
from vllm_weir.worker.station import ring_rows


def wire_of(request):
    """The engine wire form that a request carries, or None."""
    params = request.sampling_params
    return (params.extra_args or {}).get(WIRE_KEY) if params is not None else None


def compute_hash(original, _status):
    def wrapper(self, *args, **kwargs):
        plain = original(self, *args, **kwargs)
        identity = Settings.load(self.additional_config).graph_identity()
        return hashlib.sha256(f"{plain} {identity}".encode()).hexdigest()[: len(plain)]

    return wrapper


def get_computed_blocks(original, _status):
    def wrapper(self, request, *args, **kwargs):
        limit = hit_limit(wire_of(request))
        if limit is None:
            return original(self, request, *args, **kwargs)
        coordinator = self.coordinator
        longest = coordinator.find_longest_cache_hit

        def capped(block_hashes, max_cache_hit_length, *rest, **more):
            return longest(block_hashes, min(max_cache_hit_length, limit), *rest, **more)

        coordinator.find_longest_cache_hit = capped
        try:
            return original(self, request, *args, **kwargs)
        finally:
            del coordinator.find_longest_cache_hit

    return wrapper


_budgets: weakref.WeakKeyDictionary[object, StepBudget] = weakref.WeakKeyDictionary()


def _budget(scheduler) -> StepBudget:
    if scheduler not in _budgets:
        config = scheduler.vllm_config
        settings = Settings.load(config.additional_config)
        model = config.model_config
        _budgets[scheduler] = StepBudget(ring_rows(settings, model.get_hidden_size(), model.dtype.itemsize))
    return _budgets[scheduler]


def scheduler_add_request(original, _status):
    def wrapper(self, request, *args, **kwargs):
        wire = wire_of(request)
        if wire is not None:
            _budget(self).join(request.request_id, wire)
        return original(self, request, *args, **kwargs)

    return wrapper


def schedule(original, _status):
    def wrapper(self, *args, **kwargs):
        budget = _budgets.get(self)
        if budget is None:
            return original(self, *args, **kwargs)
        limit = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = budget.tokens(self.requests, limit)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = limit

    return wrapper
