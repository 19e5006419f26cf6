"""Heat maps of an attribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_weir.analysis.plot_style import save
from vllm_weir.experiments.grid import Grid
from vllm_weir.experiments.heat_map import HeatMapTable, by_head, draw_heat_map, hooks_to_draw, paths_by_hook


def draw(grid: Grid, tokens: Sequence[str], label: str, mode: str, path: Path, hook: str | None) -> list[Path]:
    """Draw an attribution: what `Attribution.plot` does.

    Args:
        grid: the estimates.
        tokens: texts of all tokens of the prompt.
        label: what an estimate is.
        mode: for the titles.
        path: see `Attribution.plot`.
        hook: see `Attribution.plot`.
    """
    hooks = hooks_to_draw(grid, hook)
    drawn = []
    for name, target in zip(hooks, paths_by_hook(path, hooks), strict=True):
        part = grid.sel(hook=name)
        assert isinstance(part, Grid)
        figure, title, cells = draw_heat_map(table_of(part, tokens), label, f"{name}: attribution, {mode}")
        drawn.append(save(figure, target, title, cells))
    return drawn


def table_of(part: Grid, tokens: Sequence[str]) -> HeatMapTable:
    """Return a hook point's estimates, rows by positions."""
    columns = [tokens[int(position)] for position in part.axes["position"]]
    if "head" not in part.axes:
        return HeatMapTable(part.array, [str(layer) for layer in part.axes["layer"]], columns, "layer")
    numbers, rows = by_head(part)
    return HeatMapTable(numbers, rows, columns, "layer.head")
