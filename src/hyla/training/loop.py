"""Training: one step, evaluation, and the loop that writes a run folder and can be stopped anywhere.

Every random number is a pure function of the seed and the step (data, dropout) or of the seed alone (weights), so no
random state is carried: a run that is killed and resumed repeats the steps since its last checkpoint bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hyla
from hyla.attention import choose_backend, resolve_mechanism
from hyla.attention.functional import largest_eager_bytes
from hyla.errors import ConfigError, DivergedError, HylaError, NoWholeCheckpointError, RunError
from hyla.models.base import Model, ModelOutput
from hyla.models.transformer import TransformerConfig
from hyla.runs import CONFIG, RESULT, Run, check_free, create_run, open_run, write_json
from hyla.tasks.base import Batch, Task, check_split, entropy, overlap_rate
from hyla.tasks.grid import GridTask
from hyla.tasks.rollouts import play
from hyla.tasks.text import Text
from hyla.training.checkpoint import load_checkpoint, prune, save_checkpoint, save_sharded
from hyla.training.config import TrainConfig, config_from_dict, config_to_dict, make_model, make_task
from hyla.training.distributed import Ranks, Replica, own_part, whole
from hyla.training.optimizer import learning_rate, make_optimizer
from hyla.training.trackers import open_trackers

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}  # of the attention's inputs

PLAYED = 1_024  # episodes per split that a policy plays after its last step

Progress = Callable[[dict[str, Any]], None]


class InterruptedRunError(HylaError):
    """Training was asked to stop (Ctrl-C or SIGTERM), saved a checkpoint and ended."""

    def __init__(self, signal_number: int, path: Path, step: int):
        self.exit_status = 128 + signal_number  # 130 after Ctrl-C, 143 after SIGTERM
        super().__init__(f"stopped at step {step}; a checkpoint is saved. Go on with: hyla resume {path}")


def resolve_device(name: str) -> torch.device:
    """The device a run asks for; ConfigError if this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"training.device = {name!r} is not possible here: {reason}") from None
    return torch.device(name)


def fresh_model(config: TrainConfig, task: Task, device: torch.device) -> Model:
    """The model as it is before the first step: drawn on the CPU from the seed, the same for every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(entropy(config.seed, "initialisation")[0])
        model = make_model(config, task)
    dtype = torch.float64 if config.training.precision == "float64" else torch.float32
    return model.to(device, dtype)


def seed_dropout(seed: int, step: int, first_row: int = 0) -> None:
    """Make torch's generator, which dropout draws from, a function of the seed and the step; and of the first row of a part
    of a batch, where each part has masks of its own."""
    path = (step,) if first_row == 0 else (step, first_row)
    torch.manual_seed(entropy(seed, "dropout", *path)[0])


def compute_loss(
    model: Model,
    task: Task,
    batch: Batch,
    *,
    forward: Callable[..., ModelOutput] | None = None,
    parameters: dict[str, Tensor] | None = None,
    keep: Sequence[Tensor] | None = None,
) -> Tensor:
    """The training loss of a batch, a mixture's load balancing included. forward: what calls the model, where that is
    wrapped. With other `parameters` than the model's own, or dropout masks `keep` that are given rather than drawn, where
    an ensemble asks for it."""
    options: dict[str, Any] = {"predict_at": task.predict_at, "keep": keep}
    if parameters is None:
        out = (forward or model)(batch.inputs, **options)
    else:
        out = torch.func.functional_call(model, parameters, (batch.inputs,), options)
    loss = task.loss(out.predictions.to(torch.promote_types(out.predictions.dtype, torch.float32)), batch)
    if out.balance_loss is not None:
        loss = loss + model.config.balance_weight * out.balance_loss
    return loss


def apply_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, clip_norm: float | None) -> Tensor:
    """One update with the gradients at hand; returns their norm, before clipping."""
    if clip_norm is None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    norm = whole(norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def evaluate(
    model: Model,
    task: Task,
    splits: Sequence[str],
    num_samples: int,
    precision: str = "float32",
    ranks: Ranks | None = None,
) -> dict[str, dict[str, float]]:
    """Mean of every score over `num_samples` sequences of each split (or all there are), drawn on the CPU so that every
    device is measured on the same ones. Scores accumulate in float64. The model is put back into the mode it was in.

    ranks: processes that share the work, each sequence measured by one of them; all get the result, which is the same for
    any number of them.
    """
    ranks = ranks or Ranks()
    training = model.training
    model.eval()
    results = {}
    for split in splits:
        check_split(task, split)
        available = task.size(split)
        count = num_samples if available is None else min(num_samples, available)
        starts = range(0, count, task.evaluation_batch)
        sums: dict[int, dict[str, float]] = {}
        # every rank takes as many turns as any other, since a sharded model is gathered by all of them together
        for turn in range(0, len(starts), ranks.size):
            mine = turn + ranks.rank
            found = _summed_scores(model, task, split, starts[min(mine, len(starts) - 1)], count, precision)
            if mine < len(starts):
                sums[mine] = found
        sums = {number: found for part in ranks.gather(sums) for number, found in part.items()}
        totals: dict[str, float] = {}
        for number in sorted(sums):  # in one order, so that rounding does not depend on the ranks
            for name, total in sums[number].items():
                totals[name] = totals.get(name, 0.0) + total
        weight = totals.pop(WEIGHT)
        means = {name: total / weight for name, total in totals.items()}
        results[split] = means | task.summary(split, means) | {"num_samples": count}
    model.train(training)
    return results


WEIGHT = ""  # stands among the sums of scores for what they are divided by


def _summed_scores(model: Model, task: Task, split: str, start: int, count: int, precision: str) -> dict[str, float]:
    """Sums of the scores of one evaluation batch, which begins with sequence `start` of `count`."""
    parameter, size = next(model.parameters()), task.evaluation_batch
    # a short last batch is the head of a whole one, so that a sample does not depend on how many are asked for
    batch = task.batch(split, start // size, size, stream="evaluation", dtype=parameter.dtype)
    batch = batch.head(min(size, count - start)).to(parameter.device)
    with torch.autocast(parameter.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        predictions = model(batch.inputs, predict_at=task.predict_at).predictions
    weight_B = task.weights(batch).double() if task.scores_by_answer else torch.ones(len(batch), dtype=torch.float64)
    sums = {WEIGHT: weight_B.sum().item()}
    for name, score_B in task.scores(predictions.to(parameter.dtype), batch).items():
        sums[name] = (score_B.double() * weight_B.to(score_B.device)).sum().item()
    return sums


@dataclass(frozen=True)
class Environment:
    """What a run's bits depend on besides its config."""

    hyla: str
    torch: str
    python: str
    machine: str
    device: str
    threads: int
    backend: str
    ranks: int = 1

    @staticmethod
    def now(config: TrainConfig, task: Task, device: torch.device, ranks: int = 1) -> Environment:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        machine = f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        python, threads = platform.python_version(), torch.get_num_threads()
        backend = backend_of_run(config, task, device)
        return Environment(hyla.__version__, torch.__version__, python, machine, name, threads, backend, ranks)


def backend_of_run(config: TrainConfig, task: Task, device: torch.device) -> str:
    """The backend that the attention of a run's training batches takes, `none` for a model without attention; ConfigError
    if the one asked for by name cannot run."""
    model, dtype = config.model, DTYPES[config.training.precision]
    if not isinstance(model, TransformerConfig):
        return "none"
    shape = (config.training.batch_size, model.num_heads, task.sequence_length)
    widths = (model.qk_dim // model.num_heads, model.v_dim // model.num_heads)
    query, value = (torch.empty(*shape, width, dtype=dtype, device="meta") for width in widths)
    mechanism = resolve_mechanism(model.mechanism, model.score_norm, model.value_network)
    return choose_backend(
        model.backend,
        device=device.type,
        dtype=dtype,
        depth=model.value_network.depth,
        head_width=max(widths),
        eager_bytes=largest_eager_bytes(query, value, mechanism),
    )


class Trainer:
    """A run in progress. `Trainer.start` and `Trainer.resume` make one; `run()` trains to the end.

    Used as a library: `train(config, path)` and `resume(path)` below.
    """

    def __init__(self, config: TrainConfig, folder: Run, device: torch.device, ranks: Ranks | None = None):
        self.config, self.folder, self.device, self.ranks = config, folder, device, ranks or Ranks()
        self.rows = self.ranks.rows(config.training.batch_size)
        self.task = make_task(config, folder.path)
        self.about = self.task.prepare() if isinstance(self.task, Text) else ""  # what was found, for whoever watches
        self.model = fresh_model(config, self.task, device)
        self.replica = Replica(self.model, self.ranks, config.training.parallel, device)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.step = 0  # updates made
        self.best: dict[str, Any] | None = None
        self.seconds = 0.0  # of training, over all sittings
        self.notes: list[str] = []  # what whoever starts or resumes it should know
        self._signal: int | None = None
        self._agreed_signal: int | None = None
        self._tracker: Progress = lambda line: None
        self._window = (0.0, 0)  # when the steps since the last logged line began, and at which step
        self._saved_step: int | None = None

    @classmethod
    def start(cls, config: TrainConfig, path: Path | str) -> Trainer:
        """A new run; nothing is written before everything has been built."""
        ranks = Ranks.join()
        ranks.on_first(lambda: check_free(path))
        device = _prepare(config, ranks)
        trainer = cls(config, Run(Path(path)), device, ranks)
        warmup, steps = config.optimizer.warmup_steps, config.training.steps
        if warmup >= steps:
            trainer.notes.append(
                f"all {steps:,} steps are warm-up (optimizer.warmup_steps = {warmup:,}): the learning rate gets no further "
                f"than {learning_rate(config.optimizer, steps - 1, steps):.2g} of {config.optimizer.lr:.2g}"
            )
        trainer.next_batch()  # what cannot be drawn is met before there is a folder
        environment = Environment.now(config, trainer.task, device, ranks.size)
        ranks.on_first(lambda: create_run(path, config_to_dict(config) | {"run": vars(environment)}))
        return trainer

    @classmethod
    def resume(cls, path: Path | str, step: int | None = None) -> Trainer:
        """The run in `path` as its newest whole checkpoint left it, or from the start when there is none; with `step`, as
        it was at exactly that one (0: from the start)."""
        folder = open_run(path)
        result = folder.result
        if result is not None:
            raise RunError(f"{path} has ended ({result['state']} at step {result['step']}); nothing to resume")
        stored = folder.config
        config = config_from_dict(stored)
        ranks = Ranks.join()
        trainer = cls(config, folder, _prepare(config, ranks), ranks)
        was, now = stored.get("run") or {}, vars(Environment.now(config, trainer.task, trainer.device, ranks.size))
        if was:  # one that does not say so was trained by one process
            was = {"ranks": 1} | was
        else:  # a folder that was made without being started, as the engine does
            ranks.on_first(lambda: write_json(folder.path / CONFIG, stored | {"run": now}))
        changed = [f"{key}: {was[key]} -> {now[key]}" for key in now if key in was and was[key] != now[key]]
        if changed:
            trainer.notes.append("not bit for bit the run it was, since this differs: " + "; ".join(changed))
        try:
            loaded = None if step == 0 else load_checkpoint(folder.checkpoints, trainer.model, trainer.optimizer, step)
        except NoWholeCheckpointError as error:
            trainer.notes.append(f"{error}\n  so it starts again from step 0")
            loaded = None
        if loaded is not None:
            trainer.notes.extend(f"skipped a checkpoint: {reason}" for reason in loaded.skipped)
            trainer.step, trainer.best, trainer.seconds = loaded.step, loaded.state["best"], loaded.state["seconds"]
            trainer._saved_step = loaded.step
            if isinstance(trainer.task, Text):
                trainer.task.seek(loaded.state.get("data"))
        steps = ranks.gather(trainer.step)
        if len(set(steps)) > 1:
            raise RunError(
                f"the ranks read other checkpoints in {path}: steps {steps}; all of them must see one folder"
            )
        return trainer

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the last step and write `result.json`; returns its content.

        Raises InterruptedRunError after Ctrl-C or SIGTERM, when a checkpoint has been saved, and DivergedError for a loss
        or gradient that is not finite, when `result.json` says so and the last good checkpoint is kept.
        """
        with self.recording(), stop_signals(self.stop):
            while self.step < self.config.training.steps:
                lr = learning_rate(self.config.optimizer, self.step, self.config.training.steps)
                self.record(*self.update(lr), lr, progress)
            return self.finish()

    def stop(self, signal_number: int) -> None:
        """Ask the run to save and stop after the current step."""
        self._signal = signal_number

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the run folder and its trackers, with the metrics of later steps than this one dropped."""
        with contextlib.ExitStack() as stack:
            self.ranks.on_first(lambda: self._hold(stack))
            self.model.train()
            self._window = (time.perf_counter(), self.step)
            yield

    def _hold(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self.folder.locked())
        self._tracker = stack.enter_context(open_trackers(self.config, self.folder))
        self.folder.metrics.keep_until(self.step)
        if isinstance(self.task, Text):
            self.task.write(self.folder.path)

    def record(self, loss: Tensor, norm: Tensor, lr: float, progress: Progress | None = None) -> None:
        """Count an update, and log, evaluate and save where that is due. Raises what `run` raises."""
        loop = self.config.training
        self.step += 1
        last = self.step == loop.steps
        evaluating = last or self.step % loop.eval_every == 0
        logging = evaluating or self.step % loop.log_every == 0
        saving = last or self.step % loop.checkpoint_every == 0
        stopping = self._stopping()
        # Reading the loss waits for the device, so on a GPU it is looked at only where it is needed.
        looking = self.device.type == "cpu" or logging or saving or stopping
        if looking and not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            self._diverge(loss.item(), norm.item())
        if logging:
            start, first = self._window
            elapsed = time.perf_counter() - start
            self.seconds += elapsed
            line = {"step": self.step, "loss": loss.item(), "learning_rate": lr, "gradient_norm": norm.item()}
            line["steps_per_second"] = (self.step - first) / elapsed
            if evaluating:
                samples = loop.final_eval_samples if last else loop.eval_samples
                splits = evaluate(self.model, self.task, self.task.splits, samples, loop.precision, self.ranks)
                line["splits"] = splits
                saving |= self._is_best(splits)
            self.ranks.on_first(lambda: self._report(line, progress))
            self._window = (time.perf_counter(), self.step)
        stopping = self._stopping()
        if saving or stopping:
            finite = all(torch.isfinite(own_part(parameter)).all() for parameter in self.model.parameters())
            if not all(self.ranks.gather(finite)):
                self._diverge(math.nan, norm.item())  # the update itself overflowed; it must not be kept
            self.save()
        if stopping and not last:
            raise InterruptedRunError(self._stopping() or 0, self.folder.path, self.step)

    def _report(self, line: dict[str, Any], progress: Progress | None) -> None:
        self.folder.metrics.append(line)
        self._tracker(line)
        if progress is not None:
            progress(line)

    def _stopping(self) -> int | None:
        """The signal to stop for; with several ranks the one that all of them know of, since they must stop together."""
        return self._signal if self.ranks.size == 1 else self._agreed_signal

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        """One gradient step; (loss, gradient norm), still on the device.

        The loss is the mean over all answers of the batch, however many parts and ranks share it: each part's mean is
        weighted by its answers.
        """
        batch = self.next_batch()
        parts = self._parts(batch)
        if len(parts) == 1 and self.ranks.size == 1:  # nothing to weigh, which would wait for the device
            weights = [1.0]
        else:
            weights = [float(self.task.weights(part).sum()) for _, part in parts]
        total = self._agree(sum(weights))
        missing = self._most_parts() - len(parts) if self.replica.sharded else 0
        parts, weights = parts + parts[-1:] * missing, weights + [0.0] * missing
        loss = torch.zeros((), device=self.device)
        for number, (first_row, part) in enumerate(parts):
            seed_dropout(self.config.seed, self.step, first_row)
            with self.replica.accumulating(last=number == len(parts) - 1):
                with self.autocast():
                    part_loss = compute_loss(self.model, self.task, part, forward=self.replica.forward)
                if weights[number] != total:  # there are other parts
                    part_loss = part_loss * (weights[number] / total)
                self.replica.scaled(part_loss).backward()
            loss = loss + part_loss.detach()
        norm = apply_gradients(self.model, self.optimizer, lr, self.config.optimizer.clip_norm)
        return self.ranks.sum(loss), norm

    def _parts(self, batch: Batch) -> list[tuple[int, Batch]]:
        """The parts of this rank's batch that are computed one after the other, each with what seeds its dropout: nothing
        where all rows share one mask, else its first row in the whole batch."""
        size = self.config.training.micro_batch_size or len(batch)
        shared = getattr(self.config.model, "dropout_shared", True)
        first = self.rows.start or 0
        return [
            (0 if shared else first + start, batch.rows(slice(start, start + size)) if size < len(batch) else batch)
            for start in range(0, len(batch), size)
        ]

    def _most_parts(self) -> int:
        """The parts of the rank that has most: in a sharded model every forward pass is one of all ranks."""
        size = self.config.training.micro_batch_size
        largest_share = -(-self.config.training.batch_size // self.ranks.size)
        return 1 if size is None else -(-largest_share // size)

    def _agree(self, weight: float) -> float:
        """The sum of all ranks' weights; on the way they agree on whether to stop."""
        if self.ranks.size == 1:
            return weight
        told = torch.zeros(1 + self.ranks.size, dtype=torch.float64)
        told[0], told[1 + self.ranks.rank] = weight, self._signal or 0
        total, *signals = self.ranks.sum(told).tolist()
        self._agreed_signal = int(max(signals)) or None
        return total

    def next_batch(self) -> Batch:
        """This rank's rows of the training batch of the next step."""
        dtype = next(self.model.parameters()).dtype
        size = self.config.training.batch_size
        if isinstance(self.task, Text):  # which reads no more than these rows
            return self.task.batch("train", self.step, size, device=self.device, rows=self.rows)
        batch = self.task.batch("train", self.step, size, device=self.device, dtype=dtype)
        return batch if self.ranks.size == 1 else batch.rows(self.rows)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of forward passes."""
        if self.config.training.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self._saved_step == self.step:
            return
        state: dict[str, Any] = {"best": self.best, "seconds": self.seconds}
        if isinstance(self.task, Text) and self.task.config.hub is not None:
            read = [position or {} for position in self.ranks.gather(self.task.position())]
            state["data"] = {part: place for position in read for part, place in position.items()}
        folder, parts = self.folder.checkpoints, (self.model, self.optimizer)
        if self.replica.sharded:
            save_sharded(folder, self.step, *parts, state, self.ranks)
        else:
            self.ranks.on_first(lambda: save_checkpoint(folder, self.step, *parts, state))
        self._saved_step = self.step
        best_step = self.best["step"] if self.best else None
        if self.ranks.first:
            prune(folder, self.config.training.keep_checkpoints, best_step)

    def _is_best(self, splits: dict[str, dict[str, float]]) -> bool:
        """Note the best score so far, on validation combinations where some are reserved, else on the trained ones: never
        on a split that results are reported for."""
        split = "validation" if "validation" in splits else "train"
        score = splits[split][self.task.headline]
        sign = -1 if self.task.lower_is_better else 1
        if not math.isfinite(score) or (self.best is not None and sign * score <= sign * self.best["score"]):
            return False
        self.best = {"step": self.step, "split": split, "metric": self.task.headline, "score": score}
        return True

    def finish(self) -> dict[str, Any]:
        """Write `result.json` after the last step; returns its content."""
        found = self.ranks.on_first(
            lambda: [line for line in self.folder.metrics.read() if line["step"] == self.step and "splits" in line]
        )
        lines = self.ranks.gather(found)[0]
        loop = self.config.training
        if lines:
            splits = lines[-1]["splits"]
        else:  # the line was lost, though its checkpoint was not
            samples = loop.final_eval_samples
            splits = evaluate(self.model, self.task, self.task.splits, samples, loop.precision, self.ranks)
        result = {
            "state": "finished",
            "step": self.step,
            "headline": self.task.headline,
            "splits": splits,
            "best": self.best,
            "num_parameters": self.model.num_parameters,
            "wall_seconds": self.seconds,
            "steps_per_second": self.step / self.seconds if self.seconds else None,
            "ceiling": task_ceiling(self.task),
            "shared_with_training": self._shared_samples(),
        }
        played = play_episodes(self.model, self.task, self.task.splits, min(loop.final_eval_samples, PLAYED))
        result |= {"played": played} if played else {}
        result = self.ranks.gather(result)[0]  # clocks differ
        self.ranks.on_first(lambda: write_json(self.folder.path / RESULT, result))
        return result

    def _shared_samples(self) -> dict[str, dict[str, int]] | None:
        """How many evaluated sequences were also trained on, per split, where the task's sequences are discrete: 0 unless
        their number is small. Looks at the first 1,000 training batches."""
        if not self.task.discrete:
            return None
        loop = self.config.training
        size = min(loop.final_eval_samples, self.task.evaluation_batch)
        counts = {}
        for split in self.task.splits:
            batches = -(-loop.final_eval_samples // size)
            overlap = overlap_rate(self.task, split, min(self.step, 1_000), loop.batch_size, batches, size)
            counts[split] = overlap._asdict()
        return counts

    def _diverge(self, loss: float, norm: float) -> None:
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        kept = f"step {self._saved_step}" if self._saved_step is not None else "none was written yet"
        advice = "try a lower --optimizer.lr, a longer --optimizer.warmup-steps or --optimizer.clip-norm 1"
        if self.config.training.precision == "bf16":
            advice += ", or --training.precision float32"
        result = {"state": "diverged", "step": self.step, "headline": self.task.headline, "splits": {}, "ceiling": None}
        result |= {"num_parameters": self.model.num_parameters, "wall_seconds": self.seconds, "reason": what}
        self.ranks.on_first(lambda: write_json(self.folder.path / RESULT, result))
        message = (
            f"{what} at step {self.step} of {self.folder.path}; last good checkpoint: {kept}. To mend it, {advice}"
        )
        raise DivergedError(message)


@contextlib.contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into a call of `stop`; a second Ctrl-C stops at once."""
    met = False

    def request(number: int, frame: object) -> None:
        nonlocal met
        if met and number == signal.SIGINT:
            raise KeyboardInterrupt
        met = True
        stop(number)

    try:
        previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs it there decides about signals
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _prepare(config: TrainConfig, ranks: Ranks | None = None) -> torch.device:
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    ranks = ranks or Ranks()
    device = resolve_device(ranks.device(config.training.device))
    if ranks.size > 1 and device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    return device


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees for the next step. By default it returns it to the system, and every
    step spends 4 to 12% of its time on having the same pages mapped and cleared again. Other allocators are left alone."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # mallopt's numbers
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**25)  # the most that every version takes


def play_episodes(
    model: Model, task: Task, splits: Sequence[str], num_episodes: int
) -> dict[str, dict[str, float]] | None:
    """What the model reaches when it acts in the environment itself (:func:`hyla.tasks.rollouts.play`), for each split;
    None for tasks without one."""
    if not isinstance(task, GridTask):
        return None
    parameter, training = next(model.parameters()), model.training
    model.eval()
    options: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}

    def policy(rows: Tensor) -> Tensor:
        return model(rows, predict_at=task.predict_at).predictions

    found = {split: play(policy, task, split, num_episodes, **options) for split in splits}
    model.train(training)
    return found


def task_ceiling(task: Task) -> dict[str, float] | None:
    """The score of an ideal observer on each split, for tasks that have one and are small enough for it."""
    ceiling = getattr(task, "ceiling", None)
    if ceiling is None:
        return None
    try:
        return {split: ceiling(split)["accuracy"] for split in task.splits}
    except ConfigError:  # puzzles too large to enumerate
        return None


def train(config: TrainConfig, path: Path | str, progress: Progress | None = None) -> dict[str, Any]:
    """Train a new run into the folder `path`; returns the content of `result.json`."""
    return Trainer.start(config, path).run(progress)


def resume(path: Path | str, progress: Progress | None = None) -> dict[str, Any]:
    """Go on with the run in `path` from its newest whole checkpoint."""
    return Trainer.resume(path).run(progress)


def load_model(path: Path | str, step: int | None = None) -> tuple[Model, Task, TrainConfig]:
    """(model, task, config) of a run, with the weights of its last checkpoint or of `step`; on the device it was trained
    on, or on one that this machine has."""
    folder = open_run(path)
    config = config_from_dict(folder.config)
    try:
        device = _prepare(config)
    except ConfigError:
        config = replace(config, training=replace(config.training, device="auto"))
        device = _prepare(config)
    task = make_task(config, folder.path)
    model = fresh_model(config, task, device)
    if load_checkpoint(folder.checkpoints, model, step=step) is None:
        raise RunError(f"{path} has no checkpoint yet")
    return model.eval(), task, config
