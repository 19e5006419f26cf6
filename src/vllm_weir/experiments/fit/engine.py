"""What `weir.fit` asks of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_weir import api
from vllm_weir.errors import WeirError
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.experiments.fit.rows import CallerRows, FitRows, WorkerRows, stays_on_workers
from vllm_weir.frontend.engine import EngineCapabilities
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import HEAD_HOOKS, Site, normalise_hook
from vllm_weir.schema.row_parts import RowPart
from vllm_weir.schema.sinks import RAGGED_HOOKS

_PATH = "capture[0]"
Question = tuple[list[int], Sequence[Any]]
Report = Callable[[int], None]
"""Called with how many prompts are done."""


class FitEngine:
    """An engine and the hook point that is read.

    Args:
        llm: ``vllm.LLM``, or Weir's drop-in class.
        hook: hook point.
        layers: ``"all"``, a block, or several.
        positions: selector; rows of several positions are averaged on the device.
        adapter: under which all prompts run; None for none.
        heads: ``"all"`` or some, each of which is fitted; None for whole rows.

    Attributes:
        hook: its normal name.
        layers: the blocks.
        capture: what is captured of each prompt.
        longest: tokens of a prompt.
        positions: the selector.
        heads: those that are fitted; None for whole rows.
        plain: params with which a prompt is read.
        pools: whether the engine pools.
        model: vLLM's ``ModelConfig``.
        tokenizer: the model's, or None.

    Raises:
        WeirError: naming the field, if the engine cannot give these rows.
    """

    def __init__(self, llm: Any, hook: str, layers: Any, positions: Any, adapter: Adapter | None, heads: Any) -> None:
        engine = self._engine = api.engine(llm)
        self.capabilities, self.model, self.tokenizer = engine.capabilities, engine.model, engine.tokenizer
        asked = parse_capture(hook, layers, positions)
        try:
            self.layers = asked.resolve_layers(self.capabilities.num_layers)
            one = asked.positions.kind == "last_prompt" or len(asked.positions.values) == 1 == _listed(asked)
            self.capture = Capture(asked.hook, self.layers, positions, reduce=None if one else "mean", path=_PATH)
        except WeirError as e:
            raise _own(e) from None
        self.hook, self.positions = asked.hook, asked.positions
        picked = parse_heads(heads, self.hook)
        shape = _shape(self.capabilities, self.hook, self.layers, heads)
        self.heads, self._width = _heads(picked, heads, self.hook, shape), shape[-1]
        self.plain, self.pools = engine.prompt_params(), engine.pools
        self.longest = self.model.max_model_len - (not self.pools)
        self._options = {} if adapter is None else adapter.load(engine)

    def columns(self, head: int | None) -> tuple[int, int] | None:
        """Return where a head's values begin and end in a row; None for whole rows."""
        return None if head is None else (head * self._width, (head + 1) * self._width)

    def open_rows(self, prompts: int) -> FitRows:
        """Return where rows of so many prompts will be; close it. Raise WeirError if the workers lack room."""
        sites = [Site(self.hook, layer) for layer in self.layers]
        if not stays_on_workers(self._engine, sites):
            return CallerRows(self.capture, sites)
        return WorkerRows(self._engine.call_workers, self.capture, sites, prompts)

    def read(self, prompts: Sequence[list[int]], rows: FitRows, report: Report) -> list[str]:
        """Read a row of each prompt at each block; return the prompts' names, for `FitRows.fit`."""
        sampling, names = api.params(self.plain, capture=rows.capture), [""] * len(prompts)
        for done, (number, out) in enumerate(self._stream((tokens, sampling) for tokens in prompts), 1):
            names[number] = rows.take(out)
            report(done)
        return names

    def ask(
        self, questions: Sequence[Question], sampling: Any, capture: Capture | None, read: Callable[[Any], float]
    ) -> list[float]:
        """Return what `read` makes of the output of each question, under the same params and capture."""
        numbers = [0.0] * len(questions)
        asked = ((ids, api.params(sampling, capture=capture, interventions=moves)) for ids, moves in questions)
        for number, out in self._stream(asked):
            numbers[number] = read(out)
        return numbers

    def _stream(self, requests: Iterator[tuple[list[int], Any]]) -> Iterator[tuple[int, Any]]:
        try:
            with contextlib.closing(self._engine.stream(requests, **self._options)) as outputs:
                yield from outputs
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
    return WeirError(e.message, e.field.removeprefix(f"{_PATH}."))


def _shape(capabilities: EngineCapabilities, hook: str, layers: Sequence[int], heads: Any) -> tuple[int, ...]:
    """Return the shape of a row, [d] or [heads, d_head], alike at all blocks; raise WeirError for any other."""
    shapes = {capabilities.shape(Site(hook, layer)) for layer in layers}
    odd = next((shape for shape in shapes if len(shape) != (1 if heads is None else 2)), None)
    if odd is not None:
        more = "; fit heads=, each of which has one" if hook in HEAD_HOOKS else ""
        raise WeirError(f"a row of {hook} is {list(odd)}, and a direction is one vector [d]{more}", "hook")
    if len(shapes) > 1:
        raise WeirError(f"rows of {hook} differ in width between blocks: {sorted(shapes)}", "layers")
    return next(iter(shapes))


def _heads(part: RowPart | None, heads: Any, hook: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if part is None:
        return None if heads is None else tuple(range(shape[0]))
    try:
        part.check(shape, hook, "fit")
    except WeirError as e:
        raise WeirError(e.message, "heads") from None
    return part.heads


def parse_heads(heads: Any, hook: str) -> RowPart | None:
    """Return heads as far as no engine is asked; None for all, or for whole rows. Raise WeirError naming the field."""
    every = isinstance(heads, str) and heads == "all"
    if hook in RAGGED_HOOKS and heads is not None:
        raise WeirError(f"rows of {hook} have a value for each key, so they have no direction", "hook")
    try:
        part = RowPart.parse(normalise_hook(hook), 0 if every else heads, None, "fit")
    except WeirError as e:
        raise WeirError(e.message, e.field.removeprefix("fit.")) from None
    return None if every or heads is None else part
