"""The experiments of the second paper (P2: scaling and compositional generalisation), listed in EXPERIMENTS.

    hyla reproduce hyperteacher-model-size --budget short

Each function says which rows its table has and in which setting. P2 trains every row at one setting of the optimiser,
so there is no grid. When all is trained, the parts of the tasks are decoded from the hidden activations of every run
(`decodability.json`, :mod:`hyla.latents.decodability`).

Budgets: `paper` is P2's length (300,000 steps of the hyperteacher), `short` 10,000 steps in bf16 with fewer rows,
`quick` some hundred steps of the smallest rows. Costs name two CPU cores, one run on each with one thread, where a
float32 step of the MLP of 4 x 1024 takes about 0.35 s (2 x 1024: 0.13 s; in bf16, on a CPU that multiplies it in
hardware, a third). Times on a GPU are estimates, not measured. Our source gives no numbers of P2's figures; what they
claim is said with each experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import comb

from hyla.errors import check
from hyla.experiments.experiment import Experiment, Variant, with_settings
from hyla.experiments.hypernetwork_paper import BudgetName, Request, Row, note, steps_text
from hyla.latents.decodability import write_decodability
from hyla.report.plan import Figure, Setting
from hyla.training.config import TrainConfig, preset_default, preset_paper


def hyperteacher_model_size(request: Request) -> Experiment:
    """Hyperteacher: R2 on unseen combinations of modules as the network grows.

    Setting: 16 modules, combinations of up to 3, 25% held out at random, MLPs of 2 and 4 hidden layers and width 128 to
    2048 (budget short: 2 layers, width 128 to 1024).
    Command: hyla reproduce hyperteacher-model-size --budget short
    Cost: budget paper 30 runs (2 depths x 5 widths x 3 seeds), 30 minutes (128 wide) to 6 days (4 x 2048) each on one
    core; 16 days on 2 cores. On a GPU about 20 minutes a run (estimate). Budget short: 12 runs, 30 minutes on 2 cores.
    Reported: held-out R2 rises with width and depth.
    """
    base = budget("hyperteacher", request.budget)
    depths = (2, 4) if request.budget == "paper" else (2,)
    widths = {"paper": (128, 256, 512, 1024, 2048), "short": (128, 256, 512, 1024), "quick": (32, 128)}
    return experiment(
        request,
        name="hyperteacher-model-size",
        title="Hyperteacher: width and depth of a plain MLP",
        rows=[mlp(base, depth, width) for depth in depths for width in widths[request.budget]],
        figures=("scores", "curves", "scaling", "decodability"),
    )


def hyperteacher_data(request: Request) -> Experiment:
    """Hyperteacher: R2 on unseen combinations of modules as more of them are trained on.

    Setting: MLP of 4 x 1024; 12.5% to 99% of the combinations held out at random, of up to 2 to 7 of 8 to 32 modules,
    where enough are left to train on. Budget short: 2 x 512, 25% to 98% held out of up to 3 of 8 or 16 modules.
    Command: hyla reproduce hyperteacher-data --budget short
    Cost: budget paper 495 runs of 37 hours each on one core, a year on 2: take a part, such as --only '*16 modules, up to
    3*' --seeds 0. On a GPU about 20 minutes a run (estimate). Budget short: 27 runs, 50 minutes on 2 cores.
    Reported: held-out R2 rises with the number of trained tasks.
    """
    base = budget("hyperteacher", request.budget)
    fractions, modules, hot = {
        "paper": ((0.125, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99), (8, 16, 24, 32), (2, 3, 4, 5, 6, 7)),
        "short": ((0.25, 0.5, 0.75, 0.9, 0.95, 0.98), (8, 16), (3,)),
        "quick": ((0.25, 0.9), (8,), (3,)),
    }[request.budget]
    rows = list(data_rows(base, modules, hot, fractions))
    return experiment(
        request,
        name="hyperteacher-data",
        title="Hyperteacher: number of trained combinations",
        rows=rows,
        figures=("scores", "curves", "scaling", "decodability"),
    )


def hyperteacher_support(request: Request) -> Experiment:
    """Hyperteacher: R2 on unseen combinations, by which combinations are trained on.

    Setting: 16 modules, combinations of up to 3, 25% held out except where the support says otherwise; MLP of 4 x 1024
    (budget short: 2 x 512 and the supports random, non_compositional, popular_modules, unpopular_modules). Held-out
    sets differ between supports.
    Command: hyla reproduce hyperteacher-support --budget short
    Cost: budget paper 18 runs of 37 hours each on one core; 14 days on 2 cores. On a GPU about 20 minutes a run
    (estimate). Budget short: 12 runs, 25 minutes on 2 cores.
    Reported: generalisation needs a compositional and connected support; non_compositional fails.
    """
    base = budget("hyperteacher", request.budget)
    return experiment(
        request,
        name="hyperteacher-support",
        title="Hyperteacher: which combinations are trained on",
        rows=list(support_rows(base, request.budget)),
        figures=("scores", "curves", "decodability"),
        shows="Each support has held-out combinations of its own.",
    )


def hyperteacher_connected(request: Request) -> Experiment:
    """Hyperteacher: connected against disconnected support, measured on the combinations that neither trains on.

    Setting: 16 modules, single ones and pairs. connected: pairs at distance 1 and 2 around a ring; disconnected: all
    pairs within either half. MLP of 4 x 1024 (budget short: 2 x 512).
    Command: hyla reproduce hyperteacher-connected --budget short
    Cost: budget paper 6 runs of 37 hours each on one core; 5 days on 2 cores. On a GPU about 20 minutes a run (estimate).
    Budget short: 6 runs, 12 minutes on 2 cores.
    Reported: generalisation needs the support to be connected.
    """
    base = with_settings(budget("hyperteacher", request.budget), {"task.num_hot": 2})
    names = ("connected", "disconnected")
    return experiment(
        request,
        name="hyperteacher-connected",
        title="Hyperteacher: connected and disconnected support",
        rows=[Row(name, with_settings(base, {"task.support": name}), {}) for name in names],
        baseline="connected",
        figures=("scores", "curves", "decodability"),
    )


def hyperteacher_encoding(request: Request) -> Experiment:
    """Hyperteacher: R2 on unseen combinations, by how the task is told to the network.

    Setting: 16 modules, combinations of up to 3, 25% held out at random, six encodings, MLPs of 4 layers and width 128
    to 2048 (budget short: 2 x 512).
    Command: hyla reproduce hyperteacher-encoding --budget short
    Cost: budget paper 90 runs, 30 minutes to 6 days each on one core; 73 days on 2 cores. On a GPU about 20 minutes a run
    (estimate). Budget short: 18 runs, 40 minutes on 2 cores.
    Reported: the larger the network, the less the encoding matters.
    """
    base = budget("hyperteacher", request.budget)
    widths = (128, 256, 512, 1024, 2048) if request.budget == "paper" else (512,)
    rows = []
    for encoding in ("identity", "orthogonal", "tokens", "invertible_nn", "interval_shuffle", "fewshot"):
        for width in widths:
            config = with_settings(base, {"task.encoding": encoding, "model.width": width})
            name = encoding if len(widths) == 1 else f"{encoding}, width {width}"
            axes: dict[str, Setting] = {"encoding": encoding, "width": width} if len(widths) > 1 else {}
            rows.append(Row(name, config, axes))
    return experiment(
        request,
        name="hyperteacher-encoding",
        title="Hyperteacher: how the task is told",
        rows=rows,
        figures=("scores", "curves", *(("scaling",) if len(widths) > 1 else ()), "decodability"),
    )


def hyperteacher_scaling_law(request: Request) -> Experiment:
    """Hyperteacher: how many tasks must be trained on as modules grow.

    Setting: equal usage of all modules, 10 to 28 modules, combinations of up to 4 to 6, 90% to 99.9999% held out where
    enough are left, MLP of 4 x 1024 and the transformer of 4 x 256 (budget short: 10 and 16 modules, up to 4, 90% to
    99%, MLP of 2 x 512).
    Command: hyla reproduce hyperteacher-scaling-law --budget short
    Cost: budget paper 1098 runs of 37 hours each on one core, two years on 2: a cluster's work; take a part with --only
    and --seeds. On a GPU 20 to 60 minutes a run (estimate). Budget short: 15 runs, 30 minutes on 2 cores.
    Reported: the number of tasks needed grows far more slowly than the number of possible ones.
    """
    base = with_settings(budget("hyperteacher", request.budget), {"task.support": "equal"})
    return scaling_law(request, base, tuple(range(10, 30, 2)), PARTS, "num_modules", "Hyperteacher")


def preference_model_size(request: Request) -> Experiment:
    """Preference grid: imitation of unseen combinations of preferences as the network grows.

    Setting: 16 preferences, combinations of up to 3, 25% held out at random, 16 features; MLPs of 2 and 4 layers and width
    16 to 2048 (budget short: 2 layers, width 64 to 512).
    Command: hyla reproduce preference-model-size --budget short
    Cost: budget paper 48 runs of 3 million steps, 3 hours to 34 days each on one core; 107 days on 2. On a GPU about 3
    hours a run (estimate). Budget short: 12 runs, 25 minutes on 2 cores.
    Reported: held-out accuracy rises with width and depth.
    """
    base = with_settings(budget("preference", request.budget), {"task.num_features": 16})
    depths = (2, 4) if request.budget == "paper" else (2,)
    widths = {"paper": (16, 32, 64, 128, 256, 512, 1024, 2048), "short": (64, 128, 256, 512), "quick": (32, 64)}
    return experiment(
        request,
        name="preference-model-size",
        title="Preference grid: width and depth of a plain MLP",
        rows=[mlp(base, depth, width) for depth in depths for width in widths[request.budget]],
        figures=("scores", "curves", "scaling", "decodability"),
    )


def preference_data(request: Request) -> Experiment:
    """Preference grid: imitation of unseen combinations as more combinations are trained on.

    Setting: 32 features, MLP of 2 x 1024; 12.5% to 98% of the combinations held out at random, of up to 2 to 7 of 8 to 32
    preferences, where enough are left. Budget short: 2 x 512, 25% to 98% held out of up to 3 of 8 or 16 preferences.
    Command: hyla reproduce preference-data --budget short
    Cost: budget paper 453 runs of 3 million steps, a week each on one core: take a part. On a GPU about 3 hours a run
    (estimate). Budget short: 27 runs, 3 hours on 2 cores.
    Reported: held-out accuracy rises with the number of trained tasks.
    """
    base = budget("preference", request.budget)
    fractions, modules, hot = {
        "paper": ((0.125, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98), (8, 16, 24, 32), (2, 3, 4, 5, 6, 7)),
        "short": ((0.25, 0.5, 0.75, 0.9, 0.95, 0.98), (8, 16), (3,)),
        "quick": ((0.25, 0.9), (8,), (3,)),
    }[request.budget]
    return experiment(
        request,
        name="preference-data",
        title="Preference grid: number of trained combinations",
        rows=list(data_rows(base, modules, hot, fractions, "num_preferences")),
        figures=("scores", "curves", "scaling", "decodability"),
    )


def preference_support(request: Request) -> Experiment:
    """Preference grid: imitation of unseen combinations, by which combinations are trained on.

    Setting: 16 preferences, combinations of up to 3, 16 features, 25% held out except where the support says otherwise; MLP
    of 2 x 1024 (budget short: 2 x 512, and four of the supports). Held-out sets differ between supports.
    Command: hyla reproduce preference-support --budget short
    Cost: budget paper 18 runs of 3 million steps, 5 days each on one core. On a GPU about 3 hours a run (estimate). Budget
    short: 12 runs, 1 hour on 2 cores.
    Reported: generalisation needs a compositional and connected support.
    """
    base = with_settings(budget("preference", request.budget), {"task.num_features": 16})
    return experiment(
        request,
        name="preference-support",
        title="Preference grid: which combinations are trained on",
        rows=list(support_rows(base, request.budget)),
        figures=("scores", "curves", "decodability"),
        shows="Each support has held-out combinations of its own.",
    )


def preference_scaling_law(request: Request) -> Experiment:
    """Preference grid: how many tasks must be trained on as preferences grow.

    Setting: equal usage, 8 to 32 preferences, combinations of up to 4 to 6, 12.5% to 99.9999% held out where enough are
    left, 32 features, MLP of 2 x 1024 and the transformer of 4 x 256 (budget short: 10 and 16 preferences, up to 4, 90% to
    99%, MLP of 2 x 512).
    Command: hyla reproduce preference-scaling-law --budget short
    Cost: budget paper 1278 runs of 3 million steps: a cluster's work; take a part with --only and --seeds. On a GPU 3 to 10
    hours a run (estimate). Budget short: 15 runs, 2 hours on 2 cores.
    Reported: the number of tasks needed grows far more slowly than the number of possible ones.
    """
    base = with_settings(budget("preference", request.budget), {"task.support": "equal"})
    fractions = (0.125, 0.25, 0.5, 0.75, *PARTS, 0.999995)
    return scaling_law(request, base, tuple(range(8, 36, 4)), fractions, "num_preferences", "Preference grid")


def goal_model_size(request: Request) -> Experiment:
    """Goal grid: imitation on unseen combinations of quadrant, interaction, maze and object as the network grows.

    Setting: 25% of the 500 combinations held out at random, tasks told by four one-hot values, MLPs of 2 layers and width
    128 to 2048 (budget short: 64 to 512).
    Command: hyla reproduce goal-model-size --budget short
    Cost: budget paper 15 runs of 200,000 steps, 50 minutes to 2 days each on one core; 5 days on 2. On a GPU about 1 hour a
    run (estimate). Budget short: 12 runs, 40 minutes on 2 cores.
    Reported: not at this setting (P2 gives the task as tokens of a sentence to a transformer).
    """
    base = budget("goal", request.budget)
    widths = {"paper": (128, 256, 512, 1024, 2048), "short": (64, 128, 256, 512), "quick": (32, 64)}
    return experiment(
        request,
        name="goal-model-size",
        title="Goal grid: width of a plain MLP",
        rows=[mlp(base, 2, width) for width in widths[request.budget]],
        figures=("scores", "curves", "scaling", "decodability"),
    )


def goal_support(request: Request) -> Experiment:
    """Goal grid: imitation on unseen combinations, by which combinations are trained on.

    Setting: 25% held out at random, against one quadrant that is never trained; MLP of 2 x 1024 (budget short: 2 x 512).
    Command: hyla reproduce goal-support --budget short
    Cost: budget paper 6 runs of 200,000 steps, 16 hours each on one core; 2 days on 2. On a GPU about 1 hour a run
    (estimate). Budget short: 6 runs, 50 minutes on 2 cores.
    Reported: generalisation needs a compositional support.
    """
    base = budget("goal", request.budget)
    return experiment(
        request,
        name="goal-support",
        title="Goal grid: which combinations are trained on",
        rows=[Row(name, with_settings(base, {"task.support": name}), {}) for name in ("random", "non_compositional")],
        figures=("scores", "curves", "decodability"),
        shows="Each support has held-out combinations of its own.",
    )


# --- what they have in common -----------------------------------------------------------------------------------------

# Shares held out in the scaling laws.
PARTS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.9975, 0.999, 0.9995, 0.99975, 0.9999, 0.99995, 0.999975, 0.99999, 0.999999)
# Steps of budgets quick and short.
SHORT_STEPS, QUICK_STEPS = 10_000, 300


def budget(task: str, name: BudgetName) -> TrainConfig:
    """The setting that rows of a budget start from: P2's MLP and optimiser, for as many steps as the budget says.

    short and quick train an MLP of two layers, 512 and 64 wide; short in bf16, which CPUs that multiply it in hardware
    do three times faster (`docs/scaling.md` compares it with float32).
    """
    if name == "paper":
        return preset_paper(task)
    base = preset_default(task)
    steps = SHORT_STEPS if name == "short" else QUICK_STEPS
    every = 1_000 if name == "short" else 100
    loop = replace(
        base.training,
        steps=steps,
        log_every=every // 10,
        eval_every=every,
        eval_samples=1_024,
        final_eval_samples=4_096,
        checkpoint_every=every,
        precision="bf16" if name == "short" else "float32",
    )
    return with_settings(
        replace(base, training=loop), {"model.num_layers": 2, "model.width": 512 if name == "short" else 64}
    )


def mlp(base: TrainConfig, depth: int, width: int) -> Row:
    """A plain MLP of this size."""
    config = with_settings(base, {"model.num_layers": depth, "model.width": width})
    return Row(f"{depth} layers, width {width}", config, {"num_layers": depth, "width": width})


def data_rows(
    base: TrainConfig,
    modules: Sequence[int],
    hot: Sequence[int],
    fractions: Sequence[float],
    count_key: str = "num_modules",
) -> Iterator[Row]:
    """A row for every number of modules, of modules in a combination, and of combinations trained on, where these are
    at least as many as modules. count_key: what the task calls its number of modules."""
    for num_modules in modules:
        for num_hot in (count for count in hot if count < num_modules):
            total = sum(comb(num_modules, size) for size in range(1, num_hot + 1))
            for fraction in fractions:
                trained = total - int(total * fraction)
                if trained < num_modules:
                    continue
                settings = {
                    f"task.{count_key}": num_modules,
                    "task.num_hot": num_hot,
                    "task.held_out_fraction": fraction,
                }
                axes: dict[str, Setting] = {"modules": num_modules, "num_hot": num_hot, "trained_tasks": trained}
                name = f"{num_modules} modules, up to {num_hot}, {trained:,} of {total:,} trained"
                yield Row(name, with_settings(base, settings), axes)


def scaling_law(
    request: Request, base: TrainConfig, modules: Sequence[int], fractions: Sequence[float], count_key: str, title: str
) -> Experiment:
    """The experiment with a row for every number of modules and share held out, of both architectures in budget paper."""
    modules, hot, fractions = {
        "paper": (modules, (4, 5, 6), fractions),
        "short": ((10, 16), (4,), (0.9, 0.95, 0.99)),
        "quick": ((8,), (3,), (0.75, 0.9)),
    }[request.budget]
    rows = list(data_rows(base, modules, hot, fractions, count_key))
    if request.budget == "paper":
        wider = replace(base, model=preset_paper(base.task_name, "transformer").model)
        others = data_rows(wider, modules, hot, fractions, count_key)
        rows += [replace(row, name=f"transformer: {row.name}") for row in others]
    return experiment(
        request,
        name=f"{base.task_name}-scaling-law",
        title=f"{title}: trained tasks against possible ones",
        rows=rows,
        figures=("scores", "curves", "scaling", "decodability"),
    )


def support_rows(base: TrainConfig, name: BudgetName) -> Iterator[Row]:
    """A row for every support that P2 compares; budgets quick and short leave out those between the extremes."""
    supports = ["random", "non_compositional", "popular_modules", "unpopular_modules"]
    if name == "paper":
        supports += ["equal", "pseudo_random_disconnected"]
    for support in supports:
        yield Row(support, with_settings(base, {"task.support": support}), {})


def experiment(
    request: Request,
    *,
    name: str,
    title: str,
    rows: Sequence[Row],
    figures: tuple[Figure, ...],
    baseline: str | None = None,
    shows: str = "",
) -> Experiment:
    """The experiment with these rows, three seeds each (one in budget quick), each seed with a support and a teacher of
    its own. shows: what its results can show beyond what every budget says."""
    check(request.grid in (None, "first"), "grid", request.grid, "these experiments train one setting of the optimiser")
    check(request.select in (None, "none"), "select", request.select, "there is one setting, so nothing is chosen")
    said = {
        "quick": "It shows that every setting runs and learns, nothing about how it generalises.",
        "short": "Trained in bf16. Far from the end of learning: it shows directions, not P2's figures.",
        "paper": "",
    }[request.budget]
    return Experiment(
        name=name,
        title=title,
        variants=tuple(Variant(row.name, (row.config,), row.axes) for row in rows),
        seeds=request.seeds or ((0,) if request.budget == "quick" else (0, 1, 2)),
        budget=request.budget,
        budget_note=note(steps_text([row.config for row in rows], request.budget), shows, said),
        splits="seed",
        baseline=baseline,
        axes=tuple(rows[0].axes),
        figures=figures,
        after=write_decodability,
    )


EXPERIMENTS: dict[str, Callable[[Request], Experiment]] = {
    "hyperteacher-model-size": hyperteacher_model_size,
    "hyperteacher-data": hyperteacher_data,
    "hyperteacher-support": hyperteacher_support,
    "hyperteacher-connected": hyperteacher_connected,
    "hyperteacher-encoding": hyperteacher_encoding,
    "hyperteacher-scaling-law": hyperteacher_scaling_law,
    "preference-model-size": preference_model_size,
    "preference-data": preference_data,
    "preference-support": preference_support,
    "preference-scaling-law": preference_scaling_law,
    "goal-model-size": goal_model_size,
    "goal-support": goal_support,
}
