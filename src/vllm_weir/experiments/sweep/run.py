"""`sweep`: activation patching over layers, positions, hook points and heads, checked before anything runs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from vllm_weir import api
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.experiments.metrics import DENOISE, BoundMetric, Mode, bind_metric, check_engine, parse_mode
from vllm_weir.experiments.prompts import Prompt, check_tokens, encode, named, parse_one_or_more
from vllm_weir.experiments.sweep.cells import CellRunner
from vllm_weir.experiments.sweep.plan import (
    Pair,
    Receiver,
    SweepPlan,
    parse_entries,
    parse_path,
    place_entries,
    precedes,
    token_labels,
)
from vllm_weir.experiments.sweep.result import Checkpoint, NoCheckpoint, Sweep
from vllm_weir.frontend.engine import Engine, EngineCapabilities
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.fields import right_words
from vllm_weir.schema.hooks import HEAD_HOOKS, MODEL_HOOKS, HookPoint, Site, layers_of, normalise_hook, refuse_read_only
from vllm_weir.schema.rows import RowPart
from vllm_weir.storage.cli import progress_bar
from vllm_weir.util.memory import frozen_heap

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


WHENCE = ("_name_or_path", "transformers_version")
"""Fields of a model's configuration that say where it came from."""


@dataclass(frozen=True)
class PreparedSweep:
    """A plan, and what else a run of it needs."""

    plan: SweepPlan  # the cells
    metric: BoundMetric  # tied to the plan's pairs
    position_labels: tuple[str, ...]  # of the positions' axis, with the base prompt's tokens


def _identity(engine: Engine, adapter: Adapter | None) -> dict[str, Any]:
    """Return, as JSON data, what numbers depend on beside weights: the model as it runs, and what all undergo."""
    model = engine.model
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in WHENCE}
    return {
        "config": json.loads(json.dumps(config, default=str)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "logprobs_mode": str(model.logprobs_mode),
        "always": [one.to_json() for one in engine.interventions],
    } | ({} if adapter is None else {"lora": adapter.digest})


def check_arguments(hooks: Any, layers: Any, positions: Any, mode: Any, to: Any, freeze: Any) -> None:
    """Raise WeirError for arguments of `sweep` that it would refuse of any engine."""
    parse_mode(mode)
    _parse_hooks(hooks)
    parse_layers(layers, "layers")
    parse_entries(positions)
    parse_path(to, freeze)


def prepare(
    engine: Engine, clean: Any, corrupt: Any, *, hooks: Any, layers: Any, positions: Any, heads: Any, metric: Any,
    mode: Any, to: Any, freeze: Any, sampling: Any, adapter: Adapter | None = None,
) -> PreparedSweep:  # fmt: skip
    """Check the arguments of `sweep`, which has their meanings; raise WeirError naming the field."""
    mode = parse_mode(mode)
    receiver, held = parse_path(to, freeze)
    names, entries = _parse_hooks(hooks), parse_entries(positions)
    tokenizer, capabilities = engine.tokenizer, engine.capabilities
    special = () if tokenizer is None else tokenizer.all_special_ids
    pairs = _encode_pairs(engine, parse_one_or_more(clean, "clean"), parse_one_or_more(corrupt, "corrupt"))
    bound = bind_metric(metric, sampling, tokenizer, len(pairs), vocab_size=engine.model.get_vocab_size())
    check_engine(bound, engine.model, capabilities.traits.speculative)
    bases = [pair.corrupt if mode == DENOISE else pair.clean for pair in pairs]
    sources = [pair.clean if mode == DENOISE else pair.corrupt for pair in pairs]
    places = tuple(place_entries(entries, b, s, special) for b, s in zip(bases, sources, strict=True))
    if len({len(of_pair) for of_pair in places}) > 1:
        raise WeirError("the pairs have different lengths, so that no axis fits all; list positions", "positions")
    labels = tuple(range(len(places[0]))) if entries is None else tuple(entry.label for entry in entries)
    plan = SweepPlan(
        pairs, names, _layers(names, layers, receiver, capabilities), labels, places,
        _heads(names, heads, capabilities), mode, receiver, held,
        capabilities.num_layers, [_identity(engine, adapter), bound.identity()],
    )  # fmt: skip
    check_served(plan, capabilities)
    texts = [""] * len(bases[0])
    if len(set(bases)) == 1:
        texts = [str(token) if tokenizer is None else tokenizer.decode([token]) for token in bases[0]]
    return PreparedSweep(plan, bound, token_labels(labels, places[0], texts))


def _encode_pairs(engine: Engine, clean: list[Prompt], corrupt: list[Prompt]) -> tuple[Pair, ...]:
    if len(clean) != len(corrupt):
        raise WeirError(f"{len(corrupt)} prompts for {len(clean)} clean ones; give one for each", "corrupt")
    fields = named(clean, "clean") + named(corrupt, "corrupt")
    encoded = encode(clean + corrupt, lambda: engine.tokenizer, engine.model.max_model_len - 1, fields)
    check_tokens(encoded, engine.model.get_vocab_size(), fields)
    tokens = list(map(tuple, encoded))
    return tuple(Pair(*pair) for pair in zip(tokens[: len(clean)], tokens[len(clean) :], strict=True))


def _parse_hooks(hooks: Any) -> tuple[str, ...]:
    values = [hooks] if isinstance(hooks, str) else hooks
    if not isinstance(values, Sequence) or not len(values):
        raise WeirError(f"expected a hook point or a list of them, got {brief(hooks)}", "hooks")
    names = tuple(normalise_hook(value, "hooks") for value in values)
    for i, name in enumerate(names):
        refuse_read_only(name, "hooks")
        if name in names[:i]:
            raise WeirError(f"{name} is named twice", "hooks")
    if len(names) > 1 and (once := [name for name in names if name in MODEL_HOOKS]):
        raise WeirError(f"a model has one {once[0]}, which no axis of layers fits; sweep it alone", "hooks")
    return names


def _layers(
    hooks: tuple[str, ...], layers: Any, receiver: Receiver | None, capabilities: EngineCapabilities
) -> tuple[int, ...]:
    """Return the blocks; with a receiver "all" means those that come before it."""
    parsed = parse_layers(layers, "layers")
    blocks = layers_of(hooks[0], parsed, capabilities.num_layers, "layers")
    if receiver is None:
        return blocks
    if receiver.site.layer >= capabilities.num_layers:
        raise WeirError(f"block {receiver.site.layer} does not exist: the model has {capabilities.num_layers}", "to")
    before = tuple(n for n in blocks if all(precedes(Site(hook, n), receiver.site) for hook in hooks))
    if not before or (parsed != "all" and before != blocks):
        late = next(n for n in blocks if n not in before)
        raise WeirError(f"nothing leads from block {late} back to {receiver.site}; name earlier blocks", "layers")
    return before


def _heads(hooks: tuple[str, ...], heads: Any, capabilities: EngineCapabilities) -> tuple[int, ...] | None:
    if heads is None:
        return None
    for hook in hooks:
        if hook not in HEAD_HOOKS:
            raise WeirError(f"{hook} has no heads; sweep it without heads", "heads")
    counts = {capabilities.shape(Site(hook, layer))[0] for hook in hooks for layer in range(capabilities.num_layers)}
    if isinstance(heads, str) and heads == "all":
        if len(counts) > 1:
            raise WeirError(f"{', '.join(hooks)} differ in their number of heads; list heads", "heads")
        return tuple(range(min(counts)))
    try:
        picked = RowPart.parse(hooks[0], heads, None, "").heads
        RowPart(picked).check((min(counts),), hooks[0], "")
    except WeirError as e:
        raise WeirError(e.message, "heads") from None
    return picked


def check_served(plan: SweepPlan, capabilities: EngineCapabilities) -> None:
    """Raise WeirError unless every site of a plan can be read and changed."""
    needed = [(site, "hooks") for site in plan.sites]
    if plan.to is not None:
        needed += [(plan.to.site, "to"), *((site, "freeze") for s in plan.sites for site in plan.frozen(s))]
    for site, field in dict.fromkeys(needed):
        why = capabilities.sites.get(site, "the model has no such hook point") or capabilities.read_only.get(site)
        if why:
            raise WeirError(f"{site} cannot be patched: {why}", field)
    if plan.to is not None and plan.to.heads is not None:
        try:
            RowPart(plan.to.heads).check(capabilities.shape(plan.to.site), plan.to.site.hook, "")
        except WeirError as e:
            raise WeirError(e.message, "to") from None
