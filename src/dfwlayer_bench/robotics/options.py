"""What the commands about robots have in common: options, checks, and where their files are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfwlayer_bench.options import Device, Fresh, Out, Ray, split
from dfwlayer_bench.report import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.robotics.tasks import Task

__all__ = [
    "OUT",
    "TRANSITIONS",
    "Device",
    "Expert",
    "Fresh",
    "Out",
    "Ray",
    "Seed",
    "TaskName",
    "Threads",
    "check_seeds",
    "check_task",
    "find_expert",
    "refuse",
]

TaskName = Annotated[str, typer.Option("--task", help="HC+O, R+O03 or R+O10.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Threads = Annotated[int, typer.Option(min=1, help="Cores; more than one helps little.")]
Expert = Annotated[
    Path | None,
    typer.Option(
        help="The expert. (default: that of --out, else the one that comes with the package)"
    ),
]
OUT = Path("robotics-results")
TRANSITIONS = "transitions.npz"


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


def check_seeds(given: list[str] | None) -> list[int]:
    """The numbers of --seeds, or an error that names the option; none where none are given."""
    texts = split(given)
    if not all(text.isdecimal() for text in texts):
        raise typer.BadParameter(f"--seeds: expected integers of at least 0, got {texts}")
    return [int(text) for text in texts]


def find_expert(path: Path | None, out: Path, task: Task) -> Path:
    """The expert named, else the one trained in this folder, else the one of the package."""
    from dfwlayer_bench.robotics.expert.training import EXPERT
    from dfwlayer_bench.robotics.files import ASSETS

    trained = out / task.slug / "expert" / EXPERT
    shipped = ASSETS / f"{task.slug}_expert.safetensors"
    return path or (trained if trained.exists() else shipped)


def refuse(console: Console, error: Exception) -> int:
    """Say why a command cannot go on, and its exit code."""
    return terminal.refuse(console, f"dfw robotics: {error}", 1)
