"""The bar that shows how far a run has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

__all__ = ["Report", "bar", "progress"]

Report = Callable[[str, int], None]  # what goes on, and how many cells were finished by it


def bar(console: Console, *columns: ProgressColumn) -> Progress:
    """What every bar shows: a description, the bar, how many of how many; then these columns."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*first, *columns, console=console)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Report]:
    """Show a bar of so many cells; yields what moves it on."""
    from rich.progress import TimeElapsedColumn

    with bar(console, TimeElapsedColumn()) as shown:
        task = shown.add_task("starting", total=total)

        def report(text: str, finished: int) -> None:
            shown.update(task, description=text, advance=finished)

        yield report
        shown.update(task, description="done")
