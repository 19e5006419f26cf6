"""What counts as a prompt, and its tokens."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.unit.refusals import refused
from vllm_weir.experiments.prompts import encode, named, parse_one_or_more, parse_prompts


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
    tokens = encode(prompts, Tokenizer, 10, named(prompts, "positive"))
    assert tokens == [[0, 1, 2], [4, 2, 1], [4, 2, 2], [7, 8], [9], [5, 6]]


def test_token_ids_need_no_tokenizer():
    def missing():
        raise AssertionError("there is no tokenizer")

    assert encode([[1, 2]], missing, 10, ["positive"]) == [[1, 2]]


@pytest.mark.parametrize(
    ("prompts", "field", "message"),
    [
        ("one text", "positive", "expected a list of prompts, got str"),
        ({"prompt_token_ids": [1]}, "positive", "expected a list of prompts, got dict"),
        (None, "positive", "got NoneType"),
        ([], "positive", "give at least one"),
        (["a", ""], "positive[1]", "the text is empty"),
        (["a", []], "positive[1]", "the prompt has no tokens"),
        (["a", {"b": 1}], "positive[1]", "a prompt is a text, a list of messages"),
        ([[1, -1]], "positive[0]", "a prompt is a text"),
        ([[{"role": "user"}]], "positive[0]", "messages with role and content"),
        ([3], "positive[0]", "a prompt is a text"),
    ],
)
def test_refusals(prompts, field, message):
    with refused(field, message):
        parse_prompts(prompts, field.partition("[")[0])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a b c d e", "6 tokens, and the engine takes 1 to 5"),
        ([{"role": "system", "content": "x"}], "the chat template refuses it: only the roles"),
    ],
)
def test_prompts_that_the_engine_cannot_take(prompt, message):
    with refused("negative[1]", message):
        encode(["a", prompt], Tokenizer, 5, ["negative[0]", "negative[1]"])


def test_texts_need_a_tokenizer():
    with refused("y", "there is no tokenizer; give token ids"):
        encode([[1], "a"], lambda: None, None, ["x", "y"])


def test_unknown_words_get_one_warning():
    class Unknown(Tokenizer):
        """Does not know words of five letters."""

        unk_token = "<5>"
        convert_tokens_to_ids, convert_ids_to_tokens = {"<5>": 5}.get, {5: "<5>"}.get

    fields = ["clean[0]", "clean[1]", "corrupt[0]", "corrupt[1]"]
    with pytest.warns(UserWarning, match="2 of 4 texts hold words .* '<5>' .5., first in 'zebra a'") as warned:
        encode(["a", "zebra a", "<5>horse", [{"role": "user", "content": "tiger"}]], Unknown, 9, fields)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(["a", "b", "four", [5]], Unknown, 9, fields)


CHAT = [{"role": "user", "content": "tell me"}]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("a b", ["a b"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([3, 4], [[3, 4]]),
        (np.array([3, 4]), [[3, 4]]),
        ([[3, 4], "b", np.array([5])], [[3, 4], "b", [5]]),
        (((1, 2), (3,)), [[1, 2], [3]]),
        (CHAT, [CHAT]),
        ([CHAT, "a"], [CHAT, "a"]),
        ({"prompt_token_ids": [5]}, [[5]]),
    ],
)
def test_one_or_more(value, wanted):
    assert parse_one_or_more(value, "clean") == wanted


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "clean"), (None, "clean"), (5, "clean"), ({"a": 1}, "clean"), ([-1, 2], "clean"), (["a", 5], "clean[1]"),
        ([[1], [2.5]], "clean[1]"), ([[1], {"b": 2}], "clean[1]"), ([[]], "clean"),
    ],
)  # fmt: skip
def test_none_of_one_or_more(value, field):
    with refused(field):
        parse_one_or_more(value, "clean")
