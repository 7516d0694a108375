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
from dfwlayer_bench.report.machine import clock_text, machine_text
from dfwlayer_bench.report.terminal import PLAIN, output

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BOTH", "ERROR", "FORWARD", "GRADIENT_ERROR", "OURS", "RATIO", "STATUS", "SYSTEM"]
__all__ += ["VIOLATION", "Column", "Tables", "TimedRow", "ratio_of", "reasons_of", "row_of"]
__all__ += ["settings_of_systems"]

OURS = "dfwlayer"


class Row(Protocol):
    """One system on one problem, a dataclass.

    Its fields are those of the cell by their names; ``label`` is the system's, ``calls`` their
    number, and times are medians over these.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def system(self) -> str:
        """Its name."""

    @property
    def status(self) -> str:
        """As of `bench.store.Cell`."""


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    """One system on one problem; times are medians over the repetitions."""

    problem: str
    system: str
    label: str
    status: str
    detail: str
    calls: int
    forward_seconds: float | None
    both_seconds: float | None
    ratio: float | None  # see `ratio_of`


@dataclass(frozen=True)
class Column:
    """What stands in a column of a table, and above it."""

    title: str
    text: Callable[[Any], str]  # of a row


SYSTEM = Column("system", lambda row: str(row.label))
FORWARD = Column("forward", lambda row: text.time(row.forward_seconds))
BOTH = Column("forward + backward", lambda row: text.time(row.both_seconds))
RATIO = Column("× dfwlayer", lambda row: text.times(row.ratio))
ERROR = Column("error of x", lambda row: text.small(row.error))
GRADIENT_ERROR = Column("gradient error", lambda row: text.small(row.gradient_error))
VIOLATION = Column("violation", lambda row: text.small(row.violation))
STATUS = Column("status", lambda row: text.status(row.status, row.detail))
# of suites that know the exact answers
MEASURED = SYSTEM, BOTH, FORWARD, RATIO, ERROR, GRADIENT_ERROR, VIOLATION


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
    columns: tuple[Column, ...]
    width: int  # columns of the terminal that a table needs
    title: Callable[[OwnRow], str]  # rows with the same one are a table
    draw: Callable[[Path, Sequence[OwnRow]], None] | None = None  # figures

    @property
    def header(self) -> list[str]:
        """What stands above the columns."""
        return [column.title for column in self.columns]

    def texts(self, row: OwnRow) -> list[str]:
        """What stands in them."""
        return [column.text(row) for column in self.columns]

    def rows(self, cells: Sequence[Own]) -> list[OwnRow]:
        """One for each cell that was begun."""
        ours = {cell.given: cell for cell in cells if cell.system == OURS}
        return [
            row_of(self.row, cell, self.systems, ratio=ratio_of(cell, ours.get(cell.given)))
            for cell in cells
            if cell.status != "pending"
        ]

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
            groups.setdefault(self.title(row), []).append(row)
        return list(groups.items())

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
        machine = f"{machine_text(about['machine'])}; float64 on the CPU." + clock_text(about)
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


def row_of(
    kind: type[OwnRow], cell: TimedCell, systems: Mapping[str, Any], **derived: object
) -> OwnRow:
    """The row of a cell, with what was derived from others."""
    known = {
        "problem": cell.given,
        "label": systems[cell.system].label,
        "calls": len(cell.forward_seconds),
        "forward_seconds": median(cell.forward_seconds),
        "both_seconds": median(cell.both_seconds),
        **derived,
    }
    names = kind.__dataclass_fields__
    return kind(**{name: known[name] if name in known else getattr(cell, name) for name in names})


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
