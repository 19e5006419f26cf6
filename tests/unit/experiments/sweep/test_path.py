"""Paths: what is held still between a sender and a receiver."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.experiments.sweep.plan import FREEZABLE, Receiver, frozen_sites, parse_freeze, precedes
from vllm_weir.schema.hooks import BLOCK_HOOKS, READ_ONLY_HOOKS, Site

HOOKS = [hook for hook in BLOCK_HOOKS if hook not in READ_ONLY_HOOKS]
SITES = st.builds(Site, st.sampled_from(HOOKS), st.integers(0, 3))


@pytest.mark.parametrize(
    ("sender", "to", "held"),
    [
        (("z", 1), ("resid_pre", 3), ["mlp_out.1", "attn_out.2", "mlp_out.2"]),
        (("q", 0), ("z", 1), ["mlp_out.0"]),
        (("attn_out", 0), ("mlp_in", 1), ["mlp_out.0", "attn_out.1"]),
        (("mlp_post", 0), ("mlp_out", 1), ["attn_out.1"]),
        (("resid_pre", 1), ("resid_post", 1), ["attn_out.1", "mlp_out.1"]),
        (("resid_post", 0), ("q", 1), []),
        (("mlp_out", 2), ("final_norm", 0), ["attn_out.3", "mlp_out.3"]),
        (("embed", 0), ("resid_pre", 1), ["attn_out.0", "mlp_out.0"]),
    ],
)
def test_what_is_held(sender: Any, to: Any, held: list[str]) -> None:
    found = frozen_sites(Site(*sender), Site(*to), FREEZABLE, 4)
    assert sorted(f"{site.hook}.{site.layer}" for site in found) == sorted(held)


@given(SITES, SITES, st.sampled_from([FREEZABLE, ("attn_out",), ("mlp_out",), ()]))
def test_neither_end_is_held_nor_the_way_out_of_the_sender(sender: Site, to: Site, freeze: tuple[str, ...]) -> None:
    found = set(frozen_sites(sender, to, freeze, 4))
    assert found.isdisjoint({sender, to})
    assert all(precedes(sender, site) and precedes(site, to) and site.hook in freeze for site in found)
    if sender.hook in ("q", "z"):
        assert Site("attn_out", sender.layer) not in found
    if sender.hook in ("mlp_in", "mlp_post"):
        assert Site("mlp_out", sender.layer) not in found
    assert len(found) <= 4 * len(freeze) and (not found or precedes(sender, to))


@pytest.mark.parametrize(
    ("to", "wanted"),
    [
        (("resid_post", 3), Receiver(Site("resid_post", 3))),
        (["hook_q", 1, [2, 0]], Receiver(Site("q", 1), (2, 0))),
        (("z", 1, 3), Receiver(Site("z", 1), (3,))),
        ("final_norm", Receiver(Site("final_norm", 0))),
    ],
)
def test_receivers(to: Any, wanted: Receiver) -> None:
    assert Receiver.parse(to) == wanted == Receiver.parse(wanted.to_json())


@pytest.mark.parametrize(
    ("to", "field"),
    [
        ("resid_post", "to"), (("resid_post",), "to"), (("resid_post", "3"), "to"), (("resid_post", -1), "to"),
        ((READ_ONLY_HOOKS[0], 1), "to"), (("resid_post", 1, [0]), "to.heads"), (("q", 1, []), "to.heads"),
        (("q", 1, [0], 2), "to"), (7, "to"),
    ],
)  # fmt: skip
def test_refused_receivers(to: Any, field: str) -> None:
    with refused(field):
        Receiver.parse(to)


def test_freeze() -> None:
    assert parse_freeze("hook_mlp_out") == ("mlp_out",) and parse_freeze(["mlp_out", "attn_out"]) == FREEZABLE
    with refused("freeze"):
        parse_freeze(["resid_mid"])
