"""What is read off rows on the device: `FeatureValues` of a sparse autoencoder, `LensTokens` of a lens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_weir.util import notebook
from vllm_weir.util.token_texts import SequenceTexts

MAX_RANKS = 10
"""Features or tokens of each row that a notebook shows."""


@dataclass(frozen=True)
class FeatureValues:
    """Features of a sparse autoencoder on the rows of one output.

    Attributes:
        positions: of the rows, int64 [rows].
        ids: int64 [rows, k]: the most active features, the largest activation first and equal ones
            by id; or the chosen ones, in their order.
        values: their activations, float32 [rows, k].
        texts: of the tokens, for notebooks.
    """

    positions: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    texts: SequenceTexts = field(default_factory=SequenceTexts, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"FeatureValues({len(self)} rows, {self.ids.shape[1]} features each)"

    def _repr_html_(self) -> str:
        """Return a map of tokens by rank, each cell with a feature's id and the colour of its activation."""
        shown, ranks = _first(self), min(self.ids.shape[1], MAX_RANKS)
        ids, values = self.ids[:shown, :ranks].tolist(), self.values[:shown, :ranks].numpy()
        return notebook.result(
            repr(self),
            notebook.heat_map(
                _labels(self, shown), [str(rank + 1) for rank in range(ranks)], values, "activation", "token",
                [list(map(str, row)) for row in ids], (len(self), self.ids.shape[1]),
            ),
        )  # fmt: skip


class LayerFeatures(dict[int, FeatureValues]):
    """`FeatureValues` of a cross-layer transcoder, by the block that reads them."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{layer}: {features!r}' for layer, features in self.items())}}}"

    def _repr_html_(self) -> str:
        """Return the blocks' maps of tokens by rank, one below another."""
        return "".join(f"<p>block {layer}</p>{features._repr_html_()}" for layer, features in self.items())


AnyFeatures = FeatureValues | LayerFeatures


def by_block(features: Mapping[str, AnyFeatures]) -> dict[tuple[str, int | None], FeatureValues]:
    """Return features by name and block; the block is None where an autoencoder has one alone."""
    found: dict[tuple[str, int | None], FeatureValues] = {}
    for name, one in features.items():
        found |= {(name, n): own for n, own in one.items()} if isinstance(one, LayerFeatures) else {(name, None): one}
    return found


def nested(found: Mapping[tuple[str, int | None], FeatureValues]) -> dict[str, AnyFeatures]:
    """Return what `by_block` was given."""
    features: dict[str, Any] = {}
    for (name, layer), one in found.items():
        if layer is None:
            features[name] = one
        else:
            features.setdefault(name, LayerFeatures())[layer] = one
    return features


@dataclass(frozen=True)
class LensTokens:
    """The likeliest next tokens by a lens on the rows of one output.

    Attributes:
        positions: of the rows, int64 [rows].
        token_ids: int64 [rows, k], the likeliest first and equally likely ones by id.
        logprobs: float32 [rows, k]: log-softmax over the whole vocabulary.
        texts: of the tokens, for notebooks.
    """

    positions: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    texts: SequenceTexts = field(default_factory=SequenceTexts, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"LensTokens({len(self)} rows, {self.token_ids.shape[1]} tokens each)"

    def _repr_html_(self) -> str:
        """Return a map of tokens by rank, each cell with a likely next token and the colour of its probability."""
        shown, ranks = _first(self), min(self.token_ids.shape[1], MAX_RANKS)
        probabilities = self.logprobs[:shown, :ranks].exp().numpy()
        cells = [[self.texts.texts.single(one) for one in row] for row in self.token_ids[:shown, :ranks].tolist()]
        return notebook.result(
            repr(self),
            notebook.heat_map(
                _labels(self, shown), [str(rank + 1) for rank in range(ranks)], probabilities, "probability", "token",
                cells, (len(self), self.token_ids.shape[1]),
            ),
        )  # fmt: skip


class LensReadings(dict[int, LensTokens]):
    """`LensTokens` of one lens by block."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{layer}: {tokens!r}' for layer, tokens in self.items())}}}"

    def _repr_html_(self) -> str:
        """Return a map of blocks by tokens, each cell with the likeliest next token."""
        if not self:
            return notebook.result(repr(self))
        first = next(iter(self.values()))
        alike = {n: one for n, one in self.items() if torch.equal(one.positions, first.positions)}
        few = dict(list(alike.items())[: notebook.MAX_ROWS])
        shown = min(len(first), notebook.MAX_COLUMNS)
        best = {n: one.logprobs[:shown].argmax(1, keepdim=True) for n, one in few.items()}
        ids = [one.token_ids[:shown].gather(1, best[n])[:, 0].tolist() for n, one in few.items()]
        cells = [[first.texts.texts.single(one) for one in row] for row in ids]
        numbers = np.stack([one.logprobs[:shown].gather(1, best[n])[:, 0].exp().numpy() for n, one in few.items()])
        columns = first.texts.at(first.positions[:shown].numpy())
        return notebook.result(
            f"the likeliest of the tokens that were read, at {len(self)} blocks",
            notebook.heat_map(
                list(map(str, few)), columns, numbers, "probability", "block", cells, (len(self), len(first)), True
            ),
        )


Lenses = LensReadings | dict[str, LensReadings]
"""What the lens of a request has read, by block; of several lenses by label."""


def lenses_of(by_label: Mapping[str, LensReadings]) -> Lenses:
    """Return what a request's output has of its lenses."""
    return dict(by_label) if len(by_label) > 1 else next(iter(by_label.values()), LensReadings())


def each_lens(lenses: Lenses) -> dict[str, LensReadings]:
    """Return the lenses by label, "" for the only one."""
    return {"": lenses} if isinstance(lenses, LensReadings) else lenses


def _first(rows: FeatureValues | LensTokens) -> int:
    """Return how many rows are shown."""
    return min(len(rows), notebook.MAX_ROWS)


def _labels(rows: FeatureValues | LensTokens, shown: int) -> list[str]:
    """Return the position and the token of each row that is shown."""
    at = rows.positions[:shown].numpy()
    texts = rows.texts.at(at)
    named = [str(position) for position in at.tolist()]
    return [place if place == text else f"{place} {notebook.visible(text)}" for place, text in zip(named, texts)]


@dataclass(frozen=True)
class ReadValues:
    """All that was read off the rows of one output."""

    features: Mapping[str, AnyFeatures]  # by the autoencoder's name; of a cross-layer transcoder by block then
    lens: Lenses  # by block; of several lenses by label

    @property
    def rows(self) -> int:
        """How many rows these are of, each counted once for each read-out."""
        lenses = (one for lens in each_lens(self.lens).values() for one in lens.values())
        read: list[Any] = [*by_block(self.features).values(), *lenses]
        return sum(map(len, read))
