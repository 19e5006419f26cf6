"""`SetActivation` and `Reconstruction`: `SetFeature` and `Reconstruct` once their autoencoder has been looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import right_words, set_fields
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import (
    ACTIVATE,
    CONST,
    ENCODE,
    FEATURE,
    HELD,
    RECONSTRUCT,
    Instruction,
    LoweredIntervention,
    Source,
    VectorCollector,
    on_heads,
)
from vllm_weir.schema.intervention_base import Intervention, Lookup
from vllm_weir.schema.rows import RowShape


@right_words
@dataclass(frozen=True)
class SetActivation(Intervention):
    """Set the activation of a unit.

    The activation of a row h is ``a = p if p > threshold else 0`` with ``p = w . h + bias``, and
    the row becomes ``h + (target - a) * u``. With `read`, the activation is that of another hook
    point's row, after all interventions there.

    Args:
        w: what the unit reads, [width]; with `heads`, [d_head].
        u: what one unit of its activation adds, likewise.
        bias: added to ``w . h``.
        threshold: of the activation.
        value: the target, unless one of the following is given.
        scale: the target is ``scale * a``.
        add: the target is ``a + add``.
        read: (hook point, block) of the row that has the activation, which a token meets earlier;
            None for the row that is changed.
        unit: names it, ``KEY:FEATURE`` with the key of its autoencoder on the workers.
        read_back: whether `u` is scaled so that the activation of the new row is the target.
        joins: whether it is added together with the next intervention, which sees the same row.
        sae: key of an autoencoder on the workers, which encodes the row whole to find the activation
            of its feature `feature`, in place of `w`, `bias` and `threshold`.
        feature: of `sae`.
    """

    op: ClassVar[str] = "set_activation"
    factor: ClassVar[str] = "value"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"w": (1,), "u": (1,)}
    w: Any
    u: Any
    layers: Any
    hook: str
    bias: float = field(default=0.0, kw_only=True)
    threshold: float = field(default=0.0, kw_only=True)
    value: float | None = field(default=None, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)
    add: float | None = field(default=None, kw_only=True)
    read: Any = field(default=None, kw_only=True)
    unit: str | None = field(default=None, kw_only=True)
    read_back: bool = field(default=False, kw_only=True)
    joins: bool = field(default=False, kw_only=True)
    sae: str | None = field(default=None, kw_only=True)
    feature: int | None = field(default=None, kw_only=True)
    positions: Any = field(default="all", kw_only=True)
    per_layer: bool = field(default=False, kw_only=True)
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _parse_numbers(self) -> None:
        self._parse_number("bias")
        self._parse_number("threshold")
        targets = [name for name in ("value", "scale", "add") if getattr(self, name) is not None]
        if len(targets) != 1:
            raise WeirError("give one of value, scale and add", f"{self.path}.value")
        self._parse_number(targets[0])
        set_fields(self, factor=targets[0])  # what errors name is the field that was given
        if self.read is not None:
            set_fields(self, read=Site(*self.read))

    @property
    def source_site(self) -> Site | None:
        """The other hook point that it reads; None if there is none."""
        return self.read if self.add is None else None

    def _read(self, name: str, array: np.ndarray, shape: RowShape, field: str) -> list[np.ndarray]:
        if name == "w" and self.read is not None:  # of another hook point's width
            return [array]
        return super()._read(name, array, shape, field)

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        w, u = arrays
        if not u.any() or self.scale == 1 or self.add == 0:
            return LoweredIntervention((), {})
        collector = VectorCollector()
        direction = collector.add(u)
        if self.add is not None:
            instruction = Instruction(CONST, direction, a=self.add)
        else:
            slope, offset = (-1.0, self.value) if self.value is not None else ((self.scale or 0.0) - 1.0, 0.0)
            if self.read is not None or self.sae is not None:
                return self._lower_held(collector, w, Instruction(HELD, direction, a=slope, b=offset))
            reads = collector.add(w)
            instruction = Instruction(FEATURE, direction, reads, a=slope, b=offset, lo=self.bias, hi=self.threshold)
        return LoweredIntervention((instruction,), collector.rows)

    def _lower_held(self, collector: VectorCollector, w: np.ndarray, held: Instruction) -> LoweredIntervention:
        """Return the instructions where the activation is written into a cell before it is used."""
        if self.sae is not None:
            writes = Instruction(ENCODE, "", a=float(self.feature or 0), key=self.sae)
        else:
            writes = Instruction(ACTIVATE, "", collector.add(w), b=self.bias, hi=self.threshold)
        if self.read is None:
            return LoweredIntervention((writes, held), collector.rows)
        return LoweredIntervention((held,), collector.rows, source=Source(self.read.hook, self.read.layer, writes))


@right_words
@dataclass(frozen=True)
class Reconstruction(Intervention):
    """Replace rows by their reconstruction.

    Args:
        sae: key of an autoencoder on the workers.
        error: whether what it does not reconstruct is added again: then rows stay as they are.
    """

    op: ClassVar[str] = "reconstruction"
    factor: ClassVar[str] = "name"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {}
    sae: str
    layers: Any
    hook: str
    error: bool = field(default=False, kw_only=True)
    positions: Any = field(default="all", kw_only=True)
    per_layer: bool = field(default=False, kw_only=True)
    heads: Any = field(default=None, kw_only=True)
    neurons: Any = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def lower(self, shape: RowShape, lookup: Lookup) -> LoweredIntervention:
        self.part.check(shape, self.hook, self.path)
        instructions = () if self.error else (Instruction(RECONSTRUCT, "", key=self.sae),)
        lowered = LoweredIntervention(instructions, {})
        return lowered if self.heads is None else on_heads([lowered], self.heads, shape[1], 0)
