"""Queries and keys that are refused although a module has something that looks like them."""

from __future__ import annotations

import pytest
import torch

from vllm_weir.patches.model.discovery import _refuse_unclear_queries
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.site_map import SiteMap

GIVEN = {hook: Anchor("attn", "before", TensorKey("arg", k)) for k, hook in enumerate(("q_rot", "k_rot"))}
PROJECTED = Anchor("qkv_proj", "after", TensorKey("out", 0))


class RotaryEmbedding(torch.nn.Module):
    pass


def sites_of(model, q, k):
    """The sites of two blocks, once what is not clear has been refused."""
    anchors = {Site(hook, layer): GIVEN[hook] for hook in GIVEN for layer in range(2)}
    anchors |= {Site(hook, layer): anchor for hook, anchor in (("q", q), ("k", k)) for layer in range(2)}
    sites = SiteMap(2, anchors)
    _refuse_unclear_queries(sites, model)
    return sites


def served(sites):
    return {site.hook for site in sites.anchors}


def test_what_attention_is_given_is_not_the_projections_output_where_it_was_rotated():
    sites = sites_of(torch.nn.Sequential(RotaryEmbedding()), GIVEN["q_rot"], PROJECTED)
    assert served(sites) == {"k", "q_rot", "k_rot"}
    assert "there is only q_rot" in sites.refused[Site("q", 1)]


@pytest.mark.parametrize("module", [torch.nn.Identity, RotaryEmbedding])
def test_projections_outputs_are_served(module):
    assert served(sites_of(torch.nn.Sequential(module()), PROJECTED, PROJECTED)) == {"q", "k", "q_rot", "k_rot"}


def test_without_rotary_both_are_one():
    sites = sites_of(torch.nn.Sequential(torch.nn.Identity()), GIVEN["q_rot"], GIVEN["k_rot"])
    assert served(sites) == {"q", "k", "q_rot", "k_rot"} and not sites.refused


def test_columns_that_vllm_reorders():
    model = torch.nn.Sequential(RotaryEmbedding())
    model.permute_qk_weight_for_rotary = lambda *_: None
    sites = sites_of(model, PROJECTED, PROJECTED)
    assert not served(sites)
    assert all("reorders" in why for why in sites.refused.values())
