"""What a receipt says of each intervention: where it acted, and how often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.results.receipt import InterventionReceipt
from vllm_weir.schema.instructions import NO_NORM, ResolvedIntervention


class VerifiedIntervention(NamedTuple):
    """What has become of one resolved intervention.

    Attributes:
        intervention: one of an `AdmittedIntervention`.
        changed: how many positions it has changed.
        cached: how many were changed when their KV was computed, by another request.
        gate: index of its gate, or -1.
        asked: how many positions it was asked for; 0 without a gate.
    """

    intervention: ResolvedIntervention
    changed: int
    cached: int
    gate: int = -1
    asked: int = 0


def intervention_receipts(
    admitted: AdmittedRequest,
    verified: Sequence[Sequence[VerifiedIntervention]],
    acted: Callable[[VerifiedIntervention], np.ndarray],
    doses: Callable[[int, int, np.ndarray], np.ndarray],
) -> tuple[InterventionReceipt, ...]:
    """Return what became of each intervention that was asked for; `verified` says it of each's ``moves``.

    `acted` returns the positions that one of these has changed for this sequence, ascending; `doses` is as
    `ScoredRows.doses`.

    Raises:
        WeirError: if what `acted` and `doses` wait for does not come.
    """
    out, cell = [], admitted.cells.doses
    for given, parts in zip(admitted.interventions, verified, strict=True):
        by_layer: dict[int, np.ndarray] = {}
        for one in parts:
            layers = one.intervention.layers
            found = doses(cell, len(layers), acted(one)) if admitted.dose else np.empty((0, len(layers)))
            cell += len(layers)
            by_layer.update((layer, _of_rows(found[:, k])) for k, layer in enumerate(layers))
        by_layer = dict(sorted(by_layer.items()))
        rows = [row for row in by_layer.values() if len(row)]
        out.append(
            InterventionReceipt(
                given.op,
                given.hook,
                tuple(by_layer),
                _positions(parts, acted),
                float(np.concatenate(rows).mean()) if rows else None,
                {layer: float(row.mean()) for layer, row in by_layer.items() if len(row)},
            )
        )
    return tuple(out)


def _of_rows(doses: np.ndarray) -> np.ndarray:
    """Return the doses of rows, float64, without those of rows of zeros."""
    return doses[doses != NO_NORM].astype(np.float64)


def _positions(parts: Sequence[VerifiedIntervention], acted: Callable[[VerifiedIntervention], np.ndarray]) -> int:
    """Return at how many positions one intervention has changed a row at any block."""
    if len(parts) > 1 and any(one.intervention.per_position for one in parts):
        # Where a position's vector is zero at one block it need not be at another.
        return len(np.unique(np.concatenate([acted(one) for one in parts])))
    return max((one.changed for one in parts), default=0)
