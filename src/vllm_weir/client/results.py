"""From a server's answer to what a caller gets: completions with activations, scores and receipts."""

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
from vllm_weir.results.receipt import Receipt
from vllm_weir.schema.hooks import Site, parse_site

ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Choice:
    """One sequence of an answer.

    Attributes:
        text: what was generated.
        token_ids: its tokens; None if the server did not say (``return_token_ids=False``).
        scores: of a request that projects: an `Activations` whose rows are the scores, float32 [rows, m]; else None.
        receipt: what was really done; None for a request that asks nothing of Weir.
        path: the file that holds the activations, of a request with ``save_to``.
        finish_reason: OpenAI's.
        tool_calls: OpenAI's, of a chat.
        reference: the id of activations that lie on the server, until they are fetched.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    tool_calls: list[Any] | None = None
    receipt: Receipt | None = None
    scores: Activations | None = None
    path: Path | None = None
    reference: str | None = None
    refusal: str = ""
    rows: Activations | None = None

    @property
    def activations(self) -> Activations | None:
        """The captured rows (of a request that projects, the scores, as offline); None if nothing was captured.

        Raises:
            WeirError: if the server did not keep them; it says why.
        """
        if self.refusal:
            raise WeirError(self.refusal, "activations")
        if self.rows is None and self.path is not None:
            self.rows = Activations.load(self.path)
        return self.rows if self.rows is not None else self.scores


@dataclass
class Completion:
    """The answer to one prompt; what `Choice` has, the completion has as well, of its first choice.

    Attributes:
        choices: the `n` sequences, by index.
        prompt_token_ids: the prompt's tokens; None if the server did not say.
        raw: ``openai.types.Completion`` or ``openai.types.chat.ChatCompletion``; of a stream None.
    """

    choices: list[Choice]
    model: str = ""
    id: str = ""
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    raw: Any = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """What was generated."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int] | None:
        """The generated tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> list[Any] | None:
        """As of `Choice`."""
        return self.choices[0].tool_calls

    @property
    def path(self) -> Path | None:
        """As of `Choice`."""
        return self.choices[0].path

    @property
    def activations(self) -> Activations | None:
        """As of `Choice`."""
        return self.choices[0].activations

    @property
    def scores(self) -> Activations | None:
        """As of `Choice`."""
        return self.choices[0].scores

    @property
    def receipt(self) -> Receipt | None:
        """As of `Choice`."""
        return self.choices[0].receipt


@dataclass
class Chunk:
    """A piece of a stream.

    Attributes:
        index: the choice that it belongs to.
        text, token_ids: what is new.
        scores: the new rows, of a request that projects.
        result: the whole answer; only of the last chunk, which has nothing new besides.
        raw: OpenAI's chunk; None of the last.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    scores: Activations | None = None
    result: Completion | None = None
    raw: Any = field(default=None, repr=False)


def site_of(name: str) -> Site:
    """The site that the wire calls ``"resid_post.10"``."""
    try:
        return parse_site(name)
    except WeirError:
        raise WeirError(f"the server speaks of a site {brief(name)!r}; is it of another version?") from None


def _counts(data: Mapping[str, int]) -> dict[Site, int]:
    return {site_of(name): n for name, n in data.items()}


_RECEIPT = {f.name for f in dataclasses.fields(Receipt)}


def receipt_of(data: Mapping[str, Any]) -> Receipt:
    """The inverse of `Receipt.to_dict`; what a later version adds is left out."""
    known = {name: value for name, value in data.items() if name in _RECEIPT}
    for name in ("captured", "dropped"):
        known[name] = _counts(known.get(name, {}))
    known["steered"] = tuple(_counts(sites) for sites in known.get("steered", ()))
    for name in ("shared", "files"):
        known[name] = tuple(known.get(name, ()))
    return Receipt(**known)


def scores_of(data: Mapping[str, Any]) -> Activations:
    """Of the wire's ``scores`` object: rows float32 [rows, m]. What is not finite travels as null: NaN here."""
    rows = {site_of(name): values for name, values in data["sites"].items()}

    def at(name: str) -> dict[Site, torch.Tensor]:
        apart = data.get(f"{name}_of")
        if apart is not None:
            return {site_of(site): torch.tensor(values, dtype=torch.int64) for site, values in apart.items()}
        shared = torch.tensor(data[name], dtype=torch.int64)
        return dict.fromkeys(rows, shared)

    return Activations({site: _matrix(values) for site, values in rows.items()}, at("positions"), at("token_ids"))


def _matrix(values: list[list[float]]) -> torch.Tensor:
    if not values:
        return torch.empty(0, 0)
    return torch.tensor([[math.nan if v is None else v for v in row] for row in values], dtype=torch.float32)


def activations_of(data: bytes) -> Activations:
    """Of the bytes that `Activations.save` writes; raises WeirError if they are anything else."""
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        meta = json.loads(data[8:end]).get("__metadata__", {})
        if meta.get("weir") != "1":
            raise WeirError("the server sent a file that Activations.save did not write")
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


def take_weir(choice: Choice, data: dict[str, Any]) -> None:
    """Put the wire's ``weir`` object of a choice into it; activations by reference leave their id there.

    Raises:
        WeirError: if the server could not do what was asked, or sent something that makes no sense.
    """
    if data.get("error"):
        raise WeirError(str(data["error"]))
    if data.get("receipt") is not None:
        choice.receipt = receipt_of(data["receipt"])
    if data.get("scores") is not None:
        choice.scores = scores_of(data["scores"])
    found = data.get("activations")
    if found is None:
        return
    if "b64" in found:
        try:
            choice.rows = activations_of(base64.b64decode(found["b64"], validate=True))
            found.pop("b64")  # once is enough: `raw` does not hold it again
        except (binascii.Error, TypeError) as e:
            raise WeirError(f"the activations that the server sent are not valid base64 ({e})") from None
    elif isinstance(found.get("id"), str) and ID.fullmatch(found["id"]):
        # Where it lies is known; an address from the answer is not followed, so that no key travels elsewhere.
        choice.reference = found["id"]
    else:
        why = next((found[k] for k in ("reason", "refused", "error") if found.get(k)), "it does not say why")
        choice.refusal = f"the server sent no activations: {brief(why, 500)}"


def unheeded() -> ServerError:
    """For a choice without ``weir``, where the request had that: vLLM passes over fields that it does not know."""
    return ServerError(
        "the server has no Weir: what was asked of it was passed over; start it with `weir serve`", "weir"
    )


def completion_of(data: Mapping[str, Any], chat: bool, asked: bool = False) -> Completion:
    """The whole answer, of ``/v1/completions`` or ``/v1/chat/completions``.

    Args:
        asked: whether the request asked something of Weir.

    Raises:
        WeirError: if the server could not do it.
        ServerError: if the server knows nothing of it.
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
            take_weir(choice, raw["weir"])
        elif asked:
            raise unheeded()
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
    """The class of the `openai` package for an answer."""
    if chat:
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        return ChatCompletionChunk if chunk else ChatCompletion
    from openai.types import Completion as OpenAICompletion

    return OpenAICompletion
