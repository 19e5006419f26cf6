"""vllm-probe-hook's interface: vLLM's `LLM` and `AsyncLLM` with ``hidden_states`` on outputs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import vllm
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

from vllm_weir.api import params
from vllm_weir.errors import WeirError
from vllm_weir.frontend.lookup import view_of
from vllm_weir.schema.capture import Capture, parse_layers
from vllm_weir.schema.request import WIRE_KEY, RequestSpec
from vllm_weir.util.shipped import model_path

Layers = Literal["all"] | Sequence[int] | Sequence[str] | int


@dataclass(frozen=True)
class HiddenStateRequest:
    """Which hidden states outputs carry."""

    layers: Literal["all"] | tuple[int, ...]
    prefill: bool
    decode: bool
    last_prefill: bool
    last_decode: bool

    @classmethod
    def parse(
        cls,
        layers: Layers,
        include_prefill: bool,
        include_decode: bool,
        last_prefill_token: bool,
        last_decode_token: bool,
    ) -> HiddenStateRequest:
        """Return the request for a constructor's arguments; ``["all"]`` means ``"all"``."""
        if isinstance(layers, (list, tuple)) and len(layers) == 1 and isinstance(layers[0], str) and layers[0] == "all":
            layers = "all"
        flags = {
            "include_prefill": include_prefill,
            "include_decode": include_decode,
            "last_prefill_token": last_prefill_token,
            "last_decode_token": last_decode_token,
        }
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise WeirError(f"expected True or False, got {type(flag).__name__}", name)
        return cls(
            parse_layers(layers, "layers"),
            include_prefill or last_prefill_token,
            include_decode or last_decode_token,
            last_prefill_token,
            last_decode_token,
        )

    def add_capture(self, sampling_params: SamplingParams) -> SamplingParams:
        """Return a copy of `sampling_params` that also captures this request's hidden states.

        If there is nothing to capture, `sampling_params` itself is returned.
        """
        if not isinstance(sampling_params, SamplingParams):
            raise WeirError(f"expected SamplingParams, got {type(sampling_params).__name__}", "sampling_params")
        if self.layers == () or not (self.prefill or self.decode):
            return sampling_params
        wire_form = (sampling_params.extra_args or {}).get(WIRE_KEY)
        captures = list(RequestSpec.parse(wire_form).capture) if wire_form is not None else []
        if self.prefill:
            captures.append(Capture("resid_post", self.layers, "last_prompt" if self.last_prefill else "prompt"))
        if self.decode:
            captures.append(Capture("resid_post", self.layers, "sampled"))
        return params(sampling_params, capture=captures)

    def attach(self, output: Any) -> Any:
        """Set ``hidden_states``, ``prefill_hidden_states`` and their aliases on an output."""
        prompt_len = len(output.prompt_token_ids)
        for completion in output.outputs:
            _set_hidden_states(completion, *self._split(completion, prompt_len))
        first = min(output.outputs, key=lambda completion: completion.index)
        _set_hidden_states(output, first.hidden_states, first.prefill_hidden_states)
        return output

    def _split(self, completion: Any, prompt_len: int) -> tuple[dict, dict]:
        """Return the hidden states of the sampled tokens and of the prompt, by layer."""
        decode: dict[int, torch.Tensor] = {}
        prefill: dict[int, torch.Tensor] = {}
        acts = completion.activations
        if acts is None:
            return decode, prefill
        view: Any = view_of(completion)  # not None, as `acts` is not
        prefill_start = max(view.start, prompt_len - 1 if self.last_prefill else 0)
        sampled = range(max(view.start, prompt_len - 1), view.end)
        for site in acts.sites:
            if site.hook != "resid_post" or (self.layers != "all" and site.layer not in self.layers):
                continue
            rows, positions = acts[site], acts.positions_of(*site)
            if self.decode:
                sampled_rows = _rows_at(sampled, rows, positions)
                decode[site.layer] = sampled_rows[-1:] if self.last_decode else sampled_rows
            if self.prefill:
                prefill[site.layer] = _rows_at(range(prefill_start, prompt_len), rows, positions)
        return decode, prefill


def _rows_at(wanted: range, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return one row for each wanted position, [len(wanted), d_model]; NaN for a dropped row."""
    inside = (positions >= wanted.start) & (positions < wanted.stop)
    captured = rows[inside]
    if len(captured) == len(wanted):
        return captured
    out = rows.new_full((len(wanted), rows.shape[1]), torch.nan)
    out[positions[inside] - wanted.start] = captured
    return out


def _set_hidden_states(target: Any, decode: dict, prefill: dict) -> None:
    target.hidden_states = target.hidden = decode
    target.prefill_hidden_states = target.prefill_hidden = prefill


def _described(llm: object, model: str, request: HiddenStateRequest) -> str:
    asked = [name for name in ("prefill", "decode") if getattr(request, name)]
    states = f"hidden states of layers {request.layers}, {' and '.join(asked)}" if asked else "no hidden states"
    return f"weir.{type(llm).__name__}({model!r}, vllm-probe-hook's interface to vLLM: {states})"


class LLM(vllm.LLM):
    """vllm-probe-hook's ``LLM``: ``vllm.LLM`` whose outputs carry the residual stream of the chosen blocks.

    It is here for scripts of vllm-probe-hook, and starts an engine like any other: all of Weir works with
    plain ``vllm.LLM``, too, which everything else in the documentation uses.

    Args:
        model: vLLM's argument, like every argument that is not listed here; or ``demo``.
        layers: Blocks, ``"all"`` or ``["all"]``; layer i is the stream that leaves block i.
        dtype: vLLM's argument, which scripts for vllm-probe-hook pass by position.
        include_prefill: Set ``output.prefill_hidden_states`` (alias ``prefill_hidden``):
            ``{layer: [prompt tokens, d_model]}``.
        include_decode: Set ``output.hidden_states`` (alias ``hidden``):
            ``{layer: [output tokens, d_model]}``; output token j was sampled from row j.
        last_prefill_token: Keep only the prompt's last row, [1, d_model]; implies `include_prefill`.
        last_decode_token: Keep only the last output token's row, [1, d_model]; implies `include_decode`.
        engine_args: vLLM's further arguments; ``enforce_eager`` is not needed.

    Several instances may live in one process. With ``n > 1`` each ``output.outputs[i]`` carries its
    own hidden states. A missing row (setting ``overflow="drop"``, an aborted request) is NaN.
    """

    def __init__(
        self,
        model: str,
        layers: Layers = "all",
        dtype: Any = "auto",
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        **engine_args: Any,
    ) -> None:
        self._hidden_state_request = HiddenStateRequest.parse(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token
        )
        super().__init__(model=model_path(model), dtype=dtype, **engine_args)

    def generate(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``vllm.LLM.generate``; outputs carry hidden states."""
        outputs = super().generate(prompts, self._with_capture(sampling_params), *args, **kwargs)
        return [self._hidden_state_request.attach(output) for output in outputs]

    def chat(self, messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``vllm.LLM.chat``; outputs carry hidden states."""
        outputs = super().chat(messages, self._with_capture(sampling_params), *args, **kwargs)
        return [self._hidden_state_request.attach(output) for output in outputs]

    def enqueue(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call ``vllm.LLM.enqueue``; `wait_for_completion` returns outputs with hidden states."""
        return super().enqueue(prompts, self._with_capture(sampling_params), *args, **kwargs)

    def enqueue_chat(self, messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call ``vllm.LLM.enqueue_chat``; see `enqueue`."""
        return super().enqueue_chat(messages, self._with_capture(sampling_params), *args, **kwargs)

    def wait_for_completion(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``vllm.LLM.wait_for_completion``; outputs of generation carry hidden states."""
        outputs = super().wait_for_completion(*args, **kwargs)
        return [
            self._hidden_state_request.attach(output) if isinstance(output, vllm.RequestOutput) else output
            for output in outputs
        ]

    def remove_hooks(self) -> None:
        """Stop capturing; later outputs carry empty dicts."""
        self._hidden_state_request = HiddenStateRequest((), False, False, False, False)

    def __repr__(self) -> str:
        return _described(self, self.llm_engine.model_config.model, self._hidden_state_request)

    def _with_capture(self, sampling_params: Any) -> Any:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, Sequence):
            return [self._hidden_state_request.add_capture(p) for p in sampling_params]
        return self._hidden_state_request.add_capture(sampling_params)


class AsyncLLM:
    """vllm-probe-hook's ``AsyncLLM``: vLLM's, with hidden states on every streamed output.

    The arguments are those of `LLM`.

    Attributes:
        engine: The ``vllm.v1.engine.async_llm.AsyncLLM`` underneath, for all other methods.
    """

    def __init__(
        self,
        model: str,
        layers: Layers = "all",
        dtype: Any = "auto",
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        **engine_args: Any,
    ) -> None:
        self._hidden_state_request = HiddenStateRequest.parse(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token
        )
        self.engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, dtype=dtype, **engine_args))

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Stream outputs with the hidden states of their tokens (by vLLM's default, all so far)."""
        params_with_capture = self._hidden_state_request.add_capture(sampling_params or SamplingParams())
        async for output in self.engine.generate(prompt, params_with_capture, request_id or uuid.uuid4().hex, **kwargs):
            # Rows may still be on their way, so the event loop must not wait for them.
            yield await asyncio.to_thread(self._hidden_state_request.attach, output)

    async def abort(self, request_id: str) -> None:
        """Abort a request."""
        await self.engine.abort(request_id)

    def remove_hooks(self) -> None:
        """Stop capturing; later outputs carry empty dicts."""
        self._hidden_state_request = HiddenStateRequest((), False, False, False, False)

    def __repr__(self) -> str:
        return _described(self, self.engine.model_config.model, self._hidden_state_request)

    def shutdown(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()
