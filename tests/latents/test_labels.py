import numpy as np
import pytest

from hyla.errors import ConfigError, MissingExtraError
from hyla.latents import labels
from hyla.latents.labels import finite_codes, finite_targets, group_ids, label_ids


def test_labels_of_both_sides_share_their_ids_and_are_sorted():
    names, (train, test) = label_ids({"y_train": np.array([7, 2, 7]), "y_test": np.array([5, 2])})
    assert names == ("2", "5", "7")
    assert train.tolist() == [2, 0, 2]
    assert test.tolist() == [1, 0]
    assert label_ids({"y": np.array(["b", "a"])})[0] == ("a", "b")


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.float32, np.float64])
def test_whole_numbers_of_any_kind_are_the_same_labels(kind):
    names, (ids,) = label_ids({"y": np.array([10, 2, 10]).astype(kind)}, names=[f"rule {i}" for i in range(11)])
    assert (names, ids.tolist()) == (("rule 2", "rule 10"), [1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.array([0.0, 0.5])}, "y has 1 labels that are not whole numbers, such as 0.5"),
        ({"y": np.array([0.0, np.nan])}, "y has 1 labels that are not whole numbers, such as nan"),
        ({"y": np.array([1]), "z": np.array(["1"])}, "y has numbers, z has text"),
        ({"y": np.array([])}, "one row at least"),
        ({"y": np.eye(2)}, "one label for each row"),
        ({"y": np.array([None, "a"], dtype=object)}, "whole numbers or text"),
    ],
)
def test_labels_that_are_none(arrays, message):
    with pytest.raises(ConfigError, match=message):
        label_ids(arrays)


def test_a_label_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="a name for each label from 0 to 2"):
        label_ids({"y": np.array([0, 2])}, names=["a", "b"])
    with pytest.raises(ConfigError, match="whole numbers"):
        label_ids({"y": np.array(["a"])}, names=["a", "b"])


def test_codes_that_are_not_finite_are_counted_and_located():
    codes = np.zeros((5, 3), np.float32)
    codes[2, 1], codes[2, 2], codes[4, 0] = np.nan, np.inf, -np.inf
    with pytest.raises(ConfigError, match=r"x has 3 values .* in 2 of 5 rows; the first is nan in row 2, column 1"):
        finite_codes("x", codes)


@pytest.mark.parametrize("codes", [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(3), np.array([["a"]]), np.eye(2) * 1j])
def test_codes_that_are_no_table_of_numbers(codes):
    with pytest.raises(ConfigError, match=r"x is an array of .* but must be a table of numbers"):
        finite_codes("x", codes)


def test_one_target_becomes_a_column():
    assert finite_targets("y", np.array([True, False])).tolist() == [[1.0], [0.0]]


def test_groups_of_several_columns_are_rows():
    terms = np.array([[1, 2], [0, 2], [1, 2], [1, 3]])
    assert group_ids({"groups": terms})[0].tolist() == [1, 0, 1, 2]
    train, test = group_ids({"a": np.array([5, 9, 5]), "b": np.array([1, 2, 2])})
    assert (train.tolist(), test.tolist()) == ([0, 1, 0], [0, 1, 1])


@pytest.mark.parametrize(
    ("one", "other"),
    [([3, 1, 2], [2, 9, 3]), (["c", "a", "b"], ["b", "z", "c"]), ([[0, 3], [0, 1], [0, 2]], [[0, 2], [0, 9], [0, 3]])],
)
def test_groups_on_both_sides_are_counted(one, other):
    with pytest.raises(ConfigError, match="train_groups and test_groups share 2 of 4 groups, such as "):
        group_ids({"train_groups": np.array(one), "test_groups": np.array(other)})


def test_groups_identified_differently_are_refused():
    with pytest.raises(ConfigError, match="identified alike"):
        group_ids({"a": np.array([1, 2]), "b": np.array([[1, 2]])})


def test_without_scikit_learn_the_message_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(labels, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'hyla\[latents\]'"):
        labels.sklearn("metrics")
