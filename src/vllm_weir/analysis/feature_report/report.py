"""`sae_report`: a page on the features of a sparse autoencoder, from features of a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.analysis.feature_report.page import ContextToken, FeatureContext, FeatureReport, SAEReport, render
from vllm_weir.analysis.feature_report.statistics import (
    CheckpointUnembedding,
    FeatureTotals,
    LogitEffects,
    Peak,
    check_site,
    details_of,
    totals_of,
)
from vllm_weir.errors import StoreError, WeirError, brief
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.transfer import digest_of
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.storage.features.dataset import FeatureDataset, FeatureInfo, load_features
from vllm_weir.storage.features.parts import RecordFeatures
from vllm_weir.util.atomic_write import atomic_write
from vllm_weir.util.shipped import model_path
from vllm_weir.util.token_texts import TokenTexts

ORDERS = ("max", "density")
BEFORE, AFTER = 24, 12
"""Tokens of a context before and after its most active one."""


def sae_report(
    sae: SAE | str | os.PathLike,
    features: FeatureDataset | str | os.PathLike,
    out: str | os.PathLike,
    *,
    feature: Any = None,
    top: int | None = None,
    order: str = "max",
    contexts: int = 12,
    model: str | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Callable[[str], Any] = lambda step: None,
) -> SAEReport:
    """Write a page on features of a sparse autoencoder: one HTML file that loads nothing else.

    It shows, for each feature, the contexts in which it is most active, on which share of the
    tokens it is active, a histogram of its activations, and the tokens whose logits it raises and
    lowers most.

    Args:
        sae: The autoencoder, or the path of one.
        features: What ``weir extract --sae`` wrote with it: a folder, or what `load_features`
            returned.
        out: The file.
        feature: A feature, or several, to show.
        top: As many features instead, chosen by `order`; by default 50.
        order: ``"max"``: those with the largest activations; ``"density"``: those active on most
            tokens.
        contexts: Most contexts of a feature, each of another record.
        model: Directory or hub id of the model, for texts of tokens and effects on logits; None for
            the one that read the texts. It is loaded by transformers, on the CPU.
        storage_options: Options for fsspec, of the features.
        progress: Called with what is done next.

    Returns:
        What the page shows.

    Raises:
        WeirError: Naming the argument, if it is wrong, or the features are of another autoencoder.
    """
    if order not in ORDERS:
        raise WeirError(f"choose from {', '.join(ORDERS)}, got {brief(order)!r}", "order")
    _check_count(contexts, "contexts")
    if top is not None:
        _check_count(top, "top")
    dataset = features
    if not isinstance(dataset, FeatureDataset):
        dataset = load_features(dataset, storage_options=storage_options)
    if not len(dataset):
        raise WeirError(f"{dataset.url} holds no records", "features")
    autoencoder = _matching(sae, dataset)
    model = model_path(dataset.info.model if model is None else model)
    progress("counting")
    totals = totals_of(dataset)
    chosen = _chosen(feature, top, order, dataset.info, totals)
    progress("looking for contexts")
    details = details_of(dataset, chosen, totals, contexts)
    notes: list[str] = []
    texts = _texts(model, notes)
    progress("reading the model")
    effects = _effects(autoencoder, chosen, model, notes)
    found = _contexts(dataset, {one: details[one].peaks for one in chosen}, texts)
    shown = [
        FeatureReport(
            one, float(totals.density[one]), int(totals.active[one]), float(totals.largest[one]),
            float(totals.mean[one]), details[one].histogram, found[one], effects.get(one),
        )
        for one in chosen
    ]  # fmt: skip
    report = SAEReport(dataset.info, len(dataset), totals, tuple(shown), texts, tuple(notes))
    try:
        with atomic_write(Path(out)) as file:
            file.write(render(report).encode())
    except OSError as e:
        raise StoreError(f"cannot write {out}: {e.strerror or e}", "out") from None
    return report


def _check_count(count: Any, field: str) -> None:
    if not is_int(count) or count < 1:
        raise WeirError(f"expected a number, at least 1, got {brief(count)}", field)


def _matching(sae: Any, dataset: FeatureDataset) -> SAE:
    """Return the autoencoder; raise WeirError unless the features are of it."""
    if not isinstance(sae, SAE):
        try:
            # Where the run read, which may be elsewhere than the file says; the digest tells whether it is the one.
            sae = SAE.load(sae, site=dataset.info.site)
        except WeirError as e:
            raise WeirError(str(e), "sae") from None
    if digest_of(sae) != dataset.info.digest:
        raise WeirError(
            f"{dataset.url} has features of another autoencoder, {dataset.info.sae!r} at {dataset.info.site}; name "
            "the one that they were extracted with",
            "sae",
        )
    return sae


def _chosen(feature: Any, top: int | None, order: str, info: FeatureInfo, totals: FeatureTotals) -> list[int]:
    if feature is not None:
        if top is not None:
            raise WeirError("give feature or top, not both", "top")
        return _named(feature, info)
    known = np.arange(info.d_sae) if info.ids is None else np.array(info.ids)
    known = known[totals.active[known] > 0]
    by = totals.largest if order == "max" else totals.density
    ranked = known[np.lexsort((known, -by[known]))]
    return ranked[: 50 if top is None else top].tolist()


def _named(feature: Any, info: FeatureInfo) -> list[int]:
    feature = plain(feature)
    several = feature if isinstance(feature, Sequence) and not isinstance(feature, str) else [feature]
    found: list[int] = []
    for one in map(plain, several):
        if not is_int(one) or not 0 <= one < info.d_sae:
            raise WeirError(f"features count from 0 to {info.d_sae - 1}, got {brief(one)}", "feature")
        if info.ids is not None and one not in info.ids:
            raise WeirError(f"feature {one} was not extracted; extracted were {brief(list(info.ids), 80)}", "feature")
        if one not in found:
            found.append(int(one))
    if not found:
        raise WeirError("name at least one", "feature")
    return found


def _texts(model: str, notes: list[str]) -> TokenTexts:
    try:
        return TokenTexts.of_checkpoint(model)
    except WeirError as e:
        notes.append(f"Tokens are shown as ids: {e.message}.")
        return TokenTexts()


def _effects(sae: SAE, features: Sequence[int], model: str, notes: list[str]) -> dict[int, LogitEffects]:
    """Return the effects on logits, or nothing and a note that says why."""
    try:
        check_site(sae)
        # A block of a cross-layer transcoder adds to the stream at several blocks, and all of that reaches the end.
        directions = {one: np.atleast_2d(sae.decoder_direction(one)).sum(0) for one in features}
        unembedding = CheckpointUnembedding.of_checkpoint(model)
        return {feature: unembedding.effects(direction) for feature, direction in directions.items()}
    except WeirError as e:
        notes.append(f"Effects on logits are left out: {e.message}.")
        return {}


def _contexts(
    dataset: FeatureDataset, peaks: dict[int, tuple[Peak, ...]], texts: TokenTexts
) -> dict[int, tuple[FeatureContext, ...]]:
    """Return the contexts of each feature's peaks; records are read in their order, which is how files have them."""
    wanted = sorted((peak.record, feature, place) for feature, of in peaks.items() for place, peak in enumerate(of))
    made = {
        (feature, place): _context(dataset[record], peaks[feature][place], feature, texts)
        for record, feature, place in wanted
    }
    return {feature: tuple(made[feature, place] for place in range(len(of))) for feature, of in peaks.items()}


def _context(record: RecordFeatures, peak: Peak, feature: int, texts: TokenTexts) -> FeatureContext:
    """Return the rows around a peak, up to the first gap between positions."""
    first, end = max(peak.row - BEFORE, 0), min(peak.row + AFTER + 1, len(record))
    gaps = np.flatnonzero(np.diff(record.positions[first:end]) != 1) + first
    first = max([first, *(gap + 1 for gap in gaps.tolist() if gap < peak.row)])
    end = min([end, *(gap + 1 for gap in gaps.tolist() if gap >= peak.row)])
    ids, positions = record.token_ids[first:end].tolist(), record.positions[first:end].tolist()
    values = record.of(feature)[first:end].tolist()
    tokens = tuple(map(ContextToken, texts.pieces(ids), ids, positions, values))
    return FeatureContext(record.record, peak.value, tokens, (first > 0, end < len(record)))
