"""How far a run has come: a bar on a terminal, lines where the output is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dfwlayer_bench.report.terminal import PLAIN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

__all__ = ["STEPS", "Lines", "Report", "announce", "bar", "lasting", "progress"]

Report = Callable[[str, int], None]  # what goes on, and how many cells were finished by it
Item = TypeVar("Item")
STEPS = 10.0  # seconds between two lines about steps, of which there are thousands
SILENCE = 30.0  # seconds after which a line says what is at work, though nothing has changed
TICK = 2.0  # seconds between two looks at that
AT_ONCE = 0.05  # seconds; cells finished faster than that after the start were there before
FEW = 0.1  # share of the cells; from fewer nobody can tell how long the others take


def lasting(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def announce(console: Console, seconds: int) -> None:
    """Say before a quick run how long it takes."""
    console.print(f"A quick run: up to {seconds} s on 2 cores", **PLAIN)


@dataclass
class _Task:
    """One thing that makes progress, named as rich names it."""

    description: str
    total: float
    completed: float
    fields: dict[str, Any]
    found: float = field(init=False)  # was finished before
    began: float = field(init=False)
    told: float = field(init=False)  # when the last line was

    def __post_init__(self) -> None:
        self.found = self.completed
        self.began = self.told = time.monotonic()

    def left(self) -> str:
        """How many are left, and about how long they take if they are like those finished."""
        now, count, own = time.monotonic(), self.total - self.completed, self.completed - self.found
        spent = f"{lasting(now - self.began)} so far"
        if count <= 0:
            return spent
        known = own > 0 and own >= FEW * (own + count)
        guess = f", about {lasting((now - self.began) / own * count)}" if known else ""
        return f"{spent}, {count:.0f} left{guess}"


class Lines:
    """What stands for a bar where the output is no terminal, with those methods of it in use.

    A line says what was finished, how many of how many that is, the time so far, how many are left
    and about how long they take. At least ``every`` seconds lie between two lines; the last one of
    all is always written, and with 0 every one is. Where nothing is finished for long, a line says
    what is at work now; a thread says it where a single call takes long.
    """

    def __init__(self, console: Console, formats: Iterable[str], every: float) -> None:
        self.console, self._every = console, every
        self._formats = tuple(formats)
        self._tasks: list[_Task] = []
        self._last = 0.0  # when anything went on
        self._current: _Task | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Lines:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    def add_task(
        self, description: str, total: float, completed: float = 0, **fields: Any
    ) -> TaskID:
        """One more thing that makes progress; returns its number."""
        self._tasks.append(_Task(description, total, completed, fields))
        return cast("TaskID", len(self._tasks) - 1)

    def update(
        self,
        number: TaskID,
        *,
        advance: float = 0,
        completed: float | None = None,
        description: str | None = None,
        **fields: Any,
    ) -> None:
        """Go on, and say so if a line is due."""
        with self._lock:
            self._current = self._tasks[number]
            self._update(self._current, advance, completed, description, fields)

    def _update(
        self,
        task: _Task,
        advance: float,
        completed: float | None,
        description: str | None,
        fields: dict[str, Any],
    ) -> None:
        task.fields |= fields
        task.description = task.description if description is None else description
        before = task.completed
        task.completed = task.completed + advance if completed is None else completed
        now = time.monotonic()
        if task.completed <= before:
            if now - task.told >= max(self._every, STEPS):
                task.told = now
                self._say(task, "now ")
            return
        if before == task.found:  # its turn came when the one before was through
            task.began = max(task.began, self._last)
            if now - task.began < AT_ONCE:
                task.found, task.began = task.completed, now
        self._last = now
        if now - task.told >= self._every or task.completed >= task.total:
            task.told = now
            self._say(task)

    def track(self, items: Iterable[Item], description: str) -> Iterator[Item]:
        """Each of the items, telling how many were taken."""
        known = list(items)
        number = self.add_task(description, len(known))
        for item in known:
            yield item
            self.update(number, advance=1)

    def _watch(self) -> None:
        """Say now and then what is at work, as long as nothing else is said."""
        while not self._ended.wait(TICK):
            with self._lock:
                task, now = self._current, time.monotonic()
                if task is not None and now - task.told >= max(self._every, SILENCE):
                    task.told = now
                    self._say(task, "now ")

    def _say(self, task: _Task, prefix: str = "") -> None:
        texts = [text.format(task=task) for text in self._formats]
        what = ", ".join(text for text in (task.description, *texts) if text)
        count = f"[{task.completed:.0f} of {task.total:.0f}]"
        self.console.print(f"{count} {prefix}{what} ({task.left()})", **PLAIN)


def bar(console: Console, *columns: ProgressColumn, every: float = STEPS) -> Progress | Lines:
    """What every bar shows: a description, the bar, how many of how many; then these columns.

    Where the console is no terminal it is `Lines` with the texts of these columns.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if not console.is_terminal:
        texts = (column.text_format for column in columns if isinstance(column, TextColumn))
        return Lines(console, texts, every)
    first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*first, *columns, console=console)


@contextmanager
def progress(console: Console, total: int, every: float = 0.0) -> Iterator[Report]:
    """Show a bar of so many cells, or write a line for each; yields what moves it on.

    With ``every`` so many seconds lie between two lines.
    """
    from rich.progress import TimeElapsedColumn

    with bar(console, TimeElapsedColumn(), every=every) as shown:
        task: Any = shown.add_task("starting", total=total)

        def report(text: str, finished: int) -> None:
            shown.update(task, description=text, advance=finished)

        yield report
        shown.update(task, description="done")
