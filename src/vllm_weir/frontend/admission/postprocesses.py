"""Which postprocess captures undergo and where it runs, and whose blocks come as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.derived.sources import sources_of
from vllm_weir.results.site_slices import NOT_STACKED, Stacked
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts
from vllm_weir.schema.request import Postprocess, RequestSpec
from vllm_weir.schema.rows import RowPick
from vllm_weir.schema.sinks import Sink
from vllm_weir.schema.vectors import digest_of

Destination: TypeAlias = tuple[Sink, str]
"""(sink, `Capture.keep`): where rows go, and whether they wait to be marked."""
MEMORY: Destination = (Sink(), "always")
"""The destination of rows that come back on the output."""


def destination_of(capture: Capture) -> Destination:
    """Return where the rows of a capture go."""
    return capture.sink, capture.keep


class PostprocessChoice(NamedTuple):
    """Which postprocesses a request's rows undergo, and where these run.

    Attributes:
        device: the postprocess that workers apply to all rows; None: none.
        by_destination: the postprocess of each group; None if it has none, or different ones.
        each: the postprocess of every capture.
        mixed: whether the captures that come back on the output have different ones.
        directions: the vectors [d_model] that they need, by digest.
    """

    device: Postprocess | None
    by_destination: dict[Destination, Postprocess | None]
    each: list[Postprocess | None]
    mixed: bool
    directions: dict[str, np.ndarray]

    @classmethod
    def none(cls, captures: Sequence[Capture]) -> PostprocessChoice:
        """Return the choice for captures whose rows are wanted as they are."""
        by_destination: dict[Destination, Postprocess | None] = dict.fromkeys(map(destination_of, captures))
        return cls(None, by_destination | {MEMORY: None}, [None] * len(captures), False, {})


def postprocesses_of(
    captures: Sequence[Capture], capabilities: EngineCapabilities, lookup: Callable[[str, str], np.ndarray]
) -> PostprocessChoice:
    """Choose the postprocesses of a request's captures.

    Workers apply one postprocess to all rows of a request; where captures differ, this process does
    it.

    Raises:
        WeirError: naming the field, if captures with one destination cannot differ as they do.
    """
    directions: dict[str, np.ndarray] = {}
    members_of: dict[Destination, list[int]] = {}
    for k, capture in enumerate(captures):
        members_of.setdefault(destination_of(capture), []).append(k)
    each = [_postprocess_of(capture, capabilities, lookup, directions) for capture in captures]
    by_destination: dict[Destination, Postprocess | None] = {}
    mixed = False
    for destination, members in members_of.items():
        first = members[0]
        differing = next((k for k in members if not _alike(captures, each, first, k)), None)
        by_destination[destination] = each[first] if differing is None else None
        if differing is None:
            continue
        compresses = any(how is not None and how.compression is not None for how in (each[k] for k in members))
        if destination != MEMORY or compresses:
            raise _mismatch(captures[first], captures[differing], each[first] == each[differing])
        mixed = True
    kinds = set(by_destination.values())
    device = next(iter(kinds)) if len(kinds) == 1 and not mixed else None
    if device is not None and device.reduce is not None and len({capture.positions for capture in captures}) > 1:
        device = None  # workers reduce over one choice of positions
    if device is not None and device.directions and any(has_shape(c, capabilities) for c in captures):
        device = None  # workers project rows of the stream's width
    return PostprocessChoice(device, by_destination, each, mixed, directions)


def _postprocess_of(
    capture: Capture,
    capabilities: EngineCapabilities,
    lookup: Callable[[str, str], np.ndarray],
    rows: dict[str, np.ndarray],
) -> Postprocess | None:
    """Return a capture's postprocess, or None; add its directions to `rows` by digest."""
    digests: list[str] = []
    if capture.project is not None:
        array = capture.project.array
        if array is None:
            array = lookup(capture.project.ref, f"{capture.path}.project")
            if array.ndim > 2:
                shape = list(array.shape)
                raise WeirError(f"expected [d] or [m, d] directions, got shape {shape}", f"{capture.path}.project")
        for row in np.atleast_2d(array):
            _check_direction(capture, len(row), capabilities)
            digests.append(digest_of(row))
            rows[digests[-1]] = row
    if capture.compress is not None:
        if has_shape(capture, capabilities):
            raise WeirError(
                f"rows of {capture.hook} cannot be compressed, which is for rows of the stream; leave compress out",
                f"{capture.path}.compress",
            )
        capture.compress.check(capabilities.d_model)
    postprocess = Postprocess(capture.reduce, tuple(digests), capture.compress)
    return None if postprocess == Postprocess(None) else postprocess


def has_shape(capture: Capture, capabilities: EngineCapabilities) -> bool:
    """Return whether some rows of a capture are not simply [d_model]."""
    if not capabilities.shapes:
        return False
    layers = capture.resolve_layers(capabilities.num_layers)
    return any(Site(capture.hook, layer) in capabilities.shapes for layer in layers)


def _check_direction(capture: Capture, values: int, capabilities: EngineCapabilities) -> None:
    """Raise WeirError unless a direction has as many values as the rows that a capture returns."""
    for layer in capture.resolve_layers(capabilities.num_layers):
        width = RowPick.of(capabilities.shape(Site(capture.hook, layer)), capture.part).width
        if values != width:
            raise WeirError(
                f"directions of {values} values, rows of {capture.hook} have {width}", f"{capture.path}.project"
            )


def _alike(captures: Sequence[Capture], each: Sequence[Postprocess | None], a: int, b: int) -> bool:
    """Return whether a worker can apply one postprocess to the rows of captures `a` and `b`."""
    return each[a] == each[b] and (captures[a].reduce is None or captures[a].positions == captures[b].positions)


def _mismatch(first: Capture, other: Capture, only_positions: bool) -> WeirError:
    """Return the error for captures that differ where they must not, in nothing else if `only_positions`."""
    if only_positions:
        return WeirError(
            "captures for one sink must reduce over the same positions; send separate requests",
            f"{other.path}.positions",
        )
    return WeirError(
        "a request's captures for one sink must agree in reduce, project and compress, and those for memory in "
        "compress; name another sink, or send separate requests",
        f"{other.path}.{_differing_field(first, other)}",
    )


def _differing_field(first: Capture, other: Capture) -> str:
    if first.compress != other.compress:
        return "compress"
    return "project" if other.project is not None else "reduce"


def stack(spec: RequestSpec, capabilities: EngineCapabilities, has_media: bool) -> tuple[Stacked, tuple[Capture, ...]]:
    """Return what a request wants stacked, and the captures that this needs beside those that the request names.

    Args:
        spec: what it asks.
        capabilities: what the engine serves.
        has_media: whether the prompt, or a part of it, is given as embeddings or as images and the like.

    Raises:
        WeirError: naming the field.
    """
    stream = () if spec.stacked is None else spec.stacked.resolve_layers(capabilities.num_layers)
    if spec.qk is None:
        return (Stacked(stream) if stream else NOT_STACKED), ()
    path, facts = spec.qk.path, capabilities.facts
    queries = _queries(spec.qk, capabilities)
    for layer in queries:
        _check(layer, facts.attention[layer], has_media, f"{path}.layers")
    pairs = [[source.site for source in sources_of(Site("pattern", layer), facts)] for layer in queries]
    keys = tuple(key.layer for _, key in pairs)
    shapes = {layer: tuple(map(capabilities.shape, pair)) for layer, pair in zip(queries, pairs, strict=True)}
    other = next((layer for layer in queries if shapes[layer] != shapes[queries[0]]), None)
    if other is not None:
        raise WeirError(
            f"blocks {queries[0]} and {other} have heads of other numbers or sizes, which are no one tensor; send "
            "separate requests, or capture q_rot and k_rot",
            f"{path}.layers",
        )
    told = tuple(_meta(facts.attention[layer], *shapes[layer]) for layer in queries)
    captures = (
        Capture("q_rot", layers=list(queries), path=path),
        Capture("k_rot", layers=sorted(set(keys)), path=path),
    )
    return Stacked(stream, queries, keys, told), captures


def _queries(asked: Capture, capabilities: EngineCapabilities) -> tuple[int, ...]:
    """Return the blocks that are asked for; of all those that have heads with queries and keys.

    Raises:
        WeirError: if one of them is not served, or there is none.
    """
    layers, attention = asked.resolve_layers(capabilities.num_layers), capabilities.facts.attention
    if asked.layers == "all":
        with_heads = tuple(layer for layer in layers if layer in attention and attention[layer].heads)
        layers = with_heads or layers  # without any, the first block says why
    for layer in layers:
        if why := capabilities.sites.get(Site("pattern", layer), "the block has no attention"):
            raise WeirError(f"the attention of block {layer} is refused: {why}", f"{asked.path}.layers")
    return layers


def _check(layer: int, facts: AttentionFacts, has_media: bool, field: str) -> None:
    """Raise WeirError if ``qk_meta`` cannot say what a layer does with its queries and keys."""
    if facts.chunk is not None:
        raise WeirError(
            f"block {layer} attends in chunks of {facts.chunk} positions, for which qk_meta has no field; capture "
            "pattern, or q_rot and k_rot",
            field,
        )
    if has_media and facts.media:
        raise WeirError(
            f"block {layer} lets tokens of one image see each other, for which qk_meta has no field; send text, or "
            "capture q_rot and k_rot",
            field,
        )


def _meta(facts: AttentionFacts, queries: tuple[int, ...], keys: tuple[int, ...]) -> dict[str, Any]:
    """Return an entry of ``qk_meta``; `queries` and `keys` are the shapes of rows, [heads, head size]."""
    return {
        "layer_name": facts.name,
        "scale": facts.scale,
        "logits_soft_cap": facts.soft_cap,
        "sliding_window": [-1, -1] if facts.window is None else [facts.window - 1, 0],
        "alibi_slopes": list(facts.alibi) or None,
        "sinks": list(facts.sinks) or None,
        "use_alibi_sqrt": False,
        "num_heads_local": queries[0],
        "num_kv_heads_local": keys[0],
        "head_size": facts.head_size,
        "num_kv_heads_total": keys[0],
    }
