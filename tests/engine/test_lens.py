"""The lens of models that do more than norm behind their last block, and of engines with adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import vllm_weir as weir
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.build import VOCAB, build
from tests.engine.common import directory, prompts, sampling
from tests.support.adapters import adapter
from tests.support.engines import get_llm
from tests.support.machine import cpu, needs
from tests.support.measure import close_logits
from vllm_weir.errors import WeirError

OPTIONS = dict(block_size=32, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=128)
OPTIONS |= dict(skip_tokenizer_init=True, max_logprobs=-1)


def zoo_llm(root, architecture, config, **options):
    """An engine of a tiny model of the conformance suite."""
    entry = ZOO[architecture]
    where = root / f"lens-{architecture}"
    if not where.exists():
        build(replace(entry, config=entry.config | config), where)
    return get_llm(where, **OPTIONS | options), where


def check_all_blocks(llm, logprobs_of):
    """Every block's lens against log-probabilities of its captured rows, and the last one's against the model's own."""
    (text,) = prompts([20])
    asked = weir.params(sampling(4, logprobs=-1, detokenize=False), lens=weir.Lens(top_k=VOCAB))
    (out,) = llm.generate([text], asked, use_tqdm=False)
    rows = weir.params(sampling(4, detokenize=False), capture=weir.Capture("resid_post"))
    (captured,) = llm.generate([text], rows, use_tqdm=False)
    assert sorted(out.lens) == [0, 1, 2, 3]
    for layer, got in out.lens.items():
        expected = logprobs_of(captured.activations["resid_post", layer].double())
        assert got.positions.tolist() == list(range(len(expected)))
        assert close_logits(got.logprobs, expected.gather(1, got.token_ids), expected)
    last = out.lens[3]
    for step, own in enumerate(out.outputs[0].logprobs):
        at = 19 + step
        own = torch.tensor([own[token].logprob for token in last.token_ids[at].tolist()])
        assert close_logits(last.logprobs[at], own, own)


@pytest.mark.parametrize("norm", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_projection_behind_the_norm(root, norm):
    """OPT with `word_embed_proj_dim`: log-probabilities of transformers' own modules, in float64."""
    from transformers import AutoModelForCausalLM

    config = dict(word_embed_proj_dim=64, _remove_final_layer_norm=not norm)
    llm, where = zoo_llm(root / str(norm), "OPTForCausalLM", config)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
    decoder = model.model.decoder
    assert (decoder.final_layer_norm is not None) == norm and decoder.project_out.out_features == 64

    def logprobs(rows):
        with torch.no_grad():
            normed = decoder.final_layer_norm(rows) if norm else rows
            return model.lm_head(decoder.project_out(normed)).log_softmax(-1)

    check_all_blocks(llm, logprobs)


def weights_of(model):
    """Of MiniCPM: the final norm, and the unembedding."""
    return model.model.norm.weight.double().cpu(), model.lm_head.weight.double().cpu()


def test_a_division_behind_the_norm(root):
    """MiniCPM divides by hidden_size / dim_model_base; transformers has no class of it."""
    from tests.conformance.zoo.loader import LOAD_FORMAT

    more = dict(load_format=LOAD_FORMAT, trust_remote_code=True)
    llm, _ = zoo_llm(root, "MiniCPMForCausalLM", dict(dim_model_base=16), **more)
    ((norm, head),) = llm.apply_model(weights_of)
    epsilon = llm.llm_engine.model_config.hf_config.rms_norm_eps

    def logprobs(rows):
        normed = rows * (rows.pow(2).mean(1, keepdim=True) + epsilon).rsqrt() * norm
        return (normed / (128 / 16) @ head[:VOCAB].T).log_softmax(-1)

    check_all_blocks(llm, logprobs)


@needs(cpu("vLLM's LoRA kernels for GPUs take no float32"))
def test_requests_with_adapters_and_without(root, tmp_path):
    """Rows of a lens are not the tokens that a step samples, by which vLLM chooses adapters."""
    from vllm.lora.request import LoRARequest

    requests = []
    for number, head in enumerate((False, True), 1):
        where = tmp_path / str(number)
        where.mkdir()
        adapter(directory(root), where, head=head)
        requests.append(LoRARequest(f"a{number}", number, str(where)))
    blocks, head = requests
    llm = get_llm(directory(root), block_size=32, max_num_seqs=16, enable_lora=True, max_lora_rank=8, max_loras=2)
    asked = weir.params(sampling(3, logprobs=1), lens=weir.Lens(top_k=2))
    outs = llm.generate(prompts([12, 7, 9]), asked, lora_request=[blocks, None, blocks], use_tqdm=False)
    for out in outs:
        own = torch.tensor([next(iter(step.values())).logprob for step in out.outputs[0].logprobs])
        assert close_logits(out.lens[3].logprobs[-3:, 0], own, own)
        assert out.lens[3].token_ids[-3:, 0].tolist() == list(out.outputs[0].token_ids)
    with pytest.raises(WeirError, match="which are in no block") as e:
        llm.generate(prompts([4]), asked, lora_request=head, use_tqdm=False)
    assert e.value.field == "lens"
    plain = llm.generate(prompts([4]), sampling(2), lora_request=head, use_tqdm=False)
    assert len(plain[0].outputs[0].token_ids) == 2
