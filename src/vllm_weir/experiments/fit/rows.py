"""Where the rows of `weir.fit` are: on the workers, or in this process where they cannot stay there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.fitting.collection import FitTask, fit_on_worker, fit_rows
from vllm_weir.fitting.layer import LayerFit
from vllm_weir.frontend.engine import Engine, worker_id
from vllm_weir.results.row_collection import RowCollection
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import DERIVED_HOOKS, Site
from vllm_weir.schema.sinks import WORKERS, Sink

KEEP, APPLY, DROP = "weir_keep_rows", "weir_apply_to_rows", "weir_drop_rows"
FIT = f"{fit_on_worker.__module__}:{fit_on_worker.__name__}"


class WorkerRows:
    """Rows that stay on the workers, which fit them; directions, scores' areas and means come back.

    Attributes:
        place: where they are, in a word.
        capture: what a request for a prompt's rows asks.

    Args:
        call: `Engine.call_workers`.
        capture: of one hook point.
        sites: that it captures.
        prompts: how many there will be.

    Raises:
        WeirError: if the workers lack room for them.
    """

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

    Args:
        capture: of one hook point.
        sites: that it captures.
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
