"""Figures of the imitation: errors and violations against steps, power against time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfwlayer_bench.report.document import Picture
from dfwlayer_bench.report.figures import Curve, Look, Panel, look_of, save_figure
from dfwlayer_bench.robotics.imitation.layers import LAYERS
from dfwlayer_bench.robotics.imitation.rows import Run
from dfwlayer_bench.robotics.tasks import Task

__all__ = ["draw_curves", "draw_paper", "draw_power"]

QUANTITIES = {
    "mse": "test MSE",
    "mean_violation": "mean violation",
    "violation_rate": "violation rate",
}
CURVES = Picture(
    "imitation",
    "Test MSE, mean violation over the actions in violation, and violation rate against training "
    "steps; mean and standard deviation over the seeds",
)
PAPER = Picture(
    "paper",
    "As in the paper: loss, mean violation and violation rate in its 1000 steps with the layers it "
    "compares, and beside them no layer and the exact one; mean and deviation over the seeds",
)
PAPER_STEPS = 1000  # 100 rounds of 10 in the authors' script, tested every 200
COMPARED = ("cvxpylayers", "alt-diff", "dfw-paper")  # by the paper
BESIDE = ("none", "dfwlayer")
POWER = Picture("power", "Power against time in one fresh episode; the limit is the dashed line")
LIMIT = Look("#b3261e", marker="", line="--", width=1.2)


def draw_curves(folder: Path, task: Task, runs: Sequence[Run]) -> list[Picture]:
    """Three panels with a curve for each layer."""
    trained = [run for run in runs if len(run.curve) > 1]
    if not trained:
        return []
    panels = [
        Panel(
            "training steps",
            text,
            [
                _curve(layer, [run for run in trained if run.layer == layer], quantity)
                for layer in dict.fromkeys(run.layer for run in trained)
            ],
            title=task.name if quantity == "mse" else "",
            y_log=quantity == "mse",
        )
        for quantity, text in QUANTITIES.items()
    ]
    save_figure(folder, CURVES.name, panels, panel_size=(6.4, 2.6))
    return [CURVES]


def draw_paper(folder: Path, task: Task, runs: Sequence[Run]) -> list[Picture]:
    """The paper's figure: three panels side by side, on linear axes, over its number of steps.

    Nothing is drawn of layers that were tested less than three times on that way.
    """
    early = [
        replace(run, curve=[point for point in run.curve if point["step"] <= PAPER_STEPS])
        for run in runs
    ]
    shown = {
        layer: [run for run in early if run.layer == layer and len(run.curve) > 2]
        for layer in (*BESIDE, *COMPARED)
    }
    if not any(shown[layer] for layer in COMPARED):
        return []
    panels = [
        Panel(
            "training steps",
            "",
            [_curve(layer, own, quantity) for layer, own in shown.items() if own],
            title=f"{task.name}: {text}",
            y_range=(0.0, None),
        )
        for quantity, text in QUANTITIES.items()
    ]
    save_figure(folder, PAPER.name, panels, across=True, alike=False, panel_size=(3.6, 2.9))
    return [PAPER]


def _curve(layer: str, runs: Sequence[Run], quantity: str) -> Curve:
    # the steps that every seed has reached
    steps = sorted(set.intersection(*({point["step"] for point in run.curve} for run in runs)))
    values = [
        [point[quantity] for run in runs for point in run.curve if point["step"] == step]
        for step in steps
    ]
    means = [statistics.fmean(own) for own in values]
    spreads = [statistics.stdev(own) if len(own) > 1 else 0.0 for own in values]
    return Curve(
        LAYERS[layer].label,
        steps,
        means,
        _look(layer),
        _moved(means, spreads, -1),
        _moved(means, spreads, +1),
    )


def _moved(means: list[float], spreads: list[float], sign: int) -> list[float]:
    pairs = zip(means, spreads, strict=True)
    return [max(mean + sign * spread, 0.0) for mean, spread in pairs]


def draw_power(
    folder: Path, task: Task, powers: Mapping[str, NDArray[np.float64]], steps: int
) -> list[Picture]:
    """One panel a policy, so that no curve hides another."""
    panels = [
        Panel(
            "step of the episode",
            "power",
            [
                Curve(
                    LAYERS[layer].label if layer in LAYERS else layer,
                    list(range(min(steps, len(used)))),
                    used[:steps].tolist(),
                    Look(_look(layer).colour, width=0.9) if layer in LAYERS else Look("#5b6472"),
                ),
                Curve("limit", [0, min(steps, len(used)) - 1], [task.limit] * 2, LIMIT),
            ],
            title=task.name if number == 0 else "",
            y_range=(0.0, None),
        )
        for number, (layer, used) in enumerate(powers.items())
    ]
    if panels:
        save_figure(folder, POWER.name, panels, panel_size=(6.4, 1.9))
    return [POWER] if panels else []


def _look(layer: str) -> Look:
    return look_of(list(LAYERS).index(layer))
