"""``dfw robotics imitate | evaluate | all``: policies that learn an expert's actions."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfwlayer_bench.options import check_names, split
from dfwlayer_bench.report.terminal import PLAIN, interrupted, output
from dfwlayer_bench.robotics import options
from dfwlayer_bench.robotics.expert.commands import collect, train_expert

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.report.document import Document
    from dfwlayer_bench.robotics.imitation.training import Plan
    from dfwlayer_bench.robotics.tasks import Task

__all__ = ["evaluate", "imitate", "run_all"]

STEPS, QUICK_STEPS = 4000, 200
SLOW_STEPS, QUICK_SLOW_STEPS = 1000, 10
SEEDS, QUICK_SEEDS = (0, 1, 2, 3, 4), (0,)
REPEATS, QUICK_REPEATS = 100, 5
EXPERT_STEPS, QUICK_EXPERT_STEPS = 300_000, 600
QUICK_TRANSITIONS = 2000
EPISODES, QUICK_EPISODES = 10, 1
TRACE_STEPS = 300  # of an episode, shown in the figure of the power
FILM_STEPS, QUICK_FILM_STEPS = 240, 20
QUICK_SECONDS = {"imitate": 40, "evaluate": 15, "all": 55}  # on 2 cores
DRAWN = ("expert", "none", "dfwlayer")  # whose power is drawn
QUICK_EVALUATED = ("none", "dfwlayer", "radial")  # others take a minute for an episode
FILMED = ("none", "dfwlayer")
WIDTH = 200  # columns, where the output is no terminal

Layers = Annotated[
    list[str] | None, typer.Option(help="Last layers to compare. (default: every one there is)")
]
Seeds = Annotated[list[str] | None, typer.Option(help="Seeds of the runs. (default: 0 1 2 3 4)")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Training steps of a policy. (default: 4000)")
]
Episodes = Annotated[
    int | None, typer.Option(min=1, help="Fresh episodes of each policy. (default: 10)")
]
Quick = Annotated[bool, typer.Option("--quick", help="As little as shows that it works.")]


def imitate(
    task: options.TaskName = "HC+O",
    steps: Steps = None,
    slow_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps of cvxpylayers and dfw-annealed. (default: 1000)"),
    ] = None,
    seeds: Seeds = None,
    layers: Layers = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="What `collect` wrote. (default: that of --out, else the sample that comes with "
            "the package)"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a training step.")] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of Adam.")] = 1e-4,
    test_every: Annotated[int, typer.Option(min=1, help="Steps between tests.")] = 200,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps of each layer that are timed. (default: 100)"),
    ] = None,
    threads: options.Threads = 1,
    out: options.Out = options.OUT,
    quick: Quick = False,
    fresh: options.Fresh = False,
) -> int:
    """Train policies to imitate the expert, one for each last layer and seed.

    The folder TASK/imitation gets the policies (runs/), the curves, a table as Markdown, CSV and
    JSON, the figures, and report.html. A run that was interrupted goes on when the same command
    is given again, and so do runs with more --steps, --seeds or --layers.
    """
    chosen = options.check_task(task)
    from dfwlayer_bench.robotics.files import FileError, load_dataset, prepare_folder
    from dfwlayer_bench.robotics.imitation.layers import LAYERS
    from dfwlayer_bench.robotics.imitation.run import Job, imitate_all, note, time_all, write_all
    from dfwlayer_bench.robotics.imitation.training import Plan
    from dfwlayer_bench.robotics.imitation.training import split as split_data

    names, numbers = _layers(layers), _seeds(seeds, quick)
    few, many = (QUICK_SLOW_STEPS, QUICK_STEPS) if quick else (SLOW_STEPS, STEPS)
    most = steps or many
    most_slow = min(slow_steps or few, most)
    console = _begun("imitate", threads, quick)
    folder = out / chosen.slug / "imitation"
    try:
        if fresh and folder.is_dir():
            shutil.rmtree(folder)
        prepare_folder(folder)
        path = _data(data, out, chosen)
        dataset = load_dataset(path, chosen)
        samples = split_data(dataset)
        plan = Plan(chosen, most, batch_size, learning_rate, test_every)
        able = [name for name in names if LAYERS[name].missing() is None]
        jobs = [
            Job(name, seed, most_slow if LAYERS[name].slow else most)
            for seed in numbers
            for name in able
        ]
        about = {
            "command": _command(plan, most_slow, numbers, names),
            "data": f"{samples.fingerprint} of {path.name}",
            "expert": {name: dataset.metadata.get(name) for name in ("made_by", "mean_return")},
            "batch_size": batch_size,
            "learning_rate": learning_rate,
        }
        note(folder, chosen, about)

        def work() -> None:
            timed = repeats or (QUICK_REPEATS if quick else REPEATS)
            time_all(plan, samples, able, timed, folder, console)
            imitate_all(plan, samples, jobs, folder, console)

        return _through(work, lambda: write_all(folder, chosen, names, numbers), folder, console)
    except FileError as error:
        return options.refuse(console, error)


def evaluate(
    task: options.TaskName = "HC+O",
    episodes: Episodes = None,
    seeds: Seeds = None,
    layers: Layers = None,
    expert: options.Expert = None,
    animation: Annotated[
        bool, typer.Option(help="Film the policies without and with the layer.")
    ] = True,
    threads: options.Threads = 1,
    out: options.Out = options.OUT,
    quick: Quick = False,
) -> int:
    """Run the imitating policies in the simulator: returns, violations, power, an animation.

    The results join those of `imitate` in TASK/imitation.
    """
    chosen = options.check_task(task)
    from dfwlayer_bench.robotics.files import FileError, load_actor
    from dfwlayer_bench.robotics.imitation.evaluate import EXPERT_NAME, Policies
    from dfwlayer_bench.robotics.imitation.run import (
        animate,
        evaluate_all,
        trace_power,
        trained,
        write_all,
    )

    shown = list(QUICK_EVALUATED) if quick and not layers else layers
    names, numbers = _layers(shown), _seeds(seeds, quick)
    console = _begun("evaluate", threads, quick)
    folder = out / chosen.slug / "imitation"
    try:
        teacher, _ = load_actor(options.find_expert(expert, out, chosen), chosen)
        jobs = trained(folder, names, numbers)
        policies = Policies(folder, chosen, teacher)

        def work() -> None:
            count = episodes or (QUICK_EPISODES if quick else EPISODES)
            evaluate_all(policies, jobs, count, console)
            first = [job for job in jobs if job[0] == EXPERT_NAME or job[1] == numbers[0]]
            trace_power(policies, [job for job in first if job[0] in DRAWN], TRACE_STEPS)
            if animation:
                steps = QUICK_FILM_STEPS if quick else FILM_STEPS
                filmed = [job for job in first if job[0] in FILMED]
                if filmed and animate(policies, filmed, steps) is None:
                    console.print("The simulator cannot draw here: there is no animation.")

        return _through(work, lambda: write_all(folder, chosen, names, numbers), folder, console)
    except FileError as error:
        return options.refuse(console, error)


def run_all(
    task: options.TaskName = "HC+O",
    expert_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the expert's training. (default: 300000)")
    ] = None,
    transitions: Annotated[
        int | None,
        typer.Option(
            min=10, help="Steps to collect. (default: 1,000,000 for HC+O, 300,000 for R+O)"
        ),
    ] = None,
    steps: Steps = None,
    seeds: Seeds = None,
    layers: Layers = None,
    episodes: Episodes = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    out: options.Out = options.OUT,
    quick: Quick = False,
    fresh: options.Fresh = False,
) -> int:
    """Train an expert, collect what it does, imitate it with every layer, and evaluate.

    Each part goes on where it was stopped when the same command is given again.
    """
    chosen = options.check_task(task)
    from rich.console import Console

    from dfwlayer_bench.report.progress import announce

    if fresh and (out / chosen.slug).is_dir():
        shutil.rmtree(out / chosen.slug)
    if quick:
        announce(Console(stderr=True), QUICK_SECONDS["all"])
    size = transitions or (QUICK_TRANSITIONS if quick else None)
    steps_of_expert = expert_steps or (QUICK_EXPERT_STEPS if quick else EXPERT_STEPS)
    parts: list[Callable[[], int]] = [
        lambda: train_expert(
            task,
            steps_of_expert,
            seed,
            out=out,
            device=device,
            evaluate_every=steps_of_expert // 2 if quick else 10_000,
            random_steps=steps_of_expert // 2 if quick else 10_000,
        ),
        lambda: collect(task, size, seed=seed, out=out),
        lambda: imitate(task, steps, seeds=seeds, layers=layers, out=out, quick=quick),
        lambda: evaluate(task, episodes, seeds=seeds, layers=layers, out=out, quick=quick),
    ]
    for part in parts:
        code = part()
        if code:
            return code
    return 0


def _through(
    work: Callable[[], None], report: Callable[[], Document], folder: Path, console: Console
) -> int:
    """Do the work, or as much as there is time for, and report on it: the exit code."""
    ended = True
    try:
        work()
    except KeyboardInterrupt:
        ended = False
    _show(report(), console, folder)
    return 0 if ended else interrupted(console)


def _begun(command: str, threads: int, quick: bool) -> Console:
    """The console, after how long a quick run takes was said."""
    import torch
    from rich.console import Console

    from dfwlayer_bench.report.progress import announce

    torch.set_num_threads(threads)
    console = Console(stderr=True)
    if quick:
        announce(console, QUICK_SECONDS[command])
    return console


def _layers(given: list[str] | None) -> list[str]:
    from dfwlayer_bench.robotics.imitation.layers import LAYERS

    names = split(given) or list(LAYERS)
    check_names("--layers", names, LAYERS)
    return names


def _seeds(given: list[str] | None, quick: bool) -> list[int]:
    return options.check_seeds(given) or list(QUICK_SEEDS if quick else SEEDS)


def _command(plan: Plan, slow_steps: int, seeds: Sequence[int], layers: Sequence[str]) -> str:
    """The command that makes these runs anew, from the same data."""
    words = ["dfw", "robotics", "imitate", "--task", plan.task.name, "--steps", str(plan.steps)]
    words += ["--slow-steps", str(slow_steps), "--seeds", *map(str, seeds), "--layers", *layers]
    words += ["--batch-size", str(plan.batch_size), "--learning-rate", f"{plan.learning_rate:g}"]
    words += ["--test-every", str(plan.test_every)]
    return shlex.join(words)


def _show(document: Document, console: Console, folder: Path) -> None:
    from dfwlayer_bench.report.document import show

    show(document, ["imitation"], output(WIDTH))
    console.print(f"Wrote the report, tables and figures to {folder}", **PLAIN)


def _data(path: Path | None, out: Path, task: Task) -> Path:
    """The data named, else what was collected in this folder, else the package's sample."""
    from dfwlayer_bench.robotics.files import ASSETS

    if path is not None:
        return path
    collected = out / task.slug / "data" / options.TRANSITIONS
    return collected if collected.exists() else ASSETS / f"{task.slug}_sample.npz"
