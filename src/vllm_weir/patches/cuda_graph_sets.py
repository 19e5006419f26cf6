"""`GraphSets`: when live CUDA graphs are captured, and which graph a step replays (runner V2)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm_weir.schema.taps import CELLS, GROUPS, NO_GRAPH, SCORES, TAPS, exact_bits
from vllm_weir.worker.runtime import WorkerRuntime
from vllm_weir.worker.tap.op import ALL, EVERYTHING

logger = logging.getLogger(__name__)

MAX_SETS = 8
"""Live sets for particular taps; batches that need others use the smallest that has theirs, or the
one with all."""
REQUESTS_TO_CAPTURE = {"FULL": 2, "PIECEWISE": 4}
"""Steps that must have needed a graph before it is captured, if they run without a graph until
then; by mode. Decoding returns to the same size again and again, whereas a mixed batch's size may
never recur."""
REQUESTS_TO_NARROW = {"FULL": 16, "PIECEWISE": 64}
"""The same if a graph that is larger, or has more taps, serves until then: dozens of such steps
lose only as much time as one capture takes."""
TOKENS_TO_NARROW, TOKENS_PER_IDLE_TAP = 8_000, 0.05
"""The same if plain requests share the step, as they would wait for the capture: the padding tokens
that such steps must have wasted in sum, and what an idle tap counts for. A capture takes about as
long as 2,000 tokens."""
_WIDEST = (ALL, EVERYTHING)
MAX_REMEMBERED = 4096
"""Different graphs whose demand is counted, or whose substitute is remembered."""
DUE = 1 - 1e-6
"""Demand at which a graph is captured: 1, less the rounding of a sum of fractions."""
MAX_SIZE_RATIO, MIN_START_TOKENS = 0.7, 16
"""Choice of the live graphs captured at start-up, which have the taps between blocks: each size is
at most this ratio of the next larger one, down to this many tokens. One of them serves most live
steps. All sizes would take seconds, and taps inside blocks would mean four times the launches."""


class LiveGraph(NamedTuple):
    """What identifies a live graph."""

    mask: int  # the taps that it launches, one bit each, ALL or EVERYTHING
    desc: Any  # vLLM's BatchExecutionDescriptor: mode, padded numbers of tokens and requests


class GraphSets:
    """The silent and the live graphs of one runner.

    A *silent* graph is one of vLLM's own. Its taps launch nothing, so it serves steps in which
    nothing is captured or steered. A *live* graph launches some of the taps, or all of them; those
    with the same taps are a set. A live step replays the graph of its size and taps if that has
    been captured, otherwise the smallest captured graph that covers it, or none. All
    tensor-parallel ranks have captured the same graphs.

    Args:
        manager: vLLM's CudaGraphManager, whose `capture` and `dispatch` are patched.
        lazy: whether live graphs are captured as they are needed, but for a few; if not, all after
            the silent ones.
        find_pieces: returns vLLM's piecewise wrappers that hold graphs.
        late_capture: makes the context in which a capture can run while the engine serves.
        agree: returns whether all tensor-parallel ranks pass True.
    """

    def __init__(
        self,
        manager: Any,
        runtime: WorkerRuntime,
        lazy: bool,
        find_pieces: Callable[[], list[Any]],
        late_capture: Callable[[], contextlib.AbstractContextManager[None]],
        agree: Callable[[bool], bool],
    ) -> None:
        self.manager, self.lazy = manager, lazy
        self._runtime, self._find_pieces, self._late_capture, self._agree = runtime, find_pieces, late_capture, agree
        self._vllm_capture, self._vllm_dispatch = manager.capture, manager.dispatch
        self._dispatch_signature = inspect.signature(self._vllm_dispatch)
        self._capture_again: Callable[[], None] | None = None
        self._swaps: dict[str, list[_SwappedAttribute]] = {}
        """Mode of a graph -> where vLLM keeps the graphs of that mode."""
        self._swapped: list[_SwappedAttribute] = []
        self._masks: list[int] = []
        """Masks of the live sets for particular taps."""
        self._demand: defaultdict[LiveGraph, float] = defaultdict(float)
        """Graphs that are not captured -> demand so far; at `DUE` a capture is worth its cost."""
        self._captured: set[LiveGraph] = set()
        self._failed: set[LiveGraph] = set()
        self._substitutes: dict[LiveGraph, LiveGraph | None] = {}
        self._late_captures: list[tuple[Any, float, int]] = []
        """Descriptor, seconds and bytes of each capture while the engine served."""
        self._warmed = 0
        """Graphs that were captured before a step needed them, since start-up."""
        self._steps: Counter[str] = Counter()
        manager.capture, manager.dispatch = self._capture_at_start, self._dispatch_step

    def _capture_at_start(self, *args: Any, **kwargs: Any) -> None:
        self._runtime.silence()
        self._capture_again = functools.partial(self._vllm_capture, *args, **kwargs)
        self._capture_again()
        self._captured, self._failed, self._masks, self._warmed = set(), set(), [], 0
        self._substitutes.clear()
        self._swaps = {
            "FULL": [_SwappedAttribute(self.manager, "graphs")],
            "PIECEWISE": [_SwappedAttribute(piece, "concrete_cudagraph_entries") for piece in self._find_pieces()],
        }
        descs_by_mode = self.manager._capture_descs
        if not self.lazy:
            self._capture_live(ALL, descs_by_mode)
            self._captured.update(LiveGraph(ALL, desc) for descs in descs_by_mode.values() for desc in descs)
        else:
            # All in one call: only graphs captured on the same stream can use memory that earlier
            # ones have left in the pool.
            some = {mode: _sizes_at_start(descs) for mode, descs in descs_by_mode.items()}
            self._try_capture(self._runtime.boundary_taps | 1 << CELLS | 1 << GROUPS, some)

    def _dispatch_step(self, *args: Any, **kwargs: Any) -> Any:
        """Replace vLLM's `dispatch`, once per step: swap in the graphs that it needs, until `restore`."""
        desc = self._vllm_dispatch(*args, **kwargs)
        if not self._runtime.parts.switch.live or desc.cg_mode.name == "NONE":
            return desc
        if self._runtime.parts.switch.mask >> NO_GRAPH & 1:
            self._steps["without"] += 1
            return self._without_graph(desc, *args, **kwargs)
        mask = self._mask_for(self._runtime.parts.switch.mask)
        if mask is None:
            self._steps["without"] += 1
            return self._without_graph(desc, *args, **kwargs)
        wanted = LiveGraph(mask, desc)
        graph = wanted if wanted in self._captured else self._capture_or_substitute(wanted)
        if graph is None:
            self._steps["without"] += 1
            return self._without_graph(desc, *args, **kwargs)
        self._steps["exact" if graph == wanted else "wider"] += 1
        self.restore()
        self._swap_in(graph.mask, self._swaps[desc.cg_mode.name])
        return graph.desc

    def _mask_for(self, needed: int) -> int | None:
        """Return the set to replay from, alike on all ranks; None if there is none, and no room for one."""
        called = exact_bits(needed)
        widest = EVERYTHING if needed >> SCORES & TAPS else ALL  # launches for probes that nobody has would cost time
        if not self.lazy:
            return None if called else widest
        room = MAX_SETS * (1 + bool(called))
        if needed in self._masks or (needed not in _WIDEST and len(self._masks) < room):
            return needed
        covering = (mask for mask in self._masks if mask & needed == needed)
        return min(covering, key=int.bit_count, default=None if called else widest)

    def _capture_or_substitute(self, wanted: LiveGraph) -> LiveGraph | None:
        """Return `wanted` if it is captured now, else its substitute, or None."""
        substitute = self._substitute(wanted)
        if self._is_due(wanted, self._capture_share(wanted, substitute)) and self._capture_late(wanted):
            return wanted
        return substitute

    def _substitute(self, wanted: LiveGraph) -> LiveGraph | None:
        """Return the smallest captured graph that covers `wanted`, or None; cached until others are captured."""
        if wanted not in self._substitutes:
            if len(self._substitutes) >= MAX_REMEMBERED:
                self._substitutes.clear()
            covering = [graph for graph in self._captured if _covers(graph, wanted)]
            self._substitutes[wanted] = min(covering, key=self._size, default=None)
        return self._substitutes[wanted]

    def _size(self, graph: LiveGraph) -> tuple[int, int]:
        return graph.desc.num_tokens, self._count_taps(graph.mask)

    def _count_taps(self, mask: int) -> int:
        launched = mask & ~(1 << CELLS | 1 << GROUPS)
        taps = len(self._runtime.taps) if mask in _WIDEST else launched.bit_count()
        return taps * (2 + (mask >> CELLS & 1) + (mask >> GROUPS & 1)) // 2

    def _capture_share(self, wanted: LiveGraph, substitute: LiveGraph | None) -> float:
        """Return what one step adds to the demand for `wanted`: its part of a capture's cost."""
        mode = wanted.desc.cg_mode.name
        if substitute is None:
            return 1 / REQUESTS_TO_CAPTURE[mode]
        if self._runtime.all_live:
            return 1 / REQUESTS_TO_NARROW[mode]
        padding = substitute.desc.num_tokens - wanted.desc.num_tokens
        idle_taps = self._count_taps(substitute.mask) - self._count_taps(wanted.mask)
        return (padding + TOKENS_PER_IDLE_TAP * idle_taps) / TOKENS_TO_NARROW

    def _is_due(self, wanted: LiveGraph, share: float) -> bool:
        """Add a step's share to the demand for a graph; return whether it is worth its capture."""
        if not self.lazy or wanted in self._failed:
            return False
        if len(self._demand) >= MAX_REMEMBERED:
            self._demand.clear()
        self._demand[wanted] += share
        return self._demand[wanted] >= DUE

    def _capture_late(self, graph: LiveGraph) -> bool:
        """Capture one live graph while the engine serves; return whether that succeeded."""
        mask, desc = graph
        if mask not in _WIDEST and mask not in self._masks:
            self._masks.append(mask)
        began, free = time.perf_counter(), _free_memory()
        done = self._try_capture(mask, {desc.cg_mode: [desc]}, self._late_capture)
        if done:
            seconds = time.perf_counter() - began
            self._late_captures.append((desc, seconds, free - _free_memory()))
            logger.info("Weir captured a live CUDA graph for %s in %.0f ms", desc, 1000 * seconds)
        return done

    def warm(self, wanted: Sequence[tuple[int, bool]], most: int | None = None) -> dict[str, int]:
        """Capture the graphs that steps with these taps replay, before one needs them.

        It is called between two steps, on all ranks with the same arguments.

        `wanted`: masks of taps, each with whether only steps that compute a prompt need them. `most`: how many requests
        decode at a time; None for as many as the engine has at once. Returns how many "graphs" were captured, the
        "bytes" of device memory that they took, how many graphs "failed", and how many of the masks are "without"
        graphs: their steps call what no graph can hold, or there are `MAX_SETS` others.
        """
        captured, free, failed, without = len(self._captured), _free_memory(), 0, 0
        for needed, in_prompts in wanted:
            mask = None if needed >> NO_GRAPH & 1 else self._mask_for(needed)
            if mask is None:
                without += 1
            elif self.lazy:
                failed += self._warm_set(mask, in_prompts, most)
        graphs = len(self._captured) - captured
        self._warmed += graphs
        return {"graphs": graphs, "bytes": max(0, free - _free_memory()), "failed": failed, "without": without}

    def _warm_set(self, mask: int, in_prompts: bool, most: int | None) -> int:
        """Capture what a set lacks; return how many graphs could not be captured."""
        if mask not in _WIDEST and mask not in self._masks:
            self._masks.append(mask)
        failed = 0
        for mode, descs in self.manager._capture_descs.items():
            sizes = [desc for desc in _sizes_of(descs, in_prompts, most) if LiveGraph(mask, desc) not in self._captured]
            before = set(self._failed)
            if sizes and not self._try_capture(mask, {mode: sizes}, self._late_capture):
                failed += len(sizes)
                self._failed = before  # one of them alone may yet be captured, once a step needs it
        return failed

    def _without_graph(self, desc: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the descriptor of a batch that runs without a graph: its own sizes, unpadded."""
        batch = self._dispatch_signature.bind(*args, **kwargs).arguments
        return type(desc)(
            cg_mode=type(desc.cg_mode).NONE,
            num_tokens=batch["num_tokens"],
            num_reqs=batch["num_reqs"],
            num_active_loras=desc.num_active_loras,
        )

    def _try_capture(
        self, mask: int, descs_by_mode: dict[Any, list[Any]], context: Any = contextlib.nullcontext
    ) -> bool:
        """Capture live graphs and return True; if a rank fails, drop them on all ranks."""
        swaps = [swap for mode in descs_by_mode for swap in self._swaps[mode.name]]
        graphs = {LiveGraph(mask, desc) for descs in descs_by_mode.values() for desc in descs}
        previous = [dict(swap.sets.get(mask, {})) for swap in swaps]
        done = True
        try:
            with context():
                self._capture_live(mask, descs_by_mode)
        except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError):
            logger.exception(
                "Weir could not capture live CUDA graphs for %s; such steps run without one", descs_by_mode
            )
            done = False
        if not self._agree(done):
            for swap, kept in zip(swaps, previous, strict=True):
                swap.sets[mask] = kept
            self._failed |= graphs
            return False
        self._captured |= graphs
        self._substitutes.clear()
        return True

    def _capture_live(self, mask: int, descs_by_mode: dict[Any, list[Any]]) -> None:
        """Have vLLM capture graphs of these sizes into the live set of `mask`, with its taps on."""
        assert self._capture_again is not None, "vLLM's own capture comes first"
        runtime, all_descs = self._runtime, self.manager._capture_descs
        step_mask = runtime.parts.switch.mask
        runtime.silence()  # warm-up passes find an empty plan; the plan of a step in progress is written afterwards
        self.restore()
        self._swap_in(mask, [swap for mode in descs_by_mode for swap in self._swaps[mode.name]])
        self.manager._capture_descs = descs_by_mode
        runtime.parts.switch.set_active(mask)
        try:
            self._capture_again()
        finally:
            runtime.parts.switch.set_active(step_mask)
            self.manager._capture_descs = all_descs
            self.restore()

    def _swap_in(self, mask: int, swaps: list[_SwappedAttribute]) -> None:
        for swap in swaps:
            swap.swap_in(mask)
        self._swapped = swaps

    def restore(self) -> None:
        swapped, self._swapped = self._swapped, []
        for swap in swapped:
            swap.restore()

    def close(self) -> None:
        self.restore()
        self.lazy, self._capture_again = False, None
        self._captured, self._swaps, self._masks = set(), {}, []
        self._substitutes.clear()

    def report(self) -> dict[str, Any]:
        """Return sizes of the sets, counts of steps, and seconds and bytes of late captures."""
        return {
            "graphs": "lazy" if self.lazy else "eager",
            "live": len(self._captured),
            "sets": len({mask for mask, _ in self._captured}),
            "failed": len(self._failed),
            "warmed": self._warmed,
            "steps": dict(self._steps),
            "captured_late": [
                (desc.cg_mode.name, desc.num_tokens, seconds, used) for desc, seconds, used in self._late_captures
            ],
        }


def _covers(graph: LiveGraph, wanted: LiveGraph) -> bool:
    """Return whether a graph has the taps, the kind and at least the size of the wanted one."""
    desc, wanted_desc = graph.desc, wanted.desc
    if exact_bits(wanted.mask) & ~exact_bits(graph.mask):
        return False  # a graph of all taps has been captured without what these stand for
    if graph.mask & wanted.mask != wanted.mask or desc.num_tokens < wanted_desc.num_tokens:
        return False
    same_kind = replace(desc, num_tokens=wanted_desc.num_tokens, num_reqs=wanted_desc.num_reqs) == wanted_desc
    return same_kind and (desc.num_reqs is None or desc.num_reqs >= (wanted_desc.num_reqs or 0))


def _sizes_at_start(descs: list[Any]) -> list[Any]:
    """Return a few of the sizes, largest first; see MAX_SIZE_RATIO."""
    chosen: list[Any] = []
    for desc in sorted(descs, key=lambda d: d.num_tokens, reverse=True):
        last = chosen[-1].num_tokens if chosen else None
        if last is None or (desc.num_tokens <= MAX_SIZE_RATIO * last and last > MIN_START_TOKENS):
            chosen.append(desc)
    return chosen


def _sizes_of(descs: list[Any], in_prompts: bool, most: int | None) -> list[Any]:
    """Return the sizes that steps may have, see `GraphSets.warm`."""
    decoding = [desc for desc in descs if _decodes_only(desc)]
    largest = min((desc.num_reqs for desc in decoding if desc.num_reqs >= (most or 0)), default=None)
    needed = [] if in_prompts else decoding
    if most is not None and largest is not None:
        needed = [desc for desc in needed if desc.num_reqs <= largest]
    return [desc for desc in descs if desc in needed or not _decodes_only(desc)]


def _decodes_only(desc: Any) -> bool:
    """Return whether a graph takes steps alone in which every request decodes."""
    return getattr(desc, "uniform_token_count", None) is not None or getattr(desc, "max_query_len", None) is not None


class _SwappedAttribute:
    """An attribute in which vLLM keeps its graphs, and the live sets' values for it by mask."""

    def __init__(self, owner: Any, attribute: str) -> None:
        self._owner, self._attribute = owner, attribute
        self._vllm_graphs: Any = None
        self.sets: dict[int, dict[Any, Any]] = {}

    def swap_in(self, mask: int) -> None:
        self._vllm_graphs = getattr(self._owner, self._attribute)
        setattr(self._owner, self._attribute, self.sets.setdefault(mask, {}))

    def restore(self) -> None:
        setattr(self._owner, self._attribute, self._vllm_graphs)


def _free_memory() -> int:
    """Return the device's free bytes, after emptying torch's cache, as a capture does anyway."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
