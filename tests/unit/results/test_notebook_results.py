"""How activations, scores, features, lens readings and receipts look: right values, escaped, bounded, small pickles."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import torch

from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import (
    FeatureValues,
    LayerFeatures,
    LensReadings,
    LensTokens,
    ReadValues,
    by_block,
    nested,
)
from vllm_weir.results.receipt import InterventionReceipt, Receipt
from vllm_weir.results.scores import HookValues, Scores
from vllm_weir.schema.hooks import Site
from vllm_weir.util.notebook import MAX_COLUMNS, MAX_TOKENS, Scale
from vllm_weir.util.token_texts import SequenceTexts, TokenTexts


class Tokenizer:
    """Token 0 is "<b>", the others are "t1", "t2", ..."""

    def decode(self, ids: list[int]) -> str:
        return "".join("<b>" if i == 0 else f"t{i}" for i in ids)


def texts(n: int) -> SequenceTexts:
    return SequenceTexts(lambda: np.arange(n), TokenTexts(Tokenizer()))


def acts(rows: dict[Site, torch.Tensor]) -> Activations:
    at = {site: torch.arange(len(one)) for site, one in rows.items()}
    return Activations(rows, at, at)


def titles(page: str) -> list[float]:
    return [float(number) for number in re.findall(r'title="([^"]+)"', page)]


def test_activations_by_block_and_token() -> None:
    rows = {Site("resid_post", layer): torch.full((3, 16), float(layer)) for layer in (1, 2)}
    found = acts(rows)
    page = found._repr_html_()
    assert titles(page) == [8.0] * 3 + [4.0] * 3  # norms, the last block on top
    assert ">resid_post[2]<" in page and ">[1]<" in page  # no tokenizer: ids
    found.texts = texts(3)
    page = found._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page.partition("</b>")[2] and ">t2<" in page
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):  # noqa: S301
        assert ">[1]<" in again._repr_html_()  # the tokenizer stays here
    assert b"Tokenizer" not in pickle.dumps(found)


def test_products_with_directions_are_coloured_text() -> None:
    found = acts({Site("z", 0): torch.tensor([[1.0], [-2.0]])})
    page = found._repr_html_()
    assert titles(page) == [1.0, -2.0] and Scale(-2.0, 2.0, "RdBu").css(1.0) in page and "<td" not in page
    two = acts({Site("z", 0): torch.tensor([[1.0, 3.0], [-2.0, 4.0]])})._repr_html_()
    assert titles(two) == [3.0, 4.0, 1.0, -2.0] and ">z[0] 1<" in two


def test_many_rows_are_cut_before_they_are_looked_at() -> None:
    page = acts({Site("resid_post", layer): torch.ones(5000, 16) for layer in range(100)})._repr_html_()
    assert page.count("<td") == 48 * MAX_COLUMNS and "4,936 more of 5,000 columns" in page
    assert "52 more of 100 sites" in page
    assert acts({})._repr_html_() and acts({Site("resid_post", 0): torch.ones(0, 16)})._repr_html_()


def test_rows_at_other_positions_are_told_apart() -> None:
    found = acts({Site("resid_post", 0): torch.ones(2, 16), Site("resid_post", 1): torch.ones(3, 16)})
    assert found._repr_html_().count("linear-gradient") == 2


def test_scores_by_token() -> None:
    at = torch.arange(2)
    scores = Scores({"mood": torch.tensor([[0.5], [-0.25]]), "two": torch.ones(2, 2)}, {"mood": at, "two": at})
    assert repr(scores) == "Scores(mood: [2, 1], two: [2, 2])"
    page = scores._repr_html_()
    assert titles(page) == [0.5, -0.25, 1.0, 1.0, 1.0, 1.0] and ">0<" in page
    scores.texts = texts(2)
    assert "&lt;b&gt;" in scores._repr_html_() and ">t1<" in scores._repr_html_()
    assert b"Tokenizer" not in pickle.dumps(scores)
    many = Scores({"p": torch.ones(4000, 1)}, {"p": torch.arange(4000)})._repr_html_()
    assert many.count("<span") == MAX_TOKENS + 1 and "3,488 more of 4,000 tokens" in many
    values = HookValues({"norm": torch.tensor([2.0, 3.0])}, {"norm": at})
    assert titles(values._repr_html_()) == [2.0, 3.0] and repr(values) == "HookValues(norm: [2])"


def test_features_and_lens() -> None:
    at, ids = torch.arange(2), torch.tensor([[7, 3], [3, 9]])
    features = FeatureValues(at, ids, torch.tensor([[2.0, 1.0], [4.0, 0.0]]), texts(2))
    assert repr(features) == "FeatureValues(2 rows, 2 features each)"
    page = features._repr_html_()
    assert titles(page) == [2.0, 1.0, 4.0, 0.0] and ">7<" in page and ">0 &lt;b&gt;<" in page and ">1 t1<" in page
    blocks = LayerFeatures({0: features, 3: features})
    assert repr(blocks) == f"{{0: {features!r}, 3: {features!r}}}"
    assert titles(blocks._repr_html_()) == [2.0, 1.0, 4.0, 0.0] * 2 and "block 3" in blocks._repr_html_()
    assert nested(by_block({"a": features, "b": blocks})) == {"a": features, "b": blocks}
    assert ReadValues({"a": features, "b": blocks}, {}).rows == 6
    lens = LensTokens(at, torch.tensor([[0, 3], [3, 9]]), torch.tensor([[0.5, 0.25], [0.5, 0.125]]).log(), texts(2))
    assert repr(lens) == "LensTokens(2 rows, 2 tokens each)"
    assert titles(lens._repr_html_()) == [0.5, 0.25, 0.5, 0.125] and ">t9<" in lens._repr_html_()
    both = LensReadings({0: lens, 3: lens})
    page = both._repr_html_()
    assert page.count("<td") == 4 and page.index(">3<") < page.index(">0<") and both == {0: lens, 3: lens}
    chosen = LensTokens(at[:1], torch.tensor([[3, 9]]), torch.tensor([[0.25, 0.5]]).log(), texts(2))  # in their order
    assert ">t9<" in LensReadings({0: chosen})._repr_html_() and titles(LensReadings({0: chosen})._repr_html_()) == [
        0.5
    ]
    assert LensReadings()._repr_html_() and repr(LensReadings()) == "{}"
    assert b"Tokenizer" not in pickle.dumps((features, both))
    long = FeatureValues(torch.arange(900), torch.ones(900, 64).long(), torch.ones(900, 64))._repr_html_()
    assert long.count("<td") == 480 and "852 more of 900 rows" in long


def test_receipts_are_short() -> None:
    done = InterventionReceipt("add", "resid_post", (3,), 8, 0.5, {3: 0.5})
    assert (
        repr(done)
        == "InterventionReceipt('add', 'resid_post', [3], 8, relative_dose=0.5, relative_dose_by_layer={3: 0.5})"
    )
    captured = {Site("resid_post", layer): 8 for layer in range(32)}
    receipt = Receipt(captured, steered=({Site("resid_post", 3): 8},), prompt_tokens=5, interventions=(done,))
    shown = repr(receipt)
    assert (
        shown.startswith("Receipt(captured={resid_post[0]: 8, ")
        and "... 24 more}, prompt_tokens=5, complete=True" in shown
    )
    assert len(shown) < 400 and "steered" not in shown and repr(Receipt()) == "Receipt(complete=True)"
