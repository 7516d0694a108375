"""What the commands about robots have in common: their options, and where they find their files."""

from __future__ import annotations

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
]

TaskName = Annotated[str, typer.Option("--task", help="HC+O, R+O03 or R+O10.")]
Out = Annotated[Path, typer.Option(help="Folder for results; what was interrupted goes on there.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Forget what the folder holds and start over.")
]
OUT = Path("robotics-results")
TRANSITIONS = "transitions.npz"
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


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
    from dfwlayer_bench.robotics.expert.training import EXPERT
    from dfwlayer_bench.robotics.files import ASSETS

    trained = out / task.slug / "expert" / EXPERT
    shipped = ASSETS / f"{task.slug}_expert.safetensors"
    return path or (trained if trained.exists() else shipped)


def refuse(console: Console, error: Exception) -> int:
    """Say why a command cannot go on, and its exit code."""
    console.print(f"dfw robotics: {error}", style="red", **PLAIN)
    return 1
