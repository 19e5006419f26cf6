"""`ExtractionPlan`: what a run of `weir extract` does and where its rows go; can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import ExtractionEngine, VllmEngine
from vllm_weir.extraction.feature_writer import PART_BYTES, FeatureWriter
from vllm_weir.extraction.record_loop import PromptReader, RecordLoop, RecordWriter
from vllm_weir.extraction.run_spec import WEIGHTS, RunSpec, begin_run, check_run, read_skipped
from vllm_weir.extraction.source import TextSource
from vllm_weir.schema.capture import Capture, describe_rows
from vllm_weir.storage.features.dataset import FeatureInfo, load_features
from vllm_weir.storage.features.parts import LAYOUT, part_names
from vllm_weir.storage.layouts.base import is_claimed
from vllm_weir.storage.layouts.speculators import LAYOUT as SPECULATORS
from vllm_weir.storage.layouts.speculators import check_capture
from vllm_weir.storage.loading import check_layout, load, open_writer
from vllm_weir.storage.object_store import ObjectStore


@dataclass(frozen=True)
class Ray:
    """How to run on Ray.

    Args:
        workers: Number of engines.
        address: Address of a cluster; None for the one that this process is in, or else a new local
            one.
        gpus: GPUs of each worker; None for one, if the cluster has any.
        cpus: CPUs of each worker.
        options: Options of ``ray.init``.
    """

    workers: int = 1
    address: str | None = None
    gpus: float | None = None
    cpus: float = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputTarget:
    """Where rows go: arguments of `open_writer`. Can be pickled."""

    url: str
    layout: str = "sharded"
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, capture: Capture) -> None:
        """Raise WeirError, without writing anything, if `writer` would raise one, or not take these rows."""
        if self.layout == SPECULATORS:
            check_capture(capture)
        check_layout(self.layout, self.options.keys() - {"fsync", "storage_options"})
        is_claimed(self.store, self.layout)

    def writer(self) -> RecordWriter:
        return open_writer(self.url, self.layout, **self.options)

    def count(self) -> int:
        return len(load(self.url, storage_options=self.options.get("storage_options")))

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.url, self.options.get("storage_options"))


@dataclass(frozen=True, kw_only=True)
class FeatureTarget(OutputTarget):
    """Where features go.

    Args:
        options: ``shard_bytes``, ``fsync`` and ``storage_options``, as of `OutputTarget`.
    """

    info: FeatureInfo
    layout: str = LAYOUT

    def check(self, capture: Capture) -> None:
        """Raise WeirError, without writing anything, if `writer` would raise one."""
        for name in self.options.keys() - {"fsync", "storage_options", "shard_bytes"}:
            raise WeirError("unknown option of features; they have fsync, shard_bytes and storage_options", name)
        is_claimed(self.store, self.layout)

    def writer(self) -> FeatureWriter:
        store = ObjectStore(self.url, self.options.get("storage_options"), fsync=bool(self.options.get("fsync", False)))
        return FeatureWriter(store, self.info, self.options.get("shard_bytes", PART_BYTES))

    def count(self) -> int:
        if not part_names(list(self.store.names())):
            return 0
        return len(load_features(self.url, storage_options=self.options.get("storage_options")))


@dataclass(frozen=True)
class ExtractionPlan:
    """Everything that a worker needs to know; can be pickled.

    Args:
        batch, skip: As for `PromptReader`.
        flush_seconds: As for `RecordLoop`.
    """

    spec: RunSpec
    source: TextSource
    target: OutputTarget
    batch: int = 256
    skip: bool = False
    flush_seconds: float = 30.0
    start_engine: Callable[[RunSpec], ExtractionEngine] = VllmEngine

    def begin(self, writer: RecordWriter, engine: ExtractionEngine) -> None:
        identity = {**self.spec.identity(self.source), WEIGHTS: engine.weights}
        if not check_run(writer.store, identity):
            begin_run(writer.store, identity, not self.target.count())

    def record_loop(self, engine: ExtractionEngine, writer: RecordWriter, **options: Any) -> RecordLoop:
        """Return the loop of one engine and writer; `options`: further ones of `RecordLoop`."""
        reader = PromptReader(
            self.source, engine, writer.holds, max_length=self.spec.max_length, batch=self.batch, skip=self.skip,
            known_skipped=read_skipped(writer.store) if self.skip else {}, reaches=self.spec.reaches,
        )  # fmt: skip
        return RecordLoop(
            reader, writer, flush_seconds=self.flush_seconds, row_notes=describe_rows(self.spec.capture), **options
        )

    def known_skipped(self, total: int) -> dict[int, str]:
        """Return why earlier runs skipped some of the first `total` records, by record."""
        if not self.skip:
            return {}
        return {index: reason for index, reason in read_skipped(self.target.store).items() if index < total}
