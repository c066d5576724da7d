"""Linear decoders, exact and in float64, and their scores; and the public code's ridge regression, to compare with."""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Num

from hyla.errors import check
from hyla.latents.labels import sklearn
from hyla.latents.resampling import group_sums

MAX_ITERATIONS = 1000  # of the logistic regression's solver


def standardised(x_train: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sides by the training rows' mean and scale; the scale of a constant feature is 1."""
    scaler = sklearn("preprocessing").StandardScaler().fit(x_train)
    return scaler.transform(x_train), scaler.transform(x_test)


def fit_ridge(
    x: Num[np.ndarray, "samples features"],
    y: Num[np.ndarray, "samples targets"],
    penalty: float = 1.0,
    standardise: bool = True,
) -> tuple[Float[np.ndarray, "features targets"], Float[np.ndarray, "targets"]]:
    """Weights and intercept, for codes as they are (standardisation undone), of ridge regression in float64.

    Exact, by singular values: collinear columns and more features than rows are no special case.
    """
    check(0 < penalty < np.inf, "penalty", penalty, "above 0")
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    model = sklearn("linear_model").Ridge(alpha=penalty, solver="svd")
    if not standardise:
        model.fit(x, y)
        return model.coef_.T.reshape(x.shape[1], -1), np.atleast_1d(model.intercept_)
    scaling = sklearn("preprocessing").StandardScaler().fit(x)
    model.fit(scaling.transform(x), y)
    weights_HT = model.coef_.T.reshape(x.shape[1], -1) / scaling.scale_[:, None]
    return weights_HT, model.intercept_ - scaling.mean_ @ weights_HT


def r2(
    y: Num[np.ndarray, "samples targets"], predicted: Num[np.ndarray, "*versions samples targets"]
) -> Float[np.ndarray, "*versions targets"]:
    """`1 - SSE / SST` of each target in float64, SST about the mean of y; NaN where all rows of y are exactly equal."""
    y, predicted = np.asarray(y, np.float64), np.asarray(predicted, np.float64)
    sse = np.square(y - predicted).sum(-2)
    sst = np.square(y - y.mean(0)).sum(0)
    defined = (y != y[0]).any(0) & (sst > 0)
    return np.where(defined, 1 - sse / np.where(defined, sst, 1), np.nan)


def reference_ridge(
    x_train: Num[np.ndarray, "train features"],
    y_train: Num[np.ndarray, "train targets"],
    x_test: Num[np.ndarray, "test features"],
    y_test: Num[np.ndarray, "test targets"],
    penalty: float = 1.0,
    iterations: int = 10,
) -> Float[np.ndarray, "targets"]:
    """R2 of each target as P1's public regression gives it, faults included; to compare, not to use.

    1. The column of ones is 0 in every training row that holds an exact zero (taken for padding), while all test rows
       get the intercept. 2. The intercept is penalised like a weight. 3. The normal equations are solved by conjugate
       gradients from 0, stopped after `iterations` steps. A constant target gives -inf (NaN if predicted exactly).
    """
    x_train, y_train, x_test, y_test = (np.asarray(a, np.float64) for a in (x_train, y_train, x_test, y_test))
    whole = (x_train != 0).all(1)
    design = np.column_stack([x_train, whole])
    gram = design.T @ design + penalty * np.eye(design.shape[1])
    predicted = np.empty_like(y_test)
    for t, target in enumerate((design.T @ y_train).T):
        solution = _conjugate_gradients(gram, target, iterations)
        predicted[:, t] = x_test @ solution[:-1] + solution[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - np.square(y_test - predicted).sum(0) / np.square(y_test - y_test.mean(0)).sum(0)


def _conjugate_gradients(matrix: np.ndarray, target: np.ndarray, iterations: int) -> np.ndarray:
    """`matrix^-1 target`, from 0, until the residual is 1e-5 of the target or `iterations` are over."""
    solution = np.zeros_like(target)
    residual = direction = target
    square = residual @ residual
    for _ in range(iterations):
        if square <= 1e-10 * (target @ target):
            break
        image = matrix @ direction
        step = square / (direction @ image)
        solution = solution + step * direction
        residual = residual - step * image
        previous, square = square, residual @ residual
        direction = residual + square / previous * direction
    return solution


def accuracy_and_f1(hits: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy and macro F1 from counts `[..., C]` of each rule: given rightly, present, given. The mean is over rules
    that are present; F1 = 2 hits / (present + given) is 0 for one that is never given."""
    f1 = 2 * hits / np.maximum(true + predicted, 1)
    present = true > 0
    accuracy = hits.sum(-1) / np.maximum(true.sum(-1), 1)
    macro_f1 = np.where(present, f1, 0).sum(-1) / np.maximum(present.sum(-1), 1)
    return np.asarray(accuracy), np.asarray(macro_f1)


def classification_scores(true_N: np.ndarray, predicted_N: np.ndarray, num_rules: int) -> tuple[float, float]:
    """Accuracy and macro F1 of rule ids 0..num_rules-1."""
    hits = np.bincount(true_N[true_N == predicted_N], minlength=num_rules)
    counts = (np.bincount(ids, minlength=num_rules) for ids in (true_N, predicted_N))
    accuracy, macro_f1 = accuracy_and_f1(hits, *counts)
    return float(accuracy), float(macro_f1)


def predict_logistic(
    x_train: np.ndarray, ids: np.ndarray, x_test: np.ndarray, penalty: float
) -> tuple[np.ndarray, bool]:
    """Rule ids predicted for the test rows, and whether the solver converged."""
    if (ids == ids[0]).all():  # possible once shuffled: tasks that lent their labels may all have the same
        return np.full(len(x_test), ids[0]), True
    convergence = sklearn("exceptions").ConvergenceWarning
    model = sklearn("linear_model").LogisticRegression(C=1 / penalty, max_iter=MAX_ITERATIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x_train, ids)
    for warning in caught:
        if not issubclass(warning.category, convergence):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return model.predict(x_test), not any(issubclass(warning.category, convergence) for warning in caught)


def predict_nearest_mean(x_train: np.ndarray, ids: np.ndarray, x_test: np.ndarray) -> np.ndarray:
    """Ids of the class whose mean is nearest; scikit-learn's refuses examples that are all alike."""
    present, index = np.unique(ids, return_inverse=True)
    means_CH = group_sums(x_train, index) / np.bincount(index)[:, None]
    distance_NC = np.square(means_CH).sum(1) - 2 * x_test @ means_CH.T  # less the row's own square
    return present[distance_NC.argmin(1)]
