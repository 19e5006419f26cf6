"""The interventions that a request may ask for, and how each is lowered to instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import parse_flag, right_words
from vllm_weir.schema.hooks import HookPoint
from vllm_weir.schema.instructions import (
    AFFINE,
    BLEND,
    CLAMP,
    CONST,
    INFINITE,
    KEEP_NORM,
    NORM,
    NOTHING,
    Instruction,
    LoweredIntervention,
    VectorCollector,
)
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.vectors import number

MAX_ADDED_LENGTH, MAX_ADDED_RATIO = 1e16, 1e9
"""Most that KEEP_NORM adds before it restores the norm: its length, and its ratio to the row's.

Beyond these the result is the same in float32, and the sum of squares would overflow.
"""


@right_words
@dataclass(frozen=True)
class Add(Intervention):
    """Add ``scale * vector`` to every selected row.

    Activation addition (Turner et al. 2023, arXiv:2308.10248).

    Args:
        vector: [d_model]; or [n, d_model], n > 1, to add the k-th row at the k-th selected position
            in ascending order, for `positions` that select exactly n.
        scale: strength, a factor; negative ones steer the other way.
        norm_match: rescale the vector to each row's own L2 norm first: h + scale * |h| * v / |v|.
        keep_norm: rescale the sum to the L2 norm that the row had; a sum of length zero leaves the
            row as it is.
    """

    op: ClassVar[str] = "add"
    factor: ClassVar[str] = "scale"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"vector": (1, 2)}
    rows_by_position: ClassVar[str] = "vector"
    vector: Any
    layers: Any = "all"
    scale: float = 1.0
    hook: HookPoint = "resid_post"
    positions: Any = "all"
    norm_match: bool = False
    keep_norm: bool = False
    per_layer: bool = False
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _parse_numbers(self) -> None:
        self._parse_number("scale")
        parse_flag(self.norm_match, "norm_match", self.path)
        parse_flag(self.keep_norm, "keep_norm", self.path)
        if self.neurons is not None and (self.norm_match or self.keep_norm):
            name = "norm_match" if self.norm_match else "keep_norm"
            raise WeirError(f"the norm of some neurons is not kept track of; leave {name} out", f"{self.path}.{name}")

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (vector,) = arrays
        if not vector.any() or self.scale == 0:
            return LoweredIntervention((), {})
        collector = VectorCollector()
        digest = self.vector.digest if self.vector.array is vector and vector.ndim == 1 else ""
        instructions = tuple(self._instruction(collector, row, digest) for row in np.atleast_2d(vector))
        return LoweredIntervention(instructions, collector.rows)

    def _instruction(self, collector: VectorCollector, vector: np.ndarray, digest: str) -> Instruction:
        """Lower one vector [d_model]; `digest` is the vector's, or empty if it is not known."""
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        if norm == 0:
            return NOTHING
        if self.norm_match:
            u = collector.add(vector.astype(np.float64) / norm)
        else:
            u = collector.add(vector, digest)
        if not self.keep_norm:
            return Instruction(NORM if self.norm_match else CONST, u, a=self.scale)
        if self.norm_match:
            return Instruction(KEEP_NORM, u, b=_clipped(self.scale, MAX_ADDED_RATIO))
        return Instruction(KEEP_NORM, u, a=_clipped(self.scale, MAX_ADDED_LENGTH / norm))


@right_words
@dataclass(frozen=True)
class Ablate(Intervention):
    """Project a subspace out of every selected row.

    Directional ablation (Arditi et al. 2024, arXiv:2406.11717).

    Args:
        directions: [d_model] or [k, d_model]; their span is removed at every selected position
            (they need not be orthogonal).
    """

    op: ClassVar[str] = "ablate"
    factor: ClassVar[str] = "directions"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"directions": (1, 2)}
    directions: Any
    layers: Any = "all"
    hook: HookPoint = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (directions,) = arrays
        matrix = np.atleast_2d(directions).astype(np.float64)
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        if not lengths.all():
            raise WeirError("a direction of length zero spans nothing", f"{self.path}.directions{self.where}")
        _, singular, basis = np.linalg.svd(matrix / lengths, full_matrices=False)
        collector = VectorCollector()
        digests = [collector.add(row) for row in basis[singular > 1e-6 * singular[0]]]
        instructions = tuple(Instruction(AFFINE, digest, digest, a=-1.0) for digest in digests)
        return LoweredIntervention(instructions, collector.rows)


@right_words
@dataclass(frozen=True)
class Clamp(Intervention):
    """Set or bound the component along a direction (feature clamping, Templeton et al. 2024).

    Args:
        direction: [d_model]; used as a unit vector, so `value`, `min` and `max` are lengths along
            it.
        value: the component's new value, if `min` and `max` are not given.
        min: lower bound of the component, or None.
        max: upper bound of the component, or None.
        strength: 1 clamps fully, 0.5 goes half the way.
    """

    op: ClassVar[str] = "clamp"
    factor: ClassVar[str] = "value"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"direction": (1, 2)}
    single_vector: ClassVar[str] = "direction"
    direction: Any
    layers: Any = "all"
    value: float | None = field(default=None, kw_only=True)
    min: float | None = field(default=None, kw_only=True)
    max: float | None = field(default=None, kw_only=True)
    strength: float = field(default=1.0, kw_only=True)
    hook: HookPoint = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _parse_numbers(self) -> None:
        for name in ("value", "min", "max"):
            if getattr(self, name) is not None:
                self._parse_number(name)
        self._parse_number("strength")
        if (self.value is None) == (self.min is None and self.max is None):
            raise WeirError("give value, or min and / or max", f"{self.path}.value")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise WeirError(f"min {self.min:g} is above max {self.max:g}", f"{self.path}.min")

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (direction,) = arrays
        length = float(np.linalg.norm(direction.astype(np.float64)))
        if length == 0:
            raise WeirError("a direction of length zero has no component", f"{self.path}.direction{self.where}")
        if self.strength == 0:
            return LoweredIntervention((), {})
        collector = VectorCollector()
        unit = collector.add(direction.astype(np.float64) / length)
        if self.value is not None:
            lo = hi = self.value
        else:
            lo = -INFINITE if self.min is None else self.min
            hi = INFINITE if self.max is None else self.max
        instruction = Instruction(CLAMP, unit, unit, a=self.strength, lo=lo, hi=hi)
        return LoweredIntervention((instruction,), collector.rows)


@right_words
@dataclass(frozen=True)
class Replace(Intervention):
    """Replace the selected rows by given ones.

    Activation patching (Vig et al. 2020, arXiv:2004.12265).

    Args:
        values: [d_model], one row for all selected positions; or [n, d_model], n > 1, the k-th row
            for the k-th selected position in ascending order, for `positions` that select exactly
            n.
        alpha: strength: 1 replaces, 0.5 mixes half and half.
    """

    op: ClassVar[str] = "replace"
    factor: ClassVar[str] = "values"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"values": (1, 2)}
    rows_by_position: ClassVar[str] = "values"
    values: Any
    layers: Any = "all"
    alpha: float = 1.0
    hook: HookPoint = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _parse_numbers(self) -> None:
        self._parse_number("alpha")

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (values,) = arrays
        if self.alpha == 0:
            return LoweredIntervention((), {})
        collector = VectorCollector()
        rows = values if values.ndim == 2 else (values,)
        instructions = tuple([Instruction(BLEND, collector.add(row), a=self.alpha) for row in rows])
        return LoweredIntervention(instructions, collector.rows)


@right_words
@dataclass(frozen=True)
class LowRank(Intervention):
    """Replace every selected row h by h + R^T (W h + b - R h).

    LoReFT (Wu et al. 2024, arXiv:2404.03592).

    Args:
        R: [r, d_model]; pyreft keeps R with orthonormal rows, which is not required here.
        W: [r, d_model].
        b: [r] or [1, r].
    """

    op: ClassVar[str] = "low_rank"
    factor: ClassVar[str] = "b"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"R": (1, 2), "W": (1, 2), "b": (1, 2)}
    single_vector: ClassVar[str] = "b"
    numbers: ClassVar[str] = "b"
    R: Any
    W: Any
    b: Any
    layers: Any = "all"
    hook: HookPoint = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        R, W, b = np.atleast_2d(arrays[0]), np.atleast_2d(arrays[1]), arrays[2]
        if R.shape != W.shape or len(b) != len(R):
            raise WeirError(
                f"R {list(R.shape)}, W {list(W.shape)} and b [{len(b)}] do not fit together: R and W are "
                "[r, d_model], b is [r]",
                f"{self.path}.W{self.where}",
            )
        collector = VectorCollector()
        instructions = tuple(
            Instruction(AFFINE, collector.add(row), collector.add(difference), a=1.0, b=float(bias))
            for row, difference, bias in zip(R, W.astype(np.float64) - R.astype(np.float64), b, strict=True)
            if row.any()
        )
        return LoweredIntervention(instructions, collector.rows)


def _clipped(value: float, limit: float) -> float:
    return max(-limit, min(value, limit))


def scaled(interventions: Sequence[Intervention], scale: Any, path: str) -> list[Intervention]:
    """Return additions with their scales multiplied by `scale`.

    Raises:
        WeirError: naming `path`, if there are interventions of other kinds and `scale` is not 1.
    """
    factor = number(scale, path)
    if factor == 1.0:
        return list(interventions)
    out: list[Intervention] = []
    for intervention in interventions:
        if not isinstance(intervention, Add):
            raise WeirError(f"the module holds a {intervention.op}, which cannot be scaled; leave the scale out", path)
        out.append(replace(intervention, scale=intervention.scale * factor))
    return out
