"""The routers' choices: an op at each router writes them into rows of bytes, which one tap per worker reads.

A row for each router would fill a row of the ring for each block. So the routers of a worker share one row for each
token (`schema.routing.RoutedBlocks`), and the last of them calls the tap, which captures it as any other row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_weir.schema.routing import RoutedBlocks
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.tap.op import TapSwitch, acts, numbered

_LIBRARY = torch.library.Library("weir", "FRAGMENT")
_LIBRARY.define("routing(Tensor(a!) weights, Tensor(b!) ids, Tensor router) -> ()")


@dataclass(frozen=True)
class FoundRouters:
    """The routers of a loaded model.

    Attributes:
        blocks: those of this process; None if it has none, or they are refused.
        refused: why they are; "" if they are not.
        install: makes each router call the op.
    """

    blocks: RoutedBlocks | None = None
    refused: str = ""
    install: Callable[[RoutedRows], None] = lambda _rows: None


class RoutedRows:
    """The rows of the step's tokens.

    Attributes:
        tap: number of the tap that reads them.
    """

    def __init__(
        self, blocks: RoutedBlocks, switch: TapSwitch, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._blocks, self._switch, self._dtype = blocks, switch, dtype
        self._rows = torch.zeros(max_tokens, *blocks.shape, dtype=torch.uint8, device=device)
        self.tap = tap_of(blocks.site)
        self._number = self._numbered()
        self._places: dict[int, int] = {}
        """Address of a router's number tensor -> its place among the blocks."""

    def _numbered(self) -> torch.Tensor:
        number = numbered(self.tap, device=self._rows.device)
        self._switch.register(number, self.tap)
        return number

    def register(self, block: int) -> torch.Tensor:
        """Return the number tensor that the router of a block gives to the op."""
        number = self._numbered()
        self._places[number.data_ptr()] = self._blocks.blocks.index(block)
        _rows_of[number.data_ptr()] = self
        return number

    @property
    def wanted(self) -> bool:
        """Whether the op does anything in this pass."""
        return self._switch.wants(self.tap)

    def record(self, weights: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> None:
        """Write what a router has chosen for the step's tokens, [tokens, top_k]; the last one calls the tap."""
        place, id_bytes = self._places[router.data_ptr()], self._blocks.id_bytes
        rows = self._rows[: len(ids)]
        rows[:, place, :, :id_bytes] = _bytes_of(ids)[..., :id_bytes]
        rows[:, place, :, id_bytes:] = _bytes_of(weights.float())
        if place == len(self._blocks.blocks) - 1:
            torch.ops.weir.tap(rows.flatten(1).to(self._dtype), self._number)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers, lowest first, uint8 [..., bytes]."""
    return values.contiguous().view(torch.uint8).unflatten(-1, (values.shape[-1], -1))


_rows_of: weakref.WeakValueDictionary[int, RoutedRows] = weakref.WeakValueDictionary()
"""Address of a router's number tensor -> the rows of its worker."""


def _routing(weights: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> None:
    if acts(router):
        _rows_of[router.data_ptr()].record(weights, ids, router)


def _fake(*_: torch.Tensor) -> None:
    """Stand for the op while shapes are traced: it returns nothing."""


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("routing", _routing, _device)
_LIBRARY._register_fake("routing", _fake)
