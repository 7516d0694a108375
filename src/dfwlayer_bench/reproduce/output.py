"""Everything a reproduction leaves in its folder: tables, figures, the report."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dfwlayer_bench.bench.store import Cell, Store
from dfwlayer_bench.report.document import Document, Section, markdown
from dfwlayer_bench.report.html import page
from dfwlayer_bench.report.machine import machine_text
from dfwlayer_bench.reproduce.figures import draw_studies, draw_systems
from dfwlayer_bench.reproduce.findings import system_findings
from dfwlayer_bench.reproduce.rows import (
    Group,
    Spread,
    SystemRow,
    groups_of_records,
    load_answers,
    system_rows,
)
from dfwlayer_bench.reproduce.sections import (
    PAPER,
    accuracy_section,
    activity,
    settings_section,
    table1_section,
)
from dfwlayer_bench.reproduce.studies.base import Record
from dfwlayer_bench.reproduce.studies.findings import study_findings
from dfwlayer_bench.reproduce.studies.sections import (
    ablation_sections,
    cosine_section,
    temperature_section,
)

__all__ = ["REPORT", "Results", "write_results"]

REPORT = "report.html"


@dataclass(frozen=True)
class Results:
    """What a run has found so far."""

    cells: Sequence[Cell]
    records: Sequence[Record]
    about: dict[str, Any]


def write_results(store: Store, results: Results) -> Document:
    """Tables, figures and the report of everything there is; returns the report as data."""
    folder = store.folder
    rows = system_rows(results.cells, load_answers(results.cells, store))
    groups = groups_of_records(results.records)
    drawn = draw_systems(folder, rows) | draw_studies(folder, groups)
    sections: list[Section] = []
    if rows:
        sections.append(table1_section(rows, drawn["table1"]))
        sections.append(accuracy_section(rows, drawn["accuracy"]))
    temperatures = [group for group in groups if group.study == "temperature"]
    if temperatures:
        sections.append(temperature_section(temperatures, drawn.get("temperature", [])))
    sections += ablation_sections(groups, drawn)
    cosines = [group for group in groups if group.study == "cosine"]
    if cosines:
        sections.append(cosine_section(cosines))
    sections.append(settings_section(results.cells, results.about))
    document = Document(
        "DFWLayer: the paper's experiments, reproduced",
        [
            "Minimise ½xᵀPx + qᵀx subject to ‖w∘x‖₁ ≤ t, and differentiate the sum of x in q. "
            f"{machine_text(results.about['machine'])}; {results.about['dtype']} on "
            f"{results.about['device']}.",
            *_about_activity(rows),
            "Every verdict below is computed from this run by the rule told with it.",
        ],
        results.about["command"],
        [*system_findings(rows), *study_findings(groups)],
        sections,
    )
    _write_tables(folder, rows, groups)
    content = {
        **results.about,
        "findings": [asdict(finding) for finding in document.findings],
        "rows": [asdict(row) for row in rows],
        "cells": [asdict(cell) for cell in results.cells],
        "records": [asdict(record) for record in results.records],
    }
    (folder / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "results.md").write_text(markdown(document), encoding="utf-8")
    (folder / REPORT).write_text(page(document, folder), encoding="utf-8")
    return document


def _about_activity(rows: Sequence[SystemRow]) -> list[str]:
    active = "; ".join(activity(rows, PAPER))
    return [f"In the paper's own problems the constraint is active for {active}."] if active else []


def _write_tables(folder: Path, rows: Sequence[SystemRow], groups: Sequence[Group]) -> None:
    if rows:
        _write_csv(folder / "systems.csv", [_flat(row) for row in rows])
    curves, numbers = [], []
    for group in groups:
        head = {
            "study": group.study,
            "family": group.family,
            "n": group.n,
            "variant": group.label,
            "settings": ", ".join(f"{name}={value}" for name, value in group.settings.items()),
            "status": group.status,
            "trials": len(group.records),
        }
        values = group.records[0].values if group.records else {}
        for name, value in values.items():
            if isinstance(value, list) and name != "step":
                steps, spreads = group.curve(name)
                curves += [
                    {**head, "quantity": name, "step": step, **_mean_and_std("", spread)}
                    for step, spread in zip(steps, spreads, strict=True)
                ]
            elif name != "step":
                spread = group.spread(name)
                numbers.append({**head, "quantity": name, **_mean_and_std("", spread)})
        if not values:
            numbers.append({**head, "quantity": "", "mean": None, "std": None})
    if numbers:
        _write_csv(folder / "studies.csv", numbers)
    if curves:
        _write_csv(folder / "curves.csv", curves)


def _flat(row: SystemRow) -> dict[str, Any]:
    """A mean and a standard deviation become two columns."""
    flat: dict[str, Any] = {}
    for item in fields(row):
        value = getattr(row, item.name)
        if "Spread" in str(item.type):
            flat |= _mean_and_std(f"{item.name}_", value)
        else:
            flat[item.name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return flat


def _mean_and_std(prefix: str, spread: Spread | None) -> dict[str, float | None]:
    return {
        f"{prefix}mean": None if spread is None else spread.mean,
        f"{prefix}std": None if spread is None else spread.std,
    }


def _write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
