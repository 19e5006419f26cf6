"""`Attribution`: first-order estimates of every patch, and the real effect of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch

from vllm_weir.experiments.grid import Grid, GridFile
from vllm_weir.experiments.metrics import Baseline
from vllm_weir.schema.hooks import HookPoint, Site
from vllm_weir.util import notebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vllm_weir.experiments.plots import HeatMapTable


FILE = GridFile("attribution", "grid")


@dataclass(frozen=True)
class EstimatedEffect:
    """What one patch is estimated to do to the metric.

    Attributes:
        site: hook point and block.
        position: of the token.
        head: None for the whole row.
        token: text of the token there, in the run that is patched.
        estimate: to first order.
    """

    site: Site
    position: int
    head: int | None
    token: str
    estimate: float

    @property
    def place(self) -> PatchedPlace:
        """Where the patch is made."""
        return PatchedPlace(self.site, self.position, self.head)


@dataclass(frozen=True)
class VerifiedEffect(EstimatedEffect):
    """An estimate beside what the patch really does.

    Attributes:
        effect: the metric of the patched run less that of the run without a patch.
    """

    effect: float


@dataclass(frozen=True)
class FeatureEffect:
    """What putting in one feature's activation, at one position, is estimated to do to the metric.

    Attributes:
        feature: its id.
        position: of the token.
        token: its text, in the run that is patched.
        activation: in the run that is patched.
        put_in: in the other run.
        estimate: to first order.
        label: what the feature stands for; empty if the autoencoder does not say.
    """

    feature: int
    position: int
    token: str
    activation: float
    put_in: float
    estimate: float
    label: str = ""


@dataclass(frozen=True)
class FeatureEffects:
    """The features of one autoencoder as places that are patched.

    Attributes:
        site: whose rows it encodes.
        top: features by position with the largest estimates by magnitude, largest first. Those
            with the same activation in both runs are left out.
        positions: those of the grid.
        totals: by position, the sum of the estimates of all features, not of `top` alone.
        errors: by position, the estimate of putting in what the autoencoder does not reconstruct.
            With `totals` it is the estimate of the whole row.
    """

    site: Site
    top: tuple[FeatureEffect, ...]
    positions: tuple[int, ...]
    totals: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Attribution:
    """First-order estimates of what every patch does to a metric; the largest are verified.

    Attributes:
        grid: the estimates; axes ``hook``, ``layer``, ``position``, and ``head`` if heads were
            asked for. An estimate is a change of the metric of the run that is patched.
        top: the places with the largest estimates by magnitude, largest first. Places where both
            runs have the same row are left out.
        verified: the same places, patched in runs of their own.
        verified_by: ``"engine"`` if these were runs of the engine, ``"twin"`` if they were runs of
            the transformers twin, because no engine was given.
        baseline: the metric of the unpatched runs, on the twin.
        engine_baseline: the same in the engine; None without one.
        twin_error: how far the engine's rows are from the twin's, the largest of all sites that
            were asked about, mean |difference| / |row|; None without an engine.
        mode: ``"denoise"`` (clean rows put into the corrupt run) or ``"noise"`` (the other way).
        metric: its name.
        tokens: texts of the tokens of the run that is patched.
        method: ``"gradient"`` or ``"integrated_gradients"``.
        steps: how many gradients each estimate is the mean of.
        features: those of each autoencoder that was given, by its name. They are not verified:
            ``weir.SetFeature`` patches one in an engine.
    """

    grid: Grid
    top: tuple[EstimatedEffect, ...]
    verified: tuple[VerifiedEffect, ...]
    verified_by: Literal["engine", "twin"]
    baseline: Baseline
    engine_baseline: Baseline | None
    twin_error: float | None
    mode: str
    metric: str
    tokens: tuple[str, ...]
    method: str = "gradient"
    steps: int = 1
    features: dict[str, FeatureEffects] = field(default_factory=dict)

    def table(self) -> str:
        """Return `verified` as text, one place a line."""
        head = ("place", "token", "estimate", "effect")
        lines = [(str(v.place), repr(v.token), f"{v.estimate:+.4f}", f"{v.effect:+.4f}") for v in self.verified]
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in [head, *lines])

    @overload
    def plot(self, path: None = None, *, hook: HookPoint | None = None) -> Figure: ...

    @overload
    def plot(self, path: str | PathLike, *, hook: HookPoint | None = None) -> list[Path]: ...

    def plot(self, path: str | PathLike | None = None, *, hook: HookPoint | None = None) -> Figure | list[Path]:
        """Draw a heat map for each hook point, layer by position.

        If heads were asked for, rows are heads of layers, or columns are heads if there is one position.

        Args:
            path: None to get the figure, which a notebook shows; ``.png`` or ``.svg``, one file for
                each hook point, whose name is added to the path if there are several; or ``.html``,
                likewise, with the numbers.
            hook: draw this hook point alone.

        Returns:
            Without a path a ``matplotlib.figure.Figure``, with one the files.

        Raises:
            WeirError: for another suffix, without matplotlib, or if a file cannot be written.
        """
        from vllm_weir.experiments.plots import draw_grid

        return draw_grid(self._tables(hook), f"estimated change of {self.metric}", path, one_page=False)

    def _tables(self, hook: str | None = None) -> list[HeatMapTable]:
        from vllm_weir.experiments.plots import grid_tables

        columns = [self.tokens[int(position)] for position in self.grid.axes["position"]]
        return grid_tables(self.grid, columns, f"attribution, {self.mode}", hook)

    def _repr_html_(self) -> str:
        from vllm_weir.experiments.plots import grid_html

        rows = [[str(v.place), v.token, f"{v.estimate:+.4f}", f"{v.effect:+.4f}"] for v in self.verified]
        found = notebook.table(("place", "token", "estimate", "effect"), rows)
        return grid_html(repr(self), self._tables(), f"estimated change of {self.metric}") + found

    def save(self, path: str | PathLike) -> Path:
        """Write a file that `load` reads: a ``.npz`` archive, whatever the path's suffix.

        Raises:
            WeirError: if it cannot be written.
        """
        return FILE.write(path, self)

    @classmethod
    def load(cls, path: str | PathLike) -> Attribution:
        """Read what `save` has written.

        Raises:
            WeirError: if the file cannot be read, or is anything else.
        """
        return FILE.read(path, cls)

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}: {len(labels)}" for name, labels in self.grid.axes.items())
        clean, corrupt = self.baseline
        verified = f"{len(self.verified)} verified by the {self.verified_by}"
        return f"Attribution({self.mode}, {shape}, clean {clean:.4g}, corrupt {corrupt:.4g}, {verified})"


def effects_of(places: Sequence[tuple[PatchedPlace, float]], tokens: Sequence[str]) -> tuple[EstimatedEffect, ...]:
    return tuple(EstimatedEffect(p.site, p.position, p.head, tokens[p.position], value) for p, value in places)


def first_order(source: torch.Tensor, base: torch.Tensor, gradient: torch.Tensor, by_head: bool) -> np.ndarray:
    """Estimate what rows of one run do to a metric in another; return [positions], `by_head` [positions, heads].

    The estimate is ``sum over d of (source - base) * gradient``, summed in float64, of rows [positions, ...] and the
    metric's gradient with respect to those of the base; `by_head` they are [positions, heads, d_head].
    """
    products = (source.double() - base.double()) * gradient.double()
    return products.flatten(2 if by_head else 1).sum(-1).cpu().numpy()


@dataclass(frozen=True)
class PatchedPlace:
    """A place that can be patched: the row of a site at a position, or one head of it."""

    site: Site
    position: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.site} at {self.position}" + ("" if self.head is None else f", head {self.head}")


def largest(grid: Grid, count: int) -> list[tuple[PatchedPlace, float]]:
    """Return the places with the largest estimates by magnitude, largest first, with their estimates.

    Places whose estimate is exactly 0 are left out: the two runs have the same rows there, or the
    metric does not depend on them.
    """
    numbers = grid.array.ravel()
    order = np.argsort(-np.abs(numbers), kind="stable")[:count]
    return [(_place(grid, index), float(numbers[index])) for index in order if numbers[index] != 0]


def _place(grid: Grid, index: int) -> PatchedPlace:
    labels: Sequence = [
        labels[i] for labels, i in zip(grid.axes.values(), np.unravel_index(index, grid.array.shape), strict=True)
    ]
    hook, layer, position, *head = labels
    return PatchedPlace(Site(str(hook), int(layer)), int(position), int(head[0]) if head else None)
