"""What torch.compile is told, without importing it: that takes half of the time in which a process starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def constant_result(function: F) -> F:
    """Sets the mark of `torch.compiler.assume_constant_result`: a compiled graph keeps what the function once returned."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
