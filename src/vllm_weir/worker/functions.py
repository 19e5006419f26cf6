"""The users' functions that a worker calls for its live requests."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.functions import find
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util.saved import Unsent


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


@dataclass
class OwnFunction:
    """A function with the args of one request, and what it keeps.

    Attributes:
        states: of each hook point, (the position after the last that has changed it, the state) after every call:
            a sequence that is computed again from some position on goes on from there.
        saved: what it has saved.
        unsent: which of it the request's reader has.
    """

    call: Call
    function: Any
    args: dict[str, Any]
    states: dict[Site, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    unsent: Unsent = field(default_factory=Unsent)

    # Tensors that are made in inference mode do not count changes in place, which `unsent` asks for.
    @torch.inference_mode(False)
    @torch.no_grad()
    def run(
        self, request_id: str, site: Site, positions: np.ndarray, rows: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Call the function; return the new rows, None for none, and what it gave by name.

        Raises:
            WeirError: if it raises, or returns something else.
        """
        at = torch.from_numpy(positions).to(rows.device)
        context = HookContext(site.hook, site.layer, at, request_id, self.args, None, self.saved)
        if self.call.state:
            states = self.states.setdefault(site, [])
            while states and states[-1][0] > positions[0]:
                states.pop()
            context.state = states[-1][1].clone() if states else torch.zeros(self.call.state, device=rows.device)
        name = self.call.function.name
        try:
            returned = self.function(rows.clone(), context)
        except Exception as e:
            raise WeirError(f"the hook {name} raised {type(e).__name__}: {e} ({_where(e)})", "hooks") from e
        if self.call.state:
            if not isinstance(context.state, torch.Tensor) or context.state.shape != self.call.state:
                raise WeirError(f"the hook {name} left a state that has not the shape {list(self.call.state)}", "hooks")
            states.append((int(positions[-1]) + 1, context.state))
        new, given = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if new is not None and (not isinstance(new, torch.Tensor) or new.shape != rows.shape):
            raise WeirError(f"the hook {name} returned {_brief(new)} for rows {list(rows.shape)}", "hooks")
        if not isinstance(given, Mapping):
            raise WeirError(f"the hook {name} returned {_brief(given)} where values by name belong", "hooks")
        return new, {key: _values(key, value, len(rows), name) for key, value in given.items()}


class WorkerFunctions:
    """The functions of live requests, and what they gave in the step that is being issued.

    Args:
        device: where their args go.
        tells: whether this worker tells readers; one of a tensor-parallel group does.
    """

    def __init__(self, device: torch.device, tells: bool = True) -> None:
        self._device, self._tells = device, tells
        self._held: dict[str, tuple[str, dict[str, OwnFunction]]] = {}
        """Request -> its reader's endpoint, and its functions by key."""
        self._told: dict[str, list[messages.Told]] = {}
        self._failed: dict[str, set[str]] = {}
        """Request -> keys of its functions that have failed."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, endpoint: str, calls: Mapping[str, bytes]) -> None:
        """Find the functions of a request; raise WeirError if one cannot be had."""
        if calls:
            _, before = self._held.get(request_id, ("", {}))  # of one that joins again after a preemption
            self._held[request_id] = endpoint, {key: before.get(key) or self._load(one) for key, one in calls.items()}

    def _load(self, wire: bytes) -> OwnFunction:
        call = msgspec.msgpack.decode(wire, type=Call)
        return OwnFunction(call, find(call.function), {name: self._arg(value) for name, value in call.args.items()})

    @torch.inference_mode(False)
    def _arg(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        dtype, shape, data = value
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(self._device)

    def call(
        self, request_id: str, key: str, site: Site, positions: np.ndarray, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Call a function of a live request on some of its rows; return the new ones, None for none.

        Args:
            request_id: of the request.
            key: of the function.
            site: of the rows.
            positions: int64 [n].
            rows: [n, width].

        Raises:
            WeirError: if it fails; it is not called again.
        """
        endpoint, functions = self._held[request_id]
        if key in self._failed.get(request_id, ()):
            return None
        function = functions[key]
        try:
            new, values = function.run(request_id, site, positions, rows)
            told = self._told_of(request_id, site, positions, values, function)
        except WeirError:
            self._failed.setdefault(request_id, set()).add(key)
            raise
        if self._tells:
            self._told.setdefault(endpoint, []).extend(told)
        return new

    def _told_of(
        self,
        request_id: str,
        site: Site,
        positions: np.ndarray,
        values: Mapping[str, torch.Tensor],
        function: OwnFunction,
    ) -> list[messages.Told]:
        """Return what the request's reader is told of a call."""
        told, at = [], positions.astype(np.int32).tobytes()
        for name, value in values.items():
            data = value.cpu().numpy().tobytes()
            told.append(messages.Told(request_id, name, site.hook, site.layer, at, list(value.shape), data))
        for name, first, data in function.unsent.take(function.saved):
            told.append(messages.Told(request_id, name, site.hook, site.layer, None, [], data, first))
        return told

    def take(self) -> dict[str, list[messages.Told]]:
        """Return endpoint -> what its requests' functions gave, and forget it."""
        told, self._told = self._told, {}
        return told

    def release(self, request_id: str) -> None:
        """Let go of what a request holds."""
        self._failed.pop(request_id, None)
        self._held.pop(request_id, None)


def _values(key: str, value: Any, count: int, name: str) -> torch.Tensor:
    """Return what a function gave under a key as float32; raise WeirError unless it has an entry for each row."""
    if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
        raise WeirError(
            f"the hook {name} gave {_brief(value)} as {key!r}, not a value for each of {count} rows", "hooks"
        )
    return value.detach().float()


def _brief(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _where(error: BaseException) -> str:
    """Return the place that raised, in words."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"line {last.lineno} of {last.name}" + (f": {last.line}" if last.line else "")
