"""`GridFile`: results on disk, a grid of numbers and what is to be known of it, in one ``.npz`` archive."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.experiments.grid import Grid
from vllm_weir.util.atomic_write import atomic_write
from vllm_weir.util.foreign_files import damage_refused, npz_arrays, open_regular

T = TypeVar("T")


@dataclass(frozen=True)
class GridFile:
    """The format of one kind of result.

    Attributes:
        kind: what the file holds, such as ``"sweep"``.
        array: name of the grid's array in the archive.
        version: of the format.
    """

    kind: str
    array: str
    version: int = 1

    def write(self, path: str | PathLike, grid: Grid, about: Mapping[str, Any]) -> Path:
        """Write a file, whatever the path's suffix.

        Args:
            path: its name.
            grid: the numbers.
            about: the rest, JSON data.

        Raises:
            WeirError: if it cannot be written.
        """
        path = Path(path)
        axes = {name: list(labels) for name, labels in grid.axes.items()}
        header = {"format": self._format, "version": self.version, "axes": axes}
        arrays: dict[str, Any] = {self.array: grid.array, "about": np.array(json.dumps({**header, **about}))}
        try:
            with atomic_write(path) as file:
                np.savez(file, **arrays)
        except (OSError, ValueError) as e:
            raise WeirError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}", "path") from None
        return path

    def read(self, path: str | PathLike, build: Callable[[Grid, dict[str, Any]], T]) -> T:
        """Read a file that `write` has written.

        Args:
            path: its name.
            build: makes the result of the grid and of the rest.

        Raises:
            WeirError: if the file cannot be read, or is anything else.
        """
        with damage_refused(f"cannot read {path}", "path"):
            with open_regular(path) as file:
                arrays, _ = npz_arrays(file)
            about: dict[str, Any] = json.loads(str(arrays["about"]))
            if (about["format"], about["version"]) != (self._format, self.version):
                raise ValueError(f"no {self.kind}, or one of another version of Weir")
            grid = Grid(arrays[self.array], {name: tuple(labels) for name, labels in about["axes"].items()})
            return build(grid, about)

    @property
    def _format(self) -> str:
        return f"weir {self.kind}"
