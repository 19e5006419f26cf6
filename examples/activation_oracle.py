"""An activation oracle: activations are put into the placeholder of another prompt, which an adapter answers.

python examples/activation_oracle.py

The adapter here is made on the spot with small random weights, so what the oracle says means nothing; the rest is what
a trained one needs: read activations of several subjects, then ask about all in one batch, each with its own vector.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

import vllm_weir as weir

SUBJECTS = ["Tom went to the garden. Tom was happy.", "Tom went to the garden. Tom was sad."]
QUESTION = [{"role": "user", "content": "Tom was it that day."}]
READ_LAYER, INJECT_LAYER = 3, 1


def make_adapter(model: str, where: Path, rank: int = 4) -> Path:
    """A LoRA adapter as PEFT writes it: two tensors a module, and a configuration."""
    config = json.loads(Path(model, "config.json").read_text())
    width, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width) / 16
        tensors[f"{name}.lora_B.weight"] = torch.randn(heads, rank) / 16
    save_file(tensors, where / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    adapter |= {"target_modules": ["q_proj"], "base_model_name_or_path": model, "lora_dropout": 0.0}
    (where / "adapter_config.json").write_text(json.dumps(adapter))
    return where


def inject(vector: torch.Tensor, position: int) -> dict:
    """vllm-lens's form, which oracles are written with: the vector gets the norm of the row that it is added to."""
    steering = weir.SteeringVector(vector[None, None], [INJECT_LAYER], norm_match=True, position_indices=[position])
    return {"apply_steering_vectors": [steering]}


def main(model: str, adapter: Path) -> None:
    torch.manual_seed(0)
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(
        model, dtype="float32", max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager,
        enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    oracle = LoRARequest("oracle", 1, str(make_adapter(model, adapter)))

    read = weir.params(SamplingParams(max_tokens=1), capture=weir.Capture(layers=READ_LAYER, positions="last_prompt"))
    subjects = [o.activations["resid_post", READ_LAYER][0] for o in llm.generate(SUBJECTS, read, use_tqdm=False)]

    plain = SamplingParams(max_tokens=8, temperature=0)
    look = weir.params(plain, capture=weir.Capture(layers=INJECT_LAYER, positions="prompt"))
    (without,) = llm.chat(QUESTION, look, lora_request=oracle, use_tqdm=False)
    tokens = [llm.get_tokenizer().decode([t]).strip() for t in without.prompt_token_ids]
    place = tokens.index("it")
    print(f"the placeholder is token {place} of {tokens}")

    asked = []
    for vector in subjects:
        params = look.clone()
        params.extra_args = look.extra_args | inject(vector, place)
        asked.append(params)
    answers = llm.chat([QUESTION] * len(asked), asked, lora_request=oracle, use_tqdm=False)

    before = without.activations["resid_post", INJECT_LAYER]
    for subject, vector, answer in zip(SUBJECTS, subjects, answers, strict=True):
        after = answer.activations["resid_post", INJECT_LAYER]
        expected = before.clone()
        expected[place] += before[place].norm() * vector / vector.norm()
        error = ((after - expected).abs().max() / expected.abs().max()).item()
        assert error < 1e-5, error
        print(f"{subject!r}: {answer.outputs[0].text!r}")
        print(f"  rows as computed by hand: max|d|/max|ref| {error:.1e}; changed: {answer.receipt.steered}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model(), Path(where))
