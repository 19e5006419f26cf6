"""The desk: one per engine in the caller's process. Admits requests and hands their rows to their outputs."""

from __future__ import annotations

import marshal
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_weir.consumers.base import EngineInfo, Finished
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admit import Admitted, admit, carries_keys, engine_form
from vllm_weir.frontend.ahead import kind_ahead
from vllm_weir.frontend.along import Along
from vllm_weir.frontend.early import ends_with_the_prompt
from vllm_weir.frontend.facts import EngineFacts
from vllm_weir.frontend.inbox import Inbox
from vllm_weir.frontend.parts import Part
from vllm_weir.frontend.pending import Pending
from vllm_weir.frontend.reachable import UNKNOWN, Vocabulary, check_reached, tokens_of
from vllm_weir.frontend.shelf import Contents, Shelf, Source
from vllm_weir.frontend.sinks.board import Board
from vllm_weir.frontend.sinks.ticket import Ticket
from vllm_weir.frontend.store import Store
from vllm_weir.frontend.tokens import Tokens
from vllm_weir.frontend.turns import Turns
from vllm_weir.frontend.view import View
from vllm_weir.memo import Memo
from vllm_weir.settings import Settings
from vllm_weir.spec.interventions import Intervention
from vllm_weir.spec.lens import LENS_KEYS
from vllm_weir.spec.request import ATOMS, WIRE_KEY, selected
from vllm_weir.spec.sizes import Sizes
from vllm_weir.spec.vectors import vector_of

MOST_KNOWN, LONGEST_KNOWN = 32 << 20, 1 << 20
"""Bytes of all the wishes whose admission is remembered, and of one."""


class Tracker:
    """Follows one sequence's outputs; while anything refers to it or its views, its rows are kept.

    Args:
        first: where a prefix-cache hit has to end.
        board: the engine's sinks.
        asked: whether the request itself asked for anything; others only have rows for sinks.
        hold: whether whoever asks for views may be held up by sinks without room.
    """

    def __init__(
        self,
        pending: Pending,
        first: int | None,
        d_model: int,
        timeout: float,
        board: Board | None = None,
        asked: bool = True,
        hold: bool = False,
    ) -> None:
        self.pending = pending
        self._first = first
        self._d_model = d_model
        self._timeout = timeout
        self._board, self._asked, self._hold = board, asked, hold
        self._caller, self._index = pending.request_id, 0
        self._seen = 0

    def name(self, request_id: str, index: int) -> None:
        """The id by which the caller knows the request, and which of its sequences this is."""
        self._caller, self._index = request_id, index
        if self._board is not None and any(part.keep == "marked" for part in self.pending.admitted.parts):
            marks = self._board.marks
            marks.join(self.pending.request_id, request_id)
            weakref.finalize(self, marks.leave, self.pending.request_id).atexit = False

    def view(self, generated: Sequence[int], delta: bool, reason: str | None, cached_tokens: int) -> View:
        """The view for an output. `generated`: a list to which tokens may be appended later; `delta`: only rows that no
        earlier output held; `reason`: why it finished."""
        memory, *others = self.pending.admitted.parts
        view = View(
            pending=self.pending,
            part=memory,
            tokens=Tokens(self.pending.prompt, generated),
            start=self._seen if delta else 0,
            finished=reason is not None,
            aborted=reason in ("abort", "error"),
            cached_tokens=cached_tokens,
            hit_limit=self._first,
            d_model=self._d_model,
            timeout=self._timeout,
            asked=self._asked,
        )
        self._seen = view.end
        if self._board is not None and others and reason is not None and not view.aborted:
            view.tickets = self._deliver(self._board, view, others, reason)
        return view

    def _deliver(self, board: Board, view: View, parts: Sequence[Part], reason: str) -> list[Ticket]:
        request = Finished(
            request_id=self._caller,
            index=self._index,
            name=self.pending.request_id,
            prompt_tokens=view.tokens.prompt_len,
            generated_tokens=view.tokens.generated,
            finish_reason=reason,
        )
        views = [replace(view, part=part, start=0) for part in parts]
        self.pending.claim(len(views) + bool(view.part.spec.wishes))
        return board.deliver(self.pending.request_id, views, request, self.pending.unclaim, self._hold)


class Observer(Protocol):
    """Is told what becomes of requests that capture or are steered."""

    def admitted(self) -> None:
        """One has entered the engine."""

    def refused(self) -> None:
        """One has not."""

    def failed(self) -> None:
        """One's rows were lost, or it was not steered as asked."""

    def finished(self, view: View) -> None:
        """A sequence has finished; called beside the event loop."""


class Desk:
    """Admission and delivery for one engine.

    Args:
        settings: the engine's settings.
        chunked: whether the engine splits long prompts.
        host: see `Inbox`.
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
        self.store = Store()
        self.turns = Turns()
        self.shelf = Shelf()
        self.source: Source | None = None
        """Where names and the interventions of every request come from, if other processes change them too."""
        self.observer: Observer | None = None
        self.always: tuple[Intervention, ...] = ()
        self.facts: EngineFacts | None = None
        self.board = Board(settings.sinks, settings.marked_bytes, settings.marked_seconds, settings.timeout)
        self.model, self._hold = model, hold
        self._most_rows: int | None = None
        self._vocabulary, self._max_model_len = vocabulary, max_model_len
        self._chunked = chunked
        self._host = host
        self._inbox: Inbox | None = None
        self._along = Along(settings.vector_bytes)
        self._known: Memo[Admitted] = Memo(MOST_KNOWN, LONGEST_KNOWN)
        self._sizes: Sizes | None = None
        self._contents: Contents | None = None
        _desks.add(self)

    def learn(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' reports; a failed one becomes the refusal of every request with keys."""
        try:
            facts = EngineFacts.merge(reports)
            self.board.open(EngineInfo(self.model, facts.num_layers, facts.d_model, facts.dtype))
            self.facts, self._sizes = facts, self.settings.table_sizes(facts.d_model)
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
        return bool(self.always or self.board.everyone)

    def refresh(self) -> None:
        """Take over what other processes have changed since."""
        if self.source is None or (contents := self.source.read()) is self._contents:
            return
        self._contents = contents
        self.shelf.load(contents)
        self._always(contents.always)

    def _always(self, interventions: Sequence[Intervention]) -> None:
        self.always = tuple(interventions)
        self._known.clear()

    def require_facts(self) -> EngineFacts:
        """The engine's facts; raises WeirError if this engine cannot serve Weir's keys."""
        if self.refusal is not None:
            raise WeirError(self.refusal, WIRE_KEY)
        if self.facts is None:
            why = "the workers have not reported: `await weir.sites_async(engine)` first, or see `weir doctor`"
            raise WeirError(why, WIRE_KEY)
        return self.facts

    def admit(
        self,
        request_id: str,
        extra_args: Mapping[str, Any],
        prompt_ids: Sequence[int] | None,
        prompt_len: int,
        max_tokens: int,
        streams: bool = False,
    ) -> tuple[Tracker, dict[str, Any] | None]:
        """Check one sequence's request; returns its tracker and the wire form for the engine, or raises WeirError.

        `streams`: whether it has outputs before the last.
        """
        facts = self.require_facts()
        self.refresh()
        admitted = self._admitted(extra_args, prompt_ids is not None)
        generated = tokens_of(prompt_len, max_tokens, self._max_model_len)
        check_reached(admitted.asked, prompt_len, generated, max_tokens)
        max_tokens = generated
        if self._most_rows is not None:
            _check_rows(admitted, prompt_len, max_tokens, self._most_rows)
        for move in admitted.effective:
            move.check_rows(prompt_len, prompt_len + max_tokens - 1)
        self.board.prepare(admitted.parts, request_id)
        if self._inbox is None:
            self._inbox = Inbox(self.store, self._host)
        reply, sizes = self._inbox.reply, self._sizes or self.settings.table_sizes(facts.d_model)
        wire = engine_form(admitted, reply, prompt_ids, prompt_len, max_tokens, facts, self._chunked, sizes)
        if wire is not None:
            if wire["needs"] is not None and self.store.salt:
                wire["salt"] = self.store.salt
            if admitted.rows and (along := self._along.of(admitted)):
                wire["rows"] = along
        pending = Pending(request_id, admitted, [-1] * prompt_len if prompt_ids is None else prompt_ids, self.store)
        self.store.open(pending)
        if prompt_ids is not None and ends_with_the_prompt(pending.memory, prompt_len):
            self.store.early.add(pending, facts.d_model)
        elif not streams and kind_ahead(pending.memory):
            pending.foreseen = prompt_len + max_tokens - 1
        first = wire["first"] if wire is not None else None
        asked = carries_keys(extra_args)
        return Tracker(pending, first, facts.d_model, self.settings.timeout, self.board, asked, self._hold), wire

    def _admitted(self, extra_args: Mapping[str, Any], has_token_ids: bool) -> Admitted:
        """As `admit`; remembered, since thousands of requests ask for the same."""
        same = _same_wish(extra_args, has_token_ids, self.shelf.version)
        if same is not None and (known := self._known.get(same.key)) is not None:
            return known
        admitted = admit(
            extra_args,
            self.require_facts(),
            has_token_ids,
            self.shelf.find,
            self.always,
            self.board.everyone,
            self.board.definitions,
            self.shelf.module,
            self._vocabulary,
        )
        if same is not None and same.plain:
            self._known.put(same.key, admitted, same.size)
        return admitted

    def set_always(self, interventions: Sequence[Intervention]) -> None:
        """Interventions for every request admitted from now on; checked against the engine, or WeirError."""
        self._always(self.settled(interventions))

    def settled(self, interventions: Sequence[Intervention], shelf: Shelf | None = None) -> tuple[Intervention, ...]:
        """These, found to be possible in this engine (or WeirError), with names replaced by what they mean now."""
        facts, find = self.require_facts(), (shelf or self.shelf).find
        admitted = admit({}, facts, True, find, interventions, vocabulary=self._vocabulary)
        for move in admitted.effective:
            move.check_rows()
        engine_form(admitted, "", None, 1, 1, facts, self._chunked, self.settings.table_sizes(facts.d_model))
        return tuple(i.with_arrays(find) for i in interventions)

    def close(self) -> None:
        """Give the sinks what is queued, and stop receiving."""
        self.board.close()
        if self._inbox is not None:
            self._inbox.close()


_desks: weakref.WeakSet[Desk] = weakref.WeakSet()


def desks() -> list[Desk]:
    """Those of all live engines of this process."""
    return list(_desks)


def _check_rows(admitted: Admitted, prompt_len: int, max_tokens: int, most: int) -> None:
    """Raise WeirError if what comes back on the output can be more than `most` rows."""
    spec = admitted.parts[0].spec
    if not spec.wishes or (spec.treatment is not None and spec.treatment.reduce is not None):
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


class _Wish(NamedTuple):
    """What requests that ask for the same have in common: an equal `key`, about so many bytes, made of `parts`."""

    key: tuple
    size: int
    parts: Collection[Any] = ()

    @property
    def plain(self) -> bool:
        """Whether it may be remembered. One that is not has no key that a remembered one has: of an array the key holds
        the bytes alone, which stand for other numbers in another dtype, and bytes are no JSON."""
        return _plain(self.parts)


def _same_wish(extra_args: Mapping[str, Any], has_token_ids: bool, names: int = 0) -> _Wish | None:
    """The wish, whose key is equal for requests that ask for the same while names mean the same (which `names` stands
    for); None for those that cannot be compared."""
    wish = extra_args.get(WIRE_KEY)
    if not carries_keys(extra_args):
        return _Wish((has_token_ids,), 8)
    if not isinstance(wish, dict) or not _LENS.isdisjoint(extra_args):
        return None
    size = [0]
    try:
        # Version 2 writes equal values alike, and different types (1, 1.0, True; a list, a tuple) differently.
        short = {name: _shortened(part, size) for name, part in wish.items()}
        content = marshal.dumps(short, 2)
    except ValueError:
        return None  # not plain JSON; admission says what is wrong with it, if anything is
    size[0] += len(content)
    return _Wish((has_token_ids, names, content), size[0], short.values()) if size[0] <= LONGEST_KNOWN else None


_LENS = frozenset(LENS_KEYS)


def _plain(values: Collection[Any]) -> bool:
    """Whether these are JSON data all through, or stand for a vector."""
    kinds = set(map(type, values)) - _LEAVES
    if not kinds:
        return True
    return kinds <= _HOLDERS and all(
        _plain(value.values() if type(value) is dict else value) for value in values if type(value) in _HOLDERS
    )


_LEAVES = ATOMS | {type(...)}
_HOLDERS = frozenset({dict, list, tuple})


def _shortened(part: Any, size: list[int]) -> Any:
    """The same with every vector that this process wrote down replaced by its digest, which is needed anyway; `size`
    grows by about their bytes."""
    if type(part) is not list:
        return part
    return [
        {name: _digest(value, size) if type(value) is dict else value for name, value in item.items()}
        if type(item) is dict
        else item
        for item in part
    ]


def _digest(value: dict, size: list[int]) -> Any:
    text = value.get("b64")
    if type(text) is not str or (vector := vector_of(text)) is None:
        return value
    size[0] += len(text)
    return {**value, "b64": (..., vector.digest)}
