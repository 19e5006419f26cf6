"""What counts as a prompt, and its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_weir.errors import WeirError
from vllm_weir.experiments.fit.prompts import encode, parse_prompts


class Tokenizer:
    """A token for each word; special ones are 0."""

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[0] * add_special_tokens + [len(word) for word in text.split()] for text in texts]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        if messages[0]["role"] == "system":
            raise ValueError("only the roles user and assistant are known")
        return " ".join(m["content"] for m in messages) + " >" * add_generation_prompt


def test_every_form_of_prompt():
    chat = [{"role": "user", "content": "tell me"}]
    told = [*chat, {"role": "assistant", "content": "no"}]
    prompts = parse_prompts(["a bc", chat, told, [7, 8], {"prompt_token_ids": (9,)}, np.array([5, 6])], "positive")
    tokens = encode(prompts, Tokenizer, 10, "positive")
    assert tokens == [[0, 1, 2], [4, 2, 1], [4, 2, 2], [7, 8], [9], [5, 6]]


def test_token_ids_need_no_tokenizer():
    def missing():
        raise AssertionError("there is no tokenizer")

    assert encode([[1, 2]], missing, 10, "positive") == [[1, 2]]


@pytest.mark.parametrize(
    ("prompts", "field", "message"),
    [
        ("one text", "positive", "expected a list of prompts, got str"),
        ({"prompt_token_ids": [1]}, "positive", "expected a list of prompts, got dict"),
        (None, "positive", "got NoneType"),
        ([], "positive", "give at least one"),
        (["a", ""], "positive[1]", "the text is empty"),
        (["a", []], "positive[1]", "a prompt is a text, a list of messages"),
        ([[1, -1]], "positive[0]", "a prompt is a text"),
        ([[{"role": "user"}]], "positive[0]", "messages with role and content"),
        ([3], "positive[0]", "a prompt is a text"),
    ],
)
def test_refusals(prompts, field, message):
    with pytest.raises(WeirError, match=message) as e:
        parse_prompts(prompts, field.partition("[")[0])
    assert e.value.field == field


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a b c d e", "6 tokens, and the engine takes 1 to 5"),
        ([{"role": "system", "content": "x"}], "the chat template refuses it: only the roles"),
    ],
)
def test_prompts_that_the_engine_cannot_take(prompt, message):
    with pytest.raises(WeirError, match=message) as e:
        encode(["a", prompt], Tokenizer, 5, "negative")
    assert e.value.field == "negative[1]"
