"""What a run is: task, model, optimiser, loop and seed, with the named presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hyla.configs import ADDED, check_types, from_dict, to_dict, unknown_key
from hyla.errors import ConfigError, check
from hyla.models.base import Model
from hyla.models.hypernetwork import Hypernetwork, HypernetworkConfig
from hyla.models.mlp import MLP, MLPConfig
from hyla.models.transformer import Transformer, TransformerConfig
from hyla.tasks.base import Task, ToldTask
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.goal_grid import GoalConfig, GoalGrid
from hyla.tasks.hyperteacher import Hyperteacher, HyperteacherConfig
from hyla.tasks.preference_grid import PreferenceConfig, PreferenceGrid
from hyla.tasks.sraven import Sraven, SravenConfig
from hyla.tasks.text import Text, TextConfig


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
    micro_batch_size: int | None = field(default=None, metadata=ADDED)
    """Sequences that a process computes at a time, where its share of a step does not fit into memory; gradients add up
    to those of the whole step."""
    parallel: Literal["ddp", "fsdp"] = field(default="ddp", metadata=ADDED)
    """With several processes (torchrun). ddp: each holds the whole model. fsdp: the model is shared out among them."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        for name in ("steps", "batch_size", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"):
            check(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        for name in ("eval_samples", "final_eval_samples"):
            check(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        check(
            self.threads is None or 1 <= self.threads <= 4_096, "training.threads", self.threads, "1 to 4096, or null"
        )
        micro = self.micro_batch_size
        check(micro is None or micro >= 1, "training.micro_batch_size", micro, "at least 1, or null")
        check(self.batch_size <= 2**20, "training.batch_size", self.batch_size, f"at most {2**20:,}")
        kind = self.device.split(":")[0]
        check(kind in ("auto", "cpu", "cuda", "mps"), "training.device", self.device, "auto, cpu, cuda, cuda:N or mps")


TaskConfig = LogicConfig | SravenConfig | HyperteacherConfig | PreferenceConfig | GoalConfig | TextConfig
ModelConfig = TransformerConfig | MLPConfig | HypernetworkConfig


@dataclass(frozen=True)
class TrainConfig:
    """One run. `seed` sets initialisation and data; `task.split_seed` sets which combinations are held out."""

    task: TaskConfig = field(default_factory=LogicConfig)
    model: ModelConfig = field(default_factory=TransformerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        check(whole and self.seed >= 0, "seed", self.seed, "a whole number, 0 or more")
        possible = TASKS[self.task_name].architectures
        allowed = f"task {self.task_name} trains {', '.join(possible)}"
        check(self.architecture_name in possible, "architecture", self.architecture_name, allowed)
        if isinstance(self.task, TextConfig):
            assert isinstance(self.model, TransformerConfig)
            allowed = "task text needs True: a query that sees its own answer predicts nothing"
            check(self.model.causal, "model.causal", self.model.causal, allowed)
            streams = self.task.num_streams if self.task.hub is not None else 1
            allowed = f"must be a multiple of task.num_streams = {streams}"
            check(self.training.batch_size % streams == 0, "training.batch_size", self.training.batch_size, allowed)
        if self.optimizer.schedule == "reference":
            warmup, steps = self.optimizer.warmup_steps, self.training.steps
            allowed = (
                f"schedule 'reference' needs more than twice the warm-up of {warmup}; use --optimizer.schedule cosine"
            )
            check(steps > 2 * warmup, "training.steps", steps, allowed)

    @property
    def task_name(self) -> str:
        return next(name for name, kind in TASKS.items() if isinstance(self.task, kind.config))

    @property
    def architecture_name(self) -> str:
        return next(name for name, (config, _) in ARCHITECTURES.items() if isinstance(self.model, config))

    @property
    def mechanism(self) -> str:
        """What tells models apart in names and reports: a transformer's mechanism, else the architecture."""
        return self.model.mechanism if isinstance(self.model, TransformerConfig) else self.architecture_name


class TaskKind(NamedTuple):
    """A task by name: its config, the task itself, and what can learn it, the usual choice first."""

    config: type
    task: type
    architectures: tuple[str, ...]

    @property
    def told(self) -> bool:
        """Whether it comes with an encoding, as the second paper's tasks do."""
        return issubclass(self.task, ToldTask)


ANY = ("mlp", "transformer", "hypernetwork")
TASKS: dict[str, TaskKind] = {
    "logic": TaskKind(LogicConfig, FuzzyLogic, ("transformer",)),
    "sraven": TaskKind(SravenConfig, Sraven, ("transformer",)),
    "hyperteacher": TaskKind(HyperteacherConfig, Hyperteacher, ANY),
    "preference": TaskKind(PreferenceConfig, PreferenceGrid, ANY),
    "goal": TaskKind(GoalConfig, GoalGrid, ANY),
    "text": TaskKind(TextConfig, Text, ("transformer",)),
}
# name on the command line -> (config, model)
ARCHITECTURES: dict[str, tuple[type, type]] = {
    "transformer": (TransformerConfig, Transformer),
    "mlp": (MLPConfig, MLP),
    "hypernetwork": (HypernetworkConfig, Hypernetwork),
}
SECTIONS = ("model", "optimizer", "training")


def make_task(config: TrainConfig, folder: Path | None = None) -> Task:
    """The task of a run; folder: where the run lies, whose tokenizer a text task takes."""
    if isinstance(config.task, TextConfig):
        return Text(config.task, config.seed, folder)
    return TASKS[config.task_name].task(config.task, config.seed)


def make_model(config: TrainConfig, task: Task) -> Model:
    """The model of a run, with fresh weights from torch's global generator."""
    if isinstance(config.model, TransformerConfig):
        width: dict[str, Any] = {"layout": task.layout, "output_dim": task.output_dim}
        if isinstance(task, Text):
            width = {"vocab_size": task.vocab_size, "boundary_token": task.boundary_token}
        elif task.layout is None:
            width = {"input_dim": task.input_dim, "output_dim": task.output_dim}
        return Transformer(config.model, sequence_length=task.sequence_length, **width)
    make = ARCHITECTURES[config.architecture_name][1]
    return make(config.model, layout=task.layout, output_dim=task.output_dim)


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values, as `config.json` holds them; the names of task and architecture stand in their sections."""
    data = to_dict(config)
    data["task"] = {"name": config.task_name} | data["task"]
    data["model"] = {"architecture": config.architecture_name} | data["model"]
    data["training"]["trackers"] = list(config.training.trackers)
    return data


def config_from_dict(data: Any, base: TrainConfig | None = None) -> TrainConfig:
    """The inverse of :func:`config_to_dict`; what is missing comes from `base` or the defaults.

    Raises ConfigError for a key that does not exist, naming its section and the nearest one that does.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"a config holds sections {', '.join(['task', *SECTIONS])} and seed, not {data!r}")
    name = _named(data, "task", "name", base.task_name if base else "logic", tuple(TASKS))
    check(base is None or name == base.task_name, "task.name", name, f"this is a config for {base and base.task_name}")
    if base is None:
        base = TrainConfig(task=TASKS[name].config(), model=P1_LANGUAGE if name == "text" else TransformerConfig())
    architecture = _named(data, "model", "architecture", base.architecture_name, TASKS[name].architectures)
    if architecture != base.architecture_name:
        base = replace(base, model=default_model(name, architecture))
    parts: dict[str, Any] = {section: getattr(base, section) for section in ("task", *SECTIONS)}
    names = {"task": "name", "model": "architecture"}
    known = {"": ["task", *SECTIONS, "seed"]}
    known |= {section: [f.name for f in fields(part)] for section, part in parts.items()}
    known |= {section: [key, *known[section]] for section, key in names.items()}
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
        merged = to_dict(parts[key]) | {k: v for k, v in value.items() if k != names.get(key)}
        parts[key] = from_dict(type(parts[key]), merged, key, known)
    return replace(base, **parts)


def _named(data: Mapping[str, Any], section: str, key: str, default: str, choices: tuple[str, ...]) -> str:
    """The name of a choice that decides which keys its section has."""
    values = data.get(section, {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"section {section!r} must hold keys and values, not {values!r}")
    name = values.get(key, default)
    check(isinstance(name, str) and name in choices, f"{section}.{key}", name, f"choose from {', '.join(choices)}")
    return name


# P1's public language model; its attention dropout, made for tasks of few tokens, is left out.
P1_LANGUAGE = TransformerConfig(
    num_layers=8,
    embed_dim=128,
    num_heads=16,
    qk_dim=128,
    v_dim=128,
    mlp="swiglu",
    mlp_dim=256,
    norm="rms",
    causal=True,
    dropout_shared=False,
)


def default_model(task: str, architecture: str) -> ModelConfig:
    """A model of the size that the task's paper uses."""
    if architecture == "mlp":
        return MLPConfig(num_layers=4 if task == "hyperteacher" else 2)
    if architecture == "hypernetwork":
        return HypernetworkConfig()
    if task == "logic":
        return TransformerConfig(attention_dropout=0.1)
    if task == "text":
        return replace(P1_LANGUAGE)
    if task == "sraven":
        return TransformerConfig(num_layers=4, num_heads=16, qk_dim=64, v_dim=64, attention_dropout=0.1)
    return TransformerConfig(
        mechanism="softmax",
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        qk_dim=256,
        v_dim=256,
        mlp_dim=1_024,
        positions="rotary",
        causal=True,
        bias=False,
        qk_norm=True,
    )


# P2's optimiser has a constant rate, no warm-up, and decays no bias: (lr, weight decay) of each of its tasks.
P2_RATES = {"hyperteacher": (3e-4, 0.003), "preference": (1e-4, 1e-3), "goal": (1e-3, 0.03)}


def preset_default(task: str, architecture: str | None = None) -> TrainConfig:
    """The papers' sizes and hyperparameters (of P1's grid lr 1e-3 and weight decay 0.1), with few steps.

    architecture: the first that the task trains by default.
    """
    model = default_model(task, architecture or TASKS[task].architectures[0])
    if task == "text":
        loop = LoopConfig(batch_size=32, eval_samples=256, final_eval_samples=4_096)
        return TrainConfig(TextConfig(), model, OptimizerConfig(clip_norm=1.0, decay="matrices"), loop)
    if task in P2_RATES:
        lr, weight_decay = P2_RATES[task]
        optimizer = OptimizerConfig(
            lr=lr, weight_decay=weight_decay, decay="matrices", schedule="constant", warmup_steps=0
        )
    else:
        optimizer = OptimizerConfig(warmup_steps=100 if task == "logic" else 200)
    return TrainConfig(TASKS[task].config(), model, optimizer)


# Steps, warm-up, steps between evaluations and sequences of each.
PAPER_LOOPS = {
    "logic": (50_000, 100, 10_000, 16_000),
    "sraven": (156_250, 1_000, 10_000, 51_200),
    "hyperteacher": (300_000, 0, 10_000, 1_024),
    "preference": (3_000_000, 0, 50_000, 1_024),
    "goal": (200_000, 0, 10_000, 1_024),
}


def preset_paper(task: str, architecture: str | None = None) -> TrainConfig:
    """The papers' experiments: 50,000 steps of fuzzy logic (four variables, two terms, 70% held out, 32 points), 156,250
    steps (20 million instances) of SRAVEN, both on P1's public schedule; 300,000 steps (38.4 million tasks) of the
    hyperteacher, 3 million of preference grids, 200,000 of goal grids."""
    if task == "text":
        return preset_c4_50m(task, architecture)
    base = preset_default(task, architecture)
    steps, warmup, eval_every, samples = PAPER_LOOPS[task]
    loop = replace(
        base.training,
        steps=steps,
        log_every=100,
        eval_every=eval_every,
        eval_samples=samples,
        final_eval_samples=samples,
    )
    optimizer = replace(base.optimizer, warmup_steps=warmup)
    if task not in P2_RATES:
        optimizer = replace(optimizer, schedule="reference")
    return replace(base, optimizer=optimizer, training=replace(loop, checkpoint_every=1_000))


def preset_tiny(task: str, architecture: str | None = None) -> TrainConfig:
    """P1's public language model with a vocabulary of 4,096 (1.9 million parameters), for a laptop: 3,000 steps of 2,048
    tokens."""
    base = preset_default(task, architecture)
    loop = replace(base.training, steps=3_000, batch_size=16, eval_samples=256, final_eval_samples=4_096)
    return replace(base, optimizer=replace(base.optimizer, lr=2e-3), training=loop)


def preset_c4_50m(task: str, architecture: str | None = None) -> TrainConfig:
    """P1's experiment on language: a decoder of 50 million parameters, 130 billion tokens of C4. Reported: HYLA is better
    than linear attention and close to softmax attention.

        torchrun --nproc-per-node 8 -m hyla train text --preset c4-50m --mechanism hyla --out runs/c4-hyla

    The paper gives the number of parameters and tokens alone; sizes, rates and T5's vocabulary are ours: width 512, 11
    blocks, 8 heads, SwiGLU 1,312, sequences of 1,024, 256 of them a step, 495,911 steps.

    Cost: 6 x 50 million x 130 billion = 4e19 operations besides attention's. At 40% of the 1e15 a second that an H100
    offers in bf16 that is 27 GPU hours; small matrices reach less, so expect 40 to 80 for softmax attention. HYLA's hidden
    layer of every pair adds to it (not measured on a GPU). C4 is streamed: 305 GB of compressed text.
    """
    base = preset_default(task, architecture)
    text = TextConfig(data=("hf:allenai/c4:en",), tokenizer="google-t5/t5-small", sequence_length=1_024, num_streams=64)
    model = replace(
        base.model, num_layers=11, embed_dim=512, num_heads=8, qk_dim=512, v_dim=512, mlp_dim=1_312, num_buckets=32
    )
    model = replace(model, max_distance=128)
    loop = replace(base.training, steps=495_911, batch_size=256, micro_batch_size=32, log_every=50, precision="bf16")
    loop = replace(loop, eval_every=5_000, eval_samples=1_024, final_eval_samples=4_096, checkpoint_every=1_000)
    optimizer = replace(base.optimizer, warmup_steps=2_000)
    return replace(base, task=text, model=model, optimizer=optimizer, training=loop)


PRESETS = {"default": preset_default, "paper": preset_paper}
TEXT_PRESETS = {"tiny": preset_tiny, "c4-50m": preset_c4_50m}


def presets_of(task: str) -> dict[str, Callable[..., TrainConfig]]:
    """The presets that a task has, by name."""
    return PRESETS | TEXT_PRESETS if task == "text" else dict(PRESETS)
