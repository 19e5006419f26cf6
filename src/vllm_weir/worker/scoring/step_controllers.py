"""Controllers that are asked within a step, and those asked after it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.columns import FIRST_DUE
from vllm_weir.worker.scoring.probe_table import (
    CONTROLLED,
    FLAGS,
    GATE,
    GATE_STATE,
    NEXT_GATE,
    OUTPUTS,
    STATE,
    ControlledGate,
    ProbeTable,
)


@dataclass(frozen=True)
class WorkerInfo:
    """The worker that a controller runs in.

    Attributes:
        device: of all tensors.
        slots: how many requests it can decide on at once; see `ScoredStep.slots`.
        rank, ranks: of its tensor-parallel group. All ranks have the same scores.
        d_model, dtype: of the residual stream.
    """

    device: torch.device
    slots: int
    rank: int
    ranks: int
    d_model: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ScoredStep:
    """The requests that a controller decides on after a step, n of them, in the same order everywhere.

    A request is there whenever its last token was computed: once for the prompt, however it was cut
    into chunks, and once for each generated token.

    Attributes:
        request_ids: the engine's ids, [n].
        slots: int64 [n], a number below `WorkerInfo.slots` for each request, its own until it ends.
            Keep state by it, in tensors: ``self.sums[step.slots]``.
        first: bool [n], whether the request is there for the first time, so that its state begins
            anew.
        scores: float32 [n, k] by the names of the controller's probes, of each request's last
            token; where a probe has scored nothing yet, NaN.
        strengths: float32 [n], what acted on each request's last token.
    """

    request_ids: tuple[str, ...]
    slots: torch.Tensor
    first: torch.Tensor
    scores: Mapping[str, torch.Tensor]
    strengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.request_ids)


class SyncController:
    """The base class of controllers that act in the next step.

    Derive from it and name the class in the entry-point group ``vllm_weir.controllers``, and the
    controller in the setting `controllers`. Interventions with ``when=weir.When("controller:NAME")``
    then act, at generated tokens, with the strength that `step` returned after the token before.

    One object is made in the caller's process, which checks the options and learns the probes, and
    one in each worker, where alone `open` and `step` are called.

    Attributes:
        probes: what it reads: probes, or names of registered ones or of the request's own; may be
            set by ``__init__``. They are added to the requests that it decides on.

    Args:
        options: from the settings, plain JSON data. Raise `WeirError` for a wrong option: the engine
            does not start.
    """

    probes: Sequence[Any] = ()

    def __init__(self, **options: Any) -> None:
        if options:
            raise WeirError(f"unknown option {next(iter(options))!r}; {type(self).__name__} has none")

    def open(self, worker: WorkerInfo) -> None:
        """Prepare for steps, in a worker: make tensors for state."""

    def step(self, step: ScoredStep) -> torch.Tensor:
        """Return the strengths for the next token of each request, [n], from -1 to 1.

        What an intervention adds is multiplied by it; 0 leaves the row as it is. It is called after
        the forward pass was issued, on the stream of the model, once for each step that has any of
        its requests: what it computes on a GPU costs no waiting, as long as it reads no values back
        (``.item()``, ``.cpu()``). All tensors are on `WorkerInfo.device`.

        For a request to get the same answers whatever else runs, a row of the answer must follow from
        the same row of what is given and of the controller's state. All ranks must answer alike.
        """
        raise NotImplementedError


logger = logging.getLogger(__name__)
REFUSED = -0.0
"""In place of an answer that is no number from -1 to 1: leaves rows as they are, and can be told from an answered 0."""


@dataclass(frozen=True)
class _Call:
    """What one controller is asked after a step, of n requests."""

    name: str  # of the controller
    gates: tuple[ControlledGate, ...]  # the requests' gates
    slots: torch.Tensor  # int64 [n]
    first: torch.Tensor  # bool [n]
    states: torch.Tensor  # int64 [n], where the gates' factors are in the table of states
    # by probe, int64 [n, 1 + k]: where in the table the number of scored positions is, and the scores; -1 for outputs
    # that the request's probe does not have
    scores: tuple[torch.Tensor, ...]


class StepControllers:
    """The sync controllers of a worker."""

    def __init__(self, controllers: Mapping[str, SyncController], table: ProbeTable, states: torch.Tensor) -> None:
        self._controllers, self._table, self._states = controllers, table, states
        self._names = {
            name: [probe if isinstance(probe, str) else probe.name for probe in one.probes]
            for name, one in controllers.items()
        }
        self._calls: tuple[_Call, ...] = ()

    def prepare(self, runs: np.ndarray) -> None:
        """Find out what is to be asked after a step with these runs, RUN [n]."""
        self._calls = ()
        if not self._table.controlled:
            return
        asked: dict[str, list[tuple[int, bool]]] = {}
        runs = runs[runs["due"] > 0]
        gates, first = self._table.probes[runs["probe"], GATE], runs["due"] == FIRST_DUE
        while (has := gates >= 0).any():
            gates, first = gates[has], first[has]
            at = self._table.gates[gates]
            controlled = at[:, FLAGS] & CONTROLLED != 0
            for row, new in zip(gates[controlled].tolist(), first[controlled].tolist(), strict=True):
                asked.setdefault(self._table.controlled[row].controller, []).append((row, new))
            gates = at[:, NEXT_GATE]
        self._calls = tuple(self._call(name, *zip(*some, strict=True)) for name, some in sorted(asked.items()))

    def _call(self, name: str, rows: Sequence[int], first: Sequence[bool]) -> _Call:
        table, device = self._table, self._states.device
        gates = tuple(table.controlled[row] for row in rows)
        probes = [np.array([gate.probes[k] for gate in gates]) for k in range(len(self._names[name]))]
        return _Call(
            name,
            gates,
            upload(np.array(rows, np.int64), device),
            upload(np.array(first), device),
            upload(table.gates[list(rows), GATE_STATE].astype(np.int64), device),
            tuple(upload(_places(table.probes[one]), device) for one in probes),
        )

    def forget(self) -> None:
        """Ask nothing after the coming step."""
        self._calls = ()

    def run(self) -> list[tuple[ControlledGate, str]]:
        """Ask the controllers after a step; all that Weir does on a GPU is ordered on the current stream.

        Returns the gates whose requests fail, and why: their controller has raised.
        """
        failed: list[tuple[ControlledGate, str]] = []
        for call in self._calls:
            try:
                with torch.no_grad():
                    answer = self._controllers[call.name].step(self._step(call))
                    values = _checked(answer, len(call.gates), self._states)
            except Exception as e:  # noqa: BLE001 - whatever it raises, its requests fail and are told why
                # As text, since a log record with the traceback would keep its frames, and outputs in their callers'.
                logger.error("the controller %s failed\n%s", call.name, traceback.format_exc())
                values = torch.zeros(len(call.gates), device=self._states.device)
                reason = f"the controller {call.name!r} failed: {type(e).__name__}: {e}"
                failed += [(gate, reason) for gate in call.gates]
            self._states.index_copy_(0, call.states, values)
        return failed

    def _step(self, call: _Call) -> ScoredStep:
        scores = {}
        for name, places in zip(self._names[call.name], call.scores, strict=True):
            found = self._states[places.clamp(min=0)]
            known = (found[:, :1] > 0) & (places[:, 1:] >= 0)
            scores[name] = torch.where(known, found[:, 1:], float("nan"))
        ids = tuple(gate.request_id for gate in call.gates)
        return ScoredStep(ids, call.slots, call.first, scores, self._states[call.states])


def _places(probes: np.ndarray) -> np.ndarray:
    """Return where numbers of probes (rows of the table, [n, fields]) are, see `_Call.scores`."""
    outputs = np.arange(int(probes[:, OUTPUTS].max()))
    start = probes[:, STATE, None].astype(np.int64)
    scores = np.where(outputs < probes[:, OUTPUTS, None], start + 1 + outputs, -1)
    return np.concatenate([start, scores], 1)


def _checked(answer: object, count: int, states: torch.Tensor) -> torch.Tensor:
    """Return an answer as float32 [n]; raise TypeError or ValueError for what is none."""
    if not isinstance(answer, torch.Tensor):
        raise TypeError(f"step returned {type(answer).__name__}, not a tensor")
    if answer.shape != (count,) or answer.device != states.device:
        raise ValueError(
            f"step returned {list(answer.shape)} on {answer.device}, and {[count]} on {states.device} was asked for"
        )
    values = answer.to(torch.float32) + 0.0  # of both zeros, the positive one
    return torch.where(values.abs() <= 1, values, REFUSED)
