"""`Grid`: an array whose axes have names and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.scalars import plain

Label = str | int


@dataclass(frozen=True, eq=False)
class Grid:
    """An array with named axes; ``np.asarray(grid)`` and ``grid[...]`` are the array.

    Attributes:
        array: the values.
        axes: name -> labels, in the order of the array's axes.

    Raises:
        WeirError: if labels and array do not fit together, or an axis has a label twice.
    """

    array: np.ndarray
    axes: Mapping[str, tuple[Label, ...]]

    def __post_init__(self) -> None:
        lengths = tuple(len(labels) for labels in self.axes.values())
        if lengths != self.array.shape:
            raise WeirError(f"labels for shape {list(lengths)}, and the array has {list(self.array.shape)}", "axes")
        for name, labels in self.axes.items():
            if len(set(labels)) < len(labels):
                raise WeirError("a label occurs twice", f"axes.{name}")

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.array.shape

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

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)
