"""Two figures: time against n, and error against time; one panel a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dfwlayer_bench.bench.report import Row
from dfwlayer_bench.report.figures import Curve, Look, Panel, look_of, save_figure
from dfwlayer_bench.systems import FLOOR, PAPER_SYSTEMS, SYSTEMS

__all__ = ["look_of_system", "write_plots"]

LEAST_ERROR = 1e-17  # where an error of 0 is drawn


def write_plots(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw what there is; returns the files written."""
    timed = [row for row in rows if row.seconds is not None]
    families = list(dict.fromkeys(row.family for row in timed))
    written: list[Path] = []
    for name, panel_of in (("time", _times), ("error", _errors)):
        panels = [panel_of(family, [r for r in timed if r.family == family]) for family in families]
        if panels:
            written += save_figure(folder, name, panels, across=True, panel_size=(3.9, 4.0))
    return written


def _times(family: str, rows: list[Row]) -> Panel:
    curves = []
    for name, own in _by_system(rows):
        look = look_of_system(name)
        curves.append(
            Curve(
                own[0].label,
                [row.n for row in own],
                [row.seconds for row in own],
                replace(look, line="--") if name == FLOOR else look,
                [row.seconds_low for row in own],
                [row.seconds_high for row in own],
            )
        )
    return Panel(
        "number of variables n",
        "forward + backward (s), median and IQR",
        curves,
        title=family,
        x_log=True,
        y_log=True,
        ticks={n: str(n) for n in sorted({row.n for row in rows})},
    )


def _errors(family: str, rows: list[Row]) -> Panel:
    curves = [
        Curve(
            own[0].label,
            [row.seconds or 0 for row in own],
            [max(row.error or 0, LEAST_ERROR) for row in own],
            replace(look_of_system(name), width=0.6),
        )
        for name, own in _by_system([row for row in rows if row.error is not None])
    ]
    return Panel(
        "forward + backward (s)",
        "relative error of x",
        curves,
        title=family,
        x_log=True,
        y_log=True,
    )


def look_of_system(name: str) -> Look:
    """A system looks the same in every figure, whichever others are in it."""
    names = [*SYSTEMS, *PAPER_SYSTEMS]
    return look_of(names.index(name) if name in names else len(names))


def _by_system(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    names = dict.fromkeys(row.system for row in rows)
    return [(n, sorted((r for r in rows if r.system == n), key=lambda r: r.n)) for n in names]
