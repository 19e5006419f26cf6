"""Metrics: what a patched run is measured by, one number for each output; and which of two prompts is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.guard.request_extras import extras_in
from vllm_weir.schema.fields import is_int, plain, token_id
from vllm_weir.schema.keys import LENS_CAPTURE_KEY, LENS_QK_KEY, LENS_STEER_KEY
from vllm_weir.schema.request import RequestSpec


class Baseline(NamedTuple):
    """The metric of the unpatched runs; of several pairs of prompts, the mean.

    Attributes:
        clean: of the clean prompt.
        corrupt: of the corrupt prompt.
    """

    clean: float
    corrupt: float


class BoundMetric(Protocol):
    """A metric for the prompts of one run."""

    @property
    def name(self) -> str: ...

    def sampling(self, pair: int) -> dict[str, Any]:
        """Return the arguments of ``SamplingParams`` for requests of a pair of prompts."""
        ...

    def score(self, out: Any, pair: int) -> float: ...

    def identity(self) -> Any:
        """Return JSON data that differ for metrics that are known to differ."""
        ...


@dataclass(frozen=True)
class LogitDiff:
    """Logit of token `a` minus logit of token `b`, where the prompt ends."""

    a: Any  # text of one token, its id, or a list of these, one for each pair of prompts
    b: Any  # likewise

    def bind(self, tokenizer: Any, pairs: int, path: str = "metric", vocab_size: int | None = None) -> BoundLogitDiff:
        """Return the metric for so many pairs of prompts.

        Args:
            tokenizer: the model's; None for an engine without one.
            pairs: how many.
            path: named by errors, followed by ``.a`` or ``.b``.
            vocab_size: tokens of the model, if known.
        """
        sides = {}
        for name, value in (("a", self.a), ("b", self.b)):
            ids = sides[name] = _token_ids(value, tokenizer, pairs, f"{path}.{name}")
            if vocab_size is not None and max(ids) >= vocab_size:
                raise WeirError(f"token {max(ids)} does not exist: the vocabulary has {vocab_size}", f"{path}.{name}")
        tokens = tuple(zip(sides["a"], sides["b"], strict=True))
        for pair, (a, b) in enumerate(tokens):
            if a == b:
                raise WeirError(
                    f"a and b of pair {pair} are the same token, {a}, so that their difference is always 0; name two "
                    "different tokens",
                    f"{path}.b",
                )
        return BoundLogitDiff(tokens)


@dataclass(frozen=True)
class BoundLogitDiff:
    """A `LogitDiff` of token ids; `tokens` has (a, b) for each pair of prompts."""

    tokens: tuple[tuple[int, int], ...]
    name: str = "logit difference"

    def sampling(self, pair: int) -> dict[str, Any]:
        """Ask for the log-probabilities of the two tokens alone."""
        ids = list(dict.fromkeys(self.tokens[pair]))
        return {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprob_token_ids": ids}

    def score(self, out: Any, pair: int) -> float:
        """Subtract log-probabilities: what normalises them is the same in both."""
        found = out.outputs[0].logprobs[0]
        a, b = self.tokens[pair]
        return float(found[a].logprob) - float(found[b].logprob)

    def identity(self) -> Any:
        return ["logit_diff", [list(pair) for pair in self.tokens]]


@dataclass(frozen=True)
class OnLogits:
    """A function of all logits, float32 [vocabulary], where the prompt ends."""

    function: Callable[[np.ndarray], Any]

    @property
    def name(self) -> str:
        return function_name(self.function)

    def sampling(self, pair: int) -> dict[str, Any]:
        return {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprobs": -1, "flat_logprobs": True}

    def score(self, out: Any, pair: int) -> float:
        """Call the function; the first entry, the sampled token, occurs twice."""
        flat = out.outputs[0].logprobs
        ids = np.asarray(flat.token_ids)
        logits = np.full(int(ids.max()) + 1, -np.inf, np.float32)
        logits[ids] = flat.logprobs
        return as_number(self.function(logits))

    def identity(self) -> Any:
        return ["on_logits", qualified_name(self.function)]


@dataclass(frozen=True)
class OnOutput:
    """A function of vLLM's output; `arguments` are those of ``SamplingParams``, None for one greedy token."""

    function: Callable[[Any], Any]
    arguments: Any = None
    described: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return function_name(self.function)

    def sampling(self, pair: int) -> dict[str, Any]:
        return {"max_tokens": 1, "temperature": 0.0}

    def score(self, out: Any, pair: int) -> float:
        return as_number(self.function(out))

    def identity(self) -> Any:
        return ["output", qualified_name(self.function), self.described]


def logit_diff(a: Any, b: Any) -> LogitDiff:
    """Return the metric logit(a) - logit(b) at the token that follows the prompt.

    The engine returns the log-probabilities of these two tokens and nothing else; their difference
    is that of the logits.

    Args:
        a: text of one token that the model knows (mind the space that it begins with), its id, or a
            list of these, one for each pair of prompts.
        b: likewise, another token.
    """
    return LogitDiff(a, b)


def on_logits(function: Callable[[np.ndarray], Any]) -> OnLogits:
    """Return a metric that is a function of all logits at the token that follows the prompt.

    The function gets float32 [vocabulary]: log-probabilities (logits less what normalises them), or
    the logits themselves from an engine with ``logprobs_mode="raw_logits"``. The engine needs
    ``max_logprobs=-1``.
    """
    if not callable(function):
        raise WeirError(f"expected a function of an array, got {type(function).__name__}", "function")
    return OnLogits(function)


def bind_metric(
    metric: Any, sampling: Any, tokenizer: Any, pairs: int, path: str = "metric", vocab_size: int | None = None
) -> BoundMetric:
    """Return a metric for so many pairs of prompts; raise WeirError naming `path` if it is none.

    A function of the output may come with the caller's ``SamplingParams``.
    """
    if isinstance(metric, (LogitDiff, OnLogits)):
        if sampling is not None:
            raise WeirError("this metric reads the first token's logits and samples nothing; leave it out", "sampling")
        return metric.bind(tokenizer, pairs, path, vocab_size) if isinstance(metric, LogitDiff) else metric
    if not callable(metric):
        raise WeirError(
            f"expected weir.logit_diff(a, b), weir.on_logits(f) or a function of the output, got "
            f"{type(metric).__name__}",
            path,
        )
    if sampling is not None:
        _check_sampling(sampling)
    return OnOutput(metric, sampling, "" if sampling is None else repr(sampling))


def check_engine(metric: BoundMetric, model: Any, speculative: bool) -> None:
    """Raise WeirError unless an engine returns what a metric reads.

    One that verifies drafts (`speculative`) returns no log-probabilities of chosen tokens, and one that pools has no
    logits.
    """
    if getattr(model, "runner_type", "") == "pooling" and not isinstance(metric, OnOutput):
        raise WeirError("an engine that pools has no logits; give a function of its output", "metric")
    if isinstance(metric, OnLogits) and 0 <= model.max_logprobs < model.get_vocab_size():
        raise WeirError("a metric on all logits needs an engine that gives them: LLM(..., max_logprobs=-1)", "metric")
    if isinstance(metric, BoundLogitDiff) and speculative:
        raise WeirError(
            "an engine with speculative decoding does not return the log-probabilities of chosen tokens; use an engine "
            "without speculative_config, or weir.on_logits(lambda logits: logits[a] - logits[b]) with token ids and "
            "LLM(..., max_logprobs=-1)",
            "metric",
        )


def _check_sampling(sampling: Any) -> None:
    """Raise WeirError unless these are params whose runs differ in nothing but what is patched or added."""
    from vllm import SamplingParams

    if not isinstance(sampling, SamplingParams):
        raise WeirError(f"expected vLLM's SamplingParams, got {type(sampling).__name__}", "sampling")
    extras = extras_in(sampling) or {}
    spec = RequestSpec.carried_by(extras)
    asked = [name for name in ("capture", "interventions", "modules") if getattr(spec, name)]
    asked += [key for key in (LENS_CAPTURE_KEY, LENS_QK_KEY, LENS_STEER_KEY) if key in extras]
    if asked:
        raise WeirError(
            f"they ask for {', '.join(asked)}, which these runs set themselves; leave it out, or use weir.set_global "
            "for what every run shall undergo",
            "sampling",
        )


def as_number(value: Any) -> float:
    value = plain(value)
    if isinstance(value, (bool, np.bool_)) or is_int(value) or isinstance(value, (float, np.floating)):
        return float(value)
    raise WeirError(f"the metric returned {brief(value)!r} of type {type(value).__name__}; return one number", "metric")


def _token_ids(value: Any, tokenizer: Any, pairs: int, field_name: str) -> list[int]:
    value = plain(value)
    several = not isinstance(value, str) and not is_int(value)
    if several and not (isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1):
        raise WeirError(f"expected a token's text or id, got {type(value).__name__}", field_name)
    values = list(value) if several else [value] * pairs
    if len(values) != pairs:
        raise WeirError(f"{len(values)} tokens for {pairs} pairs of prompts; give one for all, or one each", field_name)
    return [token_id(v, tokenizer, f"{field_name}[{i}]" if several else field_name) for i, v in enumerate(values)]


def function_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def qualified_name(function: Any) -> str:
    """Return where a function is defined; of a `functools.partial`, also what it is given."""
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))]
        return f"{qualified_name(function.func)}({', '.join(given)})"
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{name}"


Mode = Literal["denoise", "noise"]
DENOISE: Mode = "denoise"
"""The corrupt prompt is run, with clean rows put in."""
NOISE: Mode = "noise"
"""The clean prompt is run, with corrupt rows put in."""
MODES = (DENOISE, NOISE)


def parse_mode(mode: Any) -> Mode:
    if mode not in MODES:
        raise WeirError(f"unknown mode {brief(mode)!r}; choose from {', '.join(MODES)}", "mode")
    return cast("Mode", mode)
