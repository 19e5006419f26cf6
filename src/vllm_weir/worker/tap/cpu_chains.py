"""Chains of nodes on CPU: what each token's program does to its row at a tap.

SCORE, ACTIVATE and DOSE nodes write into a cell of their token, and what another node with a cell adds
is multiplied by the number there. A row to which nothing was added keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vllm_weir.schema.instructions import (
    ACTIVATE,
    AFFINE,
    BLEND,
    CLAMP,
    CONST,
    DOSE,
    ENCODE,
    FEATURE,
    HELD,
    HOOK,
    KEEP_NORM,
    NO_NORM,
    NORM,
    SCORE,
)
from vllm_weir.schema.rows import ring_rows
from vllm_weir.worker.steering.programs import AFTER_POST, CELL_BIT, LAST

MEASURING = (AFFINE, CLAMP, FEATURE, SCORE, ACTIVATE)
"""Kinds that measure rows along a vector."""
MAX_SEPARATE_CHAINS = 6
"""Follow up to this many different chains one by one, and more than that together."""
NOTHING_ADDED = -0.0
"""Changes no value when it is added to it, not even the sign of a zero, as 0.0 would."""


class Cells:
    """The cells of the tokens that a tap acts on.

    Args:
        cells: float32 [max tokens, cells]; None if no node has one.
        tokens: int64 [n], of the step.
        dtype: in which probes see rows, as captures do.
        held: float32 [max tokens, hooks, width], the rows that functions returned; None if no node has one.
    """

    def __init__(
        self,
        cells: torch.Tensor | None,
        tokens: torch.Tensor,
        dtype: torch.dtype,
        held: torch.Tensor | None = None,
    ) -> None:
        self._cells, self._tokens, self._dtype, self._held = cells, tokens, dtype, held

    def held(self, members: torch.Tensor, places: int | torch.Tensor) -> torch.Tensor:
        """Return the rows that functions returned for tokens numbered `members`, float32 [members, width]."""
        assert self._held is not None, "a node is a HOOK"
        return self._held[self._tokens[members], places]

    def score(
        self,
        members: torch.Tensor,
        cells: int | torch.Tensor,
        rows: torch.Tensor,
        w: torch.Tensor,
        by_norm: float | torch.Tensor,
        offset: float | torch.Tensor,
        threshold: float | torch.Tensor | None = None,
    ) -> None:
        """Write ``w . h + offset``, or 0 unless it is above a threshold, for `rows` of tokens numbered `members`.

        With `by_norm` above 0, h is divided by its norm, if that is not 0.
        """
        assert self._cells is not None, "a node has a cell"
        rows = rows.to(self._dtype).float()
        along = (rows * w).sum(1, keepdim=True)
        divides = torch.as_tensor(by_norm) > 0
        if divides.any():
            norm = rows.norm(dim=1, keepdim=True)
            along = torch.where(divides, torch.where(norm > 0, along / norm, 0.0), along)
        along = along + offset
        if threshold is not None:
            along = torch.where(along > threshold, along, 0.0)
        self._cells[self._tokens[members], cells] = along[:, 0]

    def measure(
        self, members: torch.Tensor, cells: int | torch.Tensor, rows: torch.Tensor, change: torch.Tensor
    ) -> None:
        """Write the norm of a change over that of the row, or NO_NORM, for tokens numbered `members`."""
        assert self._cells is not None, "a node has a cell"
        norms = rows.norm(dim=1)
        doses = change.expand_as(rows).norm(dim=1) / norms
        self._cells[self._tokens[members], cells] = torch.where(norms == 0, NO_NORM, doses)

    def factors(self, members: torch.Tensor, cells: int | torch.Tensor) -> torch.Tensor:
        """Return the numbers in a cell of each token, float32 [members, 1]."""
        assert self._cells is not None, "a node has a cell"
        return self._cells[self._tokens[members], cells][:, None]


class Chains:
    """Follows the chains of rows from stage to stage.

    Attributes:
        changed: bool [n], rows to which something was added.
    """

    def __init__(self, ints: np.ndarray, floats: torch.Tensor, vectors: torch.Tensor, cells: Cells, n: int) -> None:
        self._ints, self._floats, self._vectors, self._cells = ints, floats, vectors, cells
        self.changed = np.zeros(n, bool)

    def follow(self, nodes: np.ndarray, rows: torch.Tensor, past_post: bool) -> tuple[np.ndarray, torch.Tensor]:
        """Return the nodes where the rows' chains stop, and the new rows.

        `nodes` is int [n], the node that each row is at, -1 for none; `rows` float32 [n, width];
        `past_post`: whether nodes that come after the stream was recorded are followed too.
        """
        nodes, rows = nodes.copy(), rows.clone()
        starts = np.unique(nodes[nodes >= 0]).tolist()
        if len(starts) > MAX_SEPARATE_CHAINS:
            self._follow_together(nodes, rows, past_post)
            return nodes, rows
        for start in starts:
            members = (nodes == start).nonzero()[0]
            at = torch.from_numpy(members)
            own_rows, nodes[members] = self._follow_one(start, members, rows[at], past_post)
            rows[at] = own_rows
        return nodes, rows

    def rows_at(self, node: int, stop: int, members: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of a chain's members as they are where it reaches the node `stop`."""
        return self._follow_one(node, members, rows, True, stop)[0]

    def _follow_one(
        self, node: int, members: np.ndarray, rows: torch.Tensor, past_post: bool, stop: int = -1
    ) -> tuple[torch.Tensor, int]:
        """Follow the chain that begins at `node`; return the new rows of its members, and where it stopped."""
        d_model, width, values = self._vectors.shape[1], rows.shape[1], self._vectors.view(-1)
        delta = None
        while node not in (-1, stop):
            kind, u, w, following, flags, lo, hi, shift = self._ints[node].tolist()
            if flags & AFTER_POST and not past_post:
                break
            w_values = values[w * d_model + lo + shift : w * d_model + hi + shift] if w >= 0 else None
            cell = (flags >> CELL_BIT) - 1
            if kind in (SCORE, ACTIVATE):
                assert w_values is not None
                by_norm, offset, _, above = self._floats[node].tolist()
                own = torch.from_numpy(members), cell, _columns(rows, lo, hi)
                self._cells.score(*own, w_values, by_norm, offset, above if kind == ACTIVATE else None)
            elif kind == DOSE:
                change = rows.new_zeros(()) if delta is None else delta
                self._cells.measure(torch.from_numpy(members), cell, rows, change)
            elif kind != ENCODE:  # its cell was written before
                u_values = values[u * d_model + lo + shift : u * d_model + hi + shift]
                coefficients = self._floats[node].tolist()
                if kind == HOOK:
                    term = self._cells.held(torch.from_numpy(members), int(coefficients[2]))[:, lo:hi] - rows[:, lo:hi]
                elif kind == HELD:
                    held = self._cells.factors(torch.from_numpy(members), int(coefficients[2]))
                    term = (coefficients[0] * held + coefficients[1]) * u_values
                else:
                    term = _term(kind, _columns(rows, lo, hi), u_values, w_values, *coefficients)
                if cell >= 0:
                    factors = self._cells.factors(torch.from_numpy(members), cell)
                    term = _gated(term, factors)
                    self.changed[members] |= (factors != 0)[:, 0].numpy()
                else:
                    self.changed[members] = True
                if hi - lo == width:
                    delta = term if delta is None else delta + term
                else:
                    delta = _added_to_columns(rows, delta, lo, hi, term)
            if flags & LAST and delta is not None:
                rows, delta = rows + delta, None
            node = following
        return rows, node

    def _follow_together(self, nodes: np.ndarray, rows: torch.Tensor, past_post: bool) -> None:
        """Advance all rows by one node at a time, in place; the results are the same to the bit."""
        delta = torch.full_like(rows, NOTHING_ADDED)
        moving = (nodes >= 0).nonzero()[0]
        while len(moving):
            at = nodes[moving]
            if not past_post:
                in_stage = self._ints[at, 4] & AFTER_POST == 0
                moving, at = moving[in_stage], at[in_stage]
            _, _, _, following, flags, *_ = self._ints[at].T
            self._advance(moving, at, rows, delta)
            ends = torch.from_numpy(moving[flags & LAST != 0])
            rows[ends] += delta[ends]
            delta[ends] = NOTHING_ADDED
            nodes[moving] = following
            moving = moving[following >= 0]

    def _advance(self, moving: np.ndarray, at: np.ndarray, rows: torch.Tensor, delta: torch.Tensor) -> None:
        """Do what the nodes `at` say to the rows `moving`; what they add goes into `delta`."""
        _, u, w, _, flags, *_ = self._ints[at].T
        cells = (flags >> CELL_BIT) - 1
        for of_group, kind, lo, hi, shift in _alike(self._ints[at]):
            members = torch.from_numpy(moving[of_group])
            coefficients = self._floats[as_index(at[of_group]), :, None].unbind(1)
            along = None
            if kind in MEASURING:
                along = read_rows(self._vectors, w[of_group], hi + shift)[:, lo + shift :]
            own_cells = cells[of_group]
            if kind in (SCORE, ACTIVATE):
                assert along is not None
                own_rows = _columns(rows[members], lo, hi)
                above = coefficients[3] if kind == ACTIVATE else None
                self._cells.score(
                    members, as_index(own_cells), own_rows, along, coefficients[0], coefficients[1], above
                )
                continue
            if kind == DOSE:
                self._cells.measure(members, as_index(own_cells), rows[members], delta[members])
                continue
            if kind == ENCODE:
                continue
            into = read_rows(self._vectors, np.maximum(u[of_group], 0), hi + shift)[:, lo + shift :]
            if kind == HOOK:
                term = self._cells.held(members, coefficients[2][:, 0].long())[:, lo:hi] - rows[members, lo:hi]
            elif kind == HELD:
                held = self._cells.factors(members, coefficients[2][:, 0].long())
                term = (coefficients[0] * held + coefficients[1]) * into
            else:
                term = _term(kind, _columns(rows[members], lo, hi), into, along, *coefficients)
            acts = np.ones(len(own_cells), bool)
            gated = (own_cells >= 0).nonzero()[0]
            if len(gated):
                chosen = torch.from_numpy(gated)
                factors = self._cells.factors(members[chosen], as_index(own_cells[gated]))
                term[chosen] = _gated(term[chosen], factors)
                acts[gated] = (factors != 0)[:, 0].numpy()
            self.changed[moving[of_group][acts]] = True
            if hi - lo == rows.shape[1]:
                delta[members] += term
            else:
                delta[members, lo:hi] += term


def _gated(term: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return a term [n, d], or [d] for all rows, times the factors [n, 1]; nothing where these are 0."""
    return torch.where(factors != 0, term * factors, NOTHING_ADDED)


def _added_to_columns(
    rows: torch.Tensor, delta: torch.Tensor | None, lo: int, hi: int, term: torch.Tensor
) -> torch.Tensor:
    """Return what has been added to rows so far (None: nothing), with a term for some columns."""
    if delta is None:
        delta = torch.full_like(rows, NOTHING_ADDED)
    elif delta.dim() == 1:  # the same for all rows
        delta = delta.expand_as(rows).clone()
    delta[:, lo:hi] += term
    return delta


def _columns(rows: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return columns of rows; contiguous, so that sums do not depend on what is around them."""
    return rows if hi - lo == rows.shape[1] else rows[:, lo:hi].contiguous()


def _alike(fields: np.ndarray) -> Iterator[tuple[np.ndarray, int, int, int, int]]:
    """Divide nodes, int32 [n, 8], into those of equal kind and columns: yield a mask [n], kind, lo, hi and shift."""
    kinds, columns = fields[:, 0], fields[:, 5:]
    if (columns == columns[:1]).all():
        for kind in np.unique(kinds).tolist():
            yield kinds == kind, kind, *columns[0].tolist()
        return
    keys = fields[:, (0, 5, 6, 7)]
    for key in np.unique(keys, axis=0):
        yield (keys == key).all(1), *key.tolist()


def _term(
    kind: int,
    rows: torch.Tensor,
    u: torch.Tensor,
    w: torch.Tensor | None,
    a: float | torch.Tensor,
    b: float | torch.Tensor,
    low: Any,
    high: Any,
) -> torch.Tensor:
    """Return what one instruction adds to rows [n, d].

    `u` is added, and rows are measured along `w`, each [d] or [n, d]. The coefficients `a` and `b`, and
    `low` and `high`, the bounds of a clamp or bias and threshold of a feature, are floats or [n, 1].
    """
    if kind == BLEND:
        return a * (u - rows)
    if kind == CONST:
        return a * u
    if kind == NORM:
        return a * rows.norm(dim=1, keepdim=True) * u
    if kind == KEEP_NORM:
        norm = rows.norm(dim=1, keepdim=True)
        turned = rows + (a + b * norm) * u
        length = turned.norm(dim=1, keepdim=True)
        return torch.where(length > 0, turned * (norm / length) - rows, 0.0)
    assert w is not None
    along = (rows * w).sum(1, keepdim=True)
    if kind == AFFINE:
        return (a * along + b) * u
    if kind == CLAMP:
        return a * (along.clamp(low, high) - along) * u
    if kind == FEATURE:
        along = along + low
        return (a * torch.where(along > high, along, 0.0) + b) * u
    raise AssertionError(f"unknown instruction {kind}")


def read_rows(table: torch.Tensor, first: np.ndarray, width: int) -> torch.Tensor:
    """Return rows of `width` values; each begins at a row of the table and may go on in the next ones."""
    d_model = table.shape[1]
    if width == d_model:
        return table[as_index(first)]
    rows = [table[as_index(first + k)] for k in range(ring_rows(width, d_model))]
    return torch.cat(rows, 1)[:, :width]


def as_index(numbers: np.ndarray) -> torch.Tensor:
    """Return numbers as an index of tensors."""
    return torch.from_numpy(numbers.astype(np.int64))
