"""The parts of a worker, which `vllm_weir.worker.runtime.make_parts` makes and everything else is given."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_weir.worker.functions import WorkerFunctions
from vllm_weir.worker.kept_rows import KeptRows
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.request_failures import RequestFailures
from vllm_weir.worker.saes import WorkerSAEs
from vllm_weir.worker.scoring.probe_table import ProbeTable
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.tap.calls import TapCalls
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.install import ModulePath
from vllm_weir.worker.tap.mapped import MappedTaps
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.tap.replay import Replays
from vllm_weir.worker.transfer.buffer_server import BufferServer
from vllm_weir.worker.transfer.notifier import Notifier
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.request_codecs import RequestCodecs
from vllm_weir.worker.transfer.step_rows import StepRows


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
