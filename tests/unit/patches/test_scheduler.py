"""The cap on hits of the prefix cache, and the bound on a step's tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_weir.patches.media import tokens_before_cut
from vllm_weir.patches.scheduler import _bounded, _capped


class Old:
    def find_longest_cache_hit(self, block_hashes, max_cache_hit_length):
        return max_cache_hit_length


class New(Old):
    def find_longest_cache_hit_per_group(self, block_hashes, max_cache_hit_length):
        return max_cache_hit_length


@pytest.mark.parametrize("kind", [Old, New])
def test_lookups_are_capped_while_it_holds(kind):
    coordinator = kind()
    lookups = [name for name in dir(kind) if name.startswith("find")]
    with _capped(coordinator, 5):
        with _capped(coordinator, 7):  # one lookup of the cache manager calls the other
            assert [getattr(coordinator, name)((), 9) for name in lookups] == [5] * len(lookups)
        assert [getattr(coordinator, name)((), 9) for name in lookups] == [5] * len(lookups)
        assert [getattr(coordinator, name)((), 3) for name in lookups] == [3] * len(lookups)
    assert [getattr(coordinator, name)((), 9) for name in lookups] == [9] * len(lookups)
    assert not vars(coordinator)


def scheduler(item: int = 0, at: int | None = None, chunked: bool = True) -> Any:
    """A scheduler with requests of 90 tokens, with an image of so many from 20 on; running ones have computed `at`."""
    items = [SimpleNamespace(mm_position=SimpleNamespace(offset=20, length=item))] if item else []
    head = SimpleNamespace(num_tokens=90, mm_features=items, num_computed_tokens=at or 0)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked), running=[] if at is None else [head, head],
        waiting=SimpleNamespace(peek_request=lambda: head), requests={}, max_num_scheduled_tokens=100,
        max_num_running_reqs=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of", "most_whole", "wanted"),
    [
        (scheduler(), 100, (7, 8)),
        (scheduler(40), 0, (7, 8)),
        (scheduler(40), 100, (40, 1)),
        (scheduler(40), 39, (7, 8)),
        (scheduler(5), 100, (7, 8)),
        (scheduler(40, at=13), 100, (7, 8)),
        (scheduler(40, at=20), 100, (40, 1)),
        (scheduler(40, at=21), 100, (7, 8)),
        (scheduler(5, at=20), 100, (7, 8)),
        (scheduler(40, at=20), 0, (7, 8)),
        (scheduler(40, chunked=False), 100, (90, 1)),
    ],
)
def test_what_is_not_split_gets_a_step_of_its_own(of: Any, most_whole: int, wanted: tuple[int, int]) -> None:
    """Which has as many tokens, and one request, where what waits behind it would bound steps to 7 tokens."""
    with _bounded(of, SimpleNamespace(tokens=lambda live, limit: 7), most_whole):  # type: ignore[arg-type]
        assert (of.max_num_scheduled_tokens, of.max_num_running_reqs) == wanted
    assert (of.max_num_scheduled_tokens, of.max_num_running_reqs) == (100, 8)


@pytest.mark.parametrize(
    ("computed", "tokens", "most", "wanted"),
    [
        (0, 20, 40, 20), (0, 21, 40, 20), (0, 59, 40, 20), (0, 60, 40, 60), (20, 39, 40, 0), (20, 40, 40, 40),
        (21, 5, 40, 5), (0, 30, 39, 30), (60, 9, 40, 9),
    ],
)  # fmt: skip
def test_steps_end_before_an_image_that_does_not_fit(computed: int, tokens: int, most: int, wanted: int) -> None:
    request = scheduler(40).waiting.peek_request()
    assert tokens_before_cut(request, computed, tokens, most) == wanted
