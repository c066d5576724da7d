"""Frozen dataclasses as configs: checked field by field, read from plain dicts, written to them. No torch."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hyla.errors import ConfigError, check

C = TypeVar("C")

ADDED = {"added": True}  # metadata of a field younger than the first published runs: see `without_added`

FEW_KEYS = 5  # of a section: as many are all listed where one is not known

LARGEST = 1e30  # beyond any setting that makes sense, and well inside float32


@lru_cache
def field_types(cls: type) -> dict[str, Any]:
    """The type of every field of a dataclass, annotations resolved."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def describe(hint: Any) -> str:
    """A type in words, for error messages."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(option) for option in get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type that an annotation names; an int passes for a float, a bool for nothing else."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint) and not isinstance(value, bool)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) if hint is float else isinstance(value, hint)


def check_types(config: Any, section: str) -> None:
    """Check every field of a config dataclass against its annotation; for use in `__post_init__`."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        field = f"{section}.{name}" if section else name
        check(fits(value, hint), field, value, f"must be {describe(hint)}")
        if isinstance(value, int | float):
            check(abs(value) < LARGEST, field, value, "must be a finite number")  # nan is not smaller than anything


def check_sizes(config: Any, section: str, limits: Mapping[str, tuple[int, int]]) -> None:
    """Check whole-number fields of a config against (smallest, largest)."""
    for name, (smallest, largest) in limits.items():
        value = getattr(config, name)
        check(smallest <= value <= largest, f"{section}.{name}", value, f"from {smallest} to {largest:,}")


def check_fractions(config: Any, section: str, *names: str) -> None:
    """Check shares of a config: from 0 up to, not including, 1."""
    for name in names:
        value = getattr(config, name)
        check(0 <= value < 1, f"{section}.{name}", value, "from 0 up to, not including, 1")


def unknown_key(key: str, known: Mapping[str, list[str]], section: str) -> ConfigError:
    """The error for a key that does not exist: it names the section and the nearest key of any section.

    known: section -> keys ("" is the top level).
    """
    paths = {f"{group}.{name}" if group else name: name for group, names in known.items() for name in names}
    place = f"section {section!r}" if section else "the top level"
    nearest = [path for path, name in paths.items() if name == key]
    if not nearest:
        beside = difflib.get_close_matches(key, known.get(section, []), n=1, cutoff=0.6)
        nearest = [f"{section}.{name}" if section else name for name in beside]
    if not nearest and section and len(known[section]) <= FEW_KEYS:
        return ConfigError(f"unknown key {key!r} in {place}; it has {', '.join(known[section])}")
    full = f"{section}.{key}" if section else key
    nearest = nearest or difflib.get_close_matches(full, list(paths), n=1, cutoff=0.5)
    if not nearest:
        nearest = [path for path, name in paths.items() if difflib.get_close_matches(key, [name], cutoff=0.6)][:1]
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ConfigError(f"unknown key {key!r} in {place}{hint}")


def from_dict(cls: type[C], data: Any, section: str, known: Mapping[str, list[str]] | None = None) -> C:
    """Build a config from a plain dict, refusing keys that it does not have."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"section {section!r} must hold keys and values, not {data!r}")
    hints = field_types(cls)
    for key in data:
        if key not in hints:
            raise unknown_key(str(key), known or {section: list(hints)}, section)
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def without_added(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """`data`, the fields of a config, without those that were added later and hold their default: what a run of the time
    before them would have written, so that its name, a hash of its config, stays what it is."""
    added = {field.name: field.default for field in fields(config) if field.metadata.get("added")}
    return {name: value for name, value in data.items() if name not in added or value != added[name]}


def to_dict(config: Any) -> dict[str, Any]:
    """The fields of a config as plain values."""
    return asdict(config)
