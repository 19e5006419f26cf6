"""A training loop with routing replay: rollout, score by the rollout's experts, update, rollout.

Once the weights have changed, the routers would choose other experts for the same tokens, and the ratio of new to old
probabilities would mix both changes. Replayed, it is that of the weights alone. The trainer is a transformers model.

python examples/replay.py MODEL        # a mixture of experts, small enough for this machine to hold it twice in float32
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, RequestOutput, SamplingParams

import vllm_weir as weir

PROMPTS = [{"prompt_token_ids": [7 + k, *range(20 + k, 40 + k)]} for k in range(4)]
FAVOURED = 50
"""The reward is the share of generated tokens below this number."""


def of_tokens(at: list[dict[int, Any]], tokens: list[int]) -> np.ndarray:
    return np.array([found[token].logprob for found, token in zip(at, tokens, strict=True)])


def scored(llm: LLM, rollouts: list[RequestOutput], routing: list[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log-probabilities of all generated tokens under the engine's weights, and the experts of each sequence."""
    prompts = [{"prompt_token_ids": [*one.prompt_token_ids, *one.outputs[0].token_ids]} for one in rollouts]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outs = llm.generate(prompts, [weir.params(sampling, routing=one) for one in routing], use_tqdm=False)
    parts = [
        of_tokens(out.prompt_logprobs[len(one.prompt_token_ids) :], one.outputs[0].token_ids)
        for out, one in zip(outs, rollouts, strict=True)
    ]
    lengths = [len(one.outputs[0].routed_experts) for one in rollouts]
    return np.concatenate(parts), [out.outputs[0].routed_experts[:n] for out, n in zip(outs, lengths, strict=True)]


def update(trainer: Any, optimiser: torch.optim.Optimizer, rollouts: list[RequestOutput]) -> float:
    """Take a step of policy gradient; return the mean reward."""
    rewards = [float(np.mean([token < FAVOURED for token in one.outputs[0].token_ids])) for one in rollouts]
    loss = torch.zeros(())
    for one, reward in zip(rollouts, rewards, strict=True):
        start = len(one.prompt_token_ids)
        ids = torch.tensor([*one.prompt_token_ids, *one.outputs[0].token_ids])
        logits = trainer(input_ids=ids[None]).logits[0, start - 1 : -1]
        loss = loss - (reward - np.mean(rewards)) * logits.log_softmax(-1).gather(-1, ids[start:, None]).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return float(np.mean(rewards))


def main(model: str) -> None:
    eager = not torch.cuda.is_available()
    llm = LLM(model, dtype="float32", max_model_len=128, enforce_eager=eager, kv_cache_memory_bytes=64 << 20,
              skip_tokenizer_init=True)  # fmt: skip
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimiser = torch.optim.Adam(trainer.parameters(), 2e-3)
    for step in range(2):
        sampling = SamplingParams(max_tokens=24, seed=step, logprobs=1, ignore_eos=True, detokenize=False)
        rollouts = llm.generate(PROMPTS, weir.params(sampling, routing=True), use_tqdm=False)
        old = np.concatenate([of_tokens(one.outputs[0].logprobs, one.outputs[0].token_ids) for one in rollouts])
        recorded = [one.outputs[0].routed_experts for one in rollouts]
        replay = [weir.Replay(array) for array in recorded]
        same, _ = scored(llm, rollouts, replay)
        print(f"step {step}: replayed under the same weights, within {np.abs(same - old).max():.0e}")

        reward = update(trainer, optimiser, rollouts)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_pretrained(folder)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        llm.reset_prefix_cache()

        replayed, experts = scored(llm, rollouts, replay)
        free, chosen = scored(llm, rollouts, [True] * len(rollouts))
        assert all(np.array_equal(a, b) for a, b in zip(experts, recorded, strict=True))
        other = [(np.sort(a) != np.sort(b)).any(-1) for a, b in zip(chosen, recorded, strict=True)]
        print(f"  reward {reward:.2f}; new weights would choose other experts at {np.mean(other):.1%} of places")
        for name, new in (("replayed", replayed), ("free", free)):
            ratios = np.exp(new - old)
            print(f"  new to old probability, {name}: {ratios.min():.3f} to {ratios.max():.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
