"""Which tensors of a block are its hook points: found by arithmetic in a recorded pass. Knows no model by name.

In the recorded pass every block is entered by noise and every part of it leaves noise behind, so a sum of two tensors
equals a third only if the block adds them up. A sequential block enters as `pre`, somewhere after its attention a
module is given ``mid = pre + c * a``, and it is left as ``post = mid + c' * o``; a parallel one as ``pre + a + o``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vllm_weir.spec.hooks import INNER_HOOKS
from vllm_weir.worker.anchors import Anchor, Key
from vllm_weir.worker.trace import Call

FAINT = 1e-3
"""A tensor of a smaller root mean square than this part of the noise's is taken for zero."""


@dataclass(frozen=True)
class Ports:
    """Which tensors carry the stream into a block and out of it; with a residual their sum does."""

    hidden_in: Key
    hidden_out: Key
    residual_in: Key | None = None
    residual_out: Key | None = None

    def of(self, call: Call) -> Ports:
        """The same for a block that is called in another way: kinds of blocks may order their arguments differently."""
        return Ports(
            alike(self.hidden_in, call.args),
            alike(self.hidden_out, call.left),
            self.residual_in and alike(self.residual_in, call.args),
            self.residual_out and alike(self.residual_out, call.left),
        )


@dataclass
class Points:
    """What was found in one block.

    Attributes:
        anchors: of `attn_out`, `resid_mid`, `mlp_out`, as far as they were found.
        refused: hook point -> why it has none.
        kind: "sequential", "parallel", "two mixers", "attention only", "MLP only", "described" or "unknown".
    """

    anchors: dict[str, Anchor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    kind: str = "unknown"

    @property
    def proven(self) -> bool:
        """Whether the block's output was found to be its input plus what its parts add."""
        return self.kind != "unknown"

    @property
    def complete(self) -> bool:
        """Whether every point that a block of this kind can have was found."""
        return len(self.anchors) == {"sequential": 3, "parallel": 2}.get(self.kind)


@dataclass(frozen=True)
class Source:
    """A tensor that a call leaves behind, or is given."""

    call: Call
    when: Literal["before", "after"]
    key: Key
    value: torch.Tensor

    @property
    def time(self) -> int:
        return self.call.end if self.when == "after" else self.call.start

    def anchor(self, scale: float = 1.0) -> Anchor:
        return Anchor(self.call.path, self.when, self.key, None, scale)


@dataclass(frozen=True)
class Found:
    """A source that makes up a difference, and the factor with which it does."""

    source: Source
    scale: float


class Matcher:
    """Compares tensors of noise up to the rounding of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tolerance = 1e-4 if dtype == torch.float32 else 0.08
        self.eps = torch.finfo(torch.float32 if dtype == torch.float32 else torch.bfloat16).eps

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors are equal; a tensor of nothing equals none."""
        return a.shape == b.shape and _rms(b) > FAINT and float((a - b).abs().max()) <= self.tolerance * _rms(b)

    def factor(self, part: torch.Tensor, whole: torch.Tensor) -> float | None:
        """c such that ``c * part == whole``, or None."""
        if part.shape != whole.shape or _rms(part) <= FAINT or _rms(whole) <= FAINT:
            return None
        c = float((part.double() * whole).sum() / (part.double() ** 2).sum())
        if abs(c - 1) < self.tolerance / 4:
            c = 1.0
        return c if abs(c) > FAINT and self.same(c * part, whole) else None

    def factors(self, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> tuple[float, float] | None:
        """(c, d) such that ``c * a + d * b == whole``, or None."""
        sizes = _rms(a), _rms(b), _rms(whole)
        if not (a.shape == b.shape == whole.shape and min(sizes) > FAINT and math.isfinite(sum(sizes))):
            return None
        parts = torch.stack([a.double().flatten(), b.double().flatten()], 1)
        solution = torch.linalg.lstsq(parts, whole.double().flatten()[:, None]).solution[:, 0].tolist()
        c, d = (1.0 if abs(x - 1) < self.tolerance / 4 else x for x in solution)
        return (c, d) if min(abs(c), abs(d)) > FAINT and self.same(c * a + d * b, whole) else None


def resolve_block(calls: Sequence[Call], ports: Ports, cores: set[str], is_plain: Callable[[str], bool], m: Matcher):
    """The points of one block.

    Args:
        calls: of the block and everything in it, the block's own (local path "") first.
        ports: what carries the stream.
        cores: paths of modules that mix tokens.
        is_plain: whether a module (by path) does no more than scale: a norm, a dropout, an activation.
        m: compares.
    """
    whole, inside = calls[0], list(calls[1:])
    ports = ports.of(whole)
    pre = _stream(whole.args, ports.hidden_in, ports.residual_in)
    post = _stream(whole.left, ports.hidden_out, ports.residual_out)
    points = Points()
    if pre is None or post is None or pre.shape != post.shape:
        points.refused = dict.fromkeys(INNER_HOOKS, "the block's stream could not be followed")
        return points
    mixed = [c for c in inside if c.path in cores]
    subtree = {c.local.split(".")[0] for c in mixed}
    outs = [s for c in inside for s in _left(c)]
    outs += [Source(whole, "after", k, v) for k, v in whole.left.items() if not m.same(v, post)]
    if mixed:
        begin, end = min(c.start for c in mixed), max(c.end for c in mixed)
        if _sequential(points, inside, outs, pre, post, (begin, end), subtree, m):
            return points
        if _parallel(points, outs, subtree, post - pre, m):
            return points
    others = [c for c in inside if c.local.split(".")[0] not in subtree and not is_plain(c.path)]
    only = _best(outs, post - pre, m)
    if only is not None and not (mixed and others):
        hook = "attn_out" if mixed else "mlp_out"
        points.kind = "attention only" if mixed else "MLP only"
        points.anchors[hook] = only.source.anchor(only.scale)
        missing = "MLP" if mixed else "attention"
        for other in INNER_HOOKS:
            if other != hook:
                points.refused[other] = f"this block has no {missing}: its one addition is {hook}"
        return points
    why = "no tensor was found that makes the block's output its input plus what attention and MLP add"
    if only is not None:
        why = "attention and MLP reach the stream in one addition, so what each of them adds cannot be told apart"
    points.refused = dict.fromkeys(INNER_HOOKS, why)
    return points


def holds(anchors: Mapping[str, Anchor], calls: Sequence[Call], ports: Ports, m: Matcher) -> bool:
    """Whether points found otherwise add up in the pass with noise."""

    def value(hook: str) -> torch.Tensor | None:
        anchor = anchors.get(hook)
        call = next((c for c in calls if anchor is not None and c.path == anchor.module), None)
        if anchor is None or call is None:
            return None
        return _stream(call.left if anchor.when == "after" else call.args, anchor.hidden, anchor.residual)

    ports = ports.of(calls[0])
    pre = _stream(calls[0].args, ports.hidden_in, ports.residual_in)
    post = _stream(calls[0].left, ports.hidden_out, ports.residual_out)
    a, mid, o = value("attn_out"), value("resid_mid"), value("mlp_out")
    if pre is None or post is None:
        return False
    if mid is not None:
        return (a is not None and m.same(pre + a, mid)) or (o is not None and m.same(mid + o, post))
    return m.same(pre + sum(t for t in (a, o) if t is not None), post)


def _sequential(points: Points, inside, outs, pre, post, mixing: tuple[int, int], subtree: set[str], m: Matcher):
    """``mid = pre + a`` and ``post = mid + o``; whether it is so."""
    for call, hidden, residual, mid in _given(inside, after=mixing[1]):
        if mid.shape != pre.shape or m.same(mid, pre) or m.same(mid, post):
            continue
        before = [s for s in outs if mixing[0] < s.time < call.start]
        before += [Source(call, "before", k, call.args[k]) for k in (hidden, residual) if k is not None]
        a = _best(before, mid - pre, m)
        if a is None and not _joined(before, subtree, mid - pre, m):
            continue
        o = _best([s for s in outs if s.time > call.start], post - mid, m)
        points.anchors["resid_mid"] = Anchor(call.path, "before", hidden, residual)
        if a is not None:
            points.kind = "sequential"
            points.anchors["attn_out"] = a.source.anchor(a.scale)
        else:
            points.kind = "two mixers"
            points.refused["attn_out"] = (
                "this block adds what attention and what another mixer give, and no one tensor holds their sum"
            )
        if o is None:
            points.refused["mlp_out"] = "no tensor was found that is what the MLP adds to the stream"
        else:
            points.anchors["mlp_out"] = o.source.anchor(o.scale)
        return True
    return False


def _joined(sources: Sequence[Source], subtree: set[str], delta: torch.Tensor, m: Matcher) -> bool:
    """Whether `delta` is made up by two parts of the block that both mix tokens."""
    branches = [[s for s in sources if s.call.local.split(".")[0] == part] for part in sorted(subtree)]
    return any(
        m.factors(a.value, b.value, delta) is not None
        for one, other in itertools.combinations(branches, 2)
        for a in one
        for b in other
    )


def _parallel(points: Points, outs, subtree: set[str], delta, m: Matcher) -> bool:
    """``post = pre + a + o``, where `a` comes from the part that holds the attention and `o` does not."""
    attention = [s for s in outs if s.call.local.split(".")[0] in subtree]
    rest = [s for s in outs if s.call.local and s.call.local.split(".")[0] not in subtree]
    found = []
    for a in attention:
        for o in rest:
            both = m.factors(a.value, o.value, delta)
            if both is not None:
                found.append((_rank(Found(a, both[0])), _rank(Found(o, both[1])), a, o, both))
    if not found:
        return False
    _, _, a, o, (c, d) = min(found, key=lambda f: f[:2])
    points.kind = "parallel"
    points.anchors |= {"attn_out": a.anchor(c), "mlp_out": o.anchor(d)}
    points.refused["resid_mid"] = (
        "attention and MLP of this block run in parallel on the same input, so there is no stream between them"
    )
    return True


def _given(calls: Sequence[Call], after: int) -> Iterator[tuple[Call, Key, Key | None, torch.Tensor]]:
    """What modules called after a moment are given: single tensors, and the sums of pairs."""
    for call in sorted(calls, key=lambda c: c.start):
        if call.start < after:
            continue
        keys = list(call.args)
        if len(keys) == 2 and call.args[keys[0]].shape == call.args[keys[1]].shape:
            yield call, keys[0], keys[1], call.args[keys[0]] + call.args[keys[1]]
        for key in keys:
            yield call, key, None, call.args[key]


def _left(call: Call) -> Iterator[Source]:
    for key, value in call.left.items():
        yield Source(call, "after", key, value)


def _best(sources: Sequence[Source], delta: torch.Tensor, m: Matcher) -> Found | None:
    """The source that makes up `delta`: unscaled before scaled, then the outermost, then the earliest."""
    if _rms(delta) <= FAINT:
        return None
    found = [Found(s, c) for s in sources if (c := m.factor(s.value, delta)) is not None]
    return min(found, key=_rank, default=None)


def _rank(found: Found) -> tuple:
    source = found.source
    # The block's own results come last: a hook on a part of the block stands before those on the whole.
    depth = source.call.local.count(".") if source.call.local else 1 << 20
    return found.scale != 1.0, source.when != "after", depth, source.time


def alike(key: Key, tensors: Mapping[Key, torch.Tensor]) -> Key:
    """`key`, or the one of the same name among `tensors`."""
    if key in tensors or not key.name:
        return key
    return next((k for k in tensors if k.kind == key.kind and k.name == key.name), key)


def _stream(tensors, hidden: Key, residual: Key | None) -> torch.Tensor | None:
    if tensors.get(hidden) is None:
        return None
    if residual is None or tensors.get(residual) is None:
        return tensors[hidden]
    return tensors[hidden] + tensors[residual]


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().pow(2).mean().sqrt()) if tensor.numel() else 0.0
