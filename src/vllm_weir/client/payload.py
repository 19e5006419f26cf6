"""From what a caller asks to the body of a request."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.keys import WIRE_KEY, misplaced
from vllm_weir.schema.request import RequestSpec, parse_captures, parse_interventions, parse_modules

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSE_KEY, MODULES_KEY = "response", "modules"
_SITE_REQUESTS = ("capture", "interventions", "modules", "inline_bytes", "save_to")
_OWN = ("stream", "prompt", "messages", WIRE_KEY)


def weir_object(
    capture: Any, interventions: Any, modules: Any, inline_bytes: int | None, stream: bool
) -> dict[str, Any] | None:
    """The body's ``weir`` object; None if nothing is asked of Weir.

    Raises:
        WeirError: naming the field that is wrong.
    """
    spec = RequestSpec(parse_captures(capture, "capture"), parse_interventions(interventions, "interventions"))
    if inline_bytes is not None and (not isinstance(inline_bytes, int) or inline_bytes < 0):
        raise WeirError(f"a number of bytes, got {brief(inline_bytes)}", "inline_bytes")
    parse_modules(modules, "modules")
    named = [modules] if isinstance(modules, (str, Mapping)) else list(modules or ())
    if not spec.capture and not spec.interventions and not named:
        return None
    out = spec.to_json() | ({MODULES_KEY: named} if named else {})
    response: dict[str, Any] = {}
    if inline_bytes is not None:
        response["inline_bytes"] = inline_bytes
    if stream and any(c.project is not None for c in spec.capture):
        response["stream"] = True
    return out | {RESPONSE_KEY: response} if response else out


def body_of(
    about: Mapping[str, Any],
    model: str,
    *,
    capture: Any = (),
    interventions: Any = (),
    modules: Any = (),
    inline_bytes: int | None = None,
    stream: bool = False,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of ``/v1/completions`` or ``/v1/chat/completions``.

    Args:
        about: ``{"prompt": ...}`` or ``{"messages": ...}``.
        fields: OpenAI's and vLLM's own fields; None leaves one out; an ``extra_body`` among them is merged in.
    """
    fields = dict(fields)
    extra = fields.pop("extra_body", None) or {}
    for name in (*fields, *extra):
        if name in _OWN:
            raise WeirError("is an argument of its own; pass it as that", name)
        near = difflib.get_close_matches(name, _SITE_REQUESTS, n=1, cutoff=0.85)
        if near:  # a server passes over fields that it does not know
            raise WeirError(f"no field of a request; did you mean the argument {near[0]}?", name)
    xargs = fields.get("vllm_xargs") or extra.get("vllm_xargs")
    if (wrong := misplaced(xargs if isinstance(xargs, Mapping) else None, {**fields, **extra})) is not None:
        raise wrong
    body = {"model": model, "return_token_ids": True, **fields, **extra}
    if body.get("echo") and "prompt" in about and "return_token_ids" not in (*fields, *extra):
        del body["return_token_ids"]  # with it, vLLM leaves the prompt's text out
    body = {name: value for name, value in body.items() if value is not None} | dict(about)
    wish = weir_object(capture, interventions, modules, inline_bytes, stream)
    if wish is not None:
        body[WIRE_KEY] = wish
    if stream:
        body["stream"] = True
    return body


def about_of(prompt: Any) -> tuple[str, dict[str, Any]]:
    """(path, what `body_of` calls about) for a text, token ids, or chat messages."""
    if isinstance(prompt, str) or is_tokens(prompt):
        return COMPLETIONS, {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if is_chat(prompt):
        return CHAT, {"messages": list(prompt)}
    raise WeirError("expected a text, token ids, or chat messages ({'role', 'content'})", "prompt")


def is_tokens(prompt: Any) -> bool:
    """Whether this is one prompt, given as token ids."""
    return _list(prompt) and len(prompt) > 0 and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt)


def is_chat(prompt: Any) -> bool:
    """Whether this is one conversation."""
    return _list(prompt) and len(prompt) > 0 and all(isinstance(m, Mapping) and "role" in m for m in prompt)


def several(prompts: Any) -> list[Any] | None:
    """The prompts of a list of them, None if `prompts` is a single one."""
    if isinstance(prompts, str) or is_tokens(prompts):
        return None
    if not _list(prompts):
        raise WeirError(f"expected a prompt or a list of them, got {type(prompts).__name__}", "prompt")
    return list(prompts)


def conversations(messages: Any) -> list[Any] | None:
    """The conversations of a list of them, None if `messages` is one; a text is none, and would miss the template."""
    if is_chat(messages):
        return None
    if not _list(messages) or not all(map(is_chat, messages)):
        raise WeirError("expected chat messages ({'role', 'content'}), or a list of conversations", "messages")
    return list(messages)


def _list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
