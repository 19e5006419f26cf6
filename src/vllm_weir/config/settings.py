"""`Settings` of an engine, from ``additional_config={"weir": {...}}`` and ``WEIR_*`` variables.

pydantic-settings would not make this shorter: only `Settings.load` may read the environment, which
it is given, while ``Settings()`` stands for the defaults; and lists in variables are written with
commas.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.config.mi_patch_env import NAME as ACT
from vllm_weir.config.mi_patch_env import act_sink
from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.keys import WIRE_KEY, meant
from vllm_weir.schema.sinks import parse_sinks
from vllm_weir.schema.table_sizes import TableSizes

STEP_SHARE = 8
"""One step takes at most this part of the host buffer: 1 / STEP_SHARE."""
OTHER_VARIABLES = ("DISABLE", "ADMIN_KEY", "API_KEY", "BASE_URL", "END_WITH_PARENT")
"""``WEIR_*`` variables that are no engine settings."""
TAP_VERSION = 6
"""Increment when the tap's traced form changes, so that no other compiled graph is reused."""


def _parse_hooks(hooks: Any) -> Any:
    """Parse hook points, of which one need not be in a list."""
    if isinstance(hooks, str):
        hooks = [hooks]
    if isinstance(hooks, (list, tuple)):
        return tuple(normalise_hook(hook, "settings.hooks") for hook in hooks)
    return hooks


class Settings(BaseModel):
    """What an engine taps and how much memory Weir may use for it.

    Attributes:
        hooks: hook points to tap; ``resid_post`` serves ``resid_pre`` too. None: all that the model
            has, or, where taps cannot be taken out of CUDA graphs (runner V1 on a GPU), `resid_pre`
            and `resid_post`.
        layers: blocks to tap, ``"all"`` or a list.
        buffer_bytes: size of the ring on the device.
        host_bytes: most pinned, shared host memory for rows, from which results reach the caller
            without a copy; it is taken as needed. 0: a quarter of the machine's memory, at most 32
            GiB.
        overflow: what happens when the host memory is full: ``"wait"`` holds the step back until
            there is room (and fails the request after `timeout`), ``"drop"`` goes on without the
            rows and notes it in the receipt.
        vector_bytes: size of the device table of steering vectors (float32 rows of the model's
            width); requests wait in the queue while it is full.
        max_programs: most different combinations of interventions that tokens of live requests
            have.
        max_instructions: most instructions of all those combinations together.
        ship: which ranks of a tensor-parallel group send rows: ``"first"`` (all hold the same
            stream), or ``"split"``: every one sends those of its share of the taps, over its own
            bus.
        graphs: when CUDA graphs with live taps are captured: ``"lazy"``, a few at start-up and
            others once steps have asked for them often, or ``"eager"``, all at start-up.
        timeout: seconds that ``out.activations`` waits for rows still on their way before it
            raises.
        refused: what happens if the model lacks a hook point named under `hooks`, or its
            verification
            fails: requests for it fail (``"request"``), or the engine does not start (``"start"``).
        describe: where hook points are in a model whose structure does not show it, see
            `vllm_weir.worker.discovery.overrides`.
        sinks: name -> ``{consumer: options}``: where captures may send their rows, and with
            ``"capture"`` what a sink gets of every request; see docs/guides/sinks.md.
        marked_bytes: most bytes of rows that wait for `weir.mark` (``keep="marked"``).
        marked_seconds: longest time that they wait.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    hooks: Annotated[tuple[str, ...] | None, Field(min_length=1), BeforeValidator(_parse_hooks)] = None
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

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any) -> Any:
        """Raise WeirError for a bool, which no setting is and pydantic would take for 0 or 1."""
        if isinstance(value, bool):
            raise WeirError(f"expected another kind of value, got {value}")
        return value

    @classmethod
    def load(cls, additional_config: object, environ: Mapping[str, str] = os.environ) -> Settings:
        """Return the settings of an engine.

        Args:
            additional_config: vLLM's, with the settings under ``"weir"``; they go before variables.
            environ: the environment.

        Raises:
            WeirError: naming the setting or the variable that is wrong.
        """
        known_names = {*map(str.upper, cls.model_fields), *OTHER_VARIABLES}
        warn_of_unknown(environ, "WEIR_", known_names, ("SERVE_", "TEST_"))
        given = {**cls._from_environ(environ), **_own_config(additional_config)}
        if "sinks" in given:
            given["sinks"] = parse_sinks(given["sinks"])
        act = act_sink(environ)
        if act is not None:
            given["sinks"] = given.get("sinks", {}) | parse_sinks({ACT: act}, ACT)
        try:
            return cls(**given)
        except ValidationError as e:
            raise cls._refusal(e.errors()[0]) from None

    @classmethod
    def _from_environ(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings that ``WEIR_*`` variables give."""
        variables = {name: environ.get(f"WEIR_{name.upper()}") for name in cls.model_fields}
        return {name: _from_text(name, text) for name, text in variables.items() if text is not None}

    @classmethod
    def _refusal(cls, error: Any) -> WeirError:
        """Return the WeirError for one of pydantic's errors."""
        setting = ".".join(map(str, error["loc"]))
        message = error["msg"]
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, WeirError):
            message = cause.message
        elif error["type"] == "extra_forbidden":
            near = difflib.get_close_matches(setting, cls.model_fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            message = f"unknown setting; {hint}known are {', '.join(cls.model_fields)}"
        return WeirError(message, f"settings.{setting}")

    def table_sizes(self, d_model: int) -> TableSizes:
        """Return the rows of the device tables for vectors of `d_model` values."""
        return TableSizes(max(1, self.vector_bytes // (4 * d_model)), self.max_programs, self.max_instructions)

    def ring_rows(self, d_model: int, itemsize: int) -> int:
        """Return how many rows the ring holds."""
        return self.buffer_bytes // (d_model * itemsize)

    def host_rows(self, d_model: int, itemsize: int) -> int:
        """Return how many rows the host buffer holds."""
        size = self.host_bytes
        if not size:
            size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, 32 << 30)
        return max(1, size // (d_model * itemsize))

    def step_rows(self, d_model: int, itemsize: int) -> int:
        """Return how many rows of the host buffer one step may take."""
        return max(1, self.host_rows(d_model, itemsize) // STEP_SHARE)

    def graph_identity(self) -> str:
        """Return a digest of all that changes the traced graph, for vLLM's compile-cache key."""
        text = f"weir-tap {TAP_VERSION} {sorted(set(self.hooks or ['*']))} {self.layers} {self.describe}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _own_config(additional_config: object) -> Mapping[str, Any]:
    """Return what vLLM's `additional_config` holds under ``"weir"``."""
    if not isinstance(additional_config, Mapping):
        return {}
    for key in additional_config:
        if isinstance(key, str) and meant(key) == WIRE_KEY:
            raise WeirError(f"unknown key; did you mean {WIRE_KEY!r}?", f"additional_config.{key}")
    own = additional_config.get(WIRE_KEY, {})
    if not isinstance(own, Mapping):
        raise WeirError(f"expected an object, got {type(own).__name__}", f"additional_config.{WIRE_KEY}")
    return own


def _from_text(name: str, text: str) -> Any:
    """Parse the text of a variable as far as pydantic does not."""
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
