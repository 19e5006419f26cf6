"""Parts of rows: the heads and the neurons that a capture or an intervention picks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import HEAD_HOOKS, NEURON_HOOKS
from vllm_weir.schema.row_shapes import RowShape
from vllm_weir.schema.scalars import is_int, plain

MAX_PICKED = 65_536
"""Most heads or neurons that one capture or intervention can list."""
_LARGEST = 2**31 - 1
_HOOKS = {"heads": HEAD_HOOKS, "neurons": NEURON_HOOKS}


class RowPart(NamedTuple):
    """What is picked of a row.

    Attributes:
        heads: those picked, in the order given; None: all.
        neurons: likewise.
    """

    heads: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, hook: str, heads: object, neurons: object, path: str) -> RowPart:
        """Parse the fields `heads` and `neurons` of a capture or an intervention.

        Each is None, an int, or several in a list, range, array or tensor: distinct, not negative,
        and at least one.

        Args:
            hook: the hook point.
            heads: as given.
            neurons: as given.
            path: of the capture or intervention; errors name ``path.heads`` or ``path.neurons``.
        """
        if heads is None and neurons is None:
            return WHOLE
        return cls(_parse(hook, "heads", heads, path), _parse(hook, "neurons", neurons, path))

    def check(self, shape: RowShape, hook: str, path: str) -> None:
        """Raise WeirError, naming the field, for a head or neuron that a row of this shape does not have."""
        for name, picked in self._asdict().items():
            if picked is not None and max(picked) >= shape[0]:
                one = name.removesuffix("s")
                raise WeirError(
                    f"{one} {max(picked)} does not exist: {hook} has {name} 0..{shape[0] - 1}", f"{path}.{name}"
                )

    def to_json(self) -> dict[str, list[int]]:
        """Return the fields of the wire form, those that are None left out."""
        return {name: list(picked) for name, picked in self._asdict().items() if picked is not None}


WHOLE = RowPart()


def _parse(hook: str, name: str, value: object, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    field = f"{path}.{name}"
    if hook not in _HOOKS[name]:
        raise WeirError(
            f"{name} picks from the rows of {', '.join(_HOOKS[name])}; {hook} has no {name}: leave {name} out", field
        )
    numbers = tuple(_number(one, name, field) for one in _listed(value, name, field))
    if not numbers:
        raise WeirError(f"an empty list picks nothing; list some, or leave {name} out for all", field)
    if len(set(numbers)) < len(numbers):
        twice = next(number for k, number in enumerate(numbers) if number in numbers[:k])
        raise WeirError(f"{name.removesuffix('s')} {twice} is listed twice; list each once", field)
    return numbers


def _listed(value: Any, name: str, field: str) -> Sequence[Any]:
    """Return a single int, or the entries of a list, range, array or tensor, as a sequence."""
    value = plain(value)
    if is_int(value):
        return (value,)
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)):
        raise WeirError(f"{name} is an int or a list of ints, got {type(value).__name__}", field)
    if len(value) > MAX_PICKED:
        raise WeirError(f"{len(value)} entries, more than the limit of {MAX_PICKED}; use several", field)
    return value


def _number(value: Any, name: str, field: str) -> int:
    number = plain(value)
    if not is_int(number):
        raise WeirError(f"expected an int, got {type(value).__name__}", field)
    if number < 0:
        raise WeirError(f"{name.removesuffix('s')} {brief(number)} does not exist: {name} count from 0", field)
    if number > _LARGEST:
        raise WeirError(f"{name.removesuffix('s')} {brief(number)} does not exist", field)
    return int(number)
