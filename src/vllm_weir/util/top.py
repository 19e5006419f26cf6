"""The largest values of rows, with ties in the order of their indices, and their records."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

SMALLEST = 4096
"""Rows with fewer values are sorted at once."""
MAX_KERNEL_K = 64
"""Values per row up to which a kernel finds them on CUDA."""


class Rectifier(NamedTuple):
    """A ReLU or JumpReLU of values with a bias: with p = value + bias, p where p > 0 and p > threshold, else 0."""

    bias: torch.Tensor  # float32 [m]
    thresholds: torch.Tensor | None = None  # float32 [m], None for a ReLU

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the activations [n, m] of values [n, m], float32."""
        pre = values + self.bias
        return pre.relu() if self.thresholds is None else pre.relu() * (pre > self.thresholds)


def top_values(values: torch.Tensor, k: int, rectifier: Rectifier | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest values of each row and where they are, the largest first.

    Of equal values the one with the smallest index comes first; NaN comes before all numbers.

    Long rows are cut into blocks. The k largest values lie in the k blocks with the largest maxima,
    of equal maxima those of the first blocks, so only these blocks are sorted.

    `values`: float32 [n, m]; `k`: at most m; `rectifier`: what the values go through first. Returned: (indices [n, k],
    int32 or int64, values float32 [n, k]).
    """
    if values.is_cuda and k <= MAX_KERNEL_K:
        from vllm_weir.util import top_kernel

        ids, found, _ = top_kernel.largest(values, k, rectifier=rectifier)
        return ids, found
    values = values if rectifier is None else rectifier(values)
    m = values.shape[1]
    size = 1 << round(math.log2(max(1.0, m / max(1, k))) / 2)  # about as many maxima as candidates
    count = m // size
    if m < SMALLEST or count <= k:
        return _sorted(values, k)
    blocks = values[:, : count * size].unflatten(1, (count, size))
    chosen = _sorted(blocks.amax(2), k)[0].sort(1).values  # by index, as equal values are
    inside = torch.arange(size, device=values.device)
    ids = (chosen[:, :, None] * size + inside).flatten(1)
    rest = torch.arange(count * size, m, device=values.device).expand(len(values), -1)
    ids = torch.cat([ids, rest], 1)
    at, largest = _sorted(values.gather(1, ids), k)
    return ids.gather(1, at), largest


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k likeliest entries of each row of logits [n, m], as `top_values`, and their log-probabilities."""
    if logits.is_cuda and k <= MAX_KERNEL_K:
        from vllm_weir.util import top_kernel

        ids, values, sums = top_kernel.largest(logits, k, sums=True)
        assert sums is not None
        return ids, values - sums[:, None]
    whole = logits.float()
    ids, values = top_values(whole, k)
    return ids, values - whole.logsumexp(1, keepdim=True)


def _sorted(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `top_values` does, by sorting all values."""
    # Integers in the order of the values, with the index in the lower half: no two are equal.
    bits = (values + 0.0).contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(values.isnan(), 0x7FFFFFFF, ordered).long()
    backwards = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    keys = (ordered << 32 | backwards).topk(k, dim=1).values
    ids = values.shape[1] - 1 - (keys & 0xFFFFFFFF)
    return ids, values.gather(1, ids)


def as_records(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ids [n, k] and values float32 [n, k] side by side, bit for bit, as int32 [n, 2 k]."""
    return torch.cat([ids.int(), values.view(torch.int32)], 1)
