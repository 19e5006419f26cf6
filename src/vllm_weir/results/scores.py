"""`Scores`: what probes say of the rows of one output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from vllm_weir.results.site_slices import without_base
from vllm_weir.util import notebook
from vllm_weir.util.token_texts import SequenceTexts

MAX_SHOWN = 8
"""Probes that a notebook shows."""


class Scores(Mapping):
    """Scores of probes by name: ``out.scores["refusal"]`` is a CPU tensor, float32 [rows, k].

    There is a row for each position that the probe scores, in ascending order. Of P prompt tokens and G generated ones,
    these are the first P+G-1 positions, as for captures: the last token never enters the model. Where a probe ended
    generation, the last token did, for its score is what ended it: then its row, at position P+G-1, is there too. In
    a stream, each output but the last has the rows of all its tokens.

    Args:
        values: the scores, by the probe's name.
        positions: int64 [rows], by the probe's name.

    Attributes:
        positions: int64 [rows], by the probe's name.
    """

    texts = SequenceTexts()
    """Of the tokens, for notebooks."""
    _missing = "no probe {!r} scored this request; probes: {}"

    def __init__(self, values: Mapping[str, torch.Tensor], positions: Mapping[str, torch.Tensor]) -> None:
        self._values = dict(values)
        self.positions = dict(positions)

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(self._missing.format(name, ", ".join(self) or "none")) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getstate__(self) -> dict[str, object]:
        values = {name: without_base(tensor) for name, tensor in self._values.items()}
        return {"_values": values, "positions": {name: without_base(at) for name, at in self.positions.items()}}

    @property
    def rows(self) -> int:
        """How many scores there are, each counted once for each probe."""
        return sum(map(len, self._values.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {list(values.shape)}' for name, values in self.items())})"

    def _repr_html_(self) -> str:
        """Return the tokens, coloured by the score of each probe."""
        few = list(self.items())[:MAX_SHOWN]
        parts = [_of_rows(name, values, self.positions[name], self.texts) for name, values in few]
        return notebook.result(type(self).__name__, *parts, notebook.left_out(len(self), len(few), "names"))


def _of_rows(name: str, values: torch.Tensor, positions: torch.Tensor, texts: SequenceTexts) -> str:
    """Return the HTML of one name: the tokens coloured by its values [rows, ...]."""
    width = math.prod(values.shape[1:])
    limit = notebook.MAX_TOKENS if width == 1 else notebook.MAX_COLUMNS
    numbers = values[:limit].reshape(-1, width).numpy()[:, : notebook.MAX_ROWS]
    tokens = texts.at(positions[:limit].numpy())
    if width == 1:
        return notebook.coloured_text(tokens, numbers[:, 0], name, len(values))
    rows = list(map(str, range(numbers.shape[1])))
    return notebook.heat_map(rows, tokens, numbers.T, name, "output", total=(width, len(values)))


class HookValues(Scores):
    """What functions gave for rows: ``out.values["norm"]`` is a CPU tensor, float32 [rows, ...], by position.

    What a hook gave at several layers is [rows, layers, ...], of the positions at which all gave something.
    """

    _missing = "no hook gave {!r} for this request; given: {}"
