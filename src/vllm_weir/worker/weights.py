"""`fingerprint`: tells whether a model has the weights that it had before, wherever they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

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

    Args:
        tensors: (name, tensor), on any device, in an order that does not change.

    Raises:
        WeirError: if a tensor has no memory.
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
