"""The search for the hook points inside one block, by arithmetic on a recorded pass.

In that pass noise enters every block, and every part of a block leaves noise behind (`noise`). So a
sum of tensors equals another tensor only if the block really computes that sum. No model is known
by name. With `pre` the stream that enters the block and `post` the stream that leaves it:

1. Refuse the block if `pre` or `post` was not recorded, or a token mixer left nothing behind.
2. Collect the candidates: every tensor that a module of the block produced (`candidates`).
3. Sequential: look for a module after attention that is given ``mid = pre + c * a``, then for
   ``post = mid + d * o``. Then `a` is attn_out, `mid` is resid_mid, and `o` is mlp_out.
4. Parallel: look for ``post = pre + c * a + d * o``, where `a` belongs to attention and `o` does
   not.
5. One addition: look for ``post = pre + c * a``, in a block that has only attention or only an MLP.
6. If nothing fits, refuse the points with the likeliest reason.

In 3. `a` and `o` may each be the weighted sum of two results, and in 3. and 5. the block may
multiply the stream by a gain before it leaves: ``post = gain * (mid + o)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from vllm_weir.schema.hooks import INNER_HOOKS
from vllm_weir.worker.discovery.anchors import ModuleCall
from vllm_weir.worker.discovery.block_stack import BlockPoints
from vllm_weir.worker.discovery.candidates import (
    CandidateTensor,
    Match,
    MatchPair,
    StreamInput,
    inputs_of,
    results_of,
)
from vllm_weir.worker.discovery.matcher import FAINT, Matcher, rms
from vllm_weir.worker.discovery.stream_ports import StreamPorts


def resolve_block(
    calls: Sequence[ModuleCall],
    ports: StreamPorts,
    mixers: set[str],
    only_scales: Callable[[str], bool],
    matcher: Matcher,
) -> BlockPoints:
    """Find the points of one block; its own call is the first of `calls`."""
    pre, post = ports.stream_through(calls[0])
    if pre is None or post is None or pre.shape != post.shape:
        return BlockPoints.none("the block's stream could not be followed")
    mixer_calls = [call for call in calls[1:] if call.path in mixers]
    silent = next((call for call in mixer_calls if _left_nothing(call)), None)
    if silent is not None:
        # A sum that fits would be of whatever the memory happened to hold.
        why = f"{silent.local_path} leaves nothing behind in the probe pass, so where its result goes could not be seen"
        return BlockPoints.none(why)
    block = _Block(calls, mixer_calls, pre, post, matcher)
    if mixer_calls:
        points = _sequential(block) or _parallel(block)
        if points is not None:
            return points
    addition = _best(block.candidates, post - pre, matcher)
    if addition is not None and not (mixer_calls and _has_other_parts(block, addition, only_scales)):
        return _one_addition(block, addition)
    return BlockPoints.none(_why_unexplained(block, addition))


class _Block:
    """A block's recorded calls, and what the equations are about.

    Attributes:
        pre: the stream that enters the block, [tokens, d].
        post: the stream that leaves it, [tokens, d].
        candidates: what may be attn_out or mlp_out.
        mixer_children: names of the block's children that contain token mixers.
    """

    def __init__(
        self,
        calls: Sequence[ModuleCall],
        mixer_calls: list[ModuleCall],
        pre: torch.Tensor,
        post: torch.Tensor,
        matcher: Matcher,
    ) -> None:
        own_call, *self.inside = calls
        self.mixer_calls, self.pre, self.post, self.matcher = mixer_calls, pre, post, matcher
        self.candidates = [candidate for call in self.inside for candidate in results_of(call)]
        self.candidates += [
            CandidateTensor(own_call, "after", key, value)
            for key, value in own_call.results.items()
            if not matcher.same(value, post)
        ]
        self.mixer_children = {_child(call) for call in mixer_calls}


def _left_nothing(call: ModuleCall) -> bool:
    return not call.results and not any(key.kind == "out" for key in call.shapes)


def _child(call: ModuleCall) -> str:
    return call.local_path.split(".")[0]


def _sequential(block: _Block) -> BlockPoints | None:
    """Find ``mid = pre + c * a`` and ``post = mid + d * o``."""
    mixing_end = max(call.end for call in block.mixer_calls)
    for middle in inputs_of(block.inside, after=mixing_end):
        mid = middle.value
        if mid.shape != block.pre.shape or block.matcher.same(mid, block.pre) or block.matcher.same(mid, block.post):
            continue
        attn_out = _attention_term(block, middle)
        if attn_out is not None:
            return _sequential_points(block, middle, attn_out)
    return None


def _attention_term(block: _Block, middle: StreamInput) -> Match | MatchPair | None:
    """Find `a` of ``mid = pre + c * a`` among what came after mixing began and before `mid`."""
    mixing_start = min(call.start for call in block.mixer_calls)
    earlier = [c for c in block.candidates if mixing_start < c.time < middle.call.start]
    # The addition may happen inside the call that is given both terms.
    keys = [key for key in (middle.hidden, middle.residual) if key is not None]
    earlier += [CandidateTensor(middle.call, "before", key, middle.call.args[key]) for key in keys]
    of_mixers = [c for c in earlier if c.child in block.mixer_children]
    delta = middle.value - block.pre
    return _best(earlier, delta, block.matcher) or _best_pair(
        of_mixers, (block.pre, middle.value), delta, block.matcher
    )


def _sequential_points(block: _Block, middle: StreamInput, attn_out: Match | MatchPair) -> BlockPoints:
    """Find `o` of ``post = mid + d * o`` or ``post = gain * (mid + o)``."""
    matcher, mid, delta = block.matcher, middle.value, block.post - middle.value
    later = [c for c in block.candidates if c.time > middle.call.start]
    # Deeper down many pairs have the same sum, so pair up only direct children of the block.
    children = [c for c in later if c.call.local_path and "." not in c.call.local_path]
    mlp_out = _best(later, delta, matcher) or _best_pair(children, (block.pre, mid), delta, matcher)
    if isinstance(mlp_out, MatchPair) and _added_one_by_one(mlp_out, block, mid):
        mlp_out = None
    mlp_out, gain = _with_gain(mlp_out, children, mid, block.post, matcher)
    points = BlockPoints(kind="sequential", gain=gain)
    points.anchors |= {"attn_out": attn_out.anchor(), "resid_mid": middle.anchor()}
    if mlp_out is not None:
        points.anchors["mlp_out"] = mlp_out.anchor()
    elif any(matcher.same(i.value, mid + c.value) for c in children for i in inputs_of(block.inside, after=c.time)):
        points.refused["mlp_out"] = "more is added to the stream after what the MLP adds"
    else:
        points.refused["mlp_out"] = "no tensor was found that is what the MLP adds to the stream"
    return points


def _added_one_by_one(pair: MatchPair, block: _Block, stream: torch.Tensor) -> bool:
    """Return whether a module is given the stream plus the first term alone.

    Then the block makes two additions, and the pair is not one of them.
    """
    first, _ = pair.in_order
    between = stream + first.scale * first.candidate.value
    inputs = inputs_of(block.inside, after=first.candidate.time)
    return any(block.matcher.same(i.value, between) for i in inputs)


def _with_gain(
    match: Match | MatchPair | None,
    candidates: Sequence[CandidateTensor],
    stream: torch.Tensor,
    post: torch.Tensor,
    matcher: Matcher,
) -> tuple[Match | MatchPair | None, float]:
    """Find the candidate o and the gain of ``post = gain * (stream + o)``.

    `match` was found assuming no gain; return it with a gain of 1 if no other gain fits. Search
    even if there is a match: in low precision, a gain near 1 makes ``gain * (stream + o)`` look
    like ``stream + c * o``.
    """
    for candidate in [match.candidate] if isinstance(match, Match) else candidates:
        gain = matcher.gain(stream, candidate.value, post)
        if gain is not None and gain != 1:
            return Match(candidate, 1.0), gain
    return match, 1.0


def _parallel(block: _Block) -> BlockPoints | None:
    """Find ``post = pre + c * a + d * o``, where `a` belongs to attention and `o` does not."""
    delta = block.post - block.pre
    terms = _two_terms(*_split_by_child(block), delta, block.matcher) or _two_terms(
        *_split_within_child(block), delta, block.matcher
    )
    if terms is None:
        return None
    attn_out, mlp_out = terms
    why = "attention and MLP of this block run in parallel on the same input, so there is no stream between them"
    anchors = {"attn_out": attn_out.anchor(), "mlp_out": mlp_out.anchor()}
    return BlockPoints(anchors, {"resid_mid": why}, "parallel")


def _split_by_child(block: _Block) -> tuple[list[CandidateTensor], list[CandidateTensor]]:
    attention = [c for c in block.candidates if c.child in block.mixer_children]
    rest = [c for c in block.candidates if c.call.local_path and c.child not in block.mixer_children]
    return attention, rest


def _split_within_child(block: _Block) -> tuple[list[CandidateTensor], list[CandidateTensor]]:
    """Return the same split within the one child of the block that holds attention and MLP."""
    names = block.mixer_calls[0].local_path.split(".")
    if len(names) < 3 or any(call.local_path.split(".")[:2] != names[:2] for call in block.mixer_calls):
        return [], []
    child, holder = names[0], ".".join(names[:2])
    attention = [c for c in block.candidates if f"{c.call.local_path}.".startswith(f"{holder}.")]
    begin = min((c.call.start for c in attention), default=0)
    end = max((c.call.end for c in attention), default=0)
    # Whatever runs during attention is part of it, wherever its module is.
    rest = [
        c
        for c in block.candidates
        if c.child == child and c.call.local_path != child and not begin <= c.call.start <= end
    ]
    return attention, rest


def _two_terms(
    attention: Sequence[CandidateTensor], rest: Sequence[CandidateTensor], delta: torch.Tensor, matcher: Matcher
) -> tuple[Match, Match] | None:
    """Return the preferred `a` and `o` with ``c * a + d * o == delta``."""
    fits = [
        (Match(a, factors[0]), Match(o, factors[1]))
        for a, o in itertools.product(attention, rest)
        if (factors := matcher.factors(a.value, o.value, delta)) is not None
    ]
    return min(fits, key=lambda terms: (terms[0].preference, terms[1].preference), default=None)


def _has_other_parts(block: _Block, addition: Match, only_scales: Callable[[str], bool]) -> bool:
    """Return whether a part without token mixers may have a share in a block's one addition."""
    others = [c for c in block.inside if _child(c) not in block.mixer_children and not only_scales(c.path)]
    # What ran before that mixer fed into it, and adds nothing of its own.
    own_mixers = [call for call in block.mixer_calls if _child(call) == addition.candidate.child]
    mixing_start = max((call.start for call in own_mixers), default=-1)
    return any(call.end > mixing_start for call in others)


def _one_addition(block: _Block, addition: Match) -> BlockPoints:
    """Return the points of a block with attention alone, or an MLP alone."""
    if block.mixer_calls:
        kind, hook, missing = "attention only", "attn_out", "MLP"
    else:
        kind, hook, missing = "MLP only", "mlp_out", "attention"
    match, gain = _with_gain(addition, (), block.pre, block.post, block.matcher)
    why = f"this block has no {missing}: its one addition is {hook}"
    refused = {other: why for other in INNER_HOOKS if other != hook}
    return BlockPoints({hook: (match or addition).anchor()}, refused, kind, gain)


def _why_unexplained(block: _Block, addition: Match | None) -> str:
    if addition is not None:
        return "attention and MLP reach the stream in one addition, so what each of them adds cannot be told apart"
    if len(block.mixer_calls) > 1:
        places = ", ".join(call.local_path for call in block.mixer_calls)
        where = f"{len(block.mixer_calls)} places ({places})"
        return f"this block mixes tokens in {where}, which reach the stream in more than one addition"
    return "no tensor was found that makes the block's output its input plus what attention and MLP add"


def _best(candidates: Sequence[CandidateTensor], delta: torch.Tensor, matcher: Matcher) -> Match | None:
    if rms(delta) <= FAINT:
        return None
    matches = [Match(c, scale) for c in candidates if (scale := matcher.factor(c.value, delta)) is not None]
    return min(matches, key=lambda match: match.preference, default=None)


def _best_pair(
    candidates: Sequence[CandidateTensor], streams: Sequence[torch.Tensor], delta: torch.Tensor, matcher: Matcher
) -> MatchPair | None:
    """Return the preferred pair, from two children of the block, whose weighted sum is `delta`.

    Leave out multiples of `streams`: `delta` is their difference, so they would always fit.
    """
    if rms(delta) <= FAINT:
        return None
    returned = [c for c in candidates if c.when == "after" and c.key.kind == "out" and c.offset is None]
    returned = [c for c in returned if all(matcher.factor(c.value, stream) is None for stream in streams)]
    pairs = (
        MatchPair(Match(a, factors[0]), Match(b, factors[1]))
        for a, b in itertools.combinations(returned, 2)
        if a.child != b.child and (factors := matcher.factors(a.value, b.value, delta)) is not None
    )
    return min(pairs, key=lambda pair: pair.preference, default=None)
