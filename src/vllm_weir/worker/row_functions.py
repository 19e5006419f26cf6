"""Compiled hooks: functions of one row, called once for the rows of all requests that name them.

`torch.func.vmap` maps a function of rows [1, width] over rows [n, width] of several requests, each with the args and
the state of its own request. A function that looks at values in Python (``if``, ``float(..)``) or draws at random
cannot be mapped, and raises.

A state goes from position to position. So where sequences have several rows in a step, the first call has the first
row of each, the second one the second rows, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.user_hooks import Call

_NOT_OWN = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
MOST_COPIED = 2**25
"""Values of the args of all rows together up to which one call serves several requests."""


class Given(NamedTuple):
    """What a function gave."""

    rows: torch.Tensor | None  # [n, width], None for none
    values: dict[str, torch.Tensor]  # [n, ...] float32 by name
    # bool [n], which rows were finite and are not now; None if there are no new rows
    spoiled: torch.Tensor | None = None
    states: torch.Tensor | None = None  # [n, ...], None for a function without a state


class RowContext:
    """What a compiled function is told beside its row: the attributes of `HookContext` that rows can have."""

    def __init__(
        self, call: Call, site: Site, positions: torch.Tensor, args: Mapping[str, Any], state: torch.Tensor | None
    ) -> None:
        self.hook, self.layer, self.positions, self.args, self.state = site.hook, site.layer, positions, args, state
        self.heads, self.neurons = call.heads, call.neurons

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"ctx.{name} is not there in compiled hooks; mode='eager' has it")


class _OnDevice(TorchFunctionMode):
    """Gives torch what a function holds on the CPU as copies on the device of its rows, which are made once.

    These are tensors of its closure and lists that it indexes with. A CUDA graph that is captured can
    copy nothing from the CPU; copies are made in the pass that comes before it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._copies: Any = WeakIdKeyDictionary()
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            self_, index = args
            args = self_, tuple(map(self._index, index)) if isinstance(index, tuple) else self._index(index)
        return func(*map(self._moved, args), **{name: self._moved(value) for name, value in (kwargs or {}).items()})

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.dim():
            return value
        if value not in self._copies:
            self._copies[value] = value.to(self._device)
        return self._copies[value]

    def _index(self, index: Any) -> Any:
        if not isinstance(index, list) or not all(type(one) is int for one in index):
            return self._moved(index)
        key = tuple(index)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, dtype=torch.int64, device=self._device)
        return self._indices[key]


class RowFunction:
    """A function that is mapped over rows.

    `call`: one of those that it serves. `function`: the user's. `args`: of the call; those that belong to requests are
    replaced.
    """

    def __init__(self, call: Call, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self._call, self.name, self._function = call, call.function.name, function
        self.by_row = call.by_row
        self._fixed = {name: value for name, value in args.items() if name not in self.by_row}
        self.values_by_row = sum(math.prod(shape) for _, shape in self.by_row.values())
        self._on_device: _OnDevice | None = None

    def __call__(
        self,
        site: Site,
        positions: torch.Tensor,
        rows: torch.Tensor,
        args: Mapping[str, torch.Tensor],
        states: torch.Tensor | None = None,
        alone: bool = False,
    ) -> Given:
        """Call the function on rows of several requests.

        Args:
            site: of the rows.
            positions: int64 [n].
            rows: [n, width].
            args: `by_row`, each [n, ...].
            states: float32 [n, ...], None for a function without a state.
            alone: whether the args are those of all rows, without a first dimension.

        Raises:
            WeirError: if it raises, or returns something else than rows and values.
        """
        own_rows, changes = part_of(self._call, rows), True
        fixed = in_dtype(self._fixed, rows.dtype)
        args = {name: arg.to(self.dtype_of(name, rows.dtype)) for name, arg in args.items()}

        def mapped(row: torch.Tensor, position: torch.Tensor, own: dict[str, Any], state: torch.Tensor | None) -> Any:
            nonlocal changes
            context = RowContext(self._call, site, position[None], {**fixed, **own}, state)
            new, values = returned_of(self._function(row[None].clone(), context), row[None], self.name)
            changes = new is not None
            state = None if state is None else state_of(context.state, state, self.name)
            return row if new is None else new[0], {key: value[0] for key, value in values.items()}, state

        own_dim: Any = None if states is None else 0
        try:
            mapping = torch.func.vmap(mapped, (0, 0, None if alone else 0, own_dim), (0, 0, own_dim))
            with self._constants(rows.device):
                new, values, states = mapping(own_rows, positions, args, states)
        except WeirError:
            raise
        except Exception as e:
            raise WeirError(f"{told_of(self.name, e)}; mode='eager' calls it for one request at a time", "hooks") from e
        values = {key: value.float() for key, value in values.items()}
        if not changes:
            return Given(None, values, states=states)
        return Given(with_part(self._call, rows, new), values, spoiled(own_rows, new), states)

    def dtype_of(self, name: str, rows: torch.dtype) -> torch.dtype:
        """Return the dtype in which a function gets one of `by_row` for rows of a dtype."""
        dtype, shape = self.by_row[name]
        return _arg_dtype(getattr(torch, dtype), len(shape), rows)

    def _constants(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if device.type == "cpu":
            return contextlib.nullcontext()
        if self._on_device is None:
            self._on_device = _OnDevice(device)
        return self._on_device


def _arg_dtype(own: torch.dtype, dims: int, rows: torch.dtype) -> torch.dtype:
    """Return the dtype in which a function gets a tensor arg with so many dimensions.

    A number, or a tensor without dimensions, does not change the dtype of what it is multiplied with.
    """
    return rows if own.is_floating_point and dims else own


def in_dtype(args: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return args with floating vectors and matrices in the dtype of the rows that they meet."""
    return {
        name: value.to(_arg_dtype(value.dtype, value.dim(), dtype)) if isinstance(value, torch.Tensor) else value
        for name, value in args.items()
    }


def stacked(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return an arg of several requests as a tensor [requests, ...]."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(tuple(values))
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def part_of(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """Return of rows [n, width] the heads [n, heads, d_head] or neurons [n, neurons] that a function is given."""
    if call.picked is None:
        return rows
    return _by_head(call, rows).index_select(1, _picked(call, rows.device))


def with_part(call: Call, rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return rows [n, width] with what a function has returned for its part of them."""
    if call.picked is None:
        return part
    new = rows.to(torch.float32, copy=True)
    _by_head(call, new).index_copy_(1, _picked(call, rows.device), part.float())
    return new


def _by_head(call: Call, rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(1, (-1, call.d_head)) if call.d_head else rows


@functools.lru_cache(maxsize=1024)
def _index(picked: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(picked, device=device)


def _picked(call: Call, device: torch.device) -> torch.Tensor:
    assert call.picked is not None
    return _index(tuple(call.picked), device)


def spoiled(rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return bool [n], which rows [n, ...] are finite, and no longer are as new ones in the same dtype."""
    return _finite(rows) & ~_finite(new.to(rows.dtype))


def _finite(rows: torch.Tensor) -> torch.Tensor:
    # One kernel: the greatest absolute value of a row with NaN is NaN.
    return torch.linalg.vector_norm(rows.flatten(1), torch.inf, dim=1).isfinite()


def returned_of(returned: Any, rows: torch.Tensor, name: str) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the rows (None for none) and the values by name that a function returned for rows [n, ...].

    Raises WeirError if it returned something else.
    """
    new, given = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if new is not None and not _is_like(new, rows):
        raise WeirError(f"the hook {name} returned {_brief(new)} for rows {list(rows.shape)} on {rows.device}", "hooks")
    if not isinstance(given, Mapping):
        raise WeirError(f"the hook {name} returned {_brief(given)} where values by name belong", "hooks")
    for key, value in given.items():
        if not isinstance(value, torch.Tensor) or value.shape[:1] != rows.shape[:1]:
            raise WeirError(
                f"the hook {name} gave {_brief(value)} as {key!r}, not a value for each of {len(rows)} rows", "hooks"
            )
    return new, dict(given)


def state_of(left: Any, before: torch.Tensor, name: str) -> torch.Tensor:
    """Return the state that a function left; raise WeirError if it has not the shape of the one before."""
    if not isinstance(left, torch.Tensor) or left.shape != before.shape:
        raise WeirError(f"the hook {name} left a state that has not the shape {list(before.shape)}", "hooks")
    return left


def told_of(name: str, error: BaseException) -> str:
    """Return what a function raised, and the last place outside Weir and torch, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((one for one in reversed(frames) if not one.filename.startswith(_NOT_OWN)), frames[-1])
    where = f"line {last.lineno} of {last.name}" + (f": {last.line}" if last.line else "")
    return f"the hook {name} raised {type(error).__name__}: {error} ({where})"


def _is_like(new: Any, rows: torch.Tensor) -> bool:
    """Return whether what a function returned can stand for rows."""
    return isinstance(new, torch.Tensor) and (new.shape, new.device, new.layout) == (
        rows.shape,
        rows.device,
        rows.layout,
    )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"
