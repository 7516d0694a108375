"""How long a training step takes with each layer, all of them in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dfwlayer_bench.report.progress import Report
from dfwlayer_bench.robotics.imitation.training import Imitation, Plan, Split

__all__ = ["Timing", "time_layers"]

WARM_UP = 3
PATIENCE = 60.0  # seconds in which a layer is timed at most


@dataclass(frozen=True)
class Timing:
    """A training step with a layer, in seconds, and against one without, in the same turn.

    The ratio is one of CPU times, which other work on the machine does not stretch.
    """

    layer: str
    median: float
    low: float  # first quartile
    high: float  # third quartile
    cpu: float  # median of the time all cores spent on it
    times_none: float | None  # median of the ratios; None where "none" was not timed
    repeats: int


def time_layers(
    plan: Plan,
    data: Split,
    layers: Sequence[str],
    repeats: int,
    report: Report = lambda _text, _finished: None,
) -> list[Timing]:
    """Each turn lets every layer train one step on the same batch, beginning with another one.

    A layer that has used up its patience sits out the later turns.
    """
    # nothing is ever saved: the folder is only a name
    runs = {name: Imitation(plan, data, name, 0, Path()) for name in layers}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    cpu: dict[str, list[float]] = {name: [] for name in layers}
    for name, run in runs.items():
        report(f"timing, warming up {name}", 0)
        for step in range(WARM_UP):
            run.train_once(*run.batch(step))
        report(f"timing, warmed up {name}", 1)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(repeats):
            first = turn % len(layers)
            for name in (*layers[first:], *layers[:first]):
                if sum(seconds[name]) > PATIENCE:
                    continue
                batch = runs[name].batch(WARM_UP + turn)
                started, started_cpu = time.perf_counter(), time.process_time()
                runs[name].train_once(*batch)
                cpu[name].append(time.process_time() - started_cpu)
                seconds[name].append(time.perf_counter() - started)
            gc.collect()
            report(f"timing, turn {turn + 1} of {repeats}", 1)
    finally:
        if collecting:
            gc.enable()
    return [_timing(name, seconds[name], cpu[name], cpu.get("none")) for name in layers]


def _timing(layer: str, seconds: list[float], cpu: list[float], none: list[float] | None) -> Timing:
    low, median, high = (
        statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    )
    ratios = None if none is None else [a / b for a, b in zip(cpu, none, strict=False)]
    ratio = None if ratios is None else statistics.median(ratios)
    return Timing(layer, median, low, high, statistics.median(cpu), ratio, len(seconds))
