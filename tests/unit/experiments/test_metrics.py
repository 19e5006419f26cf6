"""Metrics: which tokens they name, what they ask of the engine, and what they make of outputs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.experiments.metrics import (
    BoundLogitDiff,
    OnOutput,
    as_number,
    bind_metric,
    logit_diff,
    on_logits,
    qualified_name,
)


class Tokenizer:
    """Knows two words, with the space before them; the unknown token, 3, stands for any other."""

    unk_token, bos_token = "<unk>", "<s>"

    def __init__(self) -> None:
        self.names = {" Mary": 5, " John": 6, "<unk>": 3}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [6, 9] if text == " Johnson" else [self.names.get(text, 3)]

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.names[token]

    def convert_ids_to_tokens(self, token: int) -> str:
        return {number: name for name, number in self.names.items()}[token]


TOKENIZER = Tokenizer()


def output(**more: Any) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(**more)])


@pytest.mark.parametrize(
    ("a", "b", "pairs", "tokens"),
    [
        (" Mary", " John", 2, ((5, 6), (5, 6))),
        (5, np.int64(6), 1, ((5, 6),)),
        ([" Mary", " John"], [" John", " Mary"], 2, ((5, 6), (6, 5))),
        (np.array([1, 2]), 3, 2, ((1, 3), (2, 3))),
    ],
)
def test_tokens_of_each_pair(a: Any, b: Any, pairs: int, tokens: Any) -> None:
    assert logit_diff(a, b).bind(TOKENIZER, pairs) == BoundLogitDiff(tokens)


@pytest.mark.parametrize(
    ("a", "b", "field", "says"),
    [
        (" Johnson", 5, "metric.a", "2 tokens"),
        (5, True, "metric.b", "text or id"),
        (-1, 5, "metric.a", "never negative"),
        (5, [1, 2, 3], "metric.b", "3 tokens for 2 pairs"),
        (5, [1, 2.5], "metric.b[1]", "text or id"),
        (None, 5, "metric.a", "text or id"),
        ("Mary", 5, "metric.a", "'Mary' is no token of the model: it becomes '<unk>' .3.; did you mean ' Mary'"),
        (5, "zebra", "metric.b", "'zebra' is no token of the model: it becomes '<unk>' .3.; give a text of one token"),
        (5, [" Mary", "zebra"], "metric.b[1]", "no token of the model"),
        ([5, 6], [6, " John"], "metric.b", "a and b of pair 1 are the same token, 6"),
        (" Mary", 5, "metric.b", "same token"),
        ("happy", "sad", "metric.a", "no token of the model"),
    ],
)
def test_refused_tokens(a: Any, b: Any, field: str, says: str) -> None:
    with refused(field, says):
        logit_diff(a, b).bind(TOKENIZER, 2)


def test_ids_beyond_the_vocabulary() -> None:
    for a, b, field in ((7, 5, "metric.a"), (5, [6, 9], "metric.b")):
        with refused(field, "the vocabulary has 7"):
            bind_metric(logit_diff(a, b), None, TOKENIZER, 2, vocab_size=7)
    assert bind_metric(logit_diff(6, 0), None, TOKENIZER, 2, vocab_size=7) == BoundLogitDiff(((6, 0), (6, 0)))


def test_the_unknown_token_can_be_named() -> None:
    assert logit_diff("<unk>", 5).bind(TOKENIZER, 1) == logit_diff(3, 5).bind(TOKENIZER, 1)


def test_texts_need_a_tokenizer() -> None:
    with refused("metric.a", "no tokenizer"):
        logit_diff(" Mary", 5).bind(None, 1)


def test_logit_difference() -> None:
    metric = BoundLogitDiff(((5, 6), (7, 7)))
    assert metric.sampling(0)["logprob_token_ids"] == [5, 6] and metric.sampling(1)["logprob_token_ids"] == [7]
    found = {t: SimpleNamespace(logprob=v) for t, v in ((5, -1.5), (6, -4.0), (7, -2.0))}
    assert metric.score(output(logprobs=[found]), 0) == 2.5
    assert metric.score(output(logprobs=[found]), 1) == 0.0
    assert metric.identity() != BoundLogitDiff(((5, 6), (7, 8))).identity()


def test_all_logits_come_in_the_order_of_the_vocabulary() -> None:
    flat = SimpleNamespace(token_ids=[2, 0, 1, 2], logprobs=[-0.5, -2.0, -3.0, -0.5])
    seen: list[np.ndarray] = []
    metric = on_logits(lambda logits: seen.append(logits) or logits.argmax())
    assert metric.score(output(logprobs=flat), 0) == 2.0
    assert seen[0].tolist() == [-2.0, -3.0, -0.5] and seen[0].dtype == np.float32


def test_binding() -> None:
    greedy = SamplingParams(temperature=0)
    metric = bind_metric(len, greedy, None, 1)
    assert metric == OnOutput(len, greedy, repr(greedy)) and metric.name == "len"
    assert metric.identity() == ["output", "builtins.len", repr(greedy)]
    assert bind_metric(on_logits(max), None, None, 1).name == "max"
    for given, field in (
        ((3, None), "metric"),
        ((logit_diff(1, 2), greedy), "sampling"),
        ((len, "greedy"), "sampling"),
    ):
        with refused(field):
            bind_metric(*given, None, 1)
    with refused("function"):
        on_logits(3)  # type: ignore[arg-type]


def test_a_partial_is_known_by_what_it_is_given() -> None:
    given = [partial(max, 1), partial(max, 2), partial(max, key=abs), partial(partial(max, 1), key=abs), max]
    assert len({str(bind_metric(one, None, None, 1).identity()) for one in given}) == len(given)
    assert qualified_name(partial(max, 1, key=2)) == "builtins.max(1, key=2)"


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1.0), np.bool_(True)])
def test_numbers(value: Any) -> None:
    assert as_number(value) == 1.0


@pytest.mark.parametrize("value", [None, "1", [1.0], np.ones(2)])
def test_no_numbers(value: Any) -> None:
    with pytest.raises(WeirError, match="return one number"):
        as_number(value)
