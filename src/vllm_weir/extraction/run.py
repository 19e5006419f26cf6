"""`extract`: the whole run, from a source's URL to a summary."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import ExtractionEngine, VllmEngine
from vllm_weir.extraction.plan import ExtractionPlan, OutputTarget, Ray, _known
from vllm_weir.extraction.record_loop import RecordCounts
from vllm_weir.extraction.run_spec import RunSpec, check_run, read_skipped, request_id, write_skipped
from vllm_weir.extraction.source import open_source
from vllm_weir.storage.layouts.base import MARKER

ON_ERROR = ("fail", "skip")


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        url: of the dataset; `weir.load` opens it.
        records: in the source (up to `limit`).
        requests, rows, tokens, bytes: written by this run; bytes as stored.
        held: records that were there already.
        truncated: requests of this run whose prompt was cut to `max_length`.
        skipped: record -> why it was not taken; also in the dataset's ``skipped.jsonl``.
        seconds: that reading and writing took; with Ray, and the engines' start.
        interrupted: whether it ended early; the same call goes on.
    """

    url: str
    records: int
    requests: int
    rows: int
    tokens: int
    bytes: int
    held: int
    truncated: int
    skipped: dict[int, str]
    seconds: float
    interrupted: bool = False


def extract(
    source: str | PathLike,
    model: str,
    out: str | PathLike,
    *,
    layers: Any = "all",
    hook: str = "resid_post",
    positions: Any = "prompt",
    compress: Any = None,
    reduce: str | None = None,
    dtype: Any = None,
    max_tokens: int = 1,
    max_length: int | None = None,
    column: str = "text",
    split: str | None = None,
    layout: str = "sharded",
    limit: int | None = None,
    batch: int = 256,
    on_error: str = "fail",
    engine: dict[str, Any] | None = None,
    ray: Ray | None = None,
    flush_seconds: float = 30.0,
    source_options: dict[str, Any] | None = None,
    report: Callable[[RecordCounts, int], Any] | None = None,
    start_engine: Callable[[RunSpec], ExtractionEngine] = VllmEngine,
    **options: Any,
) -> Summary:
    """Activations of every text of a dataset, in files. What is there already is not done again: run it again to go on.

    Of no texts at all it is a dataset without requests.

    Args:
        source, column, split, source_options: texts or chats, see `open_source`; `source_options` are fsspec's.
        model, engine: as vLLM takes it, and further options of ``vllm.LLM``.
        out: folder or fsspec URL of the dataset, new or of the same run.
        layers, hook, positions, compress, reduce, dtype: what is taken, as for `Capture`.
        max_tokens: tokens that each request generates, greedily.
        max_length: prompts are cut to so many tokens; without it too long ones are errors.
        layout, options: as for `open_writer` (``fsync``, ``storage_options``, ``shard_bytes``, ...).
        limit: only the first so many records.
        batch: records that the engine gets at once.
        on_error: ``"fail"``: a record that is empty, too long or no text ends the run. ``"skip"``: it is listed in
            the dataset's ``skipped.jsonl``, and in the summary.
        ray: run on Ray.
        flush_seconds: least time between two moments at which finished requests are published.
        report: called with (what was done since, records in all).
        start_engine: makes the engine; for tests, and for engines of your own.

    Raises:
        WeirError: naming the field, the record or the file; what was finished before is kept.
    """
    if on_error not in ON_ERROR:
        raise WeirError(f"choose from {', '.join(ON_ERROR)}", "on_error")
    for name, value in (("batch", batch), ("limit", limit)):
        if not (value is None and name == "limit") and (type(value) is not int or value < 1):
            raise WeirError("a number of records, at least 1", name)
    wanted = RunSpec(model, hook, layers, positions, compress, reduce, dtype, max_tokens, max_length, engine or {})
    texts = open_source(source, column, split=split, storage_options=source_options)
    plan = ExtractionPlan(
        wanted, texts, OutputTarget(str(out), layout, options), batch, on_error == "skip", flush_seconds, start_engine
    )
    plan.target.check()  # the engine's start is long
    begun = check_run(plan.target.store, wanted.identity(texts))
    if MARKER in plan.target.store.names() and not begun and plan.target_requests():
        raise WeirError(f"{out} holds activations that `weir extract` did not write; choose another place", "out")
    total = len(texts) if limit is None else min(limit, len(texts))
    counts, started = RecordCounts(), [time.monotonic()]

    def tell(step: RecordCounts) -> None:
        counts.add(step)
        if report is not None:
            report(step, total)

    with interruptible() as stop:
        left = _left(plan, total, begun)
        if not total:
            plan.target.writer().close()  # a dataset without requests
        if not left:
            tell(RecordCounts(held=total - len(_known(plan, total)), skipped=_known(plan, total)))
        elif ray is not None:
            from vllm_weir.extraction.ray_backend import run

            run(plan, ray, left, total, tell, stop)
        else:
            _run(plan, total, tell, stop, started)
        if plan.skip:
            write_skipped(plan.target.store, read_skipped(plan.target.store) | counts.skipped)
    return Summary(
        str(out), total, counts.requests, counts.rows, counts.tokens, counts.bytes, counts.held, counts.truncated,
        counts.skipped, time.monotonic() - started[0], counts.records < total,
    )  # fmt: skip


def _run(
    plan: ExtractionPlan,
    total: int,
    tell: Callable[[RecordCounts], Any],
    stop: Callable[[], bool],
    started: list[float],
) -> None:
    engine = plan.start_engine(plan.wanted)
    with contextlib.closing(engine), plan.target.writer() as writer:
        share = plan.share(engine, writer, report=tell, stop=stop)
        plan.begin(writer)
        started[0] = time.monotonic()
        share.run(0, total)


def _left(plan: ExtractionPlan, total: int, begun: bool) -> list[tuple[int, int]]:
    """Groups of records that hold something to do, as (start, stop)."""
    groups = [(first, min(first + plan.batch, total)) for first in range(0, total, plan.batch)]
    if not begun:
        return groups
    with plan.target.writer() as writer:
        known = _known(plan, total)
        return [
            (start, stop)
            for start, stop in groups
            if any(i not in known and not writer.holds(request_id(plan.source, i)) for i in range(start, stop))
        ]


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C asks to end early (what is yielded says so) and the second ends at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
