"""Weights in 8 bits (``quantization="fp8"``) on CUDA: rows, identities and steering, on runner V2."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import vllm_weir as weir
from tests.conformance.oracle import Oracle as Points
from tests.engine.test_points import check_identities
from tests.support.engines import get_llm
from tests.support.models import make_model
from vllm_weir.schema.hooks import MODEL_HOOKS, STREAM_HOOKS

pytestmark = pytest.mark.gpu
LARGEST = torch.finfo(torch.float8_e4m3fn).max
LAYERS, D_MODEL = 4, 128
EVERY = [weir.Capture(hook) for hook in (*MODEL_HOOKS, *STREAM_HOOKS)]
PROMPTS = [{"prompt_token_ids": [(11 * i + 7 * j) % 500 + 5 for j in range(n)]} for i, n in enumerate((20, 3, 70, 41))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model, initialised by transformers, whose blocks' matrices 8 bits hold exactly; the rest is bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("models")
    target = root / "grid"
    shutil.copytree(make_model("llama", "a", root), target)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target), dtype=torch.float32)
    model.save_pretrained(target)
    config = json.loads((target / "config.json").read_text()) | {"dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    for name, weight in tensors.items():
        if "layers." in name and name.endswith("proj.weight"):
            # Clipped, so that the largest value of every matrix is the largest of the type.
            step = 2.0 ** torch.floor(torch.log2(2.5 * weight.std() / LARGEST))
            weight = (weight / step).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * step
        tensors[name] = weight.to(torch.bfloat16)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def engine(checkpoint, **more):
    arguments = dict(dtype="bfloat16", kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False, quantization="fp8")
    llm = get_llm(checkpoint, **(arguments | more))
    assert llm.llm_engine.model_config.quantization == "fp8"
    assert all(v.supported for v in weir.sites(llm) if v.hook in (*MODEL_HOOKS, *STREAM_HOOKS))
    return llm


def sampling(n=9):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


def distance(a, b):
    """Largest 1 - cosine over rows; both [n, d]."""
    return float((1 - torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)).max())


def test_rows(checkpoint):
    """Compiled: the points agree with each other, and with transformers up to inputs that are rounded to 8 bits."""
    llm = engine(checkpoint, enforce_eager=False)
    oracle = Points(checkpoint)
    worst, next_block = 0.0, 1.0
    for out in llm.generate(PROMPTS, weir.params(sampling(), capture=EVERY), use_tqdm=False):
        acts = out.activations
        check_identities(acts, LAYERS, 2**-7)
        rows, _ = oracle.points([*out.prompt_token_ids, *out.outputs[0].token_ids][:-1])
        worst = max(worst, *(distance(acts[site], rows[tuple(site)]) for site in acts.sites))
        pairs = [(acts["resid_post", n], rows["resid_post", n + 1]) for n in range(LAYERS - 1)]
        next_block = min(next_block, *(distance(*pair) for pair in pairs))
    print(f"\nfp8: 1 - cosine {worst:.1e}; to the next block's rows {next_block:.1e}")
    assert worst <= 3e-2 < next_block / 3


def test_steering(checkpoint):
    """The change is the one asked for, to the last bit of bf16, and neighbours do not notice."""
    llm = engine(checkpoint, enforce_eager=False)
    vector = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    capture = [weir.Capture("resid_post", 1), weir.Capture("resid_pre", 2)]
    add = weir.Add(vector, 2, 3.0, hook="resid_pre")
    plain = weir.params(sampling(), capture=capture)
    alone = llm.generate(PROMPTS, plain, use_tqdm=False)
    asked = [weir.params(sampling(), capture=capture, interventions=add), plain] * 2
    outs = llm.generate(PROMPTS, asked, use_tqdm=False)
    for out in outs[::2]:
        before, after = out.activations["resid_post", 1], out.activations["resid_pre", 2]
        assert torch.equal(after, (before.float() + 3.0 * vector).to(torch.bfloat16))
        assert out.receipt.steered == ({weir.Site("resid_pre", 2): len(before)},)
    for out, reference in zip(outs[1::2], alone[1::2], strict=True):
        assert out.outputs[0].token_ids == reference.outputs[0].token_ids
        for site in reference.activations.sites:
            assert torch.equal(out.activations[site], reference.activations[site])


def test_rows_are_the_blocks_own_outputs_to_the_bit(checkpoint):
    llm = engine(checkpoint, enforce_eager=True)
    seen = {}

    def watch(model):
        for layer, block in enumerate(model.model.layers):
            assert block.mlp.down_proj.weight.dtype == torch.float8_e4m3fn
            block.register_forward_hook(
                lambda _m, _a, out, layer=layer: seen.setdefault(layer, []).append((out[0] + out[1]).cpu())
            )

    llm.apply_model(watch)
    out = llm.generate(PROMPTS[:1], weir.params(sampling(), capture=weir.Capture()), use_tqdm=False)[0]
    for site in out.activations.sites:
        assert torch.equal(out.activations[site], torch.cat(seen[site.layer])[: len(out.activations[site])])
