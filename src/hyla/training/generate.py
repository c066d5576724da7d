"""Text from a trained text run, or from the folder that `hyla export` made of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hyla.errors import check
from hyla.models.transformer import Transformer
from hyla.runs import open_run
from hyla.tasks.text import Text
from hyla.tasks.tokenizer import TextTokenizer, load_tokenizer
from hyla.training.config import config_from_dict
from hyla.training.loop import load_model, resolve_device

if TYPE_CHECKING:
    from hyla.models.causal_lm import HylaForCausalLM

AT_ONCE = 64  # texts that are written side by side


@dataclass(frozen=True)
class Sampling:
    """How text is drawn. num_tokens: at most as many new ones. temperature: divides the logits; 0 takes the likeliest
    token. top_k: draw from so many of the likeliest tokens; 0 for all. num: texts for each prompt."""

    num_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    num: int = 1

    def __post_init__(self) -> None:
        check(self.num_tokens >= 1, "num_tokens", self.num_tokens, "at least 1")
        possible = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6
        check(possible, "temperature", self.temperature, "0 for the likeliest token, or from 1e-6 to 1e6")
        check(self.top_k >= 0, "top_k", self.top_k, "at least 1, or 0 for all tokens")
        check(0 <= self.seed < 2**63, "seed", self.seed, "0 or more")
        check(self.num >= 1, "num", self.num, "at least 1")
        alike = "at temperature 0 every text of a prompt is the same; ask for 1"
        check(self.num == 1 or self.temperature > 0, "num", self.num, alike)


class Generated(NamedTuple):
    """text: the prompt and what follows it. num_tokens: of both, without the end-of-text tokens around them. ended:
    whether the model ended it, rather than `num_tokens` of the sampling."""

    text: str
    num_tokens: int
    ended: bool


def check_text_run(path: Path) -> None:
    """ConfigError unless the run in `path` is of task `text`; RunError where there is none."""
    name = config_from_dict(open_run(path).config).task_name
    check(name == Text.name, "task.name", name, f"{path} must be a run of hyla train text")


def open_text_run(path: Path, step: int | None = None) -> tuple[HylaForCausalLM, TextTokenizer]:
    """The model of a text run, after its last checkpoint or `step`, and its tokenizer. ConfigError for another task,
    MissingExtraError without transformers."""
    from hyla.models.causal_lm import from_transformer  # takes seconds: after the mistakes that are found in less

    check_text_run(path)
    model, task, _ = load_model(path, step)
    assert isinstance(task, Text)
    assert isinstance(model, Transformer)
    tokenizer = task.tokenizer
    return from_transformer(model, end_of_text=tokenizer.end_id, sequence_length=task.sequence_length), tokenizer


def open_language_model(path: Path, step: int | None = None) -> tuple[HylaForCausalLM, TextTokenizer]:
    """(model, tokenizer) of a text run, as :func:`open_text_run`, or of a folder made by `hyla export`."""
    if "model_type" not in open_run(path).config:
        return open_text_run(path, step)
    from hyla.models.causal_lm import HylaForCausalLM

    check(step is None, "step", step, f"{path} was exported at one step; name the run itself")
    model = HylaForCausalLM.from_pretrained(path, device_map={"": resolve_device("auto")})
    return model, load_tokenizer(str(path))


@torch.no_grad()
def generate(
    model: HylaForCausalLM, tokenizer: TextTokenizer, prompts: Sequence[str] = ("",), sampling: Sampling = Sampling()
) -> Iterator[Generated]:
    """`sampling.num` texts for each prompt in turn, the same ones for the same seed, prompts and sampling.

    A prompt is the beginning of a text: as in training, the end-of-text token comes before it. A text ends where the model
    ends it. Prompts of different lengths are padded on the left, which changes no probability.
    """
    rows = [tokenizer.encode([prompt])[0].tolist() for prompt in prompts for _ in range(sampling.num)]
    device = model.device
    options: dict[str, object] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": 1.0}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        drawn = []
        for start in range(0, len(rows), AT_ONCE):
            group = rows[start : start + AT_ONCE]
            length = max(map(len, group))
            padded = [[tokenizer.end_id] * (1 + length - len(ids)) + ids for ids in group]
            real = [[0] * (length - len(ids)) + [1] * (1 + len(ids)) for ids in group]
            ids_BT = model.generate(  # type: ignore[attr-defined]  # its protocol asks for what few models have
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(real, device=device),
                max_new_tokens=sampling.num_tokens,
                eos_token_id=tokenizer.end_id,
                pad_token_id=tokenizer.end_id,
                use_cache=True,
                **options,
            )
            drawn += [[*ids, *row] for ids, row in zip(group, ids_BT[:, length + 1 :].tolist(), strict=True)]
    for ids, given in zip(drawn, rows, strict=True):
        ended = tokenizer.end_id in ids[len(given) :]
        ids = ids[: ids.index(tokenizer.end_id, len(given))] if ended else ids
        yield Generated(tokenizer.decode(ids), len(ids), ended)
