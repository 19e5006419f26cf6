"""What a run of `weir extract` does and where its rows go; may be pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.extraction.engine import ExtractionEngine, VllmEngine
from vllm_weir.extraction.record_loop import RecordLoop
from vllm_weir.extraction.run_spec import RunSpec, begin_run, check_run, read_skipped
from vllm_weir.extraction.source import TextSource
from vllm_weir.schema.row_notes import describe_rows
from vllm_weir.storage.layouts.base import Writer, is_claimed
from vllm_weir.storage.loading import check_layout, open_writer
from vllm_weir.storage.object_store import ObjectStore


@dataclass(frozen=True)
class Ray:
    """How to run on Ray.

    Args:
        workers: engines.
        address: of a cluster; None for the one that this process is in, or else a new local one.
        gpus, cpus: for each worker; None: one GPU if the cluster has any, and one CPU.
        options: of ``ray.init``.
    """

    workers: int = 1
    address: str | None = None
    gpus: float | None = None
    cpus: float = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputTarget:
    """Where rows go; may be pickled. See `open_writer`."""

    url: str
    layout: str = "sharded"
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise WeirError, without writing anything, if `writer` would."""
        check_layout(self.layout, self.options.keys() - {"fsync", "storage_options"})
        is_claimed(self.store, self.layout)

    def writer(self) -> Writer:
        """A new writer."""
        return open_writer(self.url, self.layout, **self.options)

    @property
    def store(self) -> ObjectStore:
        """The place."""
        return ObjectStore(self.url, self.options.get("storage_options"))


@dataclass(frozen=True)
class ExtractionPlan:
    """All that a worker needs to know; may be pickled.

    Args:
        batch, skip, flush_seconds: as for `RecordLoop`.
        start_engine: makes the engine.
    """

    wanted: RunSpec
    source: TextSource
    target: OutputTarget
    batch: int = 256
    skip: bool = False
    flush_seconds: float = 30.0
    start_engine: Callable[[RunSpec], ExtractionEngine] = VllmEngine

    def begin(self, writer: Writer) -> None:
        """Hold the dataset to this run; after the engine has accepted what is wanted."""
        if not check_run(writer.store, self.wanted.identity(self.source)):
            begin_run(writer.store, self.wanted.identity(self.source), not self.target_requests())

    def target_requests(self) -> int:
        """Requests that are there already."""
        from vllm_weir.storage.loading import load

        return len(load(self.target.url, storage_options=self.target.options.get("storage_options")))

    def share(self, engine: ExtractionEngine, writer: Writer, **more: Any) -> RecordLoop:
        """The part of the run that one engine does."""
        return RecordLoop(
            self.source, engine, writer, max_length=self.wanted.max_length, batch=self.batch, skip=self.skip,
            flush_seconds=self.flush_seconds, known=read_skipped(writer.store) if self.skip else {},
            told=describe_rows(self.wanted.capture), reaches=self.wanted.reaches, **more,
        )  # fmt: skip


def _known(plan: ExtractionPlan, total: int) -> dict[int, str]:
    return {i: why for i, why in read_skipped(plan.target.store).items() if i < total} if plan.skip else {}
