"""Weir's part in KV connectors: what steered and captured requests load from them, and leave there."""

from __future__ import annotations

import copy
import enum
import functools
import importlib
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm_weir.core.cache_keys import ExternalKV
from vllm_weir.schema.engine_spec import EngineRequest

RELOADED = "weir_reloaded"
"""Attribute of a SchedulerOutput: requests that go back to where loading their KV has failed."""


class Kind(enum.Enum):
    """How a connector finds the keys and values of a request's tokens."""

    BLOCK_KEYS = enum.auto()
    """By vLLM's keys of blocks, which also say what interventions did."""
    SALTED = enum.auto()
    """By token ids and the request's ``cache_salt``."""
    TOKENS = enum.auto()
    """By token ids. It follows no block of a request that it is not told of."""
    REQUESTS = enum.auto()
    """One engine hands them to another, request by request. Of 0 tokens nothing is handed over."""
    PUSHED = enum.auto()
    """Likewise, but the other engine may write them though none were asked for."""
    UNKNOWN = enum.auto()


_KINDS = {
    "OffloadingConnector": Kind.BLOCK_KEYS,
    "SimpleCPUOffloadConnector": Kind.BLOCK_KEYS,
    "MooncakeStoreConnector": Kind.BLOCK_KEYS,
    "ExampleHiddenStatesConnector": Kind.BLOCK_KEYS,  # loads none and keeps none
    "LMCacheMPConnector": Kind.SALTED,
    "LMCacheConnectorV1": Kind.TOKENS,
    "LMCacheConnectorV1Dynamic": Kind.TOKENS,
    "ExampleConnector": Kind.TOKENS,
    "SharedStorageConnector": Kind.TOKENS,
    "HF3FSKVConnector": Kind.TOKENS,
    "NixlConnector": Kind.REQUESTS,
    "NixlPullConnector": Kind.REQUESTS,
    "NixlPushConnector": Kind.REQUESTS,
    "MooncakeConnector": Kind.REQUESTS,
    "MoRIIOConnector": Kind.PUSHED,
}
_HOMES = ("vllm.", "lmcache.")
"""Packages whose classes of these names are meant."""
_SALTS = {"LMCacheMPConnector": ("vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector", "cache_salt")}
_MULTI = "MultiConnector"


def kind_of(name: str, module: str | None) -> Kind:
    if module and not module.startswith(_HOMES):
        return Kind.UNKNOWN
    kind = _KINDS.get(name, Kind.UNKNOWN)
    return Kind.UNKNOWN if kind is Kind.SALTED and not _salts(name) else kind


def _salts(name: str) -> bool:
    """Return whether this vLLM's connector puts ``cache_salt`` into its keys; older ones do not."""
    module, attribute = _SALTS[name]
    try:
        tracker = importlib.import_module(module).LMCacheMPRequestTracker
    except (ImportError, AttributeError):
        return False
    return attribute in tracker.__annotations__


def connectors_of(config: Any) -> list[tuple[str, str | None]]:
    """Return name and module of a VllmConfig's KV connectors; the module is None for vLLM's own."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    extra = transfer.kv_connector_extra_config
    return list(_configured(transfer.kv_connector, transfer.kv_connector_module_path, extra))


def unknown_connector(config: Any) -> str:
    return next((name for name, module in connectors_of(config) if kind_of(name, module) is Kind.UNKNOWN), "")


def _configured(name: str, module: str | None, extra: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the module of a configured connector, or of those inside a MultiConnector."""
    if name != _MULTI or module:
        yield name, module
        return
    for inner in extra.get("connectors", ()):
        more = inner.get("kv_connector_extra_config") or {}
        yield from _configured(inner.get("kv_connector", ""), inner.get("kv_connector_module_path"), more)


def _leaves(connector: Any) -> Iterator[Any]:
    if type(connector).__name__ == _MULTI and hasattr(connector, "_connectors"):
        for inner in connector._connectors:
            yield from _leaves(inner)
    else:
        yield connector


class ConnectorGuard:
    """Keeps a scheduler's KV connector from giving or taking what a request of Weir's forbids.

    It wraps methods of the connector, or of those inside a MultiConnector, for the scheduler's
    requests of Weir's; calls for plain requests go through.
    """

    def __init__(self, scheduler: Any) -> None:
        self._requests: dict[str, ExternalKV] = {}
        self._recomputes = bool(getattr(scheduler, "recompute_kv_load_failures", False))
        self._truncates = _truncates(scheduler)
        self._reloaded: list[str] = []
        self._kinds = set()
        leaves = list(_leaves(scheduler.connector))
        self._offloads = [type(leaf).__name__ for leaf in leaves] == ["OffloadingConnector"]
        for leaf in leaves:
            kind = kind_of(type(leaf).__name__, type(leaf).__module__)
            self._kinds.add(kind)
            _wrap(leaf, "get_num_new_matched_tokens", functools.partial(self._matched, kind))
            if kind is Kind.TOKENS:
                for method in ("on_new_request", "update_state_after_alloc"):
                    _wrap(leaf, method, self._unless_hidden)
                _wrap(leaf, "build_connector_meta", self._build_meta)
            elif kind in (Kind.REQUESTS, Kind.PUSHED):
                for method in ("request_finished", "request_finished_all_groups"):
                    _wrap(leaf, method, self._finished)
        if self._recomputes:
            _wrap(scheduler, "_handle_invalid_blocks", self._failed_loads)

    def enter(self, request: Any, engine_request: EngineRequest) -> None:
        """Note a request of Weir's before it enters the scheduler."""
        prompt_len = request.num_prompt_tokens
        kv = self._requests[request.request_id] = ExternalKV.of(engine_request, request.all_token_ids[:prompt_len])
        if kv.changed and Kind.SALTED in self._kinds:
            # The keys of its blocks in the prefix cache are made already, and say what Weir does.
            request.cache_salt = secrets.token_hex(16)
        params = request.kv_transfer_params
        if self._offloads and kv.limit is not None and kv.limit < prompt_len - 1:  # else a longer hit would be no hit
            own = (params or {}).get("max_load_tokens")
            most = min(own, kv.limit) if type(own) is int and own >= 0 else kv.limit
            request.kv_transfer_params = {**(params or {}), "max_load_tokens": most}
        if not params or self._kinds.isdisjoint((Kind.REQUESTS, Kind.PUSHED)):
            return
        if params.get("do_remote_decode"):
            decodes = kv.changed and request.max_tokens > 1
            withheld = kv.prompt_changed or decodes or self._truncates
        else:
            computes = kv.prompt_changed or (kv.limit is not None and kv.limit < prompt_len - 1)
            withheld = computes and Kind.PUSHED in self._kinds
        if withheld:
            request.kv_transfer_params = None  # vLLM then treats it as one that this engine serves alone

    def leave(self, output: Any) -> None:
        """Forget requests that have finished, and tell workers which others go back."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        if self._reloaded:
            setattr(output, RELOADED, self._reloaded)
            self._reloaded = []

    def _hides(self, request_id: str) -> bool:
        kv = self._requests.get(request_id)
        return kv is not None and kv.changed

    def _matched(
        self, kind: Kind, original: Callable[..., Any], request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        kv = self._requests.get(request.request_id)
        if kv is None:
            return original(request, num_computed_tokens)
        changed = kv.prompt_changed if kind in (Kind.REQUESTS, Kind.PUSHED) else kv.changed
        if changed and kind not in (Kind.BLOCK_KEYS, Kind.SALTED):
            return 0, False
        found, is_async = original(request, num_computed_tokens)
        if not found:
            return found, is_async
        # Rows of a step whose KV turns out not to have been loaded would be wrong.
        doubtful = self._recomputes and not is_async
        if doubtful or not kv.allows(num_computed_tokens, found, request.num_tokens, is_async):
            return 0, False
        return found, is_async

    def _unless_hidden(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self._hides(request.request_id) else original(request, *args, **kwargs)

    def _build_meta(self, original: Callable[..., Any], output: Any) -> Any:
        hidden = {request_id for request_id in output.num_scheduled_tokens if self._hides(request_id)}
        return original(without(output, hidden) if hidden else output)

    def _finished(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        delayed, params = original(request, *args, **kwargs)
        kv = self._requests.get(request.request_id)
        if kv is not None and kv.changed and not (request.kv_transfer_params or {}).get("do_remote_decode"):
            params = None  # nobody learns where they lie; vLLM frees them when they have not been fetched
        return delayed, params

    def _failed_loads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
        affected: set[str] = original(*args, **kwargs)
        self._reloaded += sorted(affected & self._requests.keys())
        return affected


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of `owner`, if it has that, by a wrapper that gets the original first."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _truncates(scheduler: Any) -> bool:
    """Return whether a prompt that is handed to another engine may lose its last tokens here."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    recurrent = any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups)
    drafts = getattr(scheduler, "num_prefill_lookahead", 0) > 1
    return recurrent or drafts or bool(getattr(scheduler, "prefix_replay_tokens", 0))


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
