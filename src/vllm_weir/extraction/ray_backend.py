"""The same run on Ray Data: groups of records go to a pool of engines, each with a writer of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.record_loop import RecordCounts

if TYPE_CHECKING:
    from vllm_weir.extraction.plan import ExtractionPlan, Ray

GROUPS = 4
"""Groups of records in a task: while one is written the next is under way."""


class RayWorker:
    """An actor: an engine and a writer. What a task was given is published when it returns, so that Ray may repeat a
    task whose worker died: the new one's writer knows what is there."""

    def __init__(self, plan: ExtractionPlan) -> None:
        self.error: WeirError | None = None
        try:
            engine = plan.start_engine(plan.wanted)
            self.writer = plan.target.writer()
            self.share = plan.share(engine, self.writer)
            plan.begin(self.writer)
        except WeirError as e:  # raised here, Ray would try again for ever
            self.error = e

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        done = []
        for start, stop in zip(batch["start"].tolist(), batch["stop"].tolist(), strict=True):
            try:
                if self.error is not None:
                    raise self.error
                counts = self.share.run(start, stop)
            except WeirError as e:
                done.append(json.dumps({"error": e.message, "field": e.field}))
            else:
                done.append(json.dumps(dataclasses.asdict(counts)))
        return {"done": done}


def run(
    plan: ExtractionPlan, how: Ray, left: Sequence[tuple[int, int]], total: int, tell: Callable[[RecordCounts], Any],
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Run on Ray.

    Args:
        left: groups of records with something to do, as (start, stop).
        total: records in all; those outside `left` are settled.
        tell, stop: as `RecordLoop` has them.

    Raises:
        WeirError: the first that a worker met.
    """
    try:
        import ray
        from ray.data import ActorPoolStrategy, DataContext
    except ImportError as e:
        raise WeirError("Ray is missing: pip install 'vllm-weir[ray]'", "ray") from e
    if how.workers < 1:
        raise WeirError("at least 1", "ray_workers")
    own = not ray.is_initialized()
    if own:
        ray.init(address=how.address, **{"include_dashboard": False, "log_to_driver": False} | how.options)
    try:
        DataContext.get_current().enable_progress_bars = False
        gpus = how.gpus if how.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        tasks = _tasks(left)
        results = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            RayWorker, fn_constructor_args=(plan,), batch_size=1, compute=ActorPoolStrategy(size=how.workers),
            num_cpus=how.cpus, num_gpus=gpus,
        )  # fmt: skip
        for row in results.iter_rows():
            tell(_counts(row["done"]))
            if stop():
                return
        _tell_settled(plan, left, total, tell)
    finally:
        if own:
            ray.shutdown()
        with plan.target.writer() as writer:
            writer.tidy()


def _tasks(left: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    """Neighbouring groups together, up to GROUPS."""
    tasks: list[dict[str, int]] = []
    groups = 0
    for start, stop in left:
        if tasks and tasks[-1]["stop"] == start and groups < GROUPS:
            tasks[-1]["stop"] = stop
            groups += 1
        else:
            tasks.append({"start": start, "stop": stop})
            groups = 1
    return tasks


def _counts(text: str) -> RecordCounts:
    found = json.loads(text)
    if "error" in found:
        raise WeirError(found["error"], found["field"])
    found["skipped"] = {int(index): why for index, why in found["skipped"].items()}
    return RecordCounts(**found)


def _tell_settled(
    plan: ExtractionPlan, left: Sequence[tuple[int, int]], total: int, tell: Callable[[RecordCounts], Any]
) -> None:
    """Count the records that no task was made for."""
    from vllm_weir.extraction.plan import _known

    known = _known(plan, total)
    inside = {i for start, stop in left for i in range(start, stop)}
    skipped = {i: why for i, why in known.items() if i not in inside}
    tell(RecordCounts(held=total - len(inside) - len(skipped), skipped=skipped))
