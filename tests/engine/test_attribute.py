"""`attribute` with an engine: its rows are the twin's, and the top places are patched in it in the same call."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import directory, tokens
from tests.support.engines import get_llm
from tests.support.measure import close_logits, logit_bound
from tests.support.named import named_llm
from vllm_weir.errors import WeirError
from vllm_weir.experiments.attribute.twin import RowPatch, Twin

pytestmark = pytest.mark.engine("default")
HOOKS = ("resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_in", "mlp_post", "mlp_out",
         "resid_post")  # fmt: skip
CLEAN, A, B = tokens(19), 17, 33
CORRUPT = [*CLEAN[:4], 77, *CLEAN[5:9], 123, *CLEAN[10:]]


def metric(logits):
    return logits[A] - logits[B]


def check(result, twin, mode):
    """The effects that the engine measured are those of the same patches in transformers."""
    source, base = (CLEAN, CORRUPT) if mode == "denoise" else (CORRUPT, CLEAN)
    before = twin.logits(base)
    assert len(result.verified) == 10 and result.verified_by == "engine"
    for found in result.verified:
        row = twin.rows(source, [found.site])[found.site][found.position]
        patch = RowPatch(found.site, found.position, row if found.head is None else row[found.head], found.head)
        after = twin.logits(base, [patch])
        assert close_logits(found.effect, metric(after) - metric(before), torch.cat([before, after])), found
    assert max(abs(found.effect) for found in result.verified) > 0.01


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(other, marks=pytest.mark.thorough) for other in ("gpt2", "gemma2"))]
)
def test_the_top_ten_are_patched_in_the_engine(root, family):
    where = directory(root, family)
    llm = named_llm("default", root) if family == "llama" else get_llm(where, block_size=32)
    twin = Twin.load(str(where))
    bound = logit_bound(torch.cat([twin.logits(ids) for ids in (CLEAN, CORRUPT)]))
    for mode in ("denoise", "noise"):
        result = weir.attribute(llm, CLEAN, CORRUPT, hooks=HOOKS, metric=metric, mode=mode)
        assert result.twin_error < 1e-4
        assert tuple(result.engine_baseline) == pytest.approx(tuple(result.baseline), abs=bound)
        check(result, twin, mode)
    heads = weir.attribute(llm, CLEAN, CORRUPT, hooks="z", heads="all", metric=weir.logit_diff(A, B))
    assert {found.head for found in heads.verified} - {None}
    check(heads, twin, "denoise")


def test_another_checkpoint_s_twin_is_refused(llm, root):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory(root), dtype=torch.float32)
    assert weir.attribute(network, CLEAN, CORRUPT, metric=metric, llm=llm, top_k=1).verified_by == "engine"
    with torch.no_grad():
        network.model.layers[2].mlp.down_proj.weight.mul_(1.05)
    with pytest.raises(WeirError, match="is it the same checkpoint") as e:
        weir.attribute(network, CLEAN, CORRUPT, metric=metric, llm=llm, top_k=1)
    assert e.value.field == "model"
    with pytest.raises(WeirError, match="leave llm out"):
        weir.attribute(llm, CLEAN, CORRUPT, metric=metric, llm=get_llm)
