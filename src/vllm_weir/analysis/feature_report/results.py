"""What a report on features shows, as data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_weir.analysis.feature_report.logit_effects import LogitEffects
from vllm_weir.analysis.feature_report.statistics import FeatureTotals
from vllm_weir.storage.features.dataset import FeatureInfo
from vllm_weir.util.token_texts import TokenTexts


@dataclass(frozen=True)
class ContextToken:
    """A token of a context, and the activation of the context's feature on it."""

    text: str
    token_id: int
    position: int
    value: float


@dataclass(frozen=True)
class FeatureContext:
    """Tokens around the one on which a feature is most active in a record.

    Attributes:
        record: the record.
        value: the feature's largest activation there.
        tokens: neighbouring rows of the record.
        cut: whether the record has rows before these, and after these.
    """

    record: int
    value: float
    tokens: tuple[ContextToken, ...]
    cut: tuple[bool, bool]


@dataclass(frozen=True, eq=False)
class FeatureReport:
    """What a page shows of a feature.

    Attributes:
        feature: its number.
        density: share of the rows on which it is active.
        active: number of these rows.
        largest: its largest activation.
        mean: its mean activation where it is active.
        histogram: rows by activation, in bins of equal width from 0 to `largest`.
        contexts: of the records in which it is most active.
        effects: the tokens whose logits it changes most; None if not known.
    """

    feature: int
    density: float
    active: int
    largest: float
    mean: float
    histogram: np.ndarray
    contexts: tuple[FeatureContext, ...]
    effects: LogitEffects | None


@dataclass(frozen=True, eq=False)
class SAEReport:
    """All that a page shows.

    Attributes:
        info: which autoencoder, and which of its features the dataset holds.
        records: number of records of the dataset.
        totals: counts over all its rows.
        features: the chosen features.
        texts: texts of tokens.
        notes: sentences on what is left out, and why.
    """

    info: FeatureInfo
    records: int
    totals: FeatureTotals
    features: tuple[FeatureReport, ...]
    texts: TokenTexts
    notes: tuple[str, ...]
