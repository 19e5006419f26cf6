"""What was computed once, up to a number of bytes: the references of a test process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

import torch


class Remembered:
    """Tensors by what they were computed of; the least recently used go first.

    Attributes:
        held: the bytes of all of them.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Return what was put there, or None."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Hashable, value: Any, tensors: Iterable[torch.Tensor]) -> Any:
        """Remember a value, which consists of these tensors, and return it; nobody may write to it."""
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        self._drop(key)
        self._kept[key], self.held = (value, size), self.held + size
        while self.held > self.most:
            self._drop(next(iter(self._kept)))
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.held = 0

    def _drop(self, key: Hashable) -> None:
        self.held -= self._kept.pop(key, (None, 0))[1]


REFERENCES = Remembered(128 << 20)
"""Rows and logits of transformers' models."""
