"""`attribute`: attribution patching, from two prompts to verified effects.

1. Run the prompt whose rows would be put in, on a transformers twin, and keep its rows.
2. Run the other prompt there, and differentiate the metric with respect to its rows.
3. Estimate every patch: the sum over d of (row put in - row there) * gradient.
4. Make the patches with the largest estimates, one run each, in the engine if there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.api import engine, params
from vllm_weir.errors import WeirError
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.experiments.attribute.question import (
    AskedSites,
    LogitsMetric,
    Method,
    PromptPair,
    check_saes,
    feature_effects,
    parse_count,
    parse_hooks,
    parse_method,
    parse_metric,
    parse_saes,
)
from vllm_weir.experiments.attribute.result import Attribution, VerifiedEffect, effects_of, first_order, largest
from vllm_weir.experiments.attribute.twin import RowPatch, Twin
from vllm_weir.experiments.grid import Grid
from vllm_weir.experiments.metrics import DENOISE, Baseline, Mode, parse_mode
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.capture import Capture, parse_layers
from vllm_weir.schema.fields import right_words
from vllm_weir.schema.hooks import HookPoint, Site
from vllm_weir.schema.interventions import Replace
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.schema.positions import Positions
from vllm_weir.util.shipped import model_path

STREAM = ("resid_pre", "attn_out", "mlp_out")
"""The hook points by default: the stream, and the two parts that each block adds to it."""


@right_words
def attribute(
    model: Any,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    hooks: HookPoint | Sequence[HookPoint] = STREAM,
    layers: Any = "all",
    positions: Any = "all",
    heads: Any = None,
    mode: Mode = DENOISE,
    llm: Any = None,
    top_k: int = 10,
    device: Any = None,
    method: Method = "gradient",
    steps: int | None = None,
    lora: Any = None,
    saes: Any = (),
    top_features: int = 10,
) -> Attribution:
    """Estimate what patching each hook point does to a metric; make the largest patches to verify it.

    Attribution patching (Nanda 2023; Syed et al. 2023, arXiv:2310.10348): two forward passes and
    one backward pass estimate every patch, to first order. They run on a transformers twin of the
    checkpoint, in float32. With an engine, its rows of one prompt are compared with the twin's
    first, and the top patches are then made in the engine with its own rows.

    Args:
        model: an ``LLM``; the path or name of a checkpoint; or a causal language model of
            transformers in float32.
        clean: text, chat (list of messages) or token ids.
        corrupt: likewise, of the same length in tokens.
        metric: ``weir.logit_diff(a, b)``, or a function of the logits that follow the prompt: a
            torch tensor [vocabulary] to a tensor of one number.
        hooks: one or several of ``resid_pre``, ``attn_in``, ``q``, ``k``, ``v``, ``z``,
            ``attn_out``, ``resid_mid``, ``mlp_in``, ``mlp_post``, ``mlp_out``, ``resid_post``.
        layers: ``"all"``, a block index, or a list of them.
        positions: selector of positions of the prompt, each a place of its own.
        heads: None: whole rows; ``"all"`` or a list: each head is a place of its own, at hook
            points with heads.
        mode: ``"denoise"`` puts clean rows into the corrupt run; ``"noise"`` corrupt rows into the
            clean run.
        llm: an ``LLM`` of the same checkpoint, in which the top patches are made. Without one (and
            if `model` is none) they are made on the twin, and no engine is started.
        top_k: how many patches are made; 0 for none.
        device: where the twin is put; None for the CPU. It takes 4 bytes a parameter.
        method: ``"gradient"``; or ``"integrated_gradients"`` (Sundararajan et al. 2017,
            arXiv:1703.01365): the mean of the gradients on the straight line from the rows that are
            there to those put in, on which the rows of a site at all chosen positions move together.
            The estimates of a site then add up to the effect of putting all of these in.
        steps: of integrated gradients, at the middles of so many equal parts of the line; None for
            16. Each takes a forward and a backward pass for each site.
        lora: ``LoRARequest``, or the path of an adapter's folder: the engine runs under it, and it is
            merged into the twin's weights until the call ends.
        saes: a ``weir.SAE``, a list of them or {name: SAE}, whose features are places of their own, at
            the hook point that each reads (Marks et al. 2024, arXiv:2403.19647).
        top_features: how many features of each are listed.

    Returns:
        The estimates, and the real effects of the largest.

    Raises:
        WeirError: naming the argument. A hook point is refused if the twin does not have it, where
            discovery could not prove it, or where its gradient would leave out a part of the model.
    """
    count = parse_count(top_k, "top_k")
    method, parts = parse_method(method, steps)
    autoencoders, listed = parse_saes(saes), parse_count(top_features, "top_features", 1)
    names, blocks = parse_hooks(hooks), parse_layers(layers, "layers")
    parse_mode(mode)
    Positions.parse(positions, "positions")
    if isinstance(model, (str, PathLike)):  # before its weights are read
        model = model_path(fspath(model))
        config = ModelConfig.read(model, {})
        config.check_layers(names[0], blocks)
        config.check_heads(heads, "attribute.heads")
    adapter = Adapter.parse(lora)
    engine, twin, tokenizer = _open(model, llm, device, adapter)
    longest = None if engine is None else engine.model.max_model_len - 1
    prompts = PromptPair.encode(clean, corrupt, mode, tokenizer, twin.vocab_size, longest)
    asked = AskedSites.parse(hooks, layers, heads, twin.num_layers, lambda site: _shape(twin, site))
    check_saes(autoencoders, twin)
    chosen = prompts.select(positions, () if tokenizer is None else tokenizer.all_special_ids)
    function, name = parse_metric(metric, tokenizer, twin.vocab_size)
    with contextlib.nullcontext() if adapter is None else adapter.merged(twin.network):
        return _attributed(
            engine,
            twin,
            _Question(prompts, asked, chosen, function, name, count, method, parts, autoencoders, listed),
        )


@dataclass(frozen=True)
class _Question:
    """What a call of `attribute` asks of its model.

    Attributes:
        asked: the sites whose rows are put in.
        positions: the places in the prompt.
        metric: a function of the logits that follow the prompt, called `name`.
        count: how many of the largest patches are made.
        parts: of the line that integrated gradients take.
        saes: autoencoders whose features are places of their own; of each as many as are `listed`.
    """

    prompts: PromptPair
    asked: AskedSites
    positions: tuple[int, ...]
    metric: LogitsMetric
    name: str
    count: int
    method: Method
    parts: int
    saes: Mapping[str, SAE]
    listed: int


def _attributed(engine: EngineRuns | None, twin: Twin, question: _Question) -> Attribution:
    """Estimate all patches, and make the largest."""
    prompts, asked, chosen, metric = question.prompts, question.asked, question.positions, question.metric
    sites = list(dict.fromkeys([*asked.sites, *(sae.site for sae in question.saes.values())]))
    rows = twin.rows(prompts.source, sites)
    error = None
    if engine is not None:
        own = engine.rows(prompts.source, sites)
        error = engine.check_twin(own, rows)
    parts = 0 if question.method == "gradient" else question.parts
    places, baseline = _differentiate(twin, prompts, sites, chosen, rows, metric, parts)
    grid = _estimate(asked, chosen, places)
    features = {
        key: feature_effects(sae, chosen, prompts.texts, *places[sae.site], question.listed)
        for key, sae in question.saes.items()
    }
    top = effects_of(largest(grid, question.count), prompts.texts)
    put_in = rows if engine is None else own
    patches = [RowPatch(e.site, e.position, _part(put_in[e.site][e.position], e.head), e.head) for e in top]
    if engine is None:
        effects, in_engine = [_effect_on_twin(twin, prompts, patch, metric, baseline) for patch in patches], None
    else:
        effects, in_engine = _effects_in_engine(engine, twin, prompts, patches, metric)
    verified = [VerifiedEffect(**e.__dict__, effect=effect) for e, effect in zip(top, effects, strict=True)]
    return Attribution(
        grid, top, tuple(verified), "twin" if engine is None else "engine", baseline, in_engine, error, prompts.mode,
        question.name, prompts.texts, question.method, question.parts, features,
    )  # fmt: skip


def _open(model: Any, llm: Any, device: Any, adapter: Adapter | None) -> tuple[EngineRuns | None, Twin, Any]:
    """Return the engine, if there is one, the twin, and the tokenizer, if there is one."""
    is_checkpoint = isinstance(model, str)
    if not is_checkpoint and not isinstance(model, torch.nn.Module):
        own = EngineRuns(model, "model", adapter)
        if llm is not None and llm is not model:
            raise WeirError("the model is an LLM itself; leave llm out", "llm")
        return own, own.load_twin(device), own.tokenizer
    engine = None if llm is None else EngineRuns(llm, adapter=adapter)
    if is_checkpoint:
        return engine, Twin.load(model, device), load_tokenizer(model) if engine is None else engine.tokenizer
    if device is not None:
        raise WeirError("a loaded model stays where it is; leave device out", "device")
    return engine, Twin(model), None if engine is None else engine.tokenizer


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def _shape(twin: Twin, site: Site) -> tuple[int, ...]:
    twin.require(site)
    return twin.shape(site)


def _part(row: torch.Tensor, head: int | None) -> torch.Tensor:
    return row if head is None else row[head]


class Slope(NamedTuple):
    """Rows [positions, ...] of a site in the run that is patched, the metric's gradient there, and the rows put in."""

    rows: torch.Tensor
    gradient: torch.Tensor
    put_in: torch.Tensor


def _differentiate(
    twin: Twin, prompts: PromptPair, sites: Sequence[Site], positions: tuple[int, ...],
    source: Mapping[Site, torch.Tensor], metric: LogitsMetric, steps: int,
) -> tuple[dict[Site, Slope], Baseline]:  # fmt: skip
    """Return each site's slope, and the metric of the unpatched runs; `steps` are of integrated gradients, or 0."""
    base, at, slopes = twin.differentiate(prompts.base, metric, sites), list(positions), {}
    for site in sites:
        rows, gradient, put_in = base.rows[site][at], base.gradients[site][at], source[site][at]
        if steps:
            way = [rows + (k + 0.5) / steps * (put_in - rows) for k in range(steps)]
            each = (twin.slope_at(prompts.base, metric, site, at, one)[at].double() for one in way)
            gradient = sum(each, torch.zeros_like(rows, dtype=torch.float64)) / steps
        slopes[site] = Slope(rows, gradient, put_in)
    other = float(metric(twin.logits(prompts.source)))
    clean, corrupt = (other, base.metric) if prompts.mode == DENOISE else (base.metric, other)
    return slopes, Baseline(clean, corrupt)


def _estimate(asked: AskedSites, positions: tuple[int, ...], slopes: Mapping[Site, Slope]) -> Grid:
    estimates = []
    for site in asked.sites:
        rows, gradient, put_in = slopes[site]
        estimate = first_order(put_in, rows, gradient, by_head=asked.heads is not None)
        estimates.append(estimate if asked.heads is None else estimate[:, list(asked.heads)])
    axes: dict[str, tuple] = {"hook": asked.hooks, "layer": asked.layers, "position": positions}
    if asked.heads is not None:
        axes["head"] = asked.heads
    return Grid(np.stack(estimates).reshape([len(labels) for labels in axes.values()]), axes)


def _effect_on_twin(
    twin: Twin, prompts: PromptPair, patch: RowPatch, metric: LogitsMetric, baseline: Baseline
) -> float:
    before = baseline.corrupt if prompts.mode == DENOISE else baseline.clean
    return float(metric(twin.logits(prompts.base, [patch]))) - before


def _effects_in_engine(
    engine: EngineRuns, twin: Twin, prompts: PromptPair, patches: Sequence[RowPatch], metric: LogitsMetric
) -> tuple[list[float], Baseline]:
    before, *after = engine.metrics(prompts.base, [None, *patches], twin, metric)
    (other,) = engine.metrics(prompts.source, [None], twin, metric)
    clean, corrupt = (other, before) if prompts.mode == DENOISE else (before, other)
    return [value - before for value in after], Baseline(clean, corrupt)


EXACT, ROUGH = 1e-3, 0.1
"""How far rows of the engine may be from the twin's, mean |difference| / |row| of a site: in float32, and in
any other dtype."""


class EngineRuns:
    """Runs of a ``vllm.LLM`` that Weir serves, under an adapter if one is given."""

    def __init__(self, llm: Any, field: str = "llm", adapter: Adapter | None = None) -> None:
        if not hasattr(llm, "llm_engine"):  # an LLMEngine and an AsyncLLM have no `generate` that takes a batch
            wanted = "a vllm.LLM" if field == "llm" else "a vllm.LLM, the path of a checkpoint or a transformers model"
            raise WeirError(f"expected {wanted}, got {type(llm).__name__}", field)
        self._engine, self.llm = engine(llm), llm
        self.model, self.tokenizer = self._engine.model, self._engine.tokenizer
        self._options = {} if adapter is None else adapter.load(self._engine)

    def load_twin(self, device: Any) -> Twin:
        if not self._engine.has_first_weights():
            raise WeirError(
                f"the engine has other weights than those that it loaded from {self.model.model!r} at its start; give "
                "the checkpoint of those that it has: weir.attribute(path, ..., llm=llm)",
                "model",
            )
        options = {"trust_remote_code": self.model.trust_remote_code, "revision": self.model.revision}
        return Twin.load(self.model.model, device, **{name: value for name, value in options.items() if value})

    def rows(self, ids: Sequence[int], sites: Sequence[Site]) -> dict[Site, torch.Tensor]:
        """Return the rows of a prompt, site -> [tokens, ...]."""
        layers: dict[str, list[int]] = {}
        for site in sites:
            layers.setdefault(site.hook, []).append(site.layer)
        capture = [Capture(hook, at, "prompt", dtype="float32") for hook, at in layers.items()]
        (out,) = self._generate([(ids, {"capture": capture})])
        return {site: out.activations[site.hook, site.layer] for site in sites}

    def metrics(
        self, ids: Sequence[int], patches: Sequence[RowPatch | None], twin: Twin, metric: LogitsMetric
    ) -> list[float]:
        """Return the metric of a prompt under each patch, in one batch.

        The engine's last row of the stream is read after the patch; the final norm and the
        unembedding are the twin's, in float32.
        """
        read = Capture("resid_post", twin.num_layers - 1, "last_prompt", dtype="float32")
        asked = [(ids, {"capture": read, "interventions": [] if p is None else [_replace(p)]}) for p in patches]
        outs = self._generate(asked)
        rows = torch.cat([out.activations["resid_post", twin.num_layers - 1] for out in outs])
        return [float(metric(logits)) for logits in twin.finish(rows)]

    def check_twin(self, rows: dict[Site, torch.Tensor], of_twin: dict[Site, torch.Tensor]) -> float:
        """Compare rows of the engine with the twin's; return the largest error of a site."""
        errors = {site: _error(rows[site], of_twin[site].cpu(), site) for site in rows}
        worst = max(errors, key=lambda site: errors[site])
        bound = EXACT if self.model.dtype == torch.float32 else ROUGH
        if not errors[worst] <= bound:
            raise WeirError(
                f"{worst} of the engine, in {self.model.dtype}, differs from the twin's by {errors[worst]:.2g} of a "
                f"row's length (at most {bound} is taken for rounding): is it the same checkpoint, unquantised, under "
                "the same adapter (lora=) or none?",
                "model",
            )
        return errors[worst]

    def _generate(self, asked: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[Any]:
        from vllm import SamplingParams

        plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in asked]
        sampling = [params(plain, **wanted) for _, wanted in asked]
        return self.llm.generate(prompts, sampling, use_tqdm=False, **self._options)


def _replace(patch: RowPatch) -> Replace:
    heads = None if patch.head is None else [patch.head]
    return Replace(patch.row, patch.site.layer, hook=patch.site.hook, positions=[patch.position], heads=heads)


def _error(rows: torch.Tensor, expected: torch.Tensor, site: Site) -> float:
    if rows.shape != expected.shape:
        raise WeirError(
            f"{site} has rows {list(rows.shape)} in the engine and {list(expected.shape)} on the twin; "
            "is it the same checkpoint?",
            "model",
        )
    lengths = expected.flatten(1).norm(dim=1).clamp_min(1e-30)
    return float(((rows - expected).flatten(1).norm(dim=1) / lengths).mean())
