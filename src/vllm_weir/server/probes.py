"""The probes of a server: kept under names for requests, and scoring every request."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.frontend.admission.vector_registry import RegistryContents, VectorRegistry
from vllm_weir.frontend.engine_names import refuse_gating
from vllm_weir.schema.fields import loads
from vllm_weir.schema.keys import PROJECTED_KEYS
from vllm_weir.schema.probes import AnyProbe, Probe, parse_probe, read_probe
from vllm_weir.schema.vectors import number
from vllm_weir.server.metrics import default_buckets
from vllm_weir.server.names import check_name, check_room
from vllm_weir.server.state import ServerState

EVERYONE_POSITIONS = "sampled"
"""Where a probe scores every request unless it says so itself: the last prompt token and all later ones.

The prefix cache goes on working, for it never holds the last token of a prompt.
"""
MAX_BUCKETS = 64
SETTINGS = ("everyone", "alert", "buckets")
"""Fields of an upload beside the probe's own."""
DESCRIPTION = ("name", "outputs", "bytes")
"""Fields of what the server says of a probe that an upload may repeat."""
_PATH = "probe"
_AT = re.compile(r"^(?:probe|probes\[0\])\.", re.ASCII)
"""What errors put before the fields of the one probe that is looked at."""


class Upload(NamedTuple):
    """What a client has sent."""

    probe: AnyProbe  # the probe, with the name that it is kept under
    settings: Mapping[str, Any]  # values of `SETTINGS`


def read_json(name: str, data: bytes) -> Upload:
    """Read a JSON upload: a probe's wire form, whose `kind` may be left out, with `SETTINGS`.

    Raise WeirError naming the field.
    """
    body = loads(data, "body")
    if not isinstance(body, Mapping):
        raise WeirError(f"a probe is an object, got {type(body).__name__}", "body")
    if body.get("name", name) != name:
        raise WeirError(f"the route names {name!r}; leave it out of the body", "name")
    fields = {key: value for key, value in body.items() if key not in (*SETTINGS, *DESCRIPTION) and value is not None}
    settings = {key: body[key] for key in SETTINGS if body.get(key) is not None}
    if settings.get("everyone"):
        fields.setdefault("positions", EVERYONE_POSITIONS)
    with _fields_as_sent():
        probe = parse_probe({"kind": Probe.kind, **fields, "name": name}, _PATH)
    return Upload(probe, settings)


def read_file(name: str, data: bytes, settings: Mapping[str, Any]) -> Upload:
    """Read a safetensors upload, a file that a probe's ``save`` wrote, with the `SETTINGS` that came beside it.

    Raise WeirError naming the field.
    """
    with _fields_as_sent():
        probe = read_probe(data, _PATH, name=name)
        if settings.get("everyone") and probe.positions.kind == "all":  # what a file leaves out, too
            probe = replace(probe, positions=EVERYONE_POSITIONS)
    return Upload(probe, settings)


def keep(state: ServerState, upload: Upload) -> RegisteredProbe:
    """Keep a probe under its name for all processes of the server, replacing an earlier one.

    Raise WeirError naming the field, if the engine cannot score it.
    """
    kept: list[RegisteredProbe] = []
    names = state.frontend.names
    names.refresh()

    def edit(contents: RegistryContents) -> RegistryContents:
        vectors = VectorRegistry()
        vectors.load(contents)
        registry = names.probes.with_probes(contents.probes)
        with _fields_as_sent():
            probe = upload.probe.with_arrays(vectors.find)
            kept[:] = [_registered(probe, upload.settings)]
            registry.put(kept[0])
            names.check_probe(probe.name, registry)
            names.settled(contents.always, everyone=True, probes=registry)  # what it gates
        after = replace(contents, probes=registry.registered)
        check_room(after, state.limits)
        return after

    state.names.change(edit)
    return kept[0]


def forget(state: ServerState, name: str) -> bool:
    """Delete a name; return whether there was a probe under it. It scores nobody's requests any more.

    Raises WeirError if an intervention of every request is gated by it.
    """
    found = False

    def edit(contents: RegistryContents) -> RegistryContents:
        nonlocal found
        found = name in contents.probes
        refuse_gating(name, contents.always)
        return replace(contents, probes={other: one for other, one in contents.probes.items() if other != name})

    if name in state.names.read().probes:
        state.names.change(edit)
    return found


def check_probe_name(name: str) -> None:
    check_name(name)
    if name in PROJECTED_KEYS:
        raise WeirError(f"{name!r} is a key of responses; choose another name", "name")


def _registered(probe: AnyProbe, settings: Mapping[str, Any]) -> RegisteredProbe:
    everyone = settings.get("everyone", False)
    if not isinstance(everyone, bool):
        raise WeirError("expected true or false", "everyone")
    if not everyone:
        for name in ("alert", "buckets"):
            if settings.get(name) is not None:
                raise WeirError('is for probes with "everyone": true, whose scores are counted', name)
        return RegisteredProbe(probe)
    _check_everyone(probe)
    buckets = settings.get("buckets")
    bounds = default_buckets(probe) if buckets is None else _bounds(buckets)
    return RegisteredProbe(probe, True, _alerts(probe.outputs, settings.get("alert")), bounds)


def _bounds(buckets: Any) -> tuple[float, ...]:
    """Return the upper bounds of a histogram."""
    if not isinstance(buckets, list):
        raise WeirError(f"expected a list of numbers, got {type(buckets).__name__}", "buckets")
    bounds = tuple(number(bound, f"buckets[{i}]") for i, bound in enumerate(buckets))
    if not 0 < len(bounds) <= MAX_BUCKETS or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise WeirError(f"expected 1 to {MAX_BUCKETS} upper bounds, ascending", "buckets")
    return bounds


def _alerts(outputs: int | None, alert: Any) -> tuple[float | None, ...]:
    """Return a threshold for each output, empty for none."""
    assert outputs is not None, "its weights are arrays"
    if alert is None:
        return ()
    if not isinstance(alert, list):
        if outputs != 1:
            raise WeirError("the probe has several outputs: give a list with a threshold, or null, for each", "alert")
        return (number(alert, "alert"),)
    if len(alert) != outputs:
        raise WeirError(f"{len(alert)} thresholds for {outputs} outputs", "alert")
    return tuple(None if one is None else number(one, f"alert[{i}]") for i, one in enumerate(alert))


def _check_everyone(probe: AnyProbe) -> None:
    """Raise WeirError unless every request can have a probe, whatever its prompt."""
    if probe.positions.needs_token_ids:
        raise WeirError("not every prompt has token ids; choose positions by their place", f"{_PATH}.positions")
    if probe.positions.kind == "modality":
        raise WeirError(
            f"not every prompt has {probe.positions.modality}; choose positions by their place, or let requests name "
            "the probe",
            f"{_PATH}.positions",
        )
    if probe.hook == "embed":
        raise WeirError(
            "prompts given as embeddings do not pass it; resid_pre at layer 0 is what enters the first block",
            f"{_PATH}.hook",
        )


@contextmanager
def _fields_as_sent() -> Iterator[None]:
    """Name fields in errors as they stand at the top of a body."""
    try:
        yield
    except WeirError as e:
        raise WeirError(e.message, _AT.sub("", e.field)) from None
