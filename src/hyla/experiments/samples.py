"""Examples of a task for people (text, pictures) and programs (JSON lines, Parquet)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hyla.errors import ConfigError, MissingExtraError, check
from hyla.report import drawings, episodes, networks, supports
from hyla.tasks.base import Batch, Task
from hyla.tasks.fuzzy_logic import FuzzyLogic
from hyla.tasks.grid import PADDING, GridTask
from hyla.tasks.hyperteacher import Hyperteacher
from hyla.tasks.preference_grid import PreferenceGrid
from hyla.tasks.sraven import RULES, Sraven
from hyla.tasks.text import NOTHING, Text


def draw_samples(task: Task, split: str, count: int) -> Iterator[tuple[int, Batch]]:
    """(number, batch of one) for the first `count` samples of a split's evaluation stream, or all there are."""
    size, available = task.evaluation_batch, task.size(split)
    count = count if available is None else min(count, available)
    for start in range(0, count, size):
        batch = task.batch(split, start // size, size, stream="evaluation")
        for at in range(min(size, count - start)):
            latents = {name: value[at : at + 1] for name, value in batch.latents.items()}
            yield start + at, Batch(batch.inputs[at : at + 1], batch.targets[at : at + 1], latents)


def logic_parts(one: Batch) -> tuple[Any, Any, Any]:
    """(terms, points, values) of one fuzzy-logic sequence, the answer in its place."""
    values = torch.cat([one.inputs[0, :-1, -1], one.targets[0]])
    return one.latents["term_bits"][0].numpy(), one.inputs[0, :, :-1].numpy(), values.numpy()


def text_tokens(one: Batch) -> list[int]:
    """The T + 1 tokens of one sequence (fewer at the end of a split): the model reads all but the last, and predicts all
    but the first."""
    count = int((one.targets[0] != NOTHING).sum())
    return [*one.inputs[0, :count].tolist(), int(one.targets[0, count - 1])]


def packed_text(task: Text, one: Batch) -> str:
    """The documents of one sequence, each end-of-text token on a line of its own."""
    tokens, end = text_tokens(one), task.tokenizer.end_id
    starts = [at for at, token in enumerate(tokens) if token == end and at > 0]
    parts = []
    for first, last in pairwise([0, *starts, len(tokens)]):
        begins = tokens[first] == end
        parts += [task.tokenizer.end_of_text] if begins else []
        parts += [task.tokenizer.decode(tokens[first + begins : last])] if first + begins < last else []
    return "\n".join(parts)


def sample_row(task: Task, split: str, number: int, one: Batch) -> dict[str, Any]:
    """One sample as plain values."""
    row: dict[str, Any] = {"task": task.name, "split": split, "number": number}
    if isinstance(task, Text):
        tokens = text_tokens(one)
        return row | {"text": task.tokenizer.decode(tokens), "tokens": tokens}
    if isinstance(task, FuzzyLogic):
        terms, points, values = logic_parts(one)
        row |= {"formula": drawings.formula(terms), "terms": terms.tolist(), "points": points.tolist()}
        return row | {"values": values.tolist(), "answer": one.targets[0, 0].item()}
    if isinstance(task, GridTask):
        scene, course = episode_parts(task, one)
        row |= {"task_latent": one.latents["task"][0].tolist(), "title": scene.title, "walls": scene.walls}
        row |= {"objects": scene.objects, "kinds": scene.kinds, "agent": course.agent}
        return row | {"rewards": course.rewards, "answer": course.actions}
    if isinstance(task, Hyperteacher):
        row |= {"task_latent": one.latents["task"][0].tolist(), "encoding": encoding_of(task, one).tolist()}
        return row | {"points": points_of(task, one).tolist(), "answer": one.targets[0].tolist()}
    rules = one.latents["rules"][0].tolist()
    row |= {"rules": [RULES[rule] for rule in rules], "permutations": one.latents["permutations"][0].tolist()}
    return row | {"panels": one.latents["panels"][0].tolist(), "answer": one.targets[0].tolist()}


def _sraven_arguments(task: Sraven, one: Batch) -> tuple[dict[str, Any], Any]:
    rules = [RULES[rule] for rule in one.latents["rules"][0].tolist()]
    arguments = {"panels": one.latents["panels"][0].numpy(), "rules": rules, "num_values": task.config.num_values}
    return arguments, one.latents["permutations"][0].numpy() if task.config.permute_features else None


def episode_parts(task: GridTask, one: Batch) -> tuple[episodes.Scene, episodes.Course]:
    """The world of one episode, and its demonstration."""
    drawn = task.episodes_of(one.latents)
    shown = task.replay(drawn, one.targets)
    count = int((one.targets[0] != PADDING).sum())
    agent = [*shown.agent[0, :count].tolist(), int(shown.last.agent)]
    course = episodes.Course(
        actions=[task.action_names[action] for action in one.targets[0, :count].tolist()],
        rewards=shown.rewards[0, :count].tolist(),
        agent=[divmod(cell, task.walls.shape[-1]) for cell in agent],
        taken=[*shown.taken[0, :count].tolist(), shown.last.taken[0].tolist()],
    )
    return episodes.Scene(**task.scene(drawn)), course


def encoding_of(task: Hyperteacher, one: Batch) -> torch.Tensor:
    return task.layout.unpack(one.inputs)[0][0]


def points_of(task: Hyperteacher, one: Batch) -> torch.Tensor:
    return task.layout.unpack(one.inputs)[1][0]


def _network_arguments(task: Hyperteacher, one: Batch) -> dict[str, Any]:
    latent, points = one.latents["task"][0], points_of(task, one)
    return {"latent": latent.tolist(), "points": points.tolist(), "answers": one.targets[0].tolist()}


def sample_text(task: Task, one: Batch) -> str:
    """One sample for a reader."""
    if isinstance(task, Text):
        return packed_text(task, one)
    if isinstance(task, Hyperteacher):
        return networks.network_text(**_network_arguments(task, one))
    if isinstance(task, Sraven):
        arguments, order = _sraven_arguments(task, one)
        return drawings.puzzle_text(**arguments, permutations=order)
    if isinstance(task, GridTask):
        return episodes.episode_text(*episode_parts(task, one))
    return drawings.function_text(*logic_parts(one))


def draw_sample(task: Task, one: Batch, path: Path) -> Path:
    """One sample as a picture; an animation if `path` ends in `.gif`."""
    if isinstance(task, Hyperteacher):
        return networks.draw_network(**_network_arguments(task, one), path=path)
    if isinstance(task, GridTask):
        draw = episodes.animate_episode if path.suffix == ".gif" else episodes.draw_episode
        return draw(*episode_parts(task, one), path)
    if isinstance(task, Sraven):
        arguments, order = _sraven_arguments(task, one)
        return drawings.draw_puzzle(**arguments, path=path, permutations=order)
    return drawings.draw_function(*logic_parts(one), path)


def write_samples(task: Task, split: str, count: int, form: str, out: Path | None) -> Iterator[str | Path]:
    """Write the samples as `text`, `png`, `gif`, `jsonl` or `parquet`, or the task's support as a picture (`support`);
    yields the texts to print, or the files written.

    Raises ConfigError before anything is written for what cannot be drawn, MissingExtraError where a package is missing.
    """
    samples = draw_samples(task, split, count)
    stem = f"{task.name}-{split}"
    if form == "text" and out is None:
        for number, one in samples:
            yield f"--- {stem} {number}\n{sample_text(task, one)}"
        return
    if form == "jsonl" and out is None:
        for number, one in samples:
            yield json.dumps(sample_row(task, split, number, one), ensure_ascii=False)
        return
    assert out is not None
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out = {str(out)!r} is not possible: it is a file")
    if form in ("png", "gif", "support"):
        check_drawable(task, form)
    write_table = parquet_writer() if form == "parquet" else None
    out.mkdir(parents=True, exist_ok=True)
    if form == "support":
        yield from draw_support(task, out / f"{task.name}-support")
        return
    if form in ("png", "gif"):
        for number, one in samples:
            yield draw_sample(task, one, out / f"{stem}-{number:03d}.{form}")
        return
    path = out / f"{stem}.{'txt' if form == 'text' else form}"
    if write_table is not None:
        write_table([sample_row(task, split, number, one) for number, one in samples], path)
    else:
        with open(path, "w", encoding="utf-8") as file:
            for number, one in samples:
                row = sample_row(task, split, number, one)
                text = json.dumps(row, ensure_ascii=False) if form == "jsonl" else sample_text(task, one)
                file.write(text + "\n")
    yield path


def draw_support(task: Task, path_stem: Path) -> tuple[Path, Path]:
    """Which combinations of modules a task trains on, as a picture (.png and .svg)."""
    assert isinstance(task, Hyperteacher | PreferenceGrid)
    rows = {split: rows.numpy() for split, rows in task.combinations.items()}
    count = task.support.num_modules
    return supports.draw_support(rows["train"], rows["held_out"], count, path_stem, task.support.name)


def parquet_writer() -> Callable[[list[dict[str, Any]], Path], None]:
    """A function that writes rows to a Parquet file; MissingExtraError where that needs a package that is not there."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", "--format parquet") from None
    return lambda rows, path: parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def check_drawable(task: Task, form: str = "png") -> None:
    """Raise ConfigError with the reason if a task's samples are too large for a picture, or stand still, or are text."""
    check(not isinstance(task, Text), "format", form, "text cannot be drawn; choose text, jsonl or parquet")
    if form == "support":
        has = isinstance(task, Hyperteacher | PreferenceGrid)
        check(has, "format", form, f"task {task.name} is not made of modules; hyperteacher and preference are")
    if form == "gif":
        moving = isinstance(task, GridTask)
        check(
            moving, "format", form, f"task {task.name} has no episodes to animate; --format png draws a still picture"
        )
        episodes.check_pillow()
    limits = (drawings.MAX_FEATURES, drawings.MAX_VALUES)
    if isinstance(task, Sraven) and (task.config.num_features > limits[0] or task.config.num_values > limits[1]):
        raise ConfigError(
            f"format = 'png' is not possible for {task.config.num_features} features and {task.config.num_values} values: "
            f"at most {limits[0]} and {limits[1]} can be told apart by eye; use --format text"
        )
