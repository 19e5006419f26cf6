"""`Scores`: what probes say of the rows of one output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from vllm_weir.results.site_slices import without_base


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


class HookValues(Scores):
    """What functions gave for rows: ``out.values["norm"]`` is a CPU tensor, float32 [rows, ...], by position.

    What a hook gave at several layers is [rows, layers, ...], of the positions at which all gave something.
    """

    _missing = "no hook gave {!r} for this request; given: {}"
