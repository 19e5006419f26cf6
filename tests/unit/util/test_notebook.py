"""HTML of results for notebooks: its colours are those of plots, and it is escaped, bounded and self-contained."""

from __future__ import annotations

import re

import numpy as np

from tests.support.machine import module, needs
from vllm_weir.util import notebook
from vllm_weir.util.notebook import Scale
from vllm_weir.util.token_texts import SequenceTexts, TokenTexts

NASTY = '<script src="https://x">&\n'


def colours_of(text: str) -> list[str]:
    return re.findall(r'style="[^"]*?background:(#[0-9a-f]{6});color:#(?:000|fff)', text)


@needs(module("matplotlib"))
def test_the_colours_are_those_of_plots() -> None:
    from matplotlib import colormaps

    for scale in (Scale(0.0, 1.0), Scale(-2.0, 2.0, "RdBu")):
        for place in np.linspace(0, 1, 41):
            css = scale.css(scale.low + place * (scale.high - scale.low))
            shown = [int(css[12 + k : 14 + k], 16) for k in (0, 2, 4)]
            assert np.abs(np.array(shown) - 255 * np.array(colormaps[scale.name](place)[:3])).max() < 9


def test_blue_is_above_zero_and_red_below() -> None:
    scale = Scale.of(np.array([-1.0, 0.5, np.nan]))
    assert (scale.name, scale.low, scale.high) == ("RdBu", -1.0, 1.0)
    blue, red = scale.css(1.0), scale.css(-1.0)
    assert red == "background:#67001f;color:#fff" and blue == "background:#053061;color:#fff"
    assert scale.css(0.0) == "background:#f7f6f6;color:#000" and scale.css(np.nan) == scale.css(np.inf) == ""
    assert Scale.of(np.array([1.0, 31.0])) == Scale(1.0, 31.0, log=True)
    assert Scale.of(np.array([0.5]), "cosine") == Scale(0.0, 1.0) and Scale.of(np.array([np.nan])) == Scale(0.0, 1.0)
    for one in (Scale(2.0, 2.0), Scale(0.0, 0.0), Scale(1.0, 1.0, log=True)):
        assert one.css(one.low) == "background:#440154;color:#fff"


def test_everything_is_escaped() -> None:
    pages = [
        notebook.coloured_text([NASTY, "a"], np.array([1.0, -1.0]), NASTY),
        notebook.heat_map([NASTY], [NASTY], np.ones((1, 1)), NASTY, NASTY, [[NASTY]]),
        notebook.table([NASTY], [[NASTY]]),
        notebook.result(NASTY, notebook.left_out(3, 1, NASTY)),
    ]
    for page in pages:
        assert "<script" not in page and "&lt;script" in page and not re.search(r"<[^>]*(src|href)=", page)
    assert "\\udc80" in notebook.escaped("\udc80") and notebook.escaped("x" * 9, 4) == "xxx…"


def test_long_results_are_cut() -> None:
    text = notebook.coloured_text(["x"] * 9000, np.arange(9000.0), "score")
    assert text.count('title="') == notebook.MAX_TOKENS and "8,488 more of 9,000 tokens are left out" in text
    page = notebook.heat_map(["r"] * 100, ["c"] * 1000, np.ones((100, 1000)), "score")
    assert page.count("<td") == notebook.MAX_ROWS * notebook.MAX_COLUMNS and len(page) < 500_000
    assert "52 more of 100 rows" in page and "936 more of 1,000 columns" in page
    assert "52 more of 100 rows" in notebook.table(["a"], [["b"]] * 100)
    assert len(notebook.table(["a"], [["b" * 10**6]])) < 1000


def test_a_heat_map_says_its_numbers() -> None:
    page = notebook.heat_map(["0", "1"], ["a", "\n"], np.array([[0.0, 1.0], [0.5, np.nan]]), "score", upwards=True)
    assert page.index(">1<") < page.index(">0<") and "⏎" in page
    assert re.findall(r'title="([^"]+)"', page) == ["0.5", "nan", "0", "1"]
    assert colours_of(page) == ["#21918c", "#440154", "#fde725"]


def test_texts_of_tokens() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join("abc"[i] for i in ids)

    at = np.arange(3)
    texts = SequenceTexts(lambda: np.array([2, 0, 1, 0]), TokenTexts(Tokenizer()))
    assert texts.at(at) == ["c", "a", "b"] and texts.at(np.array([0, 3])) == ["c", "a"]
    assert texts.at(np.array([1]), np.array([-1])) == [""]  # of a prompt given as embeddings
    assert SequenceTexts().at(at) == ["0", "1", "2"] and SequenceTexts().at(at, at + 5) == ["[5]", "[6]", "[7]"]
