"""The body of a generation request, made from the caller's arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from vllm_weir.client.http import HttpRequest
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.keys import WIRE_KEY, misplaced
from vllm_weir.schema.named_hooks import NO_CODE, Use
from vllm_weir.schema.request import WIRE_FIELDS, RequestSpec
from vllm_weir.schema.user_hooks import Hook

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSE_KEY, MODULES_KEY = "response", "modules"
_WEIR_ARGUMENTS = (*WIRE_FIELDS[1:], "inline_bytes", "save_to")
_RESERVED = ("stream", "prompt", "messages", WIRE_KEY)
NOTHING = RequestSpec()


def weir_object(spec: RequestSpec, inline_bytes: int | None, stream: bool) -> dict[str, Any] | None:
    """Return the body's ``weir`` object, or None if nothing is asked of Weir.

    Raises:
        WeirError: Naming the field that is wrong.
    """
    refuse_code(spec)
    calls = any(isinstance(one, Use) for one in (*spec.interventions, *spec.hooks))
    reads = bool(spec.features or spec.lens or spec.probes)
    if inline_bytes is not None and (not isinstance(inline_bytes, int) or inline_bytes < 0):
        raise WeirError(f"expected a number of bytes, at least 0, got {brief(inline_bytes)}", "inline_bytes")
    if spec == NOTHING:
        return None
    out = spec.to_json()
    response: dict[str, Any] = {}
    if inline_bytes is not None:
        response["inline_bytes"] = inline_bytes
    if calls:
        response["values"] = "b64"
    if stream and (reads or calls or any(c.project is not None for c in spec.capture)):
        response["stream"] = True
    return out | {RESPONSE_KEY: response} if response else out


def refuse_code(spec: RequestSpec) -> None:
    """Raise WeirError if a request to a server has a function."""
    for one in (*spec.interventions, *spec.hooks):
        if isinstance(one, Hook):
            raise WeirError(NO_CODE, one.path)


def body_of(
    prompt: Mapping[str, Any],
    model: str,
    *,
    asked: RequestSpec = NOTHING,
    inline_bytes: int | None = None,
    stream: bool = False,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the body of ``/v1/completions`` or ``/v1/chat/completions``.

    Args:
        prompt: ``{"prompt": ...}`` or ``{"messages": ...}``.
        model: The model's name.
        asked: What the request asks of Weir.
        inline_bytes: Activations up to this size come within the response.
        stream: Whether to ask for a stream.
        fields: OpenAI's and vLLM's own fields. A field that is None is left out; an ``extra_body``
            among them is merged in.
    """
    fields = dict(fields)
    extra = fields.pop("extra_body", None) or {}
    for name in (*fields, *extra):
        if name in _RESERVED:
            raise WeirError("is set by the client itself; use the method's own arguments", name)
        near = difflib.get_close_matches(name, _WEIR_ARGUMENTS, n=1, cutoff=0.85)
        if near:  # a server ignores fields that it does not know
            raise WeirError(f"is not a field of a request; did you mean the argument {near[0]}?", name)
    xargs = fields.get("vllm_xargs") or extra.get("vllm_xargs")
    if (error := misplaced(xargs if isinstance(xargs, Mapping) else None, {**fields, **extra})) is not None:
        raise error
    body = {"model": model, "return_token_ids": True, **fields, **extra}
    if body.get("echo") and "prompt" in prompt and "return_token_ids" not in (*fields, *extra):
        del body["return_token_ids"]  # with token ids, vLLM leaves the prompt's text out
    body = {name: value for name, value in body.items() if value is not None} | dict(prompt)
    weir = weir_object(asked, inline_bytes, stream)
    if weir is not None:
        body[WIRE_KEY] = weir
    if stream:
        body["stream"] = True
    return body


@dataclass(frozen=True)
class GenerationCall:
    """What a call asks of each of its prompts."""

    asked: RequestSpec  # what it asks of Weir
    inline_bytes: int | None  # Activations up to this size come within the response
    save_to: Path | None  # the directory for the activations, or None to hold them in memory
    fields: Mapping[str, Any]  # OpenAI's and vLLM's own fields

    @classmethod
    def create(
        cls,
        asked: RequestSpec,
        inline_bytes: int | None,
        save_to: str | PathLike | None,
        fields: Mapping[str, Any],
    ) -> GenerationCall:
        """Return the call, with the directory of `save_to` created."""
        directory = None if save_to is None else Path(save_to)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        return cls(asked, inline_bytes, directory, fields)

    def http_request(self, prompt: Any, model: str, stream: bool) -> HttpRequest:
        """Return the request for a text, token ids or chat messages."""
        path, content = route_and_prompt(prompt)
        body = body_of(
            content,
            self.fields.get("model") or model,
            asked=self.asked,
            inline_bytes=self.inline_bytes,
            stream=stream,
            fields={name: value for name, value in self.fields.items() if name != "model"},
        )
        return HttpRequest("POST", path, json=body, repeatable=False)


def route_and_prompt(prompt: Any) -> tuple[str, dict[str, Any]]:
    """Return the route for a text, token ids or chat messages, and the body's field for them."""
    if isinstance(prompt, str) or is_tokens(prompt):
        return COMPLETIONS, {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if is_chat(prompt):
        return CHAT, {"messages": list(prompt)}
    raise WeirError("expected a text, token ids, or chat messages ({'role', 'content'})", "prompt")


def is_tokens(prompt: Any) -> bool:
    """Return whether `prompt` is one prompt, given as token ids."""
    return _is_list(prompt) and len(prompt) > 0 and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt)


def is_chat(prompt: Any) -> bool:
    """Return whether `prompt` is one conversation."""
    return _is_list(prompt) and len(prompt) > 0 and all(isinstance(m, Mapping) and "role" in m for m in prompt)


def prompt_batch(prompts: Any) -> list[Any] | None:
    """Return the prompts of a list of them, or None if `prompts` is a single one."""
    if isinstance(prompts, str) or is_tokens(prompts):
        return None
    if not _is_list(prompts):
        raise WeirError(f"expected a prompt or a list of prompts, got {type(prompts).__name__}", "prompt")
    return list(prompts)


def chat_batch(messages: Any) -> list[Any] | None:
    """Return the conversations of a list of them, or None if `messages` is a single one.

    A text is refused: it would not get the chat template.
    """
    if is_chat(messages):
        return None
    if not _is_list(messages) or not all(map(is_chat, messages)):
        raise WeirError("expected chat messages ({'role', 'content'}), or a list of conversations", "messages")
    return list(messages)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
