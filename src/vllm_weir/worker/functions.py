"""The users' functions that a worker calls for its live requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.functions import find
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import IN_GRAPHS
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util.h2d import upload
from vllm_weir.util.lru import LruCache
from vllm_weir.worker.own_function import HookResults, OwnFunction, Part
from vllm_weir.worker.parameters import Parameters, WholeWeight
from vllm_weir.worker.row_functions import MOST_COPIED, Given, RowFunction, stacked
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap.batch import Batch
from vllm_weir.worker.tap.mapped import MappedTaps

MOST_MAPPED = 256
"""Compiled functions that are kept while no request has them."""


class WorkerFunctions:
    """The functions of live requests, and what they gave in the step that is being issued.

    Args:
        device: where their args go.
        in_graphs: calls compiled functions inside CUDA graphs.
        tells: whether this worker tells readers; one of a tensor-parallel group does.
        anew: whether a position may be computed anew with another token, as after a draft that is rejected.
        parameters: gives the model's weights; None: there is no model.
        unpickle: whether functions may come as pickles of the caller's process.
    """

    def __init__(
        self,
        device: torch.device,
        in_graphs: MappedTaps,
        tells: bool = True,
        anew: bool = False,
        parameters: Parameters | None = None,
        unpickle: bool = False,
    ) -> None:
        self._device, self._in_graphs, self._parameters, self._unpickle = device, in_graphs, parameters, unpickle
        self._params: Mapping[str, Mapping[str, Any]] = {}
        self._held: dict[str, tuple[str, dict[str, OwnFunction]]] = {}
        """Request -> its reader's endpoint, and its functions by key."""
        self._results = HookResults(device, tells, anew)
        self._mapped: LruCache[RowFunction] = LruCache(MOST_MAPPED)
        """Compiled functions by what their calls have in common."""
        self._failed: dict[str, set[str]] = {}
        """Request -> keys of its functions that have failed."""

    def note_params(self, params: Mapping[str, Mapping[str, Any]]) -> None:
        """Note the `HookContext.params` of the requests that join in the coming step."""
        self._params = params

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, endpoint: str, calls: Mapping[str, bytes]) -> None:
        """Find the functions of a request; raise WeirError if one cannot be had."""
        if calls:
            _, before = self._held.get(request_id, ("", {}))  # of one that joins again after a preemption
            params = MappingProxyType(dict(self._params.get(request_id, {})))
            functions = {key: before.get(key) or self._load(one, params) for key, one in calls.items()}
            self._held[request_id] = endpoint, functions
            for key in calls.keys() - before.keys():
                if IN_GRAPHS in key:
                    own = functions[key]
                    self._in_graphs.hold(request_id, key, own.call, self._mapped_of(own), own.args)

    def _load(self, wire: bytes, params: Mapping[str, Any]) -> OwnFunction:
        call = msgspec.msgpack.decode(wire, type=Call)
        args = {name: self._arg(value) for name, value in call.args.items()}
        return OwnFunction(
            call, find(call.function, self._unpickle), args, call.identity if call.compiled else None, params
        )

    def _mapped_of(self, own: OwnFunction) -> RowFunction:
        mapped = self._mapped.get(own.group)
        if mapped is None:
            mapped = RowFunction(own.call, own.function, own.args)
            self._mapped.put(own.group, mapped, 1)
        return mapped

    @torch.inference_mode(False)
    def _arg(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        dtype, shape, data = value
        return upload(np.frombuffer(data, dtype).reshape(shape).copy(), self._device)

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
            return None if new is None else rows.float().index_copy(0, index, new.float())
        return self._call(live, site, positions, rows)

    def _call(
        self, parts: Sequence[Part], site: Site, positions: np.ndarray, rows: torch.Tensor
    ) -> torch.Tensor | None:
        functions = [self._held[part.request_id][1][part.key] for part in parts]
        try:
            if functions[0].group is None:
                (part,) = parts
                given = functions[0].run(
                    part.request_id, site, positions, rows, self._weight_for(part, site, positions)
                )
            else:
                given = self._mapped_call(parts, functions, site, positions, rows)
            if self._results.tells:
                self._tell(parts, functions, site, positions, given)
        except WeirError:
            for part in parts:
                self._failed.setdefault(part.request_id, set()).add(part.key)
            raise
        return given.rows

    def _weight_for(self, part: Part, site: Site, positions: np.ndarray) -> Callable[[str], WholeWeight]:
        def weight(name: str) -> WholeWeight:
            if self._parameters is None:
                raise WeirError(f"no model is there to have {name}")
            return self._parameters.get(name, f"{part.request_id} {part.key} {site} {positions[0]}")

        return weight

    def _tell(
        self, parts: Sequence[Part], functions: Sequence[OwnFunction], site: Site, positions: np.ndarray, given: Given
    ) -> None:
        """Tell the readers of requests what their functions gave, and what these have saved."""
        endpoints = [self._held[part.request_id][0] for part in parts]
        for part, one, endpoint in zip(parts, functions, endpoints, strict=True):
            self._results.add_saved(endpoint, part.request_id, site, one.saved, one.unsent)
        for name, values in given.values.items():
            self._results.add(parts, endpoints, name, site, positions, values)
        if given.spoiled is not None:
            name = functions[0].call.function.name
            self._results.add(parts, endpoints, name, site, positions, given.spoiled, flags=True)

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

    def collect(self, mask: int, batch: Batch, table: ProgramTable) -> list[tuple[str, str]]:
        """Keep what was given inside the taps of a step that was issued; return requests that fail, and why."""
        for one in self._in_graphs.given(mask, batch, table) if self._results.tells else ():
            functions = [self._held[part.request_id][1][part.key] for part in one.parts]
            self._tell(one.parts, functions, one.site, batch.positions, one.given)
        failed = self._in_graphs.failed(mask)
        return [
            (request_id, failed[number])
            for request_id, (_, functions) in (self._held.items() if failed else ())
            for number in {self._in_graphs.place_of(key)[1] for key in functions} & failed.keys()
        ]

    def take(self) -> Callable[[], dict[str, list[messages.Told]]]:
        """Return what waits for what the step's functions gave, and returns it by endpoint; forget it."""
        return self._results.take()

    def release(self, request_id: str) -> None:
        """Let go of what a request holds."""
        self._failed.pop(request_id, None)
        self._held.pop(request_id, None)
        self._in_graphs.release(request_id)


def _joined(found: Sequence[Given], order: torch.Tensor) -> Given:
    """Return what several calls gave as one, its rows in another order."""
    rows = [one.rows for one in found if one.rows is not None]
    values = {name: torch.cat([one.values[name] for one in found])[order] for name in found[0].values}
    if not rows:
        return Given(None, values)
    flags = [one.spoiled for one in found if one.spoiled is not None]
    return Given(torch.cat(rows)[order], values, torch.cat(flags)[order])
