"""``dfw scaling``: one lasso in several processes, and what the model says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dfwlayer_bench.report.terminal import output

__all__ = ["scaling"]

QUICK = (2_000, 10_000, 100_000)


@dataclass(frozen=True)
class Run:
    """What so many processes have measured."""

    processes: int
    entries: int
    each: list[dict[str, Any]]  # of each process
    x: Path

    def seconds(self, which: str) -> float:
        """Of the slowest process."""
        return max(float(own[which]["seconds"]) for own in self.each)

    def exchanging(self, which: str) -> float:
        """Of the process that waited least for others."""
        return min(float(own[which]["exchanging"]) for own in self.each)

    @property
    def memory(self) -> float:
        """MB of the largest process."""
        return max(float(own["memory"]) for own in self.each)

    @property
    def data(self) -> float:
        """MB of it beyond the libraries."""
        return max(float(own["memory"]) - float(own["libraries"]) for own in self.each)


def scaling(
    rows: Annotated[int, typer.Option(help="Of A.")] = 200_000,
    columns: Annotated[int, typer.Option(help="Of A, the length of x.")] = 1_000_000,
    entries: Annotated[int, typer.Option(help="Of A that are not zero.")] = 10_000_000,
    processes: Annotated[int, typer.Option(help="To be compared with one.", min=2)] = 2,
    repeats: Annotated[int, typer.Option(help="Solves, of which the median counts.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny problem, solved once.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file for the figures, as JSON.")] = None,
) -> int:
    """Solve one lasso whose rows several processes hold; each has one thread.

    Strong scaling: the same problem for one process and for several. Weak scaling: several
    processes have as many times the rows. The model is fitted to what one process and each of
    several compute and to the time of single sums, and compared with what solves took.
    """
    if quick:
        rows, columns, entries = QUICK
        repeats = 1
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        one = _measured(at / "one.json", rows, columns, entries, 1, repeats)
        many = _measured(at / "many.json", rows, columns, entries, processes, repeats)
        larger = rows * processes, columns, entries * processes
        wide = _measured(at / "wide.json", *larger, processes, repeats)
        figures = _figures(one, many, wide, columns)
    _print(figures)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))
    return 0


def _measured(
    out: Path, rows: int, columns: int, entries: int, processes: int, repeats: int
) -> Run:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    command += ["-m", "dfwlayer_bench.scaling.work", "--rows", str(rows), "--repeats", str(repeats)]
    command += ["--columns", str(columns), "--entries", str(entries), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)
    return Run(processes, entries, json.loads(out.read_text())["each"], out.with_suffix(".pt"))


def _figures(one: Run, many: Run, wide: Run, columns: int) -> dict[str, Any]:
    import torch

    from dfwlayer_bench.scaling.model import MACHINES, Network, fitted, on

    k = many.processes
    difference = (torch.load(many.x) - torch.load(one.x)).abs().max() / torch.load(
        one.x
    ).abs().max()
    short, long = (min(own[name] for own in many.each) for name in ("short", "long"))
    latency = short / (2 * (k - 1))
    share = 8 * columns / k
    bandwidth = share / max(long / (2 * (k - 1)) - latency, 1e-9)
    network = Network(latency, bandwidth)
    figures: dict[str, Any] = {
        "processes": k,
        "difference of x": float(difference),
        "gap": many.each[0]["again"]["gap"],
        "memory, MB": [one.memory, many.memory, many.memory / one.memory],
        "memory beyond libraries, MB": [one.data, many.data, many.data / one.data],
        "a sum of n numbers, seconds": long,
        "a sum of one number, seconds": short,
    }
    for which in ("first", "again"):
        kinds = many.each[0][which]["kinds"]
        messages = [numbers // calls for calls, numbers in kinds.values() for _ in range(calls)]
        seconds = many.seconds(which)
        computing = seconds - many.exchanging(which)
        fit = fitted(one.seconds(which), computing, k, messages)
        predicted = fit.seconds(k, network)
        figures[f"{which} solve"] = {
            "seconds of one": one.seconds(which),
            "seconds": seconds,
            "computing": computing,
            "exchanging": many.exchanging(which),
            "strong: times faster": one.seconds(which) / seconds,
            "weak: efficiency": one.seconds(which) / wide.seconds(which),
            "rows, seconds (R)": fit.rows,
            "common, seconds (C)": fit.common,
            "predicted seconds": predicted,
            "predicted / measured": predicted / seconds,
            "sums": {kind: list(calls) for kind, calls in kinds.items()},
            "bytes": many.each[0][which]["bytes"],
        }
    figures["a step elsewhere, milliseconds"] = {
        machine.name: [
            1e3 * on(machine, entries, columns, 20, processes)
            for entries, processes in (
                (one.entries, 1),
                (one.entries, machine.processes),
                (one.entries * machine.processes, machine.processes),
            )
        ]
        for machine in MACHINES
    }
    return figures


def _print(figures: dict[str, Any]) -> None:
    shown = output(120)
    for name, value in figures.items():
        if isinstance(value, dict):
            shown.print(f"[bold]{name}[/bold]")
            for key, each in value.items():
                shown.print(f"  {key}: {_short(each)}", highlight=False)
        else:
            shown.print(f"{name}: {_short(value)}", highlight=False)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
