"""Two figures: time against n, and error against time; one panel a family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dfwlayer_bench.bench_report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["write_plots"]

COLOURS = (
    "#000000",
    "#d62728",
    "#ff9896",
    "#2ca02c",
    "#98df8a",
    "#9467bd",
    "#8c564b",
    "#1f77b4",
    "#aec7e8",
    "#17becf",
)
MARKERS = "osDv^<>PXd"


def write_plots(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw what there is; returns the files written."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.seconds is not None]
    if not timed:
        return []
    families = list(dict.fromkeys(row.family for row in timed))
    systems = list(dict.fromkeys(row.system for row in rows))
    written: list[Path] = []
    for name, draw in (("time", _times), ("error", _errors)):
        figure = Figure(figsize=(1.5 + 3.6 * len(families), 4.4), layout="constrained")
        panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
        for family, axes in zip(families, panels, strict=True):
            draw(axes, [row for row in timed if row.family == family], systems)
            axes.set_title(family)
            axes.grid(visible=True, which="major", alpha=0.3)
        _legend(figure, list(panels))
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=160)
            written.append(path)
    return written


def _times(axes: Axes, rows: list[Row], systems: list[str]) -> None:
    for index, name in enumerate(systems):
        own = sorted((row for row in rows if row.system == name), key=lambda row: row.n)
        if not own:
            continue
        sizes = [row.n for row in own]
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(
            sizes,
            [row.seconds or 0 for row in own],
            color=colour,
            marker=marker,
            markersize=5,
            linestyle="--" if name == "floor" else "-",
            label=own[0].label,
        )
        low = [row.seconds_low or 0 for row in own]
        high = [row.seconds_high or 0 for row in own]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({row.n for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("number of variables n")
    axes.set_ylabel("forward + backward (s), median and IQR")
    axes.label_outer()


def _errors(axes: Axes, rows: list[Row], systems: list[str]) -> None:
    for index, name in enumerate(systems):
        own = [row for row in rows if row.system == name and row.error is not None]
        if not own:
            continue
        own.sort(key=lambda row: row.n)
        axes.plot(
            [row.seconds or 0 for row in own],
            [max(row.error or 0, 1e-17) for row in own],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=6,
            linewidth=0.6,
            alpha=0.9,
            label=own[0].label,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("forward + backward (s)")
    axes.set_ylabel("relative error of x")
    axes.label_outer()


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels: a system may be missing from some of them."""
    found = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(dict(zip(labels, handles, strict=True)))
    columns = min(4, len(found)) or 1
    figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=8
    )
