"""`SyncController`, the base class of controllers that act from one step to the next, and what they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError


@dataclass(frozen=True)
class WorkerInfo:
    """The worker that a controller runs in.

    Attributes:
        device: of all tensors.
        slots: how many requests it can decide on at once; see `ScoredStep.slots`.
        rank, ranks: of its tensor-parallel group. All ranks have the same scores.
        d_model, dtype: of the residual stream.
    """

    device: torch.device
    slots: int
    rank: int
    ranks: int
    d_model: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ScoredStep:
    """The requests that a controller decides on after a step, n of them, in the same order everywhere.

    A request is there whenever its last token was computed: once for the prompt, however it was cut
    into chunks, and once for each generated token.

    Attributes:
        request_ids: the engine's ids, [n].
        slots: int64 [n], a number below `WorkerInfo.slots` for each request, its own until it ends.
            Keep state by it, in tensors: ``self.sums[step.slots]``.
        first: bool [n], whether the request is there for the first time, so that its state begins
            anew.
        scores: float32 [n, k] by the names of the controller's probes, of each request's last
            token; where a probe has scored nothing yet, NaN.
        strengths: float32 [n], what acted on each request's last token.
    """

    request_ids: tuple[str, ...]
    slots: torch.Tensor
    first: torch.Tensor
    scores: Mapping[str, torch.Tensor]
    strengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.request_ids)


class SyncController:
    """The base class of controllers that act in the next step.

    Derive from it and name the class in the entry-point group ``vllm_weir.controllers``, and the
    controller in the setting `controllers`. Interventions with ``when=weir.When("controller:NAME")``
    then act, at generated tokens, with the strength that `step` returned after the token before.

    One object is made in the caller's process, which checks the options and learns the probes, and
    one in each worker, where alone `open` and `step` are called.

    Attributes:
        probes: what it reads: probes, or names of registered ones or of the request's own; may be
            set by ``__init__``. They are added to the requests that it decides on.

    Args:
        options: from the settings, plain JSON data. Raise `WeirError` for a wrong option: the engine
            does not start.
    """

    probes: Sequence[Any] = ()

    def __init__(self, **options: Any) -> None:
        if options:
            raise WeirError(f"unknown option {next(iter(options))!r}; {type(self).__name__} has none")

    def open(self, worker: WorkerInfo) -> None:
        """Prepare for steps, in a worker: make tensors for state."""

    def step(self, step: ScoredStep) -> torch.Tensor:
        """Return the strengths for the next token of each request, [n], from -1 to 1.

        What an intervention adds is multiplied by it; 0 leaves the row as it is. It is called after
        the forward pass was issued, on the stream of the model, once for each step that has any of
        its requests: what it computes on a GPU costs no waiting, as long as it reads no values back
        (``.item()``, ``.cpu()``). All tensors are on `WorkerInfo.device`.

        For a request to get the same answers whatever else runs, a row of the answer must follow from
        the same row of what is given and of the controller's state. All ranks must answer alike.
        """
        raise NotImplementedError
