"""`Hook`: a user's own function of the rows at a hook point."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import msgspec
import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import right_words, set_fields
from vllm_weir.schema.functions import Travelling, describe
from vllm_weir.schema.hooks import HookPoint
from vllm_weir.schema.instructions import HOOK, IN_GRAPHS, Instruction, LoweredIntervention
from vllm_weir.schema.intervention_base import Intervention, Lookup
from vllm_weir.schema.rows import WHOLE, RowShape
from vllm_weir.schema.vectors import MAX_ELEMENTS, as_array

HookMode = Literal["auto", "compiled", "eager"]
MODES: tuple[str, ...] = get_args(HookMode)
MAX_ARGS, MAX_TEXT = 64, 4096
MOST_BY_ROW = 16_384
"""Values of a compiled hook's arg up to which each row has its request's; a larger one is a part of the function."""


class Call(msgspec.Struct, frozen=True):
    """What workers are told of a hook: the function, and its args as (dtype, shape, bytes) or numbers.

    `picked` are the heads, each of `d_head` values, or the neurons (then `d_head` is 0) that the function is given;
    None for whole rows.
    """

    function: Travelling
    args: dict[str, Any]
    state: tuple[int, ...]
    picked: tuple[int, ...] | None = None
    d_head: int = 0
    compiled: bool = False

    @property
    def by_row(self) -> dict[str, Any]:
        """The args of which each row of a compiled call has its request's -> their dtype and shape."""
        arrays = {name: value[:2] for name, value in self.args.items() if isinstance(value, (tuple, list))}
        small = {name: alike for name, alike in arrays.items() if math.prod(alike[1]) <= MOST_BY_ROW}
        floats = {name: ("float32", ()) for name, value in self.args.items() if isinstance(value, float)}
        return dict(sorted((small | floats).items()))

    @property
    def identity(self) -> str:
        """Digest of what compiled calls that can be made together have in common."""
        function, by_row = self.function, self.by_row
        found = function.token, function.name, function.adapter
        fixed = [(name, value) for name, value in sorted(self.args.items()) if name not in by_row]
        return _digest(msgspec.msgpack.encode((found, fixed, by_row, self.state, self.picked, self.d_head)))

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads that the function is given, None for whole rows or neurons."""
        return self.picked if self.d_head else None

    @property
    def neurons(self) -> tuple[int, ...] | None:
        """The neurons that the function is given, None for whole rows or heads."""
        return None if self.d_head else self.picked


@dataclass(frozen=True)
class LensHook:
    """vllm-lens's `Hook`, for ``extra_args={"apply_hooks": [...]}`` and ``llm.register_hooks``.

    Args:
        fn: of (ctx, rows) with vllm-lens's `HookContext`; returns new rows, or None.
        layer_indices: blocks.
        pre: whether it gets what enters the block, not what leaves it.
    """

    fn: Callable[..., Any]
    layer_indices: Sequence[int]
    pre: bool = False


@right_words
@dataclass(frozen=True)
class Hook(Intervention):
    """Let a function of yours change the rows of a hook point, or say something of them.

    ``function(rows, ctx)`` is given rows [n, width] of one request at one layer, in the model's dtype and on its
    device: those of its positions in this step, a piece of its prompt or one token. It returns new rows [n, width];
    or ``(rows or None, {"name": values [n, ...]})``, whose values come back as ``out.values["name"]``; None changes
    nothing. `ctx` is a `HookContext`.

    Args:
        function: of (rows, ctx); from a module that the engine's process can import, or a def that uses modules and
            its arguments alone. Others run where the engine is in this process.
        hook: hook point.
        layers: as for `Add`.
        positions: selector, as for `Capture`.
        args: tensors, arrays and numbers for ``ctx.args``, of this request; the function gets floating vectors and
            matrices in the rows' dtype.
        mode: ``"eager"`` calls the function for each request: any Python. ``"compiled"`` calls it once for all
            requests that name it, mapped over rows [1, width] by `torch.func.vmap`, with each request's args and
            state: it must not look at values in Python, nor draw at random, nor mix positions. A step with
            an eager hook, or a compiled one with a state, uses no CUDA graph. ``"auto"`` is eager.
        state: shape of ``ctx.state``, float32, which a sequence keeps from step to step for each layer; () for none.
        key: says that equal keys mean the same function and args, so that requests share the prefix cache; None:
            a request shares it with no other from the first selected position on.
        heads: as for `Add`: the function is given these heads alone, rows [n, heads picked, d_head].
        neurons: likewise, of ``mlp_post``: rows [n, neurons picked].

    ``Hook(fn=..., layer_indices=..., pre=...)`` is vllm-lens's, see `LensHook`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return LensHook(*args, **kwargs) if "fn" in kwargs else super().__new__(cls)

    op: ClassVar[str] = "hook"
    factor: ClassVar[str] = "function"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {}
    function: Any
    hook: HookPoint = "resid_post"
    layers: Any = "all"
    positions: Any = "all"
    args: Any = None
    mode: HookMode = "auto"
    state: Any = ()
    key: str | None = None
    per_layer: bool = field(default=False, kw_only=True)
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="hooks", repr=False, compare=False, kw_only=True)

    def _parse_numbers(self) -> None:
        if self.per_layer:
            raise WeirError("a hook has no vectors; give what differs by layer by args", f"{self.path}.per_layer")
        if self.mode not in MODES:
            raise WeirError(f"expected one of {', '.join(MODES)}, got {self.mode!r}", f"{self.path}.mode")
        if not isinstance(self.function, Travelling):
            set_fields(self, function=describe(self.function, f"{self.path}.function"))
        state = (self.state,) if isinstance(self.state, int) else tuple(self.state)
        if not all(isinstance(size, int) and size > 0 for size in state) or np.prod(state, initial=1) > MAX_ELEMENTS:
            raise WeirError(f"expected a shape, got {self.state!r}", f"{self.path}.state")
        if self.key is not None and (not isinstance(self.key, str) or state):
            raise WeirError(
                "expected a text, and no state: a request that shares rows has not run there", f"{self.path}.key"
            )
        set_fields(self, args=parse_args(self.args, f"{self.path}.args", parse_arg), state=state)

    def lower(self, shape: RowShape, lookup: Lookup) -> LoweredIntervention:
        """Return the instruction that calls the function; raise WeirError for a head or neuron that rows do not have.

        The kernels see whole rows: the worker cuts the heads or neurons out of them, and puts the new ones back.
        """
        self.part.check(shape, self.hook, self.path)
        return self._lower(self.neurons, 0) if self.heads is None else self._lower(self.heads, shape[1])

    def _lower(self, picked: Any = None, d_head: int = 0) -> LoweredIntervention:
        """Return it for a part of rows; without one, for whole rows."""
        call = Call(self.function, self.args, self.state, picked, d_head, self.mode == "compiled")
        wire = msgspec.msgpack.encode(call)
        key = f"key {self.key}" if self.key is not None else _digest(wire)
        if self.key is not None and self.part != WHOLE:
            key += f" of {_digest(msgspec.msgpack.encode((picked, d_head)))}"
        if call.compiled and not call.state:
            key = f"{call.identity}{IN_GRAPHS}{key}"
        return LoweredIntervention((Instruction(HOOK, "", b=float(self.key is None), key=key),), {}, calls={key: wire})

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, which stays in this process."""
        return super().to_json() | {"function": self.function}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def parse_args(args: Any, field: str, parse: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return args by name, each parsed by `parse`."""
    if args is None:
        return {}
    if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args) or len(args) > MAX_ARGS:
        raise WeirError(f"expected up to {MAX_ARGS} tensors and numbers by name", field)
    return {name: parse(value, f"{field}.{brief(name)}") for name, value in args.items()}


def parse_arg(value: Any, field: str) -> Any:
    """Return a number or text as it is, and a tensor, array or nested list as (dtype, shape, bytes).

    Floats become float32; integers and bools keep their dtype.
    """
    if isinstance(value, (tuple, list)) and len(value) == 3 and isinstance(value[2], bytes):
        return tuple(value)  # parsed before
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise WeirError("expected a number of 64 bits", field)
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise WeirError(f"{len(value)} characters, more than the limit of {MAX_TEXT}", field)
        return value
    if hasattr(value, "detach") and not value.is_floating_point():
        value = value.detach().cpu().numpy()
    array = as_array(value, field)
    if array.dtype.kind not in "fiub" or array.size > MAX_ELEMENTS:
        raise WeirError(f"expected numbers, got {array.dtype} of shape {list(array.shape)}", field)
    with np.errstate(over="ignore"):
        array = np.array(array, np.float32 if array.dtype.kind == "f" else None, order="C")
    return str(array.dtype), array.shape, array.tobytes()
