"""What is asked of an attribution: sites, metric, features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.attribute.result import FeatureEffect, FeatureEffects, first_order
from vllm_weir.experiments.attribute.twin import Twin
from vllm_weir.experiments.metrics import DENOISE, LogitDiff, OnLogits, function_name, parse_mode
from vllm_weir.experiments.prompts import check_tokens, encode, parse_prompt
from vllm_weir.sae import activations
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.schema.hooks import HEAD_HOOKS, MODEL_HOOKS, Site, layers_of, normalise_hook, refuse_read_only
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.rows import RowPart

REFUSED = (*MODEL_HOOKS, "router_logits")
"""Hook points that can be patched in an engine, and are not attributed to."""

Method = Literal["gradient", "integrated_gradients"]
METHODS: tuple[str, ...] = get_args(Method)
DEFAULT_STEPS, MAX_STEPS = 16, 1024
"""Of integrated gradients."""

LogitsMetric = Callable[[torch.Tensor], torch.Tensor]
"""Logits [vocabulary] that follow the prompt -> one number, differentiable."""


@dataclass(frozen=True)
class PromptPair:
    """Two prompts of the same length, as token ids.

    Attributes:
        clean, corrupt: the prompts.
        source: the one whose rows are put in.
        base: the one that they are put into.
        texts: of the base prompt's tokens.
    """

    clean: tuple[int, ...]
    corrupt: tuple[int, ...]
    mode: str
    texts: tuple[str, ...]

    @classmethod
    def encode(
        cls, clean: Any, corrupt: Any, mode: Any, tokenizer: Any, vocab_size: int, longest: int | None = None
    ) -> PromptPair:
        """Encode two prompts, texts or token ids."""
        mode = parse_mode(mode)
        fields = ("clean", "corrupt")
        given = [parse_prompt(prompt, field) for prompt, field in zip((clean, corrupt), fields, strict=True)]
        encoded = encode(given, lambda: tokenizer, longest, fields)
        check_tokens(encoded, vocab_size, fields)
        one, other = map(tuple, encoded)
        if len(one) != len(other):
            raise WeirError(
                f"the clean prompt has {len(one)} tokens and the corrupt one {len(other)}, so their positions do not "
                "correspond; use prompts of the same length",
                "corrupt",
            )
        base = other if mode == DENOISE else one
        texts = [str(token) if tokenizer is None else tokenizer.decode([token]) for token in base]
        return cls(one, other, mode, tuple(texts))

    @property
    def source(self) -> tuple[int, ...]:
        return self.clean if self.mode == DENOISE else self.corrupt

    @property
    def base(self) -> tuple[int, ...]:
        return self.corrupt if self.mode == DENOISE else self.clean

    def select(self, positions: Any, special_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the positions that a selector picks of the base prompt; raise WeirError if it picks none."""
        selector = Positions.parse(positions, "positions").with_special(special_ids)
        if selector.kind == "modality":
            raise WeirError("these prompts are text; choose positions by their place or token", "positions")
        every, ids = np.arange(len(self.base)), np.asarray(self.base)
        chosen = every[selector.mask(every, len(self.base), ids)]
        if not len(chosen):
            raise WeirError(f"selects none of the prompt's positions 0..{len(self.base) - 1}", "positions")
        return tuple(int(position) for position in chosen)


@dataclass(frozen=True)
class AskedSites:
    """What is asked about, hook points by layers (by heads)."""

    hooks: tuple[str, ...]  # hook points
    layers: tuple[int, ...]  # blocks
    heads: tuple[int, ...] | None  # heads; None for whole rows

    @classmethod
    def parse(cls, hooks: Any, layers: Any, heads: Any, num_layers: int, shape: Callable[[Site], tuple]) -> AskedSites:
        """Parse hook points, layers and heads of a model; raise WeirError naming the argument.

        `shape` is asked for a site's row, of hook points that the model has.
        """
        names = parse_hooks(hooks)
        numbers = layers_of(names[0], parse_layers(layers, "layers"), num_layers, "layers")
        if heads is None:
            return cls(names, numbers, None)
        whole = [hook for hook in names if hook not in HEAD_HOOKS]
        if whole:
            raise WeirError(f"{', '.join(whole)} has no heads; ask for it in a call of its own", "heads")
        shapes = {shape(Site(hook, layer))[0]: hook for hook in names for layer in numbers}
        if len(shapes) > 1:
            counts = ", ".join(f"{count} at {hook}" for count, hook in shapes.items())
            raise WeirError(f"the number of heads differs: {counts}; ask for them in calls of their own", "heads")
        count = next(iter(shapes))
        if isinstance(heads, str) and heads == "all":
            return cls(names, numbers, tuple(range(count)))
        part = RowPart.parse(names[0], heads, None, "attribute")
        part.check((count, 1), names[0], "attribute")
        return cls(names, numbers, part.heads)

    @property
    def sites(self) -> list[Site]:
        return [Site(hook, layer) for hook in self.hooks for layer in self.layers]


def parse_hooks(hooks: Any) -> tuple[str, ...]:
    """Return hook points by their own names; raise WeirError for one that is not attributed to."""
    listed = [hooks] if isinstance(hooks, str) else hooks
    if not isinstance(listed, (list, tuple)) or not listed:
        raise WeirError(f"expected a hook point or a list of them, got {brief(hooks)}", "hooks")
    names = tuple(normalise_hook(hook, f"hooks[{i}]") for i, hook in enumerate(listed))
    for i, hook in enumerate(names):
        refuse_read_only(hook, f"hooks[{i}]")
        if hook in REFUSED:
            raise WeirError(f"attribution is for hook points of a block with dense rows; {hook} is none", f"hooks[{i}]")
        if hook in names[:i]:
            raise WeirError(f"{hook} is named twice", f"hooks[{i}]")
    return names


def parse_metric(metric: Any, tokenizer: Any, vocab_size: int) -> tuple[LogitsMetric, str]:
    """Return a metric as a function of logits [vocabulary], and its name; raise WeirError if it is none."""
    if isinstance(metric, LogitDiff):
        bound = metric.bind(tokenizer, 1, vocab_size=vocab_size)
        a, b = bound.tokens[0]
        return (lambda logits: logits[a] - logits[b]), bound.name
    if isinstance(metric, OnLogits):
        return cast(LogitsMetric, metric.function), metric.name
    if not callable(metric):
        raise WeirError(
            f"expected weir.logit_diff(a, b) or a function of the logits, a tensor [vocabulary], got "
            f"{type(metric).__name__}",
            "metric",
        )
    return metric, function_name(metric)


def parse_method(method: Any, steps: Any) -> tuple[Method, int]:
    """Parse a method and its steps, of which only integrated gradients have several."""
    if method not in METHODS:
        raise WeirError(f"unknown method {brief(method)!r}; choose from {', '.join(METHODS)}", "method")
    if method == "gradient":
        if steps is not None:
            raise WeirError("only integrated_gradients takes steps", "steps")
        return "gradient", 1
    steps = DEFAULT_STEPS if steps is None else plain(steps)
    if not is_int(steps) or not 0 < steps <= MAX_STEPS:
        raise WeirError(f"steps are an int from 1 to {MAX_STEPS}, got {brief(steps)}", "steps")
    return "integrated_gradients", int(steps)


def parse_count(value: Any, field: str, least: int = 0) -> int:
    value = plain(value)
    if not is_int(value) or value < least:
        raise WeirError(f"expected an int from {least}, got {brief(value)}", field)
    return int(value)


# SAE features as places of their own: what a feature's activation of one run would do to the metric in the other.
#
# A row is what its features decode to, and an error: ``x = decode(encode(x)) + error``. With the error kept, the
# metric's gradient with respect to feature i is decoder row i times its gradient with respect to the row, so the
# estimate is ``(activation put in - activation there) * (W_dec[i] @ gradient)``. Decoders are affine: the estimates of
# all features, and that of the error as a place of its own, add up to the estimate of the row.


def parse_saes(saes: Any) -> dict[str, SAE]:
    """Return autoencoders by name; raise WeirError for what has no features of the rows that it reconstructs."""
    listed = [saes] if isinstance(saes, SAE) else saes
    if not isinstance(listed, (Mapping, list, tuple)):
        raise WeirError(f"expected a weir.SAE, a list of them or {{name: SAE}}, got {brief(saes)}", "saes")
    pairs = list(listed.items()) if isinstance(listed, Mapping) else [(getattr(one, "name", ""), one) for one in listed]
    named: dict[str, SAE] = {}
    for k, (name, sae) in enumerate(pairs):
        field = f"saes[{name if isinstance(listed, Mapping) else k}]"
        if not isinstance(sae, SAE):
            raise WeirError(f"expected a weir.SAE, got {brief(sae)}; weir.SAE.load(path) reads one", field)
        if sae.config.is_transcoder or sae.layers:
            raise WeirError(f"{sae.name!r} is a transcoder, whose features do not reconstruct the row they read", field)
        if sae.config.normalize_activations != "none":
            raise WeirError(
                f"{sae.name!r} scales each row by its own length, so that its features have no decoder in common", field
            )
        if sae.head is not None:
            raise WeirError(f"{sae.name!r} reads one head; attribution takes those of whole rows", field)
        if not isinstance(name, str) or name in named:
            raise WeirError(f"two autoencoders are named {brief(name)}; give {{name: SAE}}", field)
        named[name] = sae
    return named


def check_saes(saes: Mapping[str, SAE], twin: Twin) -> None:
    """Raise WeirError where the twin does not have an autoencoder's hook point, or has rows of another width there."""
    for name, sae in saes.items():
        twin.require(sae.site, "saes")
        width = torch.Size(twin.shape(sae.site)).numel()
        if sae.d_in != width:
            raise WeirError(f"{name!r} encodes rows of {sae.d_in} numbers, and {sae.site} has {width}", "saes")


def feature_effects(
    sae: SAE, positions: Sequence[int], tokens: Sequence[str],
    rows: torch.Tensor, gradient: torch.Tensor, put_in: torch.Tensor, count: int,
) -> FeatureEffects:  # fmt: skip
    """Estimate all features of a site's rows [positions, ...], and keep the `count` largest.

    `rows` are of the run that is patched, `gradient` is the metric's with respect to them, `put_in` are of the other
    run; `tokens` are texts of the whole prompt.
    """
    there, other, slope = (one.flatten(1).to(sae.device, torch.float32) for one in (rows, put_in, gradient))
    features, of_other = sae.encode(there), sae.encode(other)
    with torch.enable_grad():
        live = features.detach().requires_grad_(True)
        decoded = activations.decode(sae.config, sae.tensors, live, there)
        (by_feature,) = torch.autograd.grad((decoded * slope).sum(), live)
    estimates = (of_other.double() - features.double()) * by_feature.double()
    error, error_put_in = there - decoded.detach(), other - sae.decode(of_other, other)
    flat = estimates.flatten()
    order = flat.abs().topk(min(count, len(flat))).indices
    top = []
    for index in order[flat[order] != 0].tolist():
        at, feature = divmod(index, sae.d_sae)
        there_is, put, estimate = (float(one[at, feature]) for one in (features, of_other, estimates))
        position, label = positions[at], sae.labels.get(feature, "")
        top.append(FeatureEffect(feature, position, tokens[position], there_is, put, estimate, label))
    errors = first_order(error_put_in, error, slope, by_head=False)
    return FeatureEffects(
        sae.site, tuple(top), tuple(positions), tuple(estimates.sum(1).tolist()), tuple(errors.tolist())
    )
