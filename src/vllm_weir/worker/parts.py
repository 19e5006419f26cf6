"""The parts of a worker, and the requests that fail alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_weir.worker.functions import WorkerFunctions
from vllm_weir.worker.kept_rows import KeptRows
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.step_plan import RequestFailure
from vllm_weir.worker.saes import WorkerSAEs
from vllm_weir.worker.scoring.probe_table import ControlledGate, ProbeTable
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.tap.calls import TapCalls
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.install import ModulePath
from vllm_weir.worker.tap.mapped import MappedTaps
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.tap.replay import Replays
from vllm_weir.worker.transfer.buffer_server import BufferServer
from vllm_weir.worker.transfer.directions import RequestCodecs
from vllm_weir.worker.transfer.notifier import Notifier
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.step_rows import StepRows

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


@dataclass(frozen=True)
class Parts:
    """What one worker captures and steers with; its parts know each other from when they are made.

    Attributes:
        taps: numbers of this worker's taps.
        host, arena, buffer_server, notifier: the host buffer, what of it is in use, who maps it, and what tells its
            readers of rows.
        table, probes: the tables of programs and vectors, and of probes, on the host; `table_writer`
            and `scorer` bring them to the device.
        planner, row_seqs: plan each step; `plan_writer` brings its plan to the device.
        tensors, switch: what the taps share on the device, and which of them act; `active_taps` says
            which the live requests need.
        replays: the experts that routers are made to choose.
        in_graphs, calls: what is called in taps in steps that may be CUDA graphs, and in others.
        reducer, step_rows: take a step's rows out of the ring.
        module_path: notices that a tapped module was replaced.
    """

    taps: frozenset[int]
    host: HostBuffer
    arena: Arena
    buffer_server: BufferServer
    notifier: Notifier
    kept_rows: KeptRows
    table: ProgramTable
    probes: ProbeTable
    table_writer: TableWriter
    row_seqs: RowSequences
    planner: Planner
    plan_writer: PlanWriter
    failures: RequestFailures
    tensors: TapTensors
    switch: TapSwitch
    active_taps: ActiveTaps
    scorer: Scorer
    saes: WorkerSAEs
    functions: WorkerFunctions
    in_graphs: MappedTaps
    calls: TapCalls
    replays: Replays
    vectors: VectorFetcher
    codecs: RequestCodecs
    reducer: TapReducer
    step_rows: StepRows
    module_path: ModulePath
