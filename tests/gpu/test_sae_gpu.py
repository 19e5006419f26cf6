"""Autoencoders whose weights and rows are bfloat16, multiplied as they are, and the largest values by a kernel."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from vllm_weir.util.top import top_values

pytestmark = pytest.mark.gpu
D, D_SAE = 512, 16_384


@pytest.mark.parametrize("subtracted", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 500])
def test_encode(subtracted, rows):
    """Activations, and the most active features, are what float32 arithmetic on the same numbers gives."""
    source = torch.Generator().manual_seed(rows)
    shapes = {"W_enc": (D, D_SAE), "W_dec": (D_SAE, D), "b_enc": (D_SAE,), "b_dec": (D,)}
    tensors = {name: torch.randn(shape, generator=source).bfloat16() for name, shape in shapes.items()}
    site = ("resid_post", 1)
    sae = weir.SAE.from_tensors("standard", site, apply_b_dec_to_input=subtracted, **tensors)
    given = torch.randn(rows, D, generator=source).bfloat16()
    expected = sae.encode(given.double().float())
    found = sae.to("cuda").encode(given.cuda()).cpu()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    ids, values = sae.to("cuda").top(given.cuda(), 32)
    wanted_ids, wanted = top_values(found, 32)
    assert torch.equal(ids.cpu(), wanted_ids) and torch.equal(values.cpu(), wanted)


@pytest.mark.parametrize("architecture", ["jumprelu", "topk", "gated"])
def test_the_most_active_are_those_of_all(architecture):
    """Whether activations are written out first or made as values are read."""
    source = torch.Generator().manual_seed(3)
    shapes = {"W_enc": (D, D_SAE), "W_dec": (D_SAE, D), "b_dec": (D,)}
    shapes |= dict.fromkeys(("b_gate", "r_mag", "b_mag") if architecture == "gated" else ("b_enc",), (D_SAE,))
    tensors = {name: torch.randn(shape, generator=source).bfloat16().cuda() for name, shape in shapes.items()}
    more = {"threshold": torch.rand(D_SAE, generator=source).mul(40).cuda()} if architecture == "jumprelu" else {}
    k = {"k": 48} if architecture == "topk" else {}
    sae = weir.SAE.from_tensors(architecture, ("resid_post", 1), **tensors, **more, **k)
    rows = torch.randn(700, D, generator=source).bfloat16().cuda()
    for top_k in (1, 32, 60):
        wanted_ids, wanted = top_values(sae.encode(rows), top_k)
        ids, values = sae.top(rows, top_k)
        assert torch.equal(ids, wanted_ids.long()) and torch.equal(values, wanted)
