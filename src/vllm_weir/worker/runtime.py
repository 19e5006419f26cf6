"""The worker's runtime, which makes its parts and holds them together.

Everything it is told is plain data from the patches; it uses torch, but not vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

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
from vllm_weir.worker.model_info import ModelInfo, worker_report
from vllm_weir.worker.parameters import Parameters
from vllm_weir.worker.parts import Parts, RequestFailures
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.planning.arena import Arena, RowLayout
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.saes import WorkerSAEs
from vllm_weir.worker.scoring.probe_table import ProbeTable
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.scoring.step_controllers import SyncController, WorkerInfo
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.steps import Steps
from vllm_weir.worker.tap.calls import TapCalls
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.install import ModulePath, place
from vllm_weir.worker.tap.mapped import MappedTaps
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.tap.replay import Replays
from vllm_weir.worker.tap.routing import RoutedRows
from vllm_weir.worker.transfer.buffer_server import BufferServer
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CpuCopyOut, CudaCopyOut
from vllm_weir.worker.transfer.directions import Directions, RequestCodecs
from vllm_weir.worker.transfer.notifier import Notifier
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.read_outs import ReadOuts
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
        parts: everything that works here.
        requests: is told which requests join and leave.
        steps: is told the batch of each step, that its forward pass was issued, and that its tokens are sampled.
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
        unembedding = unembedding or Unembedding()
        self._no_lens = unembedding.refused
        anchors = chosen(sites, settings)
        routed = None if settings.hooks is not None and "router_logits" not in settings.hooks else sites.routers.blocks
        self.taps = tuple(anchors) if routed is None else _with_tap(tuple(anchors), tap_of(routed.site))
        self.layout = RowLayout.of(
            sites.shapes, sites.shards, model_info.d_model, sites.num_layers, model_info.rank, model_info.ranks
        )
        sent_taps = self._taps_to_send()
        self.sends = bool(sent_taps)
        self.parts = make_parts(
            model, model_info, settings, sites, anchors, self.taps, self.layout, sent_taps, unembedding, controllers,
            parameters,
        )  # fmt: skip
        if routed is not None:
            rows = RoutedRows(
                routed, self.parts.switch, model_info.max_tokens, model_info.dtype, model_info.device,
                self.parts.replays, sites.read_facts().routing,
            )  # fmt: skip
            sites.routers.install(rows)
        self.requests = LiveRequests(self.parts)
        self.steps = Steps(self.parts, model_info.runner, model_info.traits.speculative)
        self.all_live = False

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

    @property
    def boundary_taps(self) -> int:
        """Mask of the taps on the stream between blocks, which serve most requests."""
        return sum(1 << tap for tap in self.taps if is_boundary(tap))

    def begin_step(self, *groups: tuple[Sequence[str], Sequence[int]]) -> None:
        """Turn on the taps that the coming step needs, alike on all ranks; groups as in `ActiveTaps.taps_in`."""
        self.parts.switch.set_active(self.parts.active_taps.taps_in(*groups))
        self.all_live = len(self.parts.active_taps) >= sum(len(request_ids) for request_ids, _ in groups)

    def taps_needed(self, requests: Sequence[tuple[bytes, int]]) -> list[tuple[int, bool]]:
        """Return the masks of taps of steps with such requests, see `ActiveTaps.needed_by`.

        `requests` are (`EngineSpec.wire`, tokens of the prompt).
        """
        return self.parts.active_taps.needed_by((EngineSpec.from_wire(wire), length) for wire, length in requests)

    def close(self) -> None:
        """Send what is under way, then end threads, sockets and pinned memory."""
        self.steps.note_sampled()
        self.parts.notifier.close()
        self.parts.buffer_server.close()
        self.parts.host.close()

    def silence(self) -> None:
        """Let nothing be recorded or changed in the coming forward pass, which is a dummy."""
        self.steps.forget()
        self.parts.replays.silence()
        self.parts.switch.set_active(0)
        self.parts.plan_writer.silence()
        self.parts.scorer.silence()

    def report(self) -> dict[str, Any]:
        step_rows = _max_step_rows(self.model_info, self._settings) if self.sends else 0
        return worker_report(self.model_info, self.sites, self._settings, self.taps, step_rows, self._no_lens)

    def usage(self) -> dict[str, int]:
        """Return how much is in use; `host_rows` counts also what readers still hold."""
        parts = self.parts
        live = parts.planner.capturing.keys() | parts.planner.steered.keys()
        tables = parts.table.usage() | parts.probes.usage()
        memory = {
            "host_rows": parts.arena.used,
            "sae_bytes": parts.saes.nbytes,
            "kept_bytes": parts.kept_rows.nbytes,
        }
        held = {"functions": len(parts.functions), "replays": len(parts.replays)}
        return {"requests": len(live), **held, **memory, **tables}


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


def _max_step_rows(model_info: ModelInfo, settings: Settings) -> int:
    """Return how many rows one step may capture."""
    row_size = model_info.d_model, model_info.dtype.itemsize
    return min(settings.ring_rows(*row_size), settings.step_rows(*row_size))


def make_parts(
    model: torch.nn.Module,
    model_info: ModelInfo,
    settings: Settings,
    sites: SiteMap,
    anchors: Mapping[int, Anchor],
    taps: tuple[int, ...],
    layout: RowLayout,
    sent_taps: Sequence[int],
    unembedding: Unembedding,
    controllers: Mapping[str, SyncController],
    parameters: Parameters | None,
) -> Parts:
    """Make a worker's parts, each after those that it needs, and put the taps at `anchors` into the model."""
    d_model, dtype, device, traits = model_info.d_model, model_info.dtype, model_info.device, model_info.traits
    sizes, row_size, sends = settings.table_sizes(d_model), (d_model, dtype.itemsize), bool(sent_taps)
    columns = frozenset(tap * STAGES + stage for tap in sent_taps for stage in range(STAGES))
    sites_of = {tap_of(site): site for site in sites.anchors if site.hook != "resid_pre" or not site.layer}

    ring = Ring(settings.ring_rows(*row_size) if sends else 1, d_model, dtype, device)
    host_rows = settings.host_rows(*row_size) if sends else 1
    host = HostBuffer(host_rows, d_model * dtype.itemsize, device.type == "cuda" and sends)
    arena, name = Arena(host.rows), secrets.token_hex(8)
    buffer_server = BufferServer(host, arena, name)
    kept_rows = KeptRows(columns, sites.shapes, d_model, dtype, device)
    notifier = Notifier(
        host.view(d_model, dtype), arena, buffer_server, name, kept_rows.receive, model_info.engine, traits.uncertainty
    )

    in_graphs = MappedTaps(sites_of, model_info.max_tokens, model_info.dtype, device)
    table = ProgramTable(
        sizes, num_taps(sites.num_layers), taps, d_model, layout.widths, layout.shards, in_graphs.place_of
    )
    probes = ProbeTable(sizes, table, 1 + traits.draft_tokens)
    patience = settings.timeout if settings.overflow == "wait" else None
    row_seqs = RowSequences(arena, patience, traits.draft_tokens, buffer_server.allow_reader, layout.reader_columns)
    width = num_columns(sites.num_layers)
    planner = Planner(
        columns, width, MAX_SITE_SETS, table, row_seqs, layout.ring_rows, probes, traits, model_info.rank == 0,
        host.row_bytes,
    )  # fmt: skip
    failures = RequestFailures(planner, notifier, traits.uncertainty)

    table_writer = TableWriter(table, device)
    tensors = TapTensors(
        plan=torch.full((model_info.max_tokens, 4), -1, dtype=torch.int32, device=device),
        ranks=torch.full((MAX_SITE_SETS, width), -1, dtype=torch.int32, device=device),
        ring=ring.buffer,
        cells=torch.zeros(model_info.max_tokens, sizes.cells, dtype=torch.float32, device=device),
        **table_writer.tensors,
    )
    worker = WorkerInfo(device, sizes.gates, model_info.rank, model_info.ranks, d_model, dtype)
    for key, controller in controllers.items():
        _open(key, controller, worker)
    scorer = Scorer(probes, tensors, sizes, controllers)
    switch = TapSwitch(tensors, scorer.launch, in_graphs.held)
    head_sizes = {tap_of(site): shape[-1] for site, shape in sites.shapes.items() if site.hook == "z"}
    for tap, anchor in anchors.items():
        place(model, anchor, tap, switch, head_sizes.get(tap))

    saes = WorkerSAEs(device, settings.sae_bytes)
    functions = WorkerFunctions(
        device, in_graphs, model_info.rank == 0, traits.speculative, parameters, settings.functions == "cloudpickle"
    )
    compressions, vectors = Codecs(d_model, device, dtype), VectorFetcher()
    lenses = Lenses(unembedding, sites.num_layers, d_model, device)
    read_outs = ReadOuts(compressions, saes.hold, sites.shapes, d_model, device, lenses, dtype.itemsize)
    reducer = TapReducer(ring.buffer)
    copy_out, streamed_copy = _copies(ring, host, tensors, switch, compressions, sends)
    calls = TapCalls(
        table, switch.numbers, saes.find, functions, sites_of, failures.fail_called, device, switch.score_early
    )
    routed = sites.routers.blocks if sites.routers.blocks and tap_of(sites.routers.blocks.site) in taps else None
    return Parts(
        taps=frozenset(taps),
        host=host,
        arena=arena,
        buffer_server=buffer_server,
        notifier=notifier,
        kept_rows=kept_rows,
        table=table,
        probes=probes,
        table_writer=table_writer,
        row_seqs=row_seqs,
        planner=planner,
        plan_writer=PlanWriter(tensors.plan),
        failures=failures,
        tensors=tensors,
        switch=switch,
        active_taps=ActiveTaps(in_graphs.number_of),
        scorer=scorer,
        saes=saes,
        functions=functions,
        in_graphs=in_graphs,
        calls=calls,
        replays=Replays(routed, model_info.max_tokens, device, traits.uncertainty),
        vectors=vectors,
        codecs=RequestCodecs(Directions(vectors, device, compressions, d_model), compressions, read_outs),
        reducer=reducer,
        step_rows=StepRows(ring, copy_out, streamed_copy, reducer, compressions),
        module_path=ModulePath(model, anchors.values()),
    )


def _copies(
    ring: Ring, host: HostBuffer, tensors: TapTensors, switch: TapSwitch, codecs: Codecs, sends: bool
) -> tuple[CpuCopyOut | CudaCopyOut, StreamedCopy | None]:
    """Return what copies rows out of the ring after a step, and what does so while it runs."""
    if ring.buffer.device.type != "cuda":
        return CpuCopyOut(ring, host), None
    copy_out = CudaCopyOut(ring, host)
    if not sends:
        return copy_out, None
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

    return copy_out, StreamedCopy(ring, copy_out, tensors.ranks, switch.numbers, codecs)
