"""Errors that are the user's to mend. The command line prints their message, without a traceback."""


class HylaError(Exception):
    """Base of every error below. exit_status: what the command line exits with."""

    exit_status = 2


class ConfigError(HylaError, ValueError):
    """A setting that cannot work; the message names the field, its value and what is allowed."""


class RunError(HylaError, RuntimeError):
    """A run folder that cannot be used as asked: missing, of another run, or damaged."""


class NoWholeCheckpointError(RunError):
    """A run has checkpoints, but none of them is whole."""


class CheckpointError(RunError):
    """A checkpoint could not be written, for example because the disk is full."""

    exit_status = 1


class DivergedError(HylaError, ArithmeticError):
    """Training met a loss that is not finite."""

    exit_status = 1


class MissingExtraError(HylaError, ImportError):
    """An optional dependency is not installed; the message says how to get it."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs {package}, which is not installed. Run: pip install 'hyla[{extra}]'")


def check(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise :class:`ConfigError` naming `field`, `value` and what is `allowed` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field} = {value!r} is not possible: {allowed}")
