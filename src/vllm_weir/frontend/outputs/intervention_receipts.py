"""What a receipt says of each intervention: where it acted, and how often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.results.receipt import GateCount, InterventionReceipt
from vllm_weir.schema.gates import COSINE_PREFIX, PREFIX, split_feature_name
from vllm_weir.schema.hooks import Site
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


def gate_counts(
    admitted: AdmittedRequest,
    verified: Sequence[Sequence[VerifiedIntervention]],
    acted_at: Callable[[int, ResolvedIntervention], np.ndarray],
) -> tuple[GateCount | None, ...]:
    """Return what became of the gate of each intervention asked for.

    `acted_at` returns the positions at which one with a gate, of that index, has changed rows.
    """
    out: list[GateCount | None] = []
    for given, resolved in zip(admitted.interventions, verified, strict=True):
        gate = given.gate
        if gate < 0:
            out.append(None)
            continue
        most = max(resolved, key=lambda one: one.asked, default=None)
        acted = _NOWHERE if most is None else acted_at(gate, most.intervention)
        controller = admitted.gates[gate].controller
        scored = admitted.probes[admitted.gates[gate].probe]
        probe, feature = split_feature_name(f"{PREFIX}{controller}" if controller else scored.name)
        counts: GateCount = {
            "probe": probe,
            "fired": len(acted),
            "of": 0 if most is None else most.asked,
            "spans": _spans(acted),
        }
        if feature is not None:
            counts["feature"] = feature
        if scored.cosine and not controller:
            counts |= {"probe": probe.removeprefix(COSINE_PREFIX), "metric": "cosine"}
        out.append(counts)
    return tuple(out)


def changed_by_intervention(
    verified: Sequence[Sequence[VerifiedIntervention]],
    changed_positions: Callable[[ResolvedIntervention], np.ndarray],
    cached_tokens: int,
) -> list[tuple[dict[Site, int], int]]:
    """Return site -> rows changed, and shared positions, of each intervention asked for.

    An intervention that was asked for can have become several, one of them for each of its
    layers.
    """
    out = []
    for resolved in verified:
        sites = {
            Site(one.intervention.hook, layer): one.changed for one in resolved for layer in one.intervention.layers
        }
        shared = max((one.cached for one in resolved), default=0)
        moves = [one.intervention for one in resolved]
        if shared and len(moves) > 1 and any(move.per_position for move in moves):
            # A term whose vector is zero at its layer is not among that layer's positions.
            positions = np.unique(np.concatenate([changed_positions(move) for move in moves]))
            shared = int(np.searchsorted(positions, cached_tokens))
        out.append((dict(sorted(sites.items())), shared))
    return out


def _spans(positions: np.ndarray) -> list[list[int]]:
    """Return the ranges that ascending positions form, as [first, end]."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1) if len(positions) else []
    return [[int(run[0]), int(run[-1]) + 1] for run in runs]


_NOWHERE = np.zeros(0, np.int64)
