"""How the rows of a request are looked up."""

from __future__ import annotations

import pytest
import torch

from vllm_weir import Activations, Site


@pytest.fixture
def acts():
    sites = [Site("embed", 0), Site("resid_post", 3), Site("final_norm", 0)]
    ids = torch.arange(6).reshape(3, 2)
    return Activations({s: torch.zeros(2, 4) for s in sites}, dict(zip(sites, ids)), dict(zip(sites, 10 + ids)))


@pytest.mark.parametrize(
    ("key", "first"),
    [
        (("embed",), 0),
        (("embed", 0), 0),
        (("resid_post", 3), 2),
        (("blocks.3.hook_resid_post",), 2),
        ((Site("resid_post", 3),), 2),
        (("final_norm",), 4),
    ],
)
def test_positions_and_tokens_are_asked_for_as_rows_are(acts, key, first):
    rows = acts[key if len(key) == 2 else key[0]]
    assert rows.shape == (2, 4)
    assert acts.positions_of(*key).tolist() == [first, first + 1]
    assert acts.token_ids_of(*key).tolist() == [10 + first, 11 + first]


def test_a_site_that_was_not_captured_is_a_key_error(acts):
    with pytest.raises(KeyError, match=r"resid_post\[2\] was not captured"):
        acts.positions_of("resid_post", 2)
