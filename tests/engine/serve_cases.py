"""The same requests for every way to Weir; ``python -m tests.engine.serve_cases OUT`` runs them offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import vllm_weir as weir
from tests.support.sae_reference import weights

D = 256
MAX_TOKENS = 6
ADAPTER = "tiny"
# Shorter than a block of the KV cache with all that is generated: every way then computes the same steps.
MESSAGES = [{"role": "user", "content": "Tom went to the garden. Tom was happy."}]
PROMPTS = ["Anna walked to the harbor in the morning .", "Tom was sad", "The lesson"]
CAPTURE = [
    {"hook": "resid_post", "layers": [0, 3], "positions": "all"},
    {"hook": "mlp_out", "layers": [2], "positions": "prompt"},
]


def vector(seed: int, n: int = 1) -> torch.Tensor:
    """[n, D] (or [D]), of about the length of a row."""
    made = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    return made[0] if n == 1 else made


def cases() -> dict[str, dict[str, Any]]:
    """name -> capture, interventions, and OpenAI's fields."""
    everything = [weir.Capture("resid_post"), weir.Capture("attn_out", layers=[1, 4])]
    return {
        "capture": dict(capture=everything),
        "positions": dict(
            capture=[weir.Capture(layers=1, positions="prompt"), weir.Capture("mlp_out", 2, positions="sampled")]
        ),
        "steer": dict(
            capture=[*everything, weir.Capture("resid_pre", layers=3, before=True)],
            interventions=[
                weir.Add(vector(1), layers=1, scale=2.0, positions="generated"),
                weir.Ablate(vector(2, 2), layers=[2, 3]),
                weir.Clamp(vector(3), layers=4, max=0.5),
                weir.Add(vector(4), layers=2, positions=[3], norm_match=True),
            ],
        ),
        "shapes": dict(
            capture=everything,
            interventions=[
                weir.Add(vector(8, 2)[:1], layers=0, scale=2.0, keep_norm=True),
                weir.Add({4: vector(10), 1: vector(11)[None]}, norm_match=True, positions="generated"),
                weir.Ablate(vector(12, 2), layers=[3, 2], per_layer=True),
                weir.Replace(vector(13, 3), layers=5, positions="2:5"),
            ],
            dose=True,
            tag="run 3, prompt 17",
        ),
        "scores": dict(capture=weir.Capture(layers=[2, 3], project=vector(5, 3))),
        "mean": dict(capture=weir.Capture(layers=[0, 5], reduce="mean", positions="prompt")),
        "packed": dict(capture=weir.Capture(layers=2, compress="full8")),
        "adapter": dict(
            capture=everything, interventions=weir.Add(vector(6), layers=0, norm_match=True), model=ADAPTER
        ),
    }


def prompt_cases() -> dict[str, dict[str, Any]]:
    """name -> capture and interventions of what is asked of each of `PROMPTS`; saved as NAME-0, NAME-1, ..."""
    projection = {"hook": "resid_post", "layers": [1, 4], "positions": "all", "project": vector(1, 3).tolist()}
    return {
        "rows": dict(capture=CAPTURE),
        "steered": dict(capture=CAPTURE, interventions=[weir.Add([0.5] * D, 3, scale=2.0)]),
        "projected": dict(capture=[projection]),
    }


def other_sae() -> weir.SAE:
    """A TopK autoencoder of another block than the shipped one's."""
    return weir.SAE.from_tensors("topk", ("resid_post", 1), k=7, **weights("topk", 3, D, 64))


LENS = dict(output_residual_stream=[1, 3])


def lens_vector() -> weir.SteeringVector:
    """At one position of the prompt, as an activation oracle is given what it reads."""
    return weir.SteeringVector(vector(7)[None, None], [2], scale=1.5, norm_match=True, position_indices=[4])


def make_adapter(where: Path, seed: int = 50, rank: int = 4) -> Path:
    """A LoRA adapter of the shipped model's query and down projections, with random weights."""
    from safetensors.torch import save_file

    where.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(6):
        for name, (rows, columns) in {"self_attn.q_proj": (256, D), "mlp.down_proj": (D, 512)}.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / 8
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 8
    save_file(tensors, where / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": "demo", "lora_dropout": 0.0, "bias": "none"}
    (where / "adapter_config.json").write_text(json.dumps(config))
    return where


def main(out: Path) -> None:
    """Write what an engine that serves `LLM.chat` gives for each case."""
    from vllm.lora.request import LoRARequest

    from tests.support.engines import close_all, get_llm

    arguments = dict(block_size=32, enable_lora=True, max_lora_rank=8)
    llm = get_llm(weir.demo_model(), **arguments)
    adapter = LoRARequest(ADAPTER, 1, str(out / "adapter"))
    told = {}

    def run(name: str, params: Any, adapted: bool = False, prompt: str | None = None) -> None:
        if prompt is not None:
            (found,) = llm.generate([prompt], params, use_tqdm=False)
        else:
            (found,) = llm.chat(MESSAGES, params, lora_request=adapter if adapted else None, use_tqdm=False)
        if found.activations.sites:
            found.activations.save(out / f"{name}.safetensors")
        told[name] = {
            "text": found.outputs[0].text,
            "token_ids": list(found.outputs[0].token_ids),
            "prompt_token_ids": list(found.prompt_token_ids),
            "receipt": found.receipt.to_dict(),
        }

    from vllm import SamplingParams

    plain = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    for name, case in cases().items():
        weir_objects = {k: v for k, v in case.items() if k != "model"}
        run(name, weir.params(plain, **weir_objects), "model" in case)
    forced = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    for name, case in prompt_cases().items():
        for k, prompt in enumerate(PROMPTS):
            run(f"{name}-{k}", weir.params(forced, **case), prompt=prompt)
    lens = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, extra_args=LENS)
    run("lens", lens)
    both = weir.params(plain, capture=weir.Capture(layers=[2, 3]))
    both.extra_args["apply_steering_vectors"] = [lens_vector()]
    run("oracle", both, adapted=True)
    (out / "told.json").write_text(json.dumps(told))
    close_all()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
