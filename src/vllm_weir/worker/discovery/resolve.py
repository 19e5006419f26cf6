"""Which tensors of a block are its hook points: found by arithmetic in a recorded pass. Knows no model by name.

In the recorded pass every block is entered by noise and every part of it leaves noise behind, so a sum of two tensors
equals a third only if the block adds them up. A sequential block enters as `pre`, somewhere after its attention a
module is given ``mid = pre + c * a``, and it is left as ``post = mid + c' * o``; a parallel one as ``pre + a + o``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vllm_weir.schema.hooks import INNER_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.candidates import CandidateTensor, Match, MatchPair, rank
from vllm_weir.worker.discovery.matcher import FAINT, Matcher, rms
from vllm_weir.worker.discovery.recorder import ModuleCall, value_at


@dataclass(frozen=True)
class StreamPorts:
    """Which tensors carry the stream into a block and out of it; with a residual their sum does."""

    hidden_in: TensorKey
    hidden_out: TensorKey
    residual_in: TensorKey | None = None
    residual_out: TensorKey | None = None

    def of(self, call: ModuleCall) -> StreamPorts:
        """The same for a block that is called in another way: kinds of blocks may order their arguments differently."""
        return StreamPorts(
            alike(self.hidden_in, call.args),
            alike(self.hidden_out, call.left),
            self.residual_in and alike(self.residual_in, call.args),
            self.residual_out and alike(self.residual_out, call.left),
        )


@dataclass
class BlockPoints:
    """What was found in one block.

    Attributes:
        anchors: of `attn_out`, `resid_mid`, `mlp_out`, as far as they were found.
        refused: hook point -> why it has none.
        kind: "sequential", "parallel", "attention only", "MLP only", "described" or "unknown".
        gain: what the stream is multiplied with after the last addition, before it leaves the block.
    """

    anchors: dict[str, Anchor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    kind: str = "unknown"
    gain: float = 1.0

    @property
    def proven(self) -> bool:
        """Whether the block's output was found to be its input plus what its parts add."""
        return self.kind != "unknown"

    @property
    def complete(self) -> bool:
        """Whether every point that a block of this kind can have was found."""
        return len(self.anchors) == {"sequential": 3, "parallel": 2}.get(self.kind)


def resolve_block(
    calls: Sequence[ModuleCall], ports: StreamPorts, cores: set[str], is_plain: Callable[[str], bool], m: Matcher
) -> BlockPoints:
    """The points of one block.

    Args:
        calls: of the block and everything in it, the block's own (local path "") first.
        ports: what carries the stream.
        cores: paths of modules that mix tokens.
        is_plain: whether a module (by path) does no more than scale: a norm, a dropout, an activation.
        m: compares.
    """
    whole, inside = calls[0], list(calls[1:])
    pre, post = stream_through(whole, ports)
    points = BlockPoints()
    if pre is None or post is None or pre.shape != post.shape:
        points.refused = dict.fromkeys(INNER_HOOKS, "the block's stream could not be followed")
        return points
    mixed = [c for c in inside if c.path in cores]
    silent = next((c for c in mixed if not c.left and not any(k.kind == "out" for k in c.shapes)), None)
    if silent is not None:
        # Whatever adds up then is what some memory happened to hold.
        why = f"{silent.local} leaves nothing behind in the probe pass, so where its result goes could not be seen"
        points.refused = dict.fromkeys(INNER_HOOKS, why)
        return points
    subtree = {c.local.split(".")[0] for c in mixed}
    outs = [s for c in inside for s in _left(c)]
    outs += [CandidateTensor(whole, "after", k, v) for k, v in whole.left.items() if not m.same(v, post)]
    if mixed:
        begin, end = min(c.start for c in mixed), max(c.end for c in mixed)
        if _sequential(points, inside, outs, pre, post, (begin, end), subtree, m):
            return points
        split = [s for s in outs if s.part in subtree], [s for s in outs if s.call.local and s.part not in subtree]
        if _parallel(points, *split, post - pre, m) or _parallel(points, *_within(outs, mixed), post - pre, m):
            return points
    others = [c for c in inside if c.local.split(".")[0] not in subtree and not is_plain(c.path)]
    only = _best(outs, post - pre, m)
    if only is not None and mixed and others:
        # What ran before the mixer that makes the addition went into it, and adds nothing of its own.
        last = max((c.start for c in mixed if c.local.split(".")[0] == only.source.part), default=-1)
        others = [c for c in others if c.end > last]
    if only is not None and not (mixed and others):
        hook = "attn_out" if mixed else "mlp_out"
        points.kind = "attention only" if mixed else "MLP only"
        found, points.gain = _with_gain(only, (), pre, post, m)
        points.anchors[hook] = (found or only).anchor()
        missing = "MLP" if mixed else "attention"
        for other in INNER_HOOKS:
            if other != hook:
                points.refused[other] = f"this block has no {missing}: its one addition is {hook}"
        return points
    why = "no tensor was found that makes the block's output its input plus what attention and MLP add"
    if only is not None:
        why = "attention and MLP reach the stream in one addition, so what each of them adds cannot be told apart"
    elif len(mixed) > 1:
        where = f"{len(mixed)} places ({', '.join(c.local for c in mixed)})"
        why = f"this block mixes tokens in {where}, which reach the stream in more than one addition"
    points.refused = dict.fromkeys(INNER_HOOKS, why)
    return points


def stream_through(block: ModuleCall, ports: StreamPorts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The stream that enters a block and the one that leaves it, as far as they are among its tensors."""
    ports = ports.of(block)
    entering = _stream(block.args, ports.hidden_in, ports.residual_in)
    return entering, _stream(block.behind, ports.hidden_out, ports.residual_out)


def holds(anchors: Mapping[str, Anchor], calls: Sequence[ModuleCall], ports: StreamPorts, m: Matcher) -> bool:
    """Whether points found otherwise add up in the pass with noise."""

    def value(hook: str) -> torch.Tensor | None:
        anchor = anchors.get(hook)
        return None if anchor is None else value_at(calls, anchor)

    pre, post = stream_through(calls[0], ports)
    a, mid, o = value("attn_out"), value("resid_mid"), value("mlp_out")
    if pre is None or post is None:
        return False
    if mid is not None:
        return (a is not None and m.same(pre + a, mid)) or (o is not None and m.same(mid + o, post))
    return m.same(pre + sum(t for t in (a, o) if t is not None), post)


def _sequential(
    points: BlockPoints,
    inside: Sequence[ModuleCall],
    outs: Sequence[CandidateTensor],
    pre: torch.Tensor,
    post: torch.Tensor,
    mixing: tuple[int, int],
    subtree: set[str],
    m: Matcher,
) -> bool:
    """``mid = pre + a`` and ``post = mid + o``; whether it is so."""
    for call, hidden, residual, mid in _given(inside, after=mixing[1]):
        if mid.shape != pre.shape or m.same(mid, pre) or m.same(mid, post):
            continue
        before = [s for s in outs if mixing[0] < s.time < call.start]
        before += [CandidateTensor(call, "before", k, call.args[k]) for k in (hidden, residual) if k is not None]
        a = _best(before, mid - pre, m) or _pair([s for s in before if s.part in subtree], (pre, mid), mid - pre, m)
        if a is None:
            continue
        later = [s for s in outs if s.time > call.start]
        # Which two of many are added up is told by those that the block itself can add.
        children = [s for s in later if s.call.local and "." not in s.call.local]
        o = _best(later, post - mid, m) or _pair(children, (pre, mid), post - mid, m)
        if isinstance(o, MatchPair) and _one_by_one(o, inside, mid, m):
            o = None
        points.kind = "sequential"
        points.anchors |= {"attn_out": a.anchor(), "resid_mid": Anchor(call.path, "before", hidden, residual)}
        o, points.gain = _with_gain(o, children, mid, post, m)
        if o is None:
            points.refused["mlp_out"] = "no tensor was found that is what the MLP adds to the stream"
            if any(m.same(given, mid + s.value) for s in children for _, _, _, given in _given(inside, s.time)):
                points.refused["mlp_out"] = "more is added to the stream after what the MLP adds"
        else:
            points.anchors["mlp_out"] = o.anchor()
        return True
    return False


def _with_gain(
    found: Match | MatchPair | None,
    sources: Sequence[CandidateTensor],
    stream: torch.Tensor,
    post: torch.Tensor,
    m: Matcher,
) -> tuple[Match | MatchPair | None, float]:
    """The source o of ``post = c * (stream + o)``, and c; `found` and 1 if that explains it.

    `found` was found without a gain. Where c is nearly 1, a low precision takes c for a factor of o alone, or makes up
    for it with a little of something else: that is told apart here.
    """
    for source in [found.source] if isinstance(found, Match) else sources:
        gain = m.gain(stream, source.value, post)
        if gain is not None and gain != 1:
            return Match(source, 1.0), gain
    return found, 1.0


def _pair(
    sources: Sequence[CandidateTensor], streams: Sequence[torch.Tensor], delta: torch.Tensor, m: Matcher
) -> MatchPair | None:
    """Two sources from different parts of the block, neither of them one of `streams`, that make up `delta`."""
    if rms(delta) <= FAINT:
        return None
    returned = [s for s in sources if s.when == "after" and s.key.kind == "out" and s.offset is None]
    returned = [s for s in returned if all(m.factor(s.value, stream) is None for stream in streams)]
    pairs = (
        MatchPair(Match(a, both[0]), Match(b, both[1]))
        for a, b in itertools.combinations(returned, 2)
        if a.part != b.part and (both := m.factors(a.value, b.value, delta)) is not None
    )
    return min(pairs, key=lambda pair: pair.rank, default=None)


def _one_by_one(pair: MatchPair, inside: Sequence[ModuleCall], stream: torch.Tensor, m: Matcher) -> bool:
    """Whether something is given the stream with the first of the two added: then they are two additions."""
    first = min((pair.one, pair.other), key=lambda found: found.source.time)
    between = stream + first.scale * first.source.value
    return any(m.same(given, between) for *_, given in _given(inside, first.source.time))


def _within(
    outs: Sequence[CandidateTensor], mixed: Sequence[ModuleCall]
) -> tuple[list[CandidateTensor], list[CandidateTensor]]:
    """Sources by whether they belong to the attention, where one part of the block holds attention and MLP."""
    core = mixed[0]
    names = core.local.split(".")
    if any(c.local.split(".")[:2] != names[:2] for c in mixed) or len(names) < 3:
        return [], []
    holder = ".".join(names[:2])
    inside = [s for s in outs if f"{s.call.local}.".startswith(f"{holder}.")]
    spans = [(s.call.start, s.call.end) for s in inside]
    begin, end = min((b for b, _ in spans), default=0), max((e for _, e in spans), default=0)
    # What runs meanwhile is a part of it, wherever it is kept.
    beside = [s for s in outs if s.part == names[0] and not begin <= s.call.start <= end and s.call.local != names[0]]
    return inside, beside


def _parallel(
    points: BlockPoints,
    attention: Sequence[CandidateTensor],
    rest: Sequence[CandidateTensor],
    delta: torch.Tensor,
    m: Matcher,
) -> bool:
    """``post = pre + a + o``, where `a` comes from the part that holds the attention and `o` does not."""
    found = []
    for a in attention:
        for o in rest:
            both = m.factors(a.value, o.value, delta)
            if both is not None:
                found.append((rank(Match(a, both[0])), rank(Match(o, both[1])), a, o, both))
    if not found:
        return False
    _, _, a, o, (c, d) = min(found, key=lambda f: f[:2])
    points.kind = "parallel"
    points.anchors |= {"attn_out": a.anchor(c), "mlp_out": o.anchor(d)}
    points.refused["resid_mid"] = (
        "attention and MLP of this block run in parallel on the same input, so there is no stream between them"
    )
    return True


def _given(
    calls: Sequence[ModuleCall], after: int
) -> Iterator[tuple[ModuleCall, TensorKey, TensorKey | None, torch.Tensor]]:
    """What modules called after a moment are given: single tensors, and the sums of pairs."""
    for call in sorted(calls, key=lambda c: c.start):
        if call.start < after:
            continue
        keys = list(call.args)
        if len(keys) == 2 and call.args[keys[0]].shape == call.args[keys[1]].shape:
            yield call, keys[0], keys[1], call.args[keys[0]] + call.args[keys[1]]
        for key in keys:
            yield call, key, None, call.args[key]


def _left(call: ModuleCall) -> Iterator[CandidateTensor]:
    for key, value in call.left.items():
        yield CandidateTensor(call, "after", key, value)
        for vector, offset in call.offsets.items():
            yield CandidateTensor(call, "after", key, value + offset, vector)


def _best(sources: Sequence[CandidateTensor], delta: torch.Tensor, m: Matcher) -> Match | None:
    """The source that makes up `delta`: unscaled before scaled, then the outermost, then the earliest."""
    if rms(delta) <= FAINT:
        return None
    found = [Match(s, c) for s in sources if (c := m.factor(s.value, delta)) is not None]
    return min(found, key=rank, default=None)


def alike(key: TensorKey, tensors: Mapping[TensorKey, torch.Tensor]) -> TensorKey:
    """`key`, or the one of the same name among `tensors`."""
    if key in tensors or not key.name:
        return key
    return next((k for k in tensors if k.kind == key.kind and k.name == key.name), key)


def _stream(
    tensors: Mapping[TensorKey, torch.Tensor], hidden: TensorKey, residual: TensorKey | None
) -> torch.Tensor | None:
    if tensors.get(hidden) is None:
        return None
    if residual is None or tensors.get(residual) is None:
        return tensors[hidden]
    return tensors[hidden] + tensors[residual]
