"""The users' functions that a worker calls for its live requests."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.functions import find
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util import saved
from vllm_weir.worker.parameters import Parameters, WholeWeight

_WEIR = str(Path(__file__).parents[1])


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
        heads: which heads the rows [n, heads, d_head] are, in the order given to the hook; None for whole rows.
        neurons: likewise which neurons the rows [n, neurons] are.
        params: the sequence's own sampling parameters (of a pooling request: pooling parameters) as vLLM runs it, by
            name, read-only: ``ctx.params["temperature"]``, and what a caller puts into ``extra_args``.
    """

    hook: str
    layer: int
    positions: torch.Tensor
    request_id: str
    args: Mapping[str, Any]
    state: torch.Tensor | None
    saved: dict[str, Any]
    heads: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    _weight: Callable[[str], torch.Tensor] | None = field(default=None, repr=False)

    def parameter(self, name: str) -> torch.Tensor:
        """Return a weight of the model, whole and on its device; it may be the model's own memory: do not write to it.

        Under tensor parallelism the ranks put it together, once for a request, which goes on with what it got then;
        so the function has to ask for it on all ranks at the same rows.

        Args:
            name: as vLLM calls it, ``"lm_head.weight"``; of matrices that vLLM puts together (``qkv_proj``), each
                also has its name in the checkpoint (``"model.layers.3.self_attn.k_proj.weight"``).

        Returns:
            The weight in the model's dtype, for linear modules [out, in]; of an embedding [vocabulary, d_model].

        Raises:
            WeirError: for an unknown name, saying near ones; for one of another stage of a pipeline; and for a
                quantized weight, or one in the form of some kernel.
        """
        if self._weight is None:
            raise WeirError("this function was not called by a worker, which alone has weights")
        return self._weight(name)


@dataclass
class OwnFunction:
    """A function with the args of one request, and what it keeps.

    Attributes:
        states: of each hook point, (the position after the last that has changed it, the state) after every call:
            a sequence that is computed again from some position on goes on from there.
        saved: what it has saved.
        picked: which heads or neurons it is given, on the device; None: whole rows.
        params: see `HookContext`.
        weights: those that it asked for and that were put together, by name.
    """

    call: Call
    function: Any
    args: dict[str, Any]
    picked: torch.Tensor | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    states: dict[Site, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, WholeWeight] = field(default_factory=dict)

    def run(
        self,
        request_id: str,
        site: Site,
        positions: np.ndarray,
        rows: torch.Tensor,
        weight: Callable[[str], WholeWeight],
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Call the function; return the new rows, None for none, and what it gave by name.

        Raises:
            WeirError: if it raises, or returns something else.
        """
        at = torch.from_numpy(positions).to(rows.device)
        context = HookContext(
            site.hook,
            site.layer,
            at,
            request_id,
            self.args,
            None,
            self.saved,
            self.call.picked if self.call.d_head else None,
            None if self.call.d_head else self.call.picked,
            self.params,
            lambda name: self._weight(name, weight),
        )
        if self.call.state:
            states = self.states.setdefault(site, [])
            while states and states[-1][0] > positions[0]:
                states.pop()
            context.state = states[-1][1].clone() if states else torch.zeros(self.call.state, device=rows.device)
        name, own = self.call.function.name, self._part(rows)
        try:
            returned = self.function(own.clone(), context)
        except Exception as e:
            raise WeirError(f"the hook {name} raised {type(e).__name__}: {e} ({_where(e)})", "hooks") from e
        if self.call.state:
            if not isinstance(context.state, torch.Tensor) or context.state.shape != self.call.state:
                raise WeirError(f"the hook {name} left a state that has not the shape {list(self.call.state)}", "hooks")
            states.append((int(positions[-1]) + 1, context.state))
        new, given = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if new is not None and not _is_like(new, own):
            raise WeirError(
                f"the hook {name} returned {_brief(new)} for rows {list(own.shape)} on {own.device}", "hooks"
            )
        if not isinstance(given, Mapping):
            raise WeirError(f"the hook {name} returned {_brief(given)} where values by name belong", "hooks")
        values = {key: _values(key, value, len(rows), name) for key, value in given.items()}
        return None if new is None else self._whole(rows, new), values

    def _weight(self, name: str, weight: Callable[[str], WholeWeight]) -> torch.Tensor:
        found = self.weights.get(name) or weight(name)
        if found.marks:
            self.weights[name] = found
        return found.tensor

    def _part(self, rows: torch.Tensor) -> torch.Tensor:
        """Return of rows [n, width] what the function is given."""
        if self.picked is None:
            return rows
        return self._by_head(rows).index_select(1, self.picked)

    def _whole(self, rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return rows with what the function has returned for its part of them."""
        if self.picked is None:
            return part
        new = rows.to(torch.float32, copy=True)
        self._by_head(new).index_copy_(1, self.picked, part.float())
        return new

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(1, (-1, self.call.d_head)) if self.call.d_head else rows


class _Sending(NamedTuple):
    """What a reader is told, whose data are on their way to the host; `flags` are rows that are not finite now."""

    told: messages.Told
    data: torch.Tensor | None = None
    flags: bool = False


class WorkerFunctions:
    """The functions of live requests, and what they gave in the step that is being issued.

    Args:
        device: where their args go.
        tells: whether this worker tells readers; one of a tensor-parallel group does.
        anew: whether a position may be computed anew with another token, as after a draft that is rejected.
        parameters: gives the model's weights; None: there is no model.

    Attributes:
        params: see `HookContext`, by request, of those that join in the coming step.
    """

    def __init__(
        self, device: torch.device, tells: bool = True, anew: bool = False, parameters: Parameters | None = None
    ) -> None:
        self._device, self._tells, self._anew, self._parameters = device, tells, anew, parameters
        self.params: Mapping[str, Mapping[str, Any]] = {}
        self._held: dict[str, tuple[str, dict[str, OwnFunction]]] = {}
        """Request -> its reader's endpoint, and its functions by key."""
        self._told: dict[str, list[_Sending]] = {}
        self._saved: dict[tuple[str, str], int] = {}
        """(request, name) -> hash of what its reader has."""
        self._failed: dict[str, set[str]] = {}
        """Request -> keys of its functions that have failed."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, endpoint: str, calls: Mapping[str, bytes]) -> None:
        """Find the functions of a request; raise WeirError if one cannot be had."""
        if calls:
            _, before = self._held.get(request_id, ("", {}))  # of one that joins again after a preemption
            params = MappingProxyType(dict(self.params.get(request_id, {})))
            functions = {key: before.get(key) or self._load(one, params) for key, one in calls.items()}
            self._held[request_id] = endpoint, functions

    def _load(self, wire: bytes, params: Mapping[str, Any]) -> OwnFunction:
        call = msgspec.msgpack.decode(wire, type=Call)
        args = {name: self._arg(value) for name, value in call.args.items()}
        picked = None if call.picked is None else torch.tensor(call.picked, device=self._device)
        return OwnFunction(call, find(call.function), args, picked, params)

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

        def weight(name: str) -> WholeWeight:
            if self._parameters is None:
                raise WeirError(f"no model is there to have {name}")
            return self._parameters.get(name, f"{request_id} {key} {site} {positions[0]}")

        try:
            new, values = function.run(request_id, site, positions, rows, weight)
            told = self._told_of(request_id, site, positions, values, function.saved)
            if new is not None and self._tells:
                spoiled = _finite(rows) & ~_finite(new.to(rows.dtype))
                told.append(_flags(request_id, function.call.function.name, site, positions, spoiled))
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
        kept: Mapping[str, Any],
    ) -> list[_Sending]:
        """Return what the request's reader is told of a call."""
        told, at = [], positions.astype(np.int32).tobytes()
        for name, value in values.items():
            one = messages.Told(request_id, name, site.hook, site.layer, at, list(value.shape))
            told.append(_Sending(one, _on_its_way(value)))
        for name, value in kept.items():
            data = saved.encode(value)
            if self._saved.get((request_id, name)) != (now := hash(data)):
                self._saved[request_id, name] = now
                told.append(_Sending(messages.Told(request_id, name, site.hook, site.layer, None, [], data)))
        return told

    def take(self) -> Callable[[], dict[str, list[messages.Told]]]:
        """Return what waits for what the step's functions gave, and returns it by endpoint; forget it."""
        sending, self._told = self._told, {}
        copied = torch.cuda.Event() if sending and self._device.type == "cuda" else None
        if copied is not None:
            copied.record()

        def arrived() -> dict[str, list[messages.Told]]:
            if copied is not None:
                copied.synchronize()
            return {
                endpoint: [self._with_data(one) for one in several if self._is_told(one)]
                for endpoint, several in sending.items()
            }

        return arrived

    def _is_told(self, one: _Sending) -> bool:
        """Return whether a reader needs to know: of flags that are not set only where they may have been."""
        return not one.flags or self._anew or bool(one.data is not None and one.data.any())

    @staticmethod
    def _with_data(one: _Sending) -> messages.Told:
        if one.data is not None:
            one.told.data = one.data.numpy().tobytes()
        return one.told

    def release(self, request_id: str) -> None:
        """Let go of what a request holds."""
        self._failed.pop(request_id, None)
        _, functions = self._held.pop(request_id, ("", {}))
        for name in {name for one in functions.values() for name in one.saved}:
            self._saved.pop((request_id, name), None)


def _finite(rows: torch.Tensor) -> torch.Tensor:
    """Return bool [n], which rows [n, width] are finite."""
    return rows.isfinite().all(1)


def _flags(request_id: str, name: str, site: Site, positions: np.ndarray, spoiled: torch.Tensor) -> _Sending:
    at = positions.astype(np.int32).tobytes()
    told = messages.Told(request_id, name, site.hook, site.layer, at, [len(positions)], spoiled=True)
    return _Sending(told, _on_its_way(spoiled), True)


def _on_its_way(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory that is complete once the device has come here."""
    return values.contiguous().to("cpu", non_blocking=True, copy=True)


def _values(key: str, value: Any, count: int, name: str) -> torch.Tensor:
    """Return what a function gave under a key as float32; raise WeirError unless it has an entry for each row."""
    if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
        raise WeirError(
            f"the hook {name} gave {_brief(value)} as {key!r}, not a value for each of {count} rows", "hooks"
        )
    return value.detach().float()


def _is_like(new: Any, rows: torch.Tensor) -> bool:
    """Return whether what a function returned can stand for rows."""
    return isinstance(new, torch.Tensor) and (new.shape, new.device, new.layout) == (
        rows.shape,
        rows.device,
        rows.layout,
    )


def _brief(value: Any) -> str:
    return (
        f"a tensor {list(value.shape)} on {value.device}"
        if isinstance(value, torch.Tensor)
        else f"a {type(value).__name__}"
    )


def _where(error: BaseException) -> str:
    """Return the place that raised, in words: the last one outside Weir."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((one for one in reversed(frames) if not one.filename.startswith(_WEIR)), frames[-1])
    return f"line {last.lineno} of {last.name}" + (f": {last.line}" if last.line else "")
