"""Attention as a hypernetwork: the HYLA layer, compositional tasks, exact training, and the papers' comparisons.

Names load on first use, so that `import hyla` is quick and reports are built without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "hyper_attention": "hyla.attention",
    "MultiHeadAttention": "hyla.attention",
    "MECHANISMS": "hyla.attention",
    "Mechanism": "hyla.attention",
    "ValueNetwork": "hyla.attention",
    "Transformer": "hyla.models.transformer",
    "TransformerConfig": "hyla.models.transformer",
    "FuzzyLogic": "hyla.tasks.fuzzy_logic",
    "LogicConfig": "hyla.tasks.fuzzy_logic",
    "Sraven": "hyla.tasks.sraven",
    "SravenConfig": "hyla.tasks.sraven",
    "TrainConfig": "hyla.training.config",
    "train": "hyla.training.loop",
    "resume": "hyla.training.loop",
    "evaluate": "hyla.training.loop",
    "load_model": "hyla.training.loop",
    "open_run": "hyla.runs",
}

__all__ = [
    "MECHANISMS",
    "FuzzyLogic",
    "LogicConfig",
    "Mechanism",
    "MultiHeadAttention",
    "Sraven",
    "SravenConfig",
    "TrainConfig",
    "Transformer",
    "TransformerConfig",
    "ValueNetwork",
    "__version__",
    "evaluate",
    "hyper_attention",
    "load_model",
    "open_run",
    "resume",
    "train",
]

if TYPE_CHECKING:
    from hyla.attention import MECHANISMS, Mechanism, MultiHeadAttention, ValueNetwork, hyper_attention
    from hyla.models.transformer import Transformer, TransformerConfig
    from hyla.runs import open_run
    from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
    from hyla.tasks.sraven import Sraven, SravenConfig
    from hyla.training.config import TrainConfig
    from hyla.training.loop import evaluate, load_model, resume, train


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'hyla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
