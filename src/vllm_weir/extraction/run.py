"""`extract`: a whole run, from the URL of a source to a summary."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.extraction.engine import ExtractionEngine, VllmEngine
from vllm_weir.extraction.plan import ExtractionPlan, FeatureTarget, OutputTarget, Ray
from vllm_weir.extraction.run_spec import (
    CAPTURED,
    FeatureSpec,
    RecordCounts,
    RunSpec,
    check_run,
    read_skipped,
    request_id,
    write_skipped,
)
from vllm_weir.extraction.source import open_source
from vllm_weir.schema.capture import Capture, Reduction, parse_layers
from vllm_weir.schema.draft_layers import DRAFT_LAYERS, draft_layers
from vllm_weir.schema.fields import right_words
from vllm_weir.schema.hooks import MODEL_HOOKS, HookPoint, Site, normalise_hook
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.storage.layouts.base import MARKER
from vllm_weir.storage.layouts.per_request import LAYOUT as SPECULATORS
from vllm_weir.util.shipped import model_path

ON_ERROR = ("fail", "skip")


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        url: URL of the dataset, for `weir.load` or `weir.load_features`.
        records: Records of the source (up to `limit`).
        requests, rows, tokens, bytes: Written by this run; bytes as stored, of features before
            compression.
        held: Records that were there already.
        truncated: Requests of this run whose prompt was cut to `max_length`.
        skipped: Record -> why it was skipped; also in the dataset's ``skipped.jsonl``.
        seconds: Time for reading and writing; with Ray also for starting the engines.
        interrupted: Whether it ended early; the same call continues it.
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


@right_words
def extract(
    source: str | PathLike,
    model: str,
    out: str | PathLike,
    *,
    capture: Capture | None = None,
    layers: Any = None,
    hook: HookPoint | None = None,
    positions: Any = None,
    compress: Any = None,
    reduce: Reduction | None = None,
    dtype: Any = None,
    max_tokens: int = 1,
    max_length: int | None = None,
    column: str = "text",
    split: str | None = None,
    layout: str | None = None,
    limit: int | None = None,
    batch: int = 256,
    on_error: Literal["fail", "skip"] = "fail",
    engine: dict[str, Any] | None = None,
    heads: Any = None,
    neurons: Any = None,
    sae: Any = None,
    top_k: int | None = None,
    ids: Any = None,
    lora: Any = None,
    ray: Ray | None = None,
    flush_seconds: float = 30.0,
    source_options: dict[str, Any] | None = None,
    report: Callable[[RecordCounts, int], Any] | None = None,
    start_engine: Callable[[RunSpec], ExtractionEngine] = VllmEngine,
    **options: Any,
) -> Summary:
    """Extract activations, or features, of every text of a dataset; repeat the call to resume.

    Records that the dataset already has are not read again. A source without texts gives a dataset
    without requests.

    Args:
        source: Texts or chats: `url` of `open_source`.
        model: As for ``vllm.LLM``, or ``demo``.
        out: Folder or fsspec URL of the dataset, new or of the same run.
        capture: The rows of each record, in place of those of its fields that are arguments here.
        layers: As for `Capture`; None for all. ``"eagle3"`` or ``"mtp"``: those that such a draft
            model is trained on, see `draft_layers`.
        hook: As for `Capture`; None for ``"resid_post"``.
        positions: As for `Capture`; None for ``"prompt"``.
        compress: As for `Capture`.
        reduce: As for `Capture`.
        dtype: As for `Capture`.
        max_tokens: Tokens that each request generates, greedily.
        max_length: Prompts are cut to this many tokens; without it, longer ones than the engine
            takes are errors.
        column: Column of the text, as for `open_source`.
        split: Split of a saved ``DatasetDict``.
        layout: As for `open_writer`; None for ``"sharded"``. ``"speculators"`` reads the layers of
            ``"eagle3"`` if none are given.
        limit: Only the first so many records.
        batch: Records that the engine gets at once.
        on_error: With ``"fail"``, a record that is empty, too long or no text ends the run. With
            ``"skip"``, it is listed in the dataset's ``skipped.jsonl`` and in the summary.
        engine: Further options of ``vllm.LLM``.
        heads: As for `Capture`.
        neurons: As for `Capture`.
        sae: Extract the features of this sparse autoencoder in place of rows, as Parquet that
            `load_features` reads: ``"name=path"`` or ``"name=path@hook.layer"``, a path, an `SAE`,
            or ``{name: path or SAE}``. It is read at its own hook point, in float32.
        top_k: The most active features of each row, at most so many of them; by default 32.
        ids: These features instead.
        lora: ``LoRARequest``, or the path of an adapter's folder, under which records are read.
        ray: Run on Ray.
        flush_seconds: Least time between two publications of finished requests.
        source_options: Options for fsspec, of the source.
        report: Called with the counts of each step, and the number of records.
        start_engine: Starts the engine; for tests, and for engines of your own.
        **options: As for `open_writer` (``fsync``, ``storage_options``, ``shard_bytes``, ...). With
            `sae`, ``shard_bytes`` bounds what a file's features take in memory (64 MiB).

    Raises:
        WeirError: Naming the field, the record or the file; requests that are finished are kept.
    """
    if on_error not in ON_ERROR:
        raise WeirError(f"choose from {', '.join(ON_ERROR)}", "on_error")
    for name, value in (("batch", batch), ("limit", limit)):
        if not (value is None and name == "limit") and (type(value) is not int or value < 1):
            raise WeirError(f"expected a number of records, at least 1, got {brief(value)}", name)
    model = model_path(model)
    features = _features(sae, top_k, ids, model, "prompt" if positions is None else positions)
    rows = {"compress": compress, "reduce": reduce, "dtype": dtype, "heads": heads, "neurons": neurons}
    if features is not None:
        _refuse_beside_features(features.site, layers=layers, hook=hook, layout=layout, capture=capture, **rows)
        hook, layers = features.site
    chosen = _draft_layers(layers, layout, capture, model, engine)
    captured = _captured(capture, hook=hook, layers=chosen, positions=positions, **rows)
    spec = RunSpec(model, captured, max_tokens, max_length, engine or {}, features, Adapter.parse(lora))
    _check_model(spec, start_engine)
    texts = open_source(source, column, split=split, storage_options=source_options)
    target = _target(str(out), layout, options, features)
    plan = ExtractionPlan(spec, texts, target, batch, on_error == "skip", flush_seconds, start_engine)
    plan.target.check(captured)  # before the engine starts, which takes long
    begun = check_run(plan.target.store, spec.identity(texts))
    if MARKER in plan.target.store.names() and not begun and plan.target.count():
        raise WeirError(f"{out} holds activations that `weir extract` did not write; choose another place", "out")
    total = len(texts) if limit is None else min(limit, len(texts))
    counts, started = RecordCounts(), [time.monotonic()]

    def add_step(step: RecordCounts) -> None:
        counts.add(step)
        if report is not None:
            report(step, total)

    with interruptible() as stop:
        remaining = _remaining_groups(plan, total, begun)
        if not total:
            plan.target.writer().close()  # a dataset without requests
        if not remaining:
            skipped = plan.known_skipped(total)
            add_step(RecordCounts(held=total - len(skipped), skipped=skipped))
        elif ray is not None:
            from vllm_weir.extraction.plan import run

            run(plan, ray, remaining, total, add_step, stop)
        else:
            _run(plan, total, add_step, stop, started)
        if plan.skip:
            write_skipped(plan.target.store, read_skipped(plan.target.store) | counts.skipped)
    return Summary(
        str(out), total, counts.requests, counts.rows, counts.tokens, counts.bytes, counts.held, counts.truncated,
        counts.skipped, time.monotonic() - started[0], counts.records < total,
    )  # fmt: skip


def _draft_layers(layers: Any, layout: str | None, capture: Capture | None, model: str, engine: Any) -> Any:
    """Return the layers that are given, or those of a draft model that is named."""
    if layers is None and capture is None and layout == SPECULATORS:
        layers = "eagle3"
    if isinstance(layers, str) and layers in DRAFT_LAYERS:
        return draft_layers(layers, ModelConfig.read(model, engine or {}).layers)
    return layers


def _captured(capture: Capture | None, **fields: Any) -> Capture:
    """Return what is captured: as it was given, or made of the fields that are not None."""
    given = {name: value for name, value in fields.items() if value is not None}
    if capture is None:
        try:
            return Capture(**{"positions": "prompt"} | given)
        except WeirError as e:
            raise WeirError(e.message, e.field.removeprefix("capture.")) from None
    if not isinstance(capture, Capture):
        raise WeirError(f"expected a weir.Capture, got {brief(capture)}", "capture")
    for name in given:
        raise WeirError(f"the capture has a field for it: Capture({name}=...)", name)
    for name in capture.to_json():
        if name not in CAPTURED:
            raise WeirError("a run takes rows as they are, to its own dataset; leave it out", f"capture.{name}")
    return capture


def _check_model(spec: RunSpec, start_engine: Any) -> None:
    """Raise WeirError for what the engine would refuse once it has started, as far as files tell."""
    if start_engine is not VllmEngine:
        return
    config, capture = ModelConfig.read(spec.model, spec.engine), spec.capture
    config.check_layers(capture.hook, capture.layers, "layers" if spec.features is None else "sae")
    config.check_heads(capture.heads)
    if spec.features is not None and (width := spec.features.info.cfg.get("d_in")) is not None:
        config.check_width(capture.hook, width, "sae")
    length = spec.engine.get("max_model_len")
    if spec.max_length is not None and type(length) is int and spec.max_length > length - spec.max_tokens:
        raise WeirError(f"the engine takes prompts of up to {length - spec.max_tokens} tokens", "max_length")


def _features(sae: Any, top_k: Any, ids: Any, model: str, positions: Any) -> FeatureSpec | None:
    if sae is not None:
        return FeatureSpec.parse(sae, top_k, ids, model, positions)
    for name, value in (("top_k", top_k), ("ids", ids)):
        if value is not None:
            raise WeirError("it chooses features of a sparse autoencoder; name one (sae, --sae)", name)
    return None


def _target(url: str, layout: str | None, options: dict[str, Any], features: FeatureSpec | None) -> OutputTarget:
    if features is not None:
        return FeatureTarget(url=url, info=features.info, options=options)
    return OutputTarget(url, "sharded" if layout is None else layout, options)


def _refuse_beside_features(site: Site, *, layers: Any, hook: Any, **others: Any) -> None:
    """Raise WeirError for an option that asks for anything but an autoencoder's own rows."""
    if hook is not None and normalise_hook(hook) != site.hook:
        raise WeirError(f"the autoencoder reads {site}; leave hook out", "hook")
    if layers is not None and site.hook not in MODEL_HOOKS and parse_layers(layers, "layers") != (site.layer,):
        raise WeirError(f"the autoencoder reads {site}; leave layers out", "layers")
    for name, value in others.items():
        if value is not None:
            raise WeirError("it is for rows, and features of an autoencoder are stored; leave it out", name)


def _run(
    plan: ExtractionPlan,
    total: int,
    report: Callable[[RecordCounts], Any],
    stop: Callable[[], bool],
    started: list[float],
) -> None:
    engine = plan.start_engine(plan.spec)
    with contextlib.closing(engine), plan.target.writer() as writer:
        loop = plan.record_loop(engine, writer, report=report, stop=stop)
        plan.begin(writer, engine)
        started[0] = time.monotonic()
        loop.run(0, total)


def _remaining_groups(plan: ExtractionPlan, total: int, begun: bool) -> list[tuple[int, int]]:
    """Return the groups of records that are not done, as (start, stop)."""
    groups = [(first, min(first + plan.batch, total)) for first in range(0, total, plan.batch)]
    if not begun:
        return groups
    with plan.target.writer() as writer:
        skipped = plan.known_skipped(total)
        return [
            (start, stop)
            for start, stop in groups
            if any(i not in skipped and not writer.holds(request_id(plan.source, i)) for i in range(start, stop))
        ]


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second one ends at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
