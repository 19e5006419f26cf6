"""Which taps each step needs, computed only from what all ranks are told.

All ranks must choose the same CUDA graphs, so nothing that only one rank knows may decide.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import HELD, HOOK, IN_GRAPHS, RECONSTRUCT, WRITES
from vllm_weir.schema.taps import CELLS, GROUPS, NO_GRAPH, REPLAY, SCORES, STAGES, Place, early_bit, tap_of
from vllm_weir.util.lru import IdentityCache


class ActiveTaps:
    """The requests that capture or steer something, each with the taps that it needs.

    Taps are bit masks: bit t stands for tap t, and bit SCORES + t for the probes that read there. Bit
    NO_GRAPH is set where rows are encoded whole or given to a function by the host; bits from EARLY_SCORES on are of
    columns that are scored before their tap goes on, those from FUNCTIONS on of functions that are called inside
    graphs. CELLS and GROUPS say what a tap's kernel has to be able to do, REPLAY that routers may be made to choose.

    `number_of`: identity of a compiled function -> its number, None for one that only the host calls.
    """

    def __init__(self, number_of: Callable[[str], int | None] = lambda _: None) -> None:
        self._always: dict[str, int] = {}
        """Request -> mask of its taps, for requests that need them for as long as they live."""
        self._masks: Counter[int] = Counter()
        """How many requests of `_always` have each mask."""
        self._union = 0
        """All masks of `_always` together."""
        self._in_prompt: dict[str, tuple[int, int]] = {}
        """Request -> (prompt length, mask), for requests that need no tap past their prompt."""
        self._prompt_lengths: Counter[int] = Counter()
        """How many requests of `_in_prompt` have each prompt length."""
        self._longest_prompt = 0
        self._mask_of = IdentityCache(functools.partial(_mask_of_spec, number_of))

    def join(self, request_id: str, spec: EngineSpec, prompt_len: int) -> None:
        """Add a request, in place of one with the same id."""
        self.leave(request_id)
        mask = self._mask_of[spec]
        if not mask:
            return
        if spec.end <= prompt_len:
            self._in_prompt[request_id] = (prompt_len, mask)
            self._prompt_lengths[prompt_len] += 1
            self._longest_prompt = max(self._longest_prompt, prompt_len)
        else:
            self._always[request_id] = mask
            self._masks[mask] += 1
            self._union |= mask

    def __len__(self) -> int:
        return len(self._always) + len(self._in_prompt)

    def leave(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        in_prompt = self._in_prompt.pop(request_id, None)
        if in_prompt is not None and _remove_one(self._prompt_lengths, in_prompt[0]):
            self._longest_prompt = max(self._prompt_lengths, default=0)
        mask = self._always.pop(request_id, None)
        if mask is not None and _remove_one(self._masks, mask):
            self._union = functools.reduce(operator.or_, self._masks, 0)

    def taps_in(self, *groups: tuple[Sequence[str], Sequence[int]]) -> int:
        """Return the mask of the taps that a step needs.

        Requests that need taps for as long as they live count even in a step that leaves them out.

        `groups`: request ids, and the position of each one's first token in the step.
        """
        mask = self._union
        for request_ids, starts in groups if self._in_prompt else ():
            if not request_ids or min(starts) >= self._longest_prompt:
                continue
            for request_id, start in zip(request_ids, starts, strict=True):
                in_prompt = self._in_prompt.get(request_id)
                if in_prompt is not None and start < in_prompt[0]:
                    mask |= in_prompt[1]
        return mask

    def needed_by(self, requests: Iterable[tuple[EngineSpec, int]]) -> list[tuple[int, bool]]:
        """Return the masks of steps that have such requests, each request alone or all of them together.

        `requests`: what they ask, and how many tokens their prompts have. Returns each mask once, with whether only
        steps that compute a prompt have it.
        """
        alone = [(self._mask_of[spec], spec.end <= prompt_len) for spec, prompt_len in requests]
        always = functools.reduce(operator.or_, (mask for mask, in_prompts in alone if not in_prompts), 0)
        together = functools.reduce(operator.or_, (mask for mask, _ in alone), 0)
        found: dict[int, bool] = {}
        for mask, in_prompts in (*alone, (always, False), (together, True)):
            if mask:
                found[mask] = found.get(mask, True) and in_prompts
        return list(found.items())


def _remove_one(counter: Counter[int], key: int) -> bool:
    """Decrement a count; return whether it reached zero."""
    counter[key] -= 1
    if counter[key]:
        return False
    del counter[key]
    return True


def _mask_of_spec(number_of: Callable[[str], int | None], spec: EngineSpec) -> int:
    taps = functools.reduce(operator.or_, (_mask(*place) for place in spec.places), 0)
    probes = functools.reduce(operator.or_, (_mask(probe.hook, (probe.layer,)) for probe in spec.probes), 0)
    postprocess = spec.captures.postprocess
    kernel = _uses_cells(spec) << CELLS | (postprocess is not None and postprocess.folds) << GROUPS
    early = sum(1 << early_bit(*divmod(column, STAGES)) for column in spec.early_columns)
    other = bool(spec.encoders) << NO_GRAPH | bool(spec.replayed) << REPLAY
    return taps | probes << SCORES | other | kernel | early | _functions_of(number_of, spec)


def _uses_cells(spec: EngineSpec) -> bool:
    """Return whether an instruction of a request writes or reads a cell, or takes a row that was computed for it."""
    kinds = *WRITES, HELD, HOOK, RECONSTRUCT
    return spec.dose or any(one.cell or one.kind in kinds for step in spec.steps for one in step.instructions)


def _functions_of(number_of: Callable[[str], int | None], spec: EngineSpec) -> int:
    """Return the bits of the functions that a request calls; NO_GRAPH if the host has to call one."""
    mask = 0
    for move in spec.moves:
        for key in move.functions:
            identity, in_graphs, _ = key.partition(IN_GRAPHS)
            number = number_of(identity) if in_graphs else None
            bits = 0 if number is None else _function_mask(number, move.hook, move.layers)
            if not bits or mask & bits:  # a graph calls each function once at a tap
                return 1 << NO_GRAPH
            mask |= bits
    return mask


@functools.lru_cache(maxsize=1024)
def _function_mask(number: int, hook: str, layers: tuple[int, ...]) -> int:
    return sum(1 << Place(number, tap_of(Site(hook, layer)), hook == "resid_pre").bit for layer in layers)


@functools.lru_cache(maxsize=1024)
def _mask(hook: str, layers: tuple[int, ...]) -> int:
    return functools.reduce(operator.or_, (1 << tap_of(Site(hook, layer)) for layer in layers), 0)
