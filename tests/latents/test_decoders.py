import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import f1_score, r2_score

from hyla.latents import decoders
from hyla.latents.decoders import (
    classification_scores,
    fit_ridge,
    predict_logistic,
    predict_nearest_mean,
    r2,
    reference_ridge,
    standardised,
)


def closed_form(x, y, penalty, standardise):
    """Ridge by its normal equations, the intercept a column of ones that the penalty does not see."""
    mean, scale = (x.mean(0), x.std(0)) if standardise else (np.zeros(x.shape[1]), np.ones(x.shape[1]))
    scale = np.where(scale > 1e-12, scale, 1)
    design = np.column_stack([(x - mean) / scale, np.ones(len(x))])
    penalties = np.diag([penalty] * x.shape[1] + [0.0])
    solution = np.linalg.solve(design.T @ design + penalties, design.T @ y)
    return lambda rows: np.column_stack([(rows - mean) / scale, np.ones(len(rows))]) @ solution


def relu_codes(num_rows=400, num_features=8):
    state = np.random.RandomState(0)
    x = np.maximum(state.randn(num_rows, num_features), 0)
    return x, x @ state.randn(num_features) + 5


def designs():
    rng = np.random.default_rng(3)
    plain = rng.standard_normal((60, 5)) * [1, 10, 0.1, 1, 1] + [0, 100, 0, 0, -3]
    masked = plain * (rng.random((60, 1)) > 0.4)
    return {
        "plain": plain,
        "collinear": np.column_stack([plain, plain[:, 0], plain[:, 1] - 2 * plain[:, 2]]),
        "more features than rows": rng.standard_normal((12, 40)),
        "constant feature": np.column_stack([plain, np.full(60, 0.1)]),
        "rows of zeros": masked,
        "relu": relu_codes()[0],
        "one feature": plain[:, :1],
    }


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("name", list(designs()))
def test_ridge_is_the_closed_form(name, penalty, standardise):
    """PRB-04: with an intercept that is not penalised, to 1e-5, for one target and for three."""
    x = designs()[name]
    rng = np.random.default_rng(0)
    y = 5 + rng.standard_normal((len(x), 3)) + x[:, :1]
    rows = x + 0.1 * rng.standard_normal(x.shape)
    for targets in (y, y[:, :1]):
        weights, intercept = fit_ridge(x, targets, penalty, standardise)
        expected = closed_form(x, targets, penalty, standardise)(rows)
        assert weights.shape == (x.shape[1], targets.shape[1])
        assert np.abs(rows @ weights + intercept - expected).max() < 1e-5 * np.abs(expected).max()


def test_float32_codes_are_fitted_in_float64():
    x, y = relu_codes()
    narrow = fit_ridge(x.astype(np.float32), y[:, None])
    wide = fit_ridge(x.astype(np.float32).astype(np.float64), y[:, None])
    assert np.allclose(narrow[0], wide[0], rtol=1e-9)
    assert narrow[0].dtype == np.float64


def test_prb_04_ours_and_the_public_codes_regression():
    x, y = relu_codes()
    weights, intercept = fit_ridge(x, y[:, None], standardise=False)
    ours = r2(y[:, None], x @ weights + intercept)[0]
    assert ours == pytest.approx(Ridge(1.0).fit(x, y).score(x, y), abs=1e-9)
    assert ours == pytest.approx(0.99994, abs=5e-6)
    assert (x == 0).any(1).all()  # all 400 rows hold a zero
    assert reference_ridge(x, y[:, None], x, y[:, None])[0] == pytest.approx(-0.28, abs=0.005)


def test_the_public_regression_is_ridge_with_a_penalised_intercept_where_no_code_is_zero_and_few_steps_suffice():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 6)) + 0.5
    y = x @ rng.standard_normal((6, 2)) + rng.standard_normal((300, 2)) + 3
    design = np.column_stack([x, np.ones(300)])
    solution = np.linalg.solve(design.T @ design + np.eye(7), design.T @ y)
    assert np.allclose(reference_ridge(x, y, x, y), r2(y, design @ solution), atol=1e-5)


def test_the_public_regression_stops_after_ten_steps():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 40)) * np.logspace(0, 3, 40)
    y = (x / np.logspace(0, 3, 40)) @ rng.standard_normal((40, 1))
    few, many = (reference_ridge(x, y, x, y, iterations=steps)[0] for steps in (10, 10_000))
    assert many > 0.99
    assert few < 0.8


def test_the_public_regression_gives_minus_infinity_for_a_constant_target():
    x, y = relu_codes()
    found = reference_ridge(x, np.stack([y, np.ones(400)], 1), x, np.stack([y, np.ones(400)], 1))
    assert found[1] == -np.inf


def test_prb_03_a_constant_target_has_no_r2():
    constant = np.full((4, 1), -1.0)
    assert np.isnan(r2(constant, constant)).all()
    assert np.isnan(r2(constant, constant + 1)).all()
    assert np.isnan(r2(np.full((4, 1), 0.1, np.float32), constant)).all()  # whose mean in float32 need not be 0.1
    assert np.isnan(r2(constant[:1], constant[:1])).all()  # one sample
    nearly = constant + [[1e-9], [0], [0], [0]]
    assert r2(nearly, constant + 1)[0] < -1e15
    assert r2(nearly, nearly)[0] == 1


def test_prb_03_a_nearly_constant_float32_target():
    """torchmetrics once gave 82685 here; scikit-learn gives -301979050.377."""
    y = np.array([-5.1608, -5.1609, -5.1608, -5.1608, -5.1608, -5.1608], np.float32)[:, None]
    predicted = np.array([-3.9865, -5.4648, -5.0238, -4.3899, -5.6672, -4.7336], np.float32)[:, None]
    found = r2(y, predicted)[0]
    assert found == pytest.approx(-3.0e8, rel=0.01)
    assert found == pytest.approx(r2_score(y.astype(np.float64), predicted.astype(np.float64)), rel=1e-9)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 20))
def test_r2_is_scikit_learns_and_never_above_1(seed, num_rows):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, (num_rows, 4)) * 10.0 ** rng.integers(-6, 6)
    predicted = rng.standard_normal((2, num_rows, 4))
    found = r2(y, predicted)
    for v in range(2):
        for t in range(4):
            if (y[:, t] == y[0, t]).all():
                assert np.isnan(found[v, t])
            else:
                assert found[v, t] == pytest.approx(r2_score(y[:, t], predicted[v, :, t]), rel=1e-9)
                assert found[v, t] <= 1


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_macro_f1_is_scikit_learns_over_the_rules_present(seed, num_rows):
    rng = np.random.default_rng(seed)
    true, predicted = rng.integers(0, 5, (2, num_rows))
    accuracy, macro = classification_scores(true, predicted, 7)
    expected = f1_score(true, predicted, labels=np.unique(true), average="macro", zero_division=0)
    assert accuracy == pytest.approx((true == predicted).mean())
    assert macro == pytest.approx(expected)


def test_logistic_regression_is_scikit_learns():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, 200)
    x, rows = rng.standard_normal((200, 5)) + np.eye(4, 5)[ids], rng.standard_normal((50, 5))
    found, converged = predict_logistic(x, ids, rows, 0.5)
    assert found.tolist() == LogisticRegression(C=2, max_iter=1000).fit(x, ids).predict(rows).tolist()
    assert converged


def test_a_solver_that_stops_early_is_reported_without_a_warning(monkeypatch):
    monkeypatch.setattr(decoders, "MAX_ITERATIONS", 2)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, 200)
    x = rng.standard_normal((200, 5)) + np.eye(4, 5)[ids]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, converged = predict_logistic(x, ids, x, 1.0)
    assert not converged


def test_one_rule_is_predicted_throughout():
    found, converged = predict_logistic(np.ones((3, 2)), np.array([4, 4, 4]), np.zeros((2, 2)), 1.0)
    assert (found.tolist(), converged) == ([4, 4], True)


def test_nearest_mean_by_brute_force():
    rng = np.random.default_rng(0)
    x, rows, ids = rng.standard_normal((40, 3)), rng.standard_normal((20, 3)), rng.choice([1, 4, 5], 40)
    means = {rule: x[ids == rule].mean(0) for rule in (1, 4, 5)}
    expected = [min(means, key=lambda rule: np.linalg.norm(row - means[rule])) for row in rows]
    assert predict_nearest_mean(x, ids, rows).tolist() == expected
    assert set(predict_nearest_mean(np.ones((4, 2)), np.array([0, 0, 1, 1]), np.ones((2, 2)))) <= {0, 1}


def test_only_training_rows_set_the_scale():
    train, test = np.array([[1.0, 7.0], [3.0, 7.0]]), np.array([[1000.0, 9.0]])
    a, b = standardised(train, test)
    assert a.tolist() == [[-1, 0], [1, 0]]
    assert b.tolist() == [[998, 2]]  # the scale of a constant feature is 1
