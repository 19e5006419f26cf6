"""What is read off vLLM's requests with images, and what a refusal undoes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from vllm_weir.patches.media import RENDERER, forget_items, media_of


def feature(modality, offset, length, mask=None, data=None, mm_hash="h"):
    at = PlaceholderRange(offset, length, None if mask is None else torch.tensor(mask))
    return MultiModalFeatureSpec(data, modality, "id", at, mm_hash)


def test_ranges_are_those_that_vllm_fills():
    """vLLM's own reading of a placeholder, wherever it has one."""
    some = [
        feature("image", 2, 6, [False, True, True, False, True, True]),
        feature("image", 9, 3),
        feature("audio", 20, 2),
    ]
    media = media_of(SimpleNamespace(mm_features=some))
    assert media.ranges == (("audio", ((20, 22),)), ("image", ((3, 5), (6, 8), (9, 12)))) and media.longest == 6
    for one in some:
        inclusive = [(first, last + 1) for first, last in one.mm_position.extract_embeds_range()]
        assert set(inclusive) <= set(dict(media.ranges)[one.modality])
    assert not media_of(SimpleNamespace(mm_features=None)) and not media_of(SimpleNamespace(mm_features=[]))


def test_a_refused_request_takes_its_items_out_of_the_callers_cache():
    """Only those that it brought: what the engine has already is still there."""
    gone = []
    processor = SimpleNamespace()
    some = [feature("image", 0, 2, data={}, mm_hash="new"), feature("image", 4, 2, mm_hash="sent before")]
    request = SimpleNamespace(mm_features=some)
    forget_items(processor, request)
    setattr(processor, RENDERER, SimpleNamespace(mm_processor_cache=None))
    forget_items(processor, request)
    setattr(processor, RENDERER, SimpleNamespace(mm_processor_cache=SimpleNamespace(invalidate=gone.append)))
    forget_items(processor, request)
    forget_items(processor, SimpleNamespace(mm_features=None))
    assert gone == ["new"]
    entries = {"new": 1, "sent before": 2}
    setattr(processor, RENDERER, SimpleNamespace(mm_processor_cache=SimpleNamespace(_cache=entries)))
    forget_items(processor, request)
    assert entries == {"sent before": 2}
