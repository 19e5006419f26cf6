"""Results of the clients: completions with activations, scores and receipts."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.client.errors import ServerError
from vllm_weir.client.response_fields import (
    activations_of,
    array_of,
    features_of,
    hook_values_of,
    lens_of,
    probe_scores_of,
    projected_of,
    receipt_of,
    saved_of,
)
from vllm_weir.errors import WeirError, brief
from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import Lenses, LensReadings
from vllm_weir.results.receipt import Receipt
from vllm_weir.results.scores import HookValues, Scores

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
        stop_reason: vLLM's field: the stop string or token, or ``"probe:<name>"`` for the probe of
            ``stop_when`` that ended the generation; None for another end.
        tool_calls: OpenAI's field, of a chat.
        receipt: What was really captured and changed; None if nothing was asked of Weir.
        projected: For a request that projects, an `Activations` whose rows are the scores,
            float32 [rows, m]; otherwise None.
        probe_scores: The scores of probes, for a request with ``probes``; otherwise None.
        features: Features of autoencoders by name, for a request with ``features``.
        lens: The likeliest next tokens by block, for a request with ``lens``; of several lenses by label.
        hook_values: What hooks gave for rows, for a request with ``hooks``; otherwise None.
        hook_saved: What they saved, likewise.
        values_refusal: Why the server sent neither; empty if it did.
        routed_experts: The experts that routers chose, [positions, blocks, top_k], for a request with ``routing``.
        routing_weights: Their weights, float32 likewise, if it asks for them.
        path: The file that holds the activations, for a request with ``save_to``.
        reference: The id of activations that are kept on the server and not fetched yet.
        refusal: Why the server kept no activations; empty if it did.
        rows: The captured rows, once they are here.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tool_calls: list[Any] | None = None
    receipt: Receipt | None = None
    projected: Activations | None = None
    probe_scores: Scores | None = None
    features: dict[str, Any] = field(default_factory=dict)
    lens: Lenses = field(default_factory=LensReadings)
    hook_values: HookValues | None = None
    hook_saved: dict[str, Any] | None = None
    values_refusal: str = ""
    routed_experts: np.ndarray | None = None
    routing_weights: np.ndarray | None = None
    path: Path | None = None
    reference: str | None = None
    refusal: str = ""
    rows: Activations | None = None

    @property
    def activations(self) -> Activations | None:
        """The captured rows, or the products if the request projects; None if nothing was captured.

        Raises:
            WeirError: If the server did not keep them, with its reason.
        """
        if self.refusal:
            raise WeirError(self.refusal, "activations")
        if self.rows is None and self.path is not None:
            self.rows = Activations.load(self.path)
        return self.rows if self.rows is not None else self.projected

    @property
    def scores(self) -> Any:
        """The `Scores` of probes, for a request with ``probes``; else `projected`, which may be None."""
        return self.projected if self.probe_scores is None else self.probe_scores

    @property
    def values(self) -> HookValues | None:
        """What hooks gave for rows; None if they gave nothing.

        Raises:
            WeirError: If the server did not send it, with its reason.
        """
        if self.values_refusal:
            raise WeirError(self.values_refusal, "values")
        return self.hook_values

    @property
    def saved(self) -> dict[str, Any] | None:
        """What hooks saved; None if they saved nothing. Raises as `values` does."""
        if self.values_refusal:
            raise WeirError(self.values_refusal, "saved")
        return self.hook_saved


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
    def stop_reason(self) -> int | str | None:
        """Which stop string, token or probe ended the generation."""
        return self.choices[0].stop_reason

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
    def scores(self) -> Any:
        """The scores of probes, or of a request that projects; see `Choice.scores`."""
        return self.choices[0].scores

    @property
    def features(self) -> dict[str, Any]:
        """`FeatureValues` by name for a request with ``features``; of cross-layer transcoders `LayerFeatures`."""
        return self.choices[0].features

    @property
    def lens(self) -> Lenses:
        """The likeliest next tokens by block, for a request with ``lens``; of several lenses by label."""
        return self.choices[0].lens

    @property
    def values(self) -> HookValues | None:
        """What hooks gave for rows; see `Choice.values`."""
        return self.choices[0].values

    @property
    def routed_experts(self) -> np.ndarray | None:
        """The experts that routers chose, for a request with ``routing``."""
        return self.choices[0].routed_experts

    @property
    def routing_weights(self) -> np.ndarray | None:
        """Their weights, if the request asks for them."""
        return self.choices[0].routing_weights

    @property
    def saved(self) -> dict[str, Any] | None:
        """What hooks saved; see `Choice.saved`."""
        return self.choices[0].saved

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
        stop_reason: vLLM's field, of a choice's last chunk.
        projected: The new scores, for a request that projects.
        probe_scores: The new scores of probes, for a request with ``probes``.
        features: The new rows of features, for a request with ``features``.
        lens: The new rows of the lens, for a request with ``lens``.
        values: What hooks gave for new rows, for a request with ``hooks``; None for nothing.
        result: The whole completion, in the last chunk, which carries nothing else.
        raw: OpenAI's chunk; None in the last.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    projected: Activations | None = None
    probe_scores: Scores | None = None
    features: dict[str, Any] = field(default_factory=dict)
    lens: Lenses = field(default_factory=LensReadings)
    values: HookValues | None = None
    result: Completion | None = None
    raw: Any = field(default=None, repr=False)

    @property
    def scores(self) -> Any:
        """The new scores: of probes, for a request with ``probes``, else `projected`; None if there are none."""
        return self.projected if self.probe_scores is None else self.probe_scores


def add_weir_fields(choice: Choice, raw: dict[str, Any]) -> None:
    """Fill `choice` from its ``weir`` object; for activations by reference, with their id.

    Large parts are taken out of `raw`, the response's choice, so that they are not held twice.

    Raises:
        WeirError: If the server could not do what was asked, or sent malformed data.
    """
    data: dict[str, Any] = raw["weir"]
    if data.get("error"):
        raise WeirError(str(data["error"]))
    if data.get("receipt") is not None:
        choice.receipt = receipt_of(data["receipt"])
    scores = data.get("scores") or {}
    choice.projected = projected_of(scores) if "sites" in scores else None
    choice.probe_scores = probe_scores_of(scores)
    choice.features, choice.lens = features_of(data.get("features") or {}), lens_of(data.get("lens") or {})
    choice.hook_values, choice.values_refusal = hook_values_of(data.get("values") or {}), data.get("values_error", "")
    choice.hook_saved = saved_of(data["saved"]) if data.get("saved") else None
    choice.routed_experts = array_of(raw.pop("routed_experts", None))
    choice.routing_weights = array_of(data.pop("routing_weights", None))
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
            stop_reason=raw.get("stop_reason"),
            tool_calls=message.get("tool_calls") or None,
        )
        prompt_ids = raw.get("prompt_token_ids") or prompt_ids
        if raw.get("weir") is not None:
            add_weir_fields(choice, raw)
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
