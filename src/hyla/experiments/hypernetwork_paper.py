"""The experiments of the first paper (P1, arXiv 2406.05816): one function per table or figure, listed in EXPERIMENTS.

    hyla reproduce logic-headline --budget paper

Each function says which rows its table has and in which setting; what they have in common (budgets, the grid of
hyperparameters and how one of its settings is chosen) stands below them.

Costs are of budget `paper` with its whole grid. "2 cores" means two CPU cores, one run on each with one thread, where a
step of fuzzy logic (32 points) takes about 45 ms and one of SRAVEN about 160 ms, for softmax attention and HYLA alike;
other sizes are scaled as in `cost.py`. Times on a GPU are estimates, not measured. Reported numbers are held-out scores in
percent, mean ± spread as a summary of P1 gives them (`reported.toml`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from hyla.errors import check
from hyla.experiments.experiment import Experiment, Variant, with_settings
from hyla.latents.analysis import Options
from hyla.latents.read import write_analysis
from hyla.models.transformer import TransformerConfig
from hyla.report.comparison import summarise
from hyla.report.plan import RUNS, Figure, Plan, Selection, Setting
from hyla.training.config import TrainConfig, preset_default, preset_paper

BudgetName = Literal["quick", "short", "paper"]
Grid = Literal["full", "first"]

MECHANISMS = ("softmax", "linear", "hyla")
# From ordinary attention to HYLA+, one change at a time.
ABLATION = (
    "softmax",
    "linear",
    "linear_rms_head",
    "hyla_linear_no_rms_head",  # the likeliest meaning of the paper's row "linear + value network"
    "hyla_no_rms_head",
    "hyla_linear",
    "hyla_softmax",
    "hyla",
    "hyla_plus",
)


def logic_headline(request: Request) -> Experiment:
    """Fuzzy logic, the headline: R2 on functions made of known terms in unseen combinations.

    Setting: 4 variables, 2 terms, 70% of the combinations held out, 32 points, 50,000 steps.
    Command: hyla reproduce logic-headline --budget paper
    Cost: 36 runs (3 mechanisms x 4 settings x 3 seeds), each about 38 minutes on one core; 12 hours on 2 cores. On a GPU
    about 5 minutes a run (estimate).
    Reported: softmax 63.28 ± 2.31, linear 59.89 ± 5.22, HYLA 81.13 ± 7.77.
    """
    base = budget("logic", request.budget).config
    return experiment(
        request,
        name="logic-headline",
        title="Fuzzy logic: unseen combinations of known terms",
        rows=[row(base, mechanism) for mechanism in MECHANISMS],
        shows=SHOWS["logic"],
        quick_seeds=(0, 1, 2),
    )


def logic_sweep(request: Request) -> Experiment:
    """Fuzzy logic: how generalisation depends on the number of examples and on the share of combinations held out.

    Setting: as the headline, with 16, 32, 64 and 96 points x 30%, 50% and 70% held out.
    Command: hyla reproduce logic-sweep --budget paper
    Cost: 432 runs (3 mechanisms x 12 settings of the task x 4 of the hyperparameters x 3 seeds), 22 to 90 minutes each on
    one core; 8 days on 2 cores. On a GPU about 5 minutes a run (estimate).
    Reported: a figure without numbers in our source; 32 points and 70% held out are the headline's.
    """
    base = budget("logic", request.budget, quick_steps=200).config
    rows = []
    for num_points in (16, 32, 64, 96):
        for held_out in (0.3, 0.5, 0.7):
            task = {"task.num_points": num_points, "task.held_out_fraction": held_out}
            for mechanism in MECHANISMS:
                name = f"{mechanism}, {num_points} points, {held_out:.0%} held out"
                axes: dict[str, Setting] = {"num_points": num_points, "held_out_fraction": held_out}
                rows.append(row(with_settings(base, task), mechanism, name, axes))
    return experiment(
        request,
        name="logic-sweep",
        title="Fuzzy logic: number of points and share of combinations held out",
        rows=rows,
        shows=SHOWS["logic"] | {"quick": "It shows that every setting runs and learns; the map of scores will change."},
        figures=("scores", "curves", "heat_map", "scaling"),
    )


def logic_ablation(request: Request) -> Experiment:
    """Fuzzy logic: which part of HYLA matters, and a mixture of experts beside it.

    Setting: as the headline.
    Command: hyla reproduce logic-ablation --budget paper
    Cost: 120 runs (10 rows x 4 settings x 3 seeds), each about 38 minutes on one core (HYLA+ about 2 hours, the mixture of
    experts 4); 3 days on 2 cores. On a GPU about 5 minutes a run (estimate).
    Reported: softmax 63.28 ± 2.31, linear 59.89 ± 5.22, linear + RMSHead 68.93 ± 5.10, linear + value network 56.91 ± 4.25,
    HYLA without nonlinearity 84.54 ± 5.32, HYLA 81.13 ± 7.77, HYLA+ 87.65 ± 4.54.
    """
    base = budget("logic", request.budget, quick_steps=600).config
    return experiment(
        request,
        name="logic-ablation",
        title="Fuzzy logic: the parts of HYLA",
        rows=[*(row(base, mechanism) for mechanism in ABLATION), mixture_of_experts(base)],
        shows=SHOWS["logic"],
    )


def logic_latents(request: Request) -> Experiment:
    """Fuzzy logic: the models whose latent codes are decoded into the terms of the function.

    Setting: 96 points, 50% held out, seed and official split 2024; otherwise the headline's. When all is trained, the codes
    of the chosen runs are read into latents/ (as by `hyla latents`).
    Command: hyla reproduce logic-latents --budget paper
    Cost: 12 runs (3 mechanisms x 4 settings x 1 seed), each about 90 minutes on one core; 9 hours on 2 cores. On a GPU
    about 5 minutes a run (estimate).
    Reported: a figure without numbers in our source.
    """
    base = budget("logic", request.budget).config
    base = with_settings(base, {"task.num_points": 96, "task.held_out_fraction": 0.5})
    return experiment(
        request,
        name="logic-latents",
        title="Fuzzy logic: models for reading latent codes (96 points, 50% held out)",
        rows=[row(base, mechanism) for mechanism in MECHANISMS],
        shows=SHOWS["logic"]
        | {"quick": "Codes of models that have hardly learned say nothing about the paper's claim."},
        seeds=(2024,),
        quick_seeds=(2024,),
        after=read_latents,
    )


def sraven_headline(request: Request) -> Experiment:
    """SRAVEN, the headline: accuracy (all features right) on puzzles with unseen combinations of rules.

    Setting: 4 features, 25% of the rule combinations held out, 4 layers, 20 million instances (156,250 steps).
    Command: hyla reproduce sraven-headline --budget paper
    Cost: 36 runs (3 mechanisms x 4 settings x 3 seeds), each about 7 hours on one core; 5 days on 2 cores. On a GPU about
    25 minutes a run (estimate).
    Reported: softmax 56.56 ± 1.05, linear 56.30 ± 1.11, HYLA 69.13 ± 1.90.
    """
    base = budget("sraven", request.budget).config
    return experiment(
        request,
        name="sraven-headline",
        title="SRAVEN: unseen combinations of known rules",
        rows=[row(base, mechanism) for mechanism in MECHANISMS],
        shows=SHOWS["sraven"],
        quick_seeds=(0, 1, 2),
    )


def sraven_scaling(request: Request) -> Experiment:
    """SRAVEN: how generalisation grows with instances, width and depth.

    Setting: 10, 20, 40 million instances; width x1, x2, x4 (heads, model width, queries, keys, values and MLP together);
    depth 4, 8, 16. One axis at a time around 20 million, x1 and depth 4, not the 27 combinations. The grid also has a
    three times longer warm-up (3,000 steps).
    Command: hyla reproduce sraven-scaling --budget paper
    Cost: 504 runs (3 mechanisms x 7 sizes x 8 settings x 3 seeds), 3.5 hours (10 million) to 2 days (width x4) each on one
    core; 7 months on 2 cores, so take a part: --only 'hyla*', --grid first, --seeds 0. On a GPU 15 minutes to 2 hours a run
    (estimate).
    Reported: a figure without numbers in our source; the base is the headline's.
    """
    base = budget("sraven", request.budget, quick_steps=40).config
    rows = []
    for instances, width, depth in [
        (20, 1, 4),
        (10, 1, 4),
        (40, 1, 4),
        (20, 2, 4),
        (20, 4, 4),
        (20, 1, 8),
        (20, 1, 16),
    ]:
        size = widened(base, width) | {
            "training.steps": base.training.steps * instances // 20,
            "model.num_layers": depth,
        }
        for mechanism in MECHANISMS:
            name = f"{mechanism}, {instances}M instances, width x{width}, depth {depth}"
            axes: dict[str, Setting] = {"million_instances": instances, "width": width, "depth": depth}
            rows.append(row(with_settings(base, size), mechanism, name, axes))
    shares = "Instances stand for shares of the steps: 10M, 20M, 40M are a half, the whole and twice"
    return experiment(
        request,
        name="sraven-scaling",
        title="SRAVEN: instances, width and depth",
        rows=rows,
        shows=SHOWS["sraven"]
        | {
            "quick": f"{shares} the base's. It shows that every size runs, nothing about how it generalises.",
            "short": f"{shares} the base's. It shows the beginning of learning at every size, not where it ends.",
        },
        figures=("scores", "curves", "scaling"),
        warmup_factors=(1, 3),
    )


def sraven_ablation(request: Request) -> Experiment:
    """SRAVEN: which part of HYLA matters, and a mixture of experts beside it.

    Setting: as the headline.
    Command: hyla reproduce sraven-ablation --budget paper
    Cost: 120 runs (10 rows x 4 settings x 3 seeds), each about 7 hours on one core (HYLA+ about 21, the mixture of experts
    42); 30 days on 2 cores. On a GPU about 25 minutes a run (estimate).
    Reported: softmax 56.56 ± 1.05, linear 56.30 ± 1.11, linear + RMSHead 59.01 ± 2.50, linear + value network 55.38 ± 0.32,
    HYLA without RMSHead 62.53 ± 5.73, HYLA without nonlinearity 56.54 ± 0.21, HYLA with softmax 38.21 ± 2.98, HYLA 69.13 ±
    1.90, HYLA+ 66.59 ± 0.08.
    """
    base = budget("sraven", request.budget, quick_steps=100).config
    return experiment(
        request,
        name="sraven-ablation",
        title="SRAVEN: the parts of HYLA",
        rows=[*(row(base, mechanism) for mechanism in ABLATION), mixture_of_experts(base)],
        shows=SHOWS["sraven"],
    )


def sraven_latents(request: Request) -> Experiment:
    """SRAVEN: the models whose latent codes are decoded into the rules of a puzzle: those of the headline.

    When all is trained, the codes of the chosen runs are read into latents/ (as by `hyla latents`).
    Command: hyla reproduce sraven-latents --budget paper; with --out on the folder of sraven-headline nothing is trained
    twice.
    Cost: 36 runs, as the headline.
    Reported: figures without numbers in our source.
    """
    title = "SRAVEN: models for reading latent codes"
    return replace(sraven_headline(request), name="sraven-latents", title=title, after=read_latents)


EXPERIMENTS = {
    "logic-headline": logic_headline,
    "logic-sweep": logic_sweep,
    "logic-ablation": logic_ablation,
    "logic-latents": logic_latents,
    "sraven-headline": sraven_headline,
    "sraven-scaling": sraven_scaling,
    "sraven-ablation": sraven_ablation,
    "sraven-latents": sraven_latents,
}


def read_latents(folder: Path, plan: Plan) -> None:
    """Read the codes of every chosen run that has finished, beside each other."""
    comparison = summarise(plan, folder)
    chosen = [run for variant in comparison.variants for run in comparison.runs_of(variant)]
    paths = [folder / RUNS / run.name for run in chosen if run.state == "finished"]
    if paths:
        options = Options(reference=plan.task == "logic")
        write_analysis(paths, folder / "latents", options, f"{plan.command} (then hyla latents)")


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a table before its hyperparameters are spread out: a name, a config and its place on the axes."""

    name: str
    config: TrainConfig
    axes: dict[str, Setting]


def row(base: TrainConfig, mechanism: str, name: str | None = None, axes: dict[str, Setting] | None = None) -> Row:
    """A mechanism in the setting of `base`."""
    return Row(name or mechanism, with_settings(base, {"model.mechanism": mechanism}), axes or {})


def mixture_of_experts(base: TrainConfig) -> Row:
    """P1's baseline of another kind: softmax attention whose MLP is a mixture of experts."""
    return row(with_settings(base, {"model.mlp": "mixture"}), "softmax", "mixture of experts")


def widened(base: TrainConfig, factor: int) -> dict[str, Setting]:
    """Settings of a model `factor` times as wide as that of `base`, with heads of the same width (P1's multiplier)."""
    widths = ("num_heads", "embed_dim", "qk_dim", "v_dim", "mlp_dim")
    return {f"model.{name}": getattr(base.model, name) * factor for name in widths}


# --- budgets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """A config to compare mechanisms in (its mechanism and seed are replaced), and what its results can show."""

    name: BudgetName
    config: TrainConfig
    note: str


def budget(task: str, name: BudgetName, quick_steps: int | None = None) -> Budget:
    """quick: minutes on two cores. short: up to some hours. paper: the paper's steps, days on two cores.

    All use P1's sizes and the public code's schedule, so that they differ in steps alone. quick_steps: for an experiment
    whose runs are too many for the usual ones of budget quick; its only evaluation is then the last.
    """
    check(name in SHOWS[task], "budget", name, f"choose from {', '.join(SHOWS[task])}")
    config = preset_paper(task)
    if name == "paper":
        eval_every, samples = PAPER_EVALUATIONS[task]
        config = replace(config, training=replace(config.training, eval_every=eval_every, eval_samples=samples))
    else:
        steps, warmup, eval_every, samples = STEPS[task][name]
        if name == "quick" and quick_steps is not None:
            steps, warmup, eval_every, samples = quick_steps, quick_steps // 20, quick_steps, 1_024
        loop = replace(
            preset_default(task).training,
            steps=steps,
            log_every=25,
            eval_every=eval_every,
            eval_samples=1_024,
            final_eval_samples=samples,
            checkpoint_every=eval_every,
        )
        config = replace(config, optimizer=replace(config.optimizer, warmup_steps=warmup), training=loop)
    return Budget(name, config, note(steps_text([config], name), SHOWS[task][name], SELECTION_NOTES["none"]))


def steps_text(configs: Sequence[TrainConfig], budget_name: str) -> str:
    """How long these configs train, beside the paper."""
    steps = sorted({config.training.steps for config in configs})
    text = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    paper = preset_paper(configs[0].task_name).training.steps
    return f"The paper's {text} steps." if budget_name == "paper" else f"{text} of the paper's {paper:,} steps."


def note(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


# steps, warm-up, steps between evaluations, sequences of the last evaluation; chosen by measurement, see LOG.md
STEPS = {
    "logic": {"quick": (900, 100, 100, 4_096), "short": (3_000, 100, 250, 16_000)},
    "sraven": {"quick": (300, 50, 50, 2_048), "short": (5_000, 500, 500, 10_240)},
}
# Steps between evaluations and sequences of each; the last one has the paper's 16,000 and 51,200.
PAPER_EVALUATIONS = {"logic": (2_000, 4_096), "sraven": (5_000, 4_096)}

# What the results of each budget can show.
SHOWS = {
    "logic": {
        "quick": (
            "This shows that all mechanisms learn, and how far each is at the start, where softmax attention leads and "
            "HYLA is last. It cannot show which generalises best: HYLA overtakes only with longer training, by the paper's "
            "figures. For more: --budget short (3,000 steps), --budget paper (50,000)."
        ),
        "short": (
            "The length that was measured on the paper's public code: softmax attention still leads, HYLA lies between it "
            "and linear attention. It cannot show the paper's result. Seeds with different held-out sets differ by more "
            "than mechanisms do: compare within a seed. For more: --budget paper."
        ),
        "paper": "",
    },
    "sraven": {
        "quick": (
            "Accuracy (all features right) is still near 0. This shows that everything runs, not how any mechanism "
            "generalises. For more: --budget short (5,000 steps), --budget paper."
        ),
        "short": (
            "The beginning of the learning curve. It cannot show how mechanisms generalise in the end. For more: --budget "
            "paper."
        ),
        "paper": "",
    },
}


# --- the grid of hyperparameters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """How an experiment is to be run.

    grid: first trains one setting of the hyperparameters, full all of the paper's; by default full in budget paper only.
    select: what chooses among them, the scores on validation combinations or on the reported split (optimistic).
    seeds: the experiment's own by default.
    """

    budget: BudgetName = "paper"
    grid: Grid | None = None
    select: Selection | None = None
    seeds: tuple[int, ...] | None = None

    @property
    def selection(self) -> Selection:
        grid = self.grid or ("full" if self.budget == "paper" else "first")
        if self.select is None:
            return "validation" if grid == "full" else "none"
        one = "there is one setting, so nothing is chosen; add --grid full"
        check(grid == "full" or self.select == "none", "select", self.select, one)
        many = "there are several settings; choose by validation or reported, or train one with --grid first"
        check(grid == "first" or self.select != "none", "select", self.select, many)
        return self.select


# The first value of each is the setting of budgets quick and short.
GRID = {
    "logic": {"optimizer.lr": (1e-3, 3e-3), "optimizer.weight_decay": (0.1, 0.03)},
    "sraven": {"optimizer.lr": (1e-3, 3e-4), "optimizer.weight_decay": (0.1, 0.3)},
}
# A fifth of the held-out combinations chooses hyperparameters and is not reported on; the trained ones stay the paper's.
VALIDATION = {"task.validation_from": "held_out", "task.validation_fraction": 0.2}

SELECTION_NOTES = {
    "none": "The paper chose learning rate and weight decay from a grid; this is one setting, lr 1e-3 and decay 0.1.",
    "validation": (
        "The hyperparameters of each row are chosen from the paper's grid on validation combinations, never on the "
        "reported ones."
    ),
    "reported": (
        "The hyperparameters of each row are chosen from the paper's grid on the reported split itself: optimistic."
    ),
}
RESERVED_NOTE = (
    "Validation combinations are a fifth of those that are never trained on; held-out scores are of the other four "
    "fifths."
)


def experiment(
    request: Request,
    *,
    name: str,
    title: str,
    rows: Sequence[Row],
    shows: dict[str, str],
    seeds: tuple[int, ...] = (0, 1, 2),
    quick_seeds: tuple[int, ...] = (0,),
    figures: tuple[Figure, ...] = ("scores", "curves"),
    warmup_factors: Sequence[int] = (1,),
    after: Callable[[Path, Plan], None] | None = None,
) -> Experiment:
    """The experiment with these rows, each with the whole grid of hyperparameters or its first setting.

    shows: what the results of each budget can show. warmup_factors: of the grid's warm-ups, relative to the budget's.
    """
    selection = request.selection
    # in budget paper also where one setting is trained, so that its runs are part of the whole grid later
    reserved = selection == "validation" or (selection == "none" and request.budget == "paper")
    task = rows[0].config.task_name
    variants = []
    for one in rows:
        base = with_settings(one.config, VALIDATION) if reserved else one.config
        warmups = tuple(base.optimizer.warmup_steps * factor for factor in warmup_factors)
        grid = GRID[task] | ({"optimizer.warmup_steps": warmups} if len(warmups) > 1 else {})
        settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        chosen = settings[:1] if selection == "none" else settings
        # no figure is reported for softmax attention beside a mixture of experts
        mixture = isinstance(base.model, TransformerConfig) and base.model.mlp == "mixture"
        reported = None if mixture else base.mechanism
        candidates = tuple(with_settings(base, setting) for setting in chosen)
        variants.append(Variant(one.name, candidates, one.axes, reported))
    trained = steps_text([one.config for one in rows], request.budget)
    return Experiment(
        name=name,
        title=title,
        variants=tuple(variants),
        seeds=request.seeds or (quick_seeds if request.budget == "quick" else seeds),
        budget=request.budget,
        budget_note=note(trained, shows[request.budget], SELECTION_NOTES[selection], RESERVED_NOTE if reserved else ""),
        splits="paper",
        selection=selection,
        tuned=tuple(GRID[task]) + (("optimizer.warmup_steps",) if len(warmup_factors) > 1 else ()),
        baseline=next(one.name for one in rows if one.config.mechanism == "softmax"),
        axes=tuple(rows[0].axes),
        figures=figures,
        after=after,
    )
