"""Wrappers of vLLM's beam search, which sends each beam of each step as a request of its own.

Such a request has what the beam has generated at the end of its prompt. Weir tells the engine where
the prompt ends, so that interventions act at the positions that they name, whatever sent the tokens.
Rows come from one more request for each beam that is returned.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm import RequestOutput, SamplingParams

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.reachable import Search, current_search
from vllm_weir.frontend.lookup import FRONTEND
from vllm_weir.guard.outputs import VIEW
from vllm_weir.guard.request_errors import WeirRequestError
from vllm_weir.guard.request_extras import extras_in
from vllm_weir.schema.keys import WIRE_KEY, carries_keys, refuse_slips
from vllm_weir.schema.request import RequestSpec

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus

PROMPT_LEN = "weir_prompt_len"
"""Key of the prompt of a beam: how many of its tokens are the prompt that was given."""


def get_prompt(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``BeamSearchSequence.get_prompt``: the prompt of a beam says where that given to the search ends."""

    def wrapper(self: Any) -> Any:
        prompt = original(self)
        given = self.orig_prompt
        if given["type"] != "enc_dec":
            prompt[PROMPT_LEN] = len(given["prompt_token_ids"])
        return prompt

    return wrapper


def beam_search(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``LLM.beam_search``: steer each beam, and give those that are returned their rows."""

    def wrapper(self: Any, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        extras = extras_in(params) or {}
        frontend = getattr(self.llm_engine.output_processor, FRONTEND, None)
        asks = carries_keys(extras)
        try:
            refuse_slips(extras)
            if not asks and (frontend is None or not frontend.universal):
                return original(self, prompts, params, *args, **kwargs)
            if status.refusal is not None:
                raise WeirError(status.refusal, WIRE_KEY)
            steps = step_extras(extras)
        except WeirError as e:
            raise WeirRequestError(e.message, e.field) from None
        with _searching(self, params.max_tokens, steps, is_step=True):
            outputs = original(self, prompts, params, *args, **kwargs)
        with _searching(self, params.max_tokens, extras, is_step=False):
            _read(self, [beam for output in outputs for beam in output.sequences])
        return outputs

    return wrapper


def step_extras(extras: dict[str, Any]) -> dict[str, Any]:
    """Return what the requests of a search carry of what it was asked: its interventions and their probes.

    Raise WeirError naming the field, for what a search cannot do.
    """
    if extras.get(WIRE_KEY) is None:
        return {key: value for key, value in extras.items() if key != WIRE_KEY}
    spec = RequestSpec.parse(extras[WIRE_KEY])
    if spec.stop_when:
        raise WeirError("beam search ends by its own rule; leave it out", "stop_when")
    for intervention in spec.interventions:
        if intervention.when is not None and intervention.when.controller:
            raise WeirError(
                "a controller decides token by token, and beam search sends every beam anew with each token; gate the "
                "intervention by a probe",
                f"{intervention.path}.when",
            )
    gated = any(intervention.when is not None for intervention in spec.interventions)
    kept = replace(spec, capture=(), features=(), lens=(), dose=False, probes=spec.probes if gated else ())
    return {**extras, WIRE_KEY: kept.to_json()}


@contextmanager
def _searching(llm: Any, max_tokens: int, extras: dict[str, Any], is_step: bool) -> Iterator[None]:
    """Let the requests that `llm` adds, each with `extras`, be those of a search; `is_step`: see `Search`."""
    add = llm._add_request

    def add_request(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if PROMPT_LEN not in prompt:
            raise WeirRequestError("beam search of an encoder-decoder model is not served", WIRE_KEY)
        params.extra_args = {**(params.extra_args or {}), **extras}
        token = current_search.set(Search(prompt[PROMPT_LEN], max_tokens, is_step))
        try:
            return add(prompt, params, *args, **kwargs)
        finally:
            current_search.reset(token)

    llm._add_request = add_request
    try:
        yield
    finally:
        del llm._add_request


def _read(llm: Any, beams: list[Any]) -> None:
    """Give beams their rows, by sending each once more but for its last token."""
    beams = [beam for beam in beams if len(beam.tokens) > len(beam.orig_prompt["prompt_token_ids"])]
    if not beams:
        return
    outputs = llm._render_and_run_requests(
        prompts=(replace(beam, tokens=beam.tokens[:-1]).get_prompt() for beam in beams),
        params=[SamplingParams(max_tokens=1, temperature=0, detokenize=False) for _ in beams],
        output_type=RequestOutput,
        lora_requests=[beam.lora_request for beam in beams],
        use_tqdm=False,
    )
    for beam, output in zip(beams, outputs, strict=True):
        view = getattr(output.outputs[0], VIEW, None)
        if view is not None:
            setattr(beam, VIEW, view)


def online(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``BeamSearchOnlineMixin.beam_search``: what steers every request acts where it should.

    Requests with Weir's keys of their own are refused before.
    """

    async def search(self: Any, prompt: Any, request_id: Any, params: Any, *args: Any, **kwargs: Any) -> AsyncIterator:
        frontend = getattr(getattr(self.engine_client, "output_processor", None), FRONTEND, None)
        outputs: AsyncGenerator[Any, None] = original(self, prompt, request_id, params, *args, **kwargs)
        if frontend is None or not frontend.universal or prompt["type"] in ("embeds", "enc_dec"):
            async for output in outputs:
                yield output
            return
        this = Search(len(prompt["prompt_token_ids"]), params.max_tokens)
        async with aclosing(outputs):
            while True:
                # Set and reset in one task: vLLM may take each output in another.
                token = current_search.set(this)
                try:
                    output = await anext(outputs)
                except StopAsyncIteration:
                    return
                finally:
                    current_search.reset(token)
                yield output

    return search
