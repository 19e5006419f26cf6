"""`fit`: read the prompts, fit each block, and add the best direction to prompts that were held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import vllm

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.experiments.directions import Directions
from vllm_weir.experiments.fit.engine import FitEngine
from vllm_weir.experiments.metrics import bind_metric, check_engine
from vllm_weir.experiments.prompts import encode, parse_prompts
from vllm_weir.fitting.layer import Direction, FitTask, Folds, LayerFit
from vllm_weir.fitting.methods import Method, MethodName, method_of
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import is_int, parse_flag, plain, right_words
from vllm_weir.schema.hooks import HookPoint, Site
from vllm_weir.schema.interventions import Ablate, Add
from vllm_weir.schema.vectors import number
from vllm_weir.storage.cli import progress_bar

Fits = dict[int | None, dict[int, LayerFit]]
"""Head, or None for whole rows -> block -> what was fitted."""


@right_words
def fit(
    llm: Any,
    positive: Any,
    negative: Any,
    method: MethodName = "diff",
    hook: HookPoint = "resid_post",
    layers: Any = "all",
    positions: Any = "last_prompt",
    *,
    heads: Any = None,
    folds: int = 5,
    seed: int = 0,
    C: float = 1.0,
    check: bool = True,
    metric: Any = None,
    sampling: Any = None,
    lora: Any = None,
    progress: bool = True,
) -> Any:
    """Fit a direction at each block from prompts of two classes.

    Difference of means (Rimsky et al. 2024, arXiv:2312.06681), principal components of pairs and LAT
    (Zou et al. 2023, arXiv:2310.01405; repeng), or logistic regression. Positive prompts score higher
    along the result. Interventions that are set for everyone (`set_global`) act on the prompts too.

    Args:
        llm: ``vllm.LLM`` or Weir's drop-in class, also with ``runner="pooling"``.
        positive: texts, chats (lists of messages) or lists of token ids.
        negative: likewise. Lists of the same length are pairs: prompt i of both has the same content
            but for the class, and they are held out together. Other lengths are for ``"diff"`` and
            ``"logistic"`` only.
        method: ``"diff"``; ``"pca"`` (repeng's ``pca_diff``); ``"pca_center"``, repeng's and
            steering-vectors' PCA; ``"lat"``; ``"logistic"``, scikit-learn's ``LogisticRegression``;
            ``"logistic_pairs"``, steering-vectors'.
        hook: hook point with one row [d]; with `heads`, one with a row for each head.
        layers: ``"all"``, a block, or a list of them.
        positions: selector of the row that stands for a prompt; rows of several positions are
            averaged on the device.
        heads: ``"all"``, a head, or a list of them: each head is fitted by itself. None: whole rows.
        folds: in how many parts the prompts are held out in turn, for the AUC.
        seed: of the parts, and of LAT's order within pairs.
        C: inverse strength of the penalty of logistic regressions.
        check: try the direction of the block with the highest AUC on prompts of a part that was held
            out while it was fitted: add it, subtract it, project it out. ``.details["causal"]`` has
            the results. Of several heads, that with the highest AUC is tried.
        metric: what the check looks at: `logit_diff`, or any metric of `sweep`. None: the score of
            the probe at the last block fitted. Given, it asks for the check.
        sampling: ``SamplingParams`` for a `metric` that is a function of the output.
        lora: ``LoRARequest``, or the path of an adapter's folder, under which prompts are read and tried.
        progress: show a progress bar on stderr.

    Returns:
        `Directions`, or with `heads` ``{head: Directions}``. Their ``.details["layers"]`` has for each block
        the distance between the classes along the direction, the mean length of a row, and their ratio.

    Raises:
        WeirError: naming the field.
    """
    texts = [parse_prompts(prompts, name) for prompts, name in ((positive, "positive"), (negative, "negative"))]
    counts = len(texts[0]), len(texts[1])
    chosen = method_of(method, *counts)
    check_options(folds, seed, C)
    if metric is None and sampling is not None:
        raise WeirError("it is for a metric; give one, or leave it out", "sampling")
    wants_check = parse_flag(check, "check", "fit") or metric is not None
    adapter = Adapter.parse(lora)
    engine = FitEngine(llm, hook, layers, positions, adapter, heads)
    readout = None if metric is None else metric_readout(engine, metric, sampling)
    names = [
        f"{name}[{i}]" for name, side in zip(("positive", "negative"), texts, strict=True) for i in range(len(side))
    ]
    encoded = encode(texts[0] + texts[1], lambda: engine.tokenizer, engine.longest, names)
    tokens = [encoded[: counts[0]], encoded[counts[0] :]]
    task = FitTask(method, *counts, int(folds), int(seed), float(C))
    with progress_bar(not parse_flag(progress, "progress", "fit")) as bar:
        rows, found = _fitted(engine, tokens, task, bar)
    details: dict[str, Any] = {
        "prompts": {"positive": counts[0], "negative": counts[1], "paired": counts[0] == counts[1]},
        "positions": engine.positions.to_json(),
        "folds": task.parts.number,
        "seed": task.seed,
        "rows": rows,
    }
    if adapter is not None:
        details["lora"] = {"name": adapter.name, "digest": adapter.digest}
    checks = _checked(engine, found, task.parts, tokens, readout) if wants_check else {}
    made = {
        head: _directions(engine, method, chosen, head, one, details | checks.get(head, {}))
        for head, one in found.items()
    }
    return made[None] if engine.heads is None else {head: made[head] for head in engine.heads}


def _fitted(engine: FitEngine, tokens: list[list[list[int]]], task: FitTask, bar: Any) -> tuple[str, Fits]:
    """Read the prompts and fit every block and head; return where the rows were, and the fits."""
    prompts = tokens[0] + tokens[1]
    rows = engine.open_rows(len(prompts))
    try:
        shown = bar.add_task("prompts", total=len(prompts), rate="")
        names = engine.read(prompts, rows, lambda done: bar.update(shown, completed=done))
        shown = bar.add_task("blocks", total=len(engine.layers), rate="")
        tasks = {head: replace(task, columns=engine.columns(head)) for head in engine.heads or (None,)}
        found: Fits = {head: {} for head in tasks}
        for layer in engine.layers:
            for head, one in tasks.items():
                found[head][layer] = rows.fit(Site(engine.hook, layer), names, one)
            bar.advance(shown)
    except BaseException as e:
        rows.close(e)
        raise
    rows.close()
    return rows.place, found


def _directions(
    engine: FitEngine, name: str, method: Method, head: int | None, found: dict[int, LayerFit], details: dict[str, Any]
) -> Directions:
    areas = {layer: one.auc for layer, one in found.items() if one.auc is not None}
    by_layer = {
        str(layer): {"gap": one.direction.gap, "norm": one.norm, "relative_dose": one.relative_dose}
        for layer, one in found.items()
    }
    return Directions(
        hook=engine.hook,
        layers=engine.layers,
        vectors={layer: one.direction.vector.astype(np.float32) for layer, one in found.items()},
        method=name,
        convention=(
            f"layer = block index from 0, hook = {engine.hook} as Weir names it, nothing was mapped; vector = "
            f"{method.summary}"
        ),
        auc_by_layer=areas or None,
        bias={layer: one.direction.bias for layer, one in found.items()},
        details=details | {"layers": by_layer},
        head=head,
    )


def _checked(
    engine: FitEngine, found: Fits, folds: Folds, tokens: list[list[list[int]]], readout: Readout | None
) -> dict[int | None, dict[str, Any]]:
    """Return what details have of the check for each head: the results, or why there are none."""
    if not folds.number:
        return _skipped("too few prompts to hold any out", readout, found)
    last = engine.layers[-1]
    usable = [layer for layer in engine.layers if readout is not None or layer != last]
    if not usable:
        return _skipped("one block was fitted, and the probe is read further down; give a metric", readout, found)
    places = [(head, layer) for head in found for layer in usable]
    head, layer = max(places, key=lambda place: found[place[0]][place[1]].auc or 0.0)
    if why := engine.capabilities.read_only.get(Site(engine.hook, layer)):
        return _skipped(f"{engine.hook} cannot be changed: {why}", readout, found)
    one, further = found[head][layer], found[head][last].held
    assert one.held is not None and one.doses is not None and further is not None, "fold 0 was held out"
    positive, negative = ([side[k] for k in tried] for side, tried in zip(tokens, folds.tried, strict=True))
    held = HeldOut(layer, head, one.held, positive, negative, one.doses)
    result = check(engine, held, readout or score_readout(engine, last, head, further))
    return _skipped(f"the AUC of head {head} is higher", None, found) | {head: {"causal": result}}


def _skipped(why: str, readout: Readout | None, found: Fits) -> dict[int | None, dict[str, Any]]:
    """Note for each head why nothing was checked; a metric that the caller gave must not be passed over."""
    if readout is not None:
        raise WeirError(f"it cannot be looked at: {why}", "metric")
    return {head: {"causal": {"skipped": why}} for head in found}


def check_options(folds: Any, seed: Any, strength: Any = 1.0) -> None:
    for value, name, least in ((folds, "folds", 2), (seed, "seed", 0)):
        if not is_int(plain(value)) or plain(value) < least:
            raise WeirError(f"expected a whole number of at least {least}, got {brief(value)}", name)
    if not (strength := number(strength, "C")) > 0 or math.isinf(strength):
        raise WeirError(f"expected a number above 0, got {strength:g}", "C")


@dataclass(frozen=True)
class HeldOut:
    """Prompts of fold 0, and a direction that was fitted without them."""

    layer: int  # where the direction is used
    head: int | None  # of which head; None for whole rows
    direction: Direction  # what is added and projected out
    positive: Sequence[list[int]]  # tokens of the prompts
    negative: Sequence[list[int]]  # likewise
    doses: tuple[float, float]  # as in `LayerFit`


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
