"""Images and the like of a request: where they are in its prompt, and what a refusal has to undo."""

from __future__ import annotations

from typing import Any

from vllm_weir.frontend.admission.reachable import NO_MEDIA, Media, embedded_ranges
from vllm_weir.schema.positions import ENDLESS

RENDERER = "_weir_renderer"
"""Attribute of an ``OutputProcessor``: the engine's object that holds the cache of processed items."""


def media_of(request: Any) -> Media:
    """Return where a request's prompt has images and the like; each of their positions has a placeholder's id."""
    if not request.mm_features:
        return NO_MEDIA
    placed = ((feature.modality, feature.mm_position) for feature in request.mm_features)
    ranges = ((name, embedded_ranges(at.offset, at.length, at.is_embed)) for name, at in placed)
    return Media.of(ranges, longest_item(request))


def longest_item(request: Any, most: int = ENDLESS) -> int:
    """Return the most positions that an item of a request's prompt has, of those with up to `most`; 0 if none has."""
    lengths = (feature.mm_position.length for feature in request.mm_features or ())
    return max((length for length in lengths if length <= most), default=0)


def item_at(request: Any, position: int, most: int) -> int:
    """Return how many positions the item has that begins at a position; 0 if none does, or it has more than `most`."""
    places = (feature.mm_position for feature in request.mm_features or ())
    return next((at.length for at in places if at.offset == position and at.length <= most), 0)


def tokens_before_cut(request: Any, computed: int, tokens: int, most: int) -> int:
    """Return how many of a request's next tokens a step may have that splits no item of up to `most` positions.

    An item that was split before, or is in the cache in part, goes on.
    """
    for at in (feature.mm_position for feature in request.mm_features or ()):
        if at.length <= most and computed <= at.offset < computed + tokens < at.offset + at.length:
            return at.offset - computed
    return tokens


def forget_items(output_processor: Any, request: Any) -> None:
    """Drop the items of a refused request from the caller's cache.

    vLLM has entered them as sent to the engine, which never gets them; the next request with the
    same image would come without it.
    """
    if not request.mm_features:
        return
    cache = getattr(getattr(output_processor, RENDERER, None), "mm_processor_cache", None)
    invalidate = getattr(cache, "invalidate", None)
    entries = getattr(cache, "_cache", None)  # what older versions have no method for
    for feature in request.mm_features:
        name = getattr(feature, "mm_hash", None) or feature.identifier
        if feature.data is None:
            continue
        if invalidate is not None:
            invalidate(name)
        elif entries is not None:
            entries.pop(name, None)
