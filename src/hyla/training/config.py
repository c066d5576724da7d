"""What a run is: task, model, optimiser, loop and seed, with the named presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from hyla.configs import check_types, from_dict, to_dict, unknown_key
from hyla.errors import ConfigError, check
from hyla.models.transformer import Transformer, TransformerConfig
from hyla.tasks.base import Task
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.sraven import Sraven, SravenConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up."""

    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay: Literal["reference", "matrices"] = "reference"
    """What is decayed. reference: matrices, tables and the biases of queries, keys and values, as in P1's public code.
    matrices: no bias."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    schedule: Literal["cosine", "reference", "constant"] = "cosine"
    """After warm-up. cosine: down to final_lr_fraction at the last step. reference: the same, ending one warm-up early, as
    in P1's public code. constant: stays at lr."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    final_lr_fraction: float = 0.1
    """Share of lr at which a cosine ends."""
    clip_norm: float | None = None
    """Largest norm of the gradient; larger ones are scaled down."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        check(self.lr > 0, "optimizer.lr", self.lr, "above 0")
        check(self.eps > 0, "optimizer.eps", self.eps, "above 0")
        check(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        for name in ("beta1", "beta2"):
            check(
                0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "from 0 up to, not including, 1"
            )
        check(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")
        check(0 <= self.final_lr_fraction <= 1, "optimizer.final_lr_fraction", self.final_lr_fraction, "from 0 to 1")
        check(self.clip_norm is None or self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "above 0, or null")


@dataclass(frozen=True)
class LoopConfig:
    """How long to train, and what to write down."""

    steps: int = 2_000
    """Gradient steps."""
    batch_size: int = 128
    """Sequences of a step."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 500
    """Steps between evaluations of every split; the last step is always evaluated."""
    eval_samples: int = 2_048
    """Sequences per split in the evaluations on the way."""
    final_eval_samples: int = 16_000
    """Sequences per split in the evaluation after the last step."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept, besides the best one."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """bf16 is autocast: weights and optimiser stay float32."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes CUDA where there is one."""
    threads: int | None = None
    """CPU threads; torch's own choice by default."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Also send metrics there (each an extra: pip install 'hyla[tensorboard]')."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        for name in ("steps", "batch_size", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"):
            check(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        for name in ("eval_samples", "final_eval_samples"):
            check(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        check(
            self.threads is None or 1 <= self.threads <= 4_096, "training.threads", self.threads, "1 to 4096, or null"
        )
        check(self.batch_size <= 2**20, "training.batch_size", self.batch_size, f"at most {2**20:,}")
        kind = self.device.split(":")[0]
        check(kind in ("auto", "cpu", "cuda", "mps"), "training.device", self.device, "auto, cpu, cuda, cuda:N or mps")


@dataclass(frozen=True)
class TrainConfig:
    """One run. `seed` sets initialisation and data; `task.split_seed` sets which combinations are held out."""

    task: LogicConfig | SravenConfig = field(default_factory=LogicConfig)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        check(whole and self.seed >= 0, "seed", self.seed, "a whole number, 0 or more")
        if self.optimizer.schedule == "reference":
            warmup, steps = self.optimizer.warmup_steps, self.training.steps
            allowed = (
                f"schedule 'reference' needs more than twice the warm-up of {warmup}; use --optimizer.schedule cosine"
            )
            check(steps > 2 * warmup, "training.steps", steps, allowed)

    @property
    def task_name(self) -> str:
        return next(name for name, (config, _) in TASKS.items() if isinstance(self.task, config))


# name on the command line -> (config, task)
TASKS: dict[str, tuple[type, type]] = {"logic": (LogicConfig, FuzzyLogic), "sraven": (SravenConfig, Sraven)}
SECTIONS = {"model": TransformerConfig, "optimizer": OptimizerConfig, "training": LoopConfig}


def make_task(config: TrainConfig) -> Task:
    """The task of a run."""
    return TASKS[config.task_name][1](config.task, config.seed)


def make_model(config: TrainConfig, task: Task) -> Transformer:
    """The model of a run, with fresh weights from torch's global generator."""
    return Transformer(
        config.model, sequence_length=task.sequence_length, input_dim=task.input_dim, output_dim=task.output_dim
    )


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values, as `config.json` holds them; the task's name stands in its section."""
    data = to_dict(config)
    data["task"] = {"name": config.task_name} | data["task"]
    data["training"]["trackers"] = list(config.training.trackers)
    return data


def config_from_dict(data: Any, base: TrainConfig | None = None) -> TrainConfig:
    """The inverse of :func:`config_to_dict`; what is missing comes from `base` or the defaults.

    Raises ConfigError for a key that does not exist, naming its section and the nearest one that does.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"a config holds sections {', '.join(['task', *SECTIONS])} and seed, not {data!r}")
    task_data = data.get("task", {})
    if not isinstance(task_data, Mapping):
        raise ConfigError(f"section 'task' must hold keys and values, not {task_data!r}")
    name = task_data.get("name", base.task_name if base else "logic")
    check(isinstance(name, str) and name in TASKS, "task.name", name, f"choose from {', '.join(TASKS)}")
    check(base is None or name == base.task_name, "task.name", name, f"this is a config for {base and base.task_name}")
    base = base or TrainConfig(task=TASKS[name][0]())
    known = {section: [f.name for f in fields(cls)] for section, cls in SECTIONS.items()}
    known = {"": ["task", *SECTIONS, "seed"], "task": ["name", *(f.name for f in fields(TASKS[name][0]))]} | known
    parts: dict[str, Any] = {}
    for key, value in data.items():
        if key == "run":  # what was found at the start of a run: versions, device
            continue
        if key not in known[""]:
            raise unknown_key(str(key), known, "")
        if key == "seed":
            parts[key] = value
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"section {key!r} must hold keys and values, not {value!r}")
        merged = to_dict(getattr(base, key)) | {k: v for k, v in value.items() if (key, k) != ("task", "name")}
        parts[key] = from_dict(type(getattr(base, key)), merged, key, known)
    return replace(base, **parts)


def preset_default(task: str) -> TrainConfig:
    """P1's sizes and hyperparameters (its grid's lr 1e-3 and weight decay 0.1), with few steps."""
    if task == "logic":
        return TrainConfig(LogicConfig(), TransformerConfig(attention_dropout=0.1))
    model = TransformerConfig(num_layers=4, num_heads=16, qk_dim=64, v_dim=64, attention_dropout=0.1)
    return TrainConfig(SravenConfig(), model, OptimizerConfig(warmup_steps=200))


def preset_paper(task: str) -> TrainConfig:
    """P1's experiment: 50,000 steps of fuzzy logic (four variables, two terms, 70% held out, 32 points), or 156,250 steps
    (20 million instances) of SRAVEN, on the public code's schedule."""
    base = preset_default(task)
    steps, warmup, samples = (50_000, 100, 16_000) if task == "logic" else (156_250, 1_000, 51_200)
    loop = replace(
        base.training, steps=steps, log_every=100, eval_every=10_000, eval_samples=samples, final_eval_samples=samples
    )
    optimizer = replace(base.optimizer, warmup_steps=warmup, schedule="reference")
    return replace(base, optimizer=optimizer, training=replace(loop, checkpoint_every=1_000))


PRESETS = {"default": preset_default, "paper": preset_paper}
