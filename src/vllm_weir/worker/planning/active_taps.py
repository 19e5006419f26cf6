"""Which steps need live taps: computed from what every rank is told alike, never from what one rank happens to hold."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence

from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.taps import tap_of
from vllm_weir.util.identity_cache import IdentityCache


class ActiveTaps:
    """The requests that read or steer something, each with the taps that it needs."""

    def __init__(self) -> None:
        self._always: dict[str, int] = {}
        """Request -> mask of its taps, for as long as it lives."""
        self._masks: Counter[int] = Counter()
        """The same masks, and how often each."""
        self._union = 0
        self._in_prompt: dict[str, tuple[int, int]] = {}
        """Request -> (prompt length, mask), for requests that need nothing past their prompt."""
        self._lengths: Counter[int] = Counter()
        """The same lengths, and how often each."""
        self._longest = 0
        self._mask_of = IdentityCache(_mask_of)

    def join(self, request_id: str, spec: EngineSpec, prompt_len: int) -> None:
        """A request enters."""
        self.leave(request_id)
        mask = self._mask_of[spec]
        if not mask:
            return
        if spec.end <= prompt_len:
            self._in_prompt[request_id] = (prompt_len, mask)
            self._lengths[prompt_len] += 1
            self._longest = max(self._longest, prompt_len)
        else:
            self._always[request_id] = mask
            self._masks[mask] += 1
            self._union |= mask

    def __len__(self) -> int:
        return len(self._always) + len(self._in_prompt)

    def leave(self, request_id: str) -> None:
        """A request has left; unknown ids are fine."""
        limited = self._in_prompt.pop(request_id, None)
        if limited is not None and _one_less(self._lengths, limited[0]):
            self._longest = max(self._lengths, default=0)
        mask = self._always.pop(request_id, None)
        if mask is not None and _one_less(self._masks, mask):
            self._union = functools.reduce(operator.or_, self._masks, 0)

    def taps_in(self, *groups: tuple[Sequence[str], Sequence[int]]) -> int:
        """Mask of the taps that a step needs; of each group the request ids, and positions of their first tokens in
        the step.

        Requests that need taps for as long as they live count even in a step that leaves them out.
        """
        mask = self._union
        for request_ids, starts in groups if self._in_prompt else ():
            if not request_ids or min(starts) >= self._longest:
                continue
            for request_id, start in zip(request_ids, starts, strict=True):
                limited = self._in_prompt.get(request_id)
                if limited is not None and start < limited[0]:
                    mask |= limited[1]
        return mask


def _one_less(counter: Counter[int], key: int) -> bool:
    """Whether it was the last."""
    counter[key] -= 1
    if counter[key]:
        return False
    del counter[key]
    return True


def _mask_of(spec: EngineSpec) -> int:
    return functools.reduce(operator.or_, (_mask(*place) for place in spec.places), 0)


@functools.lru_cache(maxsize=1024)
def _mask(hook: str, layers: tuple[int, ...]) -> int:
    return functools.reduce(operator.or_, (1 << tap_of(Site(hook, layer)) for layer in layers), 0)
