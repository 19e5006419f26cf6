"""``POST /v1/patch_sweep`` of the fork RhizoNymph/vllm: activation patching over points, blocks and positions.

Each cell of the grid is a request of one token whose row at one position is another's; they go into the engine
`AT_ONCE` at a time, behind plain requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.compat.http import known_names
from vllm_weir.compat.rhizonymph.requests import KnownNames, from_patch, parse_table
from vllm_weir.compat.rhizonymph.steering_schemas import PatchSweep, align, positions_of
from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import token_id as token_id_of
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.request import RequestSpec
from vllm_weir.server.context import answering, served_name
from vllm_weir.server.errors import error_body
from vllm_weir.server.state import ServerState

MAX_CELLS = 1 << 14
AT_ONCE = 64
NO_RUNS = "no runs are kept on the server; give clean_prompt, whose rows are then read in the same call"

Cell = tuple[str, int, int]
"""Hook point as the client names it, block, position."""


class Plan(NamedTuple):
    """A sweep that can run.

    Attributes:
        body: what is asked.
        hooks, layers, positions: the axes.
        ids: tokens of the prompt.
        grade: ids of the answer, and of the foil for its metric.
        sources: where each position's row comes from in the clean prompt; None for given vectors.
        rows: hook point and block -> the clean prompt's rows, float32 [tokens, d]; or None -> the given vectors.
        clean, corrupt: the metric of the two prompts; None where there is no clean one.
        skipped, alignment: positions without a counterpart in the clean prompt.
    """

    body: PatchSweep
    hooks: list[str]
    layers: list[int]
    positions: list[int]
    ids: list[int]
    grade: list[int]
    sources: dict[int, int] | None
    rows: dict[Site | None, np.ndarray | None]
    clean: float | None
    corrupt: float
    skipped: list[dict[str, Any]]
    alignment: dict[str, Any] | None

    @property
    def cells(self) -> Iterator[Cell]:
        known = {(one.hook, one.layer, one.position) for one in self.body.done}
        every = itertools.product(self.hooks, self.layers, self.positions)
        return (cell for cell in every if cell not in known)

    def value(self, measured: float) -> float:
        if self.body.metric != "recovered":
            return measured
        assert self.clean is not None
        return (measured - self.corrupt) / (self.clean - self.corrupt)


class Sweeper:
    """Plans and runs sweeps on the engine of a server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def plan(self, body: PatchSweep) -> Plan:
        """Check what is asked, and run the two prompts."""
        names = await known_names(self._state)
        if body.model not in (None, served_name(self._state.engine_client)):
            raise WeirError("only the served model itself is swept, without an adapter", "model")
        tokenizer = self._state.tokenizer()
        hooks = list(dict.fromkeys(body.hooks if body.hooks is not None else [body.hook]))
        layers = list(body.layers) if isinstance(body.layers, list) else list(body.layers.range())
        given = body.source_module is not None or body.source_inline is not None
        _check_source(body, given)
        grade = [self._token(body.answer_token_id, body.answer_token, "answer_token")]
        if body.metric == "logit_diff":
            grade.append(self._token(body.foil_token_id, body.foil_token, "foil_token"))
        ids = tokenizer.encode(body.prompt)
        positions = positions_of(body, ids, tokenizer)
        sources, skipped, alignment = None, [], None
        if body.clean_prompt is not None:
            clean_ids = tokenizer.encode(body.clean_prompt)
            sources, alignment = align(clean_ids, ids)
            skipped = [{"position": p, "reason": "the prompts differ here"} for p in positions if p not in sources]
            positions = [p for p in positions if p in sources]
        if not hooks or not layers or not positions:
            raise WeirError("the grid has no cell: it needs a hook, a layer and a position", "positions")
        if len(hooks) * len(layers) * len(positions) > MAX_CELLS:
            raise WeirError(f"more than {MAX_CELLS} cells in one sweep; ask for fewer at a time", "positions")
        rows: dict[Site | None, np.ndarray | None] = {None: parse_table(body.patch_vectors)}
        plan = Plan(body, hooks, layers, positions, ids, grade, sources, rows, None, 0.0, skipped, alignment)
        if sources is not None:
            blank = np.broadcast_to(np.float32(0), (len(clean_ids), names.d_model))
            rows |= {Site(normalise_hook(h, "hooks"), layer): blank for h in hooks for layer in layers}
        await self._state.run(lambda: self._check(plan, names))  # before anything runs
        clean = None if sources is None else await self._read(plan, clean_ids)
        corrupt = _metric(await self._run(ids, grade, None), grade)
        if body.metric == "recovered" and (clean is None or abs(clean - corrupt) < 1e-9):
            raise WeirError("both prompts have the same metric, so nothing can be recovered", "metric")
        return plan._replace(clean=clean, corrupt=corrupt)

    async def _read(self, plan: Plan, clean_ids: Sequence[int]) -> float:
        sites = [site for site in plan.rows if site is not None]
        captures = [
            Capture(hook, [site.layer for site in sites if site.hook == hook], "prompt")
            for hook in dict.fromkeys(site.hook for site in sites)
        ]
        out = await self._run(clean_ids, plan.grade, {"weir": RequestSpec(capture=tuple(captures)).to_json()})
        plan.rows.update(await self._state.run(lambda: _rows(out, sites)))
        return _metric(out, plan.grade)

    async def events(self, plan: Plan) -> AsyncGenerator[dict[str, Any], None]:
        """Run the cells; yield each with its value as it is done, then the summary.

        The requests that run are ended where nobody waits any more.
        """
        names = await known_names(self._state)
        cells, done = plan.cells, asyncio.Queue[Any]()

        async def work() -> None:
            try:
                for cell in cells:  # shared: each worker takes the next one
                    spec = RequestSpec(interventions=self._patch(plan, cell, names))
                    out = await self._run(plan.ids, plan.grade, {"weir": spec.to_json()})
                    done.put_nowait((cell, plan.value(_metric(out, plan.grade))))
                done.put_nowait(None)
            except Exception as e:  # noqa: BLE001 - raised where the events are read
                done.put_nowait(e)

        async def again() -> float:
            return _metric(await self._run(plan.ids, plan.grade, None), plan.grade)

        values = {(one.hook, one.layer, one.position): one.value for one in plan.body.done}
        workers = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        baseline = asyncio.create_task(again())
        try:
            ended = 0
            while ended < AT_ONCE:
                found = await done.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    ended += 1
                    continue
                (hook, layer, position), value = found
                values[hook, layer, position] = value
                yield {"type": "cell", "hook": hook, "layer": layer, "position": position, "value": value}
            noise = abs(plan.value(await baseline) - plan.value(plan.corrupt))
        finally:
            for task in (*workers, baseline):
                task.cancel()
            await asyncio.gather(*workers, baseline, return_exceptions=True)
        yield {"type": "summary", **_summary(plan, values, noise)}

    async def stream(self, plan: Plan) -> AsyncGenerator[str, None]:
        """Yield a sweep as server-sent events: its start, each cell, its summary, and ``[DONE]``."""
        shown = {"layers": plan.layers, "positions": plan.positions, "hook": plan.hooks[0], "hooks": plan.hooks}
        yield _event({"type": "start", **shown, "metric": plan.body.metric})
        try:
            async with aclosing(self.events(plan)) as events:
                async for event in events:
                    yield _event(event)
        except WeirError as e:
            yield _event(error_body(500, str(e), e.field or None))
        yield "data: [DONE]\n\n"

    def _check(self, plan: Plan, names: KnownNames) -> None:
        """Raise WeirError for a place where the engine cannot put rows in."""
        for hook, layer in itertools.product(plan.hooks, plan.layers):
            try:
                self._state.frontend.names.settled(self._patch(plan, (hook, layer, plan.positions[0]), names))
            except WeirError as e:
                raise WeirError(e.message, e.field.removeprefix("patch[0].")) from None

    def _token(self, token_id: int | None, text: str | None, field: str) -> int:
        tokenizer, size = self._state.tokenizer(), self._state.frontend.engine.vocabulary.size
        value = text if token_id is None else token_id
        found = token_id_of(value, tokenizer, field)
        if size and found >= size:
            raise WeirError(f"token {found} does not exist: the vocabulary has {size}", field)
        return found

    def _patch(self, plan: Plan, cell: Cell, names: KnownNames) -> tuple[Intervention, ...]:
        """Return what puts a cell's row in."""
        hook, layer, position = cell
        body, table = plan.body, plan.rows[None]
        entry: dict[str, Any] = {"hook": hook, "layer": layer, "dest_position": position, "alpha": body.alpha}
        for name in ("source_module", "source_inline", "mask"):
            if (given := getattr(body, name)) is not None:
                entry[name] = given
        row = None
        if plan.sources is not None:
            row = plan.rows[Site(normalise_hook(hook, "hook"), layer)][plan.sources[position]]  # type: ignore[index]
        return tuple(from_patch([entry], table, names, row))

    async def _run(self, ids: Sequence[int], grade: Sequence[int], extra: dict[str, Any] | None) -> Any:
        """Return the finished output of a request of one token."""
        from vllm import SamplingParams

        tokens = list(dict.fromkeys(grade))
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, logprob_token_ids=tokens, extra_args=extra
        )
        most = self._state.engine_client.vllm_config.model_config.max_model_len
        if len(ids) >= most:
            raise WeirError(f"{len(ids)} tokens, and the model takes fewer than {most}", "prompt")
        await self._state.frontend.pacing.wait_to_enter()
        prompt, out = {"prompt_token_ids": list(ids)}, None
        with answering():  # what is captured is used here
            outputs = self._state.engine_client.generate(prompt, params, f"weir-sweep-{secrets.token_hex(8)}")
        async with aclosing(outputs):
            async for one in outputs:
                out = one
        if out is None or not out.outputs or not out.outputs[0].logprobs:
            raise WeirError("the engine gave no token")
        return out


def _check_source(body: PatchSweep, given: bool) -> None:
    if given and (body.source_run is not None or body.clean_prompt is not None):
        raise WeirError("give clean_prompt, or a vector in source_module or source_inline", "clean_prompt")
    if given and body.metric == "recovered":
        raise WeirError("recovered needs the metric of a clean_prompt", "metric")
    if not given and body.clean_prompt is None:
        raise WeirError(NO_RUNS, "source_run" if body.source_run is not None else "clean_prompt")
    if body.keep_source:
        raise WeirError(NO_RUNS, "keep_source")


def _rows(out: Any, sites: Sequence[Site]) -> dict[Site | None, np.ndarray | None]:
    """Return what the run of a prompt has at some places, waiting for it."""
    acts = out.outputs[0].activations
    return {site: acts[site].flatten(1).float().numpy() for site in sites}


def _metric(out: Any, grade: Sequence[int]) -> float:
    """Return the answer's log-probability, less the foil's if there is one; what is not finite becomes -1e30."""
    found = out.outputs[0].logprobs[0]
    values = [float(found[token].logprob) for token in grade]
    value = values[0] if len(values) == 1 else values[0] - values[1]
    return value if math.isfinite(value) else -1e30


def _summary(plan: Plan, values: dict[Cell, float], noise: float) -> dict[str, Any]:
    def of(hook: str) -> dict[str, Any]:
        grid = [[values.get((hook, layer, p)) for p in plan.positions] for layer in plan.layers]
        best = max(itertools.product(plan.layers, plan.positions), key=lambda at: values[hook, *at])
        argmax = {"layer": best[0], "position": best[1], "value": values[hook, *best]}
        return {"hook": hook, "grid": grid, "argmax": argmax}

    grids = [of(hook) for hook in plan.hooks]
    return {
        "layers": plan.layers,
        "positions": plan.positions,
        "metric": plan.body.metric,
        **grids[0],
        "clean": plan.clean,
        "corrupt": plan.corrupt,
        "skipped": plan.skipped,
        "alignment": plan.alignment,
        "noise_floor": noise,
        "auto_captured": plan.clean is not None,
        "captured_source_run": None,
        "hook_grids": grids if plan.body.hooks is not None else None,
    }


def _event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"
