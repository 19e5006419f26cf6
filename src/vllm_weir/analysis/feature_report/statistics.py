"""Statistics of features over a dataset, and where each is most active; two passes in bounded memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_weir.storage.features.dataset import FeatureDataset
from vllm_weir.storage.features.parts import RecordFeatures

BINS = 40
"""Bins of a histogram."""


@dataclass(frozen=True, eq=False)
class FeatureTotals:
    """Counts over all rows of a dataset."""

    rows: int  # number of rows
    full_rows: int  # rows with as many active features as were asked for, which may have more
    active: np.ndarray  # rows on which each feature is active, int64 [d_sae]
    largest: np.ndarray  # its largest activation, float32 [d_sae]; 0 if it is never active
    total: np.ndarray  # sum of its activations, float64 [d_sae]

    @property
    def density(self) -> np.ndarray:
        """Share of the rows on which each feature is active, float64 [d_sae]."""
        return self.active / max(self.rows, 1)

    @property
    def mean(self) -> np.ndarray:
        """Mean activation of each feature where it is active, float64 [d_sae]."""
        return self.total / np.maximum(self.active, 1)


@dataclass(frozen=True)
class Peak:
    """Where a feature is most active in a record."""

    value: float  # its activation
    record: int  # the record
    row: int  # index of the row in the record


@dataclass(frozen=True, eq=False)
class FeatureDetails:
    """What is known of one feature."""

    histogram: np.ndarray  # rows by activation, int64 [BINS], in bins of equal width from 0 to `largest`
    peaks: tuple[Peak, ...]  # of the records in which it is most active, the most active first


def totals_of(dataset: FeatureDataset) -> FeatureTotals:
    """Count over all rows of a dataset."""
    d_sae, limit = dataset.info.d_sae, dataset.info.top_k
    active, total = np.zeros(d_sae, np.int64), np.zeros(d_sae)
    largest = np.zeros(d_sae, np.float32)
    rows = full = 0
    for record in dataset:
        rows += len(record)
        if limit is not None and limit < d_sae:
            full += int((np.diff(record.offsets) == limit).sum())
        active += np.bincount(record.ids, minlength=d_sae)
        total += np.bincount(record.ids, record.values, d_sae)
        np.maximum.at(largest, record.ids, record.values)
    return FeatureTotals(rows, full, active, largest, total)


def details_of(
    records: Iterable[RecordFeatures], features: Sequence[int], totals: FeatureTotals, contexts: int
) -> dict[int, FeatureDetails]:
    """Return the histogram of each feature, and the records in which it is most active.

    Args:
        records: of the dataset that `totals` are of.
        features: which ones.
        totals: `totals_of` the dataset.
        contexts: how many records of each feature; among equal ones the earlier ones.
    """
    chosen = np.array(features, np.int64)
    place = np.full(len(totals.active), -1)
    place[chosen] = np.arange(len(chosen))
    width = np.maximum(totals.largest[chosen].astype(np.float64), np.finfo(np.float32).tiny) / BINS
    histograms = np.zeros((len(chosen), BINS), np.int64)
    peaks: list[list[Peak]] = [[] for _ in features]
    for record in records:
        at = place[record.ids]
        found = np.flatnonzero(at >= 0)
        if not len(found):
            continue
        at, values = at[found], record.values[found]
        bins = np.minimum((values / width[at]).astype(np.int64), BINS - 1)
        np.add.at(histograms, (at, bins), 1)
        rows = np.searchsorted(record.offsets, found, side="right") - 1
        for peak_of, row, value in _peaks(at, rows, values):
            bisect.insort(peaks[peak_of], Peak(value, record.record, row), key=_rank)
            del peaks[peak_of][contexts:]
    return {feature: FeatureDetails(histograms[i], tuple(peaks[i])) for i, feature in enumerate(features)}


def _peaks(features: np.ndarray, rows: np.ndarray, values: np.ndarray) -> list[tuple[int, int, float]]:
    """Return each feature's first largest activation in a record: (feature, row, value)."""
    order = np.lexsort((rows, -values, features))
    _, first = np.unique(features[order], return_index=True)
    chosen = order[first]
    return list(zip(features[chosen].tolist(), rows[chosen].tolist(), values[chosen].tolist()))


def _rank(peak: Peak) -> tuple[float, int]:
    return -peak.value, peak.record
