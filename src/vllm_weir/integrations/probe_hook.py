"""Drop-in `LLM` and `AsyncLLM`: vLLM's own, with ``hidden_states`` on every output (the vllm-probe-hook surface)."""

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
        """From the constructor's arguments; ``["all"]`` means ``"all"``."""
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
                raise WeirError(f"true or false, got {type(flag).__name__}", name)
        return cls(
            parse_layers(layers, "layers"),
            include_prefill or last_prefill_token,
            include_decode or last_decode_token,
            last_prefill_token,
            last_decode_token,
        )

    def ask(self, sampling_params: SamplingParams) -> SamplingParams:
        """A copy of `sampling_params` that captures what is wanted, besides what it asks for already; itself if nothing
        is wanted."""
        if not isinstance(sampling_params, SamplingParams):
            raise WeirError(f"expected SamplingParams, got {type(sampling_params).__name__}", "sampling_params")
        if self.layers == () or not (self.prefill or self.decode):
            return sampling_params
        own = (sampling_params.extra_args or {}).get(WIRE_KEY)
        captures = list(RequestSpec.parse(own).capture) if own is not None else []
        if self.prefill:
            captures.append(Capture("resid_post", self.layers, "last_prompt" if self.last_prefill else "prompt"))
        if self.decode:
            captures.append(Capture("resid_post", self.layers, "sampled"))
        return params(sampling_params, capture=captures)

    def attach(self, output: Any) -> Any:
        """Give a RequestOutput and its completions ``hidden_states`` and ``prefill_hidden_states``, with aliases."""
        prompt_len = len(output.prompt_token_ids)
        for completion in output.outputs:
            _set(completion, *self._split(completion, prompt_len))
        first = min(output.outputs, key=lambda o: o.index)
        _set(output, first.hidden_states, first.prefill_hidden_states)
        return output

    def _split(self, completion: Any, prompt_len: int) -> tuple[dict, dict]:
        decode: dict[int, torch.Tensor] = {}
        prefill: dict[int, torch.Tensor] = {}
        acts = completion.activations
        if acts is None:
            return decode, prefill
        view: Any = view_of(completion)  # there, since `acts` is
        low = max(view.start, prompt_len - 1 if self.last_prefill else 0)
        sampled = range(max(view.start, prompt_len - 1), view.end)
        for site in acts.sites:
            if site.hook != "resid_post" or (self.layers != "all" and site.layer not in self.layers):
                continue
            rows, at = acts[site], acts.positions_of(*site)
            if self.decode:
                found = _rows_at(sampled, rows, at)
                decode[site.layer] = found[-1:] if self.last_decode else found
            if self.prefill:
                prefill[site.layer] = _rows_at(range(low, prompt_len), rows, at)
        return decode, prefill


def _rows_at(wanted: range, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows at these positions, one each: what was dropped is NaN, so that those after it keep their tokens."""
    inside = (at >= wanted.start) & (at < wanted.stop)
    found = rows[inside]
    if len(found) == len(wanted):
        return found
    out = rows.new_full((len(wanted), rows.shape[1]), torch.nan)
    out[at[inside] - wanted.start] = found
    return out


def _set(target: Any, decode: dict, prefill: dict) -> None:
    target.hidden_states = target.hidden = decode
    target.prefill_hidden_states = target.prefill_hidden = prefill


class LLM(vllm.LLM):
    """``vllm.LLM`` whose outputs carry the residual stream leaving each wanted block.

    Args:
        model: as in vLLM; so is every argument that is not here (``enforce_eager`` is not needed).
        layers: blocks, ``"all"`` or ``["all"]``; layer i is the stream leaving block i.
        dtype: vLLM's; here, because scripts for vllm-probe-hook give it by place.
        include_decode: ``output.hidden_states`` (alias ``hidden``): ``{layer: [output tokens, d_model]}``, row j being
            the row that output token j was sampled from.
        include_prefill: ``output.prefill_hidden_states`` (alias ``prefill_hidden``): ``{layer: [prompt tokens, d]}``.
        last_prefill_token: only the prompt's last row ([1, d]).
        last_decode_token: only the last output token's row ([1, d]).

    Any number of instances may live in one process. With ``n > 1`` each ``output.outputs[i]`` carries its own. A row
    that is missing (the setting ``overflow="drop"``, an aborted request) is NaN.
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
        self._wanted = HiddenStateRequest.parse(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token
        )
        super().__init__(model=model, dtype=dtype, **engine_args)

    def generate(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
        """``vllm.LLM.generate``; outputs carry hidden states."""
        outputs = super().generate(prompts, self._ask(sampling_params), *args, **kwargs)
        return [self._wanted.attach(o) for o in outputs]

    def chat(self, messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
        """``vllm.LLM.chat``; outputs carry hidden states."""
        outputs = super().chat(messages, self._ask(sampling_params), *args, **kwargs)
        return [self._wanted.attach(o) for o in outputs]

    def enqueue(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``vllm.LLM.enqueue``; `wait_for_completion` gives outputs with hidden states."""
        return super().enqueue(prompts, self._ask(sampling_params), *args, **kwargs)

    def enqueue_chat(self, messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``vllm.LLM.enqueue_chat``, as `enqueue`."""
        return super().enqueue_chat(messages, self._ask(sampling_params), *args, **kwargs)

    def wait_for_completion(self, *args: Any, **kwargs: Any) -> list[Any]:
        """``vllm.LLM.wait_for_completion``; outputs of generation carry hidden states."""
        outputs = super().wait_for_completion(*args, **kwargs)
        return [self._wanted.attach(o) if isinstance(o, vllm.RequestOutput) else o for o in outputs]

    def remove_hooks(self) -> None:
        """Stop capturing; later outputs carry empty dicts."""
        self._wanted = HiddenStateRequest((), False, False, False, False)

    def _ask(self, sampling_params: Any) -> Any:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, Sequence):
            return [self._wanted.ask(p) for p in sampling_params]
        return self._wanted.ask(sampling_params)


class AsyncLLM:
    """vLLM's ``AsyncLLM`` with hidden states on every streamed output; arguments as `LLM`.

    Attributes:
        engine: the ``vllm.v1.engine.async_llm.AsyncLLM`` underneath, for everything that is not here.
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
        self._wanted = HiddenStateRequest.parse(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token
        )
        self.engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, dtype=dtype, **engine_args))

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Stream outputs; each carries the hidden states of the tokens in it (with vLLM's default, all so far)."""
        asked = self._wanted.ask(sampling_params or SamplingParams())
        async for output in self.engine.generate(prompt, asked, request_id or uuid.uuid4().hex, **kwargs):
            # Rows may still be on their way: wait for them beside the event loop, not in it.
            yield await asyncio.to_thread(self._wanted.attach, output)

    async def abort(self, request_id: str) -> None:
        """Abort a request."""
        await self.engine.abort(request_id)

    def remove_hooks(self) -> None:
        """Stop capturing; later outputs carry empty dicts."""
        self._wanted = HiddenStateRequest((), False, False, False, False)

    def shutdown(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()
