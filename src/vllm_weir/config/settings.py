"""Engine settings: ``additional_config={"weir": {...}}`` first, then ``WEIR_*`` environment variables.

Not pydantic-settings: its texts for nested values are JSON only, where these are lists with commas, and it passes over
misspelt variables, which are warned of here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.gates import parse_controllers
from vllm_weir.schema.hooks import HOOKS, normalise_hook
from vllm_weir.schema.keys import WIRE_KEY, meant
from vllm_weir.schema.sinks import parse_sinks

STEP_SHARE = 8
"""A step records at most 1 / `STEP_SHARE` of the rows that the host buffer holds."""
STATES_PER_PROBE = 64
"""Numbers that a probe may keep from step to step, on average."""
OTHER_VARIABLES = ("DISABLE", "ADMIN_KEY", "API_KEY", "BASE_URL", "END_WITH_PARENT")
"""``WEIR_*`` variables that are not settings of an engine."""
TAP_VERSION = 11
"""Version of what a tap adds to the traced graph; part of the key of vLLM's compile cache."""


class Settings(BaseModel):
    """What an engine taps and how much memory Weir may use for it.

    Attributes:
        hooks: hook points to tap; ``resid_post`` serves ``resid_pre`` too. None: all that the model has, or, where
            taps cannot be left out of CUDA graphs (runner V1 on a GPU), `resid_pre` and `resid_post`.
        layers: blocks to tap, ``"all"`` or a list.
        buffer_bytes: size of the ring buffer on the device.
        host_bytes: limit of pinned, shared host memory for rows, from which results reach the caller without a copy; it
            is allocated as needed. 0: a quarter of the machine's memory, at most 32 GiB.
        overflow: what happens when the host memory is full: ``"wait"`` holds the step back until there is room (and
            fails the request after `timeout`), ``"drop"`` goes on without the rows and reports it in the receipt.
        vector_bytes: size of the device table of steering vectors (float32 rows of the model's width); requests wait
            in the queue while it is full.
        sae_bytes: most bytes of sparse autoencoders on a device. On a GPU so many are kept free of the KV cache. None:
            whatever is free when one is loaded.
        max_programs: distinct combinations of interventions that the tokens of live requests can have.
        max_instructions: instructions of all those combinations together.
        probe_cells: numbers that probes, gates, doses and features of a request may have on the device for each token.
        max_probes: probes of live requests, and gates of live requests; requests wait in the queue while there are as
            many.
        ship: which ranks of a tensor-parallel group send rows: the ``"first"`` (all hold the same stream), or each
            rank its share of the taps (``"split"``), over its own bus.
        graphs: when CUDA graphs with live taps are captured: ``"lazy"``, a few sizes at start-up and others once steps
            have asked for them often, or ``"eager"``, all at start-up.
        timeout: seconds that ``out.activations`` waits for rows that are still on their way before it raises.
        refused: what happens if the model lacks a hook point named under `hooks`, or its verification failed: requests
            for it fail (``"request"``), or the engine does not start (``"start"``).
        describe: where the hook points are in a model whose structure does not show it, see
            `vllm_weir.worker.discovery.block_stack`.
        sinks: name -> ``{consumer: options}``: where captures may send their rows, and with ``"capture"`` what a sink
            gets of every request; see docs/guides/sinks.md.
        functions: how a function of `weir.Hook` reaches the workers: ``"named"``, by its module or as its source, or
            also, if neither will do, by ``"cloudpickle"``. Never from a client of a server.
        controllers: name -> ``{controller: options}``: what acts on the scores of probes, see
            docs/guides/controllers.md.
        marked_bytes, marked_seconds: how many bytes of rows wait for `weir.mark` (``keep="marked"``), and how long.
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
    sae_bytes: Annotated[int | None, Field(ge=0, le=1 << 44)] = None
    max_programs: Annotated[int, Field(ge=1, le=1 << 20)] = 8192
    max_instructions: Annotated[int, Field(ge=1, le=1 << 24)] = 65_536
    probe_cells: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    max_probes: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    ship: Literal["first", "split"] = "first"
    graphs: Literal["lazy", "eager"] = "lazy"
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    refused: Literal["request", "start"] = "request"
    describe: dict[str, Any] | None = None
    functions: Literal["named", "cloudpickle"] = "named"
    sinks: Annotated[Any, AfterValidator(parse_sinks)] = Field(default_factory=dict)
    controllers: Annotated[Any, AfterValidator(parse_controllers)] = Field(default_factory=dict)
    marked_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = 1 << 30
    marked_seconds: Annotated[float, Field(gt=0, le=604_800)] = 600.0

    @classmethod
    def load(cls, additional_config: object, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings of an engine.

        Args:
            additional_config: vLLM's; its key ``"weir"`` overrides the environment.
            environ: the environment variables; those named ``WEIR_*`` are read.

        Raises:
            WeirError: naming the setting that is wrong.
        """
        given = cls._from_environ(environ) | _from_config(additional_config)
        if "sinks" in given:
            given["sinks"] = parse_sinks(given["sinks"])
        if "controllers" in given:
            given["controllers"] = parse_controllers(given["controllers"])
        if "hooks" in given:
            given["hooks"] = _normalise_hooks(given["hooks"])
        for name, value in given.items():
            if isinstance(value, bool):  # no setting is a bool, and pydantic would read it as 0 or 1
                raise WeirError(f"expected another kind of value, got {value}", f"settings.{name}")
        try:
            return cls(**given)
        except ValidationError as e:
            raise cls._refusal(e) from None

    @classmethod
    def _from_environ(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        warn_of_unknown(environ, "WEIR_", {*map(str.upper, cls.model_fields), *OTHER_VARIABLES}, ("SERVE_", "TEST_"))
        texts = {name: environ.get(f"WEIR_{name.upper()}") for name in cls.model_fields}
        return {name: _from_text(name, text) for name, text in texts.items() if text is not None}

    @classmethod
    def _refusal(cls, error: ValidationError) -> WeirError:
        first = error.errors()[0]
        name, message = ".".join(map(str, first["loc"])), first["msg"]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, WeirError):
            message = cause.message
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, cls.model_fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            message = f"unknown setting; {hint}known are {', '.join(cls.model_fields)}"
        return WeirError(message, f"settings.{name}")

    def table_sizes(self, d_model: int) -> TableSizes:
        """Return the number of rows of each device table."""
        return TableSizes(
            max(1, self.vector_bytes // (4 * d_model)),
            self.max_programs,
            self.max_instructions,
            self.max_probes,
            self.max_probes,
            STATES_PER_PROBE * self.max_probes,
            self.probe_cells,
        )

    def ring_rows(self, d_model: int, itemsize: int) -> int:
        return self.buffer_bytes // (d_model * itemsize)

    def host_rows(self, d_model: int, itemsize: int) -> int:
        size = self.host_bytes
        if not size:
            size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, 32 << 30)
        return max(1, size // (d_model * itemsize))

    def step_rows(self, d_model: int, itemsize: int) -> int:
        return max(1, self.host_rows(d_model, itemsize) // STEP_SHARE)

    def graph_identity(self) -> str:
        """Return a digest of everything that changes the traced graph, for the key of vLLM's compile cache."""
        text = f"weir-tap {TAP_VERSION} {sorted(set(self.hooks or ['*']))} {self.layers} {self.describe}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _from_config(additional_config: object) -> dict[str, Any]:
    if not isinstance(additional_config, Mapping):
        return {}
    for key in additional_config:
        if isinstance(key, str) and meant(key) == WIRE_KEY:
            raise WeirError(f"did you mean {WIRE_KEY!r}?", f"additional_config.{key}")
    own = additional_config.get("weir", {})
    if not isinstance(own, Mapping):
        raise WeirError(f"expected an object, got {type(own).__name__}", "additional_config.weir")
    return dict(own)


def _normalise_hooks(hooks: Any) -> Any:
    if isinstance(hooks, str):
        hooks = [hooks]
    if isinstance(hooks, (list, tuple)):
        return tuple(normalise_hook(hook, "settings.hooks") for hook in hooks)
    return hooks


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
