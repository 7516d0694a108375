"""The tables of docs/robotics.md."""

from __future__ import annotations

from functools import partial

from dfwlayer_bench.recorded.texts import Table, bold, minus, record, rows_by
from dfwlayer_bench.report.text import significant, time

__all__ = ["TABLES"]


ORDER = ("none", "dfwlayer", "radial", "dfw-paper", "optnet", "alt-diff", "cvxpylayers")


def imitated(task: str) -> Table:
    """The seeds of each layer together, with what the policies do in the simulator."""
    rows = {row["layer"]: row for row in record(f"robotics/{task}/imitation.json")["rows"]}
    lines = []
    for row in (rows[layer] for layer in ORDER if layer in rows):
        change = row["mse_change"]
        told = [
            row["label"],
            str(row["seeds"]),
            f"{row['steps']:,}",
            _with_interval(row["mse"], row["mse_interval"], 3),
            "too few tests" if change is None else minus(f"{100 * change:+.1f} %"),
            _share(row["violation_rate"], row["violation_rate_interval"]),
            significant(row["mean_violation"]),
            _return(row["episode_return"], row["episode_return_interval"]),
            _share(row["episode_violation_rate"]),
        ]
        lines.append(
            [bold(text, row["layer"] == "dfwlayer" and i == 0) for i, text in enumerate(told)]
        )
    header = ["last layer", "seeds", "steps", "test MSE", "its change in the last quarter"]
    header += ["violation rate", "mean violation", "return", "violations in the simulator"]
    return header, lines


def _with_interval(mean: float, interval: float | None, digits: int) -> str:
    """Mean ± interval, to the same decimal; a single seed has none."""
    text = significant(mean, digits)
    if interval is None:
        return text
    decimals = len(text.partition(".")[2])
    return f"{text} ± {interval:.{decimals}f}"


def _return(mean: float | None, interval: float) -> str:
    if mean is None:
        return "not run"
    decimals = 0 if abs(mean) >= 100 else 1
    return minus(f"{mean:.{decimals}f} ± {interval:.{decimals}f}")


def _share(rate: float | None, interval: float | None = None) -> str:
    if rate is None:
        return "not run"
    if rate == 0 and not interval:
        return "0"
    if interval is None:
        return f"{significant(100 * rate)} %"
    text = f"{100 * rate:.1f}" if rate >= 0.01 else significant(100 * rate, 2)
    return f"{text} ± {100 * interval:.{len(text.partition('.')[2])}f} %"


def shortly(task: str) -> Table:
    """All layers, few steps, with the time of one."""
    rows = {row["layer"]: row for row in record(f"robotics/{task}/short.json")["rows"]}
    lines = []
    for layer in (*ORDER, "dfw-annealed"):
        row = rows[layer]
        mse = significant(row["mse"])
        if row["seeds"] > 1:
            mse = _with_interval(row["mse"], row["mse_std"], 3)
        told = [
            row["label"],
            str(row["seeds"]),
            str(row["steps"]),
            mse,
            _share(row["violation_rate"]),
            time(row["step_cpu_seconds"]),
            significant(row["times_none"]),
        ]
        lines.append([bold(told[0], layer == "dfwlayer"), *told[1:]])
    header = ["last layer", "seeds", "steps", "test MSE", "violation rate"]
    return [*header, "CPU time of a training step", "× no layer"], lines


WAYS = {
    "none": "no layer",
    "exact": "exact",
    "penalty": "penalty, weight 1",
    "soft": "soft, share ½",
}


def modes(plant: str) -> Table:
    """How an actor learns through its limit."""
    rows = rows_by("robotics/gradients/gradients.json", "task", "mode")
    digits = 1 if plant == "arm" else 0
    lines = []
    for mode, label in WAYS.items():
        row = rows[plant, mode]
        gain = _signed(row["gain"], row["gain_interval"], digits)
        lines.append(
            [
                label,
                _signed(row["end"], row["end_interval"], digits),
                "0, by definition" if mode == "exact" else gain,
                _signed(row["on_the_way"], row["on_the_way_interval"], digits),
                f"{100 * row['outside']:.0f} %",
                f"{row['distance']:#.2g}",
                f"{100 * row['lost']:.0f} %",
                significant(row["violation_rate"]),
            ]
        )
    header = [f"`{plant}`", "return at the end", "less that of exact, seed by seed"]
    return [*header, "mean return on the way", "outside", "distance", "lost", "violations"], lines


def _signed(mean: float, interval: float, digits: int) -> str:
    return minus(f"{mean:.{digits}f} ± {interval:.{digits}f}")


TABLES = {
    "imitation-hc-o": partial(imitated, "hc_o"),
    "imitation-r-o03": partial(imitated, "r_o03"),
    "short-hc-o": partial(shortly, "hc_o"),
    "short-r-o03": partial(shortly, "r_o03"),
    "modes-arm": partial(modes, "arm"),
    "modes-pendulum": partial(modes, "pendulum"),
}
