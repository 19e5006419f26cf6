"""Compiled hooks inside CUDA graphs: everything that a call needs is on the device, where the step's plan says.

A HOOK node of such a hook has the number of its function, and the slot of its request's args among those of the
function. At a tap, round k takes every token's row to the k-th HOOK node of its chain. Each function that the mask has
there is called on the rows of all tokens of the step, and where a token's node names it, its row goes to where the
kernel reads it. A graph that captures this serves any requests with these functions. Plain tokens are computed for
nothing; the kernel does not read what is held for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import HOOK
from vllm_weir.schema.taps import NO_GRAPH, Place, places_in, site_of
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util.h2d import upload
from vllm_weir.worker.own_function import Part
from vllm_weir.worker.row_functions import Given, RowFunction
from vllm_weir.worker.steering.programs import AFTER_POST, ProgramTable
from vllm_weir.worker.steering.slots import Slots
from vllm_weir.worker.tap import cpu_kernel
from vllm_weir.worker.tap.batch import Batch

MOST_FUNCTIONS = 32
"""Functions with a number; further ones are called in steps without a graph."""
MOST_ARGS = 256
"""Requests with different args of one function at a time."""
_SPOILED = ""
"""Name of the flags of rows that a function has spoiled, among its values."""


class _Held(NamedTuple):
    """A call that requests hold: the slot of its args, and the number of its function."""

    call: Call
    slot: int
    function: int


class GivenAt(NamedTuple):
    """What a function gave at a hook point to all tokens of a step, and which requests have the function there."""

    site: Site
    parts: list[Part]
    given: Given


class _Function:
    """A function with a number: the args of live requests, and what it gave in the last step."""

    def __init__(self, mapped: RowFunction, dtype: torch.dtype, device: torch.device) -> None:
        self.mapped, self.failed = mapped, ""
        self.slots = Slots(MOST_ARGS)
        self.args = {
            name: torch.zeros(MOST_ARGS, *shape, dtype=mapped.dtype_of(name, dtype), device=device)
            for name, (_, shape) in mapped.by_row.items()
        }
        self.values: dict[Place, dict[str, torch.Tensor]] = {}
        """Place -> name -> [max tokens, ...], float32; graphs write there."""

    def release(self, key: str) -> bool:
        """Drop a user of the args under a key; return whether that was the last one, and they are forgotten."""
        unused = self.slots.release(key)
        if unused:
            self.slots.forget(key)
        if not self.slots.in_use:
            self.failed = ""  # the next request may have better luck, with memory say
        return unused

    def call(self, site: Site, positions: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> Given | None:
        """Call it with rows [tokens, width] and the slots of their args; return None if it fails, and note why."""
        try:
            return self.mapped(site, positions, rows, {name: table[slots] for name, table in self.args.items()})
        except WeirError as e:
            self.failed = e.message
            return None


class MappedTaps:
    """Calls compiled functions at taps, in steps that may be CUDA graphs.

    Args:
        sites: tap -> the hook point inside a block that it serves, or `resid_post`.
        dtype: of the rows.
    """

    def __init__(self, sites: Mapping[int, Site], max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sites, self._max_tokens, self._dtype, self._device = sites, max_tokens, dtype, device
        self._numbers: dict[str, int] = {}
        self._functions: dict[int, _Function] = {}
        self._held: dict[str, _Held] = {}
        self._keys_of: dict[str, list[str]] = {}
        """Request -> keys that it holds."""
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._at_tap: dict[int, dict[int, list[Place]]] = {}

    def number_of(self, identity: str) -> int | None:
        """Return the number of functions with this identity; None if there are too many. Alike on all ranks."""
        if identity not in self._numbers and len(self._numbers) >= MOST_FUNCTIONS:
            return None
        return self._numbers.setdefault(identity, len(self._numbers))

    def hold(self, request_id: str, key: str, call: Call, mapped: RowFunction, args: Mapping[str, Any]) -> None:
        """Hold the args of a request.

        Raises:
            WeirError: if there are too many, the function has failed, or the key stands for something else.
        """
        number = self.number_of(call.identity)
        if number is None:
            return
        function = self._functions.get(number)
        if function is None:
            function = self._functions[number] = _Function(mapped, self._dtype, self._device)
        if function.failed:
            raise WeirError(function.failed, "hooks")
        held = self._held.get(key)
        if held is not None and held.call != call:
            raise WeirError(f"another function or other args have this key of the hook {mapped.name} now", "hooks.key")
        try:
            slot, is_new = function.slots.hold(key)
        except IndexError:
            raise WeirError(f"more than {MOST_ARGS} different args of the hook {mapped.name}", "hooks") from None
        self._held[key] = _Held(call, slot, number)
        self._keys_of.setdefault(request_id, []).append(key)
        if is_new:
            for name, table in function.args.items():
                table[slot] = args[name]

    def release(self, request_id: str) -> None:
        """Let go of the args of a request."""
        for key in self._keys_of.pop(request_id, ()):
            function = self._functions[self._held[key].function]
            if function.release(key):
                del self._held[key]

    def place_of(self, key: str) -> tuple[int, int]:
        """Return the slot of a key's args and the number of its function; (0, -1) if the host calls it."""
        held = self._held.get(key)
        return (0, -1) if held is None else held[1:]

    def begin(self, batch: Batch, positions: torch.Tensor | None) -> None:
        """Note the positions of the coming step's tokens; `positions`, on the device, where drafts are verified."""
        n = len(batch.positions)
        known = upload(batch.positions, self._device) if positions is None else positions[:n]
        self._positions[:n].copy_(known)

    def _places_at(self, mask: int, tap: int) -> list[Place]:
        if mask not in self._at_tap:
            if len(self._at_tap) > 64:
                self._at_tap.clear()
            by_tap: dict[int, list[Place]] = {}
            for place in places_in(mask):
                by_tap.setdefault(place.tap, []).append(place)
            self._at_tap[mask] = by_tap
        return self._at_tap[mask].get(tap, [])

    def held(
        self,
        mask: int,
        tap: int,
        hidden: torch.Tensor,
        other: torch.Tensor | None,
        number: torch.Tensor,
        plan: torch.Tensor,
        ranks: torch.Tensor,
        ring: torch.Tensor,
        heads: torch.Tensor,
        *tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the rows that functions give for HOOK nodes at a tap; None if no function is called there.

        They are float32 [tokens, rounds, width]. The other arguments are those of a kernel's `launch`.
        """
        places = [] if mask >> NO_GRAPH & 1 else self._places_at(mask, tap)
        if not places:
            return None
        held = torch.empty(len(hidden), len(places), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for k in range(len(places)):
            rows, nodes = _rows_at(hidden, other, number, plan, heads, *tables, held, k)
            self._round(places, k, rows, nodes, tables[0], tables[1], held)
        return held

    def _round(
        self,
        places: list[Place],
        k: int,
        rows: torch.Tensor,
        nodes: torch.Tensor,
        ints: torch.Tensor,
        floats: torch.Tensor,
        held: torch.Tensor,
    ) -> None:
        """Call the functions of a tap on the rows of all tokens, and hold what they give where a node names them."""
        at = nodes.clamp(min=0)
        after = (ints[at, 4] & AFTER_POST) != 0
        numbers = torch.where(nodes >= 0, floats[at, 3], -1.0)
        new = rows.float()
        for place in places:
            function = self._functions.get(place.function)
            if function is None or function.failed:
                continue
            chosen = (numbers == place.function) & (after == place.after_post)
            slots = torch.where(chosen, floats[at, 1], 0.0).long()
            site = site_of(self._sites[place.tap], place.after_post)
            given = function.call(site, self._positions[: len(rows)], rows, slots)
            if given is None:
                continue
            if given.rows is not None:
                new = torch.where(chosen[:, None], given.rows.float(), new)
            self._keep(function, place, given, chosen)
        held[:, k] = new

    def _keep(self, function: _Function, place: Place, given: Given, chosen: torch.Tensor) -> None:
        """Write the values of a call to where the host reads them after the step."""
        kept = function.values.setdefault(place, {})
        flags = {} if given.spoiled is None else {_SPOILED: given.spoiled}
        for name, value in (given.values | flags).items():
            if name not in kept:
                kept[name] = value.new_zeros(self._max_tokens, *value.shape[1:])
            target = kept[name][: len(value)]
            target.copy_(torch.where(chosen.view(-1, *(1,) * (value.dim() - 1)), value, target))

    def failed(self, mask: int) -> dict[int, str]:
        """Return the numbers of the functions of a mask that have failed, and why."""
        found = {place.function: self._functions.get(place.function) for place in places_in(mask)}
        return {number: one.failed for number, one in found.items() if one is not None and one.failed}

    def given(self, mask: int, batch: Batch, table: ProgramTable) -> Iterator[GivenAt]:
        """Yield what the functions of a mask gave in the step that was issued; values stay on the device."""
        called = [(place, self._functions.get(place.function)) for place in places_in(mask)]
        if not called:
            return
        # Tokens of one request with the same program follow each other in `order`.
        order = np.lexsort((batch.programs, batch.owners))
        owners, programs = batch.owners[order], batch.programs[order]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1) | np.diff(programs, prepend=-2))
        rows, n = np.split(order, firsts[1:]), len(order)
        for place, function in called:
            if function is None or function.failed or not (values := function.values.get(place)):
                continue
            keys = _keys_at(table, np.unique(programs[programs >= 0]), place)
            parts = [
                Part(batch.request_ids[owner], keys[program], own)
                for owner, program, own in zip(owners[firsts].tolist(), programs[firsts].tolist(), rows, strict=True)
                if program in keys
            ]
            if parts:
                kept = {name: value[:n] for name, value in values.items()}
                given = Given(None, kept, kept.pop(_SPOILED, None))
                yield GivenAt(site_of(self._sites[place.tap], place.after_post), parts, given)


def _keys_at(table: ProgramTable, programs: np.ndarray, place: Place) -> dict[int, str]:
    """Return program -> the key with which it names the function of a place, of programs that do."""
    keys: dict[int, str] = {}
    nodes = table.heads[programs, place.tap]
    while (live := nodes >= 0).any():
        programs, nodes = programs[live], nodes[live]
        kinds, flags, following = (table.ints[nodes, column] for column in (0, 4, 3))
        here = (kinds == HOOK) & (table.floats[nodes, 3] == place.function)
        here &= ((flags & AFTER_POST) != 0) == place.after_post
        for program, node in zip(programs[here].tolist(), nodes[here].tolist(), strict=True):
            keys[program] = table.called[node].key
        programs, nodes = programs[~here], following[~here]
    return keys


def _rows_at(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if arguments[0].is_cuda:
        from vllm_weir.worker.tap.peek_kernel import rows_at_hook

        return rows_at_hook(*arguments)
    return cpu_kernel.rows_at_hook(*arguments)
