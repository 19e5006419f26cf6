"""The demo's pictures have the numbers that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from examples.demo import pictures
from examples.demo.pictures import MoodShares, moods_by_value


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
