from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.manifold import trustworthiness
from sklearn.metrics import silhouette_score

from hyla.errors import ConfigError, MissingExtraError
from hyla.latents import projections
from hyla.latents.projections import (
    chosen_rows,
    class_cosines,
    class_means,
    layer_similarity,
    neighbour_purity,
    project,
    silhouette,
)

ABSENT = pytest.mark.skipif(find_spec("umap") is None, reason="extra `umap` is not installed")
UMAP = pytest.param("umap", marks=[pytest.mark.slow, ABSENT])  # slow: it compiles for half a minute


def clusters(num_rows=150, num_classes=3, spread=0.2, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num_rows)
    return np.eye(num_classes, 6)[labels] * 3 + spread * rng.standard_normal((num_rows, 6)), labels


# --- in the plane -----------------------------------------------------------------------------------------------------


def test_pca_is_the_singular_value_decomposition():
    codes, labels = clusters()
    found = project(codes, "pca", labels=labels, max_points=40)
    centred = codes - codes.mean(0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    expected = (centred @ axes[:2].T)[found.rows]
    signs = np.sign((expected * found.points).sum(0))
    assert np.allclose(found.points, expected * signs)
    assert found.explained_variance == pytest.approx((singular[:2] ** 2 / (singular**2).sum()).tolist())
    assert (found.num_rows, len(found.rows)) == (150, 40)


@pytest.mark.parametrize("method", ["tsne", UMAP])
def test_neighbours_stay_neighbours_and_the_seed_decides(method):
    codes, labels = clusters(90)
    found, again, other = (project(codes, method, seed=seed, max_points=60) for seed in (0, 0, 1))
    assert np.array_equal(found.points, again.points)
    assert not np.array_equal(found.points, other.points)
    codes, labels = codes[found.rows], labels[found.rows]
    assert found.points.shape == (60, 2)
    assert np.isfinite(found.points).all()
    assert trustworthiness(codes, found.points, n_neighbors=5) > 0.8
    assert neighbour_purity(found.points, labels, k=5).value > 0.95
    assert found.explained_variance is None
    assert found.neighbours == {"tsne": 20.0, "umap": 15.0}[method]


@pytest.mark.parametrize("method", ["tsne", UMAP])
def test_equal_codes_lie_on_one_point(method):
    codes = clusters(12)[0][np.random.default_rng(0).integers(0, 12, 50)]
    codes[:10] = 0
    found = project(codes, method)
    assert found.num_distinct == len(np.unique(codes, axis=0))
    for i in range(50):
        same = (codes == codes[i]).all(1)
        assert (found.points[same] == found.points[i]).all()
    assert len(np.unique(found.points, axis=0)) == found.num_distinct


@pytest.mark.parametrize("num_rows", [4, 5, 8])
@pytest.mark.parametrize("method", ["tsne", UMAP, "pca"])
def test_few_rows(method, num_rows):
    found = project(np.random.default_rng(0).standard_normal((num_rows, 3)), method)
    assert found.points.shape == (num_rows, 2)
    assert np.isfinite(found.points).all()


@pytest.mark.parametrize(
    ("codes", "options", "message"),
    [
        (np.eye(4), {"method": "isomap"}, "method = 'isomap' is not possible: tsne, pca or umap"),
        (np.ones((9, 1)), {}, "two features at least"),
        (np.ones((9, 3)), {}, "codes = '1 distinct rows' is not possible: at least 4 for t-SNE"),
        (np.ones((9, 3)), {"method": "umap"}, "at least 4 for UMAP"),
        (np.ones((9, 3)), {"method": "pca"}, "not all rows equal"),
        (
            np.eye(9),
            {"perplexity": 9.0},
            "perplexity = 9.0 .* less than the number of distinct codes drawn, 9",
        ),
        (np.eye(9), {"perplexity": 0.0}, "above 0"),
        (np.eye(9), {"perplexity": 3.0, "method": "pca"}, "only for method tsne"),
        (np.eye(9), {"max_points": 0}, "max_points = 0"),
        (np.eye(9), {"seed": -1}, "seed = -1"),
        (np.full((9, 3), np.inf), {}, "codes has 27 values that are not finite"),
        (np.eye(9), {"labels": np.zeros(8, int)}, r"unequal numbers of rows: codes has shape \(9,\), labels"),
    ],
)
def test_mistakes_in_projections_are_named(codes, options, message, unchecked):
    with pytest.raises(ConfigError, match=message):
        project(codes, **options)


def test_without_umap_the_message_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(projections, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'hyla\[umap\]'"):
        project(np.eye(9), "umap")


# --- which rows -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.integers(7, 60), st.integers(0, 99))
def test_rows_are_chosen_in_proportion_with_one_of_each_label(labels, max_points, seed):
    labels = np.array(labels)
    rows = chosen_rows(len(labels), max_points, seed, labels)
    assert len(rows) == min(len(labels), max_points)
    assert (np.diff(rows) > 0).all()
    assert set(labels[rows]) == set(labels)
    for label in np.unique(labels):
        share = (labels == label).sum() * len(rows) / len(labels)
        assert abs((labels[rows] == label).sum() - share) <= 1 + 7 * (len(rows) < len(labels) and share < 7)


def test_proportions_of_a_large_choice():
    labels = np.repeat([0, 1, 2], [6000, 3990, 10])
    rows = chosen_rows(10_000, 1000, 0, labels)
    assert np.bincount(labels[rows]).tolist() == [600, 399, 1]
    assert len(chosen_rows(10_000, 1000, 0)) == 1000
    assert chosen_rows(10_000, 1000, 0).tolist() == chosen_rows(10_000, 1000, 0).tolist()
    with pytest.raises(ConfigError, match="at least one for each of the 3 labels"):
        chosen_rows(10_000, 2, 0, labels)


# --- clusters as numbers ----------------------------------------------------------------------------------------------


def test_silhouette_by_hand():
    """Class 0 at 0 and 1, class 1 at 4. Row 0: a = 1, b = 4; row 1: a = 1, b = 3; a class of one row scores 0."""
    found = silhouette(np.array([[0.0], [1.0], [4.0]]), np.array([0, 0, 1]), names=["left", "right"])
    assert found.value == pytest.approx((3 / 4 + 2 / 3 + 0) / 3)
    assert [(c.name, c.count) for c in found.classes] == [("left", 2), ("right", 1)]
    assert [c.value for c in found.classes] == pytest.approx([(3 / 4 + 2 / 3) / 2, 0])


def test_silhouette_is_scikit_learns_and_says_how_many_rows_it_used():
    codes, labels = clusters()
    assert silhouette(codes, labels).value == pytest.approx(silhouette_score(codes, labels))
    some = silhouette(codes, labels, max_points=60)
    assert (some.num_used, some.num_rows) == (60, 150)
    assert some == silhouette(codes, labels, max_points=60)
    assert some.value == pytest.approx(silhouette(codes, labels).value, abs=0.05)
    shuffled = np.random.default_rng(0).permutation(labels)
    assert abs(silhouette(codes, shuffled).value) < 0.1 < silhouette(codes, labels).value


def test_purity_by_hand():
    """On a line at 0, 1, 3, 4.5, classes a a b a. Nearest neighbours: 1, 0, 4.5, 3. Two nearest: one of them is the same
    class for 0 (1), 1 (0), none for 3 (1 and 4.5), one for 4.5 (1, not 3)."""
    codes, labels = np.array([[0.0], [1.0], [3.0], [4.5]]), np.array(["a", "a", "b", "a"])
    one, two = neighbour_purity(codes, labels, 1), neighbour_purity(codes, labels, 2)
    assert one.value == pytest.approx((1 + 1 + 0 + 0) / 4)
    assert two.value == pytest.approx((0.5 + 0.5 + 0 + 0.5) / 4)
    assert one.chance == pytest.approx((3 * 2 / 3 + 0) / 4)
    assert [(c.name, c.value, c.count) for c in one.classes] == [("a", pytest.approx(2 / 3), 3), ("b", 0.0, 1)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(6, 25), st.integers(1, 3), st.booleans())
def test_purity_by_brute_force(seed, num_rows, k, grouped):
    """Against every order of equally distant neighbours, by repeated random ties, and chance against its definition."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 3, (num_rows, 2)).astype(float)
    labels = np.array([0, 1, *rng.integers(0, 3, num_rows - 2)])
    groups = rng.permutation(np.arange(num_rows) % max(4, num_rows // 2)) if grouped else None
    owner = groups if grouped else np.arange(num_rows)
    outside = [np.flatnonzero(owner != owner[i]) for i in range(num_rows)]
    if min(map(len, outside)) < k:
        return
    found = neighbour_purity(codes, labels, k, groups=groups)
    purity = []
    for i, others in enumerate(outside):
        squares = np.square(codes[others] - codes[i]).sum(1)
        last = np.sort(squares)[k - 1]
        closer, tied = others[squares < last], others[squares == last]
        same = (labels[closer] == labels[i]).sum() + (k - len(closer)) * (labels[tied] == labels[i]).mean()
        purity.append(same / k)
    assert found.value == pytest.approx(np.mean(purity))
    assert found.chance == pytest.approx(np.mean([(labels[o] == labels[i]).mean() for i, o in enumerate(outside)]))
    assert found.between_groups == grouped


def test_chance_is_the_sum_of_squared_shares_but_for_the_row_itself():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    found = neighbour_purity(np.zeros((100, 2)), labels)  # all at one place: the neighbours are anyone
    assert found.value == pytest.approx(found.chance)
    assert found.chance == pytest.approx((50 * 49 + 30 * 29 + 20 * 19) / (100 * 99))


def test_tasks_that_look_like_themselves_are_not_clusters_of_rules():
    rng = np.random.default_rng(0)
    tasks = np.repeat(np.arange(300), 6)
    rules = rng.integers(0, 3, 300)[tasks]
    codes = rng.standard_normal((300, 5))[tasks] + 0.01 * rng.standard_normal((1800, 5))
    within = neighbour_purity(codes, rules, 5)
    between = neighbour_purity(codes, rules, 5, groups=tasks)
    assert within.value > 0.99
    assert abs(between.value - between.chance) < 0.1


def test_purity_of_many_rows_is_that_of_a_stated_choice_in_whatever_order():
    codes, labels = clusters(spread=1.5)
    some = neighbour_purity(codes, labels, 5, max_points=100, groups=np.arange(150))
    assert (some.num_used, some.num_rows) == (100, 150)
    assert some == neighbour_purity(codes, labels, 5, max_points=100, groups=np.arange(150))
    order = np.random.default_rng(0).permutation(150)
    turned = neighbour_purity(codes[order], labels[order], 5)
    assert turned.value == pytest.approx(neighbour_purity(codes, labels, 5).value)


@pytest.mark.parametrize(
    ("measure", "options", "message"),
    [
        (silhouette, {"labels": np.zeros(6, int)}, "two different ones at least"),
        (silhouette, {"labels": np.arange(6)}, "6 classes in 6 rows"),
        (silhouette, {"labels": np.zeros(5, int)}, "unequal numbers of rows"),
        (neighbour_purity, {"k": 6}, "k = 6 is not possible: from 1 to 5"),
        (neighbour_purity, {"k": 0}, "k = 0"),
        (neighbour_purity, {"groups": np.array([0, 0, 0, 0, 1, 2]), "k": 3}, "k = 3 is not possible: from 1 to 2"),
        (neighbour_purity, {"groups": np.zeros(5, int)}, "unequal numbers of rows: codes .*, groups"),
        (class_means, {"labels": np.zeros(5, int)}, "unequal numbers of rows"),
    ],
)
def test_mistakes_in_measures_are_named(measure, options, message, unchecked):
    with pytest.raises(ConfigError, match=message):
        measure(**{"codes": np.eye(6), "labels": np.array([0, 0, 0, 1, 1, 2])} | options)


# --- rules compared ---------------------------------------------------------------------------------------------------


def test_means_of_classes():
    found = class_means(np.array([[1.0, 2], [3, 4], [0, -1]]), np.array([4, 4, 0]), names=["zero", *"abc", "four"])
    assert (found.names, found.counts) == (("zero", "four"), (1, 2))
    assert found.means.tolist() == [[0, -1], [2, 3]]


def test_cosines_by_hand():
    found = class_cosines(np.array([[2.0, 0], [1, 1], [-3, 0], [0, 0]]))
    half = np.sqrt(0.5)
    assert np.allclose(found[:3, :3], [[1, half, -1], [half, 1, -half], [-1, -half, 1]])
    assert np.isnan(found[3]).all()
    assert np.isnan(found[:, 3]).all()


def test_what_classes_share_is_taken_out_by_centring():
    means = np.eye(3) + 100
    assert class_cosines(means).min() > 0.999
    assert np.allclose(class_cosines(means, centre=True), [[1, -0.5, -0.5], [-0.5, 1, -0.5], [-0.5, -0.5, 1]])


def test_similarity_of_layers_is_the_correlation_of_their_cosines():
    rng = np.random.default_rng(0)
    means = rng.standard_normal((3, 5, 4))
    rotation, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    means[1] = means[0] @ rotation * 7
    cosines = class_cosines(means)
    found = layer_similarity(cosines)
    pairs = [cosine[np.triu_indices(5, 1)] for cosine in cosines]
    assert np.allclose(found, np.corrcoef(pairs))
    assert found[0, 1] == pytest.approx(1)  # turning and scaling a layer changes nothing
    equal = np.stack([class_cosines(np.eye(4) + 0.1, centre=True), class_cosines(rng.standard_normal((4, 4)))])
    assert np.isnan(layer_similarity(equal)[0]).all()  # all pairs of a simplex are alike, but for rounding
    with pytest.raises(ConfigError, match="three classes at least"):
        layer_similarity(np.ones((2, 2, 2)))
