"""Shapes and types of every public signature are checked while the tests run (jaxtyping with beartype)."""

import os
from pathlib import Path

# Each of the processes that share the tests computes with one thread: with more than there are cores, they wait for each
# other. The libraries read it when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from jaxtyping import install_import_hook

if os.environ.get("HYLA_TYPECHECK", "1") == "1":
    install_import_hook("hyla", "beartype.beartype")

import torch

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(items):
    """What is long and must run in one process comes first, so that the other processes share the rest meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of values measured on the public code."""
    return GOLDEN


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def unchecked():
    """Turn the checking of signatures off, to meet the library's own errors as a user does."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
