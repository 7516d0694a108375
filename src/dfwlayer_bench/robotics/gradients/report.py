"""The comparison as tables and figures: a row for each way to learn through the limit."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dfwlayer_bench.report.document import Document, Picture, Section, Table, markdown
from dfwlayer_bench.report.figures import Curve, Panel, look_of, save_figure
from dfwlayer_bench.report.intervals import interval
from dfwlayer_bench.report.machine import machine_text
from dfwlayer_bench.report.text import NOTHING, significant
from dfwlayer_bench.robotics.files import writing
from dfwlayer_bench.robotics.gradients.plants import PLANTS
from dfwlayer_bench.robotics.gradients.training import MODES

__all__ = ["Row", "rows_of", "write_report"]

BASE = "exact"  # what the others are compared with, seed by seed
LAST = 3  # evaluations whose mean counts as the end
HEADER = (
    "gradient",
    "seeds",
    "return at the end",
    "less the exact mode's, seed by seed",
    "mean return on the way",
    "wanted actions outside",
    "their distance",
    "gradient lost",
    "violations",
)
NOTES = (
    "Mean and 95 % interval (Student's t) over the seeds.",
    f"The end is the mean of the last {LAST} evaluations.",
    "Outside is the share of observations where the network wants more than is allowed, the "
    "distance is that to the action executed, and lost is the share of the critic's gradient that "
    "the derivative of the projection removes: 1 − Σ‖Jᵀv‖² / Σ‖v‖². All at the end.",
)
Points = Sequence[Mapping[str, Any]]  # of the curves, one for each agent and evaluation


@dataclass(frozen=True)
class Row:
    """One mode on one task; intervals are half their width."""

    task: str
    mode: str
    seeds: int
    steps: int
    end: float
    end_interval: float | None
    gain: float  # over BASE, paired by seed
    gain_interval: float | None
    on_the_way: float
    on_the_way_interval: float | None
    outside: float
    distance: float
    lost: float
    violation_rate: float


def rows_of(task: str, curve: Points) -> list[Row]:
    """A row for each mode."""
    steps = sorted({point["step"] for point in curve})
    ends = {mode: _ends(curve, mode, steps) for mode in dict.fromkeys(p["mode"] for p in curve)}
    base = ends.get(BASE)
    rows = []
    for mode, own in ends.items():
        end = [each["mean_return"] for each in own.values()]
        way = [each["on_the_way"] for each in own.values()]
        gains = [
            each["mean_return"] - base[seed]["mean_return"]
            for seed, each in own.items()
            if base is not None and seed in base
        ]
        last = {k: statistics.fmean(each[k] for each in own.values()) for k in LOOKED_AT}
        rows.append(
            Row(
                task,
                mode,
                len(own),
                steps[-1],
                statistics.fmean(end),
                interval(end),
                statistics.fmean(gains) if gains else math.nan,
                interval(gains),
                statistics.fmean(way),
                interval(way),
                **last,
            )
        )
    return rows


LOOKED_AT = ("outside", "distance", "lost", "violation_rate")


def _ends(curve: Points, mode: str, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Means over the last evaluations by seed, and of the return over all of them."""
    found = {}
    for seed in sorted({p["seed"] for p in curve if p["mode"] == mode}):
        own = [p for p in curve if p["mode"] == mode and p["seed"] == seed]
        last = [p for p in own if p["step"] in steps[-LAST:]]
        names = ("mean_return", *LOOKED_AT)
        found[seed] = {name: statistics.fmean(p[name] for p in last) for name in names}
        found[seed]["on_the_way"] = statistics.fmean(p["mean_return"] for p in own)
    return found


def table_of(task: str, rows: Sequence[Row]) -> Table:
    """The rows as text."""
    plant = PLANTS[task]
    title = f"{task}, limit {plant.limit:g}, {rows[0].steps} steps" if rows else task
    return Table(title, HEADER, [_texts(row) for row in rows], NOTES)


def _texts(row: Row) -> list[str]:
    gain = _with(row.gain, row.gain_interval)
    return [
        MODES[row.mode][0],
        str(row.seeds),
        _with(row.end, row.end_interval),
        NOTHING if row.mode == BASE or math.isnan(row.gain) else gain,
        _with(row.on_the_way, row.on_the_way_interval),
        f"{100 * row.outside:.0f} %",
        significant(row.distance, 2),
        f"{100 * row.lost:.0f} %",
        f"{100 * row.violation_rate:.2g} %" if row.violation_rate else "0",
    ]


def _with(value: float, half: float | None) -> str:
    text = significant(value)
    return text if half is None else f"{text} ± {significant(half, 2)}"


def draw(folder: Path, task: str, curve: Points) -> Picture:
    """Returns, and the share of the gradient that is lost, against steps."""
    name = f"gradients-{task}"
    panels = [
        Panel(
            "training steps",
            text,
            [_curve(curve, mode, quantity) for mode in dict.fromkeys(p["mode"] for p in curve)],
            title=task if quantity == "mean_return" else "",
        )
        for quantity, text in (("mean_return", "return"), ("lost", "share of the gradient lost"))
    ]
    save_figure(folder, name, panels, panel_size=(6.4, 2.6))
    return Picture(name, f"{task}: return and gradient lost; mean and 95 % interval over the seeds")


def _curve(curve: Points, mode: str, quantity: str) -> Curve:
    own = [p for p in curve if p["mode"] == mode]
    steps = sorted({p["step"] for p in own})
    values = [[p[quantity] for p in own if p["step"] == step] for step in steps]
    means = [statistics.fmean(each) for each in values]
    halves = [interval(each) or 0.0 for each in values]
    return Curve(
        MODES[mode][0],
        steps,
        means,
        look_of(list(MODES).index(mode)),
        [mean - half for mean, half in zip(means, halves, strict=True)],
        [mean + half for mean, half in zip(means, halves, strict=True)],
    )


def write_report(folder: Path, curves: Mapping[str, Points], about: dict[str, Any]) -> Document:
    """gradients.md, .csv and .json, curves.csv and the figures; returns the report as data."""
    rows = [row for task, curve in curves.items() for row in rows_of(task, curve)]
    section = Section(
        "gradients",
        "Gradient modes",
        ["TD3 with two hidden layers of 64 units; agents of one seed draw the same numbers."],
        [table_of(task, [row for row in rows if row.task == task]) for task in curves],
        [draw(folder, task, curve) for task, curve in curves.items()],
    )
    lead = [f"How agents learn through a limit on their power. {machine_text(about['machine'])}."]
    document = Document("Gradient modes of a limited actor", lead, about["command"], [], [section])
    points = [{"task": task, **point} for task, curve in curves.items() for point in curve]
    for name, lines in (("gradients.csv", [asdict(row) for row in rows]), ("curves.csv", points)):
        with writing(folder / name) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    content = {**about, "rows": [asdict(row) for row in rows]}
    for name, text in (
        ("gradients.json", json.dumps(content, indent=1) + "\n"),
        ("gradients.md", markdown(document)),
    ):
        with writing(folder / name) as draft:
            draft.write_text(text, encoding="utf-8")
    return document
