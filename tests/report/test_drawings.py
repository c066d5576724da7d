"""Puzzles and functions as pictures and as text."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from hyla.report import drawings
from hyla.report.drawings import draw_function, draw_puzzle, formula, function_text, puzzle_text

# two features: the first constant, the second a progression by 1 modulo 8
PLAIN = [[[3, 6], [3, 7], [3, 0]], [[5, 1], [5, 2], [5, 3]], [[0, 4], [0, 5], [0, 6]]]
# the same with the features swapped in the second column
SWAPPED = [[[3, 6], [7, 3], [3, 0]], [[5, 1], [2, 5], [5, 3]], [[0, 4], [5, 0], [0, 6]]]
ORDER = [[0, 1], [1, 0], [0, 1]]
RULES = ["constant", "progression +1"]


def colours(path):
    with Image.open(path) as image:
        return len(image.convert("RGB").getcolors(maxcolors=1 << 24))


def test_puzzle_text():
    assert puzzle_text(PLAIN, RULES, 8) == (
        "3 x 3 panels, 2 features with values 0 to 7; after 7 comes 0\n"
        "\n"
        "  3 6 | 3 7 | 3 0\n"
        "  5 1 | 5 2 | 5 3\n"
        "  0 4 | 0 5 | ? ?\n"
        "\n"
        "Answer: 0 6\n"
        "\n"
        "rule            position  row 1  row 2  row 3\n"
        "constant        1         3 3 3  5 5 5  0 0 0\n"
        "progression +1  2         6 7 0  1 2 3  4 5 6\n"
    )


def test_puzzle_text_of_permuted_features():
    assert puzzle_text(SWAPPED, RULES, 8, permutations=ORDER) == (
        "3 x 3 panels, 2 features with values 0 to 7; after 7 comes 0\n"
        "\n"
        "  3 6 | 7 3 | 3 0\n"
        "  5 1 | 2 5 | 5 3\n"
        "  0 4 | 5 0 | ? ?\n"
        "\n"
        "Each column lists the features in an order of its own.\n"
        "\n"
        "Answer: 0 6\n"
        "\n"
        "rule            position  row 1  row 2  row 3\n"
        "constant        1, 2, 1   3 3 3  5 5 5  0 0 0\n"
        "progression +1  2, 1, 2   6 7 0  1 2 3  4 5 6\n"
    )


@pytest.mark.parametrize(("num_features", "num_values"), [(1, 2), (3, 5), (5, 10)])
def test_puzzles_are_drawn(tmp_path, num_features, num_values):
    rng = np.random.default_rng(num_features)
    panels = rng.integers(0, num_values, (3, 3, num_features))
    permutations = np.stack([rng.permutation(num_features) for _ in range(3)])
    rules = ["distribute three"] * num_features
    path = draw_puzzle(panels, rules, num_values, tmp_path / "new" / "puzzle.png", permutations=permutations)
    assert colours(path) > 20


def test_answer_is_drawn_below_only(tmp_path):
    other = np.array(PLAIN)
    other[2, 2] = [7, 1]
    pictures = []
    for number, panels in enumerate((PLAIN, other)):
        with Image.open(draw_puzzle(panels, RULES, 8, tmp_path / f"{number}.png")) as image:
            pictures.append(np.asarray(image.convert("L")).astype(int))
    differing = np.nonzero((pictures[0] != pictures[1]).any(1))[0]
    assert differing.min() > 0.7 * len(pictures[0])


@pytest.mark.parametrize(("num_features", "num_values"), [(6, 8), (4, 11)])
def test_what_cannot_be_drawn_can_be_written(tmp_path, num_features, num_values):
    panels = np.zeros((3, 3, num_features), int)
    rules = ["constant"] * num_features
    with pytest.raises(ValueError, match="use puzzle_text"):
        draw_puzzle(panels, rules, num_values, tmp_path / "puzzle.png")
    assert "constant" in puzzle_text(panels, rules, num_values)


@pytest.mark.parametrize(
    ("panels", "rules", "permutations", "message"),
    [
        ([[[0.5]]], ["constant"], None, "must be integers"),
        ([[[0, 8]]], RULES, None, "not within 0 to 7"),
        ([[[0, 1]]], ["constant"], None, "1 rules for 2 features"),
        ([[[0, 1]]], RULES, [[0, 0]], "permutations must hold"),
        ([[[0, 1]]], RULES, [[0, 1], [1, 0]], "permutations must hold"),
    ],
)
def test_wrong_puzzles_are_refused(panels, rules, permutations, message):
    with pytest.raises(ValueError, match=message):
        puzzle_text(panels, rules, 8, permutations=permutations)


def test_shapes_and_colours_are_all_different():
    assert len(drawings.SHAPES) == len(set(drawings.COLOURS)) == drawings.MAX_VALUES
    for i, shape in enumerate(drawings.SHAPES):
        assert np.abs(shape).max() < 1.3
        assert not any(np.array_equal(shape, other) for other in drawings.SHAPES[:i])


TERMS = [[1, 0], [0, 1]]
POINTS = [[0.25, 0.5], [1.0, 0.0], [0.125, 0.75]]
VALUES = [0.5, 1.0, 0.75]  # max(min(x1, 1 - x2), min(1 - x1, x2)) of each


def test_formula():
    assert formula(TERMS) == "(x1 ∧ ¬x2) ∨ (¬x1 ∧ x2)"


def test_function_text():
    assert function_text(TERMS, POINTS, VALUES) == (
        "f(x) = (x1 ∧ ¬x2) ∨ (¬x1 ∧ x2)\n"
        "with ¬x = 1 - x, ∧ = min, ∨ = max\n"
        "\n"
        "  point     x1     x2   f(x)\n"
        "      1  0.250  0.500  0.500\n"
        "      2  1.000  0.000  1.000\n"
        ">     3  0.125  0.750      ?\n"
        "\n"
        "Answer: 0.750\n"
    )
    assert "  ... 1 more\n" in function_text(TERMS, POINTS, VALUES, max_points=1)


@pytest.mark.parametrize(("num_terms", "num_variables", "num_points"), [(1, 2, 1), (4, 6, 8)])
def test_functions_are_drawn(tmp_path, num_terms, num_variables, num_points):
    rng = np.random.default_rng(0)
    terms, points = rng.integers(0, 2, (num_terms, num_variables)), rng.random((num_points, num_variables))
    path = draw_function(terms, points, points[:, 0], tmp_path / "function.png")
    assert colours(path) > 20


def test_shapes_that_disagree_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\(2, 2\), \(3, 2\) and \(2,\)"):
        draw_function(TERMS, POINTS, VALUES[:2], tmp_path / "function.png")
