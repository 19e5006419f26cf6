"""What is called inside taps between their kernels: autoencoders on whole rows, and users' functions.

No kernel does that. In a step with such nodes the taps are called without a CUDA graph. Each of them first computes
the rows as they are at its ENCODE and HOOK nodes, and calls what these name; what that returns is written to where the
kernel reads it, a number into the token's cell or a row among those held for it. A chain may have several such nodes,
of which a later one sees what an earlier one has led to; so its first nodes come first, then the second ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ENCODE, HOOK, RECONSTRUCT
from vllm_weir.schema.taps import site_of
from vllm_weir.util.h2d import NO_MEMORY, upload
from vllm_weir.worker.functions import Part, WorkerFunctions
from vllm_weir.worker.row_functions import spoiled
from vllm_weir.worker.steering.programs import AFTER_POST, CELL_BIT, ProgramTable
from vllm_weir.worker.tap import cpu_kernel
from vllm_weir.worker.tap.batch import Batch

Launch = Callable[..., None]
NOT_FINITE = "the reconstruction of one of its rows is not finite in the model's dtype"


class _Round(NamedTuple):
    """Tokens [n] of the step, the first nodes of their chains at a tap, and the nodes that call, all int64."""

    tokens: np.ndarray
    starts: np.ndarray
    nodes: np.ndarray


class TapCalls:
    """Calls what the nodes of chains name.

    Args:
        taps: address of a tap's number tensor -> number of the tap.
        find: key -> the autoencoder, which a live request holds.
        sites: tap -> the hook point inside a block that it serves, or `resid_post`.
        fail: called with a request and the reason if its function fails.
        score_early: `TapSwitch.score_early`.
    """

    def __init__(
        self,
        table: ProgramTable,
        taps: Mapping[int, int],
        find: Callable[[str], SAE],
        functions: WorkerFunctions,
        sites: Mapping[int, Site],
        fail: Callable[[str, str], None],
        device: torch.device,
        score_early: Callable[..., None],
    ) -> None:
        self._score_early = score_early
        self._table, self._taps, self._find, self._functions = table, taps, find, functions
        self._sites, self._fail, self._device = sites, fail, device
        self._batch = Batch.of(np.empty(0, np.int64), (), (), ())
        self._launch: Launch = cpu_kernel.launch

    def around(self, launch: Launch | None, batch: Batch) -> Launch:
        """Return what the taps call in the coming forward pass in place of `launch`, which is None for the kernel."""
        self._batch, self._launch = batch, launch or self._kernel()
        return self._call_and_launch

    def _kernel(self) -> Launch:
        if self._device.type != "cuda":
            return cpu_kernel.launch
        from vllm_weir.worker.tap.triton_kernel import launch

        return launch

    def _call_and_launch(
        self, hidden: torch.Tensor, other: torch.Tensor | None, number: torch.Tensor, *tables: torch.Tensor, **_: Any
    ) -> None:
        tap = self._taps[number.data_ptr()]
        rounds = self._rounds(tap)
        hooks = sum(bool((self._table.ints[one.nodes, 0] == HOOK).any()) for one in rounds)
        # Of these rows only those are read that `_run` has written; without hooks none are.
        shape = (len(hidden), hooks, hidden.shape[1]) if hooks else (1, 1, 1)
        held = torch.empty(shape, device=hidden.device)
        for one in rounds:
            self._fill(tap, one, hidden, other, number, held, *tables[-4:])
        self._score_early(1, tap, hidden, other, number, held)
        self._launch(hidden, other, number, *tables, held=held)

    def _rounds(self, tap: int) -> list[_Round]:
        """Return the rounds of a tap."""
        heads, called, programs = self._table.heads, self._table.called, self._batch.programs
        starts = np.where(programs >= 0, heads[programs, tap], -1).astype(np.int64)
        rounds: list[list[tuple[np.ndarray, int, int]]] = []
        for start in np.unique(starts[starts >= 0]).tolist():
            tokens, node, count = np.flatnonzero(starts == start), start, 0
            while node >= 0:
                if node in called:
                    if count == len(rounds):
                        rounds.append([])
                    rounds[count].append((tokens, start, node))
                    count += 1
                node = int(self._table.ints[node, 3])
        return [_joined(one) for one in rounds]

    def _fill(
        self,
        tap: int,
        one: _Round,
        hidden: torch.Tensor,
        other: torch.Tensor | None,
        number: torch.Tensor,
        held: torch.Tensor,
        ints: torch.Tensor,
        floats: torch.Tensor,
        vectors: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        """Do the calls of one round."""
        if self._device.type == "cuda":
            from vllm_weir.worker.tap.peek_kernel import rows_at
        else:
            rows_at = cpu_kernel.rows_at
        rows = rows_at(hidden, other, number, *one, ints, floats, vectors, cells, held)
        kinds = np.array([self._table.called[node].kind for node in one.nodes.tolist()])
        for members in self._alike(one, np.flatnonzero(kinds == ENCODE)):
            self._encode(one, members, rows, cells)
        for members in self._alike(one, np.flatnonzero(kinds == RECONSTRUCT)):
            self._reconstruct(one, members, rows, held)
        for members in self._alike(one, np.flatnonzero(kinds == HOOK)):
            self._run(tap, one, members, rows, held)

    def _alike(self, one: _Round, at: np.ndarray) -> Iterator[np.ndarray]:
        """Divide members of a round, given by index, into those that one call serves, with equal columns."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for k in at.tolist():
            node = int(one.nodes[k])
            lo, hi = self._table.ints[node, 5:7].tolist()
            called = self._table.called[node]
            group = self._functions.group_of(self._owner(one, k), called.key) if called.kind == HOOK else called.key
            groups.setdefault((group, lo, hi), []).append(k)
        yield from map(np.array, groups.values())

    def _owner(self, one: _Round, k: int) -> str:
        return self._batch.request_ids[self._batch.owners[one.tokens[k]]]

    def _encode(self, one: _Round, at: np.ndarray, rows: torch.Tensor, cells: torch.Tensor) -> None:
        """Write the activations of rows of one autoencoder into their cells."""
        nodes = one.nodes[at]
        lo, hi = self._table.ints[nodes[0], 5:7].tolist()
        called = [self._table.called[node] for node in nodes.tolist()]
        distinct, which = np.unique([int(one.a) for one in called], return_inverse=True)
        found = self._find(called[0].key).chosen(rows[self._index(at), lo:hi], self._index(distinct))
        own_cells = (self._table.ints[nodes, 4] >> CELL_BIT) - 1
        cells[self._index(one.tokens[at]), self._index(own_cells)] = found.gather(1, self._index(which)[:, None])[:, 0]

    def _reconstruct(self, one: _Round, at: np.ndarray, rows: torch.Tensor, held: torch.Tensor) -> None:
        """Hold the reconstructions of rows; a request whose row has none that is finite fails, and keeps the row."""
        tokens, node = one.tokens[at], one.nodes[at[0]]
        lo, hi = self._table.ints[node, 5:7].tolist()
        own = rows[self._index(at), lo:hi]
        place = self._index(self._table.floats[one.nodes[at], 2])
        held[self._index(tokens), place, lo:hi] = own.float()
        try:
            new = self._find(self._table.called[int(node)].key).reconstructed(own)
        except torch.OutOfMemoryError:  # of a float32 copy of the decoder, say
            failed, why = at.tolist(), NO_MEMORY
        else:
            bad = spoiled(own, new)
            held[self._index(tokens), place, lo:hi] = torch.where(bad[:, None], own.float(), new)
            failed, why = at[bad.cpu().numpy()].tolist(), NOT_FINITE
        for request_id in dict.fromkeys(self._owner(one, k) for k in failed):
            self._fail(request_id, why)

    def _run(self, tap: int, one: _Round, at: np.ndarray, rows: torch.Tensor, held: torch.Tensor) -> None:
        """Call a function on rows of the requests that it serves; if it fails they keep them."""
        tokens, node = one.tokens[at], int(one.nodes[at[0]])
        site = site_of(self._sites[tap], bool(self._table.ints[node, 4] & AFTER_POST))
        by_part: dict[tuple[str, str], list[int]] = {}
        for row, k in enumerate(at.tolist()):
            by_part.setdefault((self._owner(one, k), self._table.called[int(one.nodes[k])].key), []).append(row)
        parts = [Part(*part, np.array(of_part)) for part, of_part in by_part.items()]
        own = rows[self._index(at)]
        place = self._index(self._table.floats[one.nodes[at], 2])
        held[self._index(tokens), place] = own.float()
        try:
            new = self._functions.call(parts, site, self._batch.positions[tokens], own)
        except WeirError as e:
            for part in parts:
                self._fail(part.request_id, e.message)
            return
        if new is not None:
            held[self._index(tokens), place] = new.float()

    def _index(self, numbers: np.ndarray) -> torch.Tensor:
        return upload(numbers.astype(np.int64).reshape(-1), self._device)


def _joined(parts: list[tuple[np.ndarray, int, int]]) -> _Round:
    """Return the round of chains, given the tokens, the first node and the calling node of each."""
    tokens, starts, nodes = zip(*parts, strict=True)
    counts = [len(one) for one in tokens]
    return _Round(np.concatenate(tokens), np.repeat(starts, counts), np.repeat(nodes, counts))
