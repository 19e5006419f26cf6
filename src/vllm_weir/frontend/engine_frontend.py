"""The engine frontend, one per engine in the caller's process: admits requests, hands rows to their outputs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vllm_weir.config.settings import Settings
from vllm_weir.consumers.base import EngineInfo
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import AdmittedRequest, admit
from vllm_weir.frontend.admission.cache import LONGEST_KNOWN, MOST_KNOWN, admission_key
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import engine_form
from vllm_weir.frontend.admission.inline_vectors import InlineVectors
from vllm_weir.frontend.admission.reachable import UNKNOWN, Vocabulary, check_reached, tokens_of
from vllm_weir.frontend.admission.vector_registry import RegistryBackend, RegistryContents, VectorRegistry
from vllm_weir.frontend.outputs.preslicer import kind_ahead
from vllm_weir.frontend.outputs.prompt_slicer import ends_with_the_prompt
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.pacing import Pacing
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.receiver import Receiver
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.sinks.manager import SinkManager
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.request import WIRE_KEY, selected
from vllm_weir.schema.table_sizes import TableSizes
from vllm_weir.util.lru import LruCache

NO_CORE = "it was not loaded there; the log says why"


class RequestObserver(Protocol):
    """Is told what becomes of requests that capture or are steered."""

    def admitted(self) -> None:
        """One has entered the engine."""

    def refused(self) -> None:
        """One has not."""

    def failed(self) -> None:
        """One's rows were lost, or it was not steered as asked."""

    def finished(self, view: OutputView) -> None:
        """A sequence has finished; called beside the event loop."""


class EngineFrontend:
    """Admission and delivery for one engine.

    Args:
        settings: the engine's settings.
        chunked: whether the engine splits long prompts.
        host: see `Receiver`.
        refusal: why no request with Weir's keys can be served; None if they can.
        model: the engine's model, as sinks are told.
        hold: see `Tracker`.
        vocabulary: the tokens that its requests can meet.
        max_model_len: most tokens of a prompt and what is generated, together; None if that is not known.
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
    ) -> None:
        self.settings = settings
        self.refusal = refusal
        self.store = RowStore()
        self.pacing = Pacing()
        self.registry = VectorRegistry()
        self.source: RegistryBackend | None = None
        """Where names and the interventions of every request come from, if other processes change them too."""
        self.observer: RequestObserver | None = None
        self.always: tuple[Intervention, ...] = ()
        self.capabilities: EngineCapabilities | None = None
        self.manager = SinkManager(settings.sinks, settings.marked_bytes, settings.marked_seconds, settings.timeout)
        self.model, self._hold = model, hold
        self._most_rows: int | None = None
        self._vocabulary, self._max_model_len = vocabulary, max_model_len
        self._chunked = chunked
        self._host = host
        self._receiver: Receiver | None = None
        self._along = InlineVectors(settings.vector_bytes)
        self._known: LruCache[AdmittedRequest] = LruCache(MOST_KNOWN, LONGEST_KNOWN)
        self._sizes: TableSizes | None = None
        self._contents: RegistryContents | None = None
        _frontends.add(self)

    def learn(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' reports; a failed one becomes the refusal of every request with keys."""
        try:
            capabilities = EngineCapabilities.merge(reports)
            self.manager.open(EngineInfo(self.model, capabilities.num_layers, capabilities.d_model, capabilities.dtype))
            self.capabilities, self._sizes = capabilities, self.settings.table_sizes(capabilities.d_model)
        except WeirError as e:
            self.refusal = str(e)

    def serve(self, most_rows: int) -> None:
        """Requests come from clients of a server: one sequence may have at most so many rows returned."""
        self._most_rows = most_rows

    @property
    def served(self) -> bool:
        """Whether requests come from clients of a server."""
        return self._most_rows is not None

    @property
    def universal(self) -> bool:
        """Whether requests without Weir's keys, too, are steered or have rows for sinks."""
        self.refresh()
        return bool(self.always or self.manager.everyone)

    def refresh(self) -> None:
        """Take over what other processes have changed since."""
        if self.source is None or (contents := self.source.read()) is self._contents:
            return
        self._contents = contents
        self.registry.load(contents)
        self._always(contents.always)

    def _always(self, interventions: Sequence[Intervention]) -> None:
        self.always = tuple(interventions)
        self._known.clear()

    def require_capabilities(self) -> EngineCapabilities:
        """What the engine serves; raises WeirError if this engine cannot serve Weir's keys."""
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
    ) -> tuple[Tracker, dict[str, Any] | None]:
        """Check one sequence's request; returns its tracker and the wire form for the engine, or raises WeirError.

        `streams`: whether it has outputs before the last. `has_embeddings`: as for `admit`.
        """
        capabilities = self.require_capabilities()
        self.refresh()
        admitted = self._admitted(extra_args, prompt_ids is not None, has_embeddings)
        generated = tokens_of(prompt_len, max_tokens, self._max_model_len)
        check_reached(admitted.asked, prompt_len, generated, max_tokens)
        max_tokens = generated
        if self._most_rows is not None:
            _check_rows(admitted, prompt_len, max_tokens, self._most_rows)
        for rows in admitted.by_position:
            rows.check(prompt_len)
        self.manager.prepare(admitted.parts, request_id)
        if self._receiver is None:
            self._receiver = Receiver(self.store, self._host)
        reply, sizes = self._receiver.reply, self._sizes or self.settings.table_sizes(capabilities.d_model)
        wire = engine_form(admitted, reply, prompt_ids, prompt_len, max_tokens, capabilities, self._chunked, sizes)
        if wire is not None:
            wire["core"] = NO_CORE
            if wire["needs"] is not None and self.store.salt:
                wire["salt"] = self.store.salt
            if admitted.rows and (along := self._along.of(admitted)):
                wire["rows"] = along
        pending = PendingSequence(
            request_id, admitted, [-1] * prompt_len if prompt_ids is None else prompt_ids, self.store
        )
        self.store.open(pending)
        if prompt_ids is not None and ends_with_the_prompt(pending.memory, prompt_len):
            self.store.early.add(pending, capabilities.d_model)
        elif not streams and kind_ahead(pending.memory):
            pending.foreseen = prompt_len + max_tokens - 1
        first = wire["first"] if wire is not None else None
        asked = carries_keys(extra_args)
        return Tracker(
            pending, first, capabilities.d_model, self.settings.timeout, self.manager, asked, self._hold
        ), wire

    def _admitted(
        self, extra_args: Mapping[str, Any], has_token_ids: bool, has_embeddings: bool = False
    ) -> AdmittedRequest:
        """As `admit`; remembered, since thousands of requests ask for the same."""
        same = admission_key(extra_args, has_token_ids, self.registry.version, has_embeddings)
        if same is not None and (known := self._known.get(same.key)) is not None:
            return known
        admitted = admit(
            extra_args,
            self.require_capabilities(),
            has_token_ids,
            self.registry.find,
            self.always,
            self.manager.everyone,
            self.manager.definitions,
            self.registry.module,
            self._vocabulary,
            has_embeddings,
        )
        if same is not None and same.plain:
            self._known.put(same.key, admitted, same.size)
        return admitted

    def set_always(self, interventions: Sequence[Intervention]) -> None:
        """Interventions for every request admitted from now on; checked against the engine, or WeirError."""
        self._always(self.settled(interventions, everyone=True))

    def settled(
        self, interventions: Sequence[Intervention], registry: VectorRegistry | None = None, everyone: bool = False
    ) -> tuple[Intervention, ...]:
        """These, found to be possible in this engine (or WeirError), with names replaced by what they mean now.

        `everyone`: whether every request undergoes them, whatever its prompt.
        """
        capabilities, find = self.require_capabilities(), (registry or self.registry).find
        admitted = admit({}, capabilities, True, find, interventions, vocabulary=self._vocabulary)
        for rows in admitted.by_position:
            if everyone:
                rows.check_everyone()
            else:
                rows.check()
        engine_form(
            admitted, "", None, 1, 1, capabilities, self._chunked, self.settings.table_sizes(capabilities.d_model)
        )
        return tuple(i.with_arrays(find) for i in interventions)

    def close(self) -> None:
        """Give the sinks what is queued, and stop receiving."""
        self.manager.close()
        if self._receiver is not None:
            self._receiver.close()


_frontends: weakref.WeakSet[EngineFrontend] = weakref.WeakSet()


def frontends() -> list[EngineFrontend]:
    """Those of all live engines of this process."""
    return list(_frontends)


def _check_rows(admitted: AdmittedRequest, prompt_len: int, max_tokens: int, most: int) -> None:
    """Raise WeirError if what comes back on the output can be more than `most` rows."""
    spec = admitted.parts[0].spec
    if not spec.site_requests or (spec.postprocess is not None and spec.postprocess.reduce is not None):
        return
    if sum(len(sites) for sites, _ in spec.by_positions) * (prompt_len + max_tokens - 1) <= most:
        return
    tokens, rows = np.full(prompt_len + max_tokens - 1, -1), 0
    for sites, selectors in spec.by_positions:
        any_token = any(s.needs_token_ids for s in selectors)
        rows += len(sites) * (len(tokens) if any_token else len(selected(selectors, prompt_len, tokens)))
    if rows > most:
        raise WeirError(
            f"up to {rows} rows would come back, the server allows {most} (WEIR_SERVE_ROWS); "
            "ask for fewer blocks or positions, reduce them, name a sink, or lower max_tokens",
            "capture",
        )
