"""What an HTTP request asks of Weir, gathered from the places where a client may put it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.results.activations import Activations
from vllm_weir.schema.fields import loads
from vllm_weir.schema.keys import KEYS, PROJECTED_KEYS, WIRE_KEY, fork_fields, misplaced, places, refuse_lens
from vllm_weir.server.limits import ServerLimits

RESPONSE = "response"
_ENTRY = re.compile(r"^(modules|interventions|probes)\[(\d+)\](.*)$", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class WeirRequest:
    """What one HTTP request asks of Weir."""

    extra_args: Mapping[str, Any]  # Weir's part of ``SamplingParams.extra_args``, plain JSON data
    inline_bytes: int  # Up to this many bytes of rows come inline with the choice
    stream: bool = False  # whether chunks carry new scores as they arrive
    binary: bool = False  # whether the values of hooks come as base64 instead of numbers
    # Returns another system's fields of the response, and what is to be stored for them by its key; None for none
    answer: Callable[[Activations, ServerLimits], tuple[dict[str, Any], dict[str, bytes]]] | None = None
    # Puts the rows of the first sequence where another system looks for them, in place of an object ``weir``; returns
    # fields of the response, and what removes the rows again. None for an object ``weir``.
    deposit: Callable[[OutputView], tuple[dict[str, Any], Callable[[], None]]] | None = None
    own: bool = False  # whether the key ``weir`` was given, so that rows come in Weir's form
    # For the lists in ``weir``, the fields of another system that their first entries stand for
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def as_sent(self, error: WeirError) -> WeirError:
        """Return `error`, naming the field that the client sent."""
        match = _ENTRY.match(error.field)
        if match is None or match[1] not in self.origins:
            return error
        origins, index = self.origins[match[1]], int(match[2])
        field = origins[index] if index < len(origins) else f"{match[1]}[{index - len(origins)}]"
        return WeirError(error.message, field + match[3])

    @classmethod
    def parse(
        cls,
        xargs: Mapping[str, Any] | None,
        body: Mapping[str, Any] | None,
        limits: ServerLimits,
    ) -> WeirRequest | None:
        """Return what is asked in ``vllm_xargs`` and in unknown top-level keys, None if nothing is.

        Fields of other systems are left to `compat`.

        `body`: the fields that vLLM does not know. Raises WeirError, naming the field.
        """
        if (error := misplaced(xargs, body)) is not None:
            raise error
        extra_args = _gather(xargs or {}, body or {})
        if not extra_args and not fork_fields(body):
            return None
        refuse_lens(extra_args)
        options = _ResponseOptions(limits.inline_default)
        if WIRE_KEY in extra_args:
            extra_args[WIRE_KEY], options = _weir_object(extra_args[WIRE_KEY], limits)
        return cls(
            extra_args,
            inline_bytes=min(options.inline_bytes, limits.inline_bytes),
            stream=options.stream,
            binary=options.binary,
            own=WIRE_KEY in extra_args,
        )


class ByDefault(Protocol):
    """What a server does with a request that has none of Weir's keys."""

    def extra_args(self) -> Mapping[str, Any]:
        """Return it as `WeirRequest.extra_args` of usual requests."""

    def request(self, body: Any) -> WeirRequest:
        """Return it for one of vLLM's requests; raise WeirError naming a field with which it cannot be done."""


def _gather(xargs: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Weir and of other systems from all places; raise WeirError for one given twice."""
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


class _ResponseOptions(NamedTuple):
    """What ``response`` holds, see `WeirRequest`."""

    inline_bytes: int
    stream: bool = False
    binary: bool = False


def _weir_object(data: Any, limits: ServerLimits) -> tuple[dict[str, Any], _ResponseOptions]:
    """Return the wire form without ``response``, and what that holds."""
    if isinstance(data, str):
        data = loads(data, WIRE_KEY)
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", WIRE_KEY)
    weir_object = dict(data)
    options = _response_options(weir_object.pop(RESPONSE, None), limits)
    captures = weir_object.get("capture")
    capture_list = captures if isinstance(captures, Sequence) and not isinstance(captures, str) else [captures]
    for i, capture in enumerate(capture_list):
        sink = capture.get("sink") if isinstance(capture, Mapping) else None
        if sink is not None and not isinstance(sink, str):
            # Clients must not choose where the server writes files.
            raise WeirError(
                "over HTTP a sink is 'memory' or the name of one that the server's operator set up",
                f"capture[{i}].sink",
            )
    _check_probe_names(weir_object.get("probes"))
    lenses = weir_object.get("lens")
    by_path = {f"lens[{i}]": one for i, one in enumerate(lenses)} if isinstance(lenses, list) else {"lens": lenses}
    for path, lens in by_path.items():
        if isinstance(lens, Mapping) and lens.get("path") is not None:
            raise WeirError(
                "over HTTP a fitted lens is named; the operator names it: --weir-lens NAME=PATH", f"{path}.path"
            )
    return weir_object, options


def _check_probe_names(probes: Any) -> None:
    """Raise WeirError for a probe whose scores would stand in the place of something else."""
    probe_list = probes if isinstance(probes, Sequence) and not isinstance(probes, str) else [probes]
    for i, probe in enumerate(probe_list):
        name = probe.get("name") if isinstance(probe, Mapping) else None
        if name in PROJECTED_KEYS:
            raise WeirError(f"{name!r} is a key of responses; choose another name", f"probes[{i}].name")


def _response_options(data: Any, limits: ServerLimits) -> _ResponseOptions:
    path = f"{WIRE_KEY}.{RESPONSE}"
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    for key in data:
        if key not in ("inline_bytes", "stream", "values"):
            raise WeirError("unknown key; known are inline_bytes, stream, values", f"{path}.{brief(key)}")
    inline, stream = data.get("inline_bytes", limits.inline_default), data.get("stream", False)
    if type(inline) is not int or inline < 0:
        raise WeirError("expected a number of bytes, at least 0", f"{path}.inline_bytes")
    if not isinstance(stream, bool):
        raise WeirError("expected true or false", f"{path}.stream")
    values = data.get("values", "numbers")
    if values not in ("numbers", "b64"):
        raise WeirError("expected 'numbers' or 'b64'", f"{path}.values")
    return _ResponseOptions(inline, stream, values == "b64")
