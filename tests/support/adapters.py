"""LoRA adapters made by hand, and the weights that they add."""

from __future__ import annotations

import json

import torch


def adapter(model_dir, where, head=False):
    """A rank-4 adapter of the query and down projections, with `head` also of the unembedding, and the weights it
    adds."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    generator = torch.Generator().manual_seed(50)
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // 4)
    shapes = {"self_attn.q_proj": (heads, config.hidden_size), "mlp.down_proj": (config.hidden_size, 192)}
    tensors, added = {}, {}
    paths = {f"model.layers.{n}.{name}": s for n in range(config.num_hidden_layers) for name, s in shapes.items()}
    if head:
        paths["lm_head"] = (config.vocab_size, config.hidden_size)
    for path, (rows, columns) in paths.items():
        a, b = (torch.randn(*s, generator=generator) / 8 for s in ((4, columns), (rows, 4)))
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
        added[f"{path}.weight"] = 2.0 * b @ a
    save_file(tensors, where / "adapter_model.safetensors")
    targets = sorted({path.rpartition(".")[2] for path in paths})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(model_dir), "lora_dropout": 0.0}
    (where / "adapter_config.json").write_text(json.dumps(config))
    return added
