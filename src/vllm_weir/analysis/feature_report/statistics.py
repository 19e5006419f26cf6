"""What an autoencoder's features do in a dataset, and what they add to logits."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.hooks import MODEL_HOOKS, STREAM_HOOKS
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


TOKENS = 10
"""Tokens of each side."""


@dataclass(frozen=True)
class LogitEffects:
    """Tokens with the change of their logit by one unit of a feature, the largest change first."""

    raised: tuple[tuple[int, float], ...]
    lowered: tuple[tuple[int, float], ...]


class CheckpointUnembedding:
    """The weight of a model's final norm, and its unembedding.

    The division by the norm of the stream, which is the same for all tokens, is left out, and so
    are a scale and a soft cap of the logits: none changes the order of the tokens.

    `weight`: of the norm, float32 [d_model]: what its output is multiplied by; `centres`: whether the norm subtracts
    the mean, as LayerNorm does; `matrix`: [vocabulary, d_model].
    """

    def __init__(self, weight: torch.Tensor, centres: bool, matrix: torch.Tensor) -> None:
        self.weight, self.centres, self.matrix = weight, centres, matrix

    @classmethod
    def of_checkpoint(cls, model: str) -> CheckpointUnembedding:
        """Read them from a twin of a checkpoint in transformers, on the CPU."""
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            network = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as e:
            raise WeirError(f"transformers cannot load {model}: {' '.join(str(e).split())[:160]}", "model") from None
        return cls.of_network(network)

    @classmethod
    def of_network(cls, network: Any) -> CheckpointUnembedding:
        head = network.get_output_embeddings()
        if head is None:
            raise WeirError(f"{type(network).__name__} has no unembedding", "model")
        norm, width = _final_norm(network, head)
        weight, centres = _norm_weight(copy.deepcopy(norm).float(), width)
        return cls(weight, centres, head.weight.detach())

    @torch.no_grad()
    def effects(self, direction: np.ndarray, count: int = TOKENS) -> LogitEffects:
        """Return the tokens whose logits a direction of the stream raises and lowers most."""
        vector = torch.from_numpy(np.asarray(direction, np.float32))
        if vector.shape != self.weight.shape:
            raise WeirError(f"the model's stream has width {len(self.weight)}, the feature's {len(vector)}", "model")
        if self.centres:
            vector = vector - vector.mean()
        logits = torch.cat([part.float() @ (vector * self.weight) for part in self.matrix.split(1 << 15)])
        high, low = logits.topk(min(count, len(logits))), (-logits).topk(min(count, len(logits)))
        return LogitEffects(
            tuple(zip(high.indices.tolist(), high.values.tolist())),
            tuple(zip(low.indices.tolist(), (-low.values).tolist())),
        )


def check_site(sae: SAE) -> None:
    hook = sae.out_site.hook
    if hook not in STREAM_HOOKS and (hook not in MODEL_HOOKS or hook == "final_norm"):
        raise WeirError(f"its features write to {sae.out_site}, which is not the residual stream", "sae")


@torch.no_grad()
def _final_norm(network: Any, head: Any) -> tuple[torch.nn.Module, int]:
    """Return the module whose output the unembedding reads, and the width of the stream."""
    returned: list[tuple[torch.nn.Module, torch.Tensor]] = []
    read: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and not any(True for _ in module.children()):
            returned.append((module, output))

    hooks = [module.register_forward_hook(keep) for module in network.modules()]
    hooks.append(head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0])))
    try:
        network(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # All outputs are still there, so the first with this memory is of the module that made it.
    for module, output in returned:
        if read and output.data_ptr() == read[-1].data_ptr() and all(p.dim() < 2 for p in module.parameters()):
            return module, output.shape[-1]
    raise WeirError(f"no norm comes right before the unembedding of {type(network).__name__}", "model")


@torch.no_grad()
def _norm_weight(norm: torch.nn.Module, width: int) -> tuple[torch.Tensor, bool]:
    """Return what a norm multiplies by, and whether it subtracts the mean.

    Classes name and apply their weights differently, as 1 + weight in Gemma, so this is measured:
    rows of 1 and -1 in turn have mean 0 and norm sqrt(width), which the norm leaves as they are.
    """
    signs = torch.ones(width)
    signs[1::2] = -1

    def odd_part(row: torch.Tensor) -> torch.Tensor:
        return (norm(row[None, None])[0, 0] - norm(-row[None, None])[0, 0]) / 2

    weight = odd_part(signs) * signs
    ones = odd_part(torch.ones(width))
    return weight, bool(ones.abs().max() < 1e-3 * weight.abs().max())
