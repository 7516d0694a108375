"""``dfw robotics train-expert | collect``: experts that keep a power limit, and their data."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Annotated

import typer

from dfwlayer_bench.report.terminal import PLAIN, interrupted
from dfwlayer_bench.robotics import options

__all__ = ["collect", "train_expert"]

SAMPLE = 15_000


def train_expert(
    task: options.TaskName = "HC+O",
    steps: Annotated[int, typer.Option(min=1, help="Steps in the simulator.")] = 300_000,
    seed: options.Seed = 0,
    out: options.Out = options.OUT,
    device: options.Device = "cpu",
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
    threads: options.Threads = 1,
    fresh: options.Fresh = False,
    seeds: Annotated[
        list[str] | None,
        typer.Option(help="Several experts in place of --seed, each in its own folder seed-N."),
    ] = None,
    ray: options.Ray = None,
) -> int:
    """Train an expert with DPro: TD3 whose every action is projected onto the power limit.

    The folder TASK/expert gets the best actor (expert.safetensors), the curve of returns
    (curve.csv), a summary (expert.json), TensorBoard's events if that is installed, and a
    checkpoint: the same command goes on where it was stopped, and with more --steps it goes
    further. With --seeds there is one in TASK/expert/seed-N for each seed, one after the other, or
    with --ray side by side.
    """
    chosen = options.check_task(task)
    numbers = options.check_seeds(seeds)
    from rich.console import Console

    from dfwlayer_bench.options import check_device
    from dfwlayer_bench.robotics.expert.dpro import Settings
    from dfwlayer_bench.robotics.expert.seeds import Trained, train_here, train_on_ray
    from dfwlayer_bench.robotics.expert.training import EXPERT, Plan
    from dfwlayer_bench.robotics.files import FileError, prepare_folder
    from dfwlayer_bench.sweep import SweepError

    check_device(device)
    console = Console()
    folder = out / chosen.slug / "expert"
    settings = Settings(random_steps=random_steps)
    plan = Plan(chosen, steps, seed, evaluate_every, settings, device, episodes)
    plans = {folder / f"seed-{number}": replace(plan, seed=number) for number in numbers}
    plans = plans or {folder: plan}
    found: list[Trained] = []
    try:
        for place in plans:
            if fresh and place.is_dir():
                shutil.rmtree(place)
            prepare_folder(place)
        if ray is not None:
            found += train_on_ray(plans, threads, ray, console)
        else:
            for place, own in plans.items():
                found.append(train_here(own, place, threads, console))
                if not found[-1].finished:
                    break
    except (FileError, SweepError) as error:
        return options.refuse(console, error)
    except KeyboardInterrupt:
        return interrupted(console)
    stopped = [trained for trained in found if not trained.finished]
    for trained in stopped:
        console.print(
            f"Stopped at step {trained.step}, saved in {trained.folder}; run the same command "
            "again to go on",
            **PLAIN,
        )
    if stopped:
        return 130
    best = max(found, key=lambda trained: trained.best["return"])
    console.print(
        f"Best actor: return {best.best['return']:.1f} at step {best.best['step']:.0f}, violations "
        f"{best.best['violations']:.0f}; in {best.folder / EXPERT}",
        **PLAIN,
    )
    return 0


def collect(
    task: options.TaskName = "HC+O",
    transitions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of the expert. (default: 1,000,000 for HC+O, 300,000 for R+O)"
        ),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="A small set: as many steps as the package's samples.")
    ] = False,
    seed: options.Seed = 0,
    expert: options.Expert = None,
    out: options.Out = options.OUT,
    fresh: options.Fresh = False,
) -> int:
    """Run an expert in the simulator and keep what it sees and does, for imitation.

    The folder TASK/data gets transitions.npz: observations and actions, which all obey the power
    limit, and rewards. A run that was interrupted goes on when the same command is given again.
    """
    chosen = options.check_task(task)
    import torch
    from rich.console import Console

    from dfwlayer_bench.report.progress import progress
    from dfwlayer_bench.robotics.expert.collect import Collection, Request, fingerprint
    from dfwlayer_bench.robotics.files import FileError, load_actor, prepare_folder

    torch.set_num_threads(1)
    console = Console()
    folder = out / chosen.slug / "data"
    size = transitions or (SAMPLE if sample else chosen.transitions)
    try:
        if fresh and folder.is_dir():
            shutil.rmtree(folder)
        prepare_folder(folder)
        actor, _ = load_actor(options.find_expert(expert, out, chosen), chosen)
        request = Request(chosen, size, seed, fingerprint(actor))
        collection = Collection(request, actor, folder / options.TRANSITIONS)
        with progress(console, request.chunks) as report:
            done = 0

            def show(chunks: int) -> None:
                nonlocal done
                report(f"{chosen.name} chunks of the expert's steps", chunks - done)
                done = chunks

            dataset = collection.run(show)
    except FileError as error:
        return options.refuse(console, error)
    except KeyboardInterrupt:
        return interrupted(console)
    found = dataset.metadata
    console.print(
        f"{len(dataset)} transitions, mean return {found['mean_return']:.1f}, violations "
        f"{found['violations']}, largest power {found['largest_power']:.6f} of {chosen.limit}; in "
        f"{collection.path}",
        **PLAIN,
    )
    return 0
