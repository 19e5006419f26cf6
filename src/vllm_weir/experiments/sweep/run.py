"""`sweep`: activation patching over layers, positions, hook points and heads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

from vllm_weir import api
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.experiments.metrics import DENOISE, Mode
from vllm_weir.experiments.sweep.cells import CellRunner
from vllm_weir.experiments.sweep.checkpoint import Checkpoint, NoCheckpoint
from vllm_weir.experiments.sweep.plan import SweepPlan
from vllm_weir.experiments.sweep.prepare import prepare
from vllm_weir.experiments.sweep.result import Sweep
from vllm_weir.frontend.engine import Engine
from vllm_weir.schema.fields import right_words
from vllm_weir.schema.hooks import HookPoint
from vllm_weir.storage.cli import progress_bar
from vllm_weir.util.frozen_heap import frozen_heap

REPORT_SECONDS = 0.1
"""Between two updates of the bar: each takes a tenth of a cell's time."""


@right_words
def sweep(
    llm: Any,
    clean: Any,
    corrupt: Any,
    hooks: HookPoint | Sequence[HookPoint] = "resid_post",
    layers: Any = "all",
    positions: Any = "all",
    heads: Any = None,
    *,
    metric: Any,
    mode: Mode = DENOISE,
    to: Any = None,
    freeze: Any = None,
    sampling: Any = None,
    lora: Any = None,
    checkpoint: str | PathLike | None = None,
    progress: bool | Callable[[int, int], Any] = True,
) -> Sweep:
    """Patch rows of one prompt into the run of another, place by place, and measure each run.

    Activation patching (Vig et al. 2020, arXiv:2004.12265; Heimersheim and Nanda 2024,
    arXiv:2404.15255). Each cell of the grid is one run of the base prompt in which the rows of one
    hook point, block, entry of `positions` and head are those of the other prompt's run.

    With `to` it is path patching (Wang et al. 2022, arXiv:2211.00593), in two runs a cell. In the
    first, the cell's rows are put in and everything of `freeze` between them and the receiver is
    held at the base run's rows; what the receiver has then is read. In the second, the base run gets
    the receiver's rows, and is measured.

    Args:
        llm: ``LLM`` or Weir's drop-in class. Its prefix cache, if on, saves what lies before each
            cell's first position.
        clean: a text, a chat (list of messages) or token ids, or a list of these, one for each pair.
        corrupt: likewise; as many tokens as `clean`, unless `positions` lists what means the same in
            both.
        hooks: hook point, or a list of them.
        layers: ``"all"``, a block, or a list of them; with `to`, ``"all"`` are those before it.
        positions: ``"all"``, a cell for each token; or a list of entries, each an int or a selector
            of `Capture` (``"4:7"``, ``"last_prompt"``, ``[2, 5]``, ``{"token_ids": [...]}``) whose
            positions are patched together. Another single selector is one entry.
        heads: None for whole rows; ``"all"`` or a list of heads, a cell for each, at hook points
            that have a row for each head.
        metric: ``weir.logit_diff(a, b)``, ``weir.on_logits(f)``, or any function of vLLM's output
            that returns a number.
        mode: ``"denoise"`` runs the corrupt prompt and puts clean rows in; ``"noise"`` runs the
            clean prompt and puts corrupt rows in.
        to: the receiver of a path, (hook, layer) or (hook, layer, heads); it receives at every
            position from the cell's first on.
        freeze: what is held still on a path: ``"attn_out"``, ``"mlp_out"`` or both; None for both.
            With ``"attn_out"`` alone a path may lead through MLPs, as in Wang et al.
        sampling: ``SamplingParams`` for a function of the output; default: one greedy token.
        lora: ``LoRARequest``, or the path of an adapter's folder, under which all runs are made.
        checkpoint: a file to which every number is appended; the same call goes on from there, on an
            engine that has the same weights loaded, with as many ranks, under the same adapter.
        progress: whether to show a bar; or a function of (numbers done, numbers in all).

    Raises:
        WeirError: naming the field.
    """
    engine, adapter = api.engine(llm), Adapter.parse(lora)
    prepared = prepare(
        engine, clean, corrupt, hooks=hooks, layers=layers, positions=positions, heads=heads, metric=metric, mode=mode,
        to=to, freeze=freeze, sampling=sampling, adapter=adapter,
    )  # fmt: skip
    plan, options = prepared.plan, {} if adapter is None else adapter.load(engine)
    with (
        _store(engine, plan, checkpoint) as store,
        _reporter(progress, plan.keys) as report,
        frozen_heap(),
    ):
        report(len(store.values))
        CellRunner(engine, plan, prepared.metric, store, report, options).run()
        return Sweep.of(plan, store.values, prepared.metric.name, prepared.position_labels)


def _store(engine: Engine, plan: SweepPlan, path: str | PathLike | None) -> Checkpoint | NoCheckpoint:
    return NoCheckpoint() if path is None else Checkpoint(path, plan.digest(engine.weights()), plan.keys)


@contextlib.contextmanager
def _reporter(progress: bool | Callable[[int, int], Any], total: int) -> Iterator[Callable[[int], Any]]:
    """Yield a function that is told how many numbers are done."""
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    with progress_bar(not progress) as bar:
        task = bar.add_task("cells", total=total, rate="")
        shown = 0.0

        def report(done: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if done < total and now - shown < REPORT_SECONDS:
                return
            shown = now
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, rate=f"{speed:,.0f} cells/s" if speed else "")

        yield report
