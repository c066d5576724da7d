"""Codes, labels and groups as they come in: checked, and made into numbers. And scikit-learn, if it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float

from hyla.errors import ConfigError, MissingExtraError, check


def check_rows(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ConfigError unless arrays of these shapes have equally many rows."""
    if len({shape[:1] for shape in shapes.values()}) > 1:
        described = ", ".join(f"{field} has shape {shape}" for field, shape in shapes.items())
        raise ConfigError(f"unequal numbers of rows: {described}")


def finite_codes(field: str, codes: Any) -> Float[np.ndarray, "samples features"]:
    """Codes as float64 `[N, H]`; ConfigError unless they are such numbers, at least one of each, and all finite."""
    return _finite(field, codes, "a table of numbers, rows by features")


def finite_targets(field: str, y: Any) -> Float[np.ndarray, "samples targets"]:
    """Targets `[N]` or `[N, T]` as float64 `[N, T]`; errors as :func:`finite_codes`."""
    y = np.asarray(y)
    return _finite(field, y[:, None] if y.ndim == 1 else y, "numbers, one or several for each row")


def _finite(field: str, values: Any, allowed: str) -> np.ndarray:
    values = np.asarray(values)
    described = f"an array of {values.dtype} of shape {values.shape}"
    numeric = values.ndim == 2 and values.dtype.kind in "fiub"
    if not (numeric and values.size):
        raise ConfigError(f"{field} is {described}, but must be {allowed}, and not empty")
    values = values.astype(np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise ConfigError(
            f"{field} has {bad.sum():,} values that are not finite, in {bad.any(1).sum():,} of {len(values):,} rows; the "
            f"first is {values[row, column]} in row {row}, column {column} (of the rows that a mask keeps)"
        )
    return values


def label_ids(
    labels: Mapping[str, Any], names: Sequence[str] | None = None
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The distinct labels of all arrays together, sorted, as text; and each array as ids into them.

    labels: argument name -> labels `[N]`, whole numbers (floats that are whole pass) or text, all of one kind.
    names: what to call label i, for whole numbers.
    """
    arrays = {field: _plain_labels(field, values) for field, values in labels.items()}
    kinds = {field: "text" if values.dtype.kind == "U" else "numbers" for field, values in arrays.items()}
    if len(set(kinds.values())) > 1:
        raise ConfigError(
            ", ".join(f"{field} has {kind}" for field, kind in kinds.items()) + ": labels of one kind only"
        )
    distinct, ids = np.unique(np.concatenate(list(arrays.values())), return_inverse=True)
    if names is not None:
        check(distinct.dtype.kind != "U", "names", tuple(names), "only for labels that are whole numbers")
        enough = f"a name for each label from {distinct[0]} to {distinct[-1]}; label i is called names[i]"
        check(int(distinct[0]) >= 0 and int(distinct[-1]) < len(names), "names", tuple(names), enough)
    called = tuple(str(label) if names is None else names[int(label)] for label in distinct)
    return called, np.split(ids, np.cumsum([len(values) for values in arrays.values()])[:-1])


def _plain_labels(field: str, labels: Any) -> np.ndarray:
    """Labels as int64 or text."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels):
        raise ConfigError(f"{field} has shape {labels.shape}, but must be one label for each row, of one row at least")
    if labels.dtype.kind in "iub":
        return labels.astype(np.int64)
    if labels.dtype.kind == "f":
        whole = np.isfinite(labels) & (labels == np.round(labels))
        if not whole.all():
            raise ConfigError(
                f"{field} has {(~whole).sum():,} labels that are not whole numbers, such as {labels[~whole][0]}"
            )
        return labels.astype(np.int64)
    if labels.dtype.kind in "UT" or all(isinstance(label, str) for label in labels):
        return labels.astype(np.str_)
    raise ConfigError(f"{field} has labels of kind {labels.dtype}, but they must be whole numbers or text")


def group_ids(groups: Mapping[str, Any]) -> list[np.ndarray]:
    """Each array's groups as ids 0.. of its own. A group is a value, or a row where there are several columns.

    ConfigError if two arrays share a group.
    """
    arrays = {field: np.asarray(values) for field, values in groups.items()}
    for field, values in arrays.items():
        fits = values.ndim in (1, 2) and values.size and values.dtype.kind in "iubUf"
        check(bool(fits), field, f"{values.dtype} of shape {values.shape}", "numbers or text, for one row at least")
    if len({values.shape[1:] for values in arrays.values()}) > 1:
        shapes = ", ".join(f"{field} has shape {values.shape}" for field, values in arrays.items())
        raise ConfigError(f"{shapes}: a group must be identified alike on both sides")
    sets = [set(map(tuple, values.reshape(len(values), -1).tolist())) for values in arrays.values()]
    shared = set.intersection(*sets) if len(sets) > 1 else set()
    if shared:
        example = ", ".join(map(str, min(shared)))
        raise ConfigError(
            f"{' and '.join(arrays)} share {len(shared):,} of {len(set.union(*sets)):,} groups, such as {example}: what is "
            "tested must not have been trained on"
        )
    return [np.unique(values, axis=0, return_inverse=True)[1].reshape(-1) for values in arrays.values()]


def sklearn(part: str) -> Any:
    """A module of scikit-learn, which is optional."""
    try:
        return import_module(f"sklearn.{part}")
    except ImportError:
        raise MissingExtraError("scikit-learn", "latents", "reading latent codes") from None
