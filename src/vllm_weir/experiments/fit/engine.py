"""What `weir.fit` asks of an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import vllm

from vllm_weir.api import params
from vllm_weir.errors import WeirError
from vllm_weir.experiments.fit.rows import CallerRows, FitRows, WorkerRows, stays_on_workers
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.lookup import engine_of, frontend_of
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site

WINDOW = 512
"""Prompts that the engine holds at once; it computes as many of them together as it schedules."""
_PATH = "capture[0]"
Report = Callable[[int], None]
"""Called with how many prompts are done."""


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        tokens: of the prompt.
        interventions: what is changed while it is read.
    """

    tokens: list[int]
    interventions: tuple[Any, ...] = ()


class FitEngine:
    """An ``LLM`` and the hook point that is read.

    Args:
        llm: ``vllm.LLM``, or Weir's drop-in class.
        hook: hook point.
        layers: ``"all"``, a block, or several.
        positions: selector; rows of several positions are averaged on the device.

    Attributes:
        hook: its normal name.
        layers: the blocks.
        capture: what is captured of each prompt.
        longest: tokens of a prompt.
        positions: the selector.
        model: vLLM's ``ModelConfig``.

    Raises:
        WeirError: naming the field, if the engine cannot give these rows.
    """

    def __init__(self, llm: Any, hook: str, layers: Any, positions: Any) -> None:
        frontend = frontend_of(llm)
        engine = engine_of(llm)  # an LLM has one; an LLMEngine is its own
        if engine is llm or inspect.iscoroutinefunction(engine.collective_rpc):
            raise WeirError(f"fit runs on a vllm.LLM, not on {type(llm).__name__}", "llm")
        self._llm, self._engine, self._frontend = llm, engine, frontend
        self.capabilities = frontend.engine.require_capabilities()
        asked = parse_capture(hook, layers, positions)
        try:
            self.layers = asked.resolve_layers(self.capabilities.num_layers)
            one = asked.positions.kind == "last_prompt" or len(asked.positions.values) == 1 == _listed(asked)
            self.capture = Capture(asked.hook, self.layers, positions, reduce=None if one else "mean", path=_PATH)
        except WeirError as e:
            raise _own(e) from None
        self.hook, self.positions = asked.hook, asked.positions
        _check_rows(self.capabilities, self.hook, self.layers)
        self.model = llm.model_config
        self.longest = self.model.max_model_len - 1

    def tokenizer(self) -> Any:
        return None if self.model.skip_tokenizer_init else self._llm.get_tokenizer()

    def open_rows(self, prompts: int) -> FitRows:
        """Return where rows of so many prompts will be; close it.

        Raises:
            WeirError: if the workers lack room for them.
        """
        sites = [Site(self.hook, layer) for layer in self.layers]
        if not stays_on_workers(self._frontend, sites):
            return CallerRows(self.capture, sites)
        call = self._engine.collective_rpc
        return WorkerRows(lambda method, *args: call(method, args=args), self.capture, sites, prompts)

    def read(self, prompts: Sequence[list[int]], rows: FitRows, report: Report) -> list[str]:
        """Read a row of each prompt at each block; return the prompts' names, for `FitRows.fit`."""
        sampling = params(vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False), capture=rows.capture)
        names: list[str] = []
        for start in range(0, len(prompts), WINDOW):
            window = [{"prompt_token_ids": tokens} for tokens in prompts[start : start + WINDOW]]
            names += map(rows.take, self._generate(window, sampling))
            report(len(names))
        return names

    def ask(
        self, questions: Sequence[Question], sampling: Any, capture: Capture | None, read: Callable[[Any], float]
    ) -> list[float]:
        """Return what `read` makes of the output of each question.

        Args:
            questions: the requests, which run as one batch.
            sampling: ``SamplingParams`` of all.
            capture: rows that `read` looks at, or None.
            read: output -> number.
        """
        batch = [{"prompt_token_ids": question.tokens} for question in questions]
        asked = [params(sampling, capture=capture, interventions=list(q.interventions)) for q in questions]
        return [read(out) for out in self._generate(batch, asked)]

    def _generate(self, prompts: Any, sampling: Any) -> list[Any]:
        try:
            return self._llm.generate(prompts, sampling, use_tqdm=False)
        except WeirError as e:
            raise _own(e) from None


def parse_capture(hook: Any, layers: Any, positions: Any) -> Capture:
    """Return what is captured, as far as no engine is asked; raise WeirError naming the argument of `fit`."""
    try:
        return Capture(hook, layers, positions, path=_PATH)
    except WeirError as e:
        raise _own(e) from None


def _listed(capture: Capture) -> int:
    """Return 1 if positions are a list, which then says how many rows there are; else 0."""
    return int(capture.positions.kind == "list")


def _own(e: WeirError) -> WeirError:
    """Return an error about the capture as one about the arguments of `fit`."""
    return WeirError(e.message, e.field.removeprefix(f"{_PATH}."))


def _check_rows(capabilities: EngineCapabilities, hook: str, layers: Sequence[int]) -> None:
    """Raise WeirError unless a row is one vector [d], of one width at all blocks."""
    shapes = {capabilities.shape(Site(hook, layer)) for layer in layers}
    odd = next((shape for shape in shapes if len(shape) != 1), None)
    if odd is not None:
        raise WeirError(f"a row of {hook} is {list(odd)}, and a direction is one vector [d]", "hook")
    if len(shapes) > 1:
        raise WeirError(f"rows of {hook} differ in width between blocks: {sorted(shapes)}", "layers")
