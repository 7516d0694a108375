"""Which problems there are: batch number ``index`` of a seed, drawn by set, objective and so on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.balls import EllipsoidRow, GroupRow, LpRow
from dfwlayer_bench.fuzz.base import SetRow
from dfwlayer_bench.fuzz.composed import BallBoxRow, CentreRow, CutRow, ProductRow
from dfwlayer_bench.fuzz.data import KINDS, TIGHTNESS, Array, Draw, Params, wide
from dfwlayer_bench.fuzz.hulls import BirkhoffRow, CustomRow
from dfwlayer_bench.fuzz.linear import PolyhedronRow, TransportRow
from dfwlayer_bench.fuzz.matrices import SchattenRow, SpectraplexRow
from dfwlayer_bench.fuzz.objectives import (
    LeastSquaresRow,
    ObjectiveRow,
    QuadraticRow,
    SmoothRow,
    Units,
)
from dfwlayer_bench.fuzz.polyhedra import (
    BoxRow,
    CappedRow,
    KSparseRow,
    L1BoxRow,
    SimplexRow,
)

__all__ = ["DTYPES", "METHODS", "OBJECTIVES", "SETS", "Problem", "draw_problem", "draw_set"]

Maker = Callable[[np.random.Generator, int], Any]

METHODS = ("auto", "frank-wolfe", "active-set", "dfw", "projected-newton")
DTYPES = ("float32", "float64")
POWERS = (-25, -15, -8, 0, 0, 0, 0, 8, 15, 25)  # of ten, for the units of f and of the variable


def _lp(p: float) -> Maker:
    def make(rng: np.random.Generator, n: int) -> SetRow:
        weighted = bool(rng.random() < 0.6)
        return LpRow(n, p, weighted, weighted and bool(rng.random() < 0.3))

    return make


def _groups(rng: np.random.Generator, n: int) -> SetRow:
    labels = rng.integers(0, max(1, n // 2), n)
    groups = tuple(tuple(np.flatnonzero(labels == k).tolist()) for k in np.unique(labels))
    return GroupRow(n, groups, bool(rng.random() < 0.5))


def _schatten(p: float | None) -> Maker:
    def make(rng: np.random.Generator, _n: int) -> SetRow:
        rows, columns = (int(k) for k in rng.integers(1, 5, 2))
        power = float(rng.choice([1.5, 2.0, 3.0])) if p is None else p
        rank = int(rng.integers(1, max(2, min(rows, columns))))
        return SchattenRow(rows * columns, power, (rows, columns), rank)

    return make


def _plain(rng: np.random.Generator, n: int, prefix: str = "") -> SetRow:
    """A set that can be cut by a plane."""
    rows: list[SetRow] = [
        BoxRow(n, prefix=prefix),
        SimplexRow(n, prefix=prefix),
        CappedRow(n, prefix=prefix),
        L1BoxRow(n, prefix=prefix),
        KSparseRow(n, prefix=prefix),
        LpRow(n, 1.0, prefix=prefix),
    ]
    return rows[rng.integers(len(rows))]


def _cut(rng: np.random.Generator, n: int) -> SetRow:
    n = max(n, 3)
    base = _plain(rng, n)
    ones = bool(rng.random() < 0.3) and not isinstance(base, SimplexRow | CappedRow)
    return CutRow(n, base, ones)


def _centred(rng: np.random.Generator, n: int) -> SetRow:
    bases: list[SetRow] = [
        LpRow(n, float(rng.choice([1.0, 1.5, 2.0, 3.0, math.inf])), bool(rng.random() < 0.5)),
        _plain(rng, n),
        _groups(rng, n),
    ]
    base = bases[rng.integers(len(bases))]
    argument = isinstance(base, LpRow | GroupRow) and bool(rng.random() < 0.5)
    return CentreRow(n, base, argument)


def _product(rng: np.random.Generator, _n: int) -> SetRow:
    parts: list[SetRow] = []
    for i in range(int(rng.integers(2, 4))):
        size, prefix = int(rng.integers(1, 5)), f"s{i}_"
        if rng.random() < 0.5:
            power = float(rng.choice([1.0, 1.5, 2.0, math.inf]))
            parts.append(LpRow(size, power, bool(rng.random() < 0.5), prefix=prefix))
        else:
            parts.append(_plain(rng, size, prefix))
    return ProductRow(sum(part.n for part in parts), tuple(parts))


def _custom(rng: np.random.Generator, n: int) -> SetRow:
    polytope = str(rng.choice(["simplex", "cross", "cube"]))
    return CustomRow(min(n, 4) if polytope == "cube" else n, polytope, bool(rng.random() < 0.7))


def _birkhoff(rng: np.random.Generator, _n: int) -> SetRow:
    order = int(rng.integers(2, 5))
    return BirkhoffRow(order * order, order)


def _polyhedron(rng: np.random.Generator, n: int) -> SetRow:
    base = str(rng.choice(["box", "simplex", "solid"]))
    if rng.random() < 0.2:
        return PolyhedronRow(max(n, 2), bounded=True, prefix="set_")
    return PolyhedronRow(min(n, 16), base, int(rng.choice([0, 0, 1, 4])), prefix="set_")


def _spectraplex(rng: np.random.Generator, _n: int) -> SetRow:
    order = int(rng.integers(1, 5))
    return SpectraplexRow(order * order, order, int(rng.integers(1, max(2, order))))


def _transport(rng: np.random.Generator, _n: int) -> SetRow:
    units = int(rng.integers(2, 6))
    cuts = (np.sort(rng.choice(units - 1, int(rng.integers(1, units)), False)) for _ in range(2))
    rows, columns = (
        tuple(int(k) for k in np.diff([0, *(cut + 1).tolist(), units])) for cut in cuts
    )
    return TransportRow(len(rows) * len(columns), rows, columns)


SETS: dict[str, Maker] = {
    **{f"LpBall {p:g}": _lp(p) for p in (1.0, 1.05, 1.1, 1.5, 2.0, 3.0, 10.0, math.inf)},
    "LpBall p": lambda rng, n: _lp(round(float(1 + rng.exponential(1.5)), 3) or 1.0)(rng, n),
    "Box": lambda rng, n: BoxRow(
        n, str(rng.choice(["plain", "plain", "degenerate", "wide", "infinite", "half open"]))
    ),
    "Simplex": lambda _rng, n: SimplexRow(n),
    "CappedSimplex": lambda _rng, n: CappedRow(n),
    "L1Box": lambda rng, n: L1BoxRow(n, bool(rng.random() < 0.7), bool(rng.random() < 0.3)),
    "KSparse": lambda _rng, n: KSparseRow(n),
    "PlaneCut": _cut,
    "GroupBall": _groups,
    "Ellipsoid": lambda rng, n: EllipsoidRow(
        n, n + int(rng.integers(0, 3)), bool(rng.random() < 0.5)
    ),
    "NuclearBall": _schatten(1.0),
    "SpectralBall": _schatten(math.inf),
    "SchattenBall": _schatten(None),
    "Birkhoff": _birkhoff,
    "Polyhedron": _polyhedron,
    "Transport": _transport,
    "Spectraplex": _spectraplex,
    "Disc": lambda rng, n: CutRow(max(n, 3), LpRow(max(n, 3), 2.0), bool(rng.random() < 0.3)),
    "Intersection": lambda _rng, n: BallBoxRow(min(n, 12)),
    "Product": _product,
    "Shifted": _centred,
    "CustomSet": _custom,
}


def _quadratic(form: str) -> Maker:
    def make(rng: np.random.Generator, n: int) -> ObjectiveRow:
        return QuadraticRow(n, form, 10.0 ** rng.integers(2, 5))

    return make


def _squares(layout: str, exact: bool = False) -> Maker:
    def make(rng: np.random.Generator, n: int) -> ObjectiveRow:
        m = n + int(rng.integers(0, 4)) if rng.random() < 0.7 else max(1, n - 2)
        return LeastSquaresRow(n, m, layout, exact)

    return make


def _smooth(function: str, exact: bool = False) -> Maker:
    return lambda rng, n: SmoothRow(n, n + int(rng.integers(0, 3)), function, exact)


OBJECTIVES: dict[str, Maker] = {
    **{
        f"quadratic, {form}": _quadratic(form)
        for form in ("none", "own", "shared", "diagonal", "zero", "near linear", "singular", "ill")
    },
    **{
        f"least squares, {layout}": _squares(layout)
        for layout in ("own", "shared", "coo", "csr", "correlated")
    },
    "least squares, exact": _squares("own", exact=True),
    **{
        f"smooth, {name}": _smooth(name)
        for name in ("logistic", "log-sum-exp", "huber", "quartic", "linear")
    },
    "smooth, exact": _smooth("square", exact=True),
}


@dataclass(frozen=True)
class Problem:
    """A batch of problems and how they are to be solved.

    ``params`` are in units of one; what the library gets is in ``units``. Without a batch
    (``rows`` is None) there is one problem, and the checks see a batch of one.
    """

    seed: int
    index: int
    name: str  # of the set
    about: str  # the rest of the cell, in words
    set: SetRow
    objective: ObjectiveRow
    params: Params
    units: Units
    dtype: str
    method: str
    rows: int | None
    options: dict[str, Any]
    checks: tuple[str, ...]  # the costly ones that are made of this batch

    @property
    def scaled(self) -> Params:
        """The parameters in the units of the problem."""
        objective = self.objective.scaled(
            {k: p for k, p in self.params.items() if k in self.objective_names}, self.units
        )
        beta = self.units.variable
        return {
            k: objective[k] if k in objective else p.times(beta**p.scale)
            for k, p in self.params.items()
        }

    @property
    def objective_names(self) -> tuple[str, ...]:
        return ("P", "q") if isinstance(self.objective, QuadraticRow) else ("A", "b", "F", "d", "c")

    def wide(self) -> dict[str, Array]:
        """What the checks work with."""
        return wide(self.scaled)

    def tensors(self, dtype: str | None = None, learned: bool = False) -> dict[str, Tensor]:
        """What the library gets."""
        kind = getattr(torch, dtype or self.dtype)
        return {
            k: torch.tensor(p.value, dtype=kind, requires_grad=learned and p.learned)
            for k, p in self.scaled.items()
        }

    def only(self, i: int) -> Problem:
        """Problem i alone, without a batch."""
        if self.rows is None:
            return self
        return replace(self, rows=None, params={k: p.row(i) for k, p in self.params.items()})

    def some(self, index: Sequence[int]) -> Problem:
        """Some problems of the batch, as a batch."""
        params = {k: p.rows(index) for k, p in self.params.items()}
        return replace(self, rows=len(index), params=params)

    def build(self, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        """The library's objective and set."""
        import dfwlayer as dfw

        names = {"torch": torch, "dfw": dfw, **tensors}
        with warnings.catch_warnings():  # where warnings are errors, this one is not the library's
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            objective = eval(self.objective.code(self.units), names)
        return objective, eval(self.set.code(), names)

    def solve(self, tensors: dict[str, Tensor] | None = None, **options: Any) -> Any:
        """The library's solution."""
        import dfwlayer as dfw

        objective, constraint = self.build(self.tensors() if tensors is None else tensors)
        return dfw.solve(objective, constraint, method=self.method, **(self.options | options))

    def source(self) -> str:
        """Python that solves it with the library alone."""
        lines = ["import torch", "import dfwlayer as dfw", ""]
        for name, p in self.scaled.items():
            values = repr(p.value.tolist()).replace("inf", "float('inf')")
            lines.append(f"{name} = torch.tensor({values}, dtype=torch.{self.dtype})")
        options = "".join(f", {k}={v!r}" for k, v in self.options.items())
        lines += [
            f"objective = {self.objective.code(self.units)}",
            f"constraint = {self.set.code()}",
            f"sol = dfw.solve(objective, constraint, method={self.method!r}{options})",
            "print(sol.x.tolist(), sol.value.tolist(), sol.gap.tolist(), sol.status.tolist())",
        ]
        return "\n".join(lines)


def draw_set(name: str, rng: np.random.Generator, large: bool = False) -> SetRow:
    """A set of that name, its size and form drawn."""
    n = int(rng.integers(1, 13)) if rng.random() < 0.9 else int(rng.integers(13, 33))
    if large:
        n = int(rng.integers(40, 200))
    row: SetRow = SETS[name](rng, n)
    return row


def draw_problem(seed: int, index: int, only: int | None = None) -> Problem:
    """Batch number ``index`` of a seed, or problem ``only`` of it alone."""
    rng = np.random.default_rng([seed, index])
    name = list(SETS)[index % len(SETS)]
    large = bool(rng.random() < 0.02)
    row = draw_set(name, rng, large)
    dtype = str(rng.choice(DTYPES))
    method = str(rng.choice(METHODS, p=[0.6, 0.08, 0.12, 0.08, 0.12]))
    kind, tight = str(rng.choice(KINDS)), str(rng.choice(TIGHTNESS))
    unbounded = _may_be_unbounded(row)
    form = str(rng.choice([o for o in OBJECTIVES if not unbounded or o in CURVED]))
    objective: ObjectiveRow = OBJECTIVES[form](rng, row.n)
    if unbounded and method == "active-set":  # which says that it needs a bounded set
        method = "auto"
    if name == "Intersection" and method == "dfw":  # which says that it needs a soft vertex
        method = "auto"
    # vertices without end, and models of f that are right nowhere else: steps without end
    many = method == "active-set" and not (row.flat and objective.quadratic)
    slow = (
        name in ("CustomSet", "PlaneCut", "Birkhoff", "Intersection")
        or method in ("frank-wolfe", "dfw")
        or many
    )
    rows = int(rng.integers(16, 65) if slow else rng.integers(96, 321))
    if row.n > 32 or (name in PROGRAMS and method != "auto"):
        rows = int(rng.integers(2, 7))
    single = bool(rng.random() < 0.06)
    draw = Draw(rng, 1 if single else rows, kind, tight)
    params, target = objective.draw(draw)
    if target is not None and not np.isfinite(target).all():
        target = None
    params |= row.draw(replace(draw, target=target))
    params = {k: p.rounded(dtype) for k, p in params.items()}
    units = _units(rng, dtype, row, objective, kind)
    options: dict[str, Any] = {}
    programs = name in PROGRAMS and method != "auto"
    if method in ("frank-wolfe", "dfw") or many or programs:
        steps = [0, 3, 40, 150]
        if programs:
            steps = [0, 3, 10, 20]
        elif many:
            steps = [0, 40, 250] if row.flat else [0, 3, 20, 40]
        options["max_steps"] = int(rng.choice(steps))
    extra = ("alone", "nan", "scale", "precision", "gradient")
    checks = tuple(c for c in extra if rng.random() < 0.2)
    about = (
        f"{row.code()}, {form}, {kind}, {tight}, f × {units.value:.0e}, x × {units.variable:.0e}"
    )
    problem = Problem(
        seed, index, name, about, row, objective, params, units, dtype, method,
        draw.rows, options, checks,
    )  # fmt: skip
    if single:
        return problem.only(0)
    return problem if only is None else problem.only(only)


PROGRAMS = ("Polyhedron", "Transport", "Intersection")
"""Sets for which methods other than the default solve a program in every step."""

CURVED = ("quadratic, none", "quadratic, own", "quadratic, shared", "quadratic, diagonal")
"""Objectives with curvature everywhere, for sets with coordinates that have no bounds."""


def _may_be_unbounded(row: SetRow) -> bool:
    zeros, infinite = (
        getattr(row, "zeros", False),
        getattr(row, "form", "") in ("infinite", "half open"),
    )
    return (isinstance(row, LpRow) and zeros) or infinite


def _units(
    rng: np.random.Generator, dtype: str, row: SetRow, objective: ObjectiveRow, kind: str
) -> Units:
    """Units in which everything given to the library, and f and its gradient, are in range."""
    identity = isinstance(objective, QuadraticRow) and objective.form == "none"
    if rng.random() < 0.5:
        return Units()
    most = 28 if dtype == "float32" else 90
    if kind == "far":  # the numbers themselves are large
        most -= 18
    # a doubly stochastic matrix has a size of its own
    fixed = isinstance(row, BirkhoffRow)
    while True:
        a, b = int(rng.choice(POWERS)), 0 if fixed else int(rng.choice(POWERS))
        if identity:  # P = I means that f is measured in squares of the variable
            a = 2 * b
        if max(abs(a), abs(a - b), abs(a - 2 * b)) <= most:
            break
    two = round(b * math.log2(10))
    four = two if identity else round(a * math.log2(10) / 2)
    return Units(4.0**four, 2.0**two)
