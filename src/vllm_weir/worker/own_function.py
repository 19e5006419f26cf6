"""A function of the caller's in a request, and what functions have returned and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util.saved import Unsent
from vllm_weir.worker.parameters import WholeWeight
from vllm_weir.worker.row_functions import Given, in_dtype, part_of, returned_of, spoiled, state_of, told_of, with_part


@dataclass
class HookContext:
    """What a function is told beside the rows.

    Attributes:
        hook: the hook point.
        layer: its block.
        positions: int64 [n], of the rows in their sequence, on their device.
        request_id: of the sequence.
        args: the hook's, tensors on the device of the rows; floating vectors and matrices in the rows' dtype.
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
    """A function with the args of one request, and what it keeps."""

    call: Call
    function: Any
    args: dict[str, Any]
    # of the functions that one call can serve; None for one that is called for its request alone
    group: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)  # see `HookContext`
    # of each hook point, (the position after the last that has changed it, the state) after every call: a sequence that
    # is computed again from some position on goes on from there
    states: dict[Site, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)  # what it has saved
    unsent: Unsent = field(default_factory=Unsent)  # which of it the request's reader has
    # those that it asked for and that were put together, by name
    weights: dict[str, WholeWeight] = field(default_factory=dict)

    def state_before(self, site: Site, position: int, device: torch.device) -> torch.Tensor | None:
        """Return the state with which a position begins, None if the function has none."""
        if not self.call.state:
            return None
        states = self.states.setdefault(site, [])
        while states and states[-1][0] > position:
            states.pop()
        return states[-1][1].clone() if states else torch.zeros(self.call.state, device=device)

    # Tensors that are made in inference mode do not count changes in place, which `unsent` asks for.
    @torch.inference_mode(False)
    @torch.no_grad()
    def run(
        self,
        request_id: str,
        site: Site,
        positions: np.ndarray,
        rows: torch.Tensor,
        weight: Callable[[str], WholeWeight],
    ) -> Given:
        """Call the function for its request alone; raise WeirError if it raises, or returns something else."""
        name, own = self.call.function.name, part_of(self.call, rows)
        before = self.state_before(site, int(positions[0]), rows.device)
        context = HookContext(
            site.hook,
            site.layer,
            torch.from_numpy(positions).to(rows.device),
            request_id,
            in_dtype(self.args, rows.dtype),
            before,
            self.saved,
            self.call.heads,
            self.call.neurons,
            self.params,
            lambda of: self._weight(of, weight),
        )
        try:
            returned = self.function(own.clone(), context)
        except Exception as e:
            raise WeirError(told_of(name, e), "hooks") from e
        new, values = returned_of(returned, own, name)
        if before is not None:
            self.states[site].append((int(positions[-1]) + 1, state_of(context.state, before, name)))
        values = {key: value.detach().float() for key, value in values.items()}
        if new is None:
            return Given(None, values)
        return Given(with_part(self.call, rows, new), values, spoiled(own, new))

    def _weight(self, name: str, weight: Callable[[str], WholeWeight]) -> torch.Tensor:
        found = self.weights.get(name) or weight(name)
        if found.marks:
            self.weights[name] = found
        return found.tensor


class Part(NamedTuple):
    """The rows of one request in a call: its id, the key of its function, and which rows, int64 [k]."""

    request_id: str
    key: str
    rows: np.ndarray


class _Sending(NamedTuple):
    """What a function gave for rows of several requests, on its way to the host."""

    parts: Sequence[Part]
    endpoints: Sequence[str]  # of the readers, one for each part
    name: str
    site: Site
    positions: np.ndarray  # int64 [n]
    data: torch.Tensor  # [n, ...] in host memory, complete once the device has come here
    flags: bool  # whether the data are bool [n], which rows were finite and no longer are


class HookResults:
    """Values, what was saved, and which rows were spoiled, of the step that is being issued.

    `tells`: whether this worker tells readers; one of a tensor-parallel group does. `anew`: whether a position may be
    computed anew with another token, as after a draft that is rejected.
    """

    def __init__(self, device: torch.device, tells: bool, anew: bool) -> None:
        self._device, self.tells, self._anew = device, tells, anew
        self._sending: list[_Sending] = []
        self._saved: dict[str, list[messages.Told]] = {}
        """Endpoint -> what its requests have saved."""

    def add(
        self,
        parts: Sequence[Part],
        endpoints: Sequence[str],
        name: str,
        site: Site,
        positions: np.ndarray,
        data: torch.Tensor,
        flags: bool = False,
    ) -> None:
        """Tell the readers of requests of values [n, ...] at positions, each of the rows of its part.

        `data` are float32, or bool [n] if they are `flags` of the function `name`: which rows were finite and no
        longer are.
        """
        self._sending.append(_Sending(parts, endpoints, name, site, positions.copy(), on_its_way(data), flags))

    def add_saved(self, endpoint: str, request_id: str, site: Site, kept: Mapping[Any, Any], unsent: Unsent) -> None:
        """Tell a reader of what is new of what a function has saved; raise WeirError if it cannot be sent."""
        for name, first, data in unsent.take(kept):
            told = messages.Told(request_id, name, site.hook, site.layer, None, [], data, first=first)
            self._saved.setdefault(endpoint, []).append(told)

    def take(self) -> Callable[[], dict[str, list[messages.Told]]]:
        """Return what waits for what the step's functions gave, and returns it by endpoint; forget it."""
        (sending, self._sending), (told, self._saved) = (self._sending, []), (self._saved, {})
        copied = torch.cuda.Event() if sending and self._device.type == "cuda" else None
        if copied is not None:
            copied.record()

        def arrived() -> dict[str, list[messages.Told]]:
            if copied is not None:
                copied.synchronize()
            for one in sending:
                for endpoint, message in self._messages(one):
                    told.setdefault(endpoint, []).append(message)
            return told

        return arrived

    def _messages(self, one: _Sending) -> Iterator[tuple[str, messages.Told]]:
        """Yield endpoints and messages; none for flags that are not set, unless they may have been."""
        data = one.data.numpy()
        unset = one.flags and not self._anew
        if unset and not data.any():
            return
        for part, endpoint in zip(one.parts, one.endpoints, strict=True):
            own = data[part.rows]
            if unset and not own.any():
                continue
            at, shape = one.positions[part.rows].astype(np.int32).tobytes(), list(own.shape)
            of_site = one.name, one.site.hook, one.site.layer
            yield endpoint, messages.Told(part.request_id, *of_site, at, shape, own.tobytes(), one.flags)


def on_its_way(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory that is complete once the device has come here."""
    return values.contiguous().to("cpu", non_blocking=True, copy=True)
