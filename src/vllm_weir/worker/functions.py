"""The users' functions that a worker calls for its live requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema import saved
from vllm_weir.schema.functions import find
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.user_hooks import Call


@dataclass
class HookContext:
    """What a function is told beside the rows.

    Attributes:
        hook: the hook point.
        layer: its block.
        positions: int64 [n], of the rows in their sequence.
        request_id: of the sequence.
        args: the hook's, tensors on the device of the rows.
        state: float32, of the hook's shape `state`, zeros at first; what is left in it is there in the next step.
        saved: whatever is put here comes back as ``out.saved``: tensors, numbers, texts, and lists and dicts of these.
    """

    hook: str
    layer: int
    positions: np.ndarray
    request_id: str
    args: Mapping[str, Any]
    state: torch.Tensor | None
    saved: dict[str, Any]


@dataclass
class OwnFunction:
    """A function with the args of one request."""

    call: Call
    function: Any
    args: dict[str, Any]
    states: dict[Site, torch.Tensor] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, request_id: str, site: Site, positions: np.ndarray, rows: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Call the function; return the new rows, None for none, and what it gave by name.

        Raises:
            WeirError: if it raises, or returns something else.
        """
        state = None
        if self.call.state:
            state = self.states.setdefault(site, torch.zeros(self.call.state, device=rows.device))
        context = HookContext(site.hook, site.layer, positions, request_id, self.args, state, self.saved)
        name = self.call.function.name
        try:
            returned = self.function(rows.clone(), context)
        except Exception as e:
            raise WeirError(f"the hook {name} raised {type(e).__name__}: {e}{_line(e)}", "hooks") from e
        if state is not None and context.state is not None:
            self.states[site] = context.state
        new, given = returned if isinstance(returned, tuple) else (returned, {})
        if new is not None and (not isinstance(new, torch.Tensor) or new.shape != rows.shape):
            got = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise WeirError(f"the hook {name} returned {got} for rows {list(rows.shape)}", "hooks")
        return new, {key: _values(key, value, len(rows), name) for key, value in given.items()}


class WorkerFunctions:
    """The functions of live requests, and what they gave in the step that is being issued.

    Args:
        device: where their args go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, tuple[str, dict[str, OwnFunction]]] = {}
        """Request -> its reader's endpoint, and its functions by key."""
        self._told: dict[str, list[messages.Told]] = {}
        self._saved: dict[tuple[str, str], int] = {}
        """(request, name) -> hash of what its reader has."""

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

    def _arg(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        dtype, shape, data = value
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(self._device)

    def call(
        self, request_id: str, key: str, site: Site, positions: np.ndarray, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Call a function of a live request on some of its rows; return the new ones, None for none.

        Raises:
            WeirError: if it fails.
        """
        endpoint, functions = self._held[request_id]
        function = functions[key]
        new, values = function(request_id, site, positions, rows)
        told = self._told.setdefault(endpoint, [])
        at = positions.astype(np.int32).tobytes()
        for name, value in values.items():
            told.append(messages.Told(request_id, name, at, list(value.shape), value.cpu().numpy().tobytes()))
        for name, value in function.saved.items():
            data = saved.encode(value)
            if self._saved.get((request_id, name)) != (now := hash(data)):
                self._saved[request_id, name] = now
                told.append(messages.Told(request_id, name, None, [], data))
        return new

    def take(self) -> dict[str, list[messages.Told]]:
        """Return endpoint -> what its requests' functions gave, and forget it."""
        told, self._told = self._told, {}
        return told

    def release(self, request_id: str) -> None:
        """Let go of what a request holds."""
        _, functions = self._held.pop(request_id, ("", {}))
        for name in {name for one in functions.values() for name in one.saved}:
            self._saved.pop((request_id, name), None)


def _values(key: str, value: Any, count: int, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
        got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise WeirError(f"the hook {name} gave {got} as {key!r}, expected a value for each of {count} rows", "hooks")
    return value.detach().float()


def _line(error: BaseException) -> str:
    """Return the line of the function that raised."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        line, trace = trace.tb_lineno, trace.tb_next
    return f" (line {line})"
