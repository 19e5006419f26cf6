"""`Engine`: a running engine, for what is built on it: what it serves, a stream of requests, its workers."""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.lookup import engine_of, frontend_of, parts_of, view_of
from vllm_weir.schema.intervention_kinds import Kept

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams

__all__ = ["WORKER_FUNCTIONS", "Engine", "EngineCapabilities", "worker_id"]
WORKER_FUNCTIONS = ("weir_apply_to_rows", "weir_drop_rows", "weir_keep_rows", "weir_usage", "weir_weights")
"""What `Engine.call_workers` calls."""
_END = object()
_POOLING = ("embed", "classify", "token_embed", "token_classify")
"""Tasks of engines that pool, those first that prompts in parts are served for."""


Params: TypeAlias = "SamplingParams | PoolingParams"


class Engine:
    """A running engine, for what is built on it; `weir.engine` makes it.

    Args:
        llm: ``vllm.LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in class. An ``AsyncLLM`` has
            `capabilities` only; its ``generate`` and ``collective_rpc`` do the rest.

    Attributes:
        model: vLLM's ``ModelConfig``.

    Raises:
        WeirError: if Weir does not serve it.
    """

    def __init__(self, llm: Any) -> None:
        self._frontend, self._engine = frontend_of(llm), engine_of(llm)
        self.model: Any = self._engine.vllm_config.model_config

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine serves: hook points, shapes of rows, the model's sizes.

        Raises:
            WeirError: if it serves nothing of Weir's, or the workers of an ``AsyncLLM`` have not
                reported: ``await weir.sites_async(llm)`` first.
        """
        return self._frontend.engine.require_capabilities()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None if the engine has none (``skip_tokenizer_init``)."""
        return None if self.model.skip_tokenizer_init else self._engine.get_tokenizer()

    @property
    def pools(self) -> bool:
        """Whether it pools (``runner="pooling"``), and generates nothing."""
        return bool(self.model.runner_type == "pooling")

    def prompt_params(self) -> Params:
        """Return params with which the engine reads a prompt and does least else; WeirError if it can only do more."""
        from vllm import PoolingParams, SamplingParams

        if not self.pools:
            return SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        tasks = self._engine.get_supported_tasks()
        task: Any = next((task for task in _POOLING if task in tasks), None)
        if task is None:
            raise WeirError(f"the engine pools for {', '.join(tasks)}, and for none of {', '.join(_POOLING)}", "llm")
        return PoolingParams(task=task)

    @property
    def interventions(self) -> tuple[Kept, ...]:
        """The interventions that every request undergoes, see `weir.set_global`."""
        self._frontend.names.refresh()
        return tuple(self._frontend.names.always)

    @property
    def reads_every_request(self) -> bool:
        """Whether a gate, a sink, a controller or a registered probe reads rows of every request."""
        gated = any(one.when is not None for one in self.interventions)
        return bool(gated or self._frontend.manager.everyone or self._frontend.names.probes.everyone)

    def stream(
        self,
        requests: Iterable[tuple[Any, Params] | tuple[Any, Params, Any] | None],
        in_flight: int | None = None,
        lora_request: Any = None,
    ) -> Generator[tuple[Any, Any], None, None]:
        """Yield the outputs of requests as they finish; send further requests meanwhile.

        A request is taken from `requests` when there is room for it, so that they may be any number,
        and may depend on outputs that were yielded before. When the generator is closed, or an error
        is raised, the engine aborts the requests that it still has. The engine must have no other
        requests until then.

        Args:
            requests: (prompt, params) or (prompt, params, key). A prompt is a text, token ids, or a
                prompt of vLLM's. Params are ``SamplingParams``, or ``PoolingParams`` with a task of an
                engine that pools, as `weir.params` returns them; they are not changed, and several
                requests may share them. None, instead of a request,
                asks to be asked again after the next output.
            in_flight: most requests that the engine has at once; None: so many that it never waits
                for the next one.
            lora_request: vLLM's ``LoRARequest``, under which all run; see `add_adapter`.

        Yields:
            (key, output): the ``RequestOutput`` or ``PoolingRequestOutput``, whose interventions are verified and
            whose rows for sinks are stored; without a key, the number of the request from 0.

        Raises:
            WeirError: if a request is refused or fails, or the engine has others.
        """
        self._check_blocking()
        if in_flight is not None and (type(in_flight) is not int or in_flight < 1):
            raise WeirError(f"expected a number of requests, at least 1, got {brief(in_flight)}", "in_flight")
        # Enough that the engine's queue does not run empty while outputs are read.
        default = max(64, 2 * self._engine.vllm_config.scheduler_config.max_num_seqs)
        return self._outputs(iter(requests), default if in_flight is None else in_flight, lora_request)

    def _outputs(self, requests: Any, in_flight: int, lora_request: Any) -> Generator[tuple[Any, Any], None, None]:
        if self._engine.has_unfinished_requests():
            raise WeirError(
                "the engine has unfinished requests, whose outputs would be lost; step it until they are done, or end "
                "them with llm.llm_engine.abort_request([...])",
                "llm",
            )
        prefix, sent, ended = f"weir-{secrets.token_hex(6)}", 0, False
        more = {} if lora_request is None else {"lora_request": lora_request}
        keys: dict[str, Any] = {}  # of the requests that the engine has, by id
        try:
            while True:
                while not ended and len(keys) < in_flight:
                    request = next(requests, _END)
                    ended = request is _END
                    if ended or request is None:
                        break
                    prompt, params, *key = _parsed(request, sent)
                    request_id = f"{prefix}-{sent}"
                    keys[request_id] = key[0] if key else sent  # first: vLLM may have it even if adding it fails
                    sent += 1
                    self._engine.add_request(request_id, self._rendered(prompt), _own(params), **more)
                if not keys:
                    if ended:
                        return
                    raise WeirError("they wait for an output, and no request is left to have one", "requests")
                yield from self._finished(keys)
        finally:
            if keys:
                self._engine.abort_request(list(keys))

    def _finished(self, keys: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Step the engine; return finished outputs, verified and settled, with their keys, which are taken out."""
        if not self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM has ended, without an output of each request")
        outputs = [output for output in self._engine.step() if output.finished and output.request_id in keys]
        finished = [(keys.pop(output.request_id), output) for output in outputs]
        for output in outputs:
            for completion in parts_of(output):
                if (view := view_of(completion)) is not None:
                    view.verify()
                    view.settle()
        return finished

    def _rendered(self, prompt: Any) -> Any:
        """Return a prompt in a form of vLLM's, texts and token ids as tokens."""
        if isinstance(prompt, str):
            if (tokenizer := self.tokenizer) is None:
                raise WeirError("the engine has no tokenizer; give token ids", "requests")
            prompt = tokenizer(prompt)["input_ids"]
        if isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        return prompt if isinstance(prompt, dict) else {"type": "token", "prompt_token_ids": list(prompt)}

    def add_adapter(self, lora_request: Any) -> None:
        """Load a LoRA adapter before a request needs it: a request with one that cannot be loaded ends the engine.

        Args:
            lora_request: vLLM's ``LoRARequest``.

        Raises:
            WeirError: naming ``lora``, if the engine does not take it.
        """
        self._check_blocking()
        if self._engine.vllm_config.lora_config is None:
            raise WeirError("the engine takes no LoRA adapters; start it with enable_lora=True", "lora")
        try:
            self._engine.add_lora(lora_request)
        except Exception as e:
            reason = str(e).strip().splitlines() or [type(e).__name__]
            raise WeirError(
                f"the engine cannot load {brief(lora_request.lora_path, 200)}: {reason[-1][:300]}", "lora"
            ) from e

    def call_workers(self, name: str, *arguments: Any) -> list[Any]:
        """Call one of Weir's functions on every worker.

        Args:
            name: ``weir_usage``, what a worker holds for requests; ``weir_weights``, a fingerprint
                of its weights; ``weir_keep_rows``, ``weir_apply_to_rows`` and ``weir_drop_rows``
                for rows that stay there, see `vllm_weir.worker.kept_rows.KeptRows`.
            arguments: plain data.

        Returns:
            What each worker returns, by rank.

        Raises:
            WeirError: if there is no such function, or a worker answers with an error.
        """
        self._check_blocking()
        if name not in WORKER_FUNCTIONS:
            raise WeirError(f"unknown function {brief(name)}; there are {', '.join(WORKER_FUNCTIONS)}", "name")
        answers: list[Any] = self._engine.collective_rpc(name, args=arguments)
        for answer in answers:
            if isinstance(answer, dict) and "error" in answer:
                raise WeirError(answer["error"], answer.get("field", "llm"))
        return answers

    def weights(self) -> str:
        """Return the fingerprint of the weights that the workers have now.

        It is that of all ranks' parts together, so another number of ranks gives another one.

        Raises:
            WeirError: if they cannot be read.
        """
        self._check_blocking()
        self._frontend.engine.require_capabilities()
        if self._engine.is_sleeping():
            raise WeirError("the engine sleeps, so that its weights cannot be read; wake it up first", "llm")
        answers = self.call_workers("weir_weights")
        return hashlib.blake2b("".join(answers).encode(), digest_size=16).hexdigest()

    def has_first_weights(self) -> bool:
        """Return whether the workers have the weights that the engine was started with."""
        first = self._frontend.engine.first_weights
        return first is None or first == self.weights()

    def _check_blocking(self) -> None:
        if inspect.iscoroutinefunction(getattr(self._engine, "collective_rpc", None)):
            raise WeirError(
                f"{type(self._engine).__name__} answers only asynchronously; give a vllm.LLM, or await its own "
                "generate and collective_rpc",
                "llm",
            )


def worker_id(output: Any) -> str:
    """Return the id by which the workers know a request whose params had Weir's keys, from its output."""
    view = view_of(parts_of(output)[0])
    assert view is not None, "the request has Weir's keys"
    return view.pending.request_id


def _parsed(request: Any, number: int) -> tuple[Any, ...]:
    from vllm import PoolingParams, SamplingParams

    kinds = SamplingParams, PoolingParams
    if not isinstance(request, tuple) or len(request) not in (2, 3) or not isinstance(request[1], kinds):
        raise WeirError(
            "expected (prompt, SamplingParams) or (prompt, SamplingParams, key), or PoolingParams in their place",
            f"requests[{number}]",
        )
    return request


def _own(params: Params) -> Params:
    """Return a copy for one request, whose outputs are finished ones alone."""
    own = params.clone()  # a shallow copy, if `skip_clone` says that nobody changes them
    if hasattr(own, "skip_clone"):
        own.skip_clone = True  # vLLM then makes a shallow copy of it
    own.output_kind = type(own.output_kind).FINAL_ONLY
    return own
