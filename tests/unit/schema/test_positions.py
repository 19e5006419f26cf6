"""Selectors against the naive reading in tests.support.check."""

from __future__ import annotations

import copy
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.check import expected_positions
from tests.unit.refusals import refused
from tests.unit.request_strategies import is_empty, selectors, slices
from vllm_weir import Add, Capture, Clamp, Site, WeirError
from vllm_weir.schema.hooks import parse_site
from vllm_weir.schema.positions import ENDLESS, MAX_LIST, Positions
from vllm_weir.schema.request import ResolvedSpec, SiteRequest
from vllm_weir.schema.vectors import number

lengths = st.integers(1, 60)
grown = st.integers(1, 30)


@given(selector=selectors(), P=lengths, G=grown, low=st.integers(0, 80), data=st.data())
def test_a_selector_selects_what_the_naive_reading_says(selector, P, G, low, data):
    """As a whole, in a window, and once it has been written and read."""
    ids = data.draw(st.lists(st.integers(0, 20), min_size=P + G, max_size=P + G))
    parsed, end = Positions.parse(selector), P + G - 1
    wanted = expected_positions(selector, P, G, ids)
    mask = parsed.mask(np.arange(end), P, np.asarray(ids[:end]))
    assert mask.dtype == bool and np.flatnonzero(mask).tolist() == wanted
    window = slice(min(low, end), end)
    assert parsed.mask(np.arange(end)[window], P, np.asarray(ids[:end])[window]).tolist() == mask[window].tolist()
    again = Positions.parse(json.loads(json.dumps(parsed.to_json())))
    assert again.mask(np.arange(end), P, np.asarray(ids[:end])).tolist() == mask.tolist()
    assert Positions.parse(parsed) is parsed
    assert parsed.reaches(P, end) == parsed.mask(np.arange(end), P).any(), "tokens may be any"
    assert parsed.needs_token_ids or parsed.reaches(P, end) == bool(wanted)
    first = parsed.first(P, ids[:P])
    assert not wanted or (first is not None and first <= wanted[0])
    assert first is None or first >= 0
    in_prompt = [p for p in wanted if p < P]
    if in_prompt and not (isinstance(selector, str) and ":" in selector):
        assert first == in_prompt[0], "a hit is capped earlier than need be"
    if isinstance(selector, dict):
        assert in_prompt or first == P
        assert parsed.first(P, None) == 0


def test_a_step_does_not_look_through_a_list_again():
    """Selecting one position takes as long with 65,536 listed as with 4,096; workers do it for each step."""

    def seconds(count: int, prompt_len: int) -> float:
        sparse = Positions.parse([*range(0, 2 * count - 2, 2), -1])
        by_token = Positions("token_ids", sparse.values[:-1])
        here, tokens, times = np.array([500]), np.array([500]), []
        for _ in range(20):
            began = time.perf_counter()
            assert sparse.mask(here, prompt_len)
            assert by_token.mask(here, prompt_len, tokens)
            times.append(time.perf_counter() - began)
        assert sparse.rank(500, prompt_len) == 250 and sparse.bounds(prompt_len) is None
        return min(times)

    assert seconds(MAX_LIST, 2**18) < 8 * max(seconds(MAX_LIST // 16, 2**18), 2e-5)


def test_a_list_for_several_sites_is_read_once():
    spec = ResolvedSpec(tuple(SiteRequest(Site("resid_post", k), Positions("list", (4, 1)), False) for k in range(3)))
    first, *others = (one.positions for one in ResolvedSpec.from_wire(spec.wire).site_requests)
    assert first == Positions("list", (4, 1)) and all(one is first for one in others)
    assert copy.copy(first) == first and hash(copy.copy(first)) == hash(first)


@given(text=slices())
def test_a_slice_is_refused_just_where_it_never_selects_anything(text):
    if not is_empty(text):
        Positions.parse(text)
        return
    with refused("there", "selects no position") as e:
        Positions.parse(text, "there")
    assert "'start:'" in e.value.message


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_the_tokenizer_s(special):
    parsed = Positions.parse({"special": special})
    assert parsed.to_json() == {"special": special} and parsed.needs_token_ids
    assert Positions.parse(json.loads(json.dumps(parsed.to_json()))) == parsed
    assert Positions.parse({"special": np.bool_(special)}) == parsed
    known = parsed.with_special([7, 2, 2])
    assert known.to_json() == {"token_ids" if special else "not_token_ids": [2, 7]}
    assert known.with_special([9]) is known
    assert known.mask(np.arange(4), 2, np.array([2, 5, 7, 9])).tolist() == [special, not special, special, not special]
    for ask in (lambda: parsed.mask(np.arange(3), 2), lambda: parsed.first(2, [1, 2])):
        with pytest.raises(AssertionError):
            ask()


@pytest.mark.parametrize("kind", ["token_ids", "not_token_ids"])
def test_unknown_tokens_select_a_superset(kind):
    parsed = Positions.parse({kind: [3]})
    assert parsed.mask(np.arange(5), 3, None).all() and parsed.needs_token_ids
    # One that is unknown among known ones is not selected: nobody can say that it is none of these.
    known = parsed.mask(np.arange(3), 3, np.array([3, -1, 4])).tolist()
    assert known == ([True, False, False] if kind == "token_ids" else [False, False, True])


ONE_BY_ONE = [[kind(i) for i in range(2, 9)] for kind in (np.int64, torch.tensor, np.array)]


@pytest.mark.parametrize("same", [range(2, 9), tuple(range(2, 9)), np.arange(2, 9), torch.arange(2, 9), *ONE_BY_ONE])
def test_other_sequences_of_ints(same):
    assert Positions.parse(same) == Positions.parse(list(range(2, 9)))
    assert Capture(layers=same).layers == tuple(range(2, 9))
    for kind in ("token_ids", "not_token_ids"):
        assert Positions.parse({kind: same}) == Positions.parse({kind: list(range(2, 9))})


@pytest.mark.parametrize("three", [3, np.int64(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int8)])
def test_an_int_without_dimensions(three):
    assert Positions.parse(three) == Positions.parse(3) == Positions.parse([three])
    assert Positions.parse({"token_ids": three}) == Positions.parse({"token_ids": [3]})
    assert type(Positions.parse(three).values[0]) is type(Positions.parse([three]).values[0]) is int
    for layers in (three, [three], (three, three)):
        assert Capture(layers=layers).layers == (3,) and json.dumps(Capture(layers=layers).to_json())
    assert parse_site(("resid_post", three)) == Site("resid_post", 3)
    assert type(parse_site(("embed", three)).layer) is int
    assert number(three, "scale") == 3.0 and Clamp([1.0, 2.0], three, max=three).max == 3.0
    given = Add([1.0, 2.0], layers=three, scale=three, positions=three)
    assert given.to_json() == Add([1.0, 2.0], layers=3, scale=3, positions=3).to_json()
    assert json.loads(json.dumps(given.to_json())) == given.to_json()


@pytest.mark.parametrize(
    "bad", [torch.tensor(True), np.array(True), np.bool_(True), torch.tensor(1.5), np.array(1.5), np.array("all"),
            torch.tensor(3, device="meta"), torch.tensor(1j), np.array(None)],
)  # fmt: skip
def test_what_is_no_int_in_a_tensor_either(bad):
    for give in (
        lambda: Positions.parse(bad, "at"),
        lambda: Positions.parse([bad], "at"),
        lambda: Positions.parse({"token_ids": [bad]}, "at"),
        lambda: Capture(layers=bad),
        lambda: parse_site(("resid_post", bad)),
    ):
        with pytest.raises(WeirError):
            give()
    if getattr(bad, "dtype", None) in (torch.float32, np.float64):
        assert number(bad, "scale") == 1.5
    else:
        with pytest.raises(WeirError, match="expected a number"):
            number(bad, "scale")


NOTHING = [[], (), range(0), np.zeros(0, int), torch.zeros(0, dtype=torch.int64), {"token_ids": []}]
OTHER_TYPES = [None, True, 1.0, float("nan"), {1}, {}, {"a": 1}, [None], [2**31], np.zeros((2, 2)), torch.zeros(2)]
SLICES = [*str.split("5:3 3:3 0:0 :0 -1:-3 -2:-2 -3:0 5:3:2 1 a:b 1:2:3:4"), "1:2\n"]
SPECIAL = [{"special": value} for value in (None, 0, "no", [1])] + [{"special": False, "within": "prompt"}]
TOKENS = [{"token_ids": [1], "not_token_ids": [2]}, *({"not_token_ids": ids} for ids in ([-1], "7", [True]))]


@pytest.mark.parametrize("bad", [*NOTHING, *OTHER_TYPES, *SLICES, *SPECIAL, *TOKENS])
def test_refusals(bad):
    with pytest.raises(WeirError) as e:
        Positions.parse(bad, "there")
    assert e.value.field.startswith("there")


def test_long_lists_are_refused():
    Positions.parse(range(MAX_LIST))
    with pytest.raises(WeirError, match="slice"):
        Positions.parse(range(10**9))


@pytest.mark.parametrize(("theirs", "meant"), [("all_prompt", "prompt"), ("all_generated", "generated")])
def test_the_forks_keywords_are_refused_with_those_that_are_meant(theirs, meant):
    with refused("positions", f"did you mean '{meant}'"):
        Positions.parse(theirs)


@pytest.mark.parametrize(
    ("selector", "P", "count"),
    [
        *[(s, None, None) for s in ("all", "prompt", "generated", "sampled", "4:", "-2:", ":-1", "2:-1")],
        *[({kind: [5, 6]}, P, None) for kind in ("token_ids", "not_token_ids") for P in (None, 9)],
        *[("last_prompt", None, 1), (-1, None, 1), ([5, 5, 3], None, 2), ("1:8:3", None, 3), ("-3:-1", None, 2)],
        ([3, -1], None, 2),
    ],
)
def test_how_many_positions_a_selector_names_whatever_the_prompt(selector, P, count):
    assert Positions.parse(selector).count(P) == count


@given(selector=selectors(), P=st.integers(1, 40))
def test_all_other_answers_are_what_the_mask_says(selector, P):
    """Two lengths show whether a selector is open, which names no number of positions."""
    chosen = Positions.parse(selector)
    mask = chosen.mask(np.arange(200), P)
    if not chosen.needs_token_ids:
        for rank, position in enumerate(np.flatnonzero(mask)):
            assert chosen.rank(int(position), P) == rank
        assert chosen.is_open == (mask.sum() > mask[:120].sum())
        assert chosen.count(P) == (None if chosen.is_open else int(mask.sum()) or None)
    steady = chosen.steady(P)
    if steady is None:
        assert chosen.kind == "slice" and chosen.values[2] not in (None, 1)
    else:
        start, selected = steady
        assert (mask[max(0, start) :] == selected).all() or chosen.needs_token_ids
    first, end = chosen.bounds(P) or (None, None)
    if first is not None:
        assert mask.tolist() == [first <= position < end for position in range(200)]
    else:
        assert chosen.needs_token_ids or chosen.kind == "list" or chosen.interval.step > 1
    if chosen.end != ENDLESS:
        longest = max(1, chosen.end)
        assert not chosen.mask(np.arange(200), longest)[longest:].any()
    else:
        assert chosen.is_open


def test_a_modality_is_parsed_and_written_back():
    for name in ("image", "audio", "video"):
        positions = Positions.parse({"modality": name})
        assert positions.to_json() == {"modality": name} and positions.modality == name
        assert not positions.is_open and not positions.needs_token_ids and positions.reaches(3, 4)
        with pytest.raises(AssertionError):
            positions.mask(np.arange(3), 3)
    for wrong in ("smell", 1, None, ["image"]):
        with refused("capture.positions.modality", "a modality is one of image, audio, video"):
            Capture("resid_post", positions={"modality": wrong})
    for index in (0, 3, -1):
        positions = Positions.parse({"index": index, "modality": "image"})
        assert positions.to_json() == {"modality": "image", "index": index} and positions.index == index
        assert Positions.parse(positions.to_json()) == positions != Positions.parse({"modality": "image"})
        assert repr(positions) == f"Positions({{'modality': 'image', 'index': {index}}})"
    for wrong in ("first", 1.5, None, True, [0], 1 << 20):
        with refused("capture.positions.index", "which image of the prompt"):
            Capture("resid_post", positions={"modality": "image", "index": wrong})
    for wrong in ({"modality": "image", "special": True}, {"index": 0}, {"token_ids": [3], "index": 0}):
        with pytest.raises(WeirError, match="one key"):
            Positions.parse(wrong)
    assert Positions.parse("all").modality == ""
