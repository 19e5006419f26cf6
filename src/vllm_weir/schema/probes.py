"""The probes that a request may ask for: linear, with a hidden layer, and with attention."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import right_words
from vllm_weir.schema.hooks import HookPoint
from vllm_weir.schema.instructions import VectorCollector
from vllm_weir.schema.probe_base import Activation, Layout, ProbeBase, parse_name
from vllm_weir.schema.probe_codec import decode
from vllm_weir.schema.resolved_probes import ATTENTION, GELU, LINEAR, MLP, RELU, SILU, TANH
from vllm_weir.util.foreign_files import read_regular

MAX_PROBES = 256
HIDDEN = {"relu": RELU, "gelu": GELU, "silu": SILU, "tanh": TANH}


@right_words
@dataclass(frozen=True)
class Probe(ProbeBase):
    """Score rows by ``weight @ row + bias`` while the model runs.

    Linear probe (Alain and Bengio 2016, arXiv:1610.01644).

    Args:
        name: under which the scores come back, and by which gates and ``stop_when`` know the probe.
        weight: [k, width of a row], or [width] for one score.
        bias: [k], or a number.
        hook: hook point whose rows it reads, after the interventions there.
        layer: its block; left out where the hook point's name says it.
        activation: ``"none"``, ``"sigmoid"`` of each output, or ``"softmax"`` over the outputs.
        smooth: None; ``("ema", a)``, an exponential moving average ``y = a * score + (1 - a) * y``;
            ``("max",)``, the largest score so far; ``("mean", window)``, of the last scores.
        positions: selector of the rows that are scored, as for `Capture`.
        head: at hook points with a row for each head, the head that it reads; `weight` is then
            [k, d_head].

    Raises:
        WeirError: naming the field.
    """

    kind: ClassVar[str] = "linear"
    code: ClassVar[int] = LINEAR
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"weight": (1, 2)}
    biases: ClassVar[tuple[str, ...]] = ("bias",)
    name: str
    weight: Any
    bias: Any = 0.0
    hook: HookPoint = "resid_post"
    layer: Any = None
    activation: Activation = "none"
    smooth: Any = None
    positions: Any = field(default="all", kw_only=True)
    head: Any = field(default=None, kw_only=True)
    path: str = field(default="probe", repr=False, compare=False, kw_only=True)

    @classmethod
    def from_sklearn(
        cls, estimator: Any, hook: HookPoint = "resid_post", layer: Any = None, name: str = "probe", **fields: Any
    ) -> Probe:
        """Return the probe that scores as a fitted estimator of scikit-learn does.

        Args:
            estimator: ``LogisticRegression``, ``LinearSVC``, ``RidgeClassifier``, ``SGDClassifier``,
                ``LinearRegression`` or ``Ridge``; or a ``Pipeline`` that ends in one, after any of
                ``StandardScaler``, ``MinMaxScaler`` and ``PCA``, which are folded in.
            hook: hook point of the rows that it was fitted on.
            layer: their block.
            name: of the probe.
            **fields: other fields of the probe. `activation` is, unless given, the one with which
                the scores are ``predict_proba``'s (of two classes, the second's); where none is, the
                scores are ``decision_function``'s or ``predict``'s.

        Raises:
            WeirError: for an estimator that is of another kind or not fitted.
        """
        from vllm_weir.schema.probe_codec import linear_map

        weight, bias, activation = linear_map(estimator, "estimator")
        return cls(name, weight, bias, hook, layer, **{"activation": activation, **fields})

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = np.atleast_2d(arrays["weight"])
        self._check_outputs(len(weight))
        return {"weight": weight, "bias": self._bias("bias", len(weight))}

    def _layout(self, collector: VectorCollector, arrays: Mapping[str, np.ndarray]) -> Layout:
        rows = tuple(map(collector.add, arrays["weight"]))
        return Layout(len(rows), rows, tuple(arrays["bias"].tolist()))


@right_words
@dataclass(frozen=True)
class MLPProbe(ProbeBase):
    """Score rows by ``w_out @ hidden(w_in @ row + b_in) + b_out`` while the model runs.

    Args:
        name: under which the scores come back, and by which gates and ``stop_when`` know the probe.
        w_in: [m, width of a row], or [width] for one hidden unit.
        b_in: [m], or a number.
        w_out: [k, m], or [m] for one score.
        b_out: [k], or a number.
        hook: hook point whose rows it reads, after the interventions there.
        layer: its block; left out where the hook point's name says it.
        hidden: ``"relu"``, ``"gelu"`` (the exact one), ``"silu"`` or ``"tanh"``.
        activation: as for `Probe`.
        smooth: as for `Probe`.
        positions: selector of the rows that are scored, as for `Capture`.
        head: as for `Probe`.

    Raises:
        WeirError: naming the field.
    """

    kind: ClassVar[str] = "mlp"
    code: ClassVar[int] = MLP
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"w_in": (1, 2), "w_out": (1, 2)}
    biases: ClassVar[tuple[str, ...]] = ("b_in", "b_out")
    name: str
    w_in: Any
    b_in: Any
    w_out: Any
    b_out: Any = 0.0
    hook: HookPoint = "resid_post"
    layer: Any = None
    hidden: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    activation: Activation = "none"
    smooth: Any = None
    positions: Any = field(default="all", kw_only=True)
    head: Any = field(default=None, kw_only=True)
    path: str = field(default="probe", repr=False, compare=False, kw_only=True)

    def _parse_own(self) -> None:
        if not isinstance(self.hidden, str) or self.hidden not in HIDDEN:
            raise WeirError(
                f"unknown activation {brief(self.hidden)!r}; choose from {', '.join(HIDDEN)}", f"{self.path}.hidden"
            )

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        w_in, w_out = np.atleast_2d(arrays["w_in"]), np.atleast_2d(arrays["w_out"])
        if w_out.shape[1] != len(w_in):
            raise WeirError(
                f"w_in {list(w_in.shape)} has {len(w_in)} hidden units, and w_out {list(w_out.shape)} reads "
                f"{w_out.shape[1]}",
                f"{self.path}.w_out",
            )
        self._check_outputs(len(w_out))
        biases = {"b_in": self._bias("b_in", len(w_in)), "b_out": self._bias("b_out", len(w_out))}
        return {"w_in": w_in, "w_out": w_out, **biases}

    def _layout(self, collector: VectorCollector, arrays: Mapping[str, np.ndarray]) -> Layout:
        rows, out_rows = (tuple(map(collector.add, arrays[name])) for name in ("w_in", "w_out"))
        offsets, out_offsets = (tuple(arrays[name].tolist()) for name in ("b_in", "b_out"))
        return Layout(len(out_rows), rows, offsets, HIDDEN[self.hidden], out_rows, out_offsets)

    def plain_fields(self) -> dict[str, Any]:
        """Return the fields of the wire form that hold no vectors, defaults left out."""
        return super().plain_fields() | ({"hidden": self.hidden} if self.hidden != "relu" else {})


@right_words
@dataclass(frozen=True)
class AttentionProbe(ProbeBase):
    """Score a position by attention over the rows up to it, while the model runs.

    The score is ``bias + sum over heads of (softmax over u of (query . row[u])) value . row[u]``,
    where u are the scored positions up to this one.

    Args:
        name: under which the scores come back, and by which gates and ``stop_when`` know the probe.
        query: [heads, width of a row], or [width] for one head.
        value: [heads, k, width]; or [heads, width] for one score.
        bias: [k], or a number.
        hook: hook point whose rows it reads, after the interventions there.
        layer: its block; left out where the hook point's name says it.
        activation: as for `Probe`.
        smooth: as for `Probe`.
        positions: selector of the rows that are scored, as for `Capture`.
        head: the model's head that it reads, as for `Probe`.

    Raises:
        WeirError: naming the field.
    """

    kind: ClassVar[str] = "attention"
    code: ClassVar[int] = ATTENTION
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"query": (1, 2), "value": (1, 2, 3)}
    biases: ClassVar[tuple[str, ...]] = ("bias",)
    name: str
    query: Any
    value: Any
    bias: Any = 0.0
    hook: HookPoint = "resid_post"
    layer: Any = None
    activation: Activation = "none"
    smooth: Any = None
    positions: Any = field(default="all", kw_only=True)
    head: Any = field(default=None, kw_only=True)
    path: str = field(default="probe", repr=False, compare=False, kw_only=True)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        query, value = np.atleast_2d(arrays["query"]), np.atleast_2d(arrays["value"])
        if value.ndim == 2:
            value = value[:, None]
        if len(value) != len(query) or value.shape[2] != query.shape[1]:
            raise WeirError(
                f"query {list(query.shape)} and value {list(arrays['value'].shape)} do not fit together: they are "
                "[heads, width] and [heads, k, width], or [heads, width] for one score",
                f"{self.path}.value",
            )
        self._check_outputs(value.shape[1])
        return {"query": query, "value": value, "bias": self._bias("bias", value.shape[1])}

    def _layout(self, collector: VectorCollector, arrays: Mapping[str, np.ndarray]) -> Layout:
        heads, outputs, width = arrays["value"].shape
        rows = (*map(collector.add, arrays["query"]), *map(collector.add, arrays["value"].reshape(-1, width)))
        return Layout(outputs, rows, (0.0,) * len(rows), out_offsets=tuple(arrays["bias"].tolist()), heads=heads)


AnyProbe = Probe | MLPProbe | AttentionProbe
KINDS: dict[str, type[AnyProbe]] = {kind.kind: kind for kind in (Probe, MLPProbe, AttentionProbe)}


def parse_probe(data: object, path: str) -> AnyProbe:
    """Parse the wire form of a probe, or return the probe that is given.

    Raises:
        WeirError: naming the field; unknown keys are refused.
    """
    if isinstance(data, AnyProbe):
        return data.at(path)
    if not isinstance(data, Mapping):
        raise WeirError(f"a probe is an object or a registered name, got {type(data).__name__}", path)
    kind = KINDS.get(data["kind"]) if isinstance(data.get("kind"), str) else None
    if kind is None:
        given = "missing" if "kind" not in data else f"unknown kind {brief(data['kind'])!r}"
        raise WeirError(f"{given}; choose from {', '.join(KINDS)}", f"{path}.kind")
    return kind.from_json(data, path)


def parse_probes(probes: object, path: str) -> tuple[AnyProbe | str, ...]:
    """Parse one probe, its wire form, a registered name, or a list of these.

    Raises:
        WeirError: naming the field, also if two probes have one name.
    """
    if isinstance(probes, (ProbeBase, Mapping, str)):
        probes = [probes]
    if probes is None:
        probes = ()
    if isinstance(probes, bytes) or not isinstance(probes, Sequence):
        raise WeirError(f"expected a list of probes, got {type(probes).__name__}", path)
    if len(probes) > MAX_PROBES:
        raise WeirError(f"{len(probes)} probes in one request, more than the limit of {MAX_PROBES}", path)
    parsed: dict[str, AnyProbe | str] = {}
    for i, data in enumerate(probes):
        at = f"{path}[{i}]"
        probe = parse_name(data, at) if isinstance(data, str) else parse_probe(data, at)
        name = probe if isinstance(probe, str) else probe.name
        if name in parsed:
            raise WeirError(f"two probes are called {name!r}; name one otherwise", at)
        parsed[name] = probe
    return tuple(parsed.values())


def read_probe(data: bytes, field: str, **fields: Any) -> AnyProbe:
    """Read a probe from the contents of a file.

    Args:
        data: of a file that `ProbeBase.to_bytes` made; or of any safetensors file whose tensors have the
            names of a probe's fields, such as ``weight`` and ``bias``.
        field: named by errors, followed by the place in the file.
        **fields: fields of the probe that replace those of the file, or that it lacks.

    Raises:
        WeirError: for a file that is damaged or foreign.
    """
    found = {"kind": KINDS["linear"].kind, **decode(data, field), **fields}
    kind = KINDS.get(found["kind"]) if isinstance(found["kind"], str) else None
    for name in kind.vectors if kind is not None else ():
        if isinstance(found.get(name), str) or (isinstance(found.get(name), Mapping) and "b64" not in found[name]):
            raise WeirError("expected numbers: a file cannot name a registered vector", f"{field}.{name}")
    return parse_probe(found, field)


def load_probe(path: str | os.PathLike, **fields: Any) -> AnyProbe:
    """Read a probe that its `save` wrote, or any safetensors file with the tensors of one.

    Args:
        path: of the file.
        **fields: fields of the probe that replace those of the file, or that it lacks: a file that
            holds a ``weight`` and a ``bias`` alone needs `name` and `layer`.

    Raises:
        WeirError: for a file that is damaged or foreign; StoreError if it cannot be read.
    """
    return read_probe(read_regular(path), "probe", **fields)
