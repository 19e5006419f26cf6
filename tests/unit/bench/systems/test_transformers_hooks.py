"""transformers with hooks as a system of `weir bench`: padded batches give the rows that each prompt has alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.systems import transformers_hooks
from bench.systems.transformers_hooks import HookedModel, batches
from vllm_weir.util.transformers_reference import TransformersReference

PROMPTS = [list(range(3, 3 + n)) for n in (7, 1, 20, 12, 5)]


def network() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64)).eval()


@pytest.mark.parametrize("most", [8, 30, 1000])
@pytest.mark.parametrize("case", ["extract", "mean", "last_mixed", "long_one"])
def test_rows_are_those_of_each_prompt_alone(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_hooks, "BATCH_TOKENS", most)
    net, layers = network(), [0, 3]
    outputs = HookedModel(net, layers).read(PROMPTS, case)
    reference = TransformersReference(network(), 4)
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        rows = reference.streams(prompt)[1][layers]
        wanted = {"mean": rows.mean(1, keepdim=True), "last_mixed": rows[:, -1:]}.get(case, rows)
        torch.testing.assert_close(out.rows, wanted, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            logits = net(input_ids=torch.tensor([prompt])).logits[0, -1]
        assert out.outputs[0].token_ids == [int(logits.argmax())] and out.prompt_token_ids == prompt


@given(st.lists(st.integers(1, 40_000), max_size=60))
def test_batches_have_every_prompt_once_and_fit(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= transformers_hooks.BATCH_TOKENS or len(batch) == 1
