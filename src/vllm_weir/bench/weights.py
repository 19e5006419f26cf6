"""The Llama-3.1-8B shapes without a checkpoint: a configuration, and weights that every process draws alike."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from vllm_weir.bench.plan import BenchPlan

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 131072,
    "hidden_act": "silu", "rms_norm_eps": 1e-05, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "use_cache": True, "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def make_model(directory: Path, config: dict[str, Any] = LLAMA_8B) -> str:
    """Write the configuration, and return the directory's name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return str(directory)


def add_tokenizer(directory: str, words: int) -> None:
    """Give a model a tokenizer of `words` tokens, which are the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="w0", pad_token="w0")
    tokenizer.save_pretrained(directory)


def draw(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight called `name`: the same values in every process on the same kind of device."""
    if len(shape) == 1:
        return torch.ones(shape, device=device, dtype=dtype)
    source = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    scale = 1.0 if "embed_tokens" in name else 0.02
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=source)


@torch.no_grad()
def fill_engine(model: torch.nn.Module) -> int:
    """Draw every weight of vLLM's model in place, so that captured graphs stay valid, and return how many there are.

    vLLM's dummy weights are below 1e-3: a block then changes its stream by less than a bfloat16 rounding, every layer's
    rows are the embeddings, and no comparison could tell one block from another.
    """
    count = 0
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, tuple(parameter.shape), parameter.device, parameter.dtype))
        count += 1
    return count


def transformers_model(plan: BenchPlan) -> Any:
    """Return transformers' model of a run, in its dtype and on its device, with the weights that the engines have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if plan.cuda else "cpu")
    dtype = getattr(torch, plan.dtype)
    if not plan.dummy:
        return AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype).to(device)
    with device:
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(plan.model), dtype=dtype)
    fill_reference(net)
    return net


@torch.no_grad()
def fill_reference(net: torch.nn.Module) -> None:
    """Draw the same weights for transformers' Llama, whose projections are not fused."""
    parameters = dict(net.named_parameters())
    for name, parameter in parameters.items():
        part = name.split(".")[-2]
        if part not in FUSED:
            parameter.copy_(draw(name, tuple(parameter.shape), parameter.device, parameter.dtype))
            continue
        parts = [p for p, fused in FUSED.items() if fused == FUSED[part]]
        sizes = [parameters[name.replace(part, p)].shape[0] for p in parts]
        shape = (sum(sizes), parameter.shape[1])
        whole = draw(name.replace(part, FUSED[part]), shape, parameter.device, parameter.dtype)
        parameter.copy_(whole.split(sizes)[parts.index(part)])
