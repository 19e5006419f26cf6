"""The worker's runtime: keeps live requests, plans each step, sends what taps have written.

Everything it is told is plain data from the patches; it uses torch, but not vLLM.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_request import EngineRequest
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits
from vllm_weir.schema.taps import NO_GRAPH, STAGES, is_boundary, num_columns, num_taps, tap_of
from vllm_weir.util.h2d import upload
from vllm_weir.worker.discovery.site_map import UNTAPPED, SiteMap, chosen
from vllm_weir.worker.kept_rows import KeptRows
from vllm_weir.worker.lenses import Lenses, Unembedding
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_layout import RowLayout
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.saes import WorkerSAEs
from vllm_weir.worker.scoring.probe_table import ControlledGate, ProbeTable
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.scoring.sync_controller import SyncController, WorkerInfo
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.install import ModulePath, place
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.tap.row_encoder import RowEncoder
from vllm_weir.worker.transfer.buffer_server import BufferServer
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CpuCopyOut, CudaCopyOut, no_wait
from vllm_weir.worker.transfer.directions import Directions
from vllm_weir.worker.transfer.notifier import Notifier, StepNotice
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.postprocess import Postprocessor
from vllm_weir.worker.transfer.read_outs import ReadOuts
from vllm_weir.worker.transfer.ring import Ring

if TYPE_CHECKING:
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

logger = logging.getLogger(__name__)
MAX_SITE_SETS = 4096
STREAM_SHARE = 8
"""A step without a CUDA graph is streamed if its rows would fill more than 1/8 of the ring."""
SPILL = 0.6
"""Once this share of the host buffer is in use, readers are asked to move their rows out of it."""


@dataclass(frozen=True)
class ModelInfo:
    """What the worker needs to know of its engine.

    Attributes:
        d_model, dtype, device: of the stream.
        max_tokens: of a step.
        rank, ranks: this worker's rank in its tensor-parallel group, and the group's size. All
            ranks hold the same stream.
        runner: which of vLLM's model runners drives the worker.
        engine: number of its data-parallel engine.
        traits: of the engine.
    """

    d_model: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    rank: int = 0
    ranks: int = 1
    runner: str = ""
    engine: int = 0
    traits: EngineTraits = PLAIN_ENGINE


class WorkerRuntime:
    """Captures and steers in one worker.

    Build it after the model is loaded and before it is compiled.

    Args:
        model: gets the taps.
        model_info: of the engine.
        settings: of Weir.
        sites: the hook points that were found in the model.
        unembedding: of the model, for lenses.
        controllers: sync controllers by name, not opened yet.

    Attributes:
        taps: numbers of this worker's taps.
        saes: the sparse autoencoders on the device.
        kept_rows: rows that stay here.
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
    ) -> None:
        self.model_info, self.sites, self._settings = model_info, sites, settings
        anchors = chosen(sites, settings)
        self.taps = tuple(anchors)
        d_model, device = model_info.d_model, model_info.device
        row_size = (d_model, model_info.dtype.itemsize)
        is_cuda = device.type == "cuda"
        rank, ranks = model_info.rank, model_info.ranks
        self.layout = RowLayout.of(sites.shapes, sites.shards, d_model, sites.num_layers, rank, ranks)
        sent_taps = self._taps_to_send(settings)
        sends = bool(sent_taps)
        self._max_step_rows = min(settings.ring_rows(*row_size), settings.step_rows(*row_size)) if sends else 0

        self.ring = Ring(settings.ring_rows(*row_size) if sends else 1, d_model, model_info.dtype, device)
        self.host = HostBuffer(settings.host_rows(*row_size) if sends else 1, d_model * row_size[1], is_cuda and sends)
        self.arena = Arena(self.host.rows)
        self.name = secrets.token_hex(8)
        self.buffer_server = BufferServer(self.host, self.arena, self.name)
        host_rows = self.host.view(d_model, model_info.dtype)
        traits = model_info.traits
        self.notifier = Notifier(
            host_rows, self.arena, self.buffer_server, self.name, model_info.engine, traits.uncertainty
        )

        num_model_taps, width = num_taps(sites.num_layers), num_columns(sites.num_layers)
        sizes = settings.table_sizes(d_model)
        self.table = ProgramTable(sizes, num_model_taps, self.taps, d_model, self.layout.widths, self.layout.shards)
        self.probes = ProbeTable(sizes, self.table, 1 + traits.draft_tokens)
        self.row_seqs = RowSequences(self.arena, settings.timeout if settings.overflow == "wait" else None)
        self.row_seqs.grant, self.row_seqs.reader_columns = self._grant, self.layout.reader_columns
        columns = frozenset(tap * STAGES + stage for tap in sent_taps for stage in range(STAGES))
        self.kept_rows = KeptRows(columns, sites.shapes, d_model, model_info.dtype, device, self.notifier.settle)
        self.notifier.keep = self.kept_rows.receive
        self.planner = Planner(
            columns, width, MAX_SITE_SETS, self.table, self.row_seqs, self.layout.ring_rows, self.probes, traits
        )
        self.planner.steering_planner.reports = self.planner.score_planner.reports = model_info.rank == 0
        self.planner.capture_planner.row_bytes = self.host.row_bytes

        self._table_writer = TableWriter(self.table, device)
        self.tensors = TapTensors(
            plan=torch.full((model_info.max_tokens, 4), -1, dtype=torch.int32, device=device),
            ranks=torch.full((MAX_SITE_SETS, width), -1, dtype=torch.int32, device=device),
            ring=self.ring.buffer,
            cells=torch.zeros(model_info.max_tokens, sizes.cells, dtype=torch.float32, device=device),
            **self._table_writer.tensors,
        )
        worker = WorkerInfo(device, sizes.gates, rank, ranks, d_model, model_info.dtype)
        for name, controller in controllers.items():
            _open(name, controller, worker)
        self._scorer = Scorer(self.probes, self.tensors, sizes, controllers)
        self._plan_writer = PlanWriter(self.tensors.plan)
        self.switch = TapSwitch(self.tensors)
        self.switch.score = self._scorer.launch
        head_sizes = {tap_of(site): shape[-1] for site, shape in sites.shapes.items() if site.hook == "z"}
        for tap, anchor in anchors.items():
            place(model, anchor, tap, self.switch, head_sizes.get(tap))
        self._module_path = ModulePath(model, anchors.values())

        self.saes = WorkerSAEs(device, settings.sae_bytes)
        self._encoder = RowEncoder(self.table, self.switch.numbers, self.saes.find, device)
        self._active_taps = ActiveTaps()
        self.all_live = False
        self._vectors = VectorFetcher()
        self._codecs = Codecs(d_model, device, model_info.dtype)
        self._directions = Directions(self._vectors, device, self._codecs, d_model)
        self._lenses = Lenses(unembedding or Unembedding(), sites.num_layers, d_model, device)
        self._read_outs = ReadOuts(self._codecs, self.saes.hold, sites.shapes, d_model, device, self._lenses)
        self._postprocessor, self._reducer = Postprocessor(self.ring.buffer), TapReducer(self.ring.buffer)
        self._copy_out = (CudaCopyOut if is_cuda else CpuCopyOut)(self.ring, self.host)
        self._streamed_copy: StreamedCopy | None = None
        if isinstance(self._copy_out, CudaCopyOut) and sends:
            from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

            self._streamed_copy = StreamedCopy(
                self.ring, self._copy_out, self.tensors.ranks, self.switch.numbers, self._codecs
            )
        self._streaming = False
        """Whether the step being issued is streamed."""
        self._step: tuple[int, StepPlan] | None = None
        """First ring row and plan of the step being issued.

        In a streamed step the row is that of its groups of reduced rows.
        """
        self._unsampled: StepNotice | None = None
        """What readers are to be told of the last step, once it is sampled."""
        self._failures: dict[str, dict[str, str]] = {}
        """Endpoint -> request -> reason, of requests that failed while a step was planned."""

    def _taps_to_send(self, settings: Settings) -> Sequence[int]:
        """Return the taps whose rows this worker sends.

        Rows that every tensor-parallel rank has in whole are sent by one of them.
        """
        whole = [tap for tap in self.taps if tap not in self.layout.spread]
        if settings.ship == "split":
            whole = whole[self.model_info.rank :: self.model_info.ranks]
        elif self.model_info.rank:
            whole = []
        own = self.layout.spread - self.layout.silent
        return sorted((*whole, *own.intersection(self.taps)))

    @property
    def boundary_taps(self) -> int:
        """Mask of the taps on the stream between blocks, which serve most requests."""
        return sum(1 << tap for tap in self.taps if is_boundary(tap))

    def follow(
        self,
        new: Iterable[tuple[str, EngineRequest, int, Sequence[int] | None, int]],
        finished: Iterable[str],
        resumed: Iterable[str] = (),
    ) -> None:
        """Note which requests join, leave, and resume before the next step.

        Args:
            new: (id, what it asks of the engine, prompt length, prompt ids, positions that come
                from the prefix cache).
            finished: ids of requests that leave; unknown ones are ignored.
            resumed: ids of requests that go on after a preemption without having left.
        """
        for request_id in finished:
            self._active_taps.leave(request_id)
            self.planner.remove(request_id)
            self._directions.release(request_id)
            self._codecs.release(request_id)
            self._read_outs.release(request_id)
            self.saes.release(request_id)
        self.planner.resume(resumed)
        joining = [(EngineSpec.from_wire(request[1].spec), *request) for request in new]
        replaced = self._module_path.replaced() if joining else ""
        for _, _, engine_request, *_ in joining:
            if engine_request.vectors:
                self._vectors.add_inline(engine_request.reader_endpoint, engine_request.vectors)
        self._prefetch_vectors((engine_request.reader_endpoint, spec) for spec, _, engine_request, *_ in joining)
        for spec, request_id, engine_request, prompt_len, prompt_ids, cached in joining:
            self.planner.remove(request_id)  # a resumed request joins again
            self._active_taps.join(request_id, spec, prompt_len)
            try:
                if reason := engine_request.refusal:
                    raise WeirError(reason)
                if replaced:
                    raise WeirError(
                        f"{replaced} of the model was replaced after Weir put a tap there; put the tapped module back, "
                        "or start the engine again"
                    )
                self._join(request_id, spec, engine_request, prompt_len, prompt_ids)
            except (WeirError, ValueError) as e:
                logger.exception("Weir cannot serve request %s", request_id)
                self.notifier.fail(
                    engine_request.reader_endpoint, request_id, f"the worker could not serve the request: {e}"
                )
                if spec.moves:
                    salt, gated_from = engine_request.cache_salt, spec.gated_from(prompt_len)
                    keys = SteeredKeys(spec.moves, prompt_len, prompt_ids, salt, gated_from)
                    self.planner.steering_planner.unsteered_kv.add(keys, cached)
        self._vectors.clear()

    def _prefetch_vectors(self, joining: Iterable[tuple[str, EngineSpec]]) -> None:
        """Fetch all missing vectors of requests (endpoint, spec) that join in one step."""
        wanted: dict[str, list[str]] = {}
        for endpoint, spec in joining:
            postprocess = spec.captures.postprocess
            if postprocess is not None and postprocess.directions and self.planner.columns:
                wanted.setdefault(endpoint, []).extend(self._directions.absent(postprocess.directions))
            used = [i.vectors for i in spec.moves if self.table.is_local(i)]
            used += [probe.vectors for probe in spec.probes if tap_of(probe.site) in self.taps]
            for vectors in used:
                if missing := self.table.missing_vectors(vectors):
                    wanted.setdefault(endpoint, []).extend(missing)
        self._vectors.prefetch({endpoint: digests for endpoint, digests in wanted.items() if digests})

    def _join(
        self,
        request_id: str,
        spec: EngineSpec,
        engine_request: EngineRequest,
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
    ) -> None:
        endpoint, postprocess = engine_request.reader_endpoint, spec.captures.postprocess
        if spec.captures.site_requests and self.planner.columns:
            codec, read_out_codec, keeper = -1, None, ""
            if postprocess is not None and postprocess.kept:
                keeper = self.kept_rows.endpoint(postprocess.kept)
            else:
                self.buffer_server.maps(endpoint)
            if postprocess is not None and postprocess.directions:
                codec = self._directions.hold(request_id, postprocess.directions, endpoint)
            elif postprocess is not None and postprocess.compression is not None:
                codec = self._codecs.hold(request_id, postprocess.compression)
            elif postprocess is not None and postprocess.read_outs:
                read_out_codec = self._read_outs.hold(request_id, postprocess.read_outs)
            self.planner.add_capture(
                request_id,
                endpoint,
                spec.captures,
                prompt_len,
                prompt_ids,
                engine_request.max_tokens,
                codec,
                read_out_codec,
                keeper,
            )
        self._hold_encoders(request_id, spec)
        if spec.moves or spec.probes:
            fetch = functools.partial(self._vectors.fetch, endpoint)
            self.planner.add_steering(
                request_id,
                endpoint,
                spec.moves,
                prompt_len,
                prompt_ids,
                fetch,
                engine_request.cache_salt,
                spec.scoring,
                spec.gated_from(prompt_len),
                spec.steps,
            )

    def _hold_encoders(self, request_id: str, spec: EngineSpec) -> None:
        """Hold the autoencoders that encode a request's rows in taps; raise WeirError if that cannot be done."""
        if spec.encoders and self.switch.pinned:
            raise WeirError(
                "this engine replays every step from one set of CUDA graphs, in which no row can be encoded whole, as "
                "this feature needs; give add in place of value or scale, or start the engine with enforce_eager",
                "interventions",
            )
        for key in spec.encoders:
            self.saes.hold(request_id, key)

    def _grant(self, endpoint: str, start: int, rows: int) -> None:
        self.host.prepare(start, rows)
        if not endpoint.startswith(messages.KEPT):
            self.buffer_server.grant(endpoint, start)

    def begin_step(self, *groups: tuple[Sequence[str], Sequence[int]]) -> None:
        """Turn on the taps that the coming step needs, alike on all ranks.

        Args:
            groups: as in `ActiveTaps.taps_in`.
        """
        self.switch.turn(self._active_taps.taps_in(*groups))
        self.all_live = len(self._active_taps) >= sum(len(request_ids) for request_ids, _ in groups)

    def plan_step(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        input_ids: torch.Tensor,
        graph: bool = True,
        num_drafts: Sequence[int] | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Tell the taps what the coming forward pass is to record and to change.

        What cannot be served fails its own requests; the engine and all other requests go on.

        Args:
            request_ids: requests in batch order.
            num_tokens: tokens each one has in this step.
            num_computed: position of each one's first token in this step.
            input_ids: tokens of the step on the device, [>= tokens].
            graph: whether the pass may be replayed from a CUDA graph.
            num_drafts: how many of each one's tokens are drafts; None if none are.
            positions: int [>= tokens] on the device, of the step's tokens; needed where drafts are
                verified.
        """
        self._step, self.switch.launch, self._streaming = None, None, False
        try:
            plan = self._plan(request_ids, num_tokens, num_computed, num_drafts)
            if plan is not None and self._encodes and graph and self.model_info.runner == "V2":
                raise WeirError("a step in which rows are encoded whole was to be replayed from a CUDA graph")
            streamed_copy = None if plan is None or graph else self._streamed_copy_for(plan)
            first_row = 0 if plan is None or streamed_copy is not None else self._claim_ring(plan.rows)
        except (WeirError, ValueError) as e:
            logger.exception("Weir cannot plan this step")
            self._fail_all(request_ids, num_computed, str(e))
            plan = None
        if plan is None:
            self._plan_writer.silence()
            self._scorer.silence()
            return
        self._note_failures(plan)
        self._table_writer.flush()
        self._write_ranks()
        acting_tokens = None
        if not graph and self.model_info.device.type == "cuda":
            acting_tokens = upload(plan.acting_tokens, self.model_info.device)
        if streamed_copy is not None:
            streamed_copy.begin(plan, self.planner.site_sets.columns_of, acting_tokens)
            self.switch.launch, self._streaming = streamed_copy.tap, True
            first_row = streamed_copy.cells
            self._plan_writer.write(plan.in_lanes(streamed_copy.stride, first_row), 0, input_ids, positions)
        else:
            if acting_tokens is not None:
                self.switch.launch = functools.partial(_launch_listed, acting_tokens)
            self._plan_writer.write(plan, first_row, input_ids, positions)
        if self._encodes:
            self.switch.launch = self._encoder.around(self.switch.launch, self._programs_of(plan))
        self._scorer.begin(plan, positions)
        self._step = first_row, plan
        self._reducer.seed(plan.reductions, first_row)

    @property
    def _encodes(self) -> bool:
        """Whether rows of the coming step may be encoded whole; alike on all ranks."""
        return not self.switch.pinned and bool(self.switch.mask >> NO_GRAPH & 1)

    def _programs_of(self, plan: StepPlan) -> np.ndarray:
        """Return the programs of a step's tokens; waits for the device if only that knows some of them."""
        if not (plan.programs_by_token or plan.programs_by_position):
            return plan.programs
        return self.tensors.plan[: len(plan.programs), 2].cpu().numpy()

    def _plan(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        num_drafts: Sequence[int] | None,
    ) -> StepPlan | None:
        plan = self.planner.plan(request_ids, num_tokens, num_computed, num_drafts)
        if plan is not None and not self.switch.live and (plan.rows or len(plan.runs) or (plan.programs >= 0).any()):
            raise WeirError("a step that was planned without taps has something for them to do")
        return plan

    def _streamed_copy_for(self, plan: StepPlan) -> StreamedCopy | None:
        """Return the streamed copy if the step has enough rows to be streamed, else None."""
        most = min(self.ring.capacity // STREAM_SHARE, self.ring.capacity - plan.group_rows)
        return self._streamed_copy if plan.rows and plan.rows - plan.group_rows > most else None

    def _claim_ring(self, rows: int) -> int:
        """Return the first of the next `rows` ring rows; the device waits until they are free.

        Raises:
            ValueError: if the ring is too small.
        """
        if not rows:
            return 0
        first_row = self.ring.take(rows)
        self.ring.claim(first_row, rows)
        return first_row

    def _fail_all(self, request_ids: Sequence[str], num_computed: Sequence[int], reason: str) -> None:
        """Tell the readers of all requests of a step that they failed."""
        for request_id, computed in zip(request_ids, num_computed, strict=True):
            steered = self.planner.steered.get(request_id)
            if steered is not None and steered.keys.interventions:
                known = max(0, int(computed) - self.model_info.traits.uncertainty)
                self.planner.steering_planner.unsteered_kv.add(steered.keys, known)
            request = self.planner.capturing.get(request_id) or steered
            if request is not None:
                self.notifier.fail(request.endpoint, request_id, reason)

    def _note_failures(self, plan: StepPlan) -> None:
        """Keep a plan's failures, to report them with the step's rows."""
        for endpoint, request_id, reason in plan.failures:
            logger.error("Weir cannot go on serving request %s: %s", request_id, reason)
            self._failures.setdefault(endpoint, {})[request_id] = reason

    def _write_ranks(self) -> None:
        """Bring the device's rank table up to date."""
        site_sets = self.planner.site_sets
        if site_sets.changed:
            used = site_sets.used
            self.tensors.ranks[:used].copy_(upload(site_sets.ranks[:used].copy(), self.tensors.ranks.device))
            site_sets.changed = False

    def end_step(self) -> None:
        """Send the rows of the forward pass that was issued, and tell what was steered."""
        self.switch.turn(0)  # what is called between steps (by users, through `apply_model`) belongs to no request
        self.note_sampled(_never_sampled)  # does nothing if the last step was sampled, as usual
        step, self._step = self._step, None
        if self.switch.pinned and self.model_info.traits.speculative:
            # A draft model that runs now may share tapped modules.
            self._plan_writer.silence()
            self._scorer.silence()
        drafted, self.planner.drafted = self.planner.drafted, None
        if step is None and drafted is None and not self.row_seqs.layout_updates:
            return
        failed = [] if step is None else self._scorer.controllers.run()
        notice = StepNotice(no_wait, failures=self._failures, drafted=drafted)
        self._failures = {}
        if step is not None:
            first_row, plan = step
            notice.arrived = self._send_rows(plan, first_row) or no_wait
            notice.arrivals, notice.steered = plan.arrivals, plan.steered
            if plan.score_reads is not None:
                notice.scored, notice.scores = plan.scored, self._scorer.read(plan.score_reads)
        notice.spill = self.arena.pressure > SPILL
        if notice.spill:
            self.row_seqs.retire_all()
        notice.layout_updates = self.row_seqs.take_layout_updates()
        for layout_update in notice.layout_updates.values():
            self._reducer.forget(layout_update.closed)
        if drafted is not None and drafted.undecided:
            self._unsampled = notice
        else:
            self.notifier.send(notice)
        for gate, reason in failed:
            self._fail_controlled(gate, reason)

    def note_sampled(self, sampled: Callable[[], Mapping[str, int]]) -> None:
        """Tell the readers of the last step, whose tokens are about to be sampled.

        Args:
            sampled: see `StepNotice.sampled`.
        """
        notice, self._unsampled = self._unsampled, None
        if notice is not None:
            notice.sampled = sampled
            self.notifier.send(notice)

    def _fail_controlled(self, gate: ControlledGate, reason: str) -> None:
        """Stop following a request whose controller has failed; its next tokens are not steered as asked."""
        steered = self.planner.steered.get(gate.request_id)
        self.planner.remove(gate.request_id)
        if steered is not None and steered.keys.interventions:
            # What a controller decides on is generated.
            self.planner.steering_planner.unsteered_kv.add(steered.keys, steered.selectors.prompt_len)
        self.notifier.fail(gate.endpoint, gate.request_id, reason)

    def _send_rows(self, plan: StepPlan, first_row: int) -> Callable[[], None] | None:
        """Send what the taps have written; return what to call to wait until it has arrived."""
        self._reducer.settle(plan.reductions, first_row)
        self.switch.launch = None
        if self._streamed_copy is not None and self._streaming:
            return self._streamed_copy.end(plan)
        if not plan.rows:
            return None
        pack = functools.partial(self._postprocessor.pack, plan, first_row, self._codecs)
        return self._copy_out.ship(plan, first_row, lambda: pack(True), lambda: pack(False))

    def close(self) -> None:
        """Send what is under way, then end threads, sockets and pinned memory."""
        self.note_sampled(_never_sampled)
        self.notifier.close()
        self.buffer_server.close()
        self.host.close()

    def silence(self) -> None:
        """Let nothing be recorded or changed in the coming forward pass, which is a dummy."""
        self._step = None
        self.switch.turn(0)
        self._plan_writer.silence()
        self._scorer.silence()

    def report(self) -> dict[str, Any]:
        """Return what this worker serves, for the caller's process."""
        return {
            "ok": True,
            "runner": self.model_info.runner,
            "taps": list(self.taps),
            "sites": self._verdicts(),
            "num_layers": self.sites.num_layers,
            "d_model": self.model_info.d_model,
            "dtype": str(self.model_info.dtype).removeprefix("torch."),
            "ring_rows": self._max_step_rows,
            "no_lens": self._lenses.unembedding.refused,
            "shapes": [(*site, list(shape)) for site, shape in self.sites.shapes.items()],
            "embeds_media": self.sites.embeddings_given,
            "read_only": [(*site, why) for site, why in self.sites.read_only.items()],
            "shards": [(*site, *shard) for site, shard in self.sites.shards.items()],
            **self.sites.read_facts().report(),
        }

    def _verdicts(self) -> list[tuple[str, int, str]]:
        """Return (hook point, layer, why it is refused or "") of this worker's sites."""
        taps = set(self.taps)
        found = [
            (*site, "" if tap_of(site) in taps else self.sites.why_left_out(site, self._settings) or UNTAPPED)
            for site in self.sites.anchors
        ]
        return found + [(*site, reason) for site, reason in self.sites.refused.items()]

    def usage(self) -> dict[str, int]:
        """Return how much is in use; `host_rows` counts also what readers still hold."""
        live = self.planner.capturing.keys() | self.planner.steered.keys()
        tables = self.table.usage() | self.probes.usage()
        memory = {"host_rows": self.arena.used, "sae_bytes": self.saes.nbytes, "kept_bytes": self.kept_rows.nbytes}
        return {"requests": len(live), **memory, **tables}


def _open(name: str, controller: SyncController, worker: WorkerInfo) -> None:
    """Open a controller; raise WeirError if it raises."""
    try:
        controller.open(worker)
    except Exception as e:
        raise WeirError(
            f"the controller cannot be opened: {type(e).__name__}: {e}", f"settings.controllers.{name}"
        ) from e


def _launch_listed(listed: torch.Tensor, *arguments: Any) -> None:
    from vllm_weir.worker.tap.triton_kernel import launch

    launch(*arguments, listed=listed)


def _never_sampled() -> Mapping[str, int]:
    raise RuntimeError("vLLM did not sample the step")
