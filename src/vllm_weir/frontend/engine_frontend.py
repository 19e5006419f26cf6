"""`EngineFrontend`: admits an engine's requests and connects its outputs to rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from vllm_weir.config.settings import Settings
from vllm_weir.consumers.base import EngineInfo
from vllm_weir.controllers.async_controller import AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.admitted import (
    AdmittedRequest,
    check_drafts_ahead,
    check_rows,
    prompt_lengths,
    warming,
)
from vllm_weir.frontend.admission.cache import CACHE_BYTES, MAX_KEY_BYTES, admission_key
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import InlineVectors
from vllm_weir.frontend.admission.reachable import NO_MEDIA, UNKNOWN, Continuation, Media, Vocabulary, max_generated
from vllm_weir.frontend.engine_names import EngineNames
from vllm_weir.frontend.known_engine import KnownEngine
from vllm_weir.frontend.outputs.held_outputs import OutputHolder
from vllm_weir.frontend.outputs.slicers import captures_only_prompt, presliceable_kind
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.pacing import Pacing
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.receiver import Receiver
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.receive.score_table import ToldValues
from vllm_weir.frontend.sinks.manager import SinkManager
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.schema.engine_spec import EngineRequest
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits
from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.schema.request import tag_in
from vllm_weir.schema.selectors import check_reached
from vllm_weir.schema.sinks import SinkDefinition
from vllm_weir.util.lru import LruCache
from vllm_weir.util.token_texts import TokenTexts


class RequestObserver(Protocol):
    """Callbacks on what becomes of requests that capture or are steered."""

    def admitted(self) -> None:
        """Count a request that has entered the engine."""

    def refused(self) -> None:
        """Count a request that was refused."""

    def failed(self) -> None:
        """Count a request whose rows were lost, or that was not steered as asked."""

    def finished(self, view: OutputView) -> None:
        """Take in a finished sequence; not called in the event loop's thread."""


class EngineFrontend:
    """Admission and delivery for one engine.

    Args:
        host: see `Receiver`.
        refusal: why no request with Weir's keys can be served; None if they can.

    Attributes:
        engine: how it is configured, and what its workers serve.
        names: what names stand for, and what holds for all requests.
        observer: told what becomes of requests; None unless a server has set it.
        largest_graph: tokens of the largest step that is replayed from a CUDA graph; 0 if none is.
        uncounted: while it holds, vLLM's metrics leave out requests that only warm the engine up.
        holder: holds outputs back until their tokens have scores.
        global_told: by request, what functions have said since some are called for every request.
    """

    def __init__(
        self,
        settings: Settings,
        chunked: bool,
        host: str | None = None,
        refusal: str | None = None,
        model: str = "",
        hold: bool = False,
        vocabulary: Vocabulary = UNKNOWN,
        max_model_len: int | None = None,
        traits: EngineTraits = PLAIN_ENGINE,
    ) -> None:
        self.settings = settings
        self.store = RowStore()
        self.global_told: dict[str, ToldValues] = {}
        self.holder = OutputHolder(self.store, settings.timeout)
        self.pacing = Pacing()
        self.observer: RequestObserver | None = None
        self.largest_graph = 0
        self.uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
        self.manager = SinkManager(settings.sinks, settings.marked_bytes, settings.marked_seconds, settings.timeout)
        self.model, self._hold = model, hold
        self._max_rows: int | None = None
        self._max_model_len = max_model_len
        self._host = host
        self._receiver: Receiver | None = None
        self._inline_vectors = InlineVectors(settings.vector_bytes)
        self._cache: LruCache[AdmittedRequest] = LruCache(CACHE_BYTES, MAX_KEY_BYTES)
        self.engine = KnownEngine(settings, chunked, refusal, vocabulary, traits)
        self._texts = TokenTexts(vocabulary.tokenizer)
        self.names = EngineNames(self.engine, self._cache.clear)
        _frontends.add(self)

    def learn(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' reports.

        If a worker has failed, refuse every request with Weir's keys, for the worker's reason.
        """
        try:
            capabilities = EngineCapabilities.merge(reports, self.engine.traits)
            self.manager.open(EngineInfo(self.model, capabilities.num_layers, capabilities.d_model, capabilities.dtype))
            self.engine.learn(capabilities)
            self.names.add_waiting()
        except WeirError as e:
            self.engine.refusal = str(e)

    def learn_weights(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' reports of a model whose weights may have been replaced."""
        with self.names.lock:
            known = self.engine.capabilities
            assert known is not None, "the engine is known"
            self.engine.capabilities = replace(known, facts=EngineCapabilities.merge(reports).facts)
            self._cache.clear()

    def serve(self, max_rows: int) -> None:
        """Expect requests from clients of a server, with at most `max_rows` rows on an output."""
        self._max_rows, self.manager.served = max_rows, True

    @property
    def served(self) -> bool:
        return self._max_rows is not None

    @property
    def universal(self) -> bool:
        """Whether requests without Weir's keys, too, are steered or scored, or have rows for sinks."""
        return self.names.universal or bool(self.manager.everyone)

    def admit(
        self,
        request_id: str,
        extra_args: Mapping[str, Any],
        prompt_ids: Sequence[int] | None,
        prompt_len: int,
        max_tokens: int,
        streams: bool = False,
        has_embeddings: bool = False,
        pools: bool = False,
        continuation: Continuation | None = None,
        media: Media = NO_MEDIA,
    ) -> tuple[Tracker, EngineRequest | None]:
        """Check one sequence's request and open its rows.

        Return its tracker, and what travels to the engine, None if nothing needs to.

        Args:
            extra_args: the request's; not changed.
            prompt_ids: token ids of the prompt; None if a part of it is embeddings.
            max_tokens: as the request asks; those of a continuation included.
            streams: whether the sequence has outputs before its last.
            has_embeddings: as for the function `admit`.
            pools: whether the request generates nothing.
            continuation: what came after the prompt already; None for nothing.
            media: where the prompt has images and the like.

        Raises:
            WeirError: naming the field, if the request cannot be served exactly as asked.
        """
        capabilities = self.engine.require_capabilities()
        with self.names.lock:
            self.names.refresh()
            step = continuation is not None and continuation.is_step
            admitted = self._admitted(extra_args, prompt_ids is not None, has_embeddings, step, media)
        admitted.parts[0].check_prompt(prompt_len)
        if pools and admitted.stops:
            raise WeirError("a pooling request generates nothing that could be stopped; leave it out", "stop_when")
        generated = max_generated(prompt_len, max_tokens, self._max_model_len)
        most = max_tokens if continuation is None else continuation.max_tokens
        check_reached(admitted.asked, prompt_len, max_generated(prompt_len, most, self._max_model_len), most)
        if self._max_rows is not None:
            check_rows(admitted, prompt_len, generated, capabilities.d_model, self._max_rows)
        check_drafts_ahead(admitted, prompt_len, self.engine.traits)
        for one in admitted.by_position:
            one.check_rows(prompt_len)
        warms = warming.get()
        self.manager.prepare(() if warms else admitted.parts, request_id)
        if self._receiver is None:
            self._receiver = Receiver(self.store, self._host)
        engine_request = self.engine.make_request(
            admitted, self._receiver.endpoint, prompt_ids, prompt_len, generated, media.longest
        )
        if engine_request is not None:
            engine_request.prompt_len = None if continuation is None else prompt_len
            if engine_request.table_needs is not None:
                engine_request.cache_salt = self.store.salt
            if self.engine.traits.media_both_ways and media:
                firsts = [move.positions.first(prompt_len, prompt_ids) for move in admitted.effective]
                firsts += [] if engine_request.replay is None else [engine_request.replay.start]
                acts_from = min((first for first in firsts if first is not None), default=None)
                engine_request.own_from = None if acts_from is None else media.changed_from(acts_from)
            if admitted.rows:
                engine_request.vectors = self._inline_vectors.of(admitted)
        pending = PendingSequence(
            request_id, admitted, [-1] * prompt_len if prompt_ids is None else prompt_ids, self.store
        )
        pending.texts, pending.tag = self._texts, tag_in(extra_args)
        self.store.open(pending)
        if self.names.global_hooks and not warms:
            self.global_told[request_id] = pending.told
        if prompt_ids is not None and captures_only_prompt(pending.memory, prompt_len):
            self.store.prompt_slicer.add(pending, capabilities.d_model)
        elif not streams and presliceable_kind(pending.memory) and not self.engine.traits.speculative:
            pending.expected_end = prompt_len + generated - 1
        first = engine_request.first_position if engine_request is not None else None
        asked = carries_keys(extra_args) or admitted.told > 0
        # In a stream, a token's score comes with the token.
        holds = admitted.stops or (streams and admitted.told)
        held = self.holder.open(pending) if holds else None
        return Tracker(
            pending,
            first,
            capabilities.d_model,
            self.settings.timeout,
            None if warms else self.manager,
            asked,
            self._hold,
            held,
            () if continuation is None else continuation.token_ids,
            warms,
        ), engine_request

    def warm_up_lengths(self, extra_args: Mapping[str, Any], max_tokens: int) -> list[int]:
        """Return how many tokens the prompts of requests that warm up have, see `prompt_lengths`.

        Raise WeirError naming the field, if the engine serves no such request.
        """
        self.engine.require_capabilities()
        with self.names.lock:
            self.names.refresh()
            admitted = self._admitted(extra_args, True)
        longest = (self._max_model_len or 1 << 20) - max_tokens
        return prompt_lengths(admitted, max_tokens, longest, self.largest_graph)

    def _admitted(
        self,
        extra_args: Mapping[str, Any],
        has_token_ids: bool,
        has_embeddings: bool = False,
        step: bool = False,
        media: Media = NO_MEDIA,
    ) -> AdmittedRequest:
        """Check and resolve a request, or return the cached result for an equal one.

        What captures and scores every request leaves a `step` of a search out.
        """
        names = self.names
        key = admission_key(extra_args, has_token_ids, (*names.version, step), (has_embeddings, media))
        if key is not None and (cached := self._cache.get(key.key)) is not None:
            return cached
        admitted = admit(
            extra_args,
            self.engine.require_capabilities(),
            has_token_ids,
            names.vectors.find,
            names.always,
            () if step else self.manager.everyone,
            self.manager.definitions,
            names.vectors.module,
            self.engine.vocabulary.of_request(media),
            has_embeddings,
            names.saes,
            names.probes.by_name_only() if step else names.probes,
            bool(media),
            by_client=self.served,
            hooks=names.hooks,
            registered=names.global_hooks,
            lenses=names.lenses,
        )
        if not self.served and admitted.told < len(admitted.probes):
            # There are no metrics: what scores every request comes back with each.
            admitted = replace(admitted, told=len(admitted.probes))
        if key is not None and key.cacheable:
            self._cache.put(key.key, admitted, key.size)
        return admitted

    def add_controller(
        self,
        name: str,
        definition: SinkDefinition,
        controller: AsyncController,
        probes: Sequence[AnyProbe | str],
        path: str,
    ) -> None:
        """Let a controller's `probes` score every request, and send it finished sequences.

        It is not opened yet; its `actions` are set. `open` may set interventions that the probes gate. Errors
        name the field `path`.

        Raises:
            WeirError: if a probe cannot be served, or the controller cannot be opened; then nothing changes.
        """
        with self.names.added_scoring(probes):
            # Not under the lock of the names: `open` may change the shared state, whose lock is taken
            # before it.
            self.manager.add_controller(name, definition, controller, path)
            with self.names.lock:
                self._cache.clear()

    def remove_controller(self, name: str) -> None:
        self.manager.remove_controller(name)
        with self.names.lock:
            self._cache.clear()

    def close(self) -> None:
        """Let the sinks take what is queued, and stop receiving."""
        self.manager.close()
        if self._receiver is not None:
            self._receiver.close()


_frontends: weakref.WeakSet[EngineFrontend] = weakref.WeakSet()


def frontends() -> list[EngineFrontend]:
    return list(_frontends)
