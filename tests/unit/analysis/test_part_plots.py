"""Pictures of attention patterns and neurons: what they show, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.support.machine import module, needs
from tests.unit.refusals import refused
from vllm_weir import analysis
from vllm_weir.analysis import part_plots
from vllm_weir.results.activations import Activations
from vllm_weir.schema.hooks import Site

pytestmark = needs(module("matplotlib"))
WORDS = ["<b>&", "$x$", "ü" * 30, "Ġa", "\n", "f"]
AT = torch.tensor([2, 5])


def scores() -> torch.Tensor:
    """[2 rows, 3 heads, 6 keys], at positions 2 and 5."""
    values = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    return values.masked_fill(torch.arange(6) > AT[:, None, None], -torch.inf)


def held(**rows: torch.Tensor) -> Activations:
    by_site = {Site(hook, 4): tensor for hook, tensor in rows.items()}
    positions = dict.fromkeys(by_site, AT)
    return Activations(by_site, positions, {site: torch.zeros(len(AT), dtype=torch.int64) for site in by_site})


def test_pictures(tmp_path: Path) -> None:
    acts = held(pattern=scores().softmax(-1), attn_scores=scores(), mlp_post=torch.randn(2, 40))
    drawn = [
        analysis.plot_attention(acts, tmp_path / "pattern.html", layer=4, tokens=WORDS),
        analysis.plot_attention(acts, tmp_path / "scores.svg", hook="attn_scores", heads=[7, 0, 3]),
        analysis.plot_attention(np.full((4, 1, 4), 0.25), tmp_path / "array.png"),
        analysis.plot_top_neurons(acts, tmp_path / "neurons.html", k=5, tokens=WORDS[:2]),
        analysis.plot_top_neurons(torch.ones(3, 2), tmp_path / "few.png", k=np.int64(9)),
    ]
    for path in drawn:
        assert path.stat().st_size > 3000
        assert path.suffix != ".html" or "<b>&" not in path.read_text()


def test_the_table_lists_each_querys_strongest_keys(tmp_path: Path) -> None:
    values = torch.zeros(2, 2, 6)
    values[0, 0, :3] = torch.tensor([0.1, 0.7, 0.2])
    values[1, 1, 4] = 1.0
    page = analysis.plot_attention(held(pattern=values), tmp_path / "x.html", heads=[8, 9], tokens=list("abcdef"))
    text = page.read_text()
    assert "<tr><th>8</th><td>2 c</td><td>1 b: 0.7</td><td>2 c: 0.2</td><td>0 a: 0.1</td>" in text
    assert "<tr><th>9</th><td>5 f</td><td>4 e: 1</td>" in text
    hidden = analysis.plot_attention(held(attn_scores=scores()), tmp_path / "y.html", hook="attn_scores").read_text()
    assert "inf" not in hidden.lower().split("<table", 1)[1] and "nan" not in hidden.lower().split("<table", 1)[1]


def test_the_strongest_neurons_are_listed_first(tmp_path: Path) -> None:
    rows = torch.zeros(2, 30)
    rows[0, 17], rows[1, 3], rows[1, 29] = -5.0, 4.0, 1.0
    text = analysis.plot_top_neurons(held(mlp_post=rows), tmp_path / "x.html", k=2, tokens=["a", "b"]).read_text()
    assert text.index("<th>17</th><td>-5</td><td>0</td>") < text.index("<th>3</th><td>0</td><td>4</td>")
    assert "<th>29</th>" not in text


def test_values_without_positions_are_at_the_last_ones(tmp_path: Path) -> None:
    values, at = part_plots._values(np.zeros((2, 1, 6)), "pattern", None, None)
    assert values.shape == (2, 1, 6) and at == [4, 5]


def test_pictures_refuse_what_they_cannot_show(tmp_path: Path) -> None:
    acts, pattern, target = held(pattern=scores().softmax(-1)), np.full((2, 3, 6), 0.1), tmp_path / "x.png"
    for call, field in [
        (lambda: analysis.plot_attention(acts, target, layer=5), "layer"),
        (lambda: analysis.plot_attention(acts, target, hook="attn_scores"), "layer"),
        (lambda: analysis.plot_attention(acts, target, tokens=["a"]), "tokens"),
        (lambda: analysis.plot_attention(acts, target, heads=[1]), "heads"),
        (lambda: analysis.plot_attention(pattern, target, positions=[1]), "positions"),
        (lambda: analysis.plot_attention(pattern, target, positions=[1, 6]), "positions"),
        (lambda: analysis.plot_attention(pattern[0], target), "activations"),
        (lambda: analysis.plot_attention(pattern * np.nan, target), "activations"),
        (lambda: analysis.plot_attention(np.zeros((1, 65, 2)), target), "heads"),
        (lambda: analysis.plot_attention(pattern, tmp_path / "x.bmp"), "path"),
        (lambda: analysis.plot_top_neurons(acts, target), "layer"),
        (lambda: analysis.plot_top_neurons(pattern, target), "activations"),
        (lambda: analysis.plot_top_neurons(pattern[0] * np.inf, target), "activations"),
        (lambda: analysis.plot_top_neurons(pattern[0], target, k=0), "k"),
        (lambda: analysis.plot_top_neurons(pattern[0], target, tokens=["a"]), "tokens"),
    ]:
        with refused(field):
            call()
    assert not target.exists()
