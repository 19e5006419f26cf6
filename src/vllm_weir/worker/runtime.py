"""The worker's runtime, which makes its parts and holds them together.

Everything it is told is plain data from the patches; it uses torch, but not vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from vllm_weir import messages
from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.taps import STAGES, is_boundary, num_columns, num_taps, tap_of
from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.site_map import SiteMap, chosen
from vllm_weir.worker.functions import WorkerFunctions
from vllm_weir.worker.kept_rows import KeptRows
from vllm_weir.worker.lenses import Lenses, Unembedding
from vllm_weir.worker.live_requests import LiveRequests
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.parameters import Parameters
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_layout import RowLayout
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.report import worker_report
from vllm_weir.worker.request_failures import RequestFailures
from vllm_weir.worker.saes import WorkerSAEs
from vllm_weir.worker.scoring.probe_table import ProbeTable
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.scoring.sync_controller import SyncController, WorkerInfo
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.step_sender import StepSender
from vllm_weir.worker.step_writer import StepWriter
from vllm_weir.worker.tap.calls import TapCalls
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.install import ModulePath, place
from vllm_weir.worker.tap.mapped import MappedTaps
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.tap.routing import RoutedRows
from vllm_weir.worker.transfer.buffer_server import BufferServer
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CpuCopyOut, CudaCopyOut
from vllm_weir.worker.transfer.directions import Directions
from vllm_weir.worker.transfer.notifier import Notifier
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.read_outs import ReadOuts
from vllm_weir.worker.transfer.request_codecs import RequestCodecs
from vllm_weir.worker.transfer.ring import Ring
from vllm_weir.worker.transfer.step_rows import StepRows

if TYPE_CHECKING:
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

MAX_SITE_SETS = 4096


class WorkerRuntime:
    """Captures and steers in one worker.

    Build it after the model is loaded and before it is compiled.

    Args:
        controllers: sync controllers by name, not opened yet.

    Attributes:
        taps: numbers of this worker's taps.
        requests: is told which requests join and leave.
        writer: is told the batch of each step.
        sender: is told that a forward pass was issued, and that its tokens are sampled.
        saes: the sparse autoencoders on the device.
        kept_rows: rows that stay here.
        sends: whether rows leave this worker.
        all_live: whether at least as many live requests capture or are steered as the coming step
            has; alike on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_info: ModelInfo,
        settings: Settings,
        sites: SiteMap,
        unembedding: Unembedding | None = None,
        controllers: Mapping[str, SyncController] = MappingProxyType({}),
        parameters: Parameters | None = None,
    ) -> None:
        self.model_info, self.sites, self._settings = model_info, sites, settings
        self._unembedding = unembedding or Unembedding()
        anchors = chosen(sites, settings)
        routed = None if settings.hooks is not None and "router_logits" not in settings.hooks else sites.routers.blocks
        self.taps = tuple(anchors) if routed is None else _with_tap(tuple(anchors), tap_of(routed.site))
        d_model, device = model_info.d_model, model_info.device
        self.layout = RowLayout.of(
            sites.shapes, sites.shards, d_model, sites.num_layers, model_info.rank, model_info.ranks
        )
        sent_taps = self._taps_to_send()
        self.sends = bool(sent_taps)
        self._make_buffers(self.sends)
        sizes = settings.table_sizes(d_model)
        self._sites_of = {tap_of(site): site for site in sites.anchors if site.hook != "resid_pre" or not site.layer}
        self.in_graphs = MappedTaps(self._sites_of, model_info.max_tokens, device)
        self._make_planner(frozenset(tap * STAGES + stage for tap in sent_taps for stage in range(STAGES)))

        self._table_writer = TableWriter(self.table, device)
        self.tensors = self._tap_tensors(sizes.cells)
        worker = WorkerInfo(device, sizes.gates, model_info.rank, model_info.ranks, d_model, model_info.dtype)
        for name, controller in controllers.items():
            _open(name, controller, worker)
        self._scorer = Scorer(self.probes, self.tensors, sizes, controllers)
        self._plan_writer = PlanWriter(self.tensors.plan)
        self.switch = TapSwitch(self.tensors)
        self.switch.score, self.switch.mapped = self._scorer.launch, self.in_graphs.held
        self._place_taps(model, anchors)
        if routed is not None:
            rows = RoutedRows(routed, self.switch, model_info.max_tokens, model_info.dtype, model_info.device)
            sites.routers.install(rows)

        self.saes = WorkerSAEs(device, settings.sae_bytes)
        self.functions = WorkerFunctions(
            device,
            self.in_graphs,
            model_info.rank == 0,
            model_info.traits.speculative,
            parameters,
            settings.functions == "cloudpickle",
        )
        self._active_taps = ActiveTaps(self.in_graphs.number_of)
        self.all_live = False
        failures = RequestFailures(self.planner, self.notifier, model_info.traits.uncertainty)
        codecs = Codecs(d_model, device, model_info.dtype)
        self.requests = self._make_requests(codecs, ModulePath(model, anchors.values()), failures)
        self._make_steps(codecs, failures, self.sends)

    def _taps_to_send(self) -> Sequence[int]:
        """Return the taps whose rows this worker sends.

        Rows that every tensor-parallel rank has in whole are sent by one of them.
        """
        whole = [tap for tap in self.taps if tap not in self.layout.spread]
        if self._settings.ship == "split":
            whole = whole[self.model_info.rank :: self.model_info.ranks]
        elif self.model_info.rank:
            whole = []
        own = self.layout.spread - self.layout.silent
        return sorted((*whole, *own.intersection(self.taps)))

    def _make_buffers(self, sends: bool) -> None:
        """Make the ring, the host buffer, and what tells readers of the rows there."""
        model_info, settings = self.model_info, self._settings
        d_model, dtype, device = model_info.d_model, model_info.dtype, model_info.device
        row_size = (d_model, dtype.itemsize)
        self._max_step_rows = min(settings.ring_rows(*row_size), settings.step_rows(*row_size)) if sends else 0
        self.ring = Ring(settings.ring_rows(*row_size) if sends else 1, d_model, dtype, device)
        host_rows = settings.host_rows(*row_size) if sends else 1
        self.host = HostBuffer(host_rows, d_model * dtype.itemsize, device.type == "cuda" and sends)
        self.arena = Arena(self.host.rows)
        self.name = secrets.token_hex(8)
        self.buffer_server = BufferServer(self.host, self.arena, self.name)
        rows, uncertainty = self.host.view(d_model, dtype), model_info.traits.uncertainty
        self.notifier = Notifier(rows, self.arena, self.buffer_server, self.name, model_info.engine, uncertainty)

    def _make_planner(self, columns: frozenset[int]) -> None:
        """Make the planner with its tables, for a worker that sends these columns."""
        model_info, sites, settings = self.model_info, self.sites, self._settings
        d_model, traits, layout = model_info.d_model, model_info.traits, self.layout
        sizes = settings.table_sizes(d_model)
        num_model_taps, width = num_taps(sites.num_layers), num_columns(sites.num_layers)
        self.table = ProgramTable(
            sizes, num_model_taps, self.taps, d_model, layout.widths, layout.shards, self.in_graphs.place_of
        )
        self.probes = ProbeTable(sizes, self.table, 1 + traits.draft_tokens)
        self.row_seqs = RowSequences(self.arena, settings.timeout if settings.overflow == "wait" else None)
        self.row_seqs.grant, self.row_seqs.reader_columns = self._grant, layout.reader_columns
        self.kept_rows = KeptRows(
            columns, sites.shapes, d_model, model_info.dtype, model_info.device, self.notifier.settle
        )
        self.notifier.keep = self.kept_rows.receive
        self.planner = Planner(
            columns, width, MAX_SITE_SETS, self.table, self.row_seqs, layout.ring_rows, self.probes, traits
        )
        self.planner.steering_planner.reports = self.planner.score_planner.reports = model_info.rank == 0
        self.planner.capture_planner.row_bytes = self.host.row_bytes

    def _tap_tensors(self, cells: int) -> TapTensors:
        max_tokens, device = self.model_info.max_tokens, self.model_info.device
        width = num_columns(self.sites.num_layers)
        return TapTensors(
            plan=torch.full((max_tokens, 4), -1, dtype=torch.int32, device=device),
            ranks=torch.full((MAX_SITE_SETS, width), -1, dtype=torch.int32, device=device),
            ring=self.ring.buffer,
            cells=torch.zeros(max_tokens, cells, dtype=torch.float32, device=device),
            **self._table_writer.tensors,
        )

    def _place_taps(self, model: torch.nn.Module, anchors: Mapping[int, Anchor]) -> None:
        shapes = self.sites.shapes
        head_sizes = {tap_of(site): shape[-1] for site, shape in shapes.items() if site.hook == "z"}
        for tap, anchor in anchors.items():
            place(model, anchor, tap, self.switch, head_sizes.get(tap))

    def _make_requests(self, codecs: Codecs, module_path: ModulePath, failures: RequestFailures) -> LiveRequests:
        d_model, device, sites = self.model_info.d_model, self.model_info.device, self.sites
        vectors = VectorFetcher()
        directions = Directions(vectors, device, codecs, d_model)
        lenses = Lenses(self._unembedding, sites.num_layers, d_model, device)
        read_outs = ReadOuts(
            codecs, self.saes.hold, sites.shapes, d_model, device, lenses, self.model_info.dtype.itemsize
        )
        return LiveRequests(
            self.planner,
            self._active_taps,
            self.table,
            self.taps,
            vectors,
            RequestCodecs(directions, codecs, read_outs),
            self.saes,
            self.functions,
            self.kept_rows,
            self.buffer_server,
            self.switch,
            module_path,
            failures,
        )

    def _make_steps(self, codecs: Codecs, failures: RequestFailures, sends: bool) -> None:
        """Make what begins and ends each step."""
        reducer = TapReducer(self.ring.buffer)
        self.step_rows = StepRows(self.ring, *self._copies(codecs, sends), reducer, codecs)
        self.sender = StepSender(
            self.switch,
            self._plan_writer,
            self._scorer,
            self.planner,
            self.row_seqs,
            self.arena,
            self.step_rows,
            reducer,
            self.notifier,
            failures,
            self.model_info.traits.speculative,
            self.functions,
            self.table,
        )
        self.writer = StepWriter(
            self.planner,
            self.step_rows,
            self._table_writer,
            self._plan_writer,
            self.tensors,
            self.switch,
            TapCalls(
                self.table,
                self.switch.numbers,
                self.saes.find,
                self.functions,
                self._sites_of,
                failures.fail_called,
                self.model_info.device,
                self.switch.score_early,
            ),
            self.in_graphs,
            self._scorer,
            reducer,
            failures,
            self.sender,
            self.model_info.runner,
        )

    def _copies(self, codecs: Codecs, sends: bool) -> tuple[CpuCopyOut | CudaCopyOut, StreamedCopy | None]:
        """Return what copies rows out of the ring after a step, and what does so while it runs."""
        if self.model_info.device.type != "cuda":
            return CpuCopyOut(self.ring, self.host), None
        copy_out = CudaCopyOut(self.ring, self.host)
        if not sends:
            return copy_out, None
        from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

        return copy_out, StreamedCopy(self.ring, copy_out, self.tensors.ranks, self.switch.numbers, codecs)

    def _grant(self, endpoint: str, start: int, rows: int) -> None:
        self.host.prepare(start, rows)
        if not endpoint.startswith(messages.KEPT):
            self.buffer_server.grant(endpoint, start)

    @property
    def boundary_taps(self) -> int:
        """Mask of the taps on the stream between blocks, which serve most requests."""
        return sum(1 << tap for tap in self.taps if is_boundary(tap))

    def begin_step(self, *groups: tuple[Sequence[str], Sequence[int]]) -> None:
        """Turn on the taps that the coming step needs, alike on all ranks; groups as in `ActiveTaps.taps_in`."""
        self.switch.turn(self._active_taps.taps_in(*groups))
        self.all_live = len(self._active_taps) >= sum(len(request_ids) for request_ids, _ in groups)

    def taps_needed(self, requests: Sequence[tuple[bytes, int]]) -> list[tuple[int, bool]]:
        """Return the masks of taps of steps with such requests, see `ActiveTaps.needed_by`.

        `requests` are (`EngineSpec.wire`, tokens of the prompt).
        """
        return self._active_taps.needed_by((EngineSpec.from_wire(wire), length) for wire, length in requests)

    def close(self) -> None:
        """Send what is under way, then end threads, sockets and pinned memory."""
        self.sender.note_sampled()
        self.notifier.close()
        self.buffer_server.close()
        self.host.close()

    def silence(self) -> None:
        """Let nothing be recorded or changed in the coming forward pass, which is a dummy."""
        self.sender.step = None
        self.switch.turn(0)
        self._plan_writer.silence()
        self._scorer.silence()

    def report(self) -> dict[str, Any]:
        no_lens = self._unembedding.refused
        return worker_report(self.model_info, self.sites, self._settings, self.taps, self._max_step_rows, no_lens)

    def usage(self) -> dict[str, int]:
        """Return how much is in use; `host_rows` counts also what readers still hold."""
        live = self.planner.capturing.keys() | self.planner.steered.keys()
        tables = self.table.usage() | self.probes.usage()
        memory = {"host_rows": self.arena.used, "sae_bytes": self.saes.nbytes, "kept_bytes": self.kept_rows.nbytes}
        return {"requests": len(live), "functions": len(self.functions), **memory, **tables}


def _with_tap(taps: tuple[int, ...], tap: int) -> tuple[int, ...]:
    """Return taps in the order in which they have to act, with one more; the final norm's (1) comes last."""
    return tuple(sorted((*taps, tap), key=lambda one: (one == 1, one)))


def _open(name: str, controller: SyncController, worker: WorkerInfo) -> None:
    """Open a controller; raise WeirError if it raises."""
    try:
        controller.open(worker)
    except Exception as e:
        raise WeirError(
            f"the controller cannot be opened: {type(e).__name__}: {e}", f"settings.controllers.{name}"
        ) from e
