"""Whether a direction does something: it is added to, and projected out of, prompts that were held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import vllm

from vllm_weir.errors import WeirError
from vllm_weir.experiments.fit.engine import FitEngine
from vllm_weir.experiments.metrics import bind_metric, check_engine
from vllm_weir.fitting.layer import Direction
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.interventions import Ablate, Add


@dataclass(frozen=True)
class HeldOut:
    """Prompts of fold 0, and a direction that was fitted without them.

    Attributes:
        layer: where the direction is used.
        head: of which head; None for whole rows.
        direction: what is added and projected out.
        positive: tokens of the prompts.
        negative: likewise.
        doses: as in `LayerFit`.
    """

    layer: int
    head: int | None
    direction: Direction
    positive: Sequence[list[int]]
    negative: Sequence[list[int]]
    doses: tuple[float, float]


@dataclass(frozen=True)
class Readout:
    """What is looked at: its name, params, rows that it is read off, and output -> number."""

    name: str
    sampling: Any
    capture: Capture | None
    read: Callable[[Any], float]


def score_readout(engine: FitEngine, layer: int, head: int | None, direction: Direction) -> Readout:
    """Read the probe's score at a block further down, of the same head, fitted without the held-out prompts."""
    capture = Capture(engine.hook, layer, engine.positions, reduce=engine.capture.reduce)

    def read(out: Any) -> float:
        rows = out.activations[engine.hook, layer].double().numpy()
        return float(direction.score(rows if head is None else rows[:, head])[0])

    place = f"{engine.hook}.{layer}" if head is None else f"{engine.hook}.{layer}, head {head}"
    return Readout(f"probe's score at {place}", engine.plain, capture, read)


def metric_readout(engine: FitEngine, metric: Any, sampling: Any) -> Readout:
    """Read a metric of the output, as `weir.sweep` takes them; raise WeirError if the engine does not return it."""
    bound = bind_metric(metric, sampling, engine.tokenizer, 1, vocab_size=engine.model.get_vocab_size())
    check_engine(bound, engine.model, engine.capabilities.traits.speculative)
    if engine.pools:
        if sampling is not None:
            raise WeirError("an engine that pools samples nothing; leave it out", "sampling")
        return Readout(bound.name, engine.plain, None, lambda out: bound.score(out, 0))
    chosen = sampling if sampling is not None else vllm.SamplingParams(**bound.sampling(0))
    return Readout(bound.name, chosen, None, lambda out: bound.score(out, 0))


def check(engine: FitEngine, held: HeldOut, readout: Readout) -> dict[str, Any]:
    """Steer and ablate held-out prompts, and return what that did, as JSON data.

    The dose is the distance between the means of the classes along the direction: added to negative
    prompts, and subtracted from positive ones, at every position. The projection is removed at
    every position.
    """
    unit, dose = held.direction.unit.astype(np.float32), held.direction.gap
    heads = None if held.head is None else [held.head]
    place: dict[str, Any] = {"layers": held.layer, "hook": engine.hook, "positions": "all", "heads": heads}
    ablation = (Ablate(unit, **place),)
    groups = {
        "plain_positive": (held.positive, ()),
        "plain_negative": (held.negative, ()),
        "subtracted_positive": (held.positive, (Add(unit, scale=-dose, **place),)),
        "added_negative": (held.negative, (Add(unit, scale=dose, **place),)),
        "ablated_positive": (held.positive, ablation),
        "ablated_negative": (held.negative, ablation),
    }
    questions = [(tokens, moves) for prompts, moves in groups.values() for tokens in prompts]
    numbers = iter(engine.ask(questions, readout.sampling, readout.capture, readout.read))
    means = {name: float(np.mean([next(numbers) for _ in prompts])) for name, (prompts, _) in groups.items()}
    if not np.isfinite(list(means.values())).all():
        raise WeirError(f"its means over the prompts are not finite: {means}", "metric")
    span = means["plain_positive"] - means["plain_negative"]
    moved = means["added_negative"] - means["plain_negative"]
    lowered = means["plain_positive"] - means["subtracted_positive"]
    left = means["ablated_positive"] - means["ablated_negative"]
    return {
        "layer": held.layer,
        **({} if held.head is None else {"head": held.head}),
        "readout": readout.name,
        "prompts": {"positive": len(held.positive), "negative": len(held.negative)},
        "means": means,
        "added": _share(moved, span),
        "subtracted": _share(lowered, span),
        "left_after_ablation": _share(left, span),
        "dose": dose,
        "relative_dose": dict(zip(("add", "ablate"), held.doses, strict=True)),
    }


def _share(value: float, of: float) -> float | None:
    """Return a change as a share of the difference between the classes; None where there is none."""
    return value / of if of else None
