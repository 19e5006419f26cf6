"""Lenses where each rank has a part of the unembedding, or only the last stage of a pipeline has it: they say what
transformers says of the same rows."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import vllm_weir as weir
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.build import build
from tests.engine.common import directory, prompts, sampling
from tests.support.engines import close_all, get_llm
from tests.support.machine import GIB, binding, engine_processes, memory, needs, ranks
from tests.support.measure import eventually, rel_err

pytestmark = [pytest.mark.engine, needs(engine_processes, memory(3 * GIB), ranks(2))]
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LAST = 3


def cohere(root):
    """Logits are multiplied, tokens looked up in the unembedding, and blocks run attention and MLP side by side."""
    where = root / "lens-ranks-cohere"
    if not where.exists():
        build(ZOO["CohereForCausalLM"], where)
    return where


def case(family, parallel, *marks):
    name = f"{family}-{'stages' if parallel is STAGES else 'ranks'}"
    return pytest.param((family, parallel), id=name, marks=marks)


@pytest.fixture(
    scope="module",
    params=[
        case("gemma2", TENSOR),
        case("llama", STAGES),
        case("llama", TENSOR, pytest.mark.thorough),
        case("cohere", TENSOR, pytest.mark.thorough),
        case("gemma2", STAGES, pytest.mark.thorough),
    ],
)
def engine(root, request):
    """An engine of two ranks, and the model's folder."""
    close_all()
    family, parallel = request.param
    where = cohere(root) if family == "cohere" else directory(root, family)
    more = {"skip_tokenizer_init": True} if family == "cohere" else {}
    env = {"VLLM_CPU_OMP_THREADS_BIND": binding(2)}
    yield get_llm(where, block_size=32, max_logprobs=-1, env=env, **parallel, **more), where
    close_all()


class Reference:
    """The model in transformers, in float64."""

    def __init__(self, where):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64, attn_implementation="eager")

    def rows(self, ids):
        """What leaves each block."""
        found = {}

        def keep(layer):
            return lambda _module, _args, out: found.update({layer: (out if torch.is_tensor(out) else out[0])[0]})

        handles = [block.register_forward_hook(keep(n)) for n, block in enumerate(self.model.model.layers)]
        self._forward(ids, handles)
        return found

    def logprobs(self, rows):
        """What the model says of rows, as if they had left its last block."""

        def give(_module, _args, out):
            return rows[None] if torch.is_tensor(out) else (rows[None], *out[1:])

        handle = self.model.model.layers[-1].register_forward_hook(give)
        return self._forward([1] * len(rows), [handle]).log_softmax(-1)

    def _forward(self, ids, handles):
        try:
            with torch.no_grad():
                return self.model(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()


def off(got, logprobs):
    """How far log-probabilities are from the reference's, relative to the largest of these."""
    return float((got.logprobs - logprobs.gather(1, got.token_ids)).abs().max() / logprobs.abs().max())


def test_lenses_on_ranks(engine, tmp_path):
    llm, where = engine
    reference = Reference(where)
    matrices = {
        layer: torch.randn(128, 128, generator=torch.Generator().manual_seed(layer)) / 8 for layer in range(LAST)
    }
    torch.save({"J": matrices, "n_prompts": 1, "d_model": 128}, tmp_path / "lens.pt")
    fitted = weir.load_lens(llm, "j", tmp_path / "lens.pt")
    lenses = [weir.Lens(top_k=5), weir.Lens(name="j", tokens=[300, 7, 511]), weir.Lens(layers=[0, 3], top_k=3)]
    params = [weir.params(sampling(4, logprobs=-1, detokenize=False), lens=lens) for lens in lenses]
    outs = llm.generate(prompts([21, 9, 40]), params, use_tqdm=False)
    for out, lens in zip(outs, lenses, strict=True):
        ids = (list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1]
        rows = reference.rows(ids)
        assert sorted(out.lens) == ([0, 3] if lens.layers != "all" else [0, 1, 2, LAST])
        for layer, got in out.lens.items():
            moved = rows[layer]
            if lens.name and layer < LAST:
                moved = moved @ matrices[layer].double().T
            expected = reference.logprobs(moved)
            assert len(got) == len(ids) and off(got, expected) <= 1e-5, layer
            if lens.top_k:
                assert torch.allclose(got.logprobs.double(), expected.topk(lens.top_k).values, atol=1e-4)
    last = outs[0].lens[LAST]
    for step, own in enumerate(outs[0].outputs[0].logprobs):
        at = len(outs[0].prompt_token_ids) - 1 + step
        own = torch.tensor([own[token].logprob for token in last.token_ids[at].tolist()])
        assert (last.logprobs[at] - own).abs().max() <= 1e-5 * own.abs().max()
    row = reference.model.lm_head.weight[300].float()
    for layer in (1, LAST):
        expected = row if layer == LAST else matrices[layer].T @ row
        assert (fitted.direction(300, layer) - expected).abs().max() <= 1e-5 * expected.abs().max()
    weir.unload_lens(llm, "j")


def test_a_lens_beside_rows_that_lie_in_parts(engine):
    """Ranks that read nothing send their parts of rows all the same."""
    llm, where = engine
    # Where ranks add up attention and MLP of Cohere at once, points inside its blocks are refused.
    rows, read = ("resid_pre", "resid_pre") if where.name.endswith("cohere") else ("z", "mlp_out")
    captures = [weir.Capture(rows, [0, 3]), weir.Capture("resid_post", positions="generated")]
    lenses = [weir.Lens(top_k=2), weir.Lens(hook=read, top_k=2, layers=[1, 3])]
    asked = [weir.params(sampling(4), capture=captures, **more) for more in ({}, {"lens": lenses})]
    without, beside = llm.generate(prompts([19]) * 2, asked, use_tqdm=False)
    assert list(beside.lens) == ["logit", f"logit:{read}"]
    assert [sorted(one) for one in beside.lens.values()] == [[0, 1, 2, 3], [1, 3]]
    assert all(len(tokens) == 22 for one in beside.lens.values() for tokens in one.values())
    assert without.activations.sites == beside.activations.sites
    for site in without.activations.sites:
        assert rel_err(beside.activations[site], without.activations[site]) <= 1e-5


def test_ranks_hold_the_whole_unembedding_while_a_lens_is_read(engine):
    llm, _ = engine
    llm.generate(prompts([5]), weir.params(sampling(2), lens=weir.Lens(top_k=1)), use_tqdm=False)
    eventually(lambda: sum(one["unembedding_bytes"] for one in llm.collective_rpc("weir_usage")), 0, 10)
    again = llm.generate(prompts([5, 8]), weir.params(sampling(2), lens=weir.Lens(top_k=1)), use_tqdm=False)
    assert all(len(out.lens[LAST]) for out in again)


def test_new_weights_reach_a_lens_while_others_read_one(engine, tmp_path):
    """A rank keeps the whole unembedding while requests with a lens are live: it is that of the weights of the step."""
    llm, where = engine
    after = tmp_path / "after"
    shutil.copytree(where, after)
    generator, tensors = torch.Generator().manual_seed(1), load_file(after / "model.safetensors")
    tensors = {
        name: one + 0.3 * one.std() * torch.randn(one.shape, generator=generator) for name, one in tensors.items()
    }
    save_file(tensors, after / "model.safetensors", {"format": "pt"})
    asked = weir.params(sampling(40, detokenize=False), lens=weir.Lens(layers=[LAST], top_k=3))
    llm.llm_engine.add_request("old", prompts([9])[0], asked)
    for _ in range(6):
        llm.llm_engine.step()
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(after)})
        asked = weir.params(sampling(4, detokenize=False), lens=weir.Lens(layers=[LAST], top_k=3))
        llm.llm_engine.add_request("new", prompts([21])[0], asked)
        outs = {}
        while llm.llm_engine.has_unfinished_requests():
            outs |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
        reference, out = Reference(after), outs["new"]
        ids = [*out.prompt_token_ids, *out.outputs[0].token_ids][:-1]
        assert len(outs["old"].lens[LAST]) == 9 + 39
        assert off(out.lens[LAST], reference.logprobs(reference.rows(ids)[LAST])) <= 1e-4
    finally:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(where)})
        llm.reset_prefix_cache()
