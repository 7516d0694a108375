"""The imitation as tables: a row for each layer, as Markdown, CSV, JSON and HTML."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dfwlayer_bench.report.document import Document, Picture, Section, Table, markdown
from dfwlayer_bench.report.html import page
from dfwlayer_bench.report.intervals import interval
from dfwlayer_bench.report.machine import machine_text
from dfwlayer_bench.report.text import NOTHING, significant, small
from dfwlayer_bench.report.text import time as time_text
from dfwlayer_bench.robotics.files import load_arrays, writing
from dfwlayer_bench.robotics.imitation.evaluate import EXPERT_NAME
from dfwlayer_bench.robotics.imitation.findings import findings_of
from dfwlayer_bench.robotics.imitation.layers import LAYERS
from dfwlayer_bench.robotics.imitation.rows import Row, Run
from dfwlayer_bench.robotics.imitation.training import run_file
from dfwlayer_bench.robotics.tasks import Task

__all__ = ["Results", "read_runs", "rows_of", "write_report"]

HEADER = (
    "last layer",
    "seeds",
    "steps",
    "test MSE",
    "its change in the last quarter",
    "violation rate",
    "mean violation",
    "largest violation",
    "training step",
    "CPU time",
    "× no layer",
    "return",
    "violation rate in the simulator",
)
NOTES = (
    "Mean and 95 % interval (Student's t) over the seeds, at the last test they share, on the "
    "whole test set. The interval of a return is over the policies' means, that of a single one "
    "over its episodes.",
    "The change is that of the mean test MSE over the last quarter of the steps: how far it is "
    "from levelling off.",
    "A violation is a power above the limit, in float64 and without tolerance; the mean is over "
    "the actions in violation, in the units of the limit.",
    "Training steps are timed in turns: medians, and the median of the ratios of CPU time to the "
    "step without a layer in the same turn, which other work on the machine does not stretch.",
)


@dataclass(frozen=True)
class Results:
    """All that is known of the imitation of one task."""

    task: Task
    runs: Sequence[Run]
    timings: Mapping[str, Mapping[str, Any]]  # by layer
    evaluations: Mapping[str, Mapping[str, Any]]  # by layer and seed
    missing: Mapping[str, str]  # layers that cannot run here, and why
    about: dict[str, Any]


def read_runs(folder: Path, task: Task, layers: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """The curves of the runs there are."""
    found = []
    for layer in layers:
        for seed in seeds:
            path = run_file(folder, layer, seed)
            if path.exists():
                _, metadata = load_arrays(path, task)
                found.append(Run(layer, seed, metadata["step"], metadata["curve"]))
    return found


def rows_of(results: Results) -> list[Row]:
    """A row for each layer, one for the expert, and one for each layer that is missing."""
    rows = []
    for layer in dict.fromkeys(run.layer for run in results.runs):
        own, last = _together([run for run in results.runs if run.layer == layer])
        ends = [_at(run, last) for run in own]
        rates = [end["violation_rate"] for end in ends]
        timing = results.timings.get(layer, {})
        rows.append(
            Row(
                layer=layer,
                label=LAYERS[layer].label,
                seeds=len(ends),
                steps=last,
                mse=statistics.fmean(end["mse"] for end in ends),
                mse_std=_std([end["mse"] for end in ends]),
                mse_interval=interval([end["mse"] for end in ends]),
                mse_change=_change(own, last),
                violation_rate=statistics.fmean(rates),
                violation_rate_interval=interval(rates),
                mean_violation=statistics.fmean(end["mean_violation"] for end in ends),
                largest_violation=max(end["largest_violation"] for end in ends),
                step_seconds=timing.get("median"),
                step_cpu_seconds=timing.get("cpu"),
                times_none=timing.get("times_none"),
                **_in_simulator(results.evaluations, layer, {run.seed: run.step for run in own}),
            )
        )
    if any(key.startswith(f"{EXPERT_NAME}-") for key in results.evaluations):
        rows.append(
            Row(
                EXPERT_NAME, "the expert", **_in_simulator(results.evaluations, EXPERT_NAME, {0: 0})
            )
        )
    done = {row.layer for row in rows}
    return rows + [
        Row(layer, LAYERS[layer].label, detail=why)
        for layer, why in results.missing.items()
        if layer not in done
    ]


def _together(runs: Sequence[Run]) -> tuple[list[Run], int]:
    """The runs that count, and the last step at which all of them were tested.

    Seeds that were stopped by the clock are a little apart; one that has come less than three
    quarters as far as the furthest does not count until it is there.
    """
    furthest = max(run.step for run in runs)
    near = [run for run in runs if run.step >= 0.75 * furthest]
    shared = set.intersection(*({int(point["step"]) for point in run.curve} for run in near))
    if not shared:  # tests at other steps
        near = [run for run in runs if run.step == furthest]
        shared = {furthest}
    return near, max(shared)


def _at(run: Run, step: float) -> dict[str, float]:
    """The last test that is not after this step."""
    return [point for point in run.curve if point["step"] <= step][-1]


def _change(runs: Sequence[Run], last: int) -> float | None:
    """(MSE at the end − MSE at three quarters of the steps) / the latter, of the means."""
    if any(run.curve[0]["step"] > 0.75 * last for run in runs):
        return None
    before = [_at(run, 0.75 * last) for run in runs]
    if any(point["step"] == 0 for point in before):
        return None  # not one test between the start and the last quarter
    start = statistics.fmean(point["mse"] for point in before)
    return (statistics.fmean(_at(run, last)["mse"] for run in runs) - start) / start


def _in_simulator(
    evaluations: Mapping[str, Mapping[str, Any]], layer: str, steps: Mapping[int, int]
) -> dict[str, Any]:
    """Of the policies of these seeds, as they are after so many steps."""
    own = [
        found
        for found in evaluations.values()
        if found["layer"] == layer and steps.get(found["seed"]) == found["trained_steps"]
    ]
    if not own:
        return {}
    means = [statistics.fmean(found["returns"]) for found in own]
    # of one policy, the episodes tell how returns spread; of several, the policies do
    spreading = means if len(means) > 1 else list(own[0]["returns"])
    return {
        "episode_return": statistics.fmean(means),
        "episode_return_std": _std(spreading),
        "episode_return_interval": interval(spreading),
        "episode_violation_rate": statistics.fmean(found["violation_rate"] for found in own),
        "episode_largest_violation": max(found["largest_violation"] for found in own),
    }


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table_of(task: Task, rows: Sequence[Row]) -> Table:
    """The rows as text."""
    missing = tuple(f"{row.layer}: {row.detail}" for row in rows if row.detail)
    return Table(
        f"{task.name}, limit {task.limit:g}",
        HEADER,
        [_texts(row) for row in rows],
        (
            *NOTES,
            *missing,
        ),
    )


def _texts(row: Row) -> list[str]:
    return [
        row.label,
        str(row.seeds) if row.seeds else NOTHING,
        str(row.steps) if row.steps else NOTHING,
        _with(row.mse, row.mse_interval),
        NOTHING if row.mse_change is None else f"{100 * row.mse_change:+.1f} %",
        _share(row.violation_rate, row.violation_rate_interval),
        significant(row.mean_violation),
        small(row.largest_violation),
        time_text(row.step_seconds),
        time_text(row.step_cpu_seconds),
        NOTHING if row.times_none is None else f"{row.times_none:.2f}",
        _with(row.episode_return, row.episode_return_interval, 4),
        _share(row.episode_violation_rate),
    ]


def _with(value: float | None, half: float | None, digits: int = 3) -> str:
    text = significant(value, digits)
    return text if value is None or half is None else f"{text} ± {significant(half, 2)}"


def _share(value: float | None, half: float | None = None) -> str:
    if value is None:
        return NOTHING
    if not value:
        return "0"
    return f"{100 * value:.3g}" + (f" ± {100 * half:.2g}" if half else "") + " %"


def write_report(folder: Path, results: Results, pictures: Sequence[Picture]) -> Document:
    """imitation.md, .csv, .json, curves.csv and report.html; returns the report as data."""
    rows = rows_of(results)
    task = results.task
    section = Section(
        "imitation",
        "Last layers",
        [
            f"{results.about['data']}; batches of {results.about['batch_size']}, Adam at "
            f"{results.about['learning_rate']:g}. Mean return of the expert in these data: "
            f"{significant(results.about['expert']['mean_return'], 4)}."
        ],
        [table_of(task, rows)],
        pictures,
    )
    document = Document(
        f"Imitating an expert within a power limit: {task.name}",
        [
            f"A network maps observations to actions, a last layer keeps Σ|ω a| ≤ {task.limit:g}, "
            f"and the loss is the squared distance to the expert's actions. "
            f"{machine_text(results.about['machine'])}."
        ],
        results.about["command"],
        findings_of(task, rows, results.runs),
        [section],
    )
    _write_csv(folder / "imitation.csv", [asdict(row) for row in rows])
    curves = [
        {"layer": run.layer, "seed": run.seed, **point}
        for run in results.runs
        for point in run.curve
    ]
    if curves:
        _write_csv(folder / "curves.csv", curves)
    content = {
        **results.about,
        "findings": [asdict(finding) for finding in document.findings],
        "rows": [asdict(row) for row in rows],
        "timings": list(results.timings.values()),
        "evaluations": list(results.evaluations.values()),
    }
    _write_text(folder / "imitation.json", json.dumps(content, indent=1) + "\n")
    _write_text(folder / "imitation.md", markdown(document))
    _write_text(folder / "report.html", page(document, folder))
    return document


def _write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with writing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _write_text(path: Path, text: str) -> None:
    with writing(path) as draft:
        draft.write_text(text, encoding="utf-8")
