"""The numbered examples run, and do what they say."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def run(name):
    return runpy.run_path(str(ROOT / "examples" / name))


def test_the_guide_shows_them_all():
    guide = (ROOT / "docs" / "language_models.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) == 4
    assert all(f"../examples/{path.name}" in guide for path in EXAMPLES)


def test_own_module():
    found = run("01_own_module.py")
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert (found["steps"] - found["whole"]).abs().max() < 1e-4


def test_encoder_layer():
    found = run("02_encoder_layer.py")
    assert (found["padded"][1, :4] - found["alone"][0]).abs().max() < 1e-4


def test_hugging_face_swap():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf; runs where it is installed")
    transformers.logging.disable_progress_bar()
    found = run("03_hugging_face_swap.py")
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["generated"][0].tolist() == list(range(3, 13))
    assert found["same"]
    assert found["codes"][1].shape == (4, 4, 12, 12)


def test_hugging_face_model():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf; runs where it is installed")
    transformers.logging.disable_progress_bar()
    found = run("04_hugging_face_model.py")
    assert found["same"]
    assert found["generated"].shape == (2, 9)
    assert found["started"].num_parameters() == found["llama"].num_parameters()
