"""Keys and values that a KV connector loads and keeps: what a request of Weir's may take and leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_weir.core.cache_keys import CacheKeys, hit_limit, own_from
from vllm_weir.schema.engine_request import EngineRequest
from vllm_weir.schema.engine_spec import EngineSpec


@dataclass(frozen=True)
class ExternalKV:
    """What one request may take from a KV connector, and leave there.

    Attributes:
        limit: the most tokens whose keys and values may be loaded, as their rows are not wanted;
            None for no limit.
        changed: whether interventions may change the keys and values of the request.
        prompt_changed: whether they may change those of its prompt.
    """

    limit: int | None = None
    changed: bool = False
    prompt_changed: bool = False

    @classmethod
    def of(cls, request: EngineRequest, prompt_ids: Sequence[int]) -> ExternalKV:
        """Return what a request with these prompt tokens may take and leave."""
        limit = hit_limit(request)
        if request.table_needs is None:
            return cls(limit)
        spec, prompt_len = EngineSpec.from_wire(request.spec), len(prompt_ids)
        if all(move.scores for move in spec.moves):
            return cls(limit)
        keys = CacheKeys(spec.moves, prompt_len, own_from(request, spec, prompt_len))
        return cls(limit, True, keys.of_block(0, prompt_ids) is not None)

    def allows(self, computed: int, loaded: int, num_tokens: int, is_async: bool) -> bool:
        """Return whether keys and values of `loaded` tokens may be loaded after `computed` ones.

        Args:
            computed: tokens at hand.
            loaded: tokens that would be loaded.
            num_tokens: tokens of the request so far.
            is_async: whether they are loaded between steps. If that is all of them, vLLM computes
                the last one again.
        """
        end = computed + loaded
        if is_async and end >= num_tokens:
            end = num_tokens - 1
        return self.limit is None or end <= self.limit
