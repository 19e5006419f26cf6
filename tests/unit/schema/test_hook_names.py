"""Names of hook points and sites: TransformerLens's, and those that receipts, files and `str` write."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.unit.refusals import pairs, refused
from vllm_weir.config.settings import Settings
from vllm_weir.schema.hooks import (
    BLOCK_HOOKS,
    HOOKS,
    MODEL_HOOKS,
    READ_ONLY_HOOKS,
    STREAM_HOOKS,
    Site,
    normalise_hook,
    parse_site,
)

ACCEPTED = {f"blocks.7.hook_{hook}": (hook, 7) for hook in STREAM_HOOKS}
ACCEPTED |= {"blocks.7.hook_in": ("resid_pre", 7), "blocks.7.hook_out": ("resid_post", 7)}
NAMES_INSIDE = {
    "attn_in": "attn.hook_in",
    **{hook: f"attn.hook_{hook} attn.{hook}.hook_out" for hook in "qkv"},
    "q_rot": "attn.hook_rot_q",
    "k_rot": "attn.hook_rot_k",
    "attn_scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
    "z": "attn.hook_z attn.o.hook_in",
    "mlp_in": "hook_mlp_in mlp.hook_in",
    "mlp_pre": "mlp.hook_pre",
    "mlp_pre_linear": "mlp.hook_pre_linear",
    "mlp_post": "mlp.hook_post mlp.out.hook_in",
    "expert_ids": "mlp.hook_expert_indices",
    "expert_weights": "mlp.hook_expert_weights",
}
INSIDE = {name: hook for hook, names in NAMES_INSIDE.items() for name in names.split()}
ACCEPTED |= {f"blocks.7.{name}": (hook, 7) for name, hook in INSIDE.items()}
ACCEPTED |= {"hook_embed": ("embed", 0), "ln_final.hook_out": ("final_norm", 0)}
BARE = {
    name.removeprefix("attn."): hook
    for name, hook in INSIDE.items()
    if name.startswith("attn.hook_") and hook != "attn_in"
}
BARE |= INSIDE | {"hook_expert_indices": "expert_ids", "rot_q": "q_rot", "rot_k": "k_rot"}

INSTEAD = {  # a word of what to use -> TransformerLens's names; those with a point in front are a block's
    r"\(final_norm - bias\) / weight": "ln_final.hook_normalized",
    "compute it from resid_post": "ln_final.hook_scale",
    "use resid_post": "ln_final.hook_in",
    "use embed": "embed.hook_out",
    "use resid_pre": "embed_ln.hook_out",
    r"resid_pre\[0\] - embed": "hook_pos_embed pos_embed.hook_out",
    "final_norm": "unembed.hook_in",
    "logits": "unembed.hook_out hook_unembed",
    "attn_out": ".attn.hook_out .hook_mixer_out .ln1_post.hook_out .mixer.in_proj.hook_out",
    "mlp_out": ".mlp.hook_out",
    "use resid_pre, or attn_in": ".hook_attn_in .hook_q_input .attn.hook_v_input",
    r"\(attn_in - bias\) / weight": ".ln1.hook_normalized",
    r"\(mlp_in - bias\) / weight": ".ln2.hook_normalized",
    "attn_in": ".ln1.hook_out",
    "resid_mid": ".ln2.hook_scale",
    "multiply z with": ".attn.hook_result .attn.o.hook_out",
    "q_rot": ".attn.q_norm.hook_out",
    "mlp_pre_linear the other": ".mlp.in.hook_out",
    "router_logits": ".mlp.gate.hook_out .mlp.hook_router_scores",
    "expert_ids": ".mlp.experts.hook_out",
}
REFUSED = {
    f"blocks.7{name}" if name.startswith(".") else name: words
    for words, names in INSTEAD.items()
    for name in names.split()
}

SAE_LENS = str.split("""
    blocks.11.hook_resid_post blocks.11.hook_mlp_in blocks.11.hook_mlp_out blocks.11.attn.hook_z blocks.11.mlp.hook_in
    blocks.11.hook_attn_out blocks.11.hook_resid_pre blocks.11.hook_resid_mid hook_embed blocks.11.ln2.hook_normalized
""")
"""Hook names of the pretrained SAEs and transcoders in SAELens 6.54's registry."""


def test_published_saes_read_hook_points_that_weir_has():
    """Of 13,857 all but the 26 transcoders of Gemma Scope that read the norm before its weight: no input of the MLP."""
    for name in SAE_LENS[:-1]:
        parse_site(name)
    with refused("site"):
        parse_site(SAE_LENS[-1])


@pytest.mark.parametrize(("name", "hook"), BARE.items())
def test_a_name_without_a_block(name, hook):
    assert normalise_hook(name) == weir.Capture(name, [1, 2]).hook == hook
    assert parse_site((name, 3)) == (hook, 3)
    with pytest.raises(weir.WeirError, match=rf"says no layer; use .*'{hook}.<layer>'"):
        parse_site(name)


@pytest.mark.parametrize(("name", "site"), ACCEPTED.items())
def test_a_name_of_transformer_lens_is_a_site(name, site):
    assert parse_site(name) == site
    capture = weir.Capture(name)
    assert capture.hook == site[0]
    if site[0] in BLOCK_HOOKS:
        assert capture.layers == (site[1],)
    if site[0] not in READ_ONLY_HOOKS:
        add = weir.Add(torch.ones(4), site[1], hook=name)
        assert add.hook == site[0]
        assert site[0] in MODEL_HOOKS or add.layers == (site[1],)
    assert weir.Capture.from_json({"hook": name}).hook == site[0]


@pytest.mark.parametrize(("name", "instead"), REFUSED.items())
def test_a_name_whose_value_no_hook_point_has_is_refused_with_what_to_use(name, instead):
    """One sentence, in every place that takes a name, with the field."""
    asked = {
        "capture.hook": lambda: weir.Capture(name),
        "capture[0].hook": lambda: weir.Capture.from_json({"hook": name}, "capture[0]"),
        "hook": lambda: weir.Add(torch.ones(4), 7, hook=name),
        "site": lambda: parse_site(name),
    }
    for field, ask in asked.items():
        with pytest.raises(weir.WeirError, match=instead) as e:
            ask()
        assert "is no hook point: " in e.value.message and name in e.value.message, field
        assert e.value.field.endswith(field)
    if not name.startswith("blocks."):
        with refused("settings.hooks", instead):
            Settings.load({"weir": {"hooks": [name]}}, {})


@pytest.mark.parametrize(
    "name", ["hook_final_norm", "hook_post_block", "blocks.7.hook_embed", "blocks.7.hook_pre_attn"]
)
def test_what_only_looks_like_a_name_of_transformer_lens_is_unknown(name):
    for ask in (lambda: weir.Capture(name), lambda: parse_site(name)):
        with pytest.raises(weir.WeirError):
            ask()


THIRD = [
    *((hook, layer) for hook in ("resid_post", "post_block") for layer in (3, np.int64(3), torch.tensor(3))),
    *(["resid_post", 3], Site("resid_post", 3)),
    *("resid_post.3", "resid_post[3]", "post_block.3", "blocks.3.hook_resid_post", "blocks.3.hook_out"),
]


@pytest.mark.parametrize("key", THIRD)
def test_every_form_that_names_a_site(key):
    assert parse_site(key) == ("resid_post", 3)


def test_what_is_written_is_read():
    for site in [Site(hook, 0 if hook in ("embed", "final_norm") else 12) for hook in HOOKS]:
        receipt = weir.Receipt(captured={site: 5}, steered=({site: 2},))
        written = json.loads(json.dumps(receipt.to_dict()))
        forms = [*written["captured"], *written["steered"][0], str(site), json.loads(json.dumps(site))]
        assert [parse_site(form) for form in forms] == [site] * 4
    assert parse_site("final_norm") == parse_site("final_norm.0") == parse_site("final_norm[0]") == ("final_norm", 0)


NO_SITE = {
    "says no layer; use .'resid_post', layer. or 'resid_post.<layer>'": ["resid_post"],
    "unknown hook point 'nothing'": ["nothing.3"],
    "is no site": [
        *("", "resid_post.x", "resid_post.-1", "resid_post[3", "resid_post.٣", "resid_post." + "9" * 5000),
        "blocks." + "9" * 5000 + ".hook_out",
    ],
    "a site is a pair": [3, ("resid_post",), *(("resid_post", layer) for layer in (True, 3.0, "3"))],
}


@pytest.mark.parametrize(("why", "key"), pairs(NO_SITE))
def test_what_names_no_site_is_an_error_with_the_way_out(why, key):
    with refused("site", why) as e:
        parse_site(key)
    assert len(e.value.message) < 400


@pytest.mark.parametrize(("alias", "hook"), [("pre_attn", "resid_pre"), ("ln_final.hook_out", "final_norm")])
def test_aliases_are_canonical_in_the_wire_form(alias, hook):
    assert weir.Capture(alias).to_json()["hook"] == hook == normalise_hook(alias)
