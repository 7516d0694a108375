"""The demo's picture: the way to the solution, convergence, sparsity, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from dfwlayer_bench.demo import steps as work
from dfwlayer_bench.demo.training import Training

__all__ = ["draw"]

Array = NDArray[np.float64]

# Okabe and Ito's palette, told apart by colour-blind readers too; one colour per method throughout
INK, GREY, PALE, FILL = "#222222", "#b5b5b5", "#d4d4d4", "#f1f5f9"
COLOUR = {"auto": "#0072b2", "dfw": "#d55e00", "frank-wolfe": "#009e73"}
LABEL = {"auto": "default", "dfw": "published (dfw)", "frank-wolfe": "Frank–Wolfe (pairwise)"}
MARKER: dict[str, dict[str, Any]] = {
    "auto": {"marker": "D", "markersize": 3.6},
    "dfw": {"marker": "o", "markersize": 3.4},
}
DASHES = (0, (4, 2))

STYLE: dict[Any, Any] = {
    "font.family": "STIXGeneral",  # comes with matplotlib, so the picture is the same everywhere
    "mathtext.fontset": "stix",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.color": INK,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "svg.hashsalt": "dfwlayer",  # ids in the file that do not change from run to run
    "svg.fonttype": "path",
}


def draw(
    folder: Path,
    path: work.Path,
    trajectory: work.Trajectory,
    exact: Array,  # (n,)
    solutions: dict[str, Array],  # method -> (n,)
    training: Training,
) -> tuple[Path, Path]:
    """Save the picture as PNG and SVG; the two files."""
    with mpl.rc_context(STYLE):
        # a Figure with its own Agg canvas needs no display and leaves pyplot's state alone
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.03)
        figure = Figure(figsize=(9.6, 7.6), layout=layout)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 2)
        _draw_path(figure.add_subplot(grid[0, 0]), path)
        _draw_convergence(figure.add_subplot(grid[0, 1]), trajectory)
        _draw_solutions(figure.add_subplot(grid[1, 0]), exact, solutions)
        stack = grid[1, 1].subgridspec(2, 1, height_ratios=[3, 2], hspace=0.06)
        loss = figure.add_subplot(stack[0])
        budget = figure.add_subplot(stack[1], sharex=loss)
        _draw_training(loss, budget, training)
        figure.align_ylabels([loss, budget])
        # one legend for all panels, where no data are
        figure.legend(handles=_legend(), loc="outside upper center", ncols=5, columnspacing=1.6)
        png, svg = folder / "demo.png", folder / "demo.svg"
        figure.savefig(png, dpi=200)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


def _legend() -> list[Line2D]:
    methods = [
        Line2D([], [], color=COLOUR[method], label=LABEL[method], **MARKER.get(method, {}))
        for method in COLOUR
    ]
    exact = Line2D([], [], color=INK, marker="*", ms=10, ls="none", label=r"exact $x^\star$")
    bound = Line2D([], [], color=INK, lw=1, ls=DASHES, label="bound of Theorem 1")
    return [*methods, bound, exact]


def _draw_path(ax: Axes, path: work.Path) -> None:
    problem = path.problem
    a, b = float(problem.radius[0]) / problem.weight[0]  # where the ball meets the axes
    corners = np.array([[a, 0], [0, b], [-a, 0], [0, -b]])
    ax.fill(*corners.T, facecolor=FILL, edgecolor=INK, linewidth=0.8, zorder=1)

    wide, high = 1.25 * a, 1.3 * b
    x, y = np.meshgrid(np.linspace(-wide, wide, 240), np.linspace(-high, high, 200))
    points = np.stack([x, y], -1)
    value = 0.5 * ((points @ problem.P[0]) * points).sum(-1) + points @ problem.q[0]
    # the level through the solution and others, evenly spaced in distance from f's own minimum
    lowest = -0.5 * float(problem.q[0] @ np.linalg.solve(problem.P[0], problem.q[0]))
    radius = np.sqrt(float(problem.value(path.solution[None])[0]) - lowest)
    radii = np.concatenate([[0.4 * radius], np.linspace(radius, np.sqrt(value.max() - lowest), 12)])
    levels = lowest + radii**2
    ax.contour(x, y, value, levels, colors=GREY, linewidths=0.6, linestyles="-", zorder=2)

    for method in ("dfw", "auto"):
        ax.plot(*path.points[method].T, color=COLOUR[method], lw=1.2, zorder=4, **MARKER[method])
    start = path.points["dfw"][0]
    ax.plot(*start, "o", mfc="white", mec=INK, ms=6, mew=0.9, zorder=5)
    ax.annotate("start", start, (0, -13), textcoords="offset points", ha="center")
    ax.plot(*path.solution, "*", color=INK, ms=12, mec="white", mew=0.8, zorder=6)
    ax.annotate(
        r"$\|w \circ x\|_1 \leq t$",
        (0, -0.45 * b),
        ha="center",
        va="center",
        bbox={"facecolor": FILL, "edgecolor": "none", "pad": 1.5},
    )
    ax.set(title="a   The way to the solution", xlabel="$x_1$", ylabel="$x_2$")
    ax.set(xlim=(-wide, wide), ylim=(-high, high), aspect="equal", anchor="W")


def _draw_convergence(ax: Axes, trajectory: work.Trajectory) -> None:
    floor = 1e-15  # below it, differences of f are rounding
    for method in ("frank-wolfe", "dfw", "auto"):
        k, error = trajectory.steps[method], trajectory.error[method]
        k, error = k[k > 0], np.maximum(error[k > 0], floor)
        end = 1 + int((error == floor).argmax()) if error.min() == floor else len(k)
        k, error = k[:end], error[:end]
        mark = MARKER["auto"] if method == "auto" else {}
        ax.plot(k, error, color=COLOUR[method], **mark)
        if method == "dfw" and k[-1] < 0.7 * trajectory.bound_steps[-1]:
            ax.plot(k[-1], error[-1], "x", color=COLOUR[method], ms=6, mew=1.6)
            ax.annotate(
                r"stops: no descent at this $\tau$",
                (k[-1], error[-1]),
                (4, 6),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color=COLOUR[method],
            )
    for method, bound in trajectory.bound.items():
        ax.plot(trajectory.bound_steps, bound, color=COLOUR[method], lw=1, ls=DASHES)
    ax.set(
        xscale="log", yscale="log", xlim=(0.9, trajectory.bound_steps[-1]), ylim=(floor / 3, 1e4)
    )
    ax.set(
        title="b   Distance to the optimum",
        xlabel="step $k$",
        ylabel=r"$(f(x_k) - f^\star)\;/\;|f^\star|$",
    )
    ax.yaxis.set_minor_locator(NullLocator())


def _draw_solutions(ax: Axes, exact: Array, solutions: dict[str, Array]) -> None:
    index = np.argsort(-np.abs(exact), kind="stable")
    position = np.arange(1, len(exact) + 1)
    ax.axhline(0, color=INK, lw=0.6, zorder=1)
    ax.vlines(position, 0, exact[index], color=PALE, lw=150 / len(exact), zorder=2)
    for method in ("dfw", "auto"):
        ax.plot(
            position, solutions[method][index], ls="none", color=COLOUR[method], **MARKER[method]
        )
    support = int((exact != 0).sum())
    largest = int(np.abs(exact).argmax())
    ax.annotate(
        r"exact $x^\star$ (bars)" + f", {support} of {len(exact)} not zero",
        (0.98, 0.92),
        xycoords="axes fraction",
        ha="right",
        va="top" if exact[largest] > 0 else "bottom",
    )
    ax.set(
        title="c   One of the problems, solved",
        xlabel="coordinate $i$, by its size in the exact solution",
        ylabel="$x_i$",
        xlim=(0, len(exact) + 1),
    )


def _draw_training(top: Axes, bottom: Axes, training: Training) -> None:
    steps = np.arange(1, len(training.loss) + 1)
    top.plot(steps, training.loss, color=COLOUR["auto"], lw=1.1)
    top.set(
        title="d   Learning a hidden budget from decisions",
        ylabel="relative loss",
        yscale="log",
        xlim=(0, len(steps)),
    )
    top.tick_params(labelbottom=False)
    top.yaxis.set_minor_locator(NullLocator())
    top.annotate(
        f"{training.violations} of {training.decisions:,} decisions outside their budget",
        (0.98, 0.94),
        xycoords="axes fraction",
        ha="right",
        va="top",
    )
    hidden = training.hidden_radius
    bottom.axhline(hidden, color=INK, ls=DASHES, lw=0.9)
    bottom.annotate(
        "hidden",
        (0.98, hidden),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
    )
    bottom.plot(steps, training.radius, color=COLOUR["auto"])
    bottom.set(xlabel="training step", ylabel="budget $t$", ylim=(0, 1.35 * hidden))
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
