"""Results of the clients: completions with activations, scores and receipts."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from vllm_weir.client.errors import ServerError
from vllm_weir.errors import WeirError, brief
from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import FeatureValues, LensTokens
from vllm_weir.results.receipt import Receipt
from vllm_weir.schema.hooks import Site, parse_site

ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Choice:
    """One generated sequence.

    Attributes:
        index: Its number among the `n` sequences.
        text: The generated text.
        token_ids: The generated tokens; None if the server did not return them
            (``return_token_ids=False``).
        finish_reason: OpenAI's field.
        tool_calls: OpenAI's field, of a chat.
        receipt: What was really captured and changed; None if nothing was asked of Weir.
        scores: For a request that projects, an `Activations` whose rows are the scores,
            float32 [rows, m]; otherwise None.
        features: Features of autoencoders by name, for a request with ``features``.
        lens: The likeliest next tokens by block, for a request with ``lens``.
        path: The file that holds the activations, for a request with ``save_to``.
        reference: The id of activations that are kept on the server and not fetched yet.
        refusal: Why the server kept no activations; empty if it did.
        rows: The captured rows, once they are here.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    tool_calls: list[Any] | None = None
    receipt: Receipt | None = None
    scores: Activations | None = None
    features: dict[str, FeatureValues] = field(default_factory=dict)
    lens: dict[int, LensTokens] = field(default_factory=dict)
    path: Path | None = None
    reference: str | None = None
    refusal: str = ""
    rows: Activations | None = None

    @property
    def activations(self) -> Activations | None:
        """The captured rows, or the scores if the request projects; None if nothing was captured.

        Raises:
            WeirError: If the server did not keep them, with its reason.
        """
        if self.refusal:
            raise WeirError(self.refusal, "activations")
        if self.rows is None and self.path is not None:
            self.rows = Activations.load(self.path)
        return self.rows if self.rows is not None else self.scores


@dataclass
class Completion:
    """The response to one prompt. Its properties are those of its first choice.

    Attributes:
        choices: The `n` sequences, ordered by index.
        model: The model's name.
        id: The request's id.
        prompt_token_ids: The prompt's tokens; None if the server did not return them.
        usage: OpenAI's field.
        raw: ``openai.types.Completion`` or ``openai.types.chat.ChatCompletion``; None for a stream.
    """

    choices: list[Choice]
    model: str = ""
    id: str = ""
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    raw: Any = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """The generated text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int] | None:
        """The generated tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the generation ended."""
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> list[Any] | None:
        """OpenAI's tool calls, of a chat."""
        return self.choices[0].tool_calls

    @property
    def path(self) -> Path | None:
        """The file that holds the activations, for a request with ``save_to``."""
        return self.choices[0].path

    @property
    def activations(self) -> Activations | None:
        """See `Choice.activations`."""
        return self.choices[0].activations

    @property
    def scores(self) -> Activations | None:
        """The scores, for a request that projects."""
        return self.choices[0].scores

    @property
    def features(self) -> dict[str, FeatureValues]:
        """Features of autoencoders by name, for a request with ``features``."""
        return self.choices[0].features

    @property
    def lens(self) -> dict[int, LensTokens]:
        """The likeliest next tokens by block, for a request with ``lens``."""
        return self.choices[0].lens

    @property
    def receipt(self) -> Receipt | None:
        """What was really captured and changed."""
        return self.choices[0].receipt


@dataclass
class Chunk:
    """A piece of a stream.

    Attributes:
        index: The index of the choice that it belongs to.
        text: The new text.
        token_ids: The new tokens.
        finish_reason: OpenAI's field, of a choice's last chunk.
        scores: The new scores, for a request that projects.
        features: The new rows of features, for a request with ``features``.
        lens: The new rows of the lens, for a request with ``lens``.
        result: The whole completion, in the last chunk, which carries nothing else.
        raw: OpenAI's chunk; None in the last.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    scores: Activations | None = None
    features: dict[str, FeatureValues] = field(default_factory=dict)
    lens: dict[int, LensTokens] = field(default_factory=dict)
    result: Completion | None = None
    raw: Any = field(default=None, repr=False)


def site_of(name: str) -> Site:
    """Return the site that a response calls ``"resid_post.10"``."""
    try:
        return parse_site(name)
    except WeirError:
        raise WeirError(f"the server named an unknown site {brief(name)!r}; is it another version of Weir?") from None


_RECEIPT_FIELDS = {field.name for field in dataclasses.fields(Receipt)}


def receipt_of(data: Mapping[str, Any]) -> Receipt:
    """Return the receipt that `Receipt.to_dict` wrote; fields of a later version are left out."""
    fields = {name: value for name, value in data.items() if name in _RECEIPT_FIELDS}
    for name in ("captured", "dropped"):
        fields[name] = _site_counts(fields.get(name, {}))
    fields["steered"] = tuple(_site_counts(counts) for counts in fields.get("steered", ()))
    for name in ("shared", "files"):
        fields[name] = tuple(fields.get(name, ()))
    return Receipt(**fields)


def _site_counts(data: Mapping[str, int]) -> dict[Site, int]:
    return {site_of(name): count for name, count in data.items()}


def scores_of(data: Mapping[str, Any]) -> Activations:
    """Return a response's ``scores`` as rows, float32 [rows, m]; null (not finite) becomes NaN.

    Scores of heads are [rows, heads, m].
    """
    rows = {site_of(name): values for name, values in data["sites"].items()}

    def per_site(name: str) -> dict[Site, torch.Tensor]:
        by_site = data.get(f"{name}_of")
        if by_site is not None:
            return {site_of(site): torch.tensor(values, dtype=torch.int64) for site, values in by_site.items()}
        return dict.fromkeys(rows, torch.tensor(data[name], dtype=torch.int64))

    matrices = {site: _matrix(values) for site, values in rows.items()}
    return Activations(matrices, per_site("positions"), per_site("token_ids"))


def features_of(data: Mapping[str, Any]) -> dict[str, FeatureValues]:
    """Return a response's ``features``; null (not finite) becomes NaN."""
    return {
        name: FeatureValues(_ints(one["positions"]), _ints(one["ids"]), _matrix(one["values"]))
        for name, one in data.items()
    }


def lens_of(data: Mapping[str, Any]) -> dict[int, LensTokens]:
    """Return a response's ``lens``; null (not finite) becomes NaN."""
    return {
        int(layer): LensTokens(_ints(one["positions"]), _ints(one["token_ids"]), _matrix(one["logprobs"]))
        for layer, one in data.items()
    }


def _ints(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _matrix(values: list[Any]) -> torch.Tensor:
    if not values:
        return torch.empty(0, 0)
    return torch.tensor(_numbers(values), dtype=torch.float32)


def _numbers(values: Any) -> Any:
    """Return nested lists of numbers with NaN for null."""
    if isinstance(values, list):
        return [_numbers(v) for v in values]
    return math.nan if values is None else values


def activations_of(data: bytes) -> Activations:
    """Return the activations that `Activations.save` wrote; raise WeirError for other bytes."""
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        meta = json.loads(data[8:end]).get("__metadata__", {})
        if meta.get("weir") != "1":
            raise WeirError("the server sent a file that is not one of activations")
        tensors = load_tensors(data)
        sites = [Site(hook, layer) for hook, layer in json.loads(meta["sites"])]
        rows, positions, token_ids = (
            {s: tensors[f"{s.hook}.{s.layer}{part}"] for s in sites} for part in ("", ".positions", ".token_ids")
        )
        return Activations(rows, positions, token_ids, tuple(json.loads(meta["lens"])))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError(f"the activations that the server sent cannot be read: {e}") from None


def add_weir_fields(choice: Choice, data: dict[str, Any]) -> None:
    """Fill `choice` from its ``weir`` object; for activations by reference, with their id.

    Raises:
        WeirError: If the server could not do what was asked, or sent malformed data.
    """
    if data.get("error"):
        raise WeirError(str(data["error"]))
    if data.get("receipt") is not None:
        choice.receipt = receipt_of(data["receipt"])
    if data.get("scores") is not None:
        choice.scores = scores_of(data["scores"])
    choice.features, choice.lens = features_of(data.get("features") or {}), lens_of(data.get("lens") or {})
    activations = data.get("activations")
    if activations is None:
        return
    if "b64" in activations:
        try:
            choice.rows = activations_of(base64.b64decode(activations["b64"], validate=True))
            activations.pop("b64")  # so that `raw` does not hold the data again
        except (binascii.Error, TypeError) as e:
            raise WeirError(f"the activations that the server sent are not valid base64 ({e})") from None
    elif isinstance(activations.get("id"), str) and ID.fullmatch(activations["id"]):
        # The response's address is not followed, so that the API key is never sent elsewhere.
        choice.reference = activations["id"]
    else:
        reasons = (activations.get(key) for key in ("reason", "refused", "error"))
        why = next(filter(None, reasons), "it gave no reason")
        choice.refusal = f"the server sent no activations: {brief(why, 500)}"


def weir_missing() -> ServerError:
    """Return the error for a response without ``weir``: plain vLLM ignores unknown fields."""
    return ServerError("the server has no Weir and ignored what was asked of it; start it with `weir serve`", "weir")


def completion_of(data: Mapping[str, Any], chat: bool, asks_weir: bool = False) -> Completion:
    """Return the completion in a response of ``/v1/completions`` or ``/v1/chat/completions``.

    Args:
        data: The response's JSON data.
        chat: Whether it is of ``/v1/chat/completions``.
        asks_weir: Whether the request asked something of Weir.

    Raises:
        WeirError: If the server could not do what was asked.
        ServerError: If the server has no Weir.
    """
    choices = []
    prompt_ids = data.get("prompt_token_ids")
    for raw in data["choices"]:
        message = raw.get("message") or {}
        choice = Choice(
            index=raw["index"],
            text=(message.get("content") if chat else raw.get("text")) or "",
            token_ids=raw.get("token_ids"),
            finish_reason=raw.get("finish_reason"),
            tool_calls=message.get("tool_calls") or None,
        )
        prompt_ids = raw.get("prompt_token_ids") or prompt_ids
        if raw.get("weir") is not None:
            add_weir_fields(choice, raw["weir"])
        elif asks_weir:
            raise weir_missing()
        choices.append(choice)
    choices.sort(key=lambda c: c.index)
    return Completion(
        choices=choices,
        model=data.get("model", ""),
        id=data.get("id", ""),
        prompt_token_ids=prompt_ids,
        usage=data.get("usage"),
        raw=raw_type(chat, False).construct(**data),
    )


@functools.cache
def raw_type(chat: bool, chunk: bool) -> Any:
    """Return the `openai` package's class for a response or a chunk."""
    if chat:
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        return ChatCompletionChunk if chunk else ChatCompletion
    from openai.types import Completion as OpenAICompletion

    return OpenAICompletion
