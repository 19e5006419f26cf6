"""What a receipt says of each intervention: where it acted, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.frontend.admission.admit import AdmittedRequest
from vllm_weir.results.receipt import InterventionReceipt
from vllm_weir.schema.instructions import ResolvedIntervention


class VerifiedIntervention(NamedTuple):
    """What has become of one resolved intervention.

    Attributes:
        intervention: None for one that changes nothing.
        changed: how many positions it has changed.
        cached: how many were changed when their KV was computed, by another request.
        gate: index of its gate, or -1.
        asked: how many positions it was asked for; 0 without a gate.
    """

    intervention: ResolvedIntervention | None
    changed: int = 0
    cached: int = 0
    gate: int = -1
    asked: int = 0


def intervention_receipts(
    admitted: AdmittedRequest,
    verified: Sequence[VerifiedIntervention],
    acted: Callable[[VerifiedIntervention], np.ndarray],
) -> tuple[InterventionReceipt, ...]:
    """Return what became of each intervention that was asked for.

    Args:
        admitted: the request.
        verified: what became of each of its ``moves``.
        acted: returns the positions that one of these has changed for this sequence, ascending.
    """
    remaining, out = iter(verified), []
    for given, count in zip(admitted.given, admitted.parted, strict=True):
        parts = [one for one in itertools.islice(remaining, count) if one.intervention is not None]
        layers = sorted(layer for one in parts if one.intervention for layer in one.intervention.layers)
        out.append(InterventionReceipt(given.op, given.hook, tuple(layers), _positions(parts, acted)))
    return tuple(out)


def _positions(parts: Sequence[VerifiedIntervention], acted: Callable[[VerifiedIntervention], np.ndarray]) -> int:
    """Return at how many positions one intervention has changed a row at any block."""
    if len(parts) > 1 and any(one.intervention.per_position for one in parts if one.intervention):
        # Where a position's vector is zero at one block it need not be at another.
        return len(np.unique(np.concatenate([acted(one) for one in parts])))
    return max((one.changed for one in parts), default=0)
