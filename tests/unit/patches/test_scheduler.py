"""The cap on hits of the prefix cache."""

from __future__ import annotations

import pytest

from vllm_weir.patches.scheduler import _capped


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
