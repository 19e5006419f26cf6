"""A SchedulerOutput without some of its requests."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

_BY_REQUEST = ("scheduled_spec_decode_tokens", "scheduled_encoder_inputs")


def without(output: Any, hidden: Collection[str]) -> Any:
    """Return a copy of a SchedulerOutput in which requests are not scheduled.

    Requests that have finished stay: connectors forget them, whether they know them or not.
    """
    shown = copy.copy(output)
    shown.scheduled_new_reqs = [one for one in output.scheduled_new_reqs if one.req_id not in hidden]
    shown.scheduled_cached_reqs = _cached_without(output.scheduled_cached_reqs, hidden)
    shown.num_scheduled_tokens = _others(output.num_scheduled_tokens, hidden)
    shown.total_num_scheduled_tokens = sum(shown.num_scheduled_tokens.values())
    for name in _BY_REQUEST:
        setattr(shown, name, _others(getattr(output, name), hidden))
    if output.preempted_req_ids:
        shown.preempted_req_ids = output.preempted_req_ids.difference(hidden)
    return shown


def _cached_without(cached: Any, hidden: Collection[str]) -> Any:
    kept = [i for i, request_id in enumerate(cached.req_ids) if request_id not in hidden]
    if len(kept) == len(cached.req_ids):
        return cached
    shown = copy.copy(cached)
    for name, value in vars(cached).items():
        if isinstance(value, list) and len(value) == len(cached.req_ids):  # `new_token_ids` may be empty
            setattr(shown, name, [value[i] for i in kept])
        elif isinstance(value, dict):
            setattr(shown, name, _others(value, hidden))
        elif isinstance(value, set | frozenset):
            setattr(shown, name, value.difference(hidden))
    return shown


def _others(values: dict[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    return {request_id: value for request_id, value in values.items() if request_id not in hidden}
