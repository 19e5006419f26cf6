"""Requests that join, leave and resume, and what each one holds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from vllm_weir.core.cache_keys import own_from
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import EngineRequest, EngineSpec
from vllm_weir.schema.taps import tap_of
from vllm_weir.util.h2d import NO_MEMORY
from vllm_weir.worker.parts import Parts
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys

logger = logging.getLogger(__name__)
NOTHING: Mapping[str, int] = {}


class LiveRequests:
    """Takes in the requests that capture or are steered, and lets them go."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def follow(
        self,
        new: Iterable[tuple[str, EngineRequest, int, Sequence[int] | None, int]],
        finished: Iterable[str],
        resumed: Iterable[str] = (),
        known: Mapping[str, int] = NOTHING,
    ) -> None:
        """Note which requests join, leave, and resume before the next step.

        Args:
            new: (id, what it asks of the engine, prompt length, prompt ids, positions that come
                from the prefix cache).
            finished: ids of requests that leave; unknown ones are ignored.
            resumed: ids of requests that go on after a preemption without having left.
            known: request -> its tokens, of requests that go on after a preemption, having left or not.
        """
        for request_id in finished:
            self._parts.active_taps.leave(request_id)
            self._release(request_id)
        for request_id, tokens in known.items():
            self._parts.planner.forget_from(request_id, tokens)
        self._parts.planner.resume(resumed)
        joining = [(spec, *request) for request in new if (spec := self._read(*request)) is not None]
        replaced = self._parts.module_path.replaced() if joining else ""
        for _, _, engine_request, *_ in joining:
            if engine_request.vectors:
                self._parts.vectors.add_inline(engine_request.reader_endpoint, engine_request.vectors)
        self._prefetch_vectors((engine_request.reader_endpoint, spec) for spec, _, engine_request, *_ in joining)
        for spec, request_id, engine_request, prompt_len, prompt_ids, cached in joining:
            self._parts.planner.remove(request_id)  # a resumed request joins again
            self._parts.active_taps.join(request_id, spec, prompt_len)
            try:
                if reason := engine_request.refusal:
                    raise WeirError(reason)
                if replaced:
                    raise WeirError(
                        f"{replaced} of the model was replaced after Weir put a tap there; put the tapped module back, "
                        "or start the engine again"
                    )
                self._join(request_id, spec, engine_request, prompt_len, prompt_ids)
            except (WeirError, ValueError, torch.OutOfMemoryError) as e:
                logger.exception("Weir cannot serve request %s", request_id)
                # Its taps stay on: another rank may be able to serve it, and all ranks turn on the same.
                self._release(request_id)
                keys = None
                if spec.moves or engine_request.replay is not None:
                    salt, first = engine_request.cache_salt, own_from(engine_request, spec, prompt_len)
                    keys = SteeredKeys(spec.moves, prompt_len, prompt_ids, salt, first, engine_request.replay)
                why = NO_MEMORY if isinstance(e, torch.OutOfMemoryError) else e
                reason = f"the worker could not serve the request: {why}"
                self._parts.failures.fail(engine_request.reader_endpoint, request_id, reason, keys, cached)
        self._parts.vectors.clear()

    def _read(
        self, request_id: str, engine_request: EngineRequest, _len: int, _ids: Sequence[int] | None, cached: int
    ) -> EngineSpec | None:
        """Return what a request asks, None if that cannot be read; then the request fails."""
        try:
            return EngineSpec.from_wire(engine_request.spec)
        except WeirError as e:
            logger.exception("Weir cannot read what request %s asks", request_id)
            self._release(request_id)
            reason = f"the worker could not read the request: {e}"
            self._parts.failures.fail(engine_request.reader_endpoint, request_id, reason, None, cached)
            return None

    def _release(self, request_id: str) -> None:
        """Release what a request holds, all or some of what it asked for."""
        self._parts.planner.remove(request_id)
        self._parts.codecs.release(request_id)
        self._parts.saes.release(request_id)
        self._parts.functions.release(request_id)
        self._parts.replays.release(request_id)

    def _prefetch_vectors(self, joining: Iterable[tuple[str, EngineSpec]]) -> None:
        """Fetch all missing vectors of requests (endpoint, spec) that join in one step."""
        wanted: dict[str, list[str]] = {}
        for endpoint, spec in joining:
            if self._parts.planner.columns and (absent := self._parts.codecs.absent_vectors(spec.captures.postprocess)):
                wanted.setdefault(endpoint, []).extend(absent)
            used = [i.vectors for i in spec.moves if self._parts.table.is_local(i)]
            used += [probe.vectors for probe in spec.probes if tap_of(probe.site) in self._parts.taps]
            for vectors in used:
                if missing := self._parts.table.missing_vectors(vectors):
                    wanted.setdefault(endpoint, []).extend(missing)
        self._parts.vectors.prefetch(wanted)

    def _join(
        self,
        request_id: str,
        spec: EngineSpec,
        engine_request: EngineRequest,
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
    ) -> None:
        endpoint, postprocess = engine_request.reader_endpoint, spec.captures.postprocess
        if spec.captures.site_requests and self._parts.planner.columns:
            worker_sink = ""
            if postprocess is not None and postprocess.kept:
                worker_sink = self._parts.kept_rows.endpoint(postprocess.kept)
            else:
                self._parts.buffer_server.maps(endpoint)
            codec, read_out_codec = self._parts.codecs.hold(request_id, postprocess, endpoint)
            self._parts.planner.add_capture(
                request_id,
                endpoint,
                spec.captures,
                prompt_len,
                prompt_ids,
                engine_request.max_tokens,
                codec,
                read_out_codec,
                worker_sink,
            )
        self._hold_called(request_id, spec, engine_request)
        if spec.moves or spec.probes or engine_request.replay is not None:
            fetch = functools.partial(self._parts.vectors.fetch, endpoint)
            self._parts.planner.add_steering(
                request_id,
                endpoint,
                spec.moves,
                prompt_len,
                prompt_ids,
                fetch,
                engine_request.cache_salt,
                spec.scoring,
                own_from(engine_request, spec, prompt_len),
                spec.steps,
                engine_request.replay,
            )
        self._hold_replay(request_id, engine_request)

    def _hold_replay(self, request_id: str, engine_request: EngineRequest) -> None:
        """Have routers choose what a request asks; raise WeirError if that cannot be done."""
        if engine_request.replay is not None and self._parts.switch.pinned:
            raise WeirError(
                "this engine runs every step from one set of CUDA graphs, in which routers choose themselves; start it "
                "with the environment's VLLM_USE_V2_MODEL_RUNNER=1, or with enforce_eager",
                "routing",
            )
        self._parts.replays.hold(request_id, engine_request.replay)

    def _hold_called(self, request_id: str, spec: EngineSpec, engine_request: EngineRequest) -> None:
        """Hold what is called for a request in taps; raise WeirError if that cannot be done."""
        if (spec.encoders or spec.functions) and self._parts.switch.pinned:
            raise WeirError(
                "this engine replays every step from one set of CUDA graphs, in which no row can be encoded whole or "
                "given to a function, as this request needs; start the engine with enforce_eager",
                "interventions",
            )
        if spec.early_columns and self._parts.switch.pinned:
            raise WeirError(
                "this engine replays every step from one set of CUDA graphs, in which no gate acts at the tap that its "
                "probe reads, as one of this request does; start the engine with enforce_eager, or gate a later hook "
                "point",
                "interventions",
            )
        self._parts.functions.hold(request_id, engine_request.reader_endpoint, engine_request.calls)
        for key in spec.encoders:
            self._parts.saes.hold(request_id, key)
