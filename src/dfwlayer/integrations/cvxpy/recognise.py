"""What a cvxpy problem consists of: rows and a quadratic function for cvxpy, and norms for sets.

Constraints that are piecewise affine, and an objective that is quadratic in what is piecewise
affine, are left to cvxpy's reductions. A constraint κ‖E‖ ≤ r, with E affine in the variables and κ
and r in the parameters alone, becomes a `Ball`: new variables Z, ρ and κ, and the equations Z = E,
ρ = r, which reductions take like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
from cvxpy.atoms.affine.add_expr import AddExpression
from cvxpy.atoms.affine.binary_operators import DivExpression, MulExpression, multiply
from cvxpy.atoms.affine.promote import Promote
from cvxpy.atoms.affine.sum import Sum
from cvxpy.atoms.affine.trace import Trace
from cvxpy.atoms.affine.unary_operators import NegExpression
from cvxpy.atoms.elementwise.abs import abs as Abs  # noqa: N812
from cvxpy.atoms.elementwise.maximum import maximum as Maximum  # noqa: N812
from cvxpy.atoms.elementwise.minimum import minimum as Minimum  # noqa: N812
from cvxpy.atoms.elementwise.power import Power
from cvxpy.atoms.max import max as Max  # noqa: N812
from cvxpy.atoms.norm1 import norm1 as Norm1  # noqa: N812
from cvxpy.atoms.norm_inf import norm_inf as NormInf  # noqa: N812
from cvxpy.atoms.norm_nuc import normNuc as NormNuc
from cvxpy.atoms.pnorm import Pnorm
from cvxpy.atoms.quad_form import QuadForm
from cvxpy.atoms.quad_over_lin import quad_over_lin as QuadOverLin  # noqa: N812
from cvxpy.atoms.sigma_max import sigma_max as SigmaMax  # noqa: N812
from cvxpy.constraints import PSD, SOC, Equality, Inequality, NonNeg, NonPos, Zero

__all__ = ["Ball", "NotRecognisedError", "Recognised", "recognise"]

FORBIDDEN = ("boolean", "integer", "complex", "hermitian", "imag")


class NotRecognisedError(ValueError):
    """A term of a problem that has no place among the objectives and sets of this library."""


@dataclass(frozen=True)
class Ball:
    """κ‖Z‖ ≤ ρ, or κ‖Z‖² ≤ ρ, in a norm of the library."""

    kind: str  # "lp", "schatten", "group", or "trace" for Z ⪰ 0 with trace ρ
    p: float
    point: cp.Variable  # Z
    radius: cp.Variable  # ρ
    factor: cp.Variable | None = None  # κ, None for 1
    squared: bool = False
    axis: int | None = None  # along which the groups lie


@dataclass
class Recognised:
    """A problem in parts."""

    objective: cp.Minimize
    constraints: list[cp.Constraint] = field(default_factory=list)
    balls: list[Ball] = field(default_factory=list)
    replaced: dict[int, cp.Variable] = field(default_factory=dict)  # by plain ones, by their ids
    halves: dict[int, int] = field(default_factory=dict)  # the ids of E⁺, and of its E⁻

    def add(self, kind: str, p: float, point: Any, radius: Any, **more: Any) -> None:
        """A ball, with the equations of what it is made of."""
        Z, rho = cp.Variable(point.shape), cp.Variable()
        self.constraints += [point == Z, rho == radius]
        factor = more.pop("factor", None)
        if factor is not None:
            kappa = cp.Variable()
            self.constraints.append(kappa == factor)
            factor = kappa
        self.balls.append(Ball(kind, p, Z, rho, factor=factor, **more))


class _Norm(NamedTuple):
    kind: str
    p: float
    point: Any
    squared: bool = False
    scale: float = 1.0  # what the norm, or its square, is to be multiplied with
    axis: int | None = None


def recognise(problem: cp.Problem, hold: set[int], direct: bool) -> Recognised:
    """The parts of a problem, or NotRecognisedError with the term that has no place.

    Args:
        problem: Convex, with parameters by cvxpy's rules (DPP).
        hold: The ids of constraints whose multipliers are asked for; they stay as they are.
        direct: Whether ℓ1 norms are balls, too, and not rows.

    """
    for variable in problem.variables():
        wrong = [name for name in FORBIDDEN if variable.attributes.get(name)]
        if wrong:
            raise NotRecognisedError(f"variable {variable}: it is {wrong[0]}")
    goal, constraints, replaced = _plain(problem, hold)
    found = Recognised(_objective(goal, bool(hold)), replaced=replaced)
    for constraint in _spectraplexes(constraints, hold, found):
        _constraint(constraint, hold, direct, found)
    return found if hold else _halved(found)


def _halved(found: Recognised) -> Recognised:
    """E = E⁺ − E⁻ with E⁺, E⁻ ≥ 0 in place of |E|, ‖E‖₁, max(E, 0) and −min(E, 0).

    Each of them is E⁺ + E⁻, E⁺ or E⁻, of which the least is what counts in a convex problem. Rows
    for every one of them apart would depend on each other where they have a kink in common.
    """
    halves: dict[int, tuple[Any, Any]] = {}
    kept: list[Any] = []  # so that ids stay those of these objects

    def half(E: Any) -> tuple[Any, Any]:
        key = E.id if isinstance(E, cp.Variable) else id(E)
        if key not in halves:
            halves[key] = above, below = cp.Variable(E.shape), cp.Variable(E.shape)
            kept.append(E)
            rows.extend((above - below == E, above >= 0, below >= 0))
        return halves[key]

    def changed(f: Any) -> Any:
        if not f.args or (isinstance(f, cp.Expression) and f.is_affine()):
            return f
        E = f.args[0]
        if isinstance(f, Abs | Norm1) and E.is_affine() and getattr(f, "axis", None) is None:
            size = sum(half(E))
            return cp.sum(size) if isinstance(f, Norm1) else size
        if isinstance(f, Maximum | Minimum) and len(f.args) == 2:
            for one, other in (f.args, f.args[::-1]):
                zero = other.is_constant() and not np.any(other.value)
                if zero and one.is_affine() and one.shape == f.shape:
                    above, below = half(one)
                    return above if isinstance(f, Maximum) else -below
        args = [changed(arg) for arg in f.args]
        return f if all(a is b for a, b in zip(args, f.args, strict=True)) else f.copy(args)

    rows: list[cp.Constraint] = []
    goal = cp.Minimize(changed(found.objective.args[0]))
    constraints = [c if isinstance(c, Equality | Zero) else changed(c) for c in found.constraints]
    names = {above.id: below.id for above, below in halves.values()}
    return Recognised(goal, constraints + rows, found.balls, found.replaced, names)


def _plain(
    problem: cp.Problem, hold: set[int]
) -> tuple[Any, list[cp.Constraint], dict[int, cp.Variable]]:
    """The problem with plain variables for those that are positive semi-definite of given trace.

    cvxpy would take the upper triangle of such a variable for it.
    """
    goal, constraints = problem.objective, list(problem.constraints)
    replaced: dict[int, cp.Variable] = {}
    for X in problem.variables():
        marked = X.attributes.get("PSD")
        positive = [c for c in constraints if isinstance(c, PSD) and _same(X, c.args[0])]
        levels = [c for c in constraints if _trace_of(X, c) is not None and c.id not in hold]
        if levels and (marked or (positive and X.is_symmetric())) and not hold:
            plain = cp.Variable(X.shape)
            instead = {id(X): plain}
            goal = goal.tree_copy(instead)
            constraints = [c.tree_copy(instead) for c in constraints]
            if marked and not positive:
                constraints.append(plain >> 0)
            replaced[X.id] = plain
        elif marked or X.attributes.get("NSD"):
            raise NotRecognisedError(
                f"variable {X}: it is semi-definite, which is a set of this library only with a "
                "given trace, trace(X) == t"
            )
    return goal, constraints, replaced


def _objective(given: Any, exact: bool) -> cp.Minimize:
    """As something to minimise that is quadratic in what is piecewise affine."""
    f = given.args[0]
    if isinstance(given, cp.Maximize):
        f = -f
    if f.is_qpwa():
        return cp.Minimize(f)
    # the minimiser of a norm is that of its square; its multipliers are not
    varying = [(factor, term) for factor, term in _terms(f) if term.variables()]
    if len(varying) == 1 and not exact:
        factor, term = varying[0]
        euclidean = isinstance(term, Pnorm) and term.p == 2 and term.axis is None
        if euclidean and term.args[0].is_affine() and _positive(factor) is not None:
            return cp.Minimize(cp.sum_squares(term.args[0]))
    named = next((str(t) for _, t in varying if not t.is_qpwa()), str(f))
    raise NotRecognisedError(
        f"objective term {named}: expected what is quadratic in affine or piecewise affine "
        "expressions"
    )


def _constraint(c: cp.Constraint, hold: set[int], direct: bool, found: Recognised) -> None:
    """Put a constraint where it belongs."""
    if c.id in hold:
        if not _linear(c):
            raise NotRecognisedError(
                f"constraint {c}: its multiplier is asked for, which is to be had of equations "
                "and inequalities that are piecewise affine"
            )
        found.constraints.append(c)
        return
    parts = _sides(c) if isinstance(c, Inequality | NonPos | NonNeg | SOC) else None
    if parts is not None:
        factor, term, rest = parts
        positive = _positive(factor)
        if positive is not None and _unfolded(term, rest / positive, found):
            return
        fixed = not rest.variables() and not isinstance(rest, float)
        if direct and isinstance(term, Norm1) and fixed and term.args[0].is_affine():
            _ball([_Norm("lp", 1.0, term.args[0])], factor, rest, found)
            return
    if _linear(c):
        found.constraints.append(c)
        return
    norms = None if parts is None else _norms(parts[1])
    if parts is None or norms is None or parts[2].variables():
        raise NotRecognisedError(
            f"constraint {c}: expected affine rows, what is piecewise affine, or a norm of an "
            "affine expression with a limit that depends on parameters alone"
        )
    _ball(norms, parts[0], parts[2], found)


def _linear(c: cp.Constraint) -> bool:
    if isinstance(c, Equality | Zero):
        return all(arg.is_affine() for arg in c.args)
    return isinstance(c, Inequality | NonPos | NonNeg) and bool(c.expr.is_pwl())


def _sides(c: Any) -> tuple[Any, Any, Any] | None:
    """κ, the term and r of κ · term ≤ r, the only one that is not affine."""
    if isinstance(c, SOC):
        t, X = c.args
        if t.size != 1 or (X.ndim > 1 and 1 not in X.shape):
            return None
        return 1.0, cp.pnorm(cp.vec(X, order="F"), 2), cp.sum(t)
    terms = list(_terms(c.expr if not isinstance(c, NonNeg) else -c.expr))
    curved = [(k, t) for k, t in terms if t.variables() and not t.is_affine()]
    if len(curved) != 1:
        return None
    factor, term = curved[0]
    rest = sum((-k * t for k, t in terms if t is not term), cp.Constant(0.0))
    return factor, term, rest


def _terms(f: Any, factor: Any = 1.0) -> Iterator[tuple[Any, Any]]:
    """The summands of an expression, with their factors."""
    if isinstance(f, AddExpression):
        for part in f.args:
            yield from _terms(part, factor)
        return
    if isinstance(f, NegExpression):
        yield from _terms(f.args[0], -factor)
        return
    if isinstance(f, Promote):
        yield from _terms(f.args[0], factor)
        return
    if isinstance(f, multiply | MulExpression):
        for one, other in (f.args, f.args[::-1]):
            if one.size == 1 and not one.variables() and other.variables():
                # only one factor may be a parameter, by cvxpy's rules
                yield from _terms(other, factor * cp.sum(one))
                return
    if isinstance(f, DivExpression) and f.args[1].size == 1 and f.args[1].is_constant():
        yield from _terms(f.args[0], factor / float(f.args[1].value))
        return
    yield factor, f


def _positive(factor: Any) -> float | None:
    """A factor that is a positive number."""
    if isinstance(factor, cp.Expression):
        if factor.parameters() or factor.variables():
            return None
        factor = float(factor.value)
    return float(factor) if factor > 0 else None


def _unfolded(term: Any, limit: Any, found: Recognised) -> bool:
    """Rows without further variables, for |E| ≤ r, ‖E‖_∞ ≤ r and max E ≤ r."""
    E = term.args[0]
    lone = isinstance(term, Norm1 | Pnorm) and E.size == 1
    if not isinstance(term, Abs | NormInf | Max) and not lone:
        return False
    if getattr(term, "axis", None) is not None or not E.is_affine():
        return False
    found.constraints.append(limit >= E)
    if not isinstance(term, Max):
        found.constraints.append(limit >= -E)
    return True


def _ball(norms: Sequence[_Norm], factor: Any, limit: Any, found: Recognised) -> None:
    """κ‖E‖ ≤ r for each of the norms, which are as many as the limit has entries, or it has one."""
    positive = _positive(factor)
    for i, norm in enumerate(norms):
        r = cp.vec(limit, order="F")[i] if limit.size > 1 else cp.sum(limit)
        scale = norm.scale * (positive or 1.0)
        more = {} if positive is not None else {"factor": factor}
        found.add(
            norm.kind, norm.p, norm.point, r / scale, squared=norm.squared, axis=norm.axis, **more
        )


def _norms(term: Any) -> list[_Norm] | None:
    """A term as norms of affine expressions, one for each of its entries; None for others."""
    if isinstance(term, Pnorm):
        E = term.args[0]
        if not E.is_affine() or term.p < 1:
            return None
        if term.axis is None:
            return [_Norm("lp", float(term.p), E)]
        along = [E[i, :] if term.axis == 1 else E[:, i] for i in range(E.shape[1 - term.axis])]
        return [_Norm("lp", float(term.p), row) for row in along]
    if isinstance(term, Power) and _exponent(term) == 2 and term.size == 1:
        inner = _norms(term.args[0])
        if inner is not None and len(inner) == 1 and not inner[0].squared:
            return [inner[0]._replace(squared=True)]
        return None
    norm = _scalar_norm(term)
    return None if norm is None or not norm.point.is_affine() else [norm]


def _scalar_norm(term: Any) -> _Norm | None:
    if isinstance(term, SigmaMax | NormNuc):
        return _Norm("schatten", math.inf if isinstance(term, SigmaMax) else 1.0, term.args[0])
    if isinstance(term, QuadOverLin) and term.args[1].is_constant() and term.size == 1:
        over = float(np.asarray(term.args[1].value).item())
        return _Norm("lp", 2.0, term.args[0], True, 1 / over)
    if isinstance(term, QuadForm) and term.args[1].is_constant():
        P = term.args[1].value
        values, vectors = np.linalg.eigh(P.toarray() if hasattr(P, "toarray") else np.asarray(P))
        large = values > 1e-12 * abs(values).max()
        root = np.sqrt(values[large])[:, None] * vectors[:, large].T
        return _Norm("lp", 2.0, root @ term.args[0], True)
    if isinstance(term, Sum | Norm1) and term.axis is None:
        inner = term.args[0]
        if isinstance(inner, Power) and _exponent(inner) == 2 and isinstance(term, Sum):
            return _Norm("lp", 2.0, inner.args[0], True)
        if isinstance(inner, Pnorm) and inner.p == 2 and inner.axis is not None:
            return _Norm("group", 1.0, inner.args[0], axis=inner.axis)
    return None


def _exponent(term: Any) -> float:
    p = term.p
    return float(p.value) if isinstance(p, cp.Expression) else float(p)


def _spectraplexes(
    constraints: list[cp.Constraint], hold: set[int], found: Recognised
) -> list[cp.Constraint]:
    """Take out X ⪰ 0 with trace X = t."""
    rest = list(constraints)
    for c in constraints:
        if not isinstance(c, PSD) or c.id in hold:
            continue
        X = c.args[0]
        for other in rest:
            trace = _trace_of(X, other) if other.id not in hold else None
            if trace is not None:
                found.add("trace", 1.0, X, trace)
                rest = [each for each in rest if each is not c and each is not other]
                break
    return rest


def _trace_of(X: Any, c: Any) -> Any:
    """t where a constraint says trace X = t."""
    if not isinstance(c, Equality):
        return None
    for one, other in (c.args, c.args[::-1]):
        if isinstance(one, Trace) and _same(one.args[0], X) and not other.variables():
            return other
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two expressions are written in the same way."""
    if isinstance(one, cp.Variable) and isinstance(other, AddExpression):
        others = [t for _, t in _terms(other) if t.variables()]  # X >> 0 is X − 0 ⪰ 0
        constants = [t for _, t in _terms(other) if not t.variables()]
        zero = all(t.is_constant() and not np.any(t.value) for t in constants)
        return len(others) == 1 and zero and _same(one, others[0])
    if isinstance(one, cp.Variable) or isinstance(other, cp.Variable):
        return one is other
    return str(one) == str(other)
