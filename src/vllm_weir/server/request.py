"""What an HTTP request asks of Weir, gathered from the places where a client may say it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compat.vllm_lens import refuse_lens
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.keys import KEYS, LENS_CAPTURE_KEY, WIRE_KEY, fork_fields, misplaced, places
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.rhizonymph import with_fork

RESPONSE = "response"
_ENTRY = re.compile(r"^(modules|interventions)\[(\d+)\](.*)$", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class WeirRequest:
    """What one HTTP request asks of Weir.

    Attributes:
        extra_args: Weir's part of ``SamplingParams.extra_args``, plain JSON data.
        inline_bytes: up to this many bytes of rows come with the choice itself.
        stream: whether chunks carry new scores as they come.
        lens: whether the answer has vllm-lens's fields.
        own: whether ``weir`` itself was given, so that rows come as Weir gives them.
        first: of the lists in ``weir``, the fields that their first entries came from, where these are the fork's.
    """

    extra_args: Mapping[str, Any]
    inline_bytes: int
    stream: bool = False
    lens: bool = False
    own: bool = False
    first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def sent(self, error: WeirError) -> WeirError:
        """The error, naming the field as the client sent it."""
        match = _ENTRY.match(error.field)
        if match is None or match[1] not in self.first:
            return error
        first, k = self.first[match[1]], int(match[2])
        place = first[k] if k < len(first) else f"{match[1]}[{k - len(first)}]"
        return WeirError(error.message, place + match[3])

    @classmethod
    def parse(
        cls, xargs: Mapping[str, Any] | None, body: Mapping[str, Any] | None, limits: ServerLimits
    ) -> WeirRequest | None:
        """From a request's ``vllm_xargs`` and its unknown top-level keys; None if it asks for nothing.

        Raises:
            WeirError: naming the field.
        """
        if (wrong := misplaced(xargs, body)) is not None:
            raise wrong
        found, fork = _gather(xargs or {}, body or {}), fork_fields(body)
        if not found and not fork:
            return None
        refuse_lens(found)
        inline, stream = limits.inline_default, False
        if WIRE_KEY in found:
            weir_object, (inline, stream) = _weir_object(found[WIRE_KEY], limits)
            found[WIRE_KEY] = weir_object
        first: Mapping[str, tuple[str, ...]] = {}
        if fork:
            found[WIRE_KEY], first = with_fork(found.get(WIRE_KEY), fork)
        if LENS_CAPTURE_KEY in found:
            found[LENS_CAPTURE_KEY] = _lens_layers(found[LENS_CAPTURE_KEY])
        inline = min(inline, limits.inline_bytes)
        return cls(found, inline, stream, found.get(LENS_CAPTURE_KEY) is not None, WIRE_KEY in found, first)


def _gather(xargs: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, values in places(xargs, body):
        for key in KEYS:
            if values.get(key) is None:
                continue
            if key in found:
                raise WeirError(f"given twice, as {origin[key]}{key} and as {place}{key}", key)
            found[key], origin[key] = values[key], place
    return found


def _weir_object(data: Any, limits: ServerLimits) -> tuple[dict[str, Any], tuple[int, bool]]:
    """(the wire form without what is only for the answer, (inline bytes, whether scores are streamed))."""
    if isinstance(data, str):
        data = loads(data, WIRE_KEY)
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", WIRE_KEY)
    weir_object = dict(data)
    response = _response(weir_object.pop(RESPONSE, None), limits)
    captures = weir_object.get("capture")
    several = captures if isinstance(captures, Sequence) and not isinstance(captures, str) else [captures]
    for i, capture in enumerate(several):
        sink = capture.get("sink") if isinstance(capture, Mapping) else None
        if sink is not None and not isinstance(sink, str):
            # Anyone who reaches the server may send this: it does not choose where files go.
            raise WeirError(
                "over HTTP a sink is 'memory' or the name of one that the server's operator set up",
                f"capture[{i}].sink",
            )
    return weir_object, response


def _response(data: Any, limits: ServerLimits) -> tuple[int, bool]:
    path = f"{WIRE_KEY}.{RESPONSE}"
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    for key in data:
        if key not in ("inline_bytes", "stream"):
            raise WeirError("unknown key; known are inline_bytes, stream", f"{path}.{brief(key)}")
    inline, stream = data.get("inline_bytes", limits.inline_default), data.get("stream", False)
    if type(inline) is not int or inline < 0:
        raise WeirError("expected a number of bytes, at least 0", f"{path}.inline_bytes")
    if not isinstance(stream, bool):
        raise WeirError("expected true or false", f"{path}.stream")
    return inline, stream


def _lens_layers(value: Any) -> Any:
    """vllm-lens takes true or a list; vLLM's request model turns a true inside ``vllm_xargs`` into a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value not in (0, 1):
            raise WeirError("expected true, a list of blocks, or that as JSON", LENS_CAPTURE_KEY)
        return value == 1
    return value
