"""``dfw robotics gradients``: how agents learn through a limit on their power."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from dfwlayer_bench.options import check_names, split
from dfwlayer_bench.report.terminal import PLAIN, interrupted, output
from dfwlayer_bench.robotics import options

if TYPE_CHECKING:
    from dfwlayer_bench.report.progress import Report
    from dfwlayer_bench.robotics.gradients.training import Agents

__all__ = ["gradients"]

QUICK_STEPS, QUICK_SECONDS = 200, 30  # seconds on 2 cores
EVALUATE_EVERY, EVALUATIONS = 600, 10  # steps, and at least so many
SHOWN_EVERY = 20  # steps between two looks at the bar
WIDTH = 160  # columns, where the output is no terminal
CHECKPOINT = "checkpoint.safetensors"


def gradients(
    tasks: Annotated[
        list[str] | None, typer.Option(help="Machines to control. (default: arm pendulum)")
    ] = None,
    modes: Annotated[
        list[str] | None, typer.Option(help="Any of none, exact, penalty, soft. (default: all)")
    ] = None,
    seeds: Annotated[list[str] | None, typer.Option(help="Seeds. (default: 0 1 2 3 4)")] = None,
    steps: Annotated[
        int | None, typer.Option(min=20, help="Training steps. (default: 12000)")
    ] = None,
    threads: options.Threads = 1,
    out: options.Out = options.OUT,
    quick: Annotated[
        bool, typer.Option("--quick", help="As little as shows that it works.")
    ] = False,
    fresh: options.Fresh = False,
) -> int:
    """Compare gradient modes of actors whose actions obey a power limit.

    All agents of a task are trained together. The folder `gradients` gets tables (Markdown, CSV,
    JSON), all curves and a figure for each task. A run that was interrupted goes on from its last
    checkpoint when the same command is given again, and one that is finished goes further with
    more --steps.
    """
    import torch
    from rich.console import Console

    from dfwlayer_bench.report.document import show
    from dfwlayer_bench.report.machine import describe
    from dfwlayer_bench.report.progress import STEPS, announce, progress
    from dfwlayer_bench.robotics.files import FileError, prepare_folder, versions
    from dfwlayer_bench.robotics.gradients.plants import PLANTS
    from dfwlayer_bench.robotics.gradients.report import write_report
    from dfwlayer_bench.robotics.gradients.training import MODES, Agents, Plan

    names, ways = split(tasks) or list(PLANTS), split(modes) or list(MODES)
    check_names("--tasks", names, PLANTS)
    check_names("--modes", ways, MODES)
    numbers = split(seeds) or (["0"] if quick else ["0", "1", "2", "3", "4"])
    if not all(text.isdecimal() for text in numbers):
        raise typer.BadParameter(f"--seeds: expected integers of at least 0, got {numbers}")
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    if quick:
        announce(console, QUICK_SECONDS)
    folder = out / "gradients"
    ended = True
    try:
        if fresh and folder.is_dir():
            shutil.rmtree(folder)
        prepare_folder(folder)
        runs = []
        for name in names:
            count = steps or (QUICK_STEPS if quick else PLANTS[name].steps)
            own = tuple(map(int, numbers))
            every = min(EVALUATE_EVERY, count // EVALUATIONS)
            plan = Plan(name, tuple(ways), own, count, every)
            run = Agents(plan, folder / name / CHECKPOINT)
            run.resume()
            runs.append(run)
        left = sum(max(run.plan.steps - run.step, 0) for run in runs)
        with progress(console, left, STEPS) as bar:
            for run in runs:
                try:
                    _train(run, bar)
                except KeyboardInterrupt:
                    ended = False
                    break
        curves = {run.plan.task: run.curve for run in runs if run.curve}
        if curves:
            words = ["dfw", "robotics", "gradients", "--tasks", *names, "--modes", *ways]
            words += ["--seeds", *numbers, "--steps", str(runs[0].plan.steps)]
            about = {
                "command": shlex.join(words),
                "machine": describe("cpu"),
                "versions": versions(),
            }
            show(write_report(folder, curves, about), ["gradients"], output(WIDTH))
            console.print(f"Wrote tables and figures to {folder}", **PLAIN)
    except FileError as error:
        return options.refuse(console, error)
    return 0 if ended else interrupted(console)


def _train(run: Agents, bar: Report) -> None:
    """To the end, with a bar."""
    bar(f"{run.plan.task}, {len(run.state)} agents", 0)

    def report(step: int) -> None:
        if step % SHOWN_EVERY and step != run.plan.steps:
            return
        last = [p["mean_return"] for p in run.curve if p["step"] == run.curve[-1]["step"]]
        told = f", mean return {sum(last) / len(last):.1f}" if last else ""
        bar(f"{run.plan.task}, {len(run.state)} agents{told}", step - shown[0])
        shown[0] = step

    shown = [run.step]
    run.run(report)
