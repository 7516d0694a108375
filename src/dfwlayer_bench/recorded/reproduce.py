"""The tables of docs/reproduce.md."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from typing import Any

from dfwlayer_bench.recorded.texts import RESULTS, Table, bold, error, minus, record, rows_by
from dfwlayer_bench.report.text import significant, spread
from dfwlayer_bench.reproduce.paper import ACCURACY, TIMES

__all__ = ["TABLES"]

SIZES = (500, 1000, 2000)

CPU, CUDA = "reproduce/cpu.json", "reproduce/cuda.json"
PROCESSOR, TABLE1 = "reproduce/processor.json", "reproduce/table1.json"
NAMES = {
    "diffcp": "CvxpyLayer (DIFFCP)",
    "alt-diff-paper": "Alt-Diff, stopped as in the paper",
    "alt-diff-reverse": "Alt-Diff, converged, reverse mode",
    "optnet": "OptNet",
    "jaxopt": "jaxopt",
    "dfw": "DFW as published",
    "dfwlayer": "dfwlayer",
}
PAPERS = {"diffcp": "CvxpyLayer", "alt-diff-paper": "Alt-Diff", "dfw": "DFWLayer"}


def reproduced(path: str, family: str, n: int, system: str) -> Any:
    """The row of a system on problems of the paper's kind."""
    return rows_by(path, "family", "n", "system")[family, n, system]


def _ours(system: str, cells: Iterable[str]) -> list[str]:
    """The cells of a row, ours in bold."""
    return [bold(text, system == "dfwlayer" and bool(text)) for text in cells]


def times_paper() -> Table:
    """Seconds on the paper's problems, beside its own."""
    lines = []
    for system, label in NAMES.items():
        found = [reproduced(CPU, "paper", n, system)["seconds"] for n in SIZES]
        role = PAPERS.get(system)
        told = [spread(seconds["mean"], seconds["std"]) for seconds in found]
        paper = ", ".join(f"{TIMES[role][n].mean:.2f}" for n in SIZES) if role else "not in it"
        lines.append([*_ours(system, [label, *told]), paper])
    return ["system", *(f"n = {n}" for n in SIZES), "the paper"], lines


def times_active() -> Table:
    """Mean seconds where the limit binds, at all sizes."""
    lines = []
    for system, label in NAMES.items():
        told = []
        for family in ("active", "ill"):
            found = [reproduced(CPU, family, n, system)["seconds"] for n in SIZES]
            means = (significant(it["mean"]) if it else "not reached" for it in found)
            told.append(", ".join(means))
        lines.append(_ours(system, [label, *told]))
    return ["system", "`active`", "`ill`"], lines


def accuracy_paper() -> Table:
    """Cosine, distance, mean and largest violation, against CvxpyLayer."""
    lines = []
    for system, label in {"alt-diff-paper": "Alt-Diff", "dfw": "DFWLayer"}.items():
        found = [reproduced(CPU, "paper", n, system) for n in SIZES]
        lines.append([f"{label}, here", *(_as_the_paper(row) for row in found)])
        lines.append([f"{label}, the paper", *(_of_the_paper(label, n) for n in SIZES)])
    found = [reproduced(CPU, "paper", n, "dfwlayer") for n in SIZES]
    lines.append(["dfwlayer (exact)", *(_as_the_paper(row) for row in found)])
    return ["system", *(f"n = {n}" for n in SIZES)], lines


def _as_the_paper(row: Any) -> str:
    cosine, distance = row["peer_cosine"], row["peer_distance"]
    violations = [row[key] for key in ("mean_violation", "max_violation")]
    return ", ".join(
        [
            f"{cosine['mean']:.3f} ± {cosine['std']:.3f}",
            f"{distance['mean']:.4f} ± {distance['std']:.4f}",
            *("0" if value == 0 else f"{value:.3f}" for value in violations),
        ]
    )


def _of_the_paper(role: str, n: int) -> str:
    found = ACCURACY[role][n]
    violations = (found.mean_violation, found.max_violation)
    return ", ".join(
        [
            *(f"{value.mean:.3f} ± {value.std:.3f}" for value in (found.cosine, found.distance)),
            *("0" if value == 0 else f"{value:.3f}" for value in violations),
        ]
    )


def exact_active() -> Table:
    """Against exact answers: error of x, cosine, largest violation."""
    lines = []
    for system, label in NAMES.items():
        found = [reproduced(CPU, "active", n, system) for n in SIZES]
        told = [f"{_answers(row)}, {error(row['relative_violation'])}" for row in found]
        lines.append(_ours(system, [label, *told]))
    return ["system", *(f"n = {n}" for n in SIZES)], lines


def _answers(row: Any) -> str:
    return f"{error(row['error']['mean'])}, {minus(format(row['cosine']['mean'], '.4f'))}"


def every(columns: dict[str, tuple[str, str, int]]) -> Table:
    """Every system, the fastest of the first column first: seconds, error of x and cosine."""
    first, *_ = columns.values()
    rows = [row for row in record(first[0])["rows"] if (row["family"], row["n"]) == first[1:]]
    lines = []
    for own in sorted(rows, key=lambda row: float(row["seconds"]["mean"])):
        found = [
            rows_by(path, "family", "n", "system").get((family, n, own["system"]))
            for path, family, n in columns.values()
        ]
        ours = own["system"] == "dfwlayer"
        lines.append([bold(own["label"], ours), *map(_every_cell, found)])
    return ["system", *columns], lines


def _every_cell(row: Any) -> str:
    if row is None or row["status"] == "pending":
        return "not reached"
    if row["seconds"] is None:
        return "over 120 s" if row["status"] == "time limit" else str(row["status"])
    seconds = row["seconds"]
    several = row["trials"] > 1
    told = spread(seconds["mean"], seconds["std"]) if several else significant(seconds["mean"])
    return f"{told}, {_answers(row)}"


def every_paper() -> Table:
    """Every system on the paper's problems."""
    return every(
        {
            "n = 500, five seeds": (PROCESSOR, "paper", 500),
            "n = 1000, four seeds": (PROCESSOR, "paper", 1000),
            "n = 2000, seed 100": (TABLE1, "paper", 2000),
        }
    )


def every_active() -> Table:
    """Every system where the limit binds."""
    return every({f"`active`, n = {n}": (TABLE1, "active", n) for n in SIZES})


def every_ill() -> Table:
    """Every system where P is ill conditioned as well."""
    return every({f"`ill`, n = {n}": (TABLE1, "ill", n) for n in SIZES})


VARIANTS = {
    "as in the accuracy table": "as in the accuracy table",
    "L by power iteration": "L by their power iteration",
    "weights + 1e-8": "weights + 1e-8",
    "τ halved one step sooner": "τ halved one step sooner",
    "float64": "float64",
    "the authors' combination": "**the authors' combination**",
    "L the largest eigenvalue": "L the largest eigenvalue",
    "L 1 % below it": "L 1 % below it",
    "L 1 % above it": "L 1 % above it",
    "tolerance 2e-4": "tolerance 2e-4",
    "T = 40": "T = 40",
    "T = 50": "T = 50",
    "τ at least 1/8": "τ at least 1/8",
    "at most 120 steps": "at most 120 steps",
}


def cosine() -> Table:
    """The gradient's cosine with one thing changed at a time."""
    with (RESULTS / "reproduce/cosine.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == "paper"]
    paper = [ACCURACY["DFWLayer"][n].cosine for n in SIZES]
    lines = [
        [
            "the paper",
            *(
                text
                for known in paper
                for text in (f"{known.mean:.3f} ± {known.std:.3f}", "not told")
            ),
        ]
    ]
    for variant, label in VARIANTS.items():
        line = [label]
        for n in SIZES:
            own = [row for row in rows if row["variant"] == variant and row["n"] == str(n)]
            cosines = [float(row["cosine"]) for row in own]
            line.append(f"{statistics.fmean(cosines):.3f} ± {statistics.pstdev(cosines):.3f}")
            (last,) = (row for row in own if row["seed"] == "500")
            line.append(_of_seed_500(last))
        lines.append(line)
    return ["", *(title for n in SIZES for title in (f"n = {n}", "seed 500"))], lines


def _of_seed_500(row: dict[str, str]) -> str:
    """Cosine, steps, the temperature where it is not 1/16, and how long the gradient is."""
    cosine = minus(f"{float(row['cosine']):.2f}".replace("-0.00", "0.00"))
    temperature, length = 1 / float(row["temperature"]), float(row["length"])
    at = "" if temperature == 16 else f" (1/{temperature:.0f})"
    return f"{cosine}, {row['steps']}{at}, {_length(length)}"


def _length(value: float) -> str:
    if value < 1000:
        return f"{value:#.2g}".rstrip(".") if value < 100 else f"{float(f'{value:.2g}'):.0f}"
    digit, power = f"{value:.0e}".split("e")
    raised = str(int(power)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digit}·10{raised}"


def times_cuda() -> Table:
    """Mean seconds on a GPU, at all sizes."""
    lines = []
    for system in ("alt-diff-paper", "optnet", "dfw", "dfwlayer"):
        told = [
            ", ".join(
                significant(reproduced(CUDA, family, n, system)["seconds"]["mean"], 2)
                for n in SIZES
            )
            for family in ("paper", "active")
        ]
        lines.append(_ours(system, [NAMES[system], *told]))
    return ["system", "`paper`, n = 500, 1000, 2000", "`active`"], lines


TABLES = {
    "times-paper": times_paper,
    "times-active": times_active,
    "accuracy-paper": accuracy_paper,
    "exact-active": exact_active,
    "every-paper": every_paper,
    "every-active": every_active,
    "every-ill": every_ill,
    "cosine": cosine,
    "times-cuda": times_cuda,
}
