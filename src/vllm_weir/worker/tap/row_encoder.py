"""Rows that are encoded whole inside a tap, for features whose activation depends on all the others.

No kernel does that. In a step with such features the taps are called without a CUDA graph, and each
of them first fills the cells of its ENCODE nodes: the rows are computed as they are at these nodes,
and the autoencoder encodes them with torch. A chain may have several ENCODE nodes, of which a later
one may see what an earlier one has led to; so its first nodes come first, then the second ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from vllm_weir.sae.autoencoder import SAE
from vllm_weir.util.h2d import upload
from vllm_weir.worker.steering.programs import CELL_BIT, ProgramTable
from vllm_weir.worker.tap import cpu_kernel

Launch = Callable[..., None]


class _Round(NamedTuple):
    """Tokens [n] of the step, the first nodes of their chains at a tap, and the ENCODE nodes to fill, all int64."""

    tokens: np.ndarray
    starts: np.ndarray
    nodes: np.ndarray


class RowEncoder:
    """Fills the cells of ENCODE nodes.

    Args:
        table: the programs.
        taps: address of a tap's number tensor -> number of the tap.
        find: key -> the autoencoder, which a live request holds.
        device: of the tensors.
    """

    def __init__(
        self, table: ProgramTable, taps: Mapping[int, int], find: Callable[[str], SAE], device: torch.device
    ) -> None:
        self._table, self._taps, self._find, self._device = table, taps, find, device
        self._programs = np.empty(0, np.int64)
        self._launch: Launch = cpu_kernel.launch

    def around(self, launch: Launch | None, programs: np.ndarray) -> Launch:
        """Return what the taps call in the coming forward pass in place of `launch`.

        Args:
            launch: as `TapSwitch.launch`; None for the kernel.
            programs: int [n], of the step's tokens.
        """
        self._programs, self._launch = programs, launch or self._kernel()
        return self._encode_and_launch

    def _kernel(self) -> Launch:
        if self._device.type != "cuda":
            return cpu_kernel.launch
        from vllm_weir.worker.tap.triton_kernel import launch

        return launch

    def _encode_and_launch(
        self, hidden: torch.Tensor, other: torch.Tensor | None, number: torch.Tensor, *tables: torch.Tensor
    ) -> None:
        for one in self._rounds(self._taps[number.data_ptr()]):
            self._fill(one, hidden, other, number, *tables[-4:])
        self._launch(hidden, other, number, *tables)

    def _rounds(self, tap: int) -> list[_Round]:
        """Return the rounds of a tap."""
        heads, encoded = self._table.heads, self._table.encoded
        starts = np.where(self._programs >= 0, heads[self._programs, tap], -1).astype(np.int64)
        rounds: list[list[tuple[np.ndarray, int, int]]] = []
        for start in np.unique(starts[starts >= 0]).tolist():
            tokens, node, count = np.flatnonzero(starts == start), start, 0
            while node >= 0:
                if node in encoded:
                    if count == len(rounds):
                        rounds.append([])
                    rounds[count].append((tokens, start, node))
                    count += 1
                node = int(self._table.ints[node, 3])
        return [_joined(one) for one in rounds]

    def _fill(
        self,
        one: _Round,
        hidden: torch.Tensor,
        other: torch.Tensor | None,
        number: torch.Tensor,
        ints: torch.Tensor,
        floats: torch.Tensor,
        vectors: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        """Write the activations of one round."""
        if self._device.type == "cuda":
            from vllm_weir.worker.tap.peek_kernel import rows_at
        else:
            rows_at = cpu_kernel.rows_at
        rows = rows_at(hidden, other, number, *one, ints, floats, vectors, cells)
        nodes = self._table.ints[one.nodes]
        keys = [self._table.encoded[node][0] for node in one.nodes.tolist()]
        groups: dict[tuple[str, int, int], list[int]] = {}
        for k, (key, lo, hi) in enumerate(zip(keys, nodes[:, 5].tolist(), nodes[:, 6].tolist(), strict=True)):
            groups.setdefault((key, lo, hi), []).append(k)
        for (key, lo, hi), members in groups.items():
            at = np.array(members)
            features = np.array([self._table.encoded[node][1] for node in one.nodes[at].tolist()])
            distinct, which = np.unique(features, return_inverse=True)
            found = self._find(key).chosen(rows[self._index(at), lo:hi], self._index(distinct))
            values = found.gather(1, self._index(which)[:, None])[:, 0]
            own_cells = (nodes[at, 4] >> CELL_BIT) - 1
            cells[self._index(one.tokens[at]), self._index(own_cells)] = values

    def _index(self, numbers: np.ndarray) -> torch.Tensor:
        return upload(numbers.astype(np.int64).reshape(-1), self._device)


def _joined(parts: list[tuple[np.ndarray, int, int]]) -> _Round:
    """Return the round of chains, given the tokens, the first node and the ENCODE node of each."""
    tokens, starts, nodes = zip(*parts, strict=True)
    counts = [len(one) for one in tokens]
    return _Round(np.concatenate(tokens), np.repeat(starts, counts), np.repeat(nodes, counts))
