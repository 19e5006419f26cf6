"""The groups of records that a run extracts, and those that Ray hands out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import ExtractionEngine, VllmEngine
from vllm_weir.extraction.feature_writer import PART_BYTES, FeatureWriter
from vllm_weir.extraction.record_loop import PromptReader, RecordLoop, RecordWriter
from vllm_weir.extraction.run_spec import WEIGHTS, RecordCounts, RunSpec, begin_run, check_run, read_skipped
from vllm_weir.extraction.source import TextSource
from vllm_weir.schema.capture import Capture, describe_rows
from vllm_weir.storage.features.dataset import FeatureInfo, load_features
from vllm_weir.storage.features.parts import LAYOUT, part_names
from vllm_weir.storage.layouts.base import is_claimed
from vllm_weir.storage.layouts.per_request import LAYOUT as SPECULATORS
from vllm_weir.storage.layouts.per_request import check_capture
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
    """Where features go. `options`: ``shard_bytes``, ``fsync`` and ``storage_options``, as of `OutputTarget`."""

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


GROUPS = 4
"""Groups of records in a task: one is written while the engine reads the next."""


class RayWorker:
    """An actor with an engine and a writer.

    The records of a task are published when it returns, so Ray may repeat a task whose worker has
    died: the writer of the new worker finds what is already there.
    """

    def __init__(self, plan: ExtractionPlan) -> None:
        self.error: WeirError | None = None
        try:
            engine = plan.start_engine(plan.spec)
            self.writer = plan.target.writer()
            self.loop = plan.record_loop(engine, self.writer)
            plan.begin(self.writer, engine)
        except WeirError as e:  # if it were raised here, Ray would try again forever
            self.error = e

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Process tasks; return the counts or the error of each as JSON."""
        done = []
        for start, stop in zip(batch["start"].tolist(), batch["stop"].tolist(), strict=True):
            try:
                if self.error is not None:
                    raise self.error
                counts = self.loop.run(start, stop)
            except WeirError as e:
                done.append(json.dumps({"error": e.message, "field": e.field}))
            else:
                done.append(json.dumps(dataclasses.asdict(counts)))
        return {"done": done}


def run(
    plan: ExtractionPlan, settings: Ray, remaining: Sequence[tuple[int, int]], total: int,
    report: Callable[[RecordCounts], Any], stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Run on Ray the groups of records that are not done, (start, stop); `report`, `stop`: see `RecordLoop`."""
    try:
        import ray
        from ray.data import ActorPoolStrategy, DataContext
    except ImportError as e:
        raise WeirError("Ray is missing: pip install 'vllm-weir[ray]'", "ray") from e
    if settings.workers < 1:
        raise WeirError(f"expected at least 1, got {settings.workers}", "ray_workers")
    starts_ray = not ray.is_initialized()
    if starts_ray:
        ray.init(address=settings.address, **{"include_dashboard": False, "log_to_driver": False} | settings.options)
    try:
        DataContext.get_current().enable_progress_bars = False
        gpus = settings.gpus if settings.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        tasks = _tasks(remaining)
        results = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            RayWorker, fn_constructor_args=(plan,), batch_size=1, compute=ActorPoolStrategy(size=settings.workers),
            num_cpus=settings.cpus, num_gpus=gpus,
        )  # fmt: skip
        for row in results.iter_rows():
            report(_counts(row["done"]))
            if stop():
                return
        report(_outside(plan, remaining, total))
    finally:
        if starts_ray:
            ray.shutdown()
        with plan.target.writer() as writer:
            writer.tidy()


def _tasks(remaining: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    """Join up to GROUPS neighbouring groups into a task."""
    tasks: list[dict[str, int]] = []
    groups = 0
    for start, stop in remaining:
        if tasks and tasks[-1]["stop"] == start and groups < GROUPS:
            tasks[-1]["stop"] = stop
            groups += 1
        else:
            tasks.append({"start": start, "stop": stop})
            groups = 1
    return tasks


def _counts(text: str) -> RecordCounts:
    result = json.loads(text)
    if "error" in result:
        raise WeirError(result["error"], result["field"])
    result["skipped"] = {int(index): reason for index, reason in result["skipped"].items()}
    return RecordCounts(**result)


def _outside(plan: ExtractionPlan, remaining: Sequence[tuple[int, int]], total: int) -> RecordCounts:
    """Count the records outside the remaining groups."""
    inside = {i for start, stop in remaining for i in range(start, stop)}
    skipped = {i: reason for i, reason in plan.known_skipped(total).items() if i not in inside}
    return RecordCounts(held=total - len(inside) - len(skipped), skipped=skipped)
