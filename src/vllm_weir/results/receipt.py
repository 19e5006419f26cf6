"""The receipt of a sequence: what was really done for it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from math import isfinite, nan
from typing import Any, NotRequired, TypedDict

from vllm_weir.schema.fields import short_repr
from vllm_weir.schema.hooks import Site


class GateCount(TypedDict):
    """How often the gate of one intervention let it act.

    Attributes:
        probe: whose scores the gate looks at.
        fired: positions at which the intervention acted, that is, at which the gate's factor was not 0.
        of: positions that it was asked for.
        spans: where it acted: ranges [first, end] of positions, `end` not included.
        feature: whose activation it looks at, if `probe` is an autoencoder, ``"sae:NAME"``; else missing.
        metric: ``"cosine"`` if it looks at cosine similarities with the probe's weight; else missing.
    """

    probe: str
    fired: int
    of: int
    spans: list[list[int]]
    feature: NotRequired[int]
    metric: NotRequired[str]


@dataclass(frozen=True)
class InterventionReceipt:
    """What one intervention did to one sequence.

    Attributes:
        op: its kind, as in the wire form: ``"add"``, ``"ablate"``, ``"set_feature"``, ...
        hook: its hook point.
        layers: the blocks at which it changes rows; none for one that changes nothing (a zero vector, a scale of 0).
        acted: token positions at which it was applied for this sequence, each counted once, whatever the number of
            `layers`. With a gate, positions at which the gate let it act. Positions whose KV came from the prefix
            cache are not among them: they count in the request that computed them, and here in `Receipt.shared`.
        relative_dose: how much it changed rows: the norm of its change over the norm of the row that it found, as a
            mean over the rows of these positions at all of `layers`. Rows are whole, also for heads and neurons, and
            a row of zeros is left out. None if the request did not ask for it (``dose=True``), or no row counts.
        relative_dose_by_layer: block -> the same mean over its rows; empty where `relative_dose` is None.
    """

    op: str
    hook: str
    layers: tuple[int, ...]
    acted: int
    relative_dose: float | None = None
    relative_dose_by_layer: dict[int, float] = field(default_factory=dict)

    __repr__ = short_repr

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; a dose that is not finite becomes None."""
        return {
            "op": self.op,
            "hook": self.hook,
            "layers": list(self.layers),
            "acted": self.acted,
            "relative_dose": _finite(self.relative_dose),
            "relative_dose_by_layer": {str(layer): _finite(x) for layer, x in self.relative_dose_by_layer.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> InterventionReceipt:
        """Return what `to_dict` wrote; fields of a later version are left out, and None by layer becomes NaN."""
        by_layer = {int(layer): nan if x is None else x for layer, x in data.get("relative_dose_by_layer", {}).items()}
        dose = data.get("relative_dose")
        if dose is None and by_layer:
            dose = nan
        return cls(data["op"], data["hook"], tuple(data["layers"]), data["acted"], dose, by_layer)


def _finite(x: float | None) -> float | None:
    return x if x is not None and isfinite(x) else None


@dataclass(frozen=True)
class Receipt:
    """What was really done for one sequence.

    Attributes:
        captured: site -> rows returned.
        dropped: site -> rows that were asked for, here or for a sink, and are missing because the
            worker's host buffer was full (only with the setting ``overflow="drop"``).
        steered: for each intervention, in the order in which they apply (global ones first): site
            -> rows changed there. Empty for one that changes nothing (a zero vector, a scale of 0). Where a gate
            was closed, nothing was changed.
        shared: for each intervention, prompt positions whose steered KV came from the prefix cache
            instead.
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens generated (so far, while streaming).
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        hit_limit: first wanted position, which a prefix-cache hit was not allowed to pass; None for
            no limit.
        complete: False for a request that was aborted or is still streaming.
        compression: header of the compression of the rows (method, k, seed, ...); None if they are
            not compressed.
        files: files to which sinks have written the rows.
        sinks: sink -> state of the rows there: ``"queued"``, ``"written"``, ``"dropped"``,
            ``"held"`` (until they are marked), ``"evicted"``, or ``"failed: <why>"``.
        gates: for each intervention, as in `steered`, how often its gate let it act; None for one without a gate.
        interventions: for each intervention, as in `steered`, what it was and how often it acted.
        notes: what is worth knowing, in words: hooks that made NaN or infinity of finite rows, with the first position
            and, there, the first hook point. Rows of positions that came from the prefix cache are not looked at.
        tag: what the request gave as its own.
    """

    captured: dict[Site, int] = field(default_factory=dict)
    dropped: dict[Site, int] = field(default_factory=dict)
    steered: tuple[dict[Site, int], ...] = field(default=(), repr=False)
    shared: tuple[int, ...] = field(default=(), repr=False)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    hit_limit: int | None = None
    complete: bool = field(default=True, metadata={"shown": True})
    compression: dict[str, Any] | None = None
    files: tuple[str, ...] = ()
    sinks: dict[str, str] = field(default_factory=dict)
    gates: tuple[GateCount | None, ...] = ()
    interventions: tuple[InterventionReceipt, ...] = ()
    notes: tuple[str, ...] = ()
    tag: str = ""

    __repr__ = short_repr

    def to_dict(self) -> dict:
        """Return plain JSON data, with sites as ``"resid_post.10"``."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("compression", "sinks", "gates"):
            out[name] = deepcopy(out[name])
        out["gates"], out["notes"] = list(out["gates"]), list(out["notes"])
        for name in ("captured", "dropped"):
            out[name] = {f"{s.hook}.{s.layer}": n for s, n in getattr(self, name).items()}
        out["steered"] = [{f"{s.hook}.{s.layer}": n for s, n in sites.items()} for sites in self.steered]
        out["interventions"] = [one.to_dict() for one in self.interventions]
        return out
