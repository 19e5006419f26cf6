"""Where a prompt's images are, from vLLM's placeholders, and the selector by modality."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.reachable import NO_MEDIA, Media, embedded_ranges
from vllm_weir.schema.positions import MAX_LIST, Positions

IMAGE, AUDIO = (Positions.parse({"modality": name}) for name in ("image", "audio"))
placeholders = st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), max_size=6), st.booleans()), max_size=5)


@given(placeholders)
def test_exactly_the_positions_that_hold_embeddings(items):
    """Placeholders with gaps before them, some as a whole, some in parts, as vLLM describes them."""
    offset, expected, described = 0, [], []
    for gap, mask, whole in items:
        offset += gap
        is_embed = None if whole else torch.tensor(mask, dtype=torch.bool)
        described.append(("image", embedded_ranges(offset, len(mask), is_embed)))
        expected += [offset + k for k, one in enumerate(mask) if whole or one]
        offset += len(mask)
    media = Media.of(described)
    assert media.has(IMAGE) == bool(expected) and not media.has(AUDIO) and media.has(Positions.parse("all"))
    if not expected:
        with pytest.raises(WeirError, match="the prompt has no image; "):
            media.positions(IMAGE, "positions")
        return
    found = media.positions(IMAGE, "positions")
    prompt_len = offset + 2
    ids = range(prompt_len + 3)
    assert [p for p in ids if found.mask(torch.tensor([p]).numpy(), prompt_len)[0]] == expected
    assert found.first(prompt_len) == expected[0] and found.count(prompt_len) == len(expected)
    assert Positions.parse(found.to_json()) == found, "it does not reach the workers as it is"
    adjacent = expected == list(range(expected[0], expected[-1] + 1))
    assert (found.kind == "slice") == adjacent == (found.bounds(prompt_len) == (expected[0], expected[-1] + 1))


def test_each_modality_has_its_own():
    media = Media.of([("image", [(3, 5)]), ("audio", [(9, 10)]), ("image", [(5, 7)])])
    assert media.ranges == (("audio", ((9, 10),)), ("image", ((3, 7),)))
    assert media.positions(IMAGE, "f").to_json() == "3:7" and media.positions(AUDIO, "f").to_json() == "9:10"
    with refused("capture[0].positions.modality", "the prompt has no video, but audio, image; leave this out"):
        media.positions(Positions.parse({"modality": "video"}), "capture[0].positions.modality")
    assert not NO_MEDIA and media and hash(media) == hash(Media(media.items))


def test_one_item_of_a_modality():
    """Items count in the order of the prompt, also where two of them touch, and from the last."""
    items = [("image", [(5, 7)]), ("image", [(3, 4), (4, 5)]), ("audio", [(9, 10)]), ("image", [(12, 13), (14, 15)])]
    media = Media.of(items)
    assert media.positions(IMAGE, "f").to_json() == [3, 4, 5, 6, 12, 14]
    for index, expected in {0: "3:5", 1: "5:7", 2: [12, 14], -1: [12, 14], -3: "3:5"}.items():
        one = Positions.parse({"modality": "image", "index": index})
        assert media.has(one) and media.positions(one, "f").to_json() == expected
    for index in (3, -4):
        one = Positions.parse({"modality": "image", "index": index})
        assert not media.has(one)
        with refused("capture[0].positions.index", f"item {index} of image has no position: the prompt's are 0..2"):
            media.positions(one, "capture[0].positions.modality")
    with refused("capture[0].positions.modality", "the prompt has no video"):
        one = Positions.parse({"modality": "video", "index": 0})
        media.positions(one, "capture[0].positions.modality")
    assert hash(Media.of(items)) == hash(media) != hash(Media.of([("image", media.ranges[1][1])]))


def test_more_places_than_a_list_may_have():
    """One image may be as long as it likes; several with gaps between them may not reach the workers."""
    half = MAX_LIST // 2
    assert Media.of([("image", [(1, 3 * MAX_LIST)])]).positions(IMAGE, "f").kind == "slice"
    most = Media.of([("image", [(1, 1 + half), (half + 2, MAX_LIST + 2)])]).positions(IMAGE, "f")
    assert Positions.parse(most.to_json()) == most
    with refused("capture[0].positions", f"{MAX_LIST + 1} positions of image in 2 places"):
        Media.of([("image", [(1, 1 + half), (half + 2, MAX_LIST + 3)])]).positions(IMAGE, "capture[0].positions")


def test_where_positions_may_change_if_an_image_s_attend_both_ways():
    media = Media.of([("image", [(10, 20), (30, 40)]), ("audio", [(20, 22)])])
    expected = {0: 10, 10: 10, 19: 10, 20: 20, 21: 20, 22: 30, 35: 30, 39: 30, 40: None}
    assert {first: media.changed_from(first) for first in expected} == expected
    assert NO_MEDIA.changed_from(0) is None
