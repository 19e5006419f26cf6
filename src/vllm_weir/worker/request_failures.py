"""Requests that a worker cannot serve as they ask: their readers are told, and other requests kept from their KV."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.step_plan import RequestFailure
from vllm_weir.worker.scoring.probe_table import ControlledGate
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys
from vllm_weir.worker.transfer.notifier import Notifier

logger = logging.getLogger(__name__)


class RequestFailures:
    """Fails requests; the engine and all other requests go on."""

    def __init__(self, planner: Planner, notifier: Notifier, uncertainty: int) -> None:
        self._planner, self._notifier, self._uncertainty = planner, notifier, uncertainty
        self._noted: dict[str, dict[str, str]] = {}
        """Endpoint -> request -> reason, of requests that failed while a step was planned."""

    def fail(self, endpoint: str, request_id: str, reason: str, keys: SteeredKeys | None, known: int) -> None:
        """Tell the reader of a request that it failed, and why.

        `keys` are of a request that is steered, and `known` the positions from the first on whose KV is what
        they say.
        """
        if keys is not None and keys.changes:
            self._planner.steering_planner.unsteered_kv.add(keys, known)
        self._notifier.fail(endpoint, request_id, reason)

    def fail_step(self, request_ids: Sequence[str], num_computed: Sequence[int], reason: str) -> None:
        """Fail all requests of a step, of which these many positions are computed each."""
        for request_id, computed in zip(request_ids, num_computed, strict=True):
            steered = self._planner.steered.get(request_id)
            request = self._planner.capturing.get(request_id) or steered
            if request is not None:
                known = max(0, int(computed) - self._uncertainty)
                self.fail(request.endpoint, request_id, reason, None if steered is None else steered.keys, known)

    def fail_called(self, request_id: str, reason: str) -> None:
        """Stop following a request whose function has failed; its rows are not changed as asked."""
        steered = self._planner.steered.get(request_id)
        request = self._planner.capturing.get(request_id) or steered
        if request is not None:
            self.fail(request.endpoint, request_id, reason, None if steered is None else steered.keys, 0)

    def fail_controlled(self, gate: ControlledGate, reason: str) -> None:
        """Stop following a request whose controller has failed; its next tokens are not steered as asked."""
        steered = self._planner.steered.get(gate.request_id)
        self._planner.remove(gate.request_id)
        # What a controller decides on is generated.
        keys, known = (None, 0) if steered is None else (steered.keys, steered.selectors.prompt_len)
        self.fail(gate.endpoint, gate.request_id, reason, keys, known)

    def note(self, failures: Sequence[RequestFailure]) -> None:
        """Keep a plan's failures, to report them with the step's rows."""
        for endpoint, request_id, reason in failures:
            logger.error("Weir cannot go on serving request %s: %s", request_id, reason)
            self._noted.setdefault(endpoint, {})[request_id] = reason

    def take_noted(self) -> dict[str, dict[str, str]]:
        """Return endpoint -> request -> reason of what was noted, and forget it."""
        noted, self._noted = self._noted, {}
        return noted
