"""`HookContext`, and a user's function as one request has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

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
