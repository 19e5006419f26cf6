"""The silent and the live CUDA graphs of one runner V2, and the exchange of one set for another."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_weir.worker.runtime import WorkerRuntime
from vllm_weir.worker.tap.op import ALL

logger = logging.getLogger(__name__)


MOST_SETS = 8
"""Live sets for particular taps; batches that need others use the smallest that has theirs, or the one with all."""


WORTH_IT = {"FULL": 2, "PIECEWISE": 4}
"""The time a graph is asked for at which it is captured; steps before that run without. Decoding comes back to the same
size again and again, a mixed batch's size may never come again."""
WORTH_MORE = {"FULL": 16, "PIECEWISE": 64}
"""The same where a graph that is a little too large, or that has more taps, serves meanwhile: a capture takes as long
as dozens of such steps lose."""
PATIENCE, IDLE_TAP = 8_000, 0.05
"""The same where requests that asked for nothing share the step, and would wait for the capture: tokens of padding, in
sum, an idle tap counted as this part of one. A capture takes as long as some 2,000 (33 to 58 ms, and 23 us a token,
with the shapes of Llama-3.1-8B on an H200)."""
MOST_ASKED = 4096
"""Graphs that were asked for are remembered up to this many different ones."""
ALMOST = 1 - 1e-6
"""The whole, as a sum of parts comes out."""
SPACING, SMALLEST = 0.7, 16
"""Sizes of the live graphs, with the taps between blocks, that are captured at start-up: each at most this part of the
next, down to this many tokens. One of them serves whatever most live steps need; all sizes would take seconds, and the
points inside blocks are four times as many launches."""


class GraphSets:
    """The silent and the live graphs of one runner; a live set has the launches of some of the taps, or of all.

    Attributes:
        manager: vLLM's CudaGraphManager, whose `capture` and `dispatch` are held.
        lazy: whether live graphs are captured as they are needed, but for a few; if not, all after the silent ones.
    """

    def __init__(
        self,
        manager: Any,
        runtime: WorkerRuntime,
        lazy: bool,
        pieces: Callable[[], list[Any]],
        late_capture: Callable[[], contextlib.AbstractContextManager[None]],
        agreed: Callable[[bool], bool],
    ) -> None:
        self.manager, self.lazy = manager, lazy
        self._runtime, self._pieces, self._late_capture, self._agreed = runtime, pieces, late_capture, agreed
        self._capture, self._dispatch = manager.capture, manager.dispatch
        self._signature = inspect.signature(self._dispatch)
        self._again: Callable[[], None] | None = None
        self._swaps: dict[str, list[_SwappedAttribute]] = {}
        self._swapped: list[_SwappedAttribute] = []
        self._masks: list[int] = []
        self._due: defaultdict[tuple[int, Any], float] = defaultdict(float)
        """Graphs that were asked for, and how much of what makes each worth its capture has come together."""
        self._ready: set[tuple[int, Any]] = set()
        self._failed: set[tuple[int, Any]] = set()
        self._served: dict[tuple[int, Any], tuple[int, Any] | None] = {}
        self._late: list[tuple[Any, float, int]] = []
        self._steps: Counter[str] = Counter()
        manager.capture, manager.dispatch = self._capture_at_start, self._dispatch_step

    def _capture_at_start(self, *args: Any, **kwargs: Any) -> None:
        self._runtime.silence()
        self._again = functools.partial(self._capture, *args, **kwargs)
        self._again()
        self._ready, self._failed, self._masks = set(), set(), []
        self._served.clear()
        self._swaps = {
            "FULL": [_SwappedAttribute(self.manager, "graphs")],
            "PIECEWISE": [_SwappedAttribute(piece, "concrete_cudagraph_entries") for piece in self._pieces()],
        }
        descs = self.manager._capture_descs
        if not self.lazy:
            self._capture_live(ALL, descs)
            self._ready.update((ALL, desc) for of_mode in descs.values() for desc in of_mode)
        else:
            # All with one call: what an earlier graph leaves in the pool, only one on the same stream can use.
            spaced = {mode: _spaced(of_mode) for mode, of_mode in descs.items()}
            self._capture_guarded(self._runtime.boundary_taps, spaced)

    def _dispatch_step(self, *args: Any, **kwargs: Any) -> Any:
        desc = self._dispatch(*args, **kwargs)
        mode = desc.cg_mode.name
        if not self._runtime.switch.live or mode == "NONE":
            return desc
        mask = self._mask_for(self._runtime.switch.mask)
        chosen = (mask, desc)
        if chosen not in self._ready:
            other = self._serves(*chosen)
            if not self._add(mask, desc, self._share(mask, desc, other)):
                if other is None:
                    self._steps["without"] += 1
                    return self._without_graph(desc, *args, **kwargs)
                chosen = other
        self._steps["exact" if chosen == (mask, desc) else "wider"] += 1
        self.settle()
        self._swap(chosen[0], self._swaps[mode])
        return chosen[1]

    def _serves(self, mask: int, desc: Any) -> tuple[int, Any] | None:
        """The smallest live graph that has the taps and at least the size; looked for once, until there are more."""
        wanted = (mask, desc)
        if wanted not in self._served:
            if len(self._served) >= MOST_ASKED:
                self._served.clear()
            self._served[wanted] = self._smallest(mask, desc)
        return self._served[wanted]

    def _smallest(self, mask: int, desc: Any) -> tuple[int, Any] | None:

        def fits(m: int, d: Any) -> bool:
            if m & mask != mask or d.num_tokens < desc.num_tokens:
                return False
            alike = replace(d, num_tokens=desc.num_tokens, num_reqs=desc.num_reqs) == desc
            return alike and (d.num_reqs is None or d.num_reqs >= (desc.num_reqs or 0))

        found = [(m, d) for m, d in self._ready if fits(m, d)]
        return min(found, key=lambda x: (x[1].num_tokens, self._taps(x[0])), default=None)

    def _share(self, mask: int, desc: Any, other: tuple[int, Any] | None) -> float:
        """How much of what makes a capture worth it one step adds, which the `other` graph serves."""
        mode = desc.cg_mode.name
        if other is None:
            return 1 / WORTH_IT[mode]
        if self._runtime.all_live:
            return 1 / WORTH_MORE[mode]
        padding = other[1].num_tokens - desc.num_tokens
        return (padding + IDLE_TAP * (self._taps(other[0]) - self._taps(mask))) / PATIENCE

    def _taps(self, mask: int) -> int:
        return len(self._runtime.taps) if mask == ALL else mask.bit_count()

    def _without_graph(self, desc: Any, *args: Any, **kwargs: Any) -> Any:
        """What vLLM dispatches to when it has no graph for a batch: its own sizes, unpadded."""
        batch = self._signature.bind(*args, **kwargs).arguments
        return type(desc)(
            cg_mode=type(desc.cg_mode).NONE,
            num_tokens=batch["num_tokens"],
            num_reqs=batch["num_reqs"],
            num_active_loras=desc.num_active_loras,
        )

    def _mask_for(self, needed: int) -> int:
        """The set to replay from; from what all ranks know alike, so that they agree."""
        if not self.lazy:
            return ALL
        if needed in self._masks or (needed != ALL and len(self._masks) < MOST_SETS):
            return needed
        return min((m for m in self._masks if m & needed == needed), key=int.bit_count, default=ALL)

    def _add(self, mask: int, desc: Any, share: float) -> bool:
        """Capture one live graph now; False if there is none to be had, or it is not worth it yet."""
        if not self.lazy or (mask, desc) in self._failed:
            return False
        if len(self._due) >= MOST_ASKED:
            self._due.clear()
        self._due[mask, desc] += share
        if self._due[mask, desc] < ALMOST:
            return False
        if mask != ALL and mask not in self._masks:
            self._masks.append(mask)
        began, free = time.perf_counter(), _free_memory()
        done = self._capture_guarded(mask, {desc.cg_mode: [desc]}, self._late_capture)
        if done:
            self._late.append((desc, time.perf_counter() - began, free - _free_memory()))
            logger.info("Weir captured a live CUDA graph for %s in %.0f ms", desc, 1000 * self._late[-1][1])
        return done

    def _capture_guarded(self, mask: int, descs: dict[Any, list[Any]], around: Any = contextlib.nullcontext) -> bool:
        """Capture live graphs; False if that failed on one of the ranks, and then it is as if none had been tried."""
        swaps = [swap for mode in descs for swap in self._swaps[mode.name]]
        every = {(mask, desc) for of_mode in descs.values() for desc in of_mode}
        before = [dict(swap.sets.get(mask, {})) for swap in swaps]
        done = True
        try:
            with around():
                self._capture_live(mask, descs)
        except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError):
            logger.exception("Weir could not capture live CUDA graphs for %s; such steps run without one", descs)
            done = False
        if not self._agreed(done):
            for swap, graphs in zip(swaps, before, strict=True):
                swap.sets[mask] = graphs
            self._failed |= every
            return False
        self._ready |= every
        self._served.clear()
        return True

    def _capture_live(self, mask: int, descs: dict[Any, list[Any]]) -> None:
        assert self._again is not None, "vLLM's own capture comes first"
        runtime, all_descs = self._runtime, self.manager._capture_descs
        was = runtime.switch.mask
        runtime.silence()  # the plan: warm-up passes find nothing to do, and the step's own plan comes after
        self.settle()
        self._swap(mask, [swap for mode in descs for swap in self._swaps[mode.name]])
        self.manager._capture_descs = descs
        runtime.switch.turn(mask)
        try:
            self._again()
        finally:
            runtime.switch.turn(was)
            self.manager._capture_descs = all_descs
            self.settle()

    def _swap(self, mask: int, swaps: list[_SwappedAttribute]) -> None:
        for swap in swaps:
            swap.put(mask)
        self._swapped = swaps

    def settle(self) -> None:
        """vLLM's own graphs are in place again."""
        swapped, self._swapped = self._swapped, []
        for swap in swapped:
            swap.back()

    def close(self) -> None:
        """Let go of the live graphs and of the model that they were captured from; live steps run without graphs."""
        self.settle()
        self.lazy, self._again = False, None
        self._ready, self._swaps, self._masks = set(), {}, []
        self._served.clear()

    def report(self) -> dict[str, Any]:
        """The sets' sizes, and what late captures took."""
        return {
            "graphs": "lazy" if self.lazy else "eager",
            "live": len(self._ready),
            "sets": len({mask for mask, _ in self._ready}),
            "failed": len(self._failed),
            "steps": dict(self._steps),
            "captured_late": [(d.cg_mode.name, d.num_tokens, seconds, used) for d, seconds, used in self._late],
        }


def _spaced(descs: list[Any]) -> list[Any]:
    """A few of the sizes, descending: see SPACING."""
    out: list[Any] = []
    for desc in sorted(descs, key=lambda d: d.num_tokens, reverse=True):
        if not out or (desc.num_tokens <= SPACING * out[-1].num_tokens and out[-1].num_tokens > SMALLEST):
            out.append(desc)
    return out


class _SwappedAttribute:
    """An attribute of vLLM's that holds its graphs, and the live sets' values for it by mask."""

    def __init__(self, owner: Any, attribute: str) -> None:
        self._owner, self._attribute = owner, attribute
        self._own: Any = None
        self.sets: dict[int, dict[Any, Any]] = {}

    def put(self, mask: int) -> None:
        self._own = getattr(self._owner, self._attribute)
        setattr(self._owner, self._attribute, self.sets.setdefault(mask, {}))

    def back(self) -> None:
        setattr(self._owner, self._attribute, self._own)


def _free_memory() -> int:
    """Bytes that the device has left, when nothing is kept that nobody uses: a capture empties that cache anyway."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
