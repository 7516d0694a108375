"""The report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from dfwlayer_bench.report.document import Document, Picture, Section, Table
from dfwlayer_bench.report.findings import VERDICTS, Finding

__all__ = ["page"]

STYLE = """
:root { color-scheme: light; --ink: #1d2430; --dim: #5b6472; --line: #d9dee6; --back: #f4f6f9;
  --good: #0f7b4f; --part: #8a6100; --bad: #b3261e; --none: #5b6472; --more: #1f5fa8; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--back);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
body > div { display: grid; grid-template-columns: 15rem minmax(0, 1fr); max-width: 1750px;
  margin: 0 auto; }
main { min-width: 0; padding: 1.2rem clamp(0.8rem, 3vw, 2.5rem) 4rem; }
h1 { font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; margin: 0.6rem 0; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 0.6rem; padding-top: 0.6rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 0.5rem; }
p, li { max-width: 80ch; overflow-wrap: anywhere; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow: auto;
  padding: 1.8rem 0.5rem 1rem 1.2rem; font-size: 0.88rem; }
nav a { display: block; padding: 0.22rem 0; text-decoration: none; }
nav a:hover, nav a:focus { text-decoration: underline; }
@media (max-width: 1000px) { /* one line above the text, which scrolls sideways */
  body > div { display: block; }
  nav { z-index: 1; background: var(--back); border-bottom: 1px solid var(--line);
    padding: 0.5rem clamp(0.8rem, 3vw, 2.5rem); white-space: nowrap; }
  nav a { display: inline-block; margin-right: 1.1rem; }
  h2 { scroll-margin-top: 2.6rem; } }
a { color: var(--more); }
code { font: 0.86em/1.45 ui-monospace, Menlo, Consolas, monospace; background: #e8ecf2;
  padding: 0.1em 0.3em; border-radius: 4px; overflow-wrap: anywhere; }
pre { background: #e8ecf2; padding: 0.7rem 0.9rem; border-radius: 6px; white-space: pre-wrap; }
pre code { padding: 0; background: none; }
.findings { display: grid; gap: 0.8rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); }
.finding { background: #fff; border: 1px solid var(--line); border-left: 5px solid var(--none);
  border-radius: 6px; padding: 0.6rem 0.9rem; }
.finding p { margin: 0.2rem 0; }
.finding .claim { font-weight: 600; }
.reproduces { border-left-color: var(--good); } .in-part { border-left-color: var(--part); }
.does-not-reproduce { border-left-color: var(--bad); }
.beyond-the-paper { border-left-color: var(--more); }
.scroll { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { padding: 0.32rem 0.7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; background: #fafbfc; }
th.head, td.head { text-align: left; }
th.name, td.name { position: sticky; left: 0; background: #fff;
  border-right: 1px solid var(--line); }
th.name, tr.paper td.name { background: #fafbfc; } tr.ours td.name { background: #eef4fb; }
td.text { text-align: left; white-space: normal; min-width: 14rem; }
tr:last-child td { border-bottom: 0; }
tr.paper td { color: var(--dim); font-style: italic; background: #fafbfc; }
tr.ours td { font-weight: 600; background: #eef4fb; }
.notes { font-size: 0.86rem; color: var(--dim); padding-left: 1.2rem; }
.pictures { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 6px;
  padding: 0.5rem; max-width: 46rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.86rem; color: var(--dim); padding: 0.3rem 0.4rem; }
@media (max-width: 30rem) { /* a phone: long names take two lines, so that numbers stay in sight */
  table { font-size: 0.78rem; }
  th, td { padding: 0.3rem 0.45rem; }
  th.name, td.name { white-space: normal; min-width: 6rem; } }
@media print { body { background: #fff; } .scroll { overflow: visible; } nav { display: none; }
  body > div { display: block; } }
"""

LONG = 40  # characters; a text longer than this may wrap


def page(document: Document, folder: Path) -> str:
    """The document with its figures, read from the folder, inside."""
    verdicts = _verdicts(document.findings)
    links = "".join(
        f'<a href="#{anchor}">{_text(title)}</a>'
        for anchor, title in (
            *((_anchor(verdict), VERDICTS[verdict]) for verdict in verdicts),
            *((f"s{index}", section.title) for index, section in enumerate(document.sections)),
        )
    )
    lead = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in document.lead)
    sections = "".join(
        _section(section, index, folder) for index, section in enumerate(document.sections)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(document.title)}</title>"
        '<link rel="icon" href="data:,">'  # a browser would ask the server for one
        f"<style>{STYLE}</style></head><body><div>"
        f'<nav aria-label="Contents">{links}</nav><main>'
        f"<h1>{_text(document.title)}</h1>{lead}"
        f"<pre><code>{_text(document.command)}</code></pre>"
        f"{_findings(document.findings)}{sections}</main></div></body></html>\n"
    )


def _verdicts(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """The findings by their verdict, in the order of VERDICTS, without those that nothing has."""
    by_verdict = {
        verdict: [finding for finding in findings if finding.verdict == verdict]
        for verdict in VERDICTS
    }
    return {verdict: own for verdict, own in by_verdict.items() if own}


def _anchor(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _findings(findings: Sequence[Finding]) -> str:
    parts = []
    for verdict, own in _verdicts(findings).items():
        cards = "".join(
            f'<div class="finding {_anchor(verdict)}">'
            f'<p class="claim">{_text(finding.claim)}</p><p>{_text(finding.evidence)}</p></div>'
            for finding in own
        )
        heading = f'<h2 id="{_anchor(verdict)}">{_text(VERDICTS[verdict])}</h2>'
        parts.append(f'{heading}<div class="findings">{cards}</div>')
    return "".join(parts)


def _section(section: Section, index: int, folder: Path) -> str:
    paragraphs = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in section.paragraphs)
    tables = "".join(_table(table) for table in section.tables)
    pictures = "".join(_picture(picture, folder) for picture in section.pictures)
    gallery = f'<div class="pictures">{pictures}</div>' if pictures else ""
    title = f'<h2 id="s{index}">{_text(section.title)}</h2>'
    return f"<section>{title}{paragraphs}{gallery}{tables}</section>"


def _table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_class(column, table.heads, value)}>{_text(value)}</{tag}>"
            for column, value in enumerate(row)
        )

    body = "".join(f"<tr{_row_class(row)}>{cells(row, 'td')}</tr>" for row in table.rows)
    notes = "".join(f"<li>{_text(note)}</li>" for note in table.notes)
    return (
        f'<h3>{_text(table.title)}</h3><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{cells(table.header, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _class(column: int, heads: int, value: str) -> str:
    """The last of the columns that name a row stays in view when the others scroll."""
    if column < heads:
        return ' class="head name"' if column == heads - 1 else ' class="head"'
    return ' class="text"' if len(value) > LONG else ""


def _row_class(row: Sequence[str]) -> str:
    if any(text.startswith("paper: ") for text in row[:2]):
        return ' class="paper"'
    return ' class="ours"' if any(text.startswith("dfwlayer") for text in row[:2]) else ""


def _picture(picture: Picture, folder: Path) -> str:
    data = base64.b64encode((folder / f"{picture.name}.png").read_bytes()).decode("ascii")
    caption = _text(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _text(value: str) -> str:
    """Escaped, and "n = 500" or "0.2 ± 0.1" never broken across lines."""
    for sign in "=±":
        value = value.replace(f" {sign} ", f"\u00a0{sign}\u00a0")
    return html.escape(value)
