"""`Sweep`: its file, its figures, and the share of the way."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.refusals import refused
from vllm_weir.experiments.grid import Grid
from vllm_weir.experiments.metrics import Baseline
from vllm_weir.experiments.sweep.result import Sweep


def made(heads: int = 0, hooks: tuple[str, ...] = ("resid_post", "mlp_out"), positions: int = 3, **more: Any) -> Sweep:
    axes: dict[str, Any] = {"hook": hooks, "layer": (0, 4), "position": (0, "1:3", -1)[:positions]}
    axes |= {"head": tuple(range(heads))} if heads else {}
    cells = np.random.default_rng(0).normal(size=(2, *map(len, axes.values())))
    given = {
        "grid": Grid(cells.mean(0), axes), "by_pair": Grid(cells, {"pair": (0, 1), **axes}),
        "baseline": Baseline(3.0, -1.0), "noise_floor": 1e-6, "mode": "denoise", "metric": "logit difference",
        "to": "", "position_labels": ("0 The $x$", "1:3", "-1 <b>")[:positions],
    }  # fmt: skip
    return Sweep(**given | more)


@pytest.mark.parametrize("heads", [0, 2])
def test_a_file_to_the_bit(tmp_path: Path, heads: int) -> None:
    sweep = made(heads, to="q[3] heads 1")
    again = Sweep.load(sweep.save(tmp_path / "any.name"))
    for name in ("grid", "by_pair"):
        one, other = getattr(sweep, name), getattr(again, name)
        assert dict(one.axes) == dict(other.axes) and one.array.tobytes() == other.array.tobytes()
    for name in ("baseline", "noise_floor", "mode", "metric", "to", "position_labels"):
        assert getattr(sweep, name) == getattr(again, name)
    assert repr(again) == repr(sweep) and "noise 1e-06" in repr(sweep)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "version.npz", about=np.array('{"format": "weir sweep", "version": 9}'))
    whole = made().save(tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-40])
    for name in ("text", "other.npz", "version.npz", "cut", "missing"):
        with refused("path", "cannot read"):
            Sweep.load(tmp_path / name)
    with refused("path", "cannot write"):
        made().save(tmp_path / "no" / "file")


def test_share_of_the_way() -> None:
    sweep = made()
    assert np.allclose(sweep.normalised.array, (sweep.grid.array + 1) / 4)
    assert np.allclose(made(mode="noise").normalised.array, (sweep.grid.array - 3) / -4)


@pytest.mark.parametrize(
    ("heads", "positions", "rows"), [(0, 3, ["0", "4"]), (2, 3, ["0.0", "0.1", "4.0", "4.1"]), (2, 1, ["0", "4"])]
)
def test_a_page_holds_all_numbers(tmp_path: Path, heads: int, positions: int, rows: list[str]) -> None:
    sweep = made(heads, positions=positions)
    (path,) = sweep.plot(tmp_path / "new" / "map.html", normalised=False)
    text = path.read_text()
    assert text.count("<svg") == text.count("<table>") == 2 and text.count("<html") == text.count("</html>") == 1
    assert all(f"<tr><th>{row}</th>" in text for row in rows)
    for value in sweep.grid.array.ravel():
        assert f">{value:.4g}<" in text
    assert "0 The $x$" in text and "src=" not in text
    assert positions == 1 or "-1 &lt;b&gt;" in text


def test_a_picture_for_each_hook_point(tmp_path: Path) -> None:
    sweep = made()
    assert [p.name for p in sweep.plot(tmp_path / "map.png")] == ["map.resid_post.png", "map.mlp_out.png"]
    assert [p.name for p in sweep.plot(tmp_path / "one.png", hook="mlp_out")] == ["one.png"]
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    (path,) = made(baseline=Baseline(1.0, 1.0)).plot(tmp_path / "same.html", hook="mlp_out")  # no way to go
    assert path.exists()
    for given, field in (((tmp_path / "map.gif",), "path"), ((tmp_path / "map.png", "z"), "hook")):
        with refused(field):
            sweep.plot(given[0], hook=given[1] if len(given) > 1 else None)


def test_a_figure_without_a_path() -> None:
    """It is none of pyplot's, so that a notebook shows it once and other plots keep their backend."""
    from matplotlib import pyplot

    before, backend = pyplot.get_fignums(), pyplot.get_backend()
    figure = made().plot(normalised=False)
    shown = [axis.get_title(loc="left") for axis in figure.axes if axis.get_title(loc="left")]
    assert shown == ["resid_post: denoise", "mlp_out: denoise"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len([axis for axis in made().plot(hook="mlp_out").axes if axis.images]) == 1
    assert (pyplot.get_fignums(), pyplot.get_backend()) == (before, backend)
    with refused("hook"):
        made().plot(hook="z")


def test_a_notebook_shows_heat_maps() -> None:
    page = made()._repr_html_()
    assert page.count("<table") == 2 and page.count("<td") == 12 and "-1 &lt;b&gt;" in page
    numbers = [f"{value:.4g}" for part in made().normalised.array for row in part[::-1] for value in row]
    assert re.findall(r'title="([^"]+)"', page) == numbers
    many = made(hooks=("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "q", "k", "v", "z"))
    assert "1 more of 9 hook points" in many._repr_html_()
    long = made(hooks=("q",))
    wide = Grid(np.ones((1, 2, 900)), {"hook": ("q",), "layer": (0, 4), "position": tuple(range(900))})
    page = replace(long, grid=wide, position_labels=tuple(map(str, range(900))))._repr_html_()
    assert page.count("<td") == 128 and "836 more of 900 columns" in page
