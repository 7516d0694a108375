"""What suites of timed cells report: tables for the terminal, and files to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from dfwlayer_bench.bench.report import median, settings_text
from dfwlayer_bench.bench.turns import TimedCell, TimedSystem
from dfwlayer_bench.report import text
from dfwlayer_bench.report.files import table_of_texts, write_results
from dfwlayer_bench.report.machine import machine_text
from dfwlayer_bench.report.terminal import PLAIN, output

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["OURS", "Tables", "ratio_of", "reasons_of", "settings_of_systems"]

OURS = "dfwlayer"


class Row(Protocol):
    """One system on one problem, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def system(self) -> str:
        """Its name."""

    @property
    def status(self) -> str:
        """As of `bench.store.Cell`."""


class Ended(Protocol):
    """A cell of any suite."""

    system: str
    status: str
    detail: str


Own = TypeVar("Own", bound=TimedCell)
OwnRow = TypeVar("OwnRow", bound=Row)


@dataclass(frozen=True)
class Tables(Generic[Own, OwnRow]):
    """How a suite reports its cells."""

    name: str  # of the suite and its files
    cell: type[Own]
    row: type[OwnRow]
    systems: Mapping[str, TimedSystem[Any]]
    header: tuple[str, ...]
    width: int  # columns of the terminal that a table needs
    rows: Callable[[Sequence[Own]], list[OwnRow]]  # of cells, those never begun left out
    problem: Callable[[OwnRow], str]  # rows with the same one are a table
    title: Callable[[OwnRow], str]  # of a table, by its first row
    texts: Callable[[OwnRow], tuple[str, ...]]  # what stands below the header
    draw: Callable[[Path, Sequence[OwnRow]], None] | None = None  # figures

    def finish(self, out: Path, cells: Sequence[Own], about: dict[str, Any]) -> None:
        """Tables on standard output, files in the folder."""
        from rich.console import Console

        rows = self.rows(cells)
        if not rows:
            return
        shown = output(self.width)
        for title, group in self.groups(rows):
            shown.print(self.table(group, title))
        for name, settings in self.settings(cells).items():
            shown.print(f"[bold]{name}[/bold]: {settings}", highlight=False)
        for line in reasons_of(cells):
            shown.print(line, **PLAIN)
        markdown = self.markdown(cells, rows, about)
        write_results(out, self.name, self.row, rows, cells, about, markdown)
        files = [f"{self.name}.{kind}" for kind in ("csv", "json", "md")]
        if self.draw is not None:
            self.draw(out, rows)
            files.append("the figures")
        wrote = f"Wrote {', '.join(files[:-1])} and {files[-1]} to {out}"
        Console(stderr=True).print(wrote, **PLAIN)

    def groups(self, rows: Sequence[OwnRow]) -> list[tuple[str, list[OwnRow]]]:
        """The rows by problem, each group with its title."""
        groups: dict[str, list[OwnRow]] = {}
        for row in rows:
            groups.setdefault(self.problem(row), []).append(row)
        return [(self.title(group[0]), group) for group in groups.values()]

    def table(self, rows: Sequence[OwnRow], title: str) -> Table:
        """The rows of one problem, for the terminal."""
        plain = {"ok": ""}
        styled = [
            (self.texts(row), "bold" if row.system == OURS else plain.get(row.status, "dim"))
            for row in rows
        ]
        return table_of_texts(self.header, styled, title)

    def settings(self, cells: Sequence[Own]) -> dict[str, str]:
        """What each system that was told anything was told."""
        return settings_of_systems(self.systems, cells)

    def markdown(self, cells: Sequence[Own], rows: Sequence[OwnRow], about: dict[str, Any]) -> str:
        """The command, the machine, the tables and the settings."""
        machine = f"{machine_text(about['machine'])}; float64 on the CPU."
        lines = [f"`{about['command']}`", "", machine]
        for title, group in self.groups(rows):
            lines += ["", f"### {title}", ""]
            lines += text.markdown_table(self.header, [self.texts(row) for row in group])
        lines += ["", "### Settings", ""]
        lines += [f"- {name}: {settings}" for name, settings in self.settings(cells).items()]
        return "\n".join(lines) + "\n"


def reasons_of(cells: Iterable[Ended]) -> list[str]:
    """Why systems have no row of numbers, each reason once: a column of a table may cut it."""
    lines = [
        f"{cell.system}: {text.status(cell.status, cell.detail)}"
        for cell in cells
        if cell.status in ("missing", "failed", "time limit")
    ]
    return list(dict.fromkeys(lines))


def ratio_of(cell: TimedCell, ours: TimedCell | None) -> float | None:
    """Of both passes to dfwlayer's; of the forward pass where there is no other."""
    if ours is None:
        return None
    both = median(cell.both_seconds)
    own = median(cell.forward_seconds) if both is None else both
    base = median(ours.forward_seconds if both is None else ours.both_seconds)
    return None if own is None or base is None else own / base


def settings_of_systems(systems: Iterable[str], cells: Sequence[TimedCell]) -> dict[str, str]:
    """What each system that was told anything was told."""
    found = {
        name: [cell.settings for cell in cells if cell.system == name and cell.settings]
        for name in systems
    }
    return {name: settings_text(own) for name, own in found.items() if own}
