"""Which token, if any, a tokenizer puts in place of words that it does not know."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import vllm_weir as weir
from vllm_weir.util.token_texts import unknown_id


def tokenizer(**given):
    return SimpleNamespace(convert_tokens_to_ids={"<unk>": 3, "</s>": 2}.__getitem__, **given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"unk_token": None}, None),
        ({"unk_token": "<unk>", "bos_token": "</s>", "pad_token": "<unk>"}, 3),
        ({"unk_token": "</s>", "bos_token": "</s>"}, None),
        ({"unk_token": "</s>", "eos_token": "</s>"}, None),
        ({"unk_token": None, "backend_tokenizer": SimpleNamespace(model=SimpleNamespace(unk_token="<unk>"))}, 3),
        ({"unk_token": None, "backend_tokenizer": SimpleNamespace(model=SimpleNamespace())}, None),
    ],
)
def test_the_unknown_token(given, wanted):
    assert unknown_id(tokenizer(**given)) == wanted


def test_the_shipped_model_has_one():
    from transformers import AutoTokenizer

    assert unknown_id(AutoTokenizer.from_pretrained(weir.demo_model())) == 3
