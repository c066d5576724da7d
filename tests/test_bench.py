import json
import math

import pytest
import torch

from hyla import bench, cli
from hyla.errors import ConfigError


def test_a_wrong_result_is_not_timed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench.plain, "loss", lambda task, predictions, targets: predictions.sum())
    with pytest.raises(
        bench.WrongResultError, match=r"the loss of logic hyla differs from the baseline's .* not timed"
    ):
        bench.bench_train(["logic"], ["hyla"], 1)
    assert cli.main(["bench", "train", "--tasks", "logic", "--json", str(tmp_path / "rows.json")]) == 1
    assert not (tmp_path / "rows.json").exists()
    capsys.readouterr()


def test_rows_of_the_training_step(tmp_path, capsys):
    path = tmp_path / "rows.json"
    flags = ["--tasks", "logic", "--mechanisms", "softmax,hyla", "--against", "plain", "--repeats", "2"]
    assert cli.main(["bench", "train", *flags, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["task"], row["mechanism"], row["baseline"]) for row in rows] == [
        ("logic", "softmax", "plain"),
        ("logic", "hyla", "plain"),
    ]
    assert all(row["ours_ms"] > 0 and row["baseline_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert "baseline / ours" in capsys.readouterr().out


def test_ratios_are_those_of_neighbouring_pairs():
    row = bench.Row.of("t", "hyla", "plain", [1.0, 2.0, 4.0], [2.0, 6.0, 8.0])
    assert (row.ours_ms, row.baseline_ms, row.ratio) == (2.0, 6.0, 2.0)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla", "hyla_plus"])
def test_attention_is_checked_and_timed(mechanism):
    size = bench.AttentionSize(2, 4, 9, 4)
    rows = bench.bench_attention([size], [mechanism], ["eager", "sdpa"], 1)
    assert [row.baseline for row in rows] == (["eager", "sdpa"] if mechanism == "softmax" else ["eager"])


def test_a_difference_is_found():
    bench.check_equal("x", torch.tensor([1.0, 100.0]), torch.tensor([1.0005, 100.0]), 1e-5)
    for wrong in (1.1, math.nan):
        with pytest.raises(bench.WrongResultError, match="x differs"):
            bench.check_equal("x", torch.tensor([wrong, 1.0]), torch.tensor([1.0, 1.0]), 1e-5)


def test_exponents_are_fitted_to_the_larger_half():
    sizes = (1, 2, 4, 1000, 2000, 4000)
    points = [bench.Point("hyla", "tokens", n, 5.0 + 1e-4 * n**2, float(n)) for n in sizes]
    assert bench.fitted_exponent(points, "peak_mib") == pytest.approx(1.0)
    assert bench.fitted_exponent(points, "step_ms") == pytest.approx(2.0, abs=0.05)


def test_scaling_is_measured_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "SCALING_AXES", {"tokens": (4, 8), "members": (1, 2)})
    monkeypatch.setattr(bench, "SCALING_BASE", {"tokens": 4, "heads": 2, "width": 8, "batch": 2, "members": 1})

    class Here:  # the process pool would not see the smaller sizes
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *arguments):
            pass

        def submit(self, function, *arguments):
            self.value = function(*arguments)
            return self

        def result(self):
            return self.value

    monkeypatch.setattr(bench, "ProcessPoolExecutor", Here)
    path = tmp_path / "rows.json"
    flags = ["--mechanisms", "hyla", "--repeats", "1", "--json", str(path), "--out", str(tmp_path / "figures")]
    assert cli.main(["bench", "scaling", *flags]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["axis"], row["value"]) for row in rows] == [
        ("tokens", 4),
        ("tokens", 8),
        ("members", 1),
        ("members", 2),
    ]
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["scaling.png", "scaling.svg"]
    assert "exponent" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bench.bench_train(["chess"], ["hyla"], 1), r"tasks = 'chess' .* logic, sraven"),
        (lambda: bench.bench_train(["logic"], ["linear"], 1), r"mechanisms = 'linear' .* softmax and hyla"),
        (lambda: bench.bench_attention([], ["hyla"], ["jax"], 1), r"against = 'jax'"),
        (lambda: bench.bench_scaling(["hyla"], 1, ["depth"]), r"axes = 'depth'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
