"""The tables of docs/benchmarks.md and docs/distributed.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dfwlayer_bench.bench.qp.report import QpRow, Summary, summaries
from dfwlayer_bench.bench.qp.systems import SYSTEMS
from dfwlayer_bench.recorded.texts import Table, bold, error, record, rows_by
from dfwlayer_bench.report.text import time, times

__all__ = ["TABLES"]

FAMILIES, SIZES = ("paper", "active", "ill"), (500, 1000, 2000)
LARGE = {"dfwlayer": "dfwlayer", "jaxopt": "jaxopt", "dfw": "DFW as published"}


def large(cell: Callable[[dict[str, Any]], str], *more: str) -> Table:
    """A row for each size and family, a column for each system."""
    rows = rows_by("bench/bench.json", "family", "n", "system")
    lines = [
        [f"{n}, `{family}`", *(cell(rows[family, n, system]) for system in (*LARGE, *more))]
        for n in SIZES
        for family in FAMILIES
    ]
    return ["n, family", *LARGE.values(), *(["two CG solves"] if more else [])], lines


def large_times() -> Table:
    """Time of both passes, and in units of the floor's."""
    return large(
        lambda row: (
            time(row["seconds"])
            + ("" if row["system"] == "floor" else f", {times(row['ratio'], 3)}×")
        ),
        "floor",
    )


def large_errors() -> Table:
    """Errors of x and of the gradient, and the gradient's cosine."""
    return large(
        lambda row: f"{error(row['error'])}, {error(row['gradient_error'])}, {row['cosine']:.4f}"
    )


# small problems

BALLS, FLAT = ("l1", "l2"), ("box", "simplex", "capped-simplex")
BATCHES = ((1, 10), (1, 100), (64, 10), (128, 10), (128, 50))
TENSORS = "dfwlayer-eager"
WITH_GRADIENTS = {"dfwlayer": "dfwlayer", TENSORS: "tensor operations", "jaxopt": "jaxopt"}
ON_ROWS = {"qpax": "qpax", "piqp": "PIQP, x only", "daqp": "DAQP, x only"}


def small(sets: Sequence[str], systems: dict[str, str]) -> Table:
    """Milliseconds, of both passes and forward; the fastest with a gradient in bold."""
    rows = rows_by("bench/small.json", "set", "count", "n", "system")
    lines = []
    for count, n in BATCHES:
        for name in sets:
            own = {system: rows[name, count, n, system] for system in systems}
            both = [row["both_seconds"] for row in own.values() if row["both_seconds"] is not None]
            told = [_milliseconds(row, min(both)) for row in own.values()]
            lines.append([f"{name}, {'one' if count == 1 else count}×{n}", *told])
    return ["set, size", *systems.values()], lines


def _milliseconds(row: dict[str, Any], best: float) -> str:
    forward, both = _plain(1e3 * row["forward_seconds"]), row["both_seconds"]
    return forward if both is None else f"{bold(_plain(1e3 * both), both == best)}, {forward}"


def _plain(value: float) -> str:
    """Two digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def small_balls() -> Table:
    """Milliseconds over balls."""
    return small(BALLS, WITH_GRADIENTS)


def small_flat() -> Table:
    """Milliseconds over sets that have rows."""
    return small(FLAT, WITH_GRADIENTS | ON_ROWS)


def small_errors() -> Table:
    """The largest error of each system."""
    rows = record("bench/small.json")["rows"]
    lines = []
    for system, label in (WITH_GRADIENTS | ON_ROWS).items():
        own = [row for row in rows if row["system"] == system and row["status"] == "ok"]
        worst = [_largest(own, key) for key in ("error", "gradient_error", "violation")]
        if system == TENSORS:
            worst[:2] = ["the reference"] * 2
        lines.append([label.removesuffix(", x only"), *worst])
    return ["system", "error of x", "gradient error", "violation"], lines


def _largest(rows: Iterable[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return error(max(values)) if values else "no gradient"


# GPU, lasso

SETS = {
    "l1": "ℓ1 ball",
    "l2": "ℓ2 ball",
    "l3": "ℓ3 ball",
    "linf": "ℓ∞ ball",
    "l1box": "ℓ1 ball in a box",
    "capped": "capped simplex",
    "ksparse": "k-sparse",
    "polyhedra": "polyhedron",
}


def gpu() -> Table:
    """One GPU program a problem, beside tensor operations."""
    content = record("bench/gpu.json")
    lines = [
        [
            SETS.get(row["set"], row["set"]),
            f"{row['count']} × {row['n']}",
            f"{1e3 * row['programs']:.2f} ms",
            f"{1e3 * row['tensors']:.1f} ms",
            error(row["error"]),
            error(row["gradient_error"]),
        ]
        for row in content["rows"]
    ]
    least = f"{1e3 * content['floor']:.2f} ms"
    lines.append(["`2 * q` and its gradient", "1024 × 10", least, *["nothing to solve"] * 3])
    return ["set", "B × n", "programs", "without", "error of x", "of gradients"], lines


LASSO = ("dfwlayer", "dfwlayer-eager", "celer", "skglm", "adelie", "spgl1", "sklearn")


def lasso() -> Table:
    """Time of a forward pass, and the gap."""
    rows = rows_by("bench/lasso.json", "problem", "system")
    lines = []
    for problem in dict.fromkeys(problem for problem, _ in rows):
        own = {system: rows.get((problem, system)) for system in LASSO}
        known = [row["forward_seconds"] for row in own.values() if row and row["forward_seconds"]]
        lines.append([f"`{problem}`", *(_lasso_cell(row, min(known)) for row in own.values())])
    return ["problem", *LASSO], lines


def _lasso_cell(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return "not run"
    if row["forward_seconds"] is None:
        return str(row["detail"] or row["status"])
    seconds = row["forward_seconds"]
    return f"{bold(time(seconds), seconds == best)}, {error(row['gap'])}"


# layers that guess, sample or split

MIXED = ("program", "polytope", "simplex", "assignment")
ON_ANY_ROWS = {
    "dfwlayer": "dfwlayer",
    "dc3": "DC3",
    "optnet": "OptNet",
    "qpax": "qpax",
    "proxqp": "QPLayer (proxsuite)",
    "moreau": "Moreau, batched",
    "dqp": "dQP over PIQP",
    "pinet": "Πnet",
}
OF_ONE_KIND = {
    "dfwlayer-custom": ("dfwlayer, CustomSet", "assignment"),
    "entmax": ("entmax (sparsemax)", "simplex"),
    "jaxopt": ("jaxopt", "simplex"),
    "frank-wolfe": ("regularised Frank-Wolfe (InferOpt's)", "assignment"),
    "pyepo": ("PyEPO, regularised", "assignment"),
    "perturbed": ("perturbed", "assignment"),
    "pyepo-perturbed": ("PyEPO, perturbed", "assignment"),
}
X_ONLY = {"clarabel": "Clarabel", "osqp": "OSQP", "piqp": "PIQP"}


def layered(problem: str, system: str, seconds: str, *errors: str) -> str:
    """The time in units of this library's, and errors."""
    rows = rows_by("bench/layers.json", "problem", "system")
    row, ours = rows[problem, system], rows[problem, "dfwlayer"]
    if row["status"] == "unsupported":
        return "takes projections only"
    ratio = row[seconds] / ours[seconds]
    told = f"{ratio:.0f}" if ratio >= 10 else times(ratio, 2)
    return ", ".join([f"{told}×", *(error(row[key]) for key in errors)])


def layers_rows() -> Table:
    """Layers on any rows: time, error of x, gradient error, violation."""
    keys = ("both_seconds", "error", "gradient_error", "violation")
    lines = [
        [label, *(layered(problem, system, *keys) for problem in MIXED)]
        for system, label in ON_ANY_ROWS.items()
    ]
    return ["any rows", *(f"`{problem}`" for problem in MIXED)], lines


def layers_kinds() -> Table:
    """Those for one kind of set."""
    keys = ("both_seconds", "error", "gradient_error", "violation")
    lines = [
        [label, f"`{problem}`", *layered(problem, system, *keys).split(", ")]
        for system, (label, problem) in OF_ONE_KIND.items()
    ]
    return ["for one kind of set", "on", "time", "error of x", "gradient error", "violation"], lines


def layers_x() -> Table:
    """Solvers without gradients: time of a forward pass, error of x, violation."""
    lines = [
        [label, *(layered(p, system, "forward_seconds", "error", "violation") for p in MIXED)]
        for system, label in X_ONLY.items()
    ]
    return ["x only", *(f"`{problem}`" for problem in MIXED)], lines


def layers_more() -> Table:
    """Two more problems: time and gradient error."""
    lines = [
        [
            label,
            *(layered(p, system, "both_seconds", "gradient_error") for p in ("paths", "random")),
        ]
        for system, label in ON_ANY_ROWS.items()
        if system not in ("dc3", "optnet")
    ]
    return ["system", "`paths`", "`random`"], lines


# quadratic programs that others collected

LARGEST = ("QUADCMPC3", "QUADCMPC4")  # of the MPC collection


def collected(name: str, *without: str) -> list[QpRow]:
    """The rows of a collection, but for some problems."""
    rows = (QpRow(**row) for row in record(f"bench/{name}.json")["rows"])
    return [row for row in rows if row.problem not in without]


def maros() -> Table:
    """What each system solved of Maros-Meszaros, and the means of its times."""
    return ["system", *MEANS], [_collected_cells(it) for it in summaries(collected("maros"))]


def mpc() -> Table:
    """The same of the MPC problems, and the first mean without the largest of them."""
    others = {it.system: it for it in summaries(collected("mpc", *LARGEST))}
    lines = [
        [*_collected_cells(it), time(others[it.system].means[0])]
        for it in summaries(collected("mpc"))
    ]
    return ["system", *MEANS, "of the others"], lines


MEANS = ("solved", "mean, shift 10 s", "mean, shift 10 ms", "× dfwlayer", "on")


def _collected_cells(it: Summary) -> list[str]:
    ratio = "1" if it.ratio is None else f"{float(f'{it.ratio:.2g}'):g}"
    return [
        SYSTEMS[it.system].label,
        f"{it.solved} of {it.problems}",
        *(time(mean) for mean in it.means),
        ratio,
        str(it.common),
    ]


def longest() -> Table:
    """Where this library takes longest against PIQP, of what takes it a millisecond or more."""
    times = {(row.problem, row.system): row.seconds for row in collected("maros")}
    ratios = {}
    for (problem, system), seconds in times.items():
        theirs = times[problem, "piqp"]
        if system == "dfwlayer" and seconds is not None and seconds >= 1e-3 and theirs is not None:
            ratios[problem] = seconds / theirs
    worst = sorted(ratios, key=lambda problem: -ratios[problem])[:8]
    lines = [
        [problem, *(time(times[problem, system]) for system in ("dfwlayer", "piqp"))]
        for problem in worst
    ]
    return ["program", "dfwlayer", "PIQP"], lines


def scaling() -> Table:
    """One process, and two."""
    lines = []
    for which in ("first", "again"):
        own = record("scaling/scaling.json")[f"{which} solve"]
        parts = ", ".join(f"{own[key]:.2f}" for key in ("seconds", "computing", "exchanging"))
        keys = ("strong: times faster", "weak: efficiency", "predicted / measured")
        line = [which, f"{own['seconds of one']:.2f}", parts, *(f"{own[key]:.2f}" for key in keys)]
        lines.append(line)
    header = ["", "one process", "two: all, computing, exchanging", "times faster"]
    return [*header, "two with twice the rows, efficiency", "model, against measured"], lines


TABLES = {
    "large-times": large_times,
    "large-errors": large_errors,
    "small-balls": small_balls,
    "small-flat": small_flat,
    "small-errors": small_errors,
    "gpu": gpu,
    "lasso": lasso,
    "layers-rows": layers_rows,
    "layers-kinds": layers_kinds,
    "layers-x-only": layers_x,
    "layers-more": layers_more,
    "maros": maros,
    "maros-longest": longest,
    "mpc": mpc,
    "scaling": scaling,
}
