"""The bar that shows how far a run has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Report", "progress"]

Report = Callable[[str, int], None]  # what goes on, and how many cells were finished by it


@contextmanager
def progress(console: Console, total: int) -> Iterator[Report]:
    """Show a bar of so many cells; yields what moves it on."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=total)

        def report(text: str, finished: int) -> None:
            bar.update(task, description=text, advance=finished)

        yield report
        bar.update(task, description="done")
