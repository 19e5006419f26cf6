"""What a request asks of sparse autoencoders and lenses: `Features`, `SetFeature`, `Reconstruct`, `Lens`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.fields import is_int, parse_flag, plain, refuse_unknown_keys, right_words, set_fields
from vllm_weir.schema.gates import MAX_FEATURE, MAX_SAE_NAME, When, parse_feature
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.vectors import number

MAX_TOP_K, MAX_IDS, MAX_NAME, MAX_LENSES = 1024, 4096, MAX_SAE_NAME, 16
LensKind = Literal["logit", "tuned", "jacobian"]
LENSES: tuple[str, ...] = get_args(LensKind)
LENS_HOOKS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""Hook points with rows of the stream's width, which a logit lens reads."""

Asked = TypeVar("Asked", "Features", "SetFeature", "Reconstruct", "Lens")


@right_words
@dataclass(frozen=True)
class Features:
    """Features of a sparse autoencoder to return with a request's output.

    Args:
        name: of an autoencoder that the engine has loaded.
        top_k: the most active features of each row, so many of them (default 32).
        ids: these features instead, in this order.
        positions: selector, as for `Capture`.
        layers: of a cross-layer transcoder, the blocks whose features are read: ``"all"``, a block
            index, or a list of them.

    Raises:
        WeirError: naming the field.
    """

    wire_fields: ClassVar[tuple[str, ...]] = ("name", "top_k", "ids", "positions", "layers")
    name: str
    top_k: int | None = None
    ids: Any = None
    positions: Any = "all"
    layers: Any = field(default="all", kw_only=True)
    path: str = field(default="features", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.top_k is not None and self.ids is not None:
            raise WeirError("give top_k or ids, not both", f"{self.path}.top_k")
        ids = None if self.ids is None else _ids(self.ids, f"{self.path}.ids")
        top_k = None if ids is not None else _count(32 if self.top_k is None else self.top_k, f"{self.path}.top_k")
        positions = Positions.parse(self.positions, f"{self.path}.positions")
        layers = parse_layers(self.layers, f"{self.path}.layers")
        name = _name(self.name, f"{self.path}.name")
        set_fields(self, name=name, ids=ids, top_k=top_k, positions=positions, layers=layers)

    @classmethod
    def from_json(cls, data: object, path: str = "features") -> Features:
        """Parse the wire form; raise WeirError for unknown keys."""
        return _from_json(cls, data, path, ("name",))

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
        out: dict[str, Any] = {"name": self.name}
        if self.ids is not None:
            out["ids"] = list(self.ids)
        else:
            out["top_k"] = self.top_k
        if self.layers != "all":
            out["layers"] = list(self.layers)
        return _with_positions(out, self.positions)


@right_words
@dataclass(frozen=True)
class SetFeature:
    """Set the activation of a feature of a sparse autoencoder; all that it does not explain is kept.

    A row h becomes ``h + (target - a) * W_dec[feature]``, where a is the feature's activation and
    target is one of ``value``, ``scale * a`` and ``a + add``. So the decoder's contribution is set. The
    encoder reads another activation of the changed row, unless its column and W_dec[feature] have a
    product of 1; with `read_back` that is what is set. Transcoders take the activation of the
    row that they read, after all interventions there, and change the one that they write; a
    cross-layer transcoder changes those of its block and of all later ones, each by its own W_dec.
    Rows of TopK, AbsTopK and matching pursuit are encoded whole, in steps without CUDA graphs.

    Args:
        name: of an autoencoder that the engine has loaded.
        feature: its number.
        layer: of a cross-layer transcoder, the block that reads the feature; others have one block alone.
        value: the activation's new value.
        scale: factor of the activation.
        add: what is added to the activation.
        read_back: with `value`: the change along W_dec[feature] is the one after which the encoder
            reads `value`, up to the rounding of the row. Refused where the encoder cannot: in TopK and
            transcoders, if `value` is not 0 or above the feature's threshold, and if the encoder does
            not see what the decoder adds.
        positions: selector, as for `Capture`.
        when: a `When`, the condition under which it is set; None: always.

    Raises:
        WeirError: naming the field.
    """

    op: ClassVar[str] = "set_feature"
    wire_fields: ClassVar[tuple[str, ...]] = (
        "op", "name", "feature", "value", "scale", "add", "read_back", "positions", "when", "layer",
    )  # fmt: skip
    name: str
    feature: int
    layer: int | None = field(default=None, kw_only=True)
    value: float | None = field(default=None, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)
    add: float | None = field(default=None, kw_only=True)
    read_back: bool = field(default=False, kw_only=True)
    positions: Any = field(default="all", kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("value", "scale", "add")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise WeirError(f"give one of value, scale and add, got {got}", f"{self.path}.value")
        parsed = {name: number(value, f"{self.path}.{name}") for name, value in given.items()}
        if parse_flag(self.read_back, "read_back", self.path) and not parsed.get("value", -1.0) >= 0:
            raise WeirError("the encoder reads activations of 0 or more: give such a value", f"{self.path}.read_back")
        set_fields(
            self,
            name=_name(self.name, f"{self.path}.name"),
            feature=parse_feature(self.feature, f"{self.path}.feature"),
            layer=None if self.layer is None else _block(self.layer, f"{self.path}.layer"),
            positions=Positions.parse(self.positions, f"{self.path}.positions"),
            when=When.parse(self.when, f"{self.path}.when"),
            **parsed,
        )

    def target(self, activation: float) -> float:
        """Return the new activation of a feature that has this one."""
        if self.value is not None:
            return self.value
        return activation * self.scale if self.scale is not None else activation + (self.add or 0.0)

    @classmethod
    def from_json(cls, data: object, path: str = "intervention") -> SetFeature:
        """Parse the wire form; raise WeirError for unknown keys."""
        return _from_json(cls, data, path, ("name", "feature"), cls.op)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
        out: dict[str, Any] = {"op": self.op, "name": self.name, "feature": self.feature}
        for name in ("layer", "value", "scale", "add"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        if self.read_back:
            out["read_back"] = True
        if self.when is not None:
            out["when"] = self.when.to_json()
        return _with_positions(out, self.positions)


@right_words
@dataclass(frozen=True)
class Reconstruct:
    """Replace rows by their reconstruction by a sparse autoencoder: what it does not explain is left out.

    A row h becomes ``decode(encode(h))``. Each `SetFeature` of the same autoencoder that stands directly before it, at
    the same positions, changes the activations that are decoded: all of them read h, and the row becomes
    ``decode(a)`` with the features set in a, as a hook on SAELens's ``hook_sae_acts_post`` does. A
    `SetFeature` alone keeps the error ``h - decode(encode(h))``. Rows are encoded and decoded whole, in steps without
    CUDA graphs. Every architecture is served; transcoders, which reconstruct another hook point's row than the one that
    they read, are refused.

    Args:
        name: of an autoencoder that the engine has loaded.
        error: whether the error is added again, which is SAELens's ``use_error_term``: rows stay as they are to the
            bit, and features that are set change them as a `SetFeature` alone does.
        positions: selector, as for `Capture`.
        when: a `When`, the condition under which rows are replaced; None: always.

    Raises:
        WeirError: naming the field.
    """

    op: ClassVar[str] = "reconstruct"
    wire_fields: ClassVar[tuple[str, ...]] = ("op", "name", "error", "positions", "when")
    name: str
    error: bool = field(default=False, kw_only=True)
    positions: Any = field(default="all", kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        parse_flag(self.error, "error", self.path)
        set_fields(
            self,
            name=_name(self.name, f"{self.path}.name"),
            positions=Positions.parse(self.positions, f"{self.path}.positions"),
            when=When.parse(self.when, f"{self.path}.when"),
        )

    @classmethod
    def from_json(cls, data: object, path: str = "intervention") -> Reconstruct:
        """Parse the wire form; raise WeirError for unknown keys."""
        return _from_json(cls, data, path, ("name",), cls.op)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
        out: dict[str, Any] = {"op": self.op, "name": self.name}
        if self.error:
            out["error"] = True
        if self.when is not None:
            out["when"] = self.when.to_json()
        return _with_positions(out, self.positions)


@right_words
@dataclass(frozen=True)
class Lens:
    """Next-token distributions read off the stream between blocks, to return with a request's output.

    Args:
        kind: ``"logit"`` (the model's final norm and unembedding; nostalgebraist 2020),
            ``"tuned"`` (an affine map of each block before them; Belrose et al. 2023,
            arXiv:2303.08112) or ``"jacobian"`` (before them the mean Jacobian of what leaves the last
            block with respect to what leaves this one, see `fit_lens`). A named lens says it itself.
        layers: ``"all"``, a block index, or a list of them. The last block needs no fitted map; any
            other of which the lens has none is refused.
        top_k: the likeliest tokens of each row, so many of them (default 10).
        path: of a fitted lens, for the caller and the workers: the directory of a tuned one, the file
            of a Jacobian one (``.pt`` or ``.npz``).
        positions: selector, as for `Capture`.
        name: of a lens that `load_lens` or ``weir serve --weir-lens`` has named, instead of a path.
        tokens: these token ids instead of the likeliest ones, in this order.
        hook: hook point that a logit lens reads; a fitted one reads ``resid_post``.

    Raises:
        WeirError: naming the field.
    """

    wire_fields: ClassVar[tuple[str, ...]] = ("kind", "layers", "top_k", "path", "positions", "name", "tokens", "hook")
    kind: LensKind | None = None
    layers: Any = "all"
    top_k: int | None = None
    path: Any = None
    positions: Any = "all"
    name: str | None = field(default=None, kw_only=True)
    tokens: Any = field(default=None, kw_only=True)
    hook: str = field(default="resid_post", kw_only=True)
    at: str = field(default="lens", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        kind = "logit" if self.kind is None and self.name is None else self.kind
        if kind not in (None, *LENSES):
            raise WeirError(f"unknown lens {brief(kind)!r}; choose from {', '.join(LENSES)}", f"{self.at}.kind")
        path = os.fspath(self.path) if isinstance(self.path, os.PathLike) else self.path
        if path is not None and (not isinstance(path, str) or not path):
            raise WeirError(f"a path is a text, got {type(path).__name__}", f"{self.at}.path")
        if self.name is not None:
            _name(self.name, f"{self.at}.name", "lens")
        self._check_source(kind, path)
        if self.tokens is not None and self.top_k is not None:
            raise WeirError("give top_k or tokens, not both", f"{self.at}.top_k")
        tokens = None if self.tokens is None else _ids(self.tokens, f"{self.at}.tokens", "token ids")
        top_k = None if tokens is not None else _count(10 if self.top_k is None else self.top_k, f"{self.at}.top_k")
        set_fields(
            self,
            kind=kind,
            path=path,
            layers=parse_layers(self.layers, f"{self.at}.layers"),
            top_k=top_k,
            tokens=tokens,
            hook=self._parse_hook(kind),
            positions=Positions.parse(self.positions, f"{self.at}.positions"),
        )

    def _check_source(self, kind: str | None, path: str | None) -> None:
        """Raise WeirError unless it says in one way which lens is meant."""
        if self.name is not None and path is not None:
            raise WeirError("give a name or a path, not both", f"{self.at}.path")
        if kind == "logit" and (path is not None or self.name is not None):
            which = "path" if path is not None else "name"
            raise WeirError(f"a logit lens has no {which}", f"{self.at}.{which}")
        if kind in ("tuned", "jacobian") and path is None and self.name is None:
            raise WeirError(f"a {kind} lens is loaded from a path, or named", f"{self.at}.path")

    def _parse_hook(self, kind: str | None) -> str:
        hook = normalise_hook(self.hook, f"{self.at}.hook")
        if hook not in LENS_HOOKS:
            raise WeirError(f"a lens reads one of {', '.join(LENS_HOOKS)}, not {brief(hook)}", f"{self.at}.hook")
        if kind != "logit" and hook != "resid_post":
            raise WeirError("a fitted lens reads what leaves a block, resid_post", f"{self.at}.hook")
        return hook

    @property
    def label(self) -> str:
        """What it is called among several: its name or kind, and the hook point if that is not ``resid_post``."""
        called = self.name if self.name is not None else str(self.kind)
        return called if self.hook == "resid_post" else f"{called}:{self.hook}"

    @classmethod
    def from_json(cls, data: object, at: str = "lens") -> Lens:
        """Parse the wire form; raise WeirError for unknown keys."""
        return _from_json(cls, data, at)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
        layers = self.layers if isinstance(self.layers, str) else list(self.layers)
        out: dict[str, Any] = {"layers": layers}
        for name in ("kind", "top_k", "path", "name", "tokens"):
            value = getattr(self, name)
            if value is not None:
                out[name] = list(value) if name == "tokens" else value
        if self.hook != "resid_post":
            out["hook"] = self.hook
        return _with_positions(out, self.positions)


def _from_json(kind: type[Asked], data: object, at: str, required: tuple[str, ...] = (), op: str = "") -> Asked:
    if isinstance(data, kind):
        return data
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", at)
    if op and data.get("op", op) != op:
        raise WeirError(f"expected {op!r}, got {brief(data['op'])!r}", f"{at}.op")
    refuse_unknown_keys(data, kind.wire_fields, at)
    for name in required:
        if name not in data:
            raise WeirError("missing", f"{at}.{name}")
    values: dict[str, Any] = {key: value for key, value in data.items() if key != "op"}
    values["at" if kind is Lens else "path"] = at
    return kind(**values)


def _with_positions(out: dict[str, Any], positions: Positions) -> dict[str, Any]:
    return out if positions.kind == "all" else {**out, "positions": positions.to_json()}


def _name(value: object, field_name: str, of: str = "autoencoder") -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise WeirError(f"the name of a loaded {of} is a text of 1 to {MAX_NAME} characters", field_name)
    return value


def _count(value: object, field_name: str) -> int:
    value = plain(value)
    if not is_int(value) or not 0 < value <= MAX_TOP_K:  # type: ignore[operator]
        raise WeirError(f"top_k is an int from 1 to {MAX_TOP_K}, got {brief(value)}", field_name)
    return int(value)  # type: ignore[call-overload]


def _block(value: object, field_name: str) -> int:
    value = plain(value)
    if not is_int(value) or not 0 <= value <= MAX_FEATURE:  # type: ignore[operator]
        raise WeirError(f"blocks are ints from 0, got {brief(value)}", field_name)
    return int(value)  # type: ignore[call-overload]


def _ids(value: object, field_name: str, of: str = "features") -> tuple[int, ...]:
    value = plain(value)
    if is_int(value):
        value = [value]
    if isinstance(value, range):
        value = value[: MAX_IDS + 1]
    elif not isinstance(value, str) and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
        raise WeirError(f"expected a list of {of}, at least one", field_name)
    if len(value) > MAX_IDS:
        raise WeirError(f"more than {MAX_IDS} {of}", field_name)
    ids = tuple(parse_feature(one, field_name) for one in value)
    if len(set(ids)) < len(ids):
        raise WeirError(f"one of the {of} is named twice", field_name)
    return ids
