"""Where captured rows go besides memory: what a request asks for, and what an engine's settings set up. Pure data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.json_text import dumps

MEMORY = "memory"
KEEPS = ("always", "marked")
POLICIES = ("block", "spill", "drop")
QUEUE_BYTES = 1 << 30
LONGEST = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class SinkDefinition:
    """A consumer with its options, and how rows wait for it.

    Attributes:
        consumer: name of the consumer, an entry point of the group ``vllm_weir.consumers``.
        options: its options, canonical JSON.
        policy: what happens to rows that find `queue_bytes` of others waiting: ``"block"`` holds outputs back until
            there is room, ``"spill"`` lets them wait in temporary files, ``"drop"`` gives them up.
        queue_bytes: most bytes of rows that wait.
        captures: wire forms of what it gets of every request; None: what the consumer declares, mostly nothing.
        keep: for those captures, as `Capture.keep`.
        required: whether a request fails with it; None: as the consumer says.
    """

    consumer: str
    options: str = "{}"
    policy: str = "block"
    queue_bytes: int = QUEUE_BYTES
    captures: tuple[str, ...] | None = None
    keep: str = "always"
    required: bool | None = None

    @classmethod
    def parse(cls, data: object, path: str, by_request: bool = False) -> SinkDefinition:
        """From ``{consumer: options, "policy": .., "queue_bytes": .., "capture": .., "keep": .., "required": ..}``;
        of a request's own sink the last three are refused."""
        if isinstance(data, SinkDefinition):
            return data
        if not isinstance(data, Mapping):
            raise WeirError(f"a sink is {{consumer: options}}, got {type(data).__name__}", path)
        known = ("policy", "queue_bytes") if by_request else ("policy", "queue_bytes", "capture", "keep", "required")
        consumers = [key for key in data if key not in known]
        if len(consumers) != 1:
            names = ", ".join(brief(c) for c in consumers) or "none"
            raise WeirError(f"a sink names one consumer beside {', '.join(known)}; this names {names}", path)
        name = parse_name(consumers[0], path)
        policy, room = data.get("policy", "block"), data.get("queue_bytes", QUEUE_BYTES)
        if policy not in POLICIES:
            raise WeirError(f"unknown {brief(policy)!r}; choose from {', '.join(POLICIES)}", f"{path}.policy")
        if not isinstance(room, int) or isinstance(room, bool) or room < 1:
            raise WeirError("a number of bytes, at least 1", f"{path}.queue_bytes")
        required = data.get("required")
        if required is not None and not isinstance(required, bool):
            raise WeirError("required is true or false", f"{path}.required")
        captures = data.get("capture")
        captures = [captures] if isinstance(captures, Mapping) or hasattr(captures, "to_json") else captures
        if captures is not None and not isinstance(captures, (list, tuple)):
            raise WeirError("expected a list of captures", f"{path}.capture")
        return cls(
            name,
            _canonical(data[name], f"{path}.{name}"),
            policy,
            room,
            None if captures is None else tuple(_canonical(c, f"{path}.capture[{i}]") for i, c in enumerate(captures)),
            parse_keep(data.get("keep", "always"), f"{path}.keep"),
            required,
        )

    def to_json(self) -> dict[str, Any]:
        """What `parse` reads, defaults left out."""
        out: dict[str, Any] = {self.consumer: json.loads(self.options)}
        if self.policy != "block":
            out["policy"] = self.policy
        if self.queue_bytes != QUEUE_BYTES:
            out["queue_bytes"] = self.queue_bytes
        if self.captures is not None:
            out["capture"] = [json.loads(c) for c in self.captures]
        if self.keep != "always":
            out["keep"] = self.keep
        if self.required is not None:
            out["required"] = self.required
        return out


@dataclass(frozen=True)
class Sink:
    """Where a capture's rows go: ``"memory"``, a sink of the engine's settings by name, or one of the request's own."""

    name: str = MEMORY
    own: SinkDefinition | None = None
    path: str = field(default="sink", repr=False, compare=False)

    @property
    def memory(self) -> bool:
        """Whether the rows come back on the output."""
        return self.name == MEMORY and self.own is None

    @classmethod
    def parse(cls, data: object, path: str) -> Sink:
        """A name or ``{consumer: options}``; raises WeirError for anything else."""
        if isinstance(data, Sink):
            return data
        if isinstance(data, str):
            return cls(parse_name(data, path), path=path)
        own = SinkDefinition.parse(data, path, by_request=True)
        if own.consumer == MEMORY:
            if own != SinkDefinition(MEMORY):
                raise WeirError("'memory' has no options", f"{path}.{MEMORY}")
            return cls(path=path)
        return cls(own.consumer, own, path)

    def to_json(self) -> Any:
        """What `parse` reads."""
        return self.name if self.own is None else self.own.to_json()


def parse_sinks(data: object, path: str = "settings.sinks") -> dict[str, SinkDefinition]:
    """Named sinks of an engine, from a mapping or the same as JSON text."""
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise WeirError(f"not valid JSON ({str(e)[:80]})", path) from None
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    out = {}
    for name, definition in data.items():
        if name == MEMORY:
            raise WeirError("'memory' is taken: rows that come back on the output", path)
        out[parse_name(name, path)] = SinkDefinition.parse(definition, f"{path}.{brief(name)}")
    return out


def parse_keep(keep: object, path: str) -> str:
    """One of KEEPS."""
    if not isinstance(keep, str) or keep not in KEEPS:
        raise WeirError(f"unknown {brief(keep)!r}; choose from {', '.join(KEEPS)}", path)
    return keep


def parse_name(name: object, path: str) -> str:
    """The name of a sink or a consumer."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise WeirError(
            f"unknown sink {brief(name)!r}; a name is letters, digits, '_', '.' and '-', at most 128 of them", path
        )
    return name


def _canonical(data: object, path: str) -> str:
    to_json = getattr(data, "to_json", None)
    data = to_json() if to_json is not None else data
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    text = dumps(data, path, sort_keys=True)
    if len(text) > LONGEST:
        raise WeirError(f"{len(text)} characters, more than the limit of {LONGEST}", path)
    return text
