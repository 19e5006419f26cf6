"""The worker's runtime: follows the live requests, plans each step, and sends what the taps have written.

Everything it is told is plain data from the patches; it knows torch, but no vLLM.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.taps import STAGES, is_boundary, num_taps, tap_of
from vllm_weir.util.h2d import upload
from vllm_weir.worker.discovery.site_map import SiteMap, chosen
from vllm_weir.worker.planning.active_taps import ActiveTaps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.step_plan import PACKED, StepPlan
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.install import ModulePath, place
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.transfer.buffer_server import BufferServer
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CpuCopyOut, CudaCopyOut, no_wait
from vllm_weir.worker.transfer.directions import Directions
from vllm_weir.worker.transfer.notifier import Notifier, StepNotice
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.postprocess import Postprocessor
from vllm_weir.worker.transfer.ring import Ring

if TYPE_CHECKING:
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

logger = logging.getLogger(__name__)
MAX_PROFILES = 4096
STREAM_SHARE = 8
"""A step without a CUDA graph is streamed if its rows would fill more than this part of the ring."""
SPILL = 0.6
"""Share of the host buffer in use from which readers are asked to take their rows out of it."""


@dataclass(frozen=True)
class ModelInfo:
    """What the worker needs to know of the engine it stands in."""

    d_model: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    rank: int = 0
    ranks: int = 1
    """This worker's place in its tensor-parallel group, all of which hold the same stream, and the group's size."""
    runner: str = ""
    """Which of vLLM's model runners drives it."""
    engine: int = 0
    """Its data-parallel engine."""


class WorkerRuntime:
    """One per worker. Built once the model is loaded and before it is compiled."""

    def __init__(self, model: torch.nn.Module, model_info: ModelInfo, settings: Settings, sites: SiteMap) -> None:
        self.model_info, self.sites = model_info, sites
        placed = chosen(sites, settings)
        self.taps = tuple(placed)
        if settings.ship == "split":
            mine = self.taps[model_info.rank :: model_info.ranks]
        else:
            mine = self.taps if model_info.rank == 0 else ()
        ships = bool(mine)
        columns = frozenset(tap * STAGES + stage for tap in mine for stage in range(STAGES))
        taps = num_taps(sites.num_layers)
        num_columns = taps * STAGES
        self.table = ProgramTable(settings.table_sizes(model_info.d_model), taps, self.taps, model_info.d_model)
        size = (model_info.d_model, model_info.dtype.itemsize)
        self.ring = Ring(
            settings.ring_rows(*size) if ships else 1, model_info.d_model, model_info.dtype, model_info.device
        )
        cuda = model_info.device.type == "cuda"
        self.host = HostBuffer(settings.host_rows(*size) if ships else 1, size[0] * size[1], cuda and ships)
        self.arena = Arena(self.host.rows)
        self.name = secrets.token_hex(8)
        self.link = BufferServer(self.host, self.arena, self.name)
        self.row_seqs = RowSequences(self.arena, settings.timeout if settings.overflow == "wait" else None)
        self.row_seqs.grant = self._grant
        self.planner = Planner(columns, num_columns, MAX_PROFILES, self.table, self.row_seqs)
        self.planner.steering_planner.vouches = model_info.rank == 0
        self.planner.reader.row_bytes = self.host.row_bytes
        self._treater, self._folder = Postprocessor(self.ring.buffer), TapReducer(self.ring.buffer)
        self._outlet = (CudaCopyOut if cuda else CpuCopyOut)(self.ring, self.host)
        self._step_rows = min(settings.ring_rows(*size), settings.step_rows(*size)) if ships else 0
        self._tables = TableWriter(self.table, model_info.device)
        self.tensors = TapTensors(
            plan=torch.full((model_info.max_tokens, 4), -1, dtype=torch.int32, device=model_info.device),
            ranks=torch.full((MAX_PROFILES, num_columns), -1, dtype=torch.int32, device=model_info.device),
            ring=self.ring.buffer,
            **self._tables.tensors,
        )
        self.switch = TapSwitch(self.tensors)
        self._live = ActiveTaps()
        self.alone = False
        """Whether all requests of the coming step read or steer something; on all ranks alike."""
        rows = self.host.view(model_info.d_model, model_info.dtype)
        self.drain = Notifier(rows, self.arena, self.link, self.name, model_info.engine)
        self._fetcher = VectorFetcher(model_info.d_model)
        self._codecs = Codecs(model_info.d_model, model_info.device, model_info.dtype)
        self._directions = Directions(self._fetcher, model_info.device, self._codecs)
        self._writer = PlanWriter(self.tensors.plan)
        self._step: tuple[int, StepPlan] | None = None
        self._failures: dict[str, dict[str, str]] = {}
        for tap, anchor in placed.items():
            place(model, anchor, tap, self.switch)
        self._links = ModulePath(model, placed.values())
        self._streamer: StreamedCopy | None = None
        if isinstance(self._outlet, CudaCopyOut) and ships:
            from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

            self._streamer = StreamedCopy(
                self.ring, self._outlet, self.tensors.ranks, self.switch.numbers, self._codecs
            )

    @property
    def wide(self) -> int:
        """Mask of the taps on the stream between blocks, which serve most requests."""
        return sum(1 << tap for tap in self.taps if is_boundary(tap))

    def follow(
        self,
        new: Iterable[tuple[str, dict, int, Sequence[int] | None, int]],
        finished: Iterable[str],
        resumed: Iterable[str] = (),
    ) -> None:
        """Requests that join (id, engine wire form, prompt length, prompt ids, positions that come from the prefix
        cache), that leave, and that go on after a preemption without having left, before the next step. A wire form
        with ``refused`` is that of a request which fails for that reason."""
        for request_id in finished:
            self._live.leave(request_id)
            self.planner.remove(request_id)
            self._directions.release(request_id)
            self._codecs.release(request_id)
        self.planner.resume(resumed)
        joining = [(EngineSpec.from_wire(request[1]["spec"]), *request) for request in new]
        replaced = self._links.replaced() if joining else ""
        for _, _, wire, *_ in joining:
            if rows := wire.get("rows"):
                self._fetcher.take(wire["reply"], rows)
        self._fetch_ahead((wire["reply"], spec) for spec, _, wire, *_ in joining)
        for spec, request_id, wire, prompt_len, prompt_ids, cached in joining:
            self.planner.remove(request_id)  # a resumed request joins again
            self._live.join(request_id, spec, prompt_len)
            try:
                if why := wire.get("refused"):
                    raise WeirError(why)
                if replaced:
                    raise WeirError(f"{replaced} of the model was replaced: put the tapped one back, or start again")
                self._join(request_id, spec, wire, prompt_len, prompt_ids)
            except (WeirError, ValueError) as e:
                logger.exception("Weir cannot follow request %s", request_id)
                self.drain.fail(wire["reply"], request_id, f"the worker could not serve the request: {e}")
                if spec.moves:
                    keyed = SteeredKeys(spec.moves, prompt_len, prompt_ids, _salt(wire))
                    self.planner.steering_planner.leftovers.add(keyed, cached)
        self._fetcher.forget()

    def _fetch_ahead(self, joining: Iterable[tuple[str, EngineSpec]]) -> None:
        """Fetch what requests (reply address, spec) that join in one step need and is not here, all at once."""
        wanted: dict[str, list[str]] = {}
        for reply, spec in joining:
            postprocess = spec.captures.postprocess
            if postprocess is not None and postprocess.directions and self.planner.columns:
                wanted.setdefault(reply, []).extend(self._directions.absent(postprocess.directions))
            for move in spec.moves:
                if self.table.local(move) and (absent := self.table.absent(move.vectors)):
                    wanted.setdefault(reply, []).extend(absent)
        self._fetcher.fetch_ahead({reply: digests for reply, digests in wanted.items() if digests})

    def _join(
        self, request_id: str, spec: EngineSpec, wire: dict, prompt_len: int, prompt_ids: Sequence[int] | None
    ) -> None:
        reply, postprocess = wire["reply"], spec.captures.postprocess
        if spec.captures.site_requests and self.planner.columns:
            self.link.maps(reply)
            directions = -1
            if postprocess is not None and postprocess.directions:
                directions = PACKED - self._directions.hold(request_id, postprocess.directions, reply)
            elif postprocess is not None and postprocess.compression is not None:
                directions = PACKED - self._codecs.hold(request_id, postprocess.compression)
            self.planner.read(request_id, reply, spec.captures, prompt_len, prompt_ids, wire["most"], directions)
        if spec.moves:
            fetch = functools.partial(self._fetcher.fetch, reply)
            self.planner.steer(request_id, reply, spec.moves, prompt_len, prompt_ids, fetch, _salt(wire))

    def _grant(self, reply: str, start: int, rows: int) -> None:
        self.host.prepare(start, rows)
        self.link.grant(reply, start)

    def begin_step(self, *groups: tuple[Sequence[str], Sequence[int]]) -> None:
        """Turn on the taps that the coming step needs, alike on all ranks; `groups` as in `ActiveTaps.taps_in`."""
        self.switch.turn(self._live.taps_in(*groups))
        self.alone = len(self._live) >= sum(len(request_ids) for request_ids, _ in groups)

    def plan_step(  # noqa: C901
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        input_ids: torch.Tensor,
        graph: bool = True,
    ) -> None:
        """Tell the taps what the coming forward pass is to record and to change.

        Args:
            request_ids, num_tokens, num_computed: as in `Planner.plan`.
            input_ids: tokens of the step on the device, [>= tokens].
            graph: whether the pass may be replayed from a CUDA graph.
        """
        start, streamer = 0, None
        try:
            plan = self.planner.plan(request_ids, num_tokens, num_computed)
            if plan is not None and not self.switch.live and (plan.rows or (plan.programs >= 0).any()):
                raise WeirError("a step that was planned without taps has something for them to do")
            if plan is not None and plan.rows:
                most = min(self.ring.capacity // STREAM_SHARE, self.ring.capacity - plan.cells)
                if plan.rows - plan.cells > most and not graph:
                    streamer = self._streamer
                if streamer is None:
                    start = self.ring.take(plan.rows)
                    self.ring.claim(start, plan.rows)
        except (WeirError, ValueError) as e:
            # What cannot be served fails its own requests; the engine and everybody else go on.
            logger.exception("Weir cannot plan this step")
            plan = None
            for request_id, computed in zip(request_ids, num_computed, strict=True):
                steering = self.planner.steering.get(request_id)
                if steering is not None:
                    self.planner.steering_planner.leftovers.add(steering.keyed, int(computed))
                live = self.planner.reading.get(request_id) or steering
                if live is not None:
                    self.drain.fail(live.reply, request_id, str(e))
        self._step = self.switch.launch = None
        if plan is None:
            self._writer.silence()
            return
        for reply, request_id, reason in plan.failures:
            logger.error("Weir cannot go on serving request %s: %s", request_id, reason)
            self._failures.setdefault(reply, {})[request_id] = reason
        self._tables.flush()
        profiles = self.planner.profiles
        if profiles.changed:
            used = profiles.used
            self.tensors.ranks[:used].copy_(upload(profiles.ranks[:used].copy(), self.tensors.ranks.device))
            profiles.changed = False
        listed = None
        if not graph and self.model_info.device.type == "cuda":
            listed = upload(plan.listed, self.model_info.device)
        self.switch.launch = None if listed is None else functools.partial(_launch_listed, listed)
        laid = plan
        if streamer is not None:
            streamer.begin(plan, profiles.columns_of, listed)
            self.switch.launch = streamer.tap
            start, laid = streamer.cells, plan.in_lanes(streamer.stride, streamer.cells)
        self._step = start, plan
        self._writer.write(laid, start if streamer is None else 0, input_ids)
        self._folder.seed(plan.folds, self._step[0])

    def end_step(self) -> None:
        """The forward pass has been issued: send its rows, and word of what was steered, on."""
        self.switch.turn(0)  # what is called between steps (by users, through `apply_model`) belongs to no request
        step, self._step = self._step, None
        if step is None and not self.row_seqs.layout_updates:
            return
        parcel = StepNotice(no_wait, failures=self._failures)
        self._failures = {}
        if step is not None:
            start, plan = step
            self._folder.settle(plan.folds, start)
            launch, self.switch.launch = self.switch.launch, None
            if self._streamer is not None and launch == self._streamer.tap:
                parcel.arrived = self._streamer.end(plan)
            elif plan.rows:
                pack = functools.partial(self._treater.pack, plan, start, self._codecs)
                parcel.arrived = self._outlet.ship(plan, start, lambda: pack(True), lambda: pack(False))
            parcel.marks, parcel.steered = plan.marks, plan.steered
        parcel.spill = self.arena.pressure > SPILL
        if parcel.spill:
            self.row_seqs.retire_all()
        parcel.layout_updates = self.row_seqs.take_layout_updates()
        for layout_updates in parcel.layout_updates.values():
            self._folder.forget(layout_updates.closed)
        self.drain.send(parcel)

    def close(self) -> None:
        """Send what is under way, then let go of threads, sockets and pinned memory; nothing is served after it."""
        self.drain.close()
        self.link.close()
        self.host.close()

    def silence(self) -> None:
        """The coming forward pass is a dummy: nothing is recorded or changed."""
        self._step = None
        self.switch.turn(0)
        self._writer.silence()

    def report(self) -> dict[str, Any]:
        """What this worker serves, for the caller's process."""
        return {
            "ok": True,
            "runner": self.model_info.runner,
            "taps": list(self.taps),
            "sites": self._verdicts(),
            "num_layers": self.sites.num_layers,
            "d_model": self.model_info.d_model,
            "dtype": str(self.model_info.dtype).removeprefix("torch."),
            "ring_rows": self._step_rows,
        }

    def _verdicts(self) -> list[tuple[str, int, str]]:
        """(hook point, layer, why it is refused or "") of the sites of this worker's blocks."""
        taps = set(self.taps)
        untapped = "it is not tapped by this engine; start it with 'hooks' / 'layers' settings that include it"
        found = [(*s, "" if tap_of(s) in taps else untapped) for s in self.sites.anchors]
        return found + [(*s, why) for s, why in self.sites.refused.items()]

    def usage(self) -> dict[str, int]:
        """What is held right now; all zero when no request is live."""
        live = self.planner.reading.keys() | self.planner.steering.keys()
        return {"requests": len(live), "host_rows": self.arena.used, **self.table.usage()}


def _launch_listed(listed: torch.Tensor, *arguments: Any) -> None:
    from vllm_weir.worker.tap.triton_kernel import launch

    launch(*arguments, listed=listed)


def _salt(wire: dict) -> str:
    """See `RowStore.salt`."""
    return wire.get("salt", "")
