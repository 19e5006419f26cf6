"""CUDA graphs on runner V2: vLLM's own, with silent taps, and beside them sets with live taps.

A tap is *silent* while its runtime's switch is off, and then launches nothing. vLLM's own code
captures a few live graphs at start-up, and others once enough steps have needed them. Every step
replays from the set that it needs. All sets share vLLM's memory pool, its static buffers and one
stream, as graphs of different sizes do. Outside a live step's forward pass everything is as vLLM
left it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from vllm_weir.patches.cuda_graph_sets import GraphSets
from vllm_weir.worker.runtime import WorkerRuntime


class RunnerGraphs(NamedTuple):
    """What is asked of a runner's graphs."""

    report: Callable[[], dict[str, Any]]  # returns what is captured
    # see `GraphSets.warm`; nothing is captured where there are no sets
    warm: Callable[[Sequence[tuple[int, bool]], int | None], dict[str, int]]


def patch_runner(runner: Any, runtime: WorkerRuntime, config: Any, eager: bool) -> RunnerGraphs:
    """Patch how a V2 runner captures and replays graphs.

    The runner's model is loaded, and no graph captured yet. With `eager` the whole live set is captured at
    start-up. So it is in engines in which one rank must not stop alone (data parallel), or in which a late
    capture would unload adapters (LoRA) or write into state that requests own (Mamba).
    """
    capture_model, execute_model, shutdown = runner.capture_model, runner.execute_model, runner.shutdown
    eager = eager or config.parallel_config.data_parallel_size > 1 or config.lora_config is not None
    current: weakref.ref[GraphSets] | None = None  # weak: when vLLM drops a manager, its sets go too

    def sets() -> GraphSets | None:
        return current() if current is not None else None

    @functools.wraps(capture_model)
    def capture(*args: Any, **kwargs: Any) -> Any:
        nonlocal current
        manager, graph_sets = runner.cudagraph_manager, sets()
        if manager.use_breakable_cg:
            runtime.parts.switch.activate_always()  # their graphs are kept elsewhere: one set, always live
        elif graph_sets is None or graph_sets.manager is not manager:
            lazy = not eager and not runner.kv_cache_config.has_mamba_layers
            current = weakref.ref(_make_sets(runner, runtime, config, lazy))
        with _captures_allowed():
            return capture_model(*args, **kwargs)

    @functools.wraps(execute_model)
    def execute(scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if intermediate_tensors is not None:
            intermediate_tensors = _PaddedWhenRead(intermediate_tensors)
        try:
            return execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)
        finally:
            if (graph_sets := sets()) is not None:
                graph_sets.restore()

    @functools.wraps(shutdown)
    def shut_down(*args: Any, **kwargs: Any) -> Any:
        if (graph_sets := sets()) is not None:
            graph_sets.close()
        return shutdown(*args, **kwargs)

    def report() -> dict[str, Any]:
        graph_sets = sets()
        if graph_sets is None:
            return {"graphs": "always live" if runtime.parts.switch.pinned else "none"}
        return graph_sets.report()

    runner.capture_model, runner.execute_model, runner.shutdown = capture, execute, shut_down
    return RunnerGraphs(report, functools.partial(_warm, sets))


@torch.inference_mode()
def _warm(sets: Callable[[], GraphSets | None], wanted: Sequence[tuple[int, bool]], most: int | None) -> dict[str, int]:
    graph_sets = sets()
    return {} if graph_sets is None else graph_sets.warm(wanted, most)


class _PaddedWhenRead:
    """What the pipeline stage before sent, with as many rows as this stage's graph takes.

    The stages pad a step alike under vLLM alone. With Weir each chooses a graph for the taps in its
    own blocks, so the stage before may have padded less. Rows of padding are read by nobody.
    """

    def __init__(self, received: Any) -> None:
        self._received = received

    @property
    def tensors(self) -> dict[str, _PaddedRows]:
        return {name: _PaddedRows(rows) for name, rows in self._received.tensors.items()}  # waits for them to arrive


class _PaddedRows:
    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        rows = self._rows[wanted]
        return torch.nn.functional.pad(rows, (0, 0, 0, wanted.stop - len(rows)))


def _make_sets(runner: Any, runtime: WorkerRuntime, config: Any, lazy: bool) -> GraphSets:
    find_pieces = functools.partial(_find_pieces, config.compilation_config)
    late_capture = functools.partial(_late_capture, torch.cuda.Stream(runner.device))
    return GraphSets(runner.cudagraph_manager, runtime, lazy, find_pieces, late_capture, _agree)


def _find_pieces(compilation_config: Any) -> list[Any]:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    found = (w for w in list(CUDAGraphWrapper._all_instances) if w.compilation_config is compilation_config)
    return [w for w in found if w.runtime_mode.name == "PIECEWISE" and w.concrete_cudagraph_entries]


def _captures_allowed() -> contextlib.AbstractContextManager[Any]:
    """Let vLLM's piecewise wrappers capture.

    Runner V1 forbids that to the whole process once it has captured its own graphs, and V2 never
    allows it again: an engine on V2 could not start after one on V1.
    """
    from vllm.compilation import monitor

    return patch.object(monitor, "cudagraph_capturing_enabled", True)


@contextlib.contextmanager
def _late_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make vLLM's capture possible while the engine serves; `stream` is the one for all such captures."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu import cudagraph_utils

    # Other threads fetch outputs meanwhile; in the default mode a CUDA call of theirs would break
    # the capture.
    graph = functools.partial(torch.cuda.graph, capture_error_mode="thread_local")
    # The pool's memory belongs to streams: on a new one, no capture could use what an earlier one
    # has left.
    context = parallel_state.GraphCaptureContext(stream)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with (
            patch.object(torch.cuda, "graph", graph),
            patch.object(parallel_state, "GraphCaptureContext", lambda _stream: context),
            _captures_allowed(),
            patch.object(cudagraph_utils, "tqdm", lambda descs, **_: descs),
        ):
            yield
    finally:
        if collecting:
            gc.enable()
        torch.cuda.synchronize(stream.device)  # the step's own stream does not wait for this one


def _agree(done: bool) -> bool:
    """Return whether all tensor-parallel ranks pass True, since graphs contain collectives."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return done
    votes = torch.tensor([done], dtype=torch.int32)
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes.item())
