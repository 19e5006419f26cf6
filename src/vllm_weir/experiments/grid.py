"""Numbers with labelled axes, and files of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
from pydantic import TypeAdapter

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import plain
from vllm_weir.util.atomic_write import atomic_write
from vllm_weir.util.foreign_files import damage_refused, npz_arrays, open_regular

Label = str | int


class Grid(np.ndarray[Any, np.dtype[Any]]):
    """An array with named axes.

    Elements, slices and results of arithmetic are plain; `sel` keeps the names. Other views, such as
    ``grid.T``, have none: their `axes` are empty.

    Attributes:
        axes: name -> labels, in the order of the array's axes.

    Raises:
        WeirError: if labels and array do not fit together, or an axis has a label twice.
    """

    axes: Mapping[str, tuple[Label, ...]]

    def __new__(cls, array: np.ndarray, axes: Mapping[str, tuple[Label, ...]]) -> Grid:
        lengths = tuple(len(labels) for labels in axes.values())
        if lengths != array.shape:
            raise WeirError(f"labels for shape {list(lengths)}, and the array has {list(array.shape)}", "axes")
        for name, labels in axes.items():
            if len(set(labels)) < len(labels):
                raise WeirError("a label occurs twice", f"axes.{name}")
        grid = array.view(cls)
        grid.axes = axes
        return grid

    def __array_finalize__(self, made_from: Any) -> None:
        self.axes = {}

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Grid if self.axes else np.array, (self.array, dict(self.axes)) if self.axes else (self.array,))

    def __deepcopy__(self, memo: Any) -> Any:
        return Grid(self.array.copy(), dict(self.axes)) if self.axes else self.array.copy()

    @property
    def array(self) -> np.ndarray:
        """The same numbers without names."""
        return self.view(np.ndarray)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.axes)

    def sel(self, **labels: Any) -> Grid | float:
        """Return the part at some labels, such as ``sel(hook="resid_post", layer=[3, 4])``.

        Args:
            **labels: axis -> one label, which drops the axis, or a list of labels, which keeps it.

        Returns:
            A `Grid`, or a float where no axis is left.

        Raises:
            WeirError: if there is no such axis or label.
        """
        array, axes = self.array, dict(self.axes)
        for name, wanted in labels.items():
            if name not in axes:
                raise WeirError(f"there is no such axis; the axes are {', '.join(self.axes)}", name)
            number = list(axes).index(name)
            if isinstance(wanted, (list, tuple, range, np.ndarray)):
                chosen = [self._index(axes[name], label, name) for label in wanted]
                array = array.take(chosen, axis=number)
                axes[name] = tuple(axes[name][i] for i in chosen)
            else:
                array = array.take(self._index(axes[name], wanted, name), axis=number)
                del axes[name]
        return Grid(np.asarray(array), axes) if axes else float(array)

    @staticmethod
    def _index(labels: tuple[Label, ...], label: Any, name: str) -> int:
        label = plain(label)
        if label not in labels:
            raise WeirError(f"there is no {brief(label)!r}; the labels are {brief(list(labels), 200)}", name)
        return labels.index(label)


T = TypeVar("T")


@dataclass(frozen=True)
class GridFile:
    """The format of one kind of result: a dataclass of grids, of which one is stored, and of JSON data."""

    kind: str  # what the file holds, such as ``"sweep"``
    array: str  # name of the grid's array in the archive
    version: int = 1  # of the format

    def write(self, path: str | PathLike, result: Any) -> Path:
        """Write a result to a file, whatever the path's suffix; raise WeirError if it cannot be written."""
        path, grid = Path(path), getattr(result, self.array)
        about = {name: value for name, value in vars(result).items() if not isinstance(value, Grid)}
        axes = {name: list(labels) for name, labels in grid.axes.items()}
        header = {"format": self._format, "version": self.version, "axes": axes}
        arrays: dict[str, Any] = {
            self.array: grid.array,
            "about": np.array(json.dumps({**header, **about}, default=vars)),
        }
        try:
            with atomic_write(path) as file:
                np.savez(file, **arrays)
        except (OSError, ValueError) as e:
            raise WeirError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}", "path") from None
        return path

    def read(self, path: str | PathLike, kind: type[T], **grids: Callable[[Grid], Grid]) -> T:
        """Return the result in a file that `write` has written; raise WeirError if it is anything else.

        `grids` are made of the one that is stored. What earlier versions did not write is as by default.
        """
        with damage_refused(f"cannot read {path}", "path"):
            with open_regular(path) as file:
                arrays, _ = npz_arrays(file)
            about: dict[str, Any] = json.loads(str(arrays["about"]))
            if (about["format"], about["version"]) != (self._format, self.version):
                raise ValueError(f"no {self.kind}, or one of another version of Weir")
            grid = Grid(arrays[self.array], {name: tuple(labels) for name, labels in about["axes"].items()})
            types = {name: hint for name, hint in get_type_hints(kind).items() if hint is not Grid}
            known = {name: TypeAdapter(types[name]).validate_python(about[name]) for name in types if name in about}
            return kind(**{self.array: grid}, **{name: make(grid) for name, make in grids.items()}, **known)

    @property
    def _format(self) -> str:
        return f"weir {self.kind}"
