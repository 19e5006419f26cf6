"""`Hook`: a user's own function of the rows at a hook point."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import set_fields
from vllm_weir.schema.functions import Travelling, describe
from vllm_weir.schema.instructions import HOOK, Instruction, LoweredIntervention
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.vectors import MAX_ELEMENTS

MODES = ("auto", "eager")
MAX_ARGS = 64


class Call(msgspec.Struct, frozen=True):
    """What workers are told of a hook: the function, and its args as (dtype, shape, bytes) or numbers."""

    function: Travelling
    args: dict[str, Any]
    state: tuple[int, ...]


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
        args: tensors, arrays and numbers for ``ctx.args``, of this request.
        mode: ``"eager"`` runs the function between the engine's kernels: any Python; steps with such a request use no
            CUDA graph. ``"auto"`` is the same today.
        state: shape of ``ctx.state``, float32, which a sequence keeps from step to step for each layer; () for none.
        key: says that equal keys mean the same function and args, so that requests share the prefix cache; None:
            a request shares it with no other from the first selected position on.

    ``Hook(fn=..., layer_indices=..., pre=...)`` is vllm-lens's, see `LensHook`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return LensHook(*args, **kwargs) if "fn" in kwargs else super().__new__(cls)

    op: ClassVar[str] = "hook"
    factor: ClassVar[str] = "function"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {}
    function: Any
    hook: str = "resid_post"
    layers: Any = "all"
    positions: Any = "all"
    args: Any = None
    mode: str = "auto"
    state: Any = ()
    key: str | None = None
    per_layer: bool = field(default=False, kw_only=True)
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="hooks", repr=False, compare=False, kw_only=True)

    def _parse_numbers(self) -> None:
        if self.heads is not None or self.neurons is not None or self.per_layer:
            raise WeirError("a hook is given whole rows; pick heads or neurons in the function", f"{self.path}.heads")
        if self.mode not in MODES:
            compiled = "compiled hooks are not served yet; " if self.mode == "compiled" else ""
            raise WeirError(f"{compiled}expected one of {', '.join(MODES)}, got {self.mode!r}", f"{self.path}.mode")
        if not isinstance(self.function, Travelling):
            set_fields(self, function=describe(self.function, f"{self.path}.function"))
        state = (self.state,) if isinstance(self.state, int) else tuple(self.state)
        if not all(isinstance(size, int) and size > 0 for size in state) or np.prod(state, initial=1) > MAX_ELEMENTS:
            raise WeirError(f"expected a shape, got {self.state!r}", f"{self.path}.state")
        if self.key is not None and (not isinstance(self.key, str) or state):
            raise WeirError(
                "expected a text, and no state: a request that shares rows has not run there", f"{self.path}.key"
            )
        set_fields(self, args=_parse_args(self.args, f"{self.path}.args"), state=state)

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        call = msgspec.msgpack.encode(Call(self.function, self.args, self.state))
        key = f"key {self.key}" if self.key is not None else hashlib.sha256(call).hexdigest()[:32]
        return LoweredIntervention((Instruction(HOOK, "", b=float(self.key is None), key=key),), {}, calls={key: call})

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, which stays in this process."""
        return super().to_json() | {"function": self.function}


def _parse_args(args: Any, field: str) -> dict[str, Any]:
    """Return args as numbers and (dtype, shape, bytes)."""
    if args is None:
        return {}
    if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args) or len(args) > MAX_ARGS:
        raise WeirError(f"expected up to {MAX_ARGS} tensors and numbers by name", field)
    return {name: _parse_arg(value, f"{field}.{name}") for name, value in args.items()}


def _parse_arg(value: Any, field: str) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and len(value) == 3 and isinstance(value[2], bytes):
        return tuple(value)  # parsed before
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or array.size > MAX_ELEMENTS:
        raise WeirError(f"expected numbers, got {array.dtype} of shape {list(array.shape)}", field)
    array = np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else None)
    return str(array.dtype), array.shape, array.tobytes()
