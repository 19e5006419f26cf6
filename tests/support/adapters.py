"""LoRA adapters made by hand, and the weights that they add."""

from __future__ import annotations

import json

import torch


def adapter(model_dir, where):
    """A rank-4 adapter of the query and down projections, and the weights it adds."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    generator = torch.Generator().manual_seed(50)
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // 4)
    shapes = {"self_attn.q_proj": (heads, config.hidden_size), "mlp.down_proj": (config.hidden_size, 192)}
    tensors, added = {}, {}
    for layer in range(config.num_hidden_layers):
        for name, (rows, columns) in shapes.items():
            path = f"model.layers.{layer}.{name}"
            a, b = (torch.randn(*s, generator=generator) / 8 for s in ((4, columns), (rows, 4)))
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
            added[f"{path}.weight"] = 2.0 * b @ a
    save_file(tensors, where / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(model_dir), "lora_dropout": 0.0}
    (where / "adapter_config.json").write_text(json.dumps(config))
    return added
