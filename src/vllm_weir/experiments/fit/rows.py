"""Where the rows of `weir.fit` are: on the workers, or in this process where they cannot stay there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.fitting.collection import FitTask, RowCollection
from vllm_weir.fitting.layer import LayerFit
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.lookup import view_of
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import DERIVED_HOOKS, Site
from vllm_weir.schema.sinks import WORKERS, Sink

CallWorkers = Callable[..., list[Any]]
"""(name of a worker's method, its arguments...) -> what each worker returns."""
KEEP, FIT, DROP = "weir_keep_rows", "weir_fit_rows", "weir_drop_rows"


class WorkerRows:
    """Rows that stay on the workers, which fit them; directions, scores' areas and means come back.

    Attributes:
        place: where they are, in a word.
        capture: what a request for a prompt's rows asks.

    Args:
        call: calls all workers.
        capture: of one hook point.
        sites: that it captures.
        prompts: how many there will be.

    Raises:
        WeirError: if the workers lack room for them.
    """

    place = "workers"

    def __init__(self, call: CallWorkers, capture: Capture, sites: Sequence[Site], prompts: int) -> None:
        self._call, self._key = call, secrets.token_hex(8)
        self.capture = replace(capture, sink=Sink.parse({WORKERS: {"rows": self._key}}, "sink"))
        try:
            reduced = capture.reduce is not None
            answers = call(KEEP, self._key, [list(site) for site in sites], prompts, reduced)
            _raise_first(answers)
            held = [tuple(site) for answer in answers for site in answer["sites"]]
            if sorted(held) != sorted(map(tuple, sites)):
                raise WeirError(f"the workers have {len(held)} of {len(sites)} blocks; see `weir sites`", "layers")
        except BaseException as e:
            self.close(e)
            raise

    def take(self, out: Any) -> str:
        """Take in the output of a request; return the name of its prompt for `fit`."""
        view = view_of(out.outputs[0])
        assert view is not None, "the request has Weir's keys"
        if view.pending.failure:
            raise WeirError(view.pending.failure, "llm")
        return view.pending.request_id

    def fit(self, site: Site, names: Sequence[str], task: FitTask) -> LayerFit:
        """Have the worker that has a block fit it; see `RowCollection.fit`."""
        answers = self._call(FIT, self._key, list(site), list(names), task.to_wire())
        _raise_first(answers)
        return LayerFit.from_wire(next(answer["fit"] for answer in answers if answer))

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

    Args:
        capture: of one hook point.
        sites: that it captures.
    """

    place = "caller"

    def __init__(self, capture: Capture, sites: Sequence[Site]) -> None:
        self.capture = replace(capture, dtype=None if capture.reduce is None else "float32")
        self._rows = RowCollection(sites, torch.device("cpu"))

    def take(self, out: Any) -> str:
        """Keep an output's rows, or note that it has none; `fit` then says so."""
        rows = torch.cat([out.activations[site] for site in self._rows.sites])
        if len(rows):
            self._rows.put(out.request_id, rows)
        else:
            self._rows.failures[out.request_id] = "positions select none of its tokens"
        return out.request_id

    def fit(self, site: Site, names: Sequence[str], task: FitTask) -> LayerFit:
        return self._rows.fit(site, names, task)

    def close(self, failure: BaseException | None = None) -> None:
        """Forget nothing: the rows go with this object."""


FitRows = WorkerRows | CallerRows
"""A row of each prompt at each block."""


def stays_on_workers(frontend: EngineFrontend, sites: Sequence[Site]) -> bool:
    """Return whether rows of these sites can stay on the workers.

    They cannot where tensor-parallel workers hold a row in parts, where the caller's process
    computes it, or where something reads the rows of every request.
    """
    capabilities = frontend.engine.require_capabilities()
    if any(len(capabilities.shards.get(site, ())) > 1 or site.hook in DERIVED_HOOKS for site in sites):
        return False
    frontend.names.refresh()
    gated = any(one.when is not None for one in frontend.names.always)
    return not (gated or frontend.manager.everyone or frontend.names.probes.everyone)


def _raise_first(answers: Sequence[dict[str, Any]]) -> None:
    for answer in answers:
        if "error" in answer:
            raise WeirError(answer["error"], answer["field"])
