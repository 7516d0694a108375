"""``dfw robotics``: experts that keep a power limit, and policies that imitate them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.robotics.tasks import Task

__all__ = [
    "Device",
    "Fresh",
    "Out",
    "Seed",
    "TaskName",
    "check_task",
    "find_expert",
    "refuse",
    "robotics_app",
]

TaskName = Annotated[str, typer.Option("--task", help="HC+O, R+O03 or R+O10.")]
Out = Annotated[Path, typer.Option(help="Folder for results; what was interrupted goes on there.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Forget what the folder holds and start over.")
]
OUT = Path("robotics-results")
SAMPLE = 15_000
TRANSITIONS = "transitions.npz"
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def robotics_app() -> typer.Typer:
    """``dfw robotics`` with one subcommand a stage."""
    # here, because that module uses this one's options
    from dfwlayer_bench.robotics.imitation_commands import add_to

    app = typer.Typer(
        help="Robots with a power limit: train experts, collect data, imitate, evaluate.",
        no_args_is_help=True,
    )
    app.command("train-expert")(train_expert)
    app.command("collect")(collect)
    add_to(app)
    return app


def check_task(name: str) -> Task:
    """The task of this name, if its simulator is there; otherwise an error that says what to do."""
    from dfwlayer_bench.robotics.tasks import find_task, missing

    try:
        task = find_task(name)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    absent = missing(task)
    if absent:
        typer.echo(f"dfw robotics: {absent}", err=True)
        raise typer.Exit(1)
    return task


def find_expert(path: Path | None, out: Path, task: Task) -> Path:
    """The expert named, else the one trained in this folder, else the one of the package."""
    from dfwlayer_bench.robotics.expert import EXPERT
    from dfwlayer_bench.robotics.files import ASSETS

    trained = out / task.slug / "expert" / EXPERT
    shipped = ASSETS / f"{task.slug}_expert.safetensors"
    return path or (trained if trained.exists() else shipped)


def refuse(console: Console, error: Exception) -> int:
    """Say why a command cannot go on, and its exit code."""
    console.print(f"dfw robotics: {error}", style="red", **PLAIN)
    return 1


def train_expert(
    task: TaskName = "HC+O",
    steps: Annotated[int, typer.Option(min=1, help="Steps in the simulator.")] = 300_000,
    seed: Seed = 0,
    out: Out = OUT,
    device: Device = "cpu",
    evaluate_every: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations and checkpoints.")
    ] = 10_000,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes of an evaluation. (default: 5 for HC+O, 20 for R+O)"),
    ] = None,
    random_steps: Annotated[
        int, typer.Option(min=1, help="Steps with random actions, before learning starts.")
    ] = 10_000,
    threads: Annotated[int, typer.Option(min=1, help="Cores; more than one helps little.")] = 1,
    fresh: Fresh = False,
) -> int:
    """Train an expert with DPro: TD3 whose every action is projected onto the power limit.

    The folder TASK/expert gets the best actor (expert.safetensors), the curve of returns
    (curve.csv), a summary (expert.json), TensorBoard's events if that is installed, and a
    checkpoint: the same command goes on where it was stopped, and with more --steps it goes
    further.
    """
    chosen = check_task(task)
    import torch
    from rich.console import Console

    from dfwlayer_bench.bench_options import check_device
    from dfwlayer_bench.robotics.dpro import Settings
    from dfwlayer_bench.robotics.expert import EXPERT, Plan, Training
    from dfwlayer_bench.robotics.expert_run import train
    from dfwlayer_bench.robotics.files import FileError, prepare_folder

    check_device(device)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # the moments of units that died would slow Adam down
    console = Console()
    folder = out / chosen.slug / "expert"
    settings = Settings(random_steps=random_steps)
    plan = Plan(chosen, steps, seed, evaluate_every, settings, device, episodes)
    try:
        if fresh and folder.is_dir():
            shutil.rmtree(folder)
        prepare_folder(folder)
        training = Training(plan, folder)
        if training.resume():
            console.print(f"Going on from step {training.step} in {folder}", **PLAIN)
        done = train(training, console)
    except FileError as error:
        return refuse(console, error)
    if not done:
        console.print(
            f"Stopped at step {training.step}, saved in {folder}; run the same command again to "
            "go on",
            **PLAIN,
        )
        return 130
    best = max(training.curve, key=lambda point: point["return"])
    console.print(
        f"Best actor: return {best['return']:.1f} at step {best['step']:.0f}, violations "
        f"{best['violations']:.0f}; in {folder / EXPERT}",
        **PLAIN,
    )
    return 0


def collect(
    task: TaskName = "HC+O",
    transitions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of the expert. (default: 1,000,000 for HC+O, 300,000 for R+O)"
        ),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="A small set: as many steps as the package's samples.")
    ] = False,
    seed: Seed = 0,
    expert: Annotated[
        Path | None,
        typer.Option(
            help="The expert. (default: that of --out, else the one that comes with the package)"
        ),
    ] = None,
    out: Out = OUT,
    fresh: Fresh = False,
) -> int:
    """Run an expert in the simulator and keep what it sees and does, for imitation.

    The folder TASK/data gets transitions.npz: observations and actions, which all obey the power
    limit, and rewards. A run that was interrupted goes on when the same command is given again.
    """
    chosen = check_task(task)
    import torch
    from rich.console import Console

    from dfwlayer_bench.bench_progress import progress
    from dfwlayer_bench.robotics.collect import Collection, Request, fingerprint
    from dfwlayer_bench.robotics.files import FileError, load_actor, prepare_folder

    torch.set_num_threads(1)
    console = Console()
    folder = out / chosen.slug / "data"
    size = transitions or (SAMPLE if sample else chosen.transitions)
    try:
        if fresh and folder.is_dir():
            shutil.rmtree(folder)
        prepare_folder(folder)
        actor, _ = load_actor(find_expert(expert, out, chosen), chosen)
        request = Request(chosen, size, seed, fingerprint(actor))
        collection = Collection(request, actor, folder / TRANSITIONS)
        with progress(console, request.chunks) as report:
            done = 0

            def show(chunks: int) -> None:
                nonlocal done
                report(f"{chosen.name} chunks of the expert's steps", chunks - done)
                done = chunks

            dataset = collection.run(show)
    except FileError as error:
        return refuse(console, error)
    except KeyboardInterrupt:
        console.print("Interrupted; run the same command again to go on.")
        return 130
    found = dataset.metadata
    console.print(
        f"{len(dataset)} transitions, mean return {found['mean_return']:.1f}, violations "
        f"{found['violations']}, largest power {found['largest_power']:.6f} of {chosen.limit}; in "
        f"{collection.path}",
        **PLAIN,
    )
    return 0
