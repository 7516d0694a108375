"""The report as data: findings, and sections of paragraphs, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dfwlayer_bench.report.findings import COLOURS, VERDICTS, Finding
from dfwlayer_bench.report.text import markdown_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Document", "Picture", "Section", "Table", "markdown", "show"]


@dataclass(frozen=True)
class Table:
    """Texts in rows; the first ``heads`` columns name the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    heads: int = 1


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn, by the name of its files without the ending."""

    name: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A section of the report, made by the part of the run that ``part`` names."""

    part: str
    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Document:
    """All of it."""

    title: str
    lead: Sequence[str]
    command: str
    findings: Sequence[Finding]
    sections: Sequence[Section]


def markdown(document: Document) -> str:
    """The document as Markdown, its figures as files beside it."""
    lines = [f"# {document.title}", "", f"`{document.command}`", ""]
    for paragraph in document.lead:
        lines += [paragraph, ""]
    for verdict, heading in VERDICTS.items():
        own = [finding for finding in document.findings if finding.verdict == verdict]
        if own:
            lines += [f"## {heading}", ""]
            lines += [f"- **{finding.claim}** {finding.evidence}" for finding in own]
            lines += [""]
    for section in document.sections:
        lines += [f"## {section.title}", ""]
        for paragraph in section.paragraphs:
            lines += [paragraph, ""]
        for table in section.tables:
            lines += [f"### {table.title}", "", *markdown_table(table.header, table.rows), ""]
            lines += [f"- {note}" for note in table.notes] + ([""] if table.notes else [])
        for picture in section.pictures:
            lines += [f"![{picture.caption}]({picture.name}.png)", ""]
    return "\n".join(lines).rstrip() + "\n"


def show(document: Document, parts: Sequence[str], output: Console) -> None:
    """The tables of these parts and all findings, on the terminal."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    for section in document.sections:
        if section.part not in parts:
            continue
        output.rule(escape(section.title), align="left")
        for table in section.tables:
            drawn = RichTable(title=escape(table.title), box=box.SIMPLE, title_justify="left")
            for column, name in enumerate(table.header):
                drawn.add_column(escape(name), justify="left" if column < table.heads else "right")
            for row in table.rows:
                drawn.add_row(*(escape(value) for value in row))
            output.print(drawn)
            for note in table.notes:
                output.print(f"  {escape(note)}", highlight=False)
    for finding in document.findings:
        colour = COLOURS[finding.verdict]
        output.print(
            f"[{colour}]{finding.verdict}[/]: [bold]{escape(finding.claim)}[/] "
            f"{escape(finding.evidence)}",
            highlight=False,
        )
