"""`Sweep`: the result of a sweep, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.experiments.grid import Grid, GridFile
from vllm_weir.experiments.metrics import DENOISE, Baseline
from vllm_weir.experiments.sweep.plan import BASE_RUN, SOURCE_RUN, SweepPlan
from vllm_weir.schema.hooks import HookPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vllm_weir.experiments.plots import HeatMapTable

FILE = GridFile("sweep", "by_pair")


@dataclass(frozen=True, eq=False)
class Sweep:
    """The metric of each patched run.

    Attributes:
        grid: mean over the pairs of prompts; axes ``hook``, ``layer``, ``position``, and ``head``
            if heads were swept.
        by_pair: the same with an axis ``pair`` before the others.
        baseline: the metric of the unpatched runs.
        noise_floor: largest change of the metric when the base run's own rows are put back, over
            all hook points, layers and pairs: what the engine's arithmetic changes between batches.
            Smaller effects say nothing.
        mode: ``"denoise"`` (the corrupt run with clean rows put in) or ``"noise"`` (the clean run
            with corrupt rows).
        metric: its name.
        to: the receiver of the path, as text; empty for none.
        position_labels: of the axis ``position``, with the tokens of the base prompt.
    """

    grid: Grid
    by_pair: Grid
    baseline: Baseline
    noise_floor: float
    mode: str
    metric: str
    to: str
    position_labels: tuple[str, ...]

    @classmethod
    def of(cls, plan: SweepPlan, values: Mapping[int, float], metric: str, labels: tuple[str, ...]) -> Sweep:
        """Make the result of a plan's numbers, by key."""
        numbers = np.array([values[key] for key in range(plan.keys)], np.float64).reshape(len(plan.pairs), -1)
        source, base = numbers[:, SOURCE_RUN], numbers[:, BASE_RUN]
        cells, own = numbers[:, 2 : 2 + plan.cells], numbers[:, 2 + plan.cells :]
        cells = cells.reshape(len(plan.pairs), *plan.shape)
        clean, corrupt = (source, base) if plan.mode == DENOISE else (base, source)
        return cls(
            Grid(cells.mean(0), plan.axes),
            Grid(cells, {"pair": tuple(range(len(plan.pairs))), **plan.axes}),
            Baseline(float(clean.mean()), float(corrupt.mean())),
            float(np.abs(own - base[:, None]).max()),
            plan.mode, metric, "" if plan.to is None else str(plan.to), labels,
        )  # fmt: skip

    @property
    def normalised(self) -> Grid:
        """The grid as a share of the way from the run that is patched, 0, to the other run, 1.

        Raises:
            WeirError: if the metric is the same in both, so that there is no way to go.
        """
        clean, corrupt = self.baseline
        base, source = (corrupt, clean) if self.mode == DENOISE else (clean, corrupt)
        if source == base:
            raise WeirError("the clean and the corrupt run have the same metric; use .grid", "metric")
        return Grid((self.grid.array - base) / (source - base), self.grid.axes)

    @overload
    def plot(self, path: None = None, *, hook: HookPoint | None = None, normalised: bool = True) -> Figure: ...

    @overload
    def plot(self, path: str | PathLike, *, hook: HookPoint | None = None, normalised: bool = True) -> list[Path]: ...

    def plot(
        self, path: str | PathLike | None = None, *, hook: HookPoint | None = None, normalised: bool = True
    ) -> Figure | list[Path]:
        """Draw a heat map for each hook point, layer by position, or by head.

        With heads and several positions, rows are heads of layers.

        Args:
            path: None to get the figure, which a notebook shows; ``.png`` or ``.svg``, one file for
                each hook point, whose name is added to the path if there are several; or ``.html``,
                one page with all of them.
            hook: draw this hook point alone.
            normalised: draw `normalised`; False draws the metric itself, as does a sweep whose two
                unpatched runs have the same metric.

        Returns:
            Without a path a ``matplotlib.figure.Figure``, with one the files.

        Raises:
            WeirError: for another suffix, without matplotlib, or if a file cannot be written.
        """
        from vllm_weir.experiments.plots import draw_grid

        tables, label = self._tables(hook, normalised)
        return draw_grid(tables, label, path, one_page=True)

    def _tables(self, hook: str | None = None, normalised: bool = True) -> tuple[list[HeatMapTable], str]:
        """Return the numbers of the hook points, and what they are."""
        from vllm_weir.experiments.plots import grid_tables

        about = f"path to {self.to}, {self.mode}" if self.to else self.mode
        if normalised and self.baseline.clean != self.baseline.corrupt:
            ends = "corrupt 0, clean 1" if self.mode == DENOISE else "clean 0, corrupt 1"
            grid, label = self.normalised, f"{self.metric}: {ends}"
        else:
            grid, label = self.grid, self.metric
        return grid_tables(grid, self.position_labels, about, hook), label

    def _repr_html_(self) -> str:
        from vllm_weir.experiments.plots import grid_html

        return grid_html(repr(self), *self._tables())

    def save(self, path: str | PathLike) -> Path:
        """Write a file that `load` reads: a ``.npz`` archive, whatever the path's suffix.

        Raises:
            WeirError: if it cannot be written.
        """
        return FILE.write(path, self)

    @classmethod
    def load(cls, path: str | PathLike) -> Sweep:
        """Read what `save` has written.

        Raises:
            WeirError: if the file cannot be read, or is anything else.
        """
        return FILE.read(path, cls, grid=_mean_of_pairs)

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}: {len(labels)}" for name, labels in self.grid.axes.items())
        clean, corrupt = self.baseline
        return f"Sweep({self.mode}, {shape}, clean {clean:.4g}, corrupt {corrupt:.4g}, noise {self.noise_floor:.2g})"


def _mean_of_pairs(by_pair: Grid) -> Grid:
    return Grid(by_pair.array.mean(0), {name: labels for name, labels in by_pair.axes.items() if name != "pair"})
