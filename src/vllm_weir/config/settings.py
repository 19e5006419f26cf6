"""Engine settings: ``additional_config={"weir": {...}}`` first, then ``WEIR_*`` environment variables."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.config.mi_patch_env import NAME as ACT
from vllm_weir.config.mi_patch_env import act_sink
from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.hooks import HOOKS, normalise_hook
from vllm_weir.schema.keys import WIRE_KEY, meant
from vllm_weir.schema.sinks import parse_sinks
from vllm_weir.schema.table_sizes import TableSizes

STEP_SHARE = 8
"""A step records no more rows than this part of the host buffer."""
OTHER_VARIABLES = ("DISABLE", "ADMIN_KEY", "API_KEY", "BASE_URL", "END_WITH_PARENT")
"""``WEIR_*`` that are no settings of an engine."""
TAP_VERSION = 7
"""Raised whenever the tap's traced form changes, so that no compiled graph of another form is reused."""


class Settings(BaseModel):
    """What an engine taps and how much memory Weir may use for it.

    Attributes:
        hooks: hook points to tap; ``resid_post`` serves ``resid_pre`` too. None: all that the model has, or, where
            taps cannot be taken out of CUDA graphs (runner V1 on a GPU), `resid_pre` and `resid_post`.
        layers: blocks to tap, ``"all"`` or a list.
        buffer_bytes: size of the ring on the device.
        host_bytes: most pinned, shared host memory for rows, from which results reach the caller without a copy; it is
            taken as needed. 0: a quarter of the machine's memory, at most 32 GiB.
        overflow: what happens when the host memory is full: ``"wait"`` holds the step back until there is room (and
            fails the request after `timeout`), ``"drop"`` goes on without the rows and says so in the receipt.
        vector_bytes: size of the device table of steering vectors (float32 rows of the model's width); requests wait
            in the queue while it is full.
        max_programs: different combinations of interventions that tokens of live requests can have.
        max_instructions: terms of all those combinations together.
        ship: which ranks of a tensor-parallel group send rows: the ``"first"`` (all hold the same stream), or every one
            those of its share of the taps (``"split"``), over its own bus.
        graphs: when CUDA graphs with live taps are captured: ``"lazy"``, a few at start-up and others once steps have
            asked for them often, or ``"eager"``, all at start-up.
        timeout: seconds that ``out.activations`` waits for rows still on their way before it raises.
        refused: what becomes of hook points that are named under `hooks` and that the model does not have, or that
            failed their proof: requests for them fail (``"request"``), or the engine does not start (``"start"``).
        describe: where hook points are in a model whose structure does not tell, see
        `vllm_weir.worker.discovery.descriptions`.
        sinks: name -> ``{consumer: options}``: where captures may send their rows, and with ``"capture"`` what a sink
            gets of every request; see docs/guides/sinks.md.
        marked_bytes, marked_seconds: how much, and how long, rows wait for `weir.mark` (``keep="marked"``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    hooks: Annotated[
        tuple[Literal[HOOKS], ...] | None,  # type: ignore[valid-type]
        Field(min_length=1),
    ] = None
    layers: Annotated[Any, AfterValidator(lambda v: parse_layers(v, "layers"))] = "all"
    buffer_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 42)] = 256 << 20
    host_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = 0
    overflow: Literal["wait", "drop"] = "wait"
    vector_bytes: Annotated[int, Field(ge=1 << 12, le=1 << 40)] = 32 << 20
    max_programs: Annotated[int, Field(ge=1, le=1 << 20)] = 8192
    max_instructions: Annotated[int, Field(ge=1, le=1 << 24)] = 65_536
    ship: Literal["first", "split"] = "first"
    graphs: Literal["lazy", "eager"] = "lazy"
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    refused: Literal["request", "start"] = "request"
    describe: dict[str, Any] | None = None
    sinks: Annotated[Any, AfterValidator(parse_sinks)] = Field(default_factory=dict)
    marked_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = 1 << 30
    marked_seconds: Annotated[float, Field(gt=0, le=604_800)] = 600.0

    @classmethod
    def load(cls, additional_config: object, environ: Mapping[str, str] = os.environ) -> Settings:  # noqa: C901
        """Settings of an engine; raises WeirError naming the bad one."""
        given: dict[str, Any] = {}
        warn_of_unknown(environ, "WEIR_", {*map(str.upper, cls.model_fields), *OTHER_VARIABLES}, ("SERVE_", "TEST_"))
        for name in cls.model_fields:
            text = environ.get(f"WEIR_{name.upper()}")
            if text is not None:
                given[name] = _from_text(name, text)
        for key in additional_config if isinstance(additional_config, Mapping) else ():
            if isinstance(key, str) and meant(key) == WIRE_KEY:
                raise WeirError(f"did you mean {WIRE_KEY!r}?", f"additional_config.{key}")
        if isinstance(additional_config, Mapping) and "weir" in additional_config:
            own = additional_config["weir"]
            if not isinstance(own, Mapping):
                raise WeirError(f"expected an object, got {type(own).__name__}", "additional_config.weir")
            given.update(own)
        if "sinks" in given:
            given["sinks"] = parse_sinks(given["sinks"])
        act = act_sink(environ)
        if act is not None:
            given["sinks"] = given.get("sinks", {}) | parse_sinks({ACT: act}, ACT)
        if isinstance(given.get("hooks"), str):
            given["hooks"] = [given["hooks"]]
        if isinstance(given.get("hooks"), (list, tuple)):
            given["hooks"] = tuple(normalise_hook(h, "settings.hooks") for h in given["hooks"])
        for name, value in given.items():
            if isinstance(value, bool):  # no setting is one, and pydantic would take it for 0 or 1
                raise WeirError(f"expected another kind of value, got {value}", f"settings.{name}")
        try:
            return cls(**given)
        except ValidationError as e:
            first = e.errors()[0]
            place = ".".join(str(p) for p in first["loc"])
            message = first["msg"]
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, WeirError):
                message = cause.message
            if first["type"] == "extra_forbidden":
                near = difflib.get_close_matches(place, cls.model_fields, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                message = f"unknown setting; {hint}known are {', '.join(cls.model_fields)}"
            raise WeirError(message, f"settings.{place}") from None

    def table_sizes(self, d_model: int) -> TableSizes:
        """Rows of the device tables."""
        return TableSizes(max(1, self.vector_bytes // (4 * d_model)), self.max_programs, self.max_instructions)

    def ring_rows(self, d_model: int, itemsize: int) -> int:
        """Rows that the ring holds."""
        return self.buffer_bytes // (d_model * itemsize)

    def host_rows(self, d_model: int, itemsize: int) -> int:
        """Rows that the host buffer holds."""
        size = self.host_bytes
        if not size:
            size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, 32 << 30)
        return max(1, size // (d_model * itemsize))

    def step_rows(self, d_model: int, itemsize: int) -> int:
        """Rows that one step may take of the host buffer."""
        return max(1, self.host_rows(d_model, itemsize) // STEP_SHARE)

    def graph_identity(self) -> str:
        """Digest of everything that changes the traced graph; part of vLLM's compile-cache key."""
        text = f"weir-tap {TAP_VERSION} {sorted(set(self.hooks or ['*']))} {self.layers} {self.describe}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _from_text(name: str, text: str) -> Any:
    if name == "hooks":
        return [part.strip() for part in text.split(",") if part.strip()]
    if name == "describe":
        try:
            return json.loads(text)
        except ValueError as e:
            raise WeirError(f"not valid JSON ({e})", "WEIR_DESCRIBE") from None
    if name == "layers" and text != "all":
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise WeirError(f"expected 'all' or ints with commas, got {text[:40]!r}", "WEIR_LAYERS") from None
    return text
