"""`Use`: a registered hook by its name, with args of the request's own."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.fields import plain, refuse_unknown_keys, right_words, set_fields, with_fields
from vllm_weir.schema.gates import When
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.user_hooks import Hook, parse_arg, parse_args
from vllm_weir.schema.vectors import Vector, decode, is_finite

MAX_NAME = 256
NO_CODE = (
    "code never comes over HTTP: the server's operator loads a function with --weir-hook NAME=module:attribute, and a "
    "request names it"
)
_CODE = ("function", "fn", "code", "source", "pickle", "cloudpickle", "hook_fn")
"""Keys under which other systems, or a hopeful client, send code."""


@right_words
@dataclass(frozen=True)
class Use:
    """Have a registered `Hook` act on a request, by its name.

    What is left out is as it was registered. A request uses the hook that the name stands for when the request is
    admitted.

    Args:
        name: of a hook that `register_hook` or ``weir serve --weir-hook`` has registered.
        args: those that differ, by name: numbers, texts and tensors of the registered kinds and shapes; for a tensor
            also a nested list, ``{"b64", "dtype", "shape"}``, or the name of a registered vector.
        layers: as for `Hook`.
        positions: selector, as for `Capture`.
        when: a `When`, the condition under which it acts.

    Raises:
        WeirError: naming the field.
    """

    op: ClassVar[str] = Hook.op
    wire_fields: ClassVar[tuple[str, ...]] = ("op", "name", "args", "layers", "positions", "when")
    name: str
    args: Any = None
    layers: Any = None
    positions: Any = None
    when: Any = None
    path: str = field(default="hooks", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME:
            raise WeirError(f"the name of a hook is a text of 1 to {MAX_NAME} characters", f"{self.path}.name")
        at = f"{self.path}.positions"
        set_fields(
            self,
            args=parse_args(self.args, f"{self.path}.args", _parse_own),
            layers=None if self.layers is None else parse_layers(self.layers, f"{self.path}.layers"),
            positions=None if self.positions is None else Positions.parse(self.positions, at),
            when=When.parse(self.when, f"{self.path}.when"),
        )

    @classmethod
    def from_json(cls, data: object, path: str = "hooks") -> Use:
        """Parse the wire form; raise WeirError for unknown keys, and for code."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise WeirError(f"a hook is an object with a name, got {type(data).__name__}; {NO_CODE}", path)
        for key in _CODE:
            if key in data:
                raise WeirError(NO_CODE, f"{path}.{key}")
        refuse_unknown_keys(data, cls.wire_fields, path)
        if "name" not in data:
            raise WeirError("missing", f"{path}.name")
        if data.get("op", cls.op) != cls.op:
            raise WeirError(f"expected {cls.op!r}, got {brief(data['op'])!r}", f"{path}.op")
        return cls(**{key: value for key, value in data.items() if key != "op"}, path=path)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, what is as registered left out."""
        out: dict[str, Any] = {"op": self.op, "name": self.name}
        if self.args:
            out["args"] = {name: _to_json(value) for name, value in self.args.items()}
        if self.layers is not None:
            out["layers"] = self.layers if isinstance(self.layers, str) else list(self.layers)
        for name in ("positions", "when"):
            if (value := getattr(self, name)) is not None:
                out[name] = value.to_json()
        return out

    given: ClassVar[tuple[Vector, ...]] = ()
    """As of an intervention: the vectors that it has; its tensors are args."""

    def with_vectors(self, change: Callable[[Vector, str], Vector]) -> Use:
        """Return itself, as an intervention without vectors does."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of its args that are tensors."""
        return sum(len(value[2]) for value in self.args.values() if isinstance(value, tuple))

    def settled(self, hook: Hook) -> Use:
        """Return what can be kept: with the args of the hook that it was resolved to, which name no vectors."""
        return with_fields(self, args={name: hook.args[name] for name in self.args})

    def resolve(self, registered: Hook, lookup: Callable[[str, str], np.ndarray]) -> Hook:
        """Return the registered hook with what this changes.

        Args:
            registered: under the name.
            lookup: (name of a vector, field) -> the float32 array; raises WeirError naming the field if there is none.

        Raises:
            WeirError: naming the arg that the hook does not have, or not in this shape or kind.
        """
        own: dict[str, Any] = {}
        for name, value in self.args.items():
            at = f"{self.path}.args.{brief(name)}"
            if name not in registered.args:
                raise WeirError(
                    f"the hook {self.name!r} has no such arg; {nearest(name, registered.args, 'it has')}", at
                )
            own[name] = _fitted(value, registered.args[name], at, lookup)
        changed = {name: getattr(self, name) for name in ("layers", "positions", "when")}
        changed = {name: value for name, value in changed.items() if value is not None}
        if own and registered.key is not None:  # equal keys mean equal args, too
            changed["key"] = f"{registered.key} {hashlib.sha256(msgspec.msgpack.encode(own)).hexdigest()[:32]}"
        return replace(registered, args=registered.args | own, path=self.path, **changed)


def nearest(name: object, known: Mapping[str, Any], listed: str) -> str:
    """Return the end of an error about an unknown name: the one that may be meant, or the first of those there are."""
    near = difflib.get_close_matches(brief(name), known, n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"{listed} {', '.join(sorted(known)[:20])}{more}" if known else f"{listed} none"


def _parse_own(value: Any, at: str) -> Any:
    """Parse an arg of a request, which may have the wire form of a vector; its numbers are finite."""
    value = plain(value)
    if isinstance(value, Vector) or (isinstance(value, Mapping) and set(value) == {"ref"}):
        return Vector.parse(value, at)
    parsed = parse_arg(decode(value, at) if isinstance(value, Mapping) else value, at)
    array = _array(parsed) if isinstance(parsed, tuple) else np.asarray(parsed)
    if array.dtype.kind == "f" and not is_finite(array.astype(np.float32)):
        raise WeirError("contains NaN or Inf (or overflows float32)", at)
    return parsed


def _array(parsed: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    dtype, shape, data = parsed
    return np.frombuffer(data, dtype).reshape(shape)


def _to_json(value: Any) -> Any:
    if isinstance(value, Vector):
        return value.to_json()
    if not isinstance(value, tuple):
        return value
    array = _array(value)
    return Vector(array).to_json() if array.dtype.kind == "f" and array.ndim else array.tolist()


def _fitted(value: Any, registered: Any, at: str, lookup: Callable[[str, str], np.ndarray]) -> Any:
    """Return an arg in the kind of the registered one; raise WeirError if it is another."""
    if not isinstance(registered, tuple):
        kinds = (int, float) if type(registered) is float else (type(registered),)
        if type(value) not in kinds:
            raise WeirError(f"is registered as {type(registered).__name__}, got {_brief(value)}", at)
        return type(registered)(value)
    dtype, shape, _ = registered
    wanted = f"is registered as {dtype} {list(shape)}"
    if isinstance(value, (str, Vector)):
        array = lookup(value if isinstance(value, str) else value.ref, at)
    else:
        array = _array(value) if isinstance(value, tuple) else np.asarray(value)
    if array.shape != tuple(shape):
        raise WeirError(f"{wanted}, got {_brief(value) if not array.ndim else list(array.shape)}", at)
    kind = np.dtype(dtype).kind
    allowed = {"f": "fiu", "b": "b"}.get(kind, "iu")
    fitted = np.ascontiguousarray(array, dtype) if array.dtype.kind in allowed else None
    if fitted is None or (kind in "iu" and not np.array_equal(fitted, array)):
        raise WeirError(f"{wanted}, got other numbers ({array.dtype})", at)
    return dtype, tuple(shape), fitted.tobytes()


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]} {list(value[1])}"
    return "a vector's name" if isinstance(value, Vector) else f"{type(value).__name__} {brief(value)!r}"
