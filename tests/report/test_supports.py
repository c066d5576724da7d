"""Pictures of supports: what their panels hold, counted from the combinations."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from hyla.report import supports
from hyla.report.supports import draw_support

SMALL = ([[0, -1], [1, 2], [0, 2]], [[2, -1], [0, 1], [1, -1]])


@pytest.fixture
def drawn(monkeypatch):
    """The panels of the figure, in place of files."""

    def panels(*arguments):
        kept = []

        def keep(stem, size, draw):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            kept.extend(figure.axes)
            return Path(stem), Path(stem)

        monkeypatch.setattr(supports, "save_screen", keep)
        draw_support(*arguments)
        return kept

    return panels


def bars(panel):
    return np.array([bar.get_width() for bar in panel.patches]).reshape(2, -1)


def test_few_combinations_are_columns(drawn):
    train, held_out, usage = drawn(*SMALL, 3, "stem")
    assert [panel.get_title(loc="left") for panel in (train, held_out)] == ["trained on: 3", "held out: 3"]
    # small ones first, an empty column between the sizes
    expected = [[1, np.nan, 1, 0], [0, np.nan, 0, 1], [0, np.nan, 1, 1]]
    np.testing.assert_array_equal(np.ma.filled(train.collections[0].get_array(), np.nan).reshape(3, 4), expected)
    assert [tick.get_text() for tick in held_out.get_xticklabels()] == ["1", "2"]
    assert bars(usage).tolist() == [[2, 1, 2], [1, 2, 1]]


def test_many_are_shares_of_pairs(drawn, monkeypatch):
    monkeypatch.setattr(supports, "MAX_SHOWN", 5)
    pairs, usage, bar = drawn([[0, 1, 2], [0, 1, -1], [1, -1, -1]], [[0, 1, 3], [3, -1, -1], [0, -1, -1]], 4, "stem")
    nan = np.nan
    expected = [[2 / 4, 2 / 3, 1, 0], [2 / 3, 3 / 4, 1, 0], [1, 1, 1, nan], [0, 0, nan, 0]]
    np.testing.assert_allclose(np.ma.filled(pairs.images[0].get_array(), nan), expected)
    assert "grey" in pairs.get_xlabel()
    assert bars(usage).tolist() == [[2, 3, 1, 0], [2, 1, 0, 2]]
    assert "share trained on" in bar.get_ylabel()


@pytest.mark.parametrize("parts", [SMALL, (SMALL[0], np.zeros((0, 2), int))])
def test_files(tmp_path, parts):
    png, svg = draw_support(*parts, 3, tmp_path / "figures" / "support", "a title")
    with Image.open(png) as image:
        pixels = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}
    blue, orange = (pixels.get(colour, 0) for colour in ((0, 114, 178), (213, 94, 0)))
    assert blue > 10_000
    assert (orange > 10_000) == bool(len(parts[1]))  # a few thousand are letters
    assert svg.read_text().startswith("<?xml")


def test_modules_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not below num_modules = 2"):
        draw_support(*SMALL, 2, tmp_path / "support")
