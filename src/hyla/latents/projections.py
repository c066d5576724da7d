"""The structure of latent codes: drawn in the plane, and as numbers, since a picture of clusters proves little.

`project` places codes in the plane (t-SNE, PCA, UMAP). `silhouette` and `neighbour_purity` measure how far rows with the
same label lie together, the latter also among rows of OTHER tasks, so that "it clusters by rule" is not merely "one task
looks like itself". `class_means`, `class_cosines` and `layer_similarity` compare rules within and across layers. Arrays are
numpy's: N rows, H heads (or whatever features a row has), C classes, L layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, Num, Shaped

from hyla.errors import MissingExtraError, check
from hyla.latents.labels import check_rows, finite_codes, group_ids, label_ids, sklearn
from hyla.latents.resampling import group_sums

Method = Literal["tsne", "pca", "umap"]


@dataclass(frozen=True, eq=False)
class Projection:
    """Codes in the plane: `points [n, 2]` of the rows `rows [n]`, out of num_rows.

    num_distinct: how many different codes the drawn rows have; equal ones lie on one point. explained_variance: of PCA's
    two axes, as shares of the variance of all rows. neighbours: t-SNE's perplexity or UMAP's number of neighbours.
    """

    points: Float[np.ndarray, "drawn 2"]
    rows: Int[np.ndarray, "drawn"]
    method: Method
    seed: int
    num_rows: int
    num_distinct: int
    explained_variance: tuple[float, float] | None
    neighbours: float | None


@dataclass(frozen=True)
class ClassValue:
    """A number for one class, over `count` rows."""

    name: str
    value: float
    count: int


@dataclass(frozen=True)
class Silhouette:
    """Mean silhouette, from -1 to 1, over `num_used` of num_rows rows; by chance it is about 0 or below."""

    value: float
    classes: tuple[ClassValue, ...]
    num_used: int
    num_rows: int


@dataclass(frozen=True)
class Purity:
    """Share of the k nearest neighbours with the row's own label, mean over `num_used` of num_rows rows.

    chance: the same for neighbours drawn at random among those that count. between_groups: whether rows of the same group
    were left out as neighbours.
    """

    value: float
    chance: float
    k: int
    classes: tuple[ClassValue, ...]
    between_groups: bool
    num_used: int
    num_rows: int


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """Mean code of each class: names and counts `[C]`, `means [C, H]`."""

    names: tuple[str, ...]
    means: Float[np.ndarray, "classes heads"]
    counts: tuple[int, ...]


# --- in the plane -----------------------------------------------------------------------------------------------------


def project(
    codes: Num[np.ndarray, "samples heads"],
    method: Method = "tsne",
    *,
    seed: int = 0,
    max_points: int = 2000,
    labels: Shaped[np.ndarray, "samples"] | None = None,
    perplexity: float | None = None,
) -> Projection:
    """Place codes `[N, H]` in the plane; the same seed gives the same points.

    Equal codes lie on one point: t-SNE and UMAP are given each only once. t-SNE starts from the first two principal
    components, so that what is far apart has a meaning at first, and the seed decides little but the choice of rows.

    max_points: above this many rows a random choice is drawn, of each label in proportion if `labels` are given (one row
        of each at least). PCA's axes are fitted on all rows all the same.
    perplexity: of t-SNE; by default 30, or a third of the distinct codes if there are fewer than 90. UMAP takes 15
        neighbours, or as many as there are.

    Distances between clusters, and their sizes, mean little in t-SNE and UMAP. Raises ConfigError for too few distinct
    codes and MissingExtraError where umap-learn is not installed.
    """
    check(method in ("tsne", "pca", "umap"), "method", method, "tsne, pca or umap")
    codes = finite_codes("codes", codes)
    check(codes.shape[1] >= 2, "codes", codes.shape, "two features at least, to make a plane of")
    check(perplexity is None or method == "tsne", "perplexity", perplexity, "only for method tsne")
    check(perplexity is None or perplexity > 0, "perplexity", perplexity, "above 0")
    rows = chosen_rows(len(codes), max_points, seed, labels)
    distinct, place = np.unique(codes[rows], axis=0, return_inverse=True)
    n, explained, neighbours = len(distinct), None, None
    if method == "pca":
        check(len(codes) > 1 and bool((codes != codes[0]).any()), "codes", codes.shape, "not all rows equal")
        model = sklearn("decomposition").PCA(2, svd_solver="full").fit(codes)
        points = model.transform(codes[rows])
        explained = (float(model.explained_variance_ratio_[0]), float(model.explained_variance_ratio_[1]))
    elif method == "tsne":
        check(n >= 4, "codes", f"{n} distinct rows", "at least 4 for t-SNE")
        neighbours = min(30.0, n / 3) if perplexity is None else float(perplexity)
        check(neighbours < n, "perplexity", neighbours, f"less than the number of distinct codes drawn, {n}")
        points = _tsne(distinct, neighbours, seed)[place.reshape(-1)]
    else:
        check(n >= 4, "codes", f"{n} distinct rows", "at least 4 for UMAP")
        neighbours = float(min(15, n - 1))
        points = _umap(distinct, int(neighbours), seed)[place.reshape(-1)]
    return Projection(points, rows, method, seed, len(codes), n, explained, neighbours)


def _tsne(codes: np.ndarray, perplexity: float, seed: int) -> np.ndarray:
    """On one thread: sums in another order would give other points."""
    model = sklearn("manifold").TSNE(2, perplexity=perplexity, init="pca", random_state=seed)
    with import_module("threadpoolctl").threadpool_limits(1):  # comes with scikit-learn
        return model.fit_transform(codes).astype(np.float64)


def _umap(codes: np.ndarray, neighbours: int, seed: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tensorflow is missing; that a seed means one thread
        try:
            umap = import_module("umap")
        except ImportError:
            raise MissingExtraError("umap-learn", "umap", "method umap") from None
        init = "spectral" if len(codes) > 10 else "random"  # few points have too few eigenvectors
        model = umap.UMAP(n_components=2, n_neighbors=neighbours, random_state=seed, n_jobs=1, init=init)
        return model.fit_transform(codes).astype(np.float64)


def chosen_rows(
    num_rows: int, max_points: int, seed: int, labels: Shaped[np.ndarray, "samples"] | None = None
) -> Int[np.ndarray, "chosen"]:
    """At most `max_points` row numbers in order, at random; with labels of each in proportion and at least one."""
    check(max_points >= 1, "max_points", max_points, "at least 1")
    check(seed >= 0, "seed", seed, "0 or more")
    if labels is not None:
        check_rows({"codes": (num_rows,), "labels": np.shape(labels)})
    if num_rows <= max_points:
        return np.arange(num_rows)
    rng = np.random.default_rng([seed, 5])
    if labels is None:
        return np.sort(rng.choice(num_rows, max_points, replace=False))
    names, (ids,) = label_ids({"labels": labels})
    check(len(names) <= max_points, "max_points", max_points, f"at least one for each of the {len(names)} labels")
    count_C = np.bincount(ids)
    share_C = count_C * max_points / num_rows
    quota_C = np.maximum(np.floor(share_C).astype(np.int64), 1)
    while (over := quota_C.sum() - max_points) != 0:  # whole rows: give to, or take from, who is furthest off
        gap_C = np.where(quota_C > 1, quota_C - share_C, -np.inf) if over > 0 else share_C - quota_C
        quota_C[gap_C.argmax()] -= np.sign(over)
    chosen = [rng.choice(np.flatnonzero(ids == c), quota, replace=False) for c, quota in enumerate(quota_C)]
    return np.sort(np.concatenate(chosen))


# --- clusters as numbers ----------------------------------------------------------------------------------------------


def silhouette(
    codes: Num[np.ndarray, "samples heads"],
    labels: Shaped[np.ndarray, "samples"],
    *,
    names: Sequence[str] | None = None,
    seed: int = 0,
    max_points: int = 5000,
) -> Silhouette:
    """Mean over rows of (b - a) / max(a, b): a the mean distance to the rest of its class, b to the nearest other class.

    A class with one row scores 0. Above max_points rows a stratified choice is used.
    """
    rows, codes, ids, rules = _labelled(codes, labels, names, max_points, seed)
    check(len(rules) < len(rows), "labels", f"{len(rules)} classes in {len(rows)} rows", "fewer classes than rows")
    values = sklearn("metrics").silhouette_samples(codes, ids)
    return Silhouette(float(values.mean()), _by_class(values, ids, rules), len(rows), len(labels))


def neighbour_purity(
    codes: Num[np.ndarray, "samples heads"],
    labels: Shaped[np.ndarray, "samples"],
    k: int = 10,
    *,
    groups: Shaped[np.ndarray, "samples *fields"] | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    max_points: int = 10_000,
) -> Purity:
    """Share of a row's k nearest neighbours (Euclidean) with its label, and what neighbours at random would give.

    Rows at equal distance share the last places, so that the order of rows changes nothing. Chance is the mean over rows of
    (n_c - 1) / (n - 1), that is sum_c p_c^2 but for the row itself. groups: rows of a row's own group (its task) do not
    count as its neighbours, nor in the chance. Above max_points rows a stratified choice is used.
    """
    if groups is not None:
        check_rows({"codes": np.shape(codes), "groups": np.shape(groups)})
    rows, codes, ids, rules = _labelled(codes, labels, names, max_points, seed)
    n = len(rows)
    group_N = np.arange(n) if groups is None else group_ids({"groups": groups})[0][rows]
    eligible_N = n - np.bincount(group_N)[group_N]
    fewest = int(eligible_N.min())
    outside = "the others" if groups is None else "those outside the largest group"
    check(1 <= k <= fewest, "k", k, f"from 1 to {fewest}, {outside}")
    from scipy.spatial.distance import cdist  # comes with scikit-learn

    purity_N = np.empty(n)
    batch = max(1, 5_000_000 // n)  # rows at a time, a few hundred MB at most
    for start in range(0, n, batch):
        part = slice(start, start + batch)
        distance = cdist(codes[part], codes, "sqeuclidean")
        distance[group_N[part, None] == group_N] = np.inf
        last = np.partition(distance, k - 1, axis=1)[:, k - 1 : k]
        closer, tied, same = distance < last, distance == last, ids[part, None] == ids
        places = k - closer.sum(1)
        purity_N[part] = ((closer & same).sum(1) + places * (tied & same).sum(1) / tied.sum(1)) / k
    within = np.unique(np.stack([group_N, ids]), axis=1, return_inverse=True)[1].reshape(-1)
    chance_N = (np.bincount(ids)[ids] - np.bincount(within)[within]) / eligible_N
    value, chance = float(purity_N.mean()), float(chance_N.mean())
    return Purity(value, chance, k, _by_class(purity_N, ids, rules), groups is not None, n, len(labels))


def _labelled(
    codes: Any, labels: Any, names: Sequence[str] | None, max_points: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    """Rows that are used, and their codes and class ids; ConfigError with fewer than two classes."""
    codes = finite_codes("codes", codes)
    rows = chosen_rows(len(codes), max_points, seed, labels)
    rules, (ids,) = label_ids({"labels": labels}, names)
    check(len(rules) > 1, "labels", rules[0], "two different ones at least")
    return rows, codes[rows], ids[rows], rules


def _by_class(values_N: np.ndarray, ids: np.ndarray, rules: tuple[str, ...]) -> tuple[ClassValue, ...]:
    totals = group_sums(np.stack([values_N, np.ones(len(ids))], 1), ids)
    return tuple(ClassValue(name, float(total / n), int(n)) for name, (total, n) in zip(rules, totals, strict=True))


# --- rules compared ---------------------------------------------------------------------------------------------------


def class_means(
    codes: Num[np.ndarray, "samples heads"],
    labels: Shaped[np.ndarray, "samples"],
    names: Sequence[str] | None = None,
) -> ClassMeans:
    """Mean code of each class, classes sorted by label."""
    codes = finite_codes("codes", codes)
    check_rows({"codes": codes.shape, "labels": np.shape(labels)})
    rules, (ids,) = label_ids({"labels": labels}, names)
    count_C = np.bincount(ids)
    return ClassMeans(rules, group_sums(codes, ids) / count_C[:, None], tuple(count_C.tolist()))


def class_cosines(
    means: Num[np.ndarray, "*layers classes heads"], centre: bool = False
) -> Float[np.ndarray, "*layers classes classes"]:
    """Cosine between every two classes' mean codes; NaN for a mean of exactly 0.

    centre: subtract the mean over classes first; what all classes share would otherwise make every cosine nearly 1.
    """
    means = np.asarray(means, np.float64)
    if centre:
        means = means - means.mean(-2, keepdims=True)
    length = np.linalg.norm(means, axis=-1, keepdims=True)
    unit = np.where(length > 0, means / np.where(length > 0, length, 1), np.nan)
    return np.clip(unit @ unit.swapaxes(-1, -2), -1, 1)


def layer_similarity(cosines: Num[np.ndarray, "layers classes classes"]) -> Float[np.ndarray, "layers layers"]:
    """Representational similarity of layers: Pearson correlation, over pairs of classes, of their cosines.

    NaN where a layer's cosines are all equal or one is undefined. Needs three classes, for more than one pair.
    """
    cosines = np.asarray(cosines, np.float64)
    check(cosines.shape[-1] >= 3, "cosines", cosines.shape, "three classes at least")
    above = np.triu_indices(cosines.shape[-1], 1)
    pairs_LP = cosines[:, above[0], above[1]]
    off_LP = pairs_LP - pairs_LP.mean(1, keepdims=True)
    off_LP[np.abs(off_LP).max(1) < 1e-12] = 0  # equal but for rounding
    return class_cosines(off_LP)
