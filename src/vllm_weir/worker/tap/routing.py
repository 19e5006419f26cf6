"""The routers' choices: an op at each router makes them, where they are replayed, and writes them into rows of bytes.

A row for each router would fill a row of the ring for each block. So the routers of a worker share one row for each
token (`schema.routing.RoutedBlocks`), and the last of them calls the worker's tap, which captures it as any other row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vllm_weir.schema.model_facts import RoutingFacts
from vllm_weir.schema.routing import RoutedBlocks
from vllm_weir.schema.taps import REPLAY, exact_bits, tap_of
from vllm_weir.worker.tap.expert_weights import expert_weights
from vllm_weir.worker.tap.op import TapSwitch, numbered
from vllm_weir.worker.tap.replay import Replays

_LIBRARY = torch.library.Library("weir", "FRAGMENT")
_LIBRARY.define("routing(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor router) -> ()")


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

    Args:
        replays: the experts that routers have to choose; None: they always choose themselves.
        facts: block -> facts of its router.

    Attributes:
        tap: number of the tap that reads them.
    """

    def __init__(
        self,
        blocks: RoutedBlocks,
        switch: TapSwitch,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        replays: Replays | None = None,
        facts: Mapping[int, RoutingFacts] = MappingProxyType({}),
    ) -> None:
        self._replays, self._facts = replays, facts
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
        return self._switch.wants(self.tap) or self._forces

    @property
    def _forces(self) -> bool:
        """Whether routers may have to choose experts; a mask of all taps is negative, and has no such request."""
        return bool(exact_bits(self._switch.mask)) and self._switch.wants(REPLAY)

    def take(self, weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, router: torch.Tensor) -> None:
        """Change what a router has chosen for the step's tokens, [tokens, top_k], as is asked, and record it.

        Args:
            logits: [tokens, experts].
            router: its number tensor.
        """
        place = self._places[router.data_ptr()]
        if self._forces and self._replays is not None:
            facts = self._facts[self._blocks.blocks[place]]
            force(weights, ids, logits, self._replays.forced[: len(ids), place], facts)
        if self._switch.wants(self.tap):
            self._record(weights, ids, place)

    def _record(self, weights: torch.Tensor, ids: torch.Tensor, place: int) -> None:
        """Write what the router at a place has chosen; the last one calls the tap."""
        id_bytes = self._blocks.id_bytes
        rows = self._rows[: len(ids)]
        rows[:, place, :, :id_bytes] = _bytes_of(ids)[..., :id_bytes]
        rows[:, place, :, id_bytes:] = _bytes_of(weights.float())
        if place == len(self._blocks.blocks) - 1:
            torch.ops.weir.tap(rows.flatten(1).to(self._dtype), self._number)


def force(
    weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, forced: torch.Tensor, facts: RoutingFacts
) -> None:
    """Put experts in the place of those that a router has chosen, with the weights that it gives to them.

    Tokens whose experts stay as they are, also in their order, keep the bits of their weights.

    Args:
        weights, ids: [tokens, top_k], of the chosen experts; changed.
        forced: [tokens, top_k], negative in the rows of tokens that keep what was chosen.
    """
    chosen, before = forced.long(), ids.long()
    changed = ((chosen >= 0) & (chosen != before)).any(-1, keepdim=True)
    given = expert_weights(logits, chosen.clamp(min=0), facts).to(weights.dtype)
    weights.copy_(torch.where(changed, given, weights))
    ids.copy_(torch.where(changed, chosen, before))


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers, lowest first, uint8 [..., bytes]."""
    return values.contiguous().view(torch.uint8).unflatten(-1, (values.shape[-1], -1))


_rows_of: weakref.WeakValueDictionary[int, RoutedRows] = weakref.WeakValueDictionary()
"""Address of a router's number tensor -> the rows of its worker."""


def _routing(weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, router: torch.Tensor) -> None:
    rows = _rows_of.get(router.data_ptr())
    if rows is None:
        raise RuntimeError("a router was called whose engine is gone")
    if rows.wanted:
        rows.take(weights, ids, logits, router)


def _fake(*_: torch.Tensor) -> None:
    """Stand for the op while shapes are traced: it returns nothing."""


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("routing", _routing, _device)
_LIBRARY._register_fake("routing", _fake)
