"""What is checked of a batch of problems, by formulas and references that are not the library's.

- feasible: the excess over each constraint in long double, at most a few units in the last place
  of the constraint's size; bounds on single entries hold exactly. What looks infeasible is
  computed again in fractions.
- certificate: for g = ∇f(x) and any feasible y, f(x) − f(y) ≤ ⟨g, x⟩ − min ⟨g, s⟩, with the
  minimum from an own vertex. Where the claimed gap, or what the status implies, is below that
  own gap, a better feasible point is looked for by Frank-Wolfe steps in long double; finding one
  refutes the claim.
- convex: what rounding to the dtype has made non-convex is only checked for being feasible.
- status: CONVERGED and ROUNDING_FLOOR mean what they say; at default settings every problem of
  these sizes arrives.
- neighbours, scale, precision, gradient: the same problem alone, next to a NaN, in other units, in
  float64, and with a backward pass.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from dfwlayer_bench.fuzz.data import LONG, Array, wide
from dfwlayer_bench.fuzz.limits import limited
from dfwlayer_bench.fuzz.objectives import QuadraticRow, Units
from dfwlayer_bench.fuzz.problems import Problem, draw_problem

__all__ = ["ULPS", "Failure", "judge", "reproducer"]

ULPS = 4.0  # units in the last place of a constraint's size by which it may be exceeded
TOL = 1e-5  # the default of `dfwlayer.solve`
FLOOR = 32.0  # times the rounding of the terms: what a dtype cannot tell
CONVERGED, MAX_STEPS, ROUNDING_FLOOR, NONFINITE, NOT_CONVEX, UNBOUNDED = range(6)
LITERAL = 200_000  # characters that a script may spell numbers out in
SECONDS = 30  # for a batch of small problems
STEPS = 60  # of the reference that looks for better points


@dataclass(frozen=True)
class Failure:
    """Something that is not as promised."""

    kind: str
    name: str  # of the set
    dtype: str
    method: str
    about: str
    seed: int
    index: int
    row: int | None
    message: str

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return (
            f"{self.kind}: {self.message}\n    {self.name}, {self.dtype}, {self.method}, "
            f"{self.about} (seed {self.seed}, batch {self.index}{row})"
        )


@dataclass(frozen=True)
class Seen:
    """A solution as the checks see it: long double, with a batch."""

    x: Array
    value: Array
    gap: Array
    status: Array

    @classmethod
    def of(cls, problem: Problem, solution: Any) -> Seen:
        def rows(tensor: torch.Tensor) -> Array:
            array = tensor.detach().numpy()
            return (array if problem.rows is not None else array[None]).astype(LONG)

        value, gap, status = (rows(t) for t in (solution.value, solution.gap, solution.status))
        return cls(rows(solution.x).reshape(len(value), -1), value, gap, status.astype(int))


class Judge:
    """Collects the failures of one batch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.p = problem.wide()
        self.eps = LONG(np.finfo(problem.dtype).eps)
        self.tiny = LONG(np.finfo(problem.dtype).tiny)
        self.failures: list[Failure] = []

    def fail(self, kind: str, row: int | None, message: str) -> None:
        """Note a failure."""
        q = self.problem
        self.failures.append(
            Failure(kind, q.name, q.dtype, q.method, q.about, q.seed, q.index, row, message)
        )

    def solved(self, problem: Problem, what: str, **options: Any) -> Seen | None:
        """The library's solution, or a failure."""
        try:
            with torch.no_grad(), limited(SECONDS):
                return Seen.of(problem, problem.solve(**options))
        except Exception as error:
            self.refused(what, error)
            return None

    def refused(self, what: str, error: Exception) -> None:
        """Note that a sound problem raised."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename.rsplit('/')[-1]}:{at.lineno}"
        kind = "slow" if isinstance(error, TimeoutError) else "error"
        self.fail(kind, None, f"{what}{type(error).__name__}: {str(error)[:300]} ({where})")

    # -----------------------------------------------------------------------------------------

    def feasible(self, seen: Seen, sound: Array) -> None:
        """Every constraint, for the rows that were solved."""
        for e in self.problem.set.excess(seen.x, self.p):
            unit = self.eps * np.broadcast_to(e.size, e.by.shape)
            allowed = np.where(e.size > 0, ULPS * unit + self.tiny, 0)
            for i in np.flatnonzero(sound & ~(e.by <= allowed)):
                by = float(self._exactly(seen, int(i), e.name))
                if not by <= allowed[i]:
                    shown = f"{by / float(unit[i]):.3g} ulp" if unit[i] > 0 else f"{by:.3g}"
                    self.fail("infeasible", int(i), f"{e.name} exceeded by {shown}")

    def _exactly(self, seen: Seen, i: int, name: str) -> Any:
        """The excess of one row in fractions, or in long double where singular values are asked."""
        x = seen.x[i : i + 1]
        if not np.isfinite(x).all():
            return np.inf
        alone = self.problem.only(i)
        p = wide(alone.scaled)
        try:
            exact = {k: fractions(v) for k, v in p.items()}
            found = self.problem.set.excess(fractions(x), exact)
        except (TypeError, AttributeError, ValueError, OverflowError):
            found = self.problem.set.excess(x, p)
        return next(e.by[0] for e in found if e.name == name)

    # -----------------------------------------------------------------------------------------

    def certified(self, seen: Seen, sound: Array) -> None:
        """Value, gap and status against own values, vertices and better points."""
        q, p = self.problem, self.p
        f = q.objective.value(seen.x, p, q.units)
        gap, floor = self._own_gap(seen.x)
        terms = q.objective.terms(seen.x, p, q.units)
        floor = FLOOR * (floor + self.eps * (terms + np.abs(f))) + self.tiny
        for i in np.flatnonzero(sound & ~(np.abs(seen.value - f) <= floor)):
            self.fail("value", int(i), f"value {seen.value[i]:.6g}, own {f[i]:.6g}")
        for i in np.flatnonzero(sound & ~(seen.gap >= -floor)):
            self.fail("certificate", int(i), f"gap {seen.gap[i]:.3g}")
        honest = q.method != "dfw"  # whose CONVERGED is about the last step
        needed = TOL * np.abs(f) + floor
        claimed = np.where(
            honest & np.isin(seen.status, (CONVERGED, ROUNDING_FLOOR)), needed, np.inf
        )
        claimed = np.minimum(claimed, np.maximum(seen.gap, 0) + floor)
        suspect = np.flatnonzero(sound & (gap > claimed))
        if len(suspect):
            better = self._better(suspect.tolist(), seen.x[suspect])
            for i, y in zip(suspect, better, strict=True):
                gain = f[i] - y
                if gain > np.maximum(seen.gap[i], 0) + floor[i]:
                    kind, claim = "certificate", f"gap {seen.gap[i]:.3g}"
                elif honest and gain > needed[i] and seen.status[i] == CONVERGED:
                    kind, claim = "status", f"CONVERGED with |f| = {abs(f[i]):.3g}"
                elif honest and gain > needed[i] and seen.status[i] == ROUNDING_FLOOR:
                    kind, claim = "stall", f"ROUNDING_FLOOR, floor {floor[i]:.3g}"
                else:
                    continue
                self.fail(kind, int(i), f"f can fall by {gain:.3g}; {claim}")
        for i in np.flatnonzero(sound & (seen.status == CONVERGED) & ~np.isfinite(seen.gap)):
            self.fail("status", int(i), f"CONVERGED with gap {seen.gap[i]}")
        wrong = np.isin(seen.status, (NOT_CONVEX, UNBOUNDED)) | (seen.status > UNBOUNDED)
        for i in np.flatnonzero(sound & wrong):
            self.fail("status", int(i), f"status {seen.status[i]} for a convex, bounded problem")
        if self._arrives():
            for i in np.flatnonzero(sound & (seen.status == MAX_STEPS)):
                size = seen.gap[i] / max(abs(f[i]), self.tiny)
                self.fail(
                    "steps", int(i), f"MAX_STEPS at default settings, relative gap {size:.3g}"
                )

    def convex(self, x: Array) -> Array:
        """Where f is convex over the set, as far as its own rounding tells (B,).

        A singular P that is rounded to its dtype has negative eigenvalues; over a set that is large
        enough these are no rounding of f.
        """
        down = self.problem.objective.bends_down(self.p)
        if down is None:
            return np.ones(len(x), bool)
        _, floor = self._own_gap(x)
        g, _size = self.problem.objective.gradient(x, self.p, self.problem.units)
        reach = np.abs(x) + np.abs(self.problem.set.vertex(g, self.p))
        flat: Array = down * (reach * reach).sum(-1) <= FLOOR * floor + self.tiny
        return flat

    def _arrives(self) -> bool:
        """Whether the method is promised to get there within the default number of steps."""
        q = self.problem
        return q.method in ("auto", "projected-newton") and "max_steps" not in q.options

    def _own_gap(self, x: Array) -> tuple[Array, Array]:
        """max over the set of ⟨g, x − s⟩, and the rounding of its terms in the dtype."""
        q, p = self.problem, self.p
        g, size = q.objective.gradient(x, p, q.units)
        free = q.set.free(g, p)
        held = g if free is None else np.where(free, 0, g)
        s = q.set.vertex(held, p)
        gap = (held * x).sum(-1) - q.set.lowest(held, p)
        reach = np.abs(x) + np.abs(s) + q.set.blur(x, p)
        if free is not None:
            # a neighbourhood of x as wide as x itself stands for a coordinate without bounds
            around = np.abs(x).max(-1, keepdims=True)
            gap = gap + np.where(free, np.abs(g) * around, 0).sum(-1)
            reach = reach + np.where(free, around, 0)
        return gap, self.eps * (size * reach).sum(-1)

    def _better(self, rows: list[int], x: Array) -> Array:
        """The least f that Frank-Wolfe steps find from x, in long double."""
        q = self.problem if self.problem.rows is None else self.problem.some(rows)
        p, f = q.wide(), q.objective
        best = f.value(x, p, q.units)
        steps = [0.5**k for k in range(40)]
        for _ in range(STEPS):
            g, _size = f.gradient(x, p, q.units)
            free = q.set.free(g, p)
            s = q.set.vertex(g if free is None else np.where(free, 0, g), p)
            if free is not None:
                s = np.where(free, x - np.sign(g) * np.abs(x).max(-1, keepdims=True), s)
            d = s - x
            if f.quadratic:
                along = -(g * d).sum(-1)
                bend = ((f.gradient(x + d, p, q.units)[0] - g) * d).sum(-1)
                step = np.clip(np.where(bend > 0, along / np.where(bend > 0, bend, 1), 1), 0, 1)
                trials = [x + step[:, None] * d]
            else:
                trials = [x + LONG(step) * d for step in steps]
            values = np.stack([f.value(y, p, q.units) for y in trials])
            pick = values.argmin(0)
            least = values[pick, np.arange(len(x))]
            moved = np.stack(trials)[pick, np.arange(len(x))]
            x = np.where((least < best)[:, None], moved, x)
            best = np.minimum(best, least)
        return best

    # -----------------------------------------------------------------------------------------

    def alone(self, seen: Seen, sound: Array, rng: np.random.Generator) -> None:
        """A problem of the batch, solved by itself."""
        if self.problem.rows is None:
            return
        for i in rng.choice(self.problem.rows, min(2, self.problem.rows), replace=False):
            if not sound[i]:
                continue
            single = self.solved(self.problem.only(int(i)), "alone: ")
            if single is not None:
                self._same("neighbours", [int(i)], seen, single, 1.0, "alone")

    def nan(self, seen: Seen, sound: Array, rng: np.random.Generator) -> None:
        """A NaN in one problem leaves the others as they are."""
        q = self.problem
        name = next(k for k in ("q", "b", "d") if k in q.params)
        if q.rows is None or q.rows < 2:
            return
        bad = int(rng.integers(q.rows))
        value = q.params[name].value.copy()
        value[bad, 0] = np.nan
        params = q.params | {name: replace(q.params[name], value=value)}
        other = self.solved(replace(q, params=params), "with a NaN row: ")
        if other is None:
            return
        if other.status[bad] != NONFINITE or not np.isnan(other.x[bad]).all():
            self.fail("neighbours", bad, f"a NaN row has status {other.status[bad]}")
        keep = [i for i in range(q.rows) if i != bad and sound[i]]
        if keep:
            rest = Seen(other.x[keep], other.value[keep], other.gap[keep], other.status[keep])
            self._same("neighbours", keep, seen, rest, 1.0, "beside a NaN row")

    def scale(self, seen: Seen, sound: Array, rng: np.random.Generator) -> None:
        """The same numbers in units of one."""
        q = self.problem
        if q.units == Units():
            return
        plain = self.solved(replace(q, units=Units()), "in units of one: ")
        if plain is not None:
            rows = np.flatnonzero(sound).tolist()
            if rows:
                unit = Seen(plain.x[rows], plain.value[rows], plain.gap[rows], plain.status[rows])
                self._same("scale", rows, seen, unit, q.units.variable, "in units of one")

    def _same(
        self, kind: str, rows: list[int], seen: Seen, other: Seen, unit: float, what: str
    ) -> None:
        """The same solutions, to the rounding of a well conditioned problem."""
        ended = seen.status[rows]
        fine = (CONVERGED, ROUNDING_FLOOR)  # which is a matter of the last rounding
        arrived, arrives = np.isin(ended, fine), np.isin(other.status, fine)
        if self._arrives():
            for k in np.flatnonzero(arrived != arrives):
                message = f"status {ended[k]}, {what} {other.status[k]}"
                self.fail(kind, rows[k], message)
        f = self.problem.objective
        if not isinstance(f, QuadraticRow) or f.form not in ("none", "own", "shared", "diagonal"):
            return
        if self.problem.method not in ("auto", "projected-newton"):
            return
        size = np.abs(seen.x[rows]).max(-1)
        off = np.abs(seen.x[rows] - LONG(unit) * other.x).max(-1)
        # both end on the face they found, where x is exact to the condition of P, and to what the
        # rounding of ∇f, whose terms may be far larger than Px, moves it by
        terms = f.gradient(seen.x, self.p, self.problem.units)[1].max(-1)
        moved = np.broadcast_to(terms / f.steepest(self.p), len(seen.x))[rows]
        allowed = self.eps * (1e4 * size + 100 * moved) + self.tiny
        for k in np.flatnonzero(arrived & arrives & ~(off <= allowed)):
            self.fail(kind, rows[k], f"x differs by {off[k] / size[k]:.3g} relative, {what}")

    def precision(self, seen: Seen, sound: Array) -> None:
        """float32 against float64: as good as its own rounding and tol."""
        q, p = self.problem, self.p
        if q.dtype != "float32" or q.method not in ("auto", "projected-newton"):
            return
        # numbers rounded to float32 may leave a set of one point to float32 and none to float64
        exists = q.set.exists(p)
        if exists is not None and not exists.all():
            rows = np.flatnonzero(np.broadcast_to(exists, len(seen.x)))
            if q.rows is None or not len(rows):
                return
            part = Judge(q.some(rows.tolist()))
            part.precision(Seen(*(field[rows] for field in vars(seen).values())), sound[rows])
            for found in part.failures:
                row = None if found.row is None else int(rows[found.row])
                self.fail(found.kind, row, found.message)
            return
        try:
            with torch.no_grad(), limited(SECONDS):
                double = Seen.of(q, q.solve(q.tensors("float64")))
        except Exception as error:
            self.refused("in float64: ", error)
            return
        f = q.objective.value(seen.x, p, q.units)
        best = q.objective.value(double.x, p, q.units)
        _, floor = self._own_gap(seen.x)
        terms = q.objective.terms(seen.x, p, q.units)
        allowed = TOL * np.abs(f) + FLOOR * (floor + self.eps * (terms + np.abs(f))) + self.tiny
        done = sound & (double.status == CONVERGED)
        for i in np.flatnonzero(done & ~(f - best <= allowed)):
            message = f"f is higher by {f[i] - best[i]:.3g} than in float64, |f| = {abs(f[i]):.3g}"
            self.fail("precision", int(i), f"{message}, status {seen.status[i]}")

    def gradient(self, rng: np.random.Generator) -> None:
        """A backward pass gives finite numbers."""
        q = self.problem
        if q.method == "dfw":
            return
        tensors = q.tensors(learned=True)
        try:
            with limited(SECONDS):
                x = q.solve(tensors).x
                x.backward(torch.tensor(rng.standard_normal(tuple(x.shape)), dtype=x.dtype))
        except Exception as error:
            self.refused("backward: ", error)
            return
        for name, tensor in tensors.items():
            if tensor.grad is None or bool(torch.isfinite(tensor.grad).all()):
                continue
            per_row = q.params[name].batched
            bad = ~torch.isfinite(tensor.grad.reshape(len(tensor.grad) if per_row else 1, -1))
            row = int(bad.any(-1).nonzero()[0]) if per_row else None
            self.fail("gradient", row, f"NaN or infinity in the gradient of {name}")


def fractions(array: Array) -> Array:
    """The same numbers as fractions."""
    out = np.empty(array.shape, object)
    for at, value in np.ndenumerate(array):
        out[at] = Fraction(float(value)) if np.isfinite(value) else float(value)
    return out


def judge(problem: Problem) -> list[Failure]:
    """Solve a batch with the library and check all that is promised of it."""
    judge = Judge(problem)
    with np.errstate(all="ignore"):
        seen = judge.solved(problem, "")
        if seen is None:
            return judge.failures
        sound = seen.status != NONFINITE
        for i in np.flatnonzero(~sound):
            judge.fail("status", int(i), "NONFINITE for finite data")
        judge.feasible(seen, sound)
        sound = sound & judge.convex(seen.x)
        judge.certified(seen, sound)
        rng = np.random.default_rng([problem.seed, problem.index, 1])
        for check in problem.checks:
            if check == "precision":
                judge.precision(seen, sound)
            elif check == "gradient":
                judge.gradient(rng)
            else:
                getattr(judge, check)(seen, sound, rng)
    return judge.failures


def reproducer(failure: Failure) -> str:
    """A script that shows the failure."""
    alone = ""
    if failure.row is not None:
        source = draw_problem(failure.seed, failure.index).only(failure.row).source()
        alone = source if len(source) < LITERAL else ""
    return script_of(failure, "draw_problem", "judge", "judge(case)", alone)


def script_of(failure: Failure, draw: str, check: str, failures: str, alone: str) -> str:
    """A script that draws the failure's case anew, judges it, and has its row by itself."""
    lines = [
        *(f"# {line}" for line in str(failure).splitlines()),
        f"from dfwlayer_bench.fuzz import {draw}, {check}",
        "",
        f"case = {draw}(seed={failure.seed}, index={failure.index})",
        f"for failure in {failures}:",
        "    print(failure)",
    ]
    if alone:
        lines += ["", "# that row with the library alone, by itself", alone]
    return "\n".join(lines) + "\n"
