"""The demo's pictures have the numbers that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.demo import pictures
from examples.demo.pictures import HeatMap, MoodShares, heat_maps, moods_by_value


def test_moods_by_value(tmp_path: Path, monkeypatch: Any) -> None:
    figures = []
    save = pictures._save
    monkeypatch.setattr(
        pictures, "_save", lambda plt, figure, path: (figures.append(figure), save(plt, figure, path))[1]
    )
    panels = [
        MoodShares("one", (0.0, 0.5, 1.0), (1.0, 0.5, 0.0), (1.0, 1.0, 0.25)),
        MoodShares("two", (1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (1.0, 0.5, 0.5)),
    ]
    path = moods_by_value((-2.0, 0.0, 6.0), panels, 0.75, tmp_path / "new" / "moods.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    ((left, right),) = [figure.axes for figure in figures]
    for axis, panel in ((left, panels[0]), (right, panels[1])):
        *lines, plain = axis.get_lines()
        assert [line.get_label() for line in lines] == ["happy", "sad", "well-formed"]
        for line, shares in zip(lines, (panel.happy, panel.sad, panel.well_formed), strict=True):
            assert line.get_xdata().tolist() == [-2.0, 0.0, 6.0]
            np.testing.assert_allclose(line.get_ydata(), 100 * np.array(shares))
        assert set(plain.get_ydata()) == {75.0} and axis.get_title(loc="left") == panel.title
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["happy", "sad", "well-formed"]


def test_heat_maps_have_one_scale_and_what_is_above_0_is_blue(tmp_path: Path, monkeypatch: Any) -> None:
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda plt, figure, path: (figures.append(figure), plt.close(figure))[0])
    panels = [
        HeatMap("places", ["(name)", "a$b"], torch.tensor([[1.0, 0.0], [-0.5, 0.25]])),
        HeatMap("heads", ["0", "1", "2"], torch.tensor([[0.0, 0.0, 0.7], [0.0, 0.0, 0.0]]), "head"),
    ]
    for beside in (True, False):
        heat_maps(panels, tmp_path / "maps.png", "share", limit=1.0, beside=beside)
    for figure in figures:
        *axes, _bar = figure.axes
        for axis, panel in zip(axes, panels, strict=True):
            (image,) = axis.get_images()
            np.testing.assert_array_equal(image.get_array(), panel.numbers.numpy())
            assert image.get_clim() == (-1.0, 1.0) and axis.get_xlabel() == panel.of_columns
            (red, _, blue, _), (red_below, _, blue_below, _) = image.cmap(0.9), image.cmap(0.1)
            assert blue > red and red_below > blue_below
