"""The Inspect AI provider ``weir/<model>``: Inspect's vLLM provider with steering and capture.

An entry point makes it known to ``get_model("weir/meta-llama/Llama-3.1-8B")`` and to
``inspect eval --model weir/...``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any
from urllib.parse import urlsplit

import torch
from inspect_ai._util.local_server import configure_devices, start_local_server
from inspect_ai.model import ChatMessage, GenerateConfig, ModelCall, ModelOutput, modelapi
from inspect_ai.model._providers._vllm_lora import VLLMServer, _vllm_servers
from inspect_ai.model._providers.vllm import VLLMAPI
from inspect_ai.tool import ToolChoice, ToolInfo

from vllm_weir.client import AsyncClient
from vllm_weir.client.payload import MODULES_KEY, RESPONSE_KEY, refuse_code
from vllm_weir.client.results import Completion, completion_of
from vllm_weir.compat.vllm_lens.request import is_binary, lens_capture, lens_interventions
from vllm_weir.compat.vllm_lens.tensors import decode_activations
from vllm_weir.errors import WeirError, brief
from vllm_weir.results.activations import Activations
from vllm_weir.results.site_slices import STREAM
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import loads
from vllm_weir.schema.keys import (
    KEYS,
    LENS_CAPTURE_KEY,
    LENS_QK_KEY,
    LENS_STEER_KEY,
    LENS_TRANSPORT_KEY,
    WIRE_KEY,
    refuse_lens,
)
from vllm_weir.schema.request import WIRE_FIELDS, WIRE_VERSION, RequestSpec

ATTEMPT_TIMEOUT = 3600
_TAKEN = tuple(
    name for name in WIRE_FIELDS[1:] if name not in ("modules", "features", "lens", "probes", "stop_when", "routing")
)
"""Fields of a request that are taken here, besides `modules`, which the server reads."""
_responses: ContextVar[list[dict[str, Any]] | None] = ContextVar("weir_responses", default=None)


@modelapi(name="weir")
def weir() -> type[VLLMAPI]:
    """Return the provider, for Inspect's registry."""
    return WeirAPI


class WeirAPI(VLLMAPI):
    """Inspect's vLLM provider, talking to ``weir serve``.

    In ``GenerateConfig.extra_body`` it understands

    * ``"weir"``: ``{"capture": [...], "interventions": [...], "hooks": [...], "dose": True}`` with
    Weir's objects or their wire form; hooks by name;
    * ``"extra_args"``: vllm-lens's keys ``output_residual_stream``, ``output_qk`` and
    ``apply_steering_vectors``;
    * ``"lora_request"``: ``{"lora_name", "lora_path"}``: an adapter, loaded if the server does not
    have it.

    ``ModelOutput.metadata`` gets, for the first choice, ``"activations"`` (`vllm_weir.Activations`;
    for vllm-lens's keys a dict with ``"residual_stream"``, [layers, rows, d_model], ``"attn_q"``,
    ``"attn_k"``, ``"qk_layers"`` and ``"qk_meta"``), ``"scores"``
    (of captures that project), ``"values"`` and ``"saved"`` (of hooks), ``"receipt"``,
    ``"prompt_token_ids"`` and ``"token_ids"``; with ``num_choices``, also a list of the same as
    ``"choices"``. Captured rows are not written to Inspect's logs.

    The arguments are those of Inspect's vLLM provider. Without an address (which may also be in
    ``WEIR_BASE_URL`` or ``VLLM_BASE_URL``) it starts ``weir serve`` with `server_args`; `weir_hook`
    and `weir_sae` may be lists.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        port: int | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - Inspect's own signature
        **server_args: Any,
    ) -> None:
        if config.attempt_timeout is None:
            config = config.merge(GenerateConfig(attempt_timeout=ATTEMPT_TIMEOUT))
        if base_url is None and port is None:
            base_url = os.environ.get("WEIR_BASE_URL")
        if base_url is not None and urlsplit(base_url).path in ("", "/"):
            base_url = f"{base_url.rstrip('/')}/v1"  # OpenAI's client needs it
        api_key = api_key or os.environ.get("WEIR_API_KEY")
        enable_lora = bool(server_args.get("enable_lora"))
        # A flag that is on has no value on the command line; one that is off is left out.
        server_args = {k: None if v is True else v for k, v in server_args.items() if v is not False and v is not None}
        super().__init__(model_name, base_url, port, api_key, config, **server_args)
        self._server = _weir_server(self._server, self.base_model, base_url or (f"port {port}" if port else ""))
        self._server.enable_lora |= enable_lora
        self._adapters: set[str] = set()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Generate, doing what ``config.extra_body`` asks of Weir."""
        body, lens, lens_only = server_body(config.extra_body or {})
        adapter = (config.extra_body or {}).get("lora_request")
        await self._ensure_server_started()
        if adapter is not None and adapter["lora_name"] not in self._adapters:
            async with self._client() as client:
                await client.load_adapter(adapter["lora_name"], adapter.get("lora_path"))
            self._adapters.add(adapter["lora_name"])
        responses: list[dict[str, Any]] = []
        token = _responses.set(responses)
        try:
            result = await super().generate(input, tools, tool_choice, _with_body(config, body))
        finally:
            _responses.reset(token)
        output, call = result if isinstance(result, tuple) else (result, None)
        if responses and isinstance(output, ModelOutput):
            completion = completion_of(responses[-1], chat=True, asks_weir=WIRE_KEY in body)
            if any(choice.reference for choice in completion.choices):
                async with self._client() as client:
                    await client.collect(completion)
            output.metadata = (output.metadata or {}) | metadata_of(completion, lens, lens_only)
            if qk := decode_activations(responses[-1]):
                stream = output.metadata.get("activations")
                output.metadata["activations"] = (stream if isinstance(stream, dict) else {}) | qk
        if call is not None:
            call.request, call.response = shortened(call.request), shortened(call.response)
        return result

    def on_response(self, response: dict[str, Any]) -> None:
        """Record the whole response, before Inspect makes a ModelOutput of it."""
        responses = _responses.get()
        if responses is not None:
            responses.append(response)

    def auto_streamable(self, config: GenerateConfig) -> bool:
        """Return whether Inspect may stream; it drops what a stream carries besides text."""
        body = config.extra_body or {}
        asks = WIRE_KEY in body or LENS_QK_KEY in (body.get("vllm_xargs") or {})
        return not asks and super().auto_streamable(config)

    def _client(self) -> AsyncClient:
        return AsyncClient(self._server_root(), self.api_key, model=self.base_model)

    def _start_server(self, model_path: str, port: int | None = None) -> tuple[str, Popen[str], int]:
        """Start ``weir serve`` as Inspect starts ``vllm serve``."""
        arguments = dict(self.server_args)
        if self._server.enable_lora:
            arguments.setdefault("enable_lora", None)
            if self._server.max_lora_rank is not None:
                arguments.setdefault("max_lora_rank", self._server.max_lora_rank)
        logging = "1" if arguments.pop("configure_logging", False) else "0"
        arguments, env = configure_devices(arguments, parallel_size_param="tensor_parallel_size")
        env = dict(env or {}) | {"VLLM_CONFIGURE_LOGGING": logging}
        if self._server.enable_lora:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        timeout, host = arguments.pop("timeout", None), arguments.pop("host", "127.0.0.1")
        own = [
            f"--{name.replace('_', '-')}={value}"
            for name in ("weir_hook", "weir_sae")
            if isinstance(arguments.get(name), (list, tuple))
            for value in arguments.pop(name)
        ]
        return start_local_server(
            [_weir_command(), "serve", model_path, "--host", host, "--api-key", self.api_key or "", *own],
            host=host,
            port=port,
            api_key=self.api_key,
            server_type="Weir",
            timeout=timeout,
            server_args=arguments,
            env=env,
        )


def server_body(extra_body: Mapping[str, Any]) -> tuple[dict[str, Any], Capture | None, bool]:
    """Return the ``extra_body`` for the server, in which Weir's key stands for vllm-lens's keys.

    Returns:
        The body; what vllm-lens's key captures, or None; and whether nothing else is captured.

    Raises:
        WeirError: Naming the field that is wrong.
    """
    body = {name: value for name, value in extra_body.items() if name not in ("extra_args", "lora_request", WIRE_KEY)}
    arguments = _extra_arguments(extra_body, body)
    try:
        refuse_lens(arguments)
    except WeirError as e:
        raise WeirError(e.message, f"extra_args.{e.field}") from None
    weir_object = extra_body.get(WIRE_KEY)
    if arguments.get(WIRE_KEY) is not None:
        if weir_object is not None:
            raise WeirError("given twice, here and in extra_args", f"extra_body.{WIRE_KEY}")
        weir_object = arguments.pop(WIRE_KEY)
    spec, server_fields = _parse_weir_object(weir_object)
    _check_qk(arguments, spec)
    lens = lens_capture(arguments.pop(LENS_CAPTURE_KEY, False))
    lens_steering = arguments.pop(LENS_STEER_KEY, None)
    spec = replace(
        spec,
        capture=spec.capture + (() if lens is None else (lens,)),
        interventions=spec.interventions + (() if lens_steering is None else lens_interventions(lens_steering)),
    )
    refuse_code(spec)
    if arguments:
        body["vllm_xargs"] = dict(body.get("vllm_xargs") or {}) | arguments
    if spec != RequestSpec() or server_fields:
        body[WIRE_KEY] = spec.to_json() | server_fields
    if extra_body.get("lora_request") is not None:
        adapter = extra_body["lora_request"]
        if not isinstance(adapter, Mapping) or not isinstance(adapter.get("lora_name"), str):
            raise WeirError("expected {'lora_name', 'lora_path'}", "lora_request")
        body["model"] = adapter["lora_name"]
    body.setdefault("return_token_ids", True)
    return body, lens, spec.capture == (lens,)


def _extra_arguments(extra_body: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return ``extra_args`` and the keys in ``vllm_xargs`` that belong there, taken from `body`."""
    extra_args, xargs = extra_body.get("extra_args") or {}, body.get("vllm_xargs") or {}
    for name, value in (("extra_args", extra_args), ("vllm_xargs", xargs)):
        if not isinstance(value, Mapping):
            raise WeirError(f"expected an object, got {type(value).__name__}", name)
    for key in KEYS:
        if extra_args.get(key) is not None and xargs.get(key) is not None:
            raise WeirError("given twice, here and in extra_args", f"vllm_xargs.{key}")
    moved = {key: value for key, value in xargs.items() if key in KEYS}
    if moved:
        body["vllm_xargs"] = {key: value for key, value in xargs.items() if key not in KEYS}
    return {**moved, **extra_args}


def _check_qk(arguments: dict[str, Any], spec: RequestSpec) -> None:
    """Take the transport out of the extra arguments: answers come whole, and ``output_qk`` stays vllm-lens's.

    Raises:
        WeirError: If ``output_qk`` is asked for beside captures of Weir's, which come in another form.
    """
    is_binary(arguments.pop(LENS_TRANSPORT_KEY, None))
    if arguments.get(LENS_QK_KEY) is not None and spec.capture:
        raise WeirError("beside captures of the key weir, capture q_rot and k_rot there", f"extra_args.{LENS_QK_KEY}")


def _parse_weir_object(weir_object: Any) -> tuple[RequestSpec, dict[str, Any]]:
    """Return a user's captures and interventions, and the fields that only the server reads."""
    if weir_object is None:
        return RequestSpec(), {}
    if isinstance(weir_object, str):
        weir_object = loads(weir_object, WIRE_KEY)
    if isinstance(weir_object, RequestSpec):
        return weir_object, {}
    if not isinstance(weir_object, Mapping):
        raise WeirError(f"expected an object, got {type(weir_object).__name__}", WIRE_KEY)
    for key in weir_object:
        if key not in (*_TAKEN, MODULES_KEY, RESPONSE_KEY, "v"):
            known = ", ".join((*_TAKEN, MODULES_KEY, RESPONSE_KEY, "v"))
            raise WeirError(f"unknown key; known are {known}", f"{WIRE_KEY}.{brief(key)}")
    if weir_object.get("v", WIRE_VERSION) != WIRE_VERSION:
        raise WeirError(f"this Weir reads version {WIRE_VERSION}", f"{WIRE_KEY}.v")
    server_fields = {key: weir_object[key] for key in (MODULES_KEY, RESPONSE_KEY) if key in weir_object}
    return RequestSpec().asking(**{name: weir_object.get(name) for name in _TAKEN}), server_fields


def metadata_of(completion: Completion, lens: Capture | None, lens_only: bool) -> dict[str, Any]:
    """Return the ``ModelOutput.metadata``; `lens` and `lens_only` are those of `server_body`."""
    choices = []
    for choice in completion.choices:
        metadata: dict[str, Any] = {}
        if choice.receipt is not None:
            metadata["receipt"] = choice.receipt
        if choice.projected is not None:
            metadata["scores"] = choice.projected
        metadata |= {name: told for name in ("values", "saved") if (told := getattr(choice, name)) is not None}
        rows = choice.activations if choice.projected is None else None
        if rows is not None:
            metadata["activations"] = rows if lens is None else _lens_rows(rows, lens, lens_only)
        if choice.token_ids is not None:
            metadata["token_ids"] = choice.token_ids
        choices.append(metadata)
    out = dict(choices[0])
    if completion.prompt_token_ids is not None:
        out["prompt_token_ids"] = completion.prompt_token_ids
    return out | ({"choices": choices} if len(choices) > 1 else {})


def _lens_rows(rows: Activations, lens: Capture, lens_only: bool) -> Activations | dict[str, torch.Tensor]:
    """Return vllm-lens's dict or, if other rows came too, Weir's object with vllm-lens's key."""
    captured = tuple(site.layer for site in rows.sites if site.hook == "resid_post")
    layers = captured if lens.layers == "all" else lens.layers
    positions = {site: rows.positions_of(*site) for site in rows}
    token_ids = {site: rows.token_ids_of(*site) for site in rows}
    with_lens = Activations({site: rows[site] for site in rows}, positions, token_ids, layers)
    return {STREAM: with_lens[STREAM]} if lens_only else with_lens


def shortened(value: Any) -> Any:
    """Return JSON data for a log, without token ids and with lengths for vectors and rows."""
    if isinstance(value, dict):
        short = {k: shortened(v) for k, v in value.items() if k not in ("prompt_token_ids", "token_ids")}
        if isinstance(short.get("b64"), str):
            short["b64"] = f"({len(short['b64'])} characters)"
        return short
    return [shortened(v) for v in value] if isinstance(value, list) else value


def _with_body(config: GenerateConfig, body: dict[str, Any]) -> GenerateConfig:
    return config.model_copy(update={"extra_body": body})


def _weir_server(theirs: VLLMServer, base_model: str, address: str) -> VLLMServer:
    """Return the server shared by all users of a base model and address, apart from vLLM's own."""
    if _vllm_servers.get(base_model) is theirs and theirs.base_url is None:
        del _vllm_servers[base_model]
    ours = _vllm_servers.setdefault(f"weir {address} {base_model}", VLLMServer())
    ours.enable_lora |= theirs.enable_lora
    ours.max_lora_rank = max(filter(None, (ours.max_lora_rank, theirs.max_lora_rank)), default=None)
    return ours


def _weir_command() -> str:
    """Return the path of the command ``weir``, preferably in this Python's environment."""
    sibling = Path(sys.executable).with_name("weir")
    command = str(sibling) if sibling.exists() else shutil.which("weir")
    if command is None:
        raise WeirError("the command `weir` is not installed; give base_url", "base_url")
    return command
