"""The users' functions that a worker calls for its live requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.functions import find
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import IN_GRAPHS
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util import saved
from vllm_weir.util.h2d import upload
from vllm_weir.util.lru import LruCache
from vllm_weir.worker.row_functions import MOST_COPIED, Given, RowFunction, returned_of, stacked, state_of, told_of
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap.batch import Batch
from vllm_weir.worker.tap.mapped import MappedTaps

MOST_MAPPED = 256
"""Compiled functions that are kept while no request has them."""


@dataclass
class HookContext:
    """What a function is told beside the rows.

    Attributes:
        hook: the hook point.
        layer: its block.
        positions: int64 [n], of the rows in their sequence, on their device.
        request_id: of the sequence.
        args: the hook's, tensors on the device of the rows.
        state: float32, of the hook's shape `state`, zeros at first; what is left in it is there in the next step.
        saved: whatever is put here comes back as ``out.saved``: tensors, numbers, texts, and lists and dicts of these.
    """

    hook: str
    layer: int
    positions: torch.Tensor
    request_id: str
    args: Mapping[str, Any]
    state: torch.Tensor | None
    saved: dict[str, Any]


class Part(NamedTuple):
    """The rows of one request in a call: its id, the key of its function, and which rows, int64 [k]."""

    request_id: str
    key: str
    rows: np.ndarray


@dataclass
class OwnFunction:
    """A function with the args of one request, and what it keeps.

    Attributes:
        group: of the functions that one call can serve; None for one that is called for its request alone.
        states: of each hook point, (the position after the last that has changed it, the state) after every call:
            a sequence that is computed again from some position on goes on from there.
        saved: what it has saved.
    """

    call: Call
    function: Any
    args: dict[str, Any]
    group: str | None = None
    states: dict[Site, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)

    def state_before(self, site: Site, position: int, device: torch.device) -> torch.Tensor | None:
        """Return the state with which a position begins, None if the function has none."""
        if not self.call.state:
            return None
        states = self.states.setdefault(site, [])
        while states and states[-1][0] > position:
            states.pop()
        return states[-1][1].clone() if states else torch.zeros(self.call.state, device=device)

    def run(self, request_id: str, site: Site, positions: np.ndarray, rows: torch.Tensor) -> Given:
        """Call the function for its request alone.

        Raises:
            WeirError: if it raises, or returns something else.
        """
        before = self.state_before(site, int(positions[0]), rows.device)
        at = torch.from_numpy(positions).to(rows.device)
        context = HookContext(site.hook, site.layer, at, request_id, self.args, before, self.saved)
        name = self.call.function.name
        try:
            returned = self.function(rows.clone(), context)
        except Exception as e:
            raise WeirError(told_of(name, e), "hooks") from e
        new, values = returned_of(returned, rows, name)
        if before is not None:
            self.states[site].append((int(positions[-1]) + 1, state_of(context.state, before, name)))
        return Given(new, {key: value.detach().float() for key, value in values.items()})


class WorkerFunctions:
    """The functions of live requests, and what they gave in the step that is being issued.

    Args:
        device: where their args go.
        in_graphs: calls compiled functions inside CUDA graphs.
        tells: whether this worker tells readers; one of a tensor-parallel group does.
    """

    def __init__(self, device: torch.device, in_graphs: MappedTaps, tells: bool = True) -> None:
        self._device, self._in_graphs, self._tells = device, in_graphs, tells
        self._held: dict[str, tuple[str, dict[str, OwnFunction]]] = {}
        """Request -> its reader's endpoint, and its functions by key."""
        self._told: dict[str, list[messages.Told]] = {}
        self._saved: dict[tuple[str, str], int] = {}
        """(request, name) -> hash of what its reader has."""
        self._mapped: LruCache[RowFunction] = LruCache(MOST_MAPPED)
        """Compiled functions by what their calls have in common."""
        self._failed: dict[str, set[str]] = {}
        """Request -> keys of its functions that have failed."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, endpoint: str, calls: Mapping[str, bytes]) -> None:
        """Find the functions of a request; raise WeirError if one cannot be had."""
        if calls:
            _, before = self._held.get(request_id, ("", {}))  # of one that joins again after a preemption
            self._held[request_id] = endpoint, {key: before.get(key) or self._load(one) for key, one in calls.items()}
            for key in calls.keys() - before.keys():
                if IN_GRAPHS in key:
                    own = self._held[request_id][1][key]
                    self._in_graphs.hold(request_id, key, own.call, self._mapped_of(own), own.args)

    def _load(self, wire: bytes) -> OwnFunction:
        call = msgspec.msgpack.decode(wire, type=Call)
        args = {name: self._arg(value) for name, value in call.args.items()}
        function = find(call.function)
        if not call.compiled:
            return OwnFunction(call, function, args)
        return OwnFunction(call, function, args, call.identity)

    def _mapped_of(self, own: OwnFunction) -> RowFunction:
        mapped = self._mapped.get(own.group)
        if mapped is None:
            mapped = RowFunction(own.call, own.function, own.args)
            self._mapped.put(own.group, mapped, 1)
        return mapped

    def _arg(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        dtype, shape, data = value
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(self._device)

    def group_of(self, request_id: str, key: str) -> Hashable:
        """Return what the functions have in common that `call` is given together."""
        return self._held[request_id][1][key].group or (request_id, key)

    def call(self, parts: Sequence[Part], site: Site, positions: np.ndarray, rows: torch.Tensor) -> torch.Tensor | None:
        """Call the function of a group on rows of live requests; return the new ones, None for none.

        Args:
            parts: of the requests; together they have all rows.
            site: of the rows.
            positions: int64 [n].
            rows: [n, width].

        Raises:
            WeirError: if it fails; it is not called again for these requests.
        """
        live = [part for part in parts if part.key not in self._failed.get(part.request_id, ())]
        if not live:
            return None
        if len(live) < len(parts):
            at = np.concatenate([part.rows for part in live])
            ends = np.cumsum([len(part.rows) for part in live])
            live = [
                part._replace(rows=np.arange(end - len(part.rows), end)) for part, end in zip(live, ends, strict=True)
            ]
            index = upload(at, rows.device)
            new = self._call(live, site, positions[at], rows[index])
            return None if new is None else rows.index_copy(0, index, new.to(rows.dtype))
        return self._call(live, site, positions, rows)

    def _call(
        self, parts: Sequence[Part], site: Site, positions: np.ndarray, rows: torch.Tensor
    ) -> torch.Tensor | None:
        functions = [self._held[part.request_id][1][part.key] for part in parts]
        try:
            if functions[0].group is None:
                given = functions[0].run(parts[0].request_id, site, positions, rows)
            else:
                given = self._mapped_call(parts, functions, site, positions, rows)
            told = [
                self._told_of(part.request_id, site, positions[part.rows], _of(given.values, part.rows), one.saved)
                for part, one in zip(parts, functions, strict=True)
            ]
        except WeirError:
            for part in parts:
                self._failed.setdefault(part.request_id, set()).add(part.key)
            raise
        for part, of_part in zip(parts, told, strict=True):
            if self._tells and of_part:
                self._told.setdefault(self._held[part.request_id][0], []).extend(of_part)
        return given.rows

    def _mapped_call(
        self,
        parts: Sequence[Part],
        functions: Sequence[OwnFunction],
        site: Site,
        positions: np.ndarray,
        rows: torch.Tensor,
    ) -> Given:
        """Call a compiled function, row by row of each request if it has a state."""
        mapped = self._mapped_of(functions[0])
        device, owners = rows.device, np.zeros(len(rows), np.int64)
        for k, part in enumerate(parts):
            owners[part.rows] = k
        states: list[Any] = [
            one.state_before(site, int(positions[part.rows[0]]), device)
            for part, one in zip(parts, functions, strict=True)
        ]
        if functions[0].call.state:  # the first row of each request, then the second ones
            longest = max(len(part.rows) for part in parts)
            batches = [np.array([part.rows[k] for part in parts if k < len(part.rows)]) for k in range(longest)]
        elif mapped.values_by_row * len(rows) > MOST_COPIED:
            batches = [part.rows for part in parts]
        else:
            batches = [np.arange(len(rows))]
        found: list[Given] = []
        for at in batches:
            members, index = owners[at], upload(at, device)
            these, inverse = np.unique(members, return_inverse=True)
            which = upload(inverse.reshape(-1), device)
            args = {name: stacked([functions[k].args[name] for k in these], device) for name in mapped.by_row}
            given = mapped(
                site,
                upload(positions[at], device),
                rows[index],
                {name: values[0] if len(these) == 1 else values[which] for name, values in args.items()},
                torch.stack([states[k] for k in members]) if functions[0].call.state else None,
                len(these) == 1,
            )
            found.append(given)
            for k, state in zip(members, given.states if given.states is not None else (), strict=False):
                states[k] = state
        for part, one, state in zip(parts, functions, states, strict=True):
            if state is not None:
                one.states[site].append((int(positions[part.rows[-1]]) + 1, state))
        return _joined(found, upload(np.argsort(np.concatenate(batches)), device))

    def _told_of(
        self,
        request_id: str,
        site: Site,
        positions: np.ndarray,
        values: Mapping[str, torch.Tensor],
        kept: Mapping[str, Any],
    ) -> list[messages.Told]:
        """Return what the request's reader is told of a call."""
        told, at = [], positions.astype(np.int32).tobytes()
        for name, value in values.items():
            data = value.cpu().numpy().tobytes()
            told.append(messages.Told(request_id, name, site.hook, site.layer, at, list(value.shape), data))
        for name, value in kept.items():
            data = saved.encode(value)
            if self._saved.get((request_id, name)) != (now := hash(data)):
                self._saved[request_id, name] = now
                told.append(messages.Told(request_id, name, site.hook, site.layer, None, [], data))
        return told

    def collect(self, mask: int, batch: Batch, table: ProgramTable) -> list[tuple[str, str]]:
        """Keep what was given inside the taps of a step that was issued; return requests that fail, and why."""
        for one in self._in_graphs.given(mask, batch, table) if self._tells else ():
            told = self._told_of(one.request_id, one.site, one.positions, one.values, {})
            self._told.setdefault(self._held[one.request_id][0], []).extend(told)
        failed = self._in_graphs.failed(mask)
        return [
            (request_id, failed[number])
            for request_id, (_, functions) in (self._held.items() if failed else ())
            for number in {self._in_graphs.place_of(key)[1] for key in functions} & failed.keys()
        ]

    def take(self) -> dict[str, list[messages.Told]]:
        """Return endpoint -> what its requests' functions gave, and forget it."""
        told, self._told = self._told, {}
        return told

    def release(self, request_id: str) -> None:
        """Let go of what a request holds."""
        self._failed.pop(request_id, None)
        _, functions = self._held.pop(request_id, ("", {}))
        self._in_graphs.release(request_id)
        for name in {name for one in functions.values() for name in one.saved}:
            self._saved.pop((request_id, name), None)


def _of(values: Mapping[str, torch.Tensor], rows: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the values of some rows."""
    return {name: value[upload(rows, value.device)] for name, value in values.items()}


def _joined(found: Sequence[Given], order: torch.Tensor) -> Given:
    """Return what several calls gave as one, its rows in another order."""
    rows = [one.rows for one in found if one.rows is not None]
    values = {name: torch.cat([one.values[name] for one in found])[order] for name in found[0].values}
    return Given(torch.cat(rows)[order] if rows else None, values)
