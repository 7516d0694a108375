"""Figures as data: curves with bands, or bars, in panels, one legend, saved as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bars", "Curve", "Look", "Panel", "look_of", "save_figure"]

# eight colours that colour-blind readers can tell apart too (Okabe and Ito, without the yellow),
# then lighter ones; the markers differ anyway
COLOURS = (
    "#000000",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#7fceb5",
    "#cc79a7",
    "#8c564b",
    "#56b4e9",
    "#e69f00",
    "#f3cf80",
    "#7f7f7f",
    "#6a3d9a",
)
MARKERS = "osDv^<>PXdhp"

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "dfwlayer",  # ids in the file that do not change from run to run
}


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    colour: str
    marker: str = "o"
    line: str = "-"
    width: float = 1.6
    hollow: bool = False


def look_of(index: int) -> Look:
    """The look of the index-th of many; colours come round again with dashes and hollow markers."""
    again, place = divmod(index, len(COLOURS))
    marker = MARKERS[(place + again) % len(MARKERS)]
    return Look(COLOURS[place], marker, line="--" if again else "-", hollow=bool(again))


@dataclass(frozen=True)
class Curve:
    """Points, and the band around them where there is one; None or NaN leaves a point out."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    look: Look
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Bars:
    """One bar of this width at each x."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look
    width: float


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    ``ticks`` are the places on the x-axis to label and their texts. ``y_range`` holds limits
    that a panel must show, None where it may choose.
    """

    x_label: str
    y_label: str
    curves: Sequence[Curve]
    title: str = ""
    x_log: bool = False
    y_log: bool = False
    ticks: dict[float, str] = field(default_factory=dict)
    y_range: tuple[float | None, float | None] = (None, None)
    bars: Sequence[Bars] = ()


def save_figure(
    folder: Path,
    name: str,
    panels: Sequence[Panel],
    *,
    across: bool = False,
    alike: bool = True,
    panel_size: tuple[float, float] = (5.4, 3.2),
) -> list[Path]:
    """Draw the panels, one below the other or side by side; returns the PNG and the SVG file.

    Panels side by side share their y-axis if they are ``alike``, others their x-axis.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide, high = panel_size
    curves = [curve.label for panel in panels for curve in panel.curves]
    bars = [group.label for panel in panels for group in panel.bars]
    labels = list(dict.fromkeys(label for label in (*curves, *bars) if label))
    columns = 4 if across and len(panels) > 1 else 2
    extra = 0.22 * math.ceil(len(labels) / columns)
    rows, cols = (1, len(panels)) if across else (len(panels), 1)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(wide * cols + 0.4, high * rows + extra), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(
            rows, cols, squeeze=False, sharey=across and alike, sharex=not across
        )
        for panel, axes in zip(panels, grid.flat, strict=True):
            _draw(axes, panel)
            if alike or not across:
                axes.label_outer()
        _legend(figure, list(grid.flat), columns)
        paths = [folder / f"{name}.png", folder / f"{name}.svg"]
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _draw(axes: Axes, panel: Panel) -> None:
    # the scale first: what is drawn then chooses its limits by it
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    places = {x for curve in panel.curves for x in curve.x}
    if len(places) == 1:  # a single place has no width of its own
        (place,) = places
        axes.set_xlim((place / 2, place * 2) if panel.x_log else (place - 1, place + 1))
    for curve in panel.curves:
        _draw_curve(axes, curve, log=panel.y_log)
    for bars in panel.bars:
        axes.bar(bars.x, bars.y, bars.width, color=bars.look.colour, label=bars.label)
    (left, low), (right, high) = axes.dataLim.get_points()
    if panel.y_log and 0 < low <= high < low * (1 + 1e-6):
        # nor has a single value; the limits are left to matplotlib, panels may share them
        axes.update_datalim([(left, low / 2), (right, high * 2)])
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.xaxis.minorticks_off()
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title)
    if panel.y_range != (None, None):  # asking for nothing would still end the scaling to the data
        axes.set_ylim(*panel.y_range)
    axes.grid(visible=True, which="major", alpha=0.25, linewidth=0.6)


def _draw_curve(axes: Axes, curve: Curve, *, log: bool) -> None:
    look = curve.look
    y = [_number(value, log) for value in curve.y]
    if curve.low is not None and curve.high is not None:
        low = [_number(value, log) for value in curve.low]
        high = [_number(value, log) for value in curve.high]
        if look.line and len(curve.x) > 1:
            axes.fill_between(curve.x, low, high, color=look.colour, alpha=0.16, linewidth=0)
        else:  # points that no line connects have no band between them
            axes.vlines(curve.x, low, high, color=look.colour, alpha=0.5)
    many = len(curve.x) > 12
    axes.plot(
        curve.x,
        y,
        color=look.colour,
        marker=None if many else look.marker,
        markersize=5,
        markerfacecolor="none" if look.hollow else look.colour,
        linestyle=look.line,
        linewidth=look.width,
        label=curve.label,
    )


def _number(value: float | None, log: bool) -> float:
    """A point that cannot be drawn is NaN, which leaves a gap."""
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return math.nan
    return value


def _legend(figure: Figure, panels: list[Axes], columns: int) -> None:
    """One legend for all panels: a curve may be missing from some of them."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(dict(zip(labels, handles, strict=True)))
    if found:
        columns = min(columns, len(found))
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)
