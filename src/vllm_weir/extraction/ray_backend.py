"""A run on Ray Data: groups of records go to a pool of actors, each with an engine and a writer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.run_spec import RecordCounts

if TYPE_CHECKING:
    from vllm_weir.extraction.plan import ExtractionPlan, Ray

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
