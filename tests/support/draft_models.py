"""Draft models for the tiny Llamas: EAGLE heads that know little, and a copy of the model that is often right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def drafting(target: Path, method: str, drafts: int = 3) -> dict[str, Any]:
    """A `speculative_config` for a tiny Llama; `method` is "ngram", "draft_model", "eagle" or "eagle3"."""
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    model = make_noisy(target) if method == "draft_model" else make_eagle(target, method)
    return {"method": method, "model": str(model), "num_speculative_tokens": drafts}


def make_noisy(target: Path, noise: float = 0.03) -> Path:
    """Copy a model, with noise in its weights: it often, but not always, predicts the same token."""
    copy = target.with_name(f"{target.name}-noisy")
    if (copy / "model.safetensors").exists():
        return copy
    shutil.copytree(target, copy)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def make_eagle(target: Path, method: str) -> Path:
    """Make a head for a tiny Llama, which shares its embedding and unembedding; `method` is "eagle" or "eagle3"."""
    head = target.with_name(f"{target.name}-{method}")
    if (head / "model.safetensors").exists():
        return head
    head.mkdir(exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    weights = {
        name: tensor for file in sorted(target.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    d, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    block = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers.0." in f".{name}"}
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    wide = 3 if method == "eagle3" else 2
    block["fc.weight"] = torch.randn(d, wide * d, generator=generator) / (wide * d) ** 0.5
    if method == "eagle":
        del block["layers.0.input_layernorm.weight"]
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["vocab_size"]}
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        for name in ("q", "k", "v"):  # its block is given the embedding beside the stream
            key = f"layers.0.self_attn.{name}_proj.weight"
            block[key] = torch.cat([block[key], block[key]], 1) / 2
        block = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in block.items()}
        block["midlayer.hidden_norm.weight"] = torch.ones(d)
        block |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
    for path in target.glob("*token*"):
        (head / path.name).write_bytes(path.read_bytes())
    (head / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in block.items()}, head / "model.safetensors")
    return head
