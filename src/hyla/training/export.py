"""A trained text run as a folder of Hugging Face `transformers`: weights, configs, tokenizer and a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hyla
from hyla.errors import check
from hyla.runs import Run, check_free, open_run, read_json, whole_folder
from hyla.tasks.hub import PREFIX
from hyla.tasks.text import DATA, TextConfig
from hyla.training.checkpoint import is_whole, list_checkpoints
from hyla.training.config import TrainConfig, config_from_dict
from hyla.training.generate import check_text_run, open_text_run

CARD = "README.md"


def export_run(run: Path, out: Path, step: int | None = None) -> Path:
    """Write the model of a text run, after its last checkpoint or `step`, to the new folder `out`: all of it or nothing.

    `import hyla.models.causal_lm` registers its class; then `AutoModelForCausalLM.from_pretrained(out)` and
    `AutoTokenizer.from_pretrained(out)` load it. README.md is its model card.

    Raises ConfigError for another task, for what :func:`hyla.models.causal_lm.from_transformer` cannot take and where `out`
    exists; RunError where there is no such run or checkpoint; MissingExtraError without transformers.
    """
    run, out = Path(run), Path(out)
    check_text_run(run)
    check(not out.exists(), "out", str(out), "it exists; choose another folder")
    check_free(out)  # whether its parent can be written to
    model, tokenizer = open_text_run(run, step)
    if step is None:
        step = [number for number, path in list_checkpoints(Run(run).checkpoints) if is_whole(path)][-1]
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        for path in folder.iterdir():  # safetensors writes for the owner alone; others may read as they may elsewhere
            path.chmod(0o644)
        tokenizer.save(folder)
        (folder / CARD).write_text(model_card(open_run(run), step, model.num_parameters()), encoding="utf-8")
    return out


def model_card(run: Run, step: int, num_parameters: int) -> str:
    """What the model is, how to load it, what it was trained on and how well it predicts, in Markdown."""
    config = config_from_dict(run.config)
    assert isinstance(config.task, TextConfig)
    sizes = ", ".join(f"{name} {getattr(config.model, name)}" for name in SIZES)
    facts = {
        "Task": f"language modelling (`hyla train text`), next token of texts, sequences of {config.task.sequence_length}",
        "Mechanism": f"`{config.mechanism}`",
        "Sizes": f"{num_parameters:,} parameters; {sizes}",
        "Data": _data(run, config.task),
        "Training": f"step {step:,} of {config.training.steps:,}, {config.training.batch_size} sequences each, "
        f"seed {config.seed}",
        "Library": f"exported by hyla {hyla.__version__}, trained by hyla "
        f"{run.config.get('run', {}).get('hyla', 'of an unknown version')}",
    }
    listed = "\n".join(f"- **{name}**: {text}" for name, text in facts.items())
    parts = [FRONT, f"# {run.path.absolute().name}", INTRODUCTION, listed, "## How to load it", LOADING]
    return "\n\n".join([*parts, "## Scores", _scores(run, config, step)]) + "\n"


SIZES = ("num_layers", "embed_dim", "num_heads", "mlp_dim", "positions")

FRONT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [hyla]
---"""

INTRODUCTION = """A language model whose attention is a hypernetwork, or a baseline of one: trained and exported by the
library `hyla`."""

LOADING = """```bash
pip install 'hyla[hf]'
```

```python
import hyla.models.causal_lm  # registers the class
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # of this file
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
# every text was trained with the end-of-text token before it
inputs = tokenizer(tokenizer.bos_token + "Once", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```

Or `hyla generate . --prompt Once`."""


def _data(run: Run, task: TextConfig) -> str:
    """Names of the data, without the folders of the machine that it lay on, and how much it is."""
    names = ", ".join(f"`{name if name.startswith(PREFIX) else Path(name).absolute().name}`" for name in task.data)
    if not (run.path / DATA).exists():
        return names
    found = read_json(run.path / DATA)
    amounts = (f"{found[kind]['train']:,} {kind}" for kind in ("documents", "tokens", "bytes"))
    return f"{names}: {', '.join(amounts)} to train on; held out by {found['held_out_by']}"


def _scores(run: Run, config: TrainConfig, step: int) -> str:
    """The scores of every split at `step`, as a table."""
    splits: dict[str, dict[str, Any]] = {}
    for line in [*run.metrics.read(), run.result or {}]:  # the result measures the last step, as its own line does
        if line.get("step") == step and line.get("splits"):
            splits = line["splits"]
    if not splits:
        return f"Not measured at step {step:,}."
    names = list(next(iter(splits.values())))
    head = ["split", *(name.replace("num_samples", "sequences").replace("_", " ") for name in names)]
    rows = [[split, *(_number(scores.get(name)) for name in names)] for split, scores in splits.items()]
    table = [head, ["---"] * len(head), *rows]
    note = f"At step {step:,}; loss in nats per token. Text of split `held_out` was not trained on."
    if config.training.steps != step:
        note += f" The run is set to {config.training.steps:,} steps."
    return "\n".join("| " + " | ".join(row) + " |" for row in table) + f"\n\n{note}"


def _number(value: int | float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
