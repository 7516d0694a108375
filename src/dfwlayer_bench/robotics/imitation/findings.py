"""What a run says of the paper's claims about imitation, and of this library's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dfwlayer_bench.report.findings import BEYOND, FAILS, IN_PART, NOT_MEASURED, REPRODUCES, Finding
from dfwlayer_bench.report.text import significant
from dfwlayer_bench.report.text import time as time_text
from dfwlayer_bench.robotics.imitation.rows import Row, Run
from dfwlayer_bench.robotics.tasks import Task

__all__ = ["findings_of"]

NONE, OURS, PUBLISHED = "none", "dfwlayer", "dfw-paper"
COMPARABLE, NEARLY = 1.1, 1.5  # a loss so many times that without a layer


def findings_of(task: Task, rows: Sequence[Row], runs: Sequence[Run] = ()) -> list[Finding]:
    """Verdicts by rules that stand beside the numbers; the runs' curves where steps differ."""
    by_layer = {row.layer: row for row in rows}
    none, ours, published = (by_layer.get(name) for name in (NONE, OURS, PUBLISHED))
    found = [_feasible(task, published, none), _comparable(task, published, none, runs)]
    if ours is not None and ours.mse is not None:
        found += _ours(task, ours, rows)
    return found


def _feasible(task: Task, published: Row | None, none: Row | None) -> Finding:
    claim = f"{task.name}: the published layer keeps the violation at zero."
    if published is None or published.violation_rate is None:
        return Finding(NOT_MEASURED, claim, "It was not run.")
    without = "" if none is None else f"; without a layer {_percent(none.violation_rate)}"
    return Finding(
        FAILS if published.violation_rate else REPRODUCES,
        claim,
        f"Test actions in violation: {_percent(published.violation_rate)}{without}.",
    )


def _comparable(
    task: Task, published: Row | None, none: Row | None, runs: Sequence[Run]
) -> Finding:
    claim = f"{task.name}: the published layer's loss is comparable to that without a layer."
    if published is None or none is None or not published.mse or not none.mse:
        return Finding(NOT_MEASURED, claim, "One of them was not run.")
    steps = min(published.steps, none.steps)
    errors = {
        row.layer: row.mse if row.steps == steps else _mse(runs, row.layer, steps)
        for row in (published, none)
    }
    own, base = errors[PUBLISHED], errors[NONE]
    if own is None or base is None:
        return Finding(
            NOT_MEASURED,
            claim,
            f"They were trained for {published.steps} and {none.steps} steps.",
        )
    ratio = own / base
    verdict = REPRODUCES if ratio <= COMPARABLE else IN_PART if ratio <= NEARLY else FAILS
    return Finding(
        verdict,
        claim,
        f"Test MSE {significant(own)} against {significant(base)} after "
        f"{steps} steps: {ratio:.2f} times (comparable up to {COMPARABLE}, in part up to "
        f"{NEARLY}).",
    )


def _mse(runs: Sequence[Run], layer: str, step: int) -> float | None:
    """The mean test error of a layer at a step at which its runs were tested."""
    found = [p["mse"] for run in runs if run.layer == layer for p in run.curve if p["step"] == step]
    return statistics.fmean(found) if found else None


def _ours(task: Task, ours: Row, rows: Sequence[Row]) -> list[Finding]:
    trained = [row for row in rows if row.mse is not None and row.layer != OURS]
    # other seeds have other losses, so only layers with as many of them are compared
    same = [row for row in trained if (row.steps, row.seeds) == (ours.steps, ours.seeds)]
    found = [
        Finding(
            BEYOND,
            f"{task.name}: the exact layer, implicitly differentiated, in violation in "
            f"{_percent(ours.violation_rate)} of the test actions.",
            f"Largest violation {significant(ours.largest_violation)}; in the simulator "
            f"{_percent(ours.episode_violation_rate)}.",
        )
    ]
    if same:
        order = sorted([*same, ours], key=lambda row: row.mse or 0.0)
        best = min(same, key=lambda row: row.mse or 0.0)
        listed = ", ".join(f"{row.label} {significant(row.mse, 4)}" for row in order)
        found.append(
            Finding(
                BEYOND,
                f"{task.name}: the exact layer's test MSE is "
                f"{(ours.mse or 0.0) / (best.mse or 1.0):.3f} times that of the best other one "
                f"({best.label}).",
                f"After {ours.steps} steps, {ours.seeds} seeds: {listed}.",
            )
        )
    if ours.step_cpu_seconds and ours.times_none:
        slower = [
            f"{row.label} {row.step_cpu_seconds / ours.step_cpu_seconds:.1f} times that"
            for row in trained
            if row.step_cpu_seconds and row.layer != NONE
        ]
        found.append(
            Finding(
                BEYOND,
                f"{task.name}: a training step with the exact layer takes "
                f"{ours.times_none:.2f} times one without a layer.",
                ", ".join([f"{time_text(ours.step_cpu_seconds)} of CPU time", *slower]) + ".",
            )
        )
    return found


def _percent(rate: float | None) -> str:
    if rate is None:
        return "not measured"
    return f"{100 * rate:.3g} %"
