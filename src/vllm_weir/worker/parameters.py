"""Weights of the model for users' functions: whole, whatever part of them this rank holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from vllm_weir.errors import WeirError
from vllm_weir.worker.weights import fingerprint


@dataclass(frozen=True)
class HeldWeight:
    """A weight as one tensor-parallel rank holds it: matrices below each other, of each a part."""

    read: Callable[[], torch.Tensor]  # returns it, [rows, ...]
    mark: torch.Tensor  # what tells it from other weights: itself, or what can be read of it
    live: bool  # whether `read` returns the model's own memory
    sizes: Sequence[int]  # rows of each matrix here
    copies: Sequence[int]  # of each matrix, how many neighbouring ranks have the same part
    dim: int | None = None  # along which the ranks' parts are joined; None: every rank has all of it
    rows: int | None = None  # of the whole; what follows them is padding. None: all.
    chosen: int | None = None  # which of the matrices is asked for; None: all

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole, given the part of each rank in order; of a single part it is a view."""
        blocks = [part.split(list(self.sizes)) for part in parts]
        wholes = []
        for k in range(len(self.sizes)) if self.chosen is None else (self.chosen,):
            own = [of_rank[k] for of_rank in blocks[:: self.copies[k]]]
            wholes.append(own[0] if len(own) == 1 else torch.cat(own, self.dim or 0))
        if len(parts) == 1 and self.chosen is None:
            return parts[0][: self.rows]
        return (wholes[0] if len(wholes) == 1 else torch.cat(wholes))[: self.rows]


@dataclass(eq=False)
class WholeWeight:
    """A weight; `marks` is of the parts that it was made of; "" if it may be asked for anew at no cost."""

    tensor: torch.Tensor
    marks: str = ""


class Parameters:
    """Gives weights by name.

    What had to be put together is kept for as long as a live request uses it. A request that asks for a weight anew
    gets what the model has then: the ranks compare the fingerprints of their parts with those of what is kept.

    The ranks put a weight together in the middle of a step, for which all of them have to ask for it at the same
    place. They do if the function does the same on all, as it is given the same rows. If it does not, `agree` raises
    after a while, before anything waits on the device, and the request fails.

    Args:
        find: name -> the weight as this rank holds it; raises WeirError.
        ranks: of the tensor-parallel group.
        gather: returns the tensors of all ranks, given that of this one.
        agree: (occasion, text) -> what each rank has said there; raises WeirError if one of them does not come.
    """

    def __init__(
        self,
        find: Callable[[str], HeldWeight],
        ranks: int = 1,
        gather: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda part: [part],
        agree: Callable[[str, str], list[str]] = lambda _, said: [said],
    ) -> None:
        self._find, self._ranks, self._gather, self._agree = find, ranks, gather, agree
        self._kept: WeakValueDictionary[str, WholeWeight] = WeakValueDictionary()

    def get(self, name: str, occasion: str) -> WholeWeight:
        """Return a weight; `occasion` tells this call from all others, alike on all ranks.

        Raises:
            WeirError: if it cannot be had.
        """
        held = self._find(name)
        if held.live and self._ranks == 1:
            return WholeWeight(held.joined([held.read()]))
        mark = fingerprint([(name, held.mark)])
        kept = self._kept.get(name)
        if held.dim is not None and self._ranks > 1:
            # What does not fit has to fail before the ranks wait for each other on the device.
            torch.empty(2 * self._ranks * held.mark.nbytes, dtype=torch.uint8, device=held.mark.device)
        said = self._agree(f"{occasion} {name}", f"{mark} {'' if kept is None else kept.marks}")
        marks = [one.split(" ")[0] for one in said]
        if held.dim is None and len(set(marks)) > 1:
            raise WeirError(f"the ranks hold different parts of {name}, and how they belong together is not known")
        together = hashlib.sha256("".join(marks).encode()).hexdigest()
        if held.dim is None and held.live:
            return WholeWeight(held.joined([held.read()]), together)
        if kept is not None and all(one == f"{own} {together}" for one, own in zip(said, marks, strict=True)):
            return kept
        parts = [held.read()] if held.dim is None else self._gather(held.read())
        whole = self._kept[name] = WholeWeight(held.joined(parts), together)
        return whole
