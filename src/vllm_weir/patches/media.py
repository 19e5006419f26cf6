"""Images and the like of a request: where they are in its prompt, and what a refusal has to undo."""

from __future__ import annotations

from typing import Any

from vllm_weir.schema.media import NO_MEDIA, Media, embedded_ranges

RENDERER = "_weir_renderer"
"""Attribute of an ``OutputProcessor``: the engine's object that holds the cache of processed items."""


def media_of(request: Any) -> Media:
    """Return where the prompt of an ``EngineCoreRequest`` has images and the like.

    Its token ids there are placeholders, as many as the item has positions.
    """
    if not request.mm_features:
        return NO_MEDIA
    placed = ((feature.modality, feature.mm_position) for feature in request.mm_features)
    return Media.of((name, embedded_ranges(at.offset, at.length, at.is_embed)) for name, at in placed)


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
