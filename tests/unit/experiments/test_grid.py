"""`Grid`: labels in place of indices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.experiments.grid import Grid

LABELS = st.lists(st.one_of(st.integers(-9, 99), st.text(min_size=1, max_size=3)), min_size=1, max_size=4, unique=True)


@st.composite
def grids(draw: Any) -> Grid:
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    axes = {name: tuple(draw(LABELS)) for name in names}
    shape = tuple(map(len, axes.values()))
    return Grid(np.arange(np.prod(shape), dtype=float).reshape(shape), axes)


@given(grids(), st.data())
def test_a_label_is_an_index(grid: Grid, data: Any) -> None:
    index = tuple(data.draw(st.integers(0, n - 1)) for n in grid.shape)
    chosen = {name: labels[i] for (name, labels), i in zip(grid.axes.items(), index)}
    assert grid.sel(**chosen) == grid[index]
    part = grid.sel(**{name: [label] for name, label in chosen.items()})
    assert isinstance(part, Grid) and part.shape == (1,) * len(grid.axes) and part.array.item() == grid[index]
    assert grid.dims == tuple(grid.axes) and np.shares_memory(grid, grid.array) and len(grid) == grid.shape[0]


@given(grids(), st.data())
def test_the_order_of_selections_does_not_matter(grid: Grid, data: Any) -> None:
    name = data.draw(st.sampled_from(grid.dims))
    order = data.draw(st.permutations(grid.axes[name]))
    turned = grid.sel(**{name: list(order)})
    assert isinstance(turned, Grid) and turned.axes[name] == tuple(order)
    back = turned.sel(**{name: list(grid.axes[name])})
    assert isinstance(back, Grid) and (back.array == grid.array).all() and back.axes == grid.axes


def test_it_is_an_array() -> None:
    grid = Grid(np.arange(6.0).reshape(2, 3), {"layer": (0, 3), "position": (4, 5, -1)})
    assert isinstance(grid, np.ndarray) and grid.ndim == 2 and grid.size == 6
    assert grid.max() == np.max(grid) == 5 and grid.argmax() == 5 and isinstance(grid.mean(), float)
    for plain in (grid - 1, abs(grid), grid > 2, grid[0], grid.mean(0), np.exp(grid), grid.array):
        assert type(plain) is np.ndarray
    assert (grid - 1 == np.arange(-1.0, 5).reshape(2, 3)).all()
    assert np.unravel_index(np.abs(grid).argmax(), grid.shape) == (1, 2)
    assert not grid.T.axes and not grid.copy().axes  # of a view, nobody knows which axis is which
    for same in (pickle.loads(pickle.dumps(grid)), copy.deepcopy(grid)):  # noqa: S301
        assert type(same) is Grid and same.axes == grid.axes and (same.array == grid.array).all()


def test_refused() -> None:
    grid = Grid(np.zeros((2, 1)), {"layer": (0, 3), "position": (-1,)})
    for labels, field in (({"head": 0}, "head"), ({"layer": 1}, "layer"), ({"layer": [0, 7]}, "layer")):
        with refused(field):
            grid.sel(**labels)
    for array, axes, field in (
        (np.zeros(2), {"layer": (0,)}, "axes"),
        (np.zeros(2), {"layer": (1, 1)}, "axes.layer"),
    ):
        with refused(field):
            Grid(array, axes)
