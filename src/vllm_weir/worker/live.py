"""Which steps need live taps: computed from what every rank is told alike, never from what one rank happens to hold."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from vllm_weir.spec.hooks import Site
from vllm_weir.spec.positions import Positions
from vllm_weir.worker.select import tap_of


class LiveRequests:
    """The requests that read or steer something, each with the taps that it needs."""

    def __init__(self) -> None:
        self._always: dict[str, int] = {}
        """Request -> mask of its taps, for as long as it lives."""
        self._in_prompt: dict[str, tuple[int, int]] = {}
        """Request -> (prompt length, mask), for requests that need nothing past their prompt."""
        self._union = 0

    def join(self, request_id: str, wire: dict, prompt_len: int) -> None:
        """A request enters with the engine wire form that it carries."""
        mask, in_prompt = 0, True
        for hook, layers, positions, *_ in [*wire["wishes"], *wire["moves"]]:
            in_prompt = in_prompt and _in_prompt(Positions.parse(positions), prompt_len)
            mask |= _mask(hook, tuple(layers))
        if mask and in_prompt:
            self._in_prompt[request_id] = (prompt_len, mask)
        elif mask:
            self._always[request_id] = mask
            self._union |= mask

    def leave(self, request_id: str) -> None:
        """A request has left; unknown ids are fine."""
        self._in_prompt.pop(request_id, None)
        if self._always.pop(request_id, None) is not None:
            self._union = functools.reduce(operator.or_, self._always.values(), 0)

    def taps_in(self, starts: Iterable[tuple[str, int]]) -> int:
        """Mask of the taps that a step needs; `starts` are (request id, position of its first token in the step).

        Requests that need taps for as long as they live count even in a step that leaves them out.
        """
        mask = self._union
        if self._in_prompt:
            for request_id, start in starts:
                limited = self._in_prompt.get(request_id)
                if limited is not None and start < limited[0]:
                    mask |= limited[1]
        return mask


@functools.lru_cache(maxsize=1024)
def _mask(hook: str, layers: tuple[int, ...]) -> int:
    return functools.reduce(operator.or_, (1 << tap_of(Site(hook, layer)) for layer in layers), 0)


def _in_prompt(selector: Positions, prompt_len: int) -> bool:
    """Whether no generated position can be selected.

    Finer bounds would not do: past the prompt, the scheduler's count of computed tokens may run ahead of the device's.
    """
    if selector.kind in ("prompt", "last_prompt"):
        return True
    if selector.kind == "list":
        return all(v < prompt_len for v in selector.numbers)
    if selector.kind == "slice":
        stop = selector.values[1]
        return stop is not None and stop <= prompt_len
    return False
