"""The weights of the model that functions ask for, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from vllm_weir.errors import WeirError

CPU_WORDS, DEVICE_WORDS = 1 << 14, 1 << 22
"""32-bit words that are summed at once: on a CPU so few that torch does not share them out among threads, which takes
longer than the sum; on a device few enough for one that is full."""


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of the names, shapes, dtypes and all bits of some tensors.

    Every 32-bit word is multiplied by a random odd number of its place, and the products of each
    part of a tensor are added modulo 2**64; the hash is of these sums. A change of one word always
    changes its sum, since an odd number has an inverse. A change of several words leaves their sum as
    it was with a probability of at most 2**-32. Nothing is sampled: an edit of one neuron changes a
    few thousand words of billions, which samples would miss.

    `tensors`: (name, tensor), on any device, in an order that does not change. Raises WeirError if a tensor has no
    memory.
    """
    found = hashlib.blake2b(digest_size=16)
    factors = torch.empty(0)
    for name, tensor in tensors:
        if tensor.is_meta:
            raise WeirError(f"the weights of {name} are not loaded; finish loading them first")
        if factors.device != tensor.device or not len(factors):
            size = CPU_WORDS if tensor.device.type == "cpu" else DEVICE_WORDS
            factors = torch.randint(0, 1 << 62, (size,), generator=torch.Generator().manual_seed(0)) * 2 + 1
            factors = factors.to(tensor.device)
        found.update(f"{name}\0{list(tensor.shape)}\0{tensor.dtype}\0".encode())
        if tensor.numel():
            sums = [(words.long() * factors[: len(words)]).sum() for words in _words(tensor).split(len(factors))]
            found.update(torch.stack(sums).cpu().numpy().tobytes())
    return found.hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as int32 [n], with zeros at the end if it is no whole number of words."""
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    data = tensor.data.permute(order).contiguous()  # copied only if it has gaps
    data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)  # one number may keep another stride
    if len(data) % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4)).clone()
    return data.view(torch.int32)


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

        Raises WeirError if it cannot be had.
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
