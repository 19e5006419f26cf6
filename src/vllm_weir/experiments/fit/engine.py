"""What `weir.fit` asks of an engine, and where the rows are: on the workers, or here if they cannot stay there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_weir import api
from vllm_weir.errors import WeirError
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.fitting.layer import FitTask, LayerFit, fit_on_worker, fit_rows
from vllm_weir.frontend.engine import Engine, EngineCapabilities, worker_id
from vllm_weir.results.site_slices import RowCollection
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import DERIVED_HOOKS, HEAD_HOOKS, Site, normalise_hook
from vllm_weir.schema.rows import RowPart
from vllm_weir.schema.sinks import RAGGED_HOOKS, WORKERS, Sink

_PATH = "capture[0]"
Question = tuple[list[int], Sequence[Any]]
Report = Callable[[int], None]
"""Called with how many prompts are done."""


class FitEngine:
    """An engine and the hook point that is read.

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


KEEP, APPLY, DROP = "weir_keep_rows", "weir_apply_to_rows", "weir_drop_rows"
FIT = f"{fit_on_worker.__module__}:{fit_on_worker.__name__}"


class WorkerRows:
    """Rows that stay on the workers, which fit them; directions, scores' areas and means come back."""

    place = "workers"

    def __init__(self, call: Callable[..., list[Any]], capture: Capture, sites: Sequence[Site], prompts: int) -> None:
        self._call, self._key = call, secrets.token_hex(8)
        self.capture = replace(capture, sink=Sink.parse({WORKERS: {"rows": self._key}}, "sink"))
        try:
            reduced = capture.reduce is not None
            answers = call(KEEP, self._key, [list(site) for site in sites], prompts, reduced)
            held = [tuple(site) for answer in answers for site in answer["sites"]]
            if sorted(held) != sorted(map(tuple, sites)):
                raise WeirError(f"the workers have {len(held)} of {len(sites)} blocks; see `weir sites`", "layers")
        except BaseException as e:
            self.close(e)
            raise

    def take(self, out: Any) -> str:
        """Take in the output of a request; return the name of its prompt for `fit`."""
        return worker_id(out)

    def fit(self, site: Site, names: Sequence[str], task: FitTask) -> LayerFit:
        """Have the worker that has a block fit it; see `fit_rows`."""
        answers = self._call(APPLY, self._key, list(site), list(names), FIT, [task.to_wire()])
        return LayerFit.from_wire(next(answer["value"] for answer in answers if answer))

    def close(self, failure: BaseException | None = None) -> None:
        """Have the workers forget the rows; `failure` is being raised meanwhile, and no other error may replace it."""
        try:
            self._call(DROP, self._key)
        except Exception as e:
            if failure is None:
                raise
            failure.add_note(f"The workers could not drop the rows of the prompts: {type(e).__name__}: {e}")


class CallerRows:
    """Rows that come to this process, for requests and hook points that the workers cannot fit alone.

    Its methods and attributes are those of `WorkerRows`.
    """

    place = "caller"

    def __init__(self, capture: Capture, sites: Sequence[Site]) -> None:
        self.capture = replace(capture, dtype=None if capture.reduce is None else "float32")
        self._rows = RowCollection(sites)

    def take(self, out: Any) -> str:
        """Keep an output's rows, or note that it has none; `fit` then says so."""
        rows = torch.cat([out.activations[site].flatten(1) for site in self._rows.sites])
        if len(rows):
            self._rows.put(out.request_id, rows)
        else:
            self._rows.failures[out.request_id] = "positions select none of its tokens"
        return out.request_id

    def fit(self, site: Site, names: Sequence[str], task: FitTask) -> LayerFit:
        return fit_rows(self._rows.at(site, names), torch.device("cpu"), site.layer, task)

    def close(self, failure: BaseException | None = None) -> None:
        """Forget nothing: the rows go with this object."""


FitRows = WorkerRows | CallerRows
"""A row of each prompt at each block."""


def stays_on_workers(engine: Engine, sites: Sequence[Site]) -> bool:
    """Return whether rows of these sites can stay on the workers.

    They cannot where tensor-parallel workers hold a row in parts, where the caller's process
    computes it, or where something reads the rows of every request.
    """
    shards = engine.capabilities.shards
    apart = any(len(shards.get(site, ())) > 1 or site.hook in DERIVED_HOOKS for site in sites)
    return not (apart or engine.reads_every_request)
