"""The tiny models run in vLLM and agree with the oracle: what every other engine test stands on.

No request here asks anything of Weir, so it holds with the plugin active and with `WEIR_DISABLE=1` alike.
"""

from __future__ import annotations

import random

import pytest

from tests.support.engines import get_llm
from tests.support.machine import attention_heads, needs
from tests.support.models import MODELS, WORDS, head_size, make_model
from tests.support.oracle import Oracle

vllm = pytest.importorskip("vllm")


CASES = [pytest.param(*m, marks=needs(attention_heads(head_size(*m))), id="-".join(m)) for m in MODELS]


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_greedy_tokens_equal_huggingface(family: str, shape: str) -> None:
    model_dir = make_model(family, shape)
    draw = random.Random(1)
    prompts = [[draw.randrange(WORDS) for _ in range(length)] for length in (5, 23, 40)]  # 40: beyond the windows

    llm = get_llm(model_dir)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    oracle = Oracle(model_dir)
    for ids, output in zip(prompts, outputs, strict=True):
        made = list(output.outputs[0].token_ids)
        # Each is the one that follows what comes before it: together they are what greedy decoding makes.
        assert len(made) == 12 and made == oracle.logits(ids + made[:-1])[len(ids) - 1 :].argmax(-1).tolist()


def test_text_prompts_become_the_tokens_they_name() -> None:
    llm = get_llm(make_model("qwen2", "a"))
    assert llm.get_tokenizer().encode("w3 w7 w509") == [3, 7, 509]
