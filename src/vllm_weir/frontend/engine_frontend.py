"""`EngineFrontend`: admits an engine's requests and connects its outputs to rows."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vllm_weir.config.settings import Settings
from vllm_weir.consumers.base import EngineInfo
from vllm_weir.controllers.async_controller import AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.cache import CACHE_BYTES, MAX_KEY_BYTES, admission_key
from vllm_weir.frontend.admission.continuation import Continuation
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.frontend.admission.inline_vectors import InlineVectors
from vllm_weir.frontend.admission.probe_registry import ProbeRegistry, RegisteredProbe
from vllm_weir.frontend.admission.reachable import UNKNOWN, Vocabulary, check_reached, max_generated
from vllm_weir.frontend.admission.row_bound import check_rows
from vllm_weir.frontend.admission.sae_registry import SAERegistry
from vllm_weir.frontend.admission.speculation import check_drafts_ahead
from vllm_weir.frontend.admission.vector_registry import RegistryBackend, RegistryContents, VectorRegistry
from vllm_weir.frontend.outputs.output_holder import OutputHolder
from vllm_weir.frontend.outputs.preslicer import presliceable_kind
from vllm_weir.frontend.outputs.prompt_slicer import captures_only_prompt
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.pacing import Pacing
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.receiver import Receiver
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.sinks.manager import SinkManager
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.schema.engine_request import EngineRequest
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits
from vllm_weir.schema.features import SetFeature
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.intervention_kinds import AnyIntervention
from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.media import NO_MEDIA, Media
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.schema.request import WIRE_KEY, WIRE_VERSION
from vllm_weir.schema.sinks import SinkDefinition
from vllm_weir.schema.table_sizes import TableSizes
from vllm_weir.util.lru import LruCache


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
        settings: the engine's settings.
        chunked: whether the engine splits long prompts.
        host: see `Receiver`.
        refusal: why no request with Weir's keys can be served; None if they can.
        model: the engine's model, as sinks see it.
        hold: see `Tracker`.
        vocabulary: the engine's.
        max_model_len: most tokens of a prompt and what is generated, together; None if that is not
            known.
        traits: how the engine is configured.

    Attributes:
        capabilities: what the workers serve; None until they have reported.
        registry: vectors and modules by name.
        saes: sparse autoencoders by name.
        probes: by name.
        source: the store, shared by a server's processes, from which `refresh` loads `registry`,
            `saes`, `probes` and `always`; None if there is none.
        observer: told what becomes of requests; None unless a server has set it.
        always: interventions of every request, before its own.
        holder: holds outputs back until their tokens have scores.
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
        self.refusal, self.traits = refusal, traits
        self.store = RowStore()
        self.holder = OutputHolder(self.store, settings.timeout)
        self.pacing = Pacing()
        self.registry = VectorRegistry()
        self.saes = SAERegistry()
        self.probes = ProbeRegistry()
        self.source: RegistryBackend | None = None
        self.observer: RequestObserver | None = None
        self.always: tuple[Intervention, ...] = ()
        self.capabilities: EngineCapabilities | None = None
        self.manager = SinkManager(settings.sinks, settings.marked_bytes, settings.marked_seconds, settings.timeout)
        self.model, self._hold = model, hold
        self._max_rows: int | None = None
        self._vocabulary, self._max_model_len = vocabulary, max_model_len
        self._chunked = chunked
        self._host = host
        self._receiver: Receiver | None = None
        self._inline_vectors = InlineVectors(settings.vector_bytes)
        self._cache: LruCache[AdmittedRequest] = LruCache(CACHE_BYTES, MAX_KEY_BYTES)
        self._sizes: TableSizes | None = None
        self._contents: RegistryContents | None = None
        self._scoring: tuple[AnyProbe, ...] = ()
        """Probes of every request that controllers have declared and the engine does not know yet."""
        self._names_lock = threading.RLock()
        """Held while names are looked up or changed: controllers change them in threads of their own.

        Whoever holds it does not change `source`, whose lock is taken before it.
        """
        _frontends.add(self)

    def learn(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' reports.

        If a worker has failed, refuse every request with Weir's keys, for the worker's reason.
        """
        try:
            capabilities = EngineCapabilities.merge(reports, self.traits)
            self.manager.open(EngineInfo(self.model, capabilities.num_layers, capabilities.d_model, capabilities.dtype))
            self.capabilities, self._sizes = capabilities, self.settings.table_sizes(capabilities.d_model)
            scoring, self._scoring = self._scoring, ()
            self.add_scoring(scoring)
        except WeirError as e:
            self.refusal = str(e)

    @property
    def knows_weights(self) -> bool:
        """Whether the workers' reports hold values of weights, so that new weights need new reports."""
        return self.refusal is None and self.capabilities is not None and self.capabilities.facts.from_weights

    def learn_weights(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' reports of a model whose weights may have been replaced."""
        assert self.capabilities is not None, "the engine is known"
        with self._names_lock:
            self.capabilities = replace(self.capabilities, facts=EngineCapabilities.merge(reports).facts)
            self._cache.clear()

    def serve(self, max_rows: int) -> None:
        """Expect requests from clients of a server, with at most `max_rows` rows on an output."""
        self._max_rows = max_rows

    @property
    def served(self) -> bool:
        """Whether requests come from clients of a server."""
        return self._max_rows is not None

    @property
    def universal(self) -> bool:
        """Whether requests without Weir's keys, too, are steered or scored, or have rows for sinks."""
        self.refresh()
        return bool(self.always or self.manager.everyone or self.probes.everyone or self._scoring)

    def refresh(self) -> None:
        """Load what other processes of the server have changed."""
        if self.source is None or (contents := self.source.read()) is self._contents:
            return
        with self._names_lock:
            self._contents = contents
            self.registry.load(contents)
            self.saes.load(contents.saes)
            self.probes.load(contents.probes)
            self._replace_always(contents.always)

    def _replace_always(self, interventions: Sequence[Intervention]) -> None:
        self.always = tuple(interventions)
        self._cache.clear()

    def require_capabilities(self) -> EngineCapabilities:
        """Return what the engine serves; raise WeirError if it cannot serve Weir's keys."""
        if self.refusal is not None:
            raise WeirError(self.refusal, WIRE_KEY)
        if self.capabilities is None:
            why = "the workers have not reported: `await weir.sites_async(engine)` first, or see `weir doctor`"
            raise WeirError(why, WIRE_KEY)
        return self.capabilities

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

        Args:
            request_id: vLLM's internal id.
            extra_args: the request's; not changed.
            prompt_ids: token ids of the prompt; None if a part of it is embeddings.
            prompt_len: tokens of the prompt.
            max_tokens: as the request asks; those of a continuation included.
            streams: whether the sequence has outputs before its last.
            has_embeddings: as for the function `admit`.
            pools: whether the request generates nothing.
            continuation: what came after the prompt already; None for nothing.
            media: where the prompt has images and the like.

        Returns:
            The sequence's tracker, and what travels to the engine (None if nothing needs to).

        Raises:
            WeirError: naming the field, if the request cannot be served exactly as asked.
        """
        capabilities = self.require_capabilities()
        with self._names_lock:
            self.refresh()
            step = continuation is not None and continuation.is_step
            admitted = self._admitted(extra_args, prompt_ids is not None, has_embeddings, step, media)
        if pools and admitted.stops:
            raise WeirError("a pooling request generates nothing that could be stopped; leave it out", "stop_when")
        generated = max_generated(prompt_len, max_tokens, self._max_model_len)
        most = max_tokens if continuation is None else continuation.max_tokens
        check_reached(admitted.asked, prompt_len, max_generated(prompt_len, most, self._max_model_len), most)
        if self._max_rows is not None:
            check_rows(admitted, prompt_len, generated, capabilities.d_model, self._max_rows)
        check_drafts_ahead(admitted, prompt_len, self.traits)
        for rows in admitted.by_position:
            rows.check(prompt_len)
        self.manager.prepare(admitted.parts, request_id)
        if self._receiver is None:
            self._receiver = Receiver(self.store, self._host)
        endpoint, sizes = self._receiver.endpoint, self._sizes or self.settings.table_sizes(capabilities.d_model)
        engine_request = make_engine_request(
            admitted, endpoint, prompt_ids, prompt_len, generated, capabilities, self._chunked, sizes
        )
        if engine_request is not None:
            engine_request.prompt_len = None if continuation is None else prompt_len
            if engine_request.table_needs is not None:
                engine_request.cache_salt = self.store.salt
            if admitted.rows:
                engine_request.vectors = self._inline_vectors.of(admitted)
        pending = PendingSequence(
            request_id, admitted, [-1] * prompt_len if prompt_ids is None else prompt_ids, self.store
        )
        self.store.open(pending)
        if prompt_ids is not None and captures_only_prompt(pending.memory, prompt_len):
            self.store.prompt_slicer.add(pending, capabilities.d_model)
        elif not streams and presliceable_kind(pending.memory) and not self.traits.speculative:
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
            self.manager,
            asked,
            self._hold,
            held,
            () if continuation is None else continuation.token_ids,
        ), engine_request

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
        names = self.registry.version, self.saes.version, self.probes.version, step
        key = admission_key(extra_args, has_token_ids, names, (has_embeddings, media))
        if key is not None and (cached := self._cache.get(key.key)) is not None:
            return cached
        admitted = admit(
            extra_args,
            self.require_capabilities(),
            has_token_ids,
            self.registry.find,
            self.always,
            () if step else self.manager.everyone,
            self.manager.definitions,
            self.registry.module,
            self._vocabulary.of_request(media),
            has_embeddings,
            self.saes,
            self.probes.by_name_only() if step else self.probes,
            bool(media),
            by_client=self.served,
        )
        if not self.served and admitted.told < len(admitted.probes):
            # There are no metrics: what scores every request comes back with each.
            admitted = replace(admitted, told=len(admitted.probes))
        if key is not None and key.cacheable:
            self._cache.put(key.key, admitted, key.size)
        return admitted

    def set_always(self, interventions: Sequence[AnyIntervention]) -> None:
        """Set the interventions of every request from now on.

        Raises:
            WeirError: if the engine cannot do them.
        """
        with self._names_lock:
            self._replace_always(self.settled(interventions, everyone=True))

    def put_vector(self, name: str, vector: Any) -> str:
        """Register a vector, see `vllm_weir.api.register`."""
        with self._names_lock:
            return self.registry.put(name, vector)

    def remove_vector(self, name: str) -> None:
        """Unregister a vector; raise WeirError if there is none of the name."""
        with self._names_lock:
            self.registry.remove(name)

    def add_scoring(self, probes: Sequence[AnyProbe | str]) -> None:
        """Let probes that a controller declares score every request, once the engine is known.

        Raises:
            WeirError: if the engine cannot serve one.
        """
        for probe in probes:
            if isinstance(probe, str):
                raise WeirError(f"{probe!r} is a name; give the probe itself, which scores every request", "probes")
            if self.capabilities is None:
                self._scoring = (*self._scoring, probe)
            elif self.source is None:
                self.register_probe(probe, everyone=True)
            else:
                one = {probe.name: RegisteredProbe(probe, True)}
                self.check_probe(probe.name, self.probes.with_probes(one))
                self.source.change(functools.partial(_with_probes, one))

    def add_controller(
        self,
        name: str,
        definition: SinkDefinition,
        controller: AsyncController,
        probes: Sequence[AnyProbe | str],
        path: str,
    ) -> None:
        """Let a controller's probes score every request, and send it finished sequences.

        Args:
            name: among the sinks.
            definition: says what becomes of its queue.
            controller: not opened yet; its `actions` are set.
            probes: that it declares; `open` may set interventions that they gate.
            path: the field that set it up, for errors.

        Raises:
            WeirError: if a probe cannot be served, or the controller cannot be opened; then nothing
                changes.
        """
        self.refresh()
        names = [probe.name for probe in probes if not isinstance(probe, str)]
        before, waiting = {one: self.probes.registered.get(one) for one in names}, self._scoring
        try:
            self.add_scoring(probes)
            # Not under the lock of the names: `open` may change the shared state, whose lock is taken
            # before it.
            self.manager.add_controller(name, definition, controller, path)
            with self._names_lock:
                self._cache.clear()
        except BaseException:
            self.change_probes(before)
            self._scoring = waiting
            raise

    def remove_controller(self, name: str) -> None:
        """Remove a controller; what is queued for it is handed to it first."""
        self.manager.remove_controller(name)
        with self._names_lock:
            self._cache.clear()

    def register_probe(self, probe: AnyProbe, everyone: bool = False) -> None:
        """Register a probe under its name, replacing any other; see `vllm_weir.api.register_probe`.

        Args:
            probe: its vectors may be registered ones.
            everyone: whether it scores every request.

        Raises:
            WeirError: if the engine cannot serve it, or what gates interventions of every request.
        """
        with self._names_lock:
            if everyone and probe.positions.kind == "modality":
                raise WeirError(
                    f"not every prompt has {probe.positions.modality}; choose positions by their place, or let "
                    "requests name the probe",
                    "probe.positions",
                )
            probes = self.probes.with_probes(self.probes.registered)
            probes.put(RegisteredProbe(probe.at("probe").with_arrays(self.registry.find), everyone))
            if self.capabilities is not None and self.refusal is None:
                self.check_probe(probe.name, probes)
                self.settled(self.always, everyone=True, probes=probes)
            self.probes.put(probes.registered[probe.name])

    def check_probe(self, name: str, probes: ProbeRegistry) -> None:
        """Raise WeirError unless the engine can serve a probe of a registry."""
        capabilities, sizes = self.require_capabilities(), self._sizes
        admitted = admit(
            {WIRE_KEY: {"v": WIRE_VERSION, "probes": [name]}},
            capabilities,
            lookup=self.registry.find,
            vocabulary=self._vocabulary,
            probes=probes,
        )
        sizes = sizes or self.settings.table_sizes(capabilities.d_model)
        make_engine_request(admitted, "", None, 1, 1, capabilities, self._chunked, sizes)

    def unregister_probe(self, name: str) -> None:
        """Unregister a probe; requests admitted with it keep it.

        Raises:
            WeirError: if there is no such name, or an intervention of every request is gated by it.
        """
        self.refresh()
        self.probes.find(name, "name")
        self.change_probes({name: None})

    def change_probes(self, changes: Mapping[str, RegisteredProbe | None]) -> None:
        """Put other probes under names, in all processes of a server.

        Args:
            changes: name -> a probe that was registered before; None for none.

        Raises:
            WeirError: if an intervention of every request is gated by a probe that would go; then
                nothing changes.
        """
        dropped = [name for name, one in changes.items() if one is None]
        if not changes:
            return
        if self.source is None:
            with self._names_lock:
                for name in dropped:
                    refuse_gating(name, self.always)
                self.probes.load(_changed(self.probes.registered, changes))
        else:

            def edit(contents: RegistryContents) -> RegistryContents:
                for name in dropped:
                    refuse_gating(name, contents.always)
                return replace(contents, probes=_changed(contents.probes, changes))

            self.source.change(edit)
            self.refresh()
        self._scoring = tuple(probe for probe in self._scoring if probe.name not in dropped)

    def settled(
        self,
        interventions: Sequence[AnyIntervention],
        registry: VectorRegistry | None = None,
        everyone: bool = False,
        probes: ProbeRegistry | None = None,
    ) -> tuple[Intervention, ...]:
        """Return interventions with names replaced by what they stand for now.

        The probes that gate them keep their names: a request is gated by what is registered when it
        is admitted.

        Args:
            interventions: as they were given.
            registry: where names are looked up; default: this frontend's.
            everyone: whether every request undergoes them, whatever its prompt.
            probes: where the probes that gate them are looked up; default: this frontend's.

        Raises:
            WeirError: if the engine cannot do them.
        """
        capabilities, find = self.require_capabilities(), (registry or self.registry).find
        settled = [self.saes.resolve(one) if isinstance(one, SetFeature) else one for one in interventions]
        gating = self.probes if probes is None else probes
        admitted = admit({}, capabilities, True, find, settled, vocabulary=self._vocabulary, probes=gating)
        for rows in admitted.by_position:
            if everyone:
                rows.check_everyone()
            else:
                rows.check()
        make_engine_request(
            admitted, "", None, 1, 1, capabilities, self._chunked, self.settings.table_sizes(capabilities.d_model)
        )
        return tuple(one.with_arrays(find) for one in settled)

    def close(self) -> None:
        """Let the sinks take what is queued, and stop receiving."""
        self.manager.close()
        if self._receiver is not None:
            self._receiver.close()


_frontends: weakref.WeakSet[EngineFrontend] = weakref.WeakSet()


def frontends() -> list[EngineFrontend]:
    """Return the frontends of all live engines of this process."""
    return list(_frontends)


def _with_probes(probes: Mapping[str, RegisteredProbe], contents: RegistryContents) -> RegistryContents:
    return replace(contents, probes={**contents.probes, **probes})


def _changed(
    probes: Mapping[str, RegisteredProbe], changes: Mapping[str, RegisteredProbe | None]
) -> dict[str, RegisteredProbe]:
    return {name: one for name, one in {**probes, **changes}.items() if one is not None}


def refuse_gating(name: str, always: Sequence[Intervention]) -> None:
    """Raise WeirError if an intervention of every request is gated by the probe of this name."""
    if any(one.when is not None and one.when.probe == name for one in always):
        raise WeirError(
            f"an intervention of every request is gated by {name!r}; replace that (weir.set_global) or clear it first",
            "name",
        )
