"""Sinks: where captured rows go, as a request or an engine's settings say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import dumps

MEMORY = "memory"
WORKERS = "workers"
"""Stands for rows that stay on the workers, in the collection under the key ``rows``."""
Keep = Literal["always", "marked"]
KEEPS: tuple[str, ...] = get_args(Keep)
POLICIES = ("block", "spill", "drop")
RAGGED_HOOKS = ("attn_scores", "pattern")
"""Hook points whose rows have a value for each key, so that requests differ in their shapes."""
QUEUE_BYTES = 1 << 30
MAX_CHARS = 1 << 16
"""Longest JSON text of a consumer's options, or of a capture."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class SinkDefinition:
    """A consumer with its options, and how rows wait for it.

    Attributes:
        consumer: name of the consumer, an entry point of the group ``vllm_weir.consumers``.
        options: its options, canonical JSON.
        policy: what happens to rows when the queue is full: ``"block"`` holds outputs back until
            there is room, ``"spill"`` writes the rows to temporary files meanwhile, ``"drop"``
            drops them.
        queue_bytes: most bytes of rows in the queue.
        captures: wire forms of the captures that it gets of every request; None: those that the
            consumer declares, mostly none.
        keep: for those captures, as `Capture.keep`.
        required: whether a request fails if the sink fails; None: as the consumer says.
        fits_width: whether the `k` of its captures' topk8 is at most the width of rows; it has no wire form.
    """

    consumer: str
    options: str = "{}"
    policy: str = "block"
    queue_bytes: int = QUEUE_BYTES
    captures: tuple[str, ...] | None = None
    keep: Keep = "always"
    required: bool | None = None
    fits_width: bool = False

    @classmethod
    def parse(
        cls, data: object, path: str, by_request: bool = False, plugin: Callable[[object, str], str] | None = None
    ) -> SinkDefinition:
        """Parse ``{consumer: options, "policy", "queue_bytes", "capture", "keep", "required"}``.

        Args:
            data: the wire form, or a SinkDefinition.
            path: named by errors.
            by_request: whether a request sets up the sink; then the last three keys are refused.
            plugin: parses the consumer's name, as `parse_name` does.
        """
        if isinstance(data, SinkDefinition):
            return data
        if not isinstance(data, Mapping):
            raise WeirError(f"a sink is {{consumer: options}}, got {type(data).__name__}", path)
        known = ("policy", "queue_bytes") if by_request else ("policy", "queue_bytes", "capture", "keep", "required")
        consumers = [key for key in data if key not in known]
        if len(consumers) != 1:
            names = ", ".join(brief(c) for c in consumers) or "none"
            raise WeirError(f"a sink names one consumer beside {', '.join(known)}; this names {names}", path)
        name = (plugin or parse_name)(consumers[0], path)
        policy, queue_bytes = data.get("policy", "block"), data.get("queue_bytes", QUEUE_BYTES)
        if policy not in POLICIES:
            raise WeirError(f"unknown policy {brief(policy)!r}; choose from {', '.join(POLICIES)}", f"{path}.policy")
        if not isinstance(queue_bytes, int) or isinstance(queue_bytes, bool) or queue_bytes < 1:
            raise WeirError(
                f"expected a number of bytes, at least 1, got {brief(queue_bytes)!r}", f"{path}.queue_bytes"
            )
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
            queue_bytes,
            None if captures is None else tuple(_canonical(c, f"{path}.capture[{i}]") for i, c in enumerate(captures)),
            parse_keep(data.get("keep", "always"), f"{path}.keep"),
            required,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
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
    """Where a capture's rows go.

    Attributes:
        name: ``"memory"``, a sink of the engine's settings, or the consumer of `own`.
        own: the definition of a sink that the request sets up itself, or None.
    """

    name: str = MEMORY
    own: SinkDefinition | None = None
    path: str = field(default="sink", repr=False, compare=False)

    @property
    def memory(self) -> bool:
        """Whether the rows come back on the output."""
        return self.name == MEMORY and self.own is None

    @property
    def kept(self) -> str:
        """Key of the workers' collection in which the rows stay; "" if they leave the workers."""
        if self.own is None or self.own.consumer != WORKERS:
            return ""
        return json.loads(self.own.options)["rows"]

    @classmethod
    def parse(cls, data: object, path: str) -> Sink:
        """Parse a name or ``{consumer: options}``."""
        if isinstance(data, Sink):
            return data
        if isinstance(data, str):
            return cls(parse_name(data, path), path=path)
        own = SinkDefinition.parse(data, path, by_request=True)
        if own.consumer == MEMORY:
            if own != SinkDefinition(MEMORY):
                raise WeirError("'memory' has no options", f"{path}.{MEMORY}")
            return cls(path=path)
        if own.consumer == WORKERS:
            options = json.loads(own.options)
            if set(options) != {"rows"} or own != SinkDefinition(WORKERS, own.options):
                raise WeirError("'workers' has the one option 'rows'", f"{path}.{WORKERS}")
            parse_name(options["rows"], f"{path}.{WORKERS}.rows", "collection of rows")
        return cls(own.consumer, own, path)

    def to_json(self) -> Any:
        """Return the wire form."""
        return self.name if self.own is None else self.own.to_json()


def parse_sinks(data: object, path: str = "settings.sinks") -> dict[str, SinkDefinition]:
    """Parse the named sinks of an engine, given as a mapping or the same as JSON text."""
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
            raise WeirError(
                "'memory' is taken: it stands for rows that come back on the output; choose another name", path
            )
        out[parse_name(name, path)] = SinkDefinition.parse(definition, f"{path}.{brief(name)}")
    return out


def parse_keep(keep: object, path: str) -> Keep:
    """Parse `Capture.keep`: one of `KEEPS`."""
    if not isinstance(keep, str) or keep not in KEEPS:
        raise WeirError(f"unknown keep {brief(keep)!r}; choose from {', '.join(KEEPS)}", path)
    return cast("Keep", keep)


def parse_name(name: object, path: str, kind: str = "sink") -> str:
    """Parse the name of a sink or a consumer, or of another `kind` of plugin."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise WeirError(
            f"{brief(name)!r} cannot name a {kind}; a name is letters, digits, '_', '.' and '-', at most 128 of them",
            path,
        )
    return name


def check_sink(sink: Sink, hook: str, path: str) -> None:
    """Raise WeirError, naming `path`, if rows of a hook point cannot go to a sink."""
    if hook in RAGGED_HOOKS and not sink.memory:
        raise WeirError(
            f"rows of {hook} have a value for each key, so they have no fixed width and no sink takes them; leave sink "
            "out and save the output's activations",
            path,
        )


def _canonical(data: object, path: str) -> str:
    """Return an object, or the wire form of what has one, as JSON text with sorted keys."""
    to_json = getattr(data, "to_json", None)
    data = to_json() if to_json is not None else data
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    text = dumps(data, path, sort_keys=True)
    if len(text) > MAX_CHARS:
        raise WeirError(f"{len(text)} characters, more than the limit of {MAX_CHARS}", path)
    return text
