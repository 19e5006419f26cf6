"""The silent and the live CUDA graphs of one runner V2, and the exchange of one set for another."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from vllm_weir.worker.station import Station
from vllm_weir.worker.tap import ALL

logger = logging.getLogger(__name__)


MOST_SETS = 8
"""Live sets for particular taps; batches that need others use the smallest that has theirs, or the one with all."""


WORTH_IT = {"FULL": 2, "PIECEWISE": 4}
"""The time a graph is asked for at which it is captured; steps before that run without. Decoding comes back to the same
size again and again, a mixed batch's size may never come again."""


class GraphSets:
    """The silent and the live graphs of one runner; a live set has the launches of some of the taps, or of all.

    Attributes:
        manager: vLLM's CudaGraphManager, whose `capture` and `dispatch` are held.
        lazy: whether live graphs are captured when first needed; if not, right after the silent ones.
    """

    def __init__(
        self,
        manager: Any,
        station: Station,
        lazy: bool,
        pieces: Callable[[], list[Any]],
        late_capture: Callable[[], contextlib.AbstractContextManager[None]],
        agreed: Callable[[bool], bool],
    ) -> None:
        self.manager, self.lazy = manager, lazy
        self._station, self._pieces, self._late_capture, self._agreed = station, pieces, late_capture, agreed
        self._capture, self._dispatch = manager.capture, manager.dispatch
        self._signature = inspect.signature(self._dispatch)
        self._again: Callable[[], None] | None = None
        self._swaps: dict[str, list[_Swap]] = {}
        self._swapped: list[_Swap] = []
        self._masks: list[int] = []
        self._asked: Counter[tuple[int, Any]] = Counter()
        self._ready: set[tuple[int, Any]] = set()
        self._failed: set[tuple[int, Any]] = set()
        self._late: list[tuple[Any, float, int]] = []
        manager.capture, manager.dispatch = self._capture_at_start, self._dispatch_step

    def _capture_at_start(self, *args, **kwargs) -> None:
        self._station.silence()
        self._again = functools.partial(self._capture, *args, **kwargs)
        self._again()
        self._ready, self._failed, self._masks = set(), set(), []
        self._swaps = {
            "FULL": [_Swap(self.manager, "graphs")],
            "PIECEWISE": [_Swap(piece, "concrete_cudagraph_entries") for piece in self._pieces()],
        }
        if not self.lazy:
            descs = self.manager._capture_descs
            self._capture_live(ALL, descs)
            self._ready.update((ALL, desc) for of_mode in descs.values() for desc in of_mode)

    def _dispatch_step(self, *args, **kwargs) -> Any:
        desc = self._dispatch(*args, **kwargs)
        mode = desc.cg_mode.name
        if not self._station.switch.live or mode == "NONE":
            return desc
        mask = self._mask_for(self._station.switch.mask)
        if (mask, desc) not in self._ready and not self._add(mask, desc):
            return self._without_graph(desc, *args, **kwargs)
        self.settle()
        self._swap(mask, self._swaps[mode])
        return desc

    def _without_graph(self, desc: Any, *args, **kwargs) -> Any:
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
        if needed in self._masks or not self.lazy:
            return needed if needed in self._masks else ALL
        if needed != ALL and len(self._masks) < MOST_SETS:
            self._masks.append(needed)
            return needed
        return min((m for m in self._masks if m & needed == needed), key=int.bit_count, default=ALL)

    def _add(self, mask: int, desc: Any) -> bool:
        """Capture one live graph now; False if there is none to be had, or it is not worth it yet."""
        if not self.lazy or (mask, desc) in self._failed:
            return False
        self._asked[mask, desc] += 1
        if self._asked[mask, desc] < WORTH_IT[desc.cg_mode.name]:
            return False
        swaps = self._swaps[desc.cg_mode.name]
        before = [dict(swap.sets.get(mask, {})) for swap in swaps]
        began, free = time.perf_counter(), _free_memory()
        done = True
        try:
            with self._late_capture():
                self._capture_live(mask, {desc.cg_mode: [desc]})
        except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError):
            logger.exception("Weir could not capture a live CUDA graph for %s; such steps run without one", desc)
            done = False
        if not self._agreed(done):
            for swap, graphs in zip(swaps, before, strict=True):
                swap.sets[mask] = graphs
            self._failed.add((mask, desc))
            return False
        self._late.append((desc, time.perf_counter() - began, free - _free_memory()))
        logger.info("Weir captured a live CUDA graph for %s in %.0f ms", desc, 1000 * self._late[-1][1])
        self._ready.add((mask, desc))
        return True

    def _capture_live(self, mask: int, descs: dict[Any, list[Any]]) -> None:
        assert self._again is not None, "vLLM's own capture comes first"
        station, all_descs = self._station, self.manager._capture_descs
        was = station.switch.mask
        station.silence()  # the plan: warm-up passes find nothing to do, and the step's own plan comes after
        self.settle()
        self._swap(mask, [swap for mode in descs for swap in self._swaps[mode.name]])
        self.manager._capture_descs = descs
        station.switch.turn(mask)
        try:
            self._again()
        finally:
            station.switch.turn(was)
            self.manager._capture_descs = all_descs
            self.settle()

    def _swap(self, mask: int, swaps: list[_Swap]) -> None:
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

    def report(self) -> dict[str, Any]:
        """The sets' sizes, and what late captures took."""
        return {
            "graphs": "lazy" if self.lazy else "eager",
            "live": len(self._ready),
            "sets": len({mask for mask, _ in self._ready}),
            "failed": len(self._failed),
            "captured_late": [(d.cg_mode.name, d.num_tokens, seconds, used) for d, seconds, used in self._late],
        }


class _Swap:
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
