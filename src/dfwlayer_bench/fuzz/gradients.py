"""Gradients against differences of independently computed solutions.

Problems are designed backwards: a set gives a point x* and a force in its normal cone with
multipliers away from zero and slacks away from zero, an objective the linear term that makes
∇f(x*) = −force. So the face of x* is known without a solver, and a problem with parameters nearby
has its solution on the same face: the root of

    ∇f(x; θ) + Σ λ_k ∇c_k(x; θ) = 0,   c_k(x; θ) = 0 for the active constraints k,

which Newton's method finds in float64 from x*. The derivative along a random direction in all
parameters at once is the extrapolated central difference of such roots. Where the rounding of the
data or the step moves x or λ by more than the margin of the design, or where the system is so ill
conditioned that rounding exceeds the tolerance, the problem is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.balls import LpRow
from dfwlayer_bench.fuzz.base import SetRow
from dfwlayer_bench.fuzz.checks import SECONDS, Failure, script_of
from dfwlayer_bench.fuzz.composed import ProductRow
from dfwlayer_bench.fuzz.data import Array, Draw, Param
from dfwlayer_bench.fuzz.limits import limited
from dfwlayer_bench.fuzz.objectives import (
    LeastSquaresRow,
    ObjectiveRow,
    QuadraticRow,
    SmoothRow,
    Units,
)
from dfwlayer_bench.fuzz.polyhedra import L1BoxRow
from dfwlayer_bench.fuzz.problems import DTYPES, SETS, Problem, draw_set

__all__ = ["GradientProblem", "Verdict", "draw_gradient", "gradient_reproducer", "judge_gradient"]

MARGIN = 0.02  # how far roots may move, relative to x and λ, whose slacks are ten times that
STEP = 2e-5  # of the differences; data are of size one
AMPLIFIED = 50.0  # times eps and the condition: the error that a good gradient may have
# of the directional derivative, whose reference is good to 1e-8
TOLERANCE = {"float64": 1e-5, "float32": 5e-3}


class Verdict(NamedTuple):
    """How many gradients were compared, how many were too close to a kink, and what was wrong."""

    checked: int
    skipped: int
    failures: list[Failure]


@dataclass(frozen=True)
class GradientProblem:
    """A batch whose solutions are known, and the notes about their faces."""

    problem: Problem
    situation: str
    x: Array  # (B, n), before the rounding of the data
    notes: dict[str, Array]
    pull: float  # the size of the multipliers


FITTED = ("none", "own", "shared", "diagonal")


def _objective(rng: np.random.Generator, n: int) -> ObjectiveRow:
    pick = rng.integers(10)
    if pick < 4:
        return QuadraticRow(n, FITTED[pick])
    if pick < 7:
        layout = str(rng.choice(["own", "shared", "coo", "csr"]))
        return LeastSquaresRow(n, n + int(rng.integers(0, 4)), layout)
    function = str(rng.choice(["logistic", "log-sum-exp", "square"]))
    return SmoothRow(n, n + int(rng.integers(0, 3)), function)


def draw_gradient(seed: int, index: int) -> GradientProblem:
    """Batch number ``index`` of the gradient checks of a seed."""
    rng = np.random.default_rng([seed, index, 2])
    name = list(SETS)[index % len(SETS)]
    row = _without_zeros(draw_set(name, rng))
    rows = int(rng.integers(8, 33))
    objective = _objective(rng, row.n)
    situation = str(rng.choice(row.designs))
    draw = Draw(rng, rows)
    design = row.design(draw, situation)
    pull = float(rng.choice([1.0, 1.0, 1e-2, 10.0]))
    inside = not design.force.any()
    exact = inside and bool(rng.random() < 0.6)
    params = objective.fit(rng, design.x, pull * design.force, exact)
    dtype = str(rng.choice(DTYPES))
    params = {k: p.rounded(dtype) for k, p in (params | design.params).items()}
    units = Units()
    if rng.random() < 0.4:
        four = int(rng.choice([-30, -10, 10, 30]))
        units = Units(4.0**four, 1.0)
        if isinstance(objective, QuadraticRow) and objective.form == "none":
            units = Units()
    about = (
        f"{row.code()}, {type(objective).__name__} {getattr(objective, 'form', '')}, {situation}"
    )
    about += f"{', exact fit' if exact else ''}, pull {pull:g}, f × {units.value:.0e}"
    # the differences know x to ten digits, so x is asked for as exactly as the dtype allows
    options = {"tol": 1e-12 if dtype == "float64" else 1e-7}
    problem = Problem(
        seed, index, name, about, row, objective, params, units, dtype, "auto", rows, options, ()
    )
    return GradientProblem(problem, situation, design.x, design.notes, pull)


def _without_zeros(row: SetRow) -> SetRow:
    """Designs have weights that are not zero."""
    if isinstance(row, ProductRow):
        return replace(row, parts=tuple(_without_zeros(part) for part in row.parts))
    return replace(row, zeros=False) if isinstance(row, LpRow | L1BoxRow) else row


class Root(NamedTuple):
    """Solutions of the optimality conditions on a face."""

    z: Tensor  # (B, n + m), x and the multipliers
    residual: Tensor  # (B,)
    condition: Tensor  # (B,), of the system that the derivative solves


def solve_on_face(
    case: GradientProblem, params: dict[str, Tensor], start: Tensor | None, steps: int
) -> Root:
    """Newton's method from the designed point, in float64, for parameters in units of one."""
    q = case.problem
    notes = {k: torch.tensor(np.ascontiguousarray(v)) for k, v in case.notes.items()}
    n = case.x.shape[-1]
    in_dims = (0, {k: 0 if q.params[k].batched else None for k in params}, dict.fromkeys(notes, 0))

    def mapped(function: Any) -> Any:
        return lambda z: torch.func.vmap(function, in_dims=in_dims)(z, params, notes)

    def lagrangian(z: Tensor, p: dict[str, Tensor], own: dict[str, Tensor]) -> Tensor:
        equations, mask = q.set.active(z[:n], p, own)
        multiplier = z[n:]
        # the multiplier of what is not active is zero
        held = torch.where(mask, multiplier * equations, 0.5 * multiplier * multiplier)
        total: Tensor = q.objective.torch(z[:n], p) + held.sum()
        return total

    slope, bend = (
        mapped(torch.func.grad(lagrangian)),
        mapped(torch.func.jacrev(torch.func.grad(lagrangian))),
    )
    if start is None:
        # the multipliers by least squares with x held, for a Hessian that has its bends
        x = torch.tensor(case.x, dtype=torch.float64)
        equations, mask = mapped(q.set.active)(x)
        normals = mapped(torch.func.jacrev(lambda *args: q.set.active(*args)[0]))(x)
        normals = torch.where(mask[..., None], normals, 0.0).nan_to_num().mT  # (B, n, m)
        z = torch.cat([x, torch.zeros_like(equations)], -1)
        multiplier = -(torch.linalg.pinv(normals) @ slope(z)[:, :n, None])[..., 0]
        start = torch.cat([x, multiplier], -1)
    z = start
    for _ in range(steps):
        K = bend(z).nan_to_num(posinf=1e30, neginf=-1e30)
        inverse = torch.linalg.pinv(K, hermitian=True, rtol=1e-13)
        z = (z - (inverse @ slope(z)[..., None])[..., 0]).nan_to_num(1e30, 1e30, -1e30)
    K = bend(z).nan_to_num(posinf=1e30, neginf=-1e30)
    return Root(z, slope(z).abs().amax(-1).nan_to_num(torch.inf), condition_of(K))


def condition_of(K: Tensor) -> Tensor:
    """Largest over smallest eigenvalue after scaling rows and columns to size one, (B,).

    Eigenvalues that are rounding come from constraints that repeat each other, and do not count.
    """
    for _ in range(4):
        size = K.abs().amax(-1).clamp_min(1e-300).sqrt()
        K = K / size[:, :, None] / size[:, None, :]
    values = torch.linalg.eigvalsh(K).abs()
    top = values.amax(-1, keepdim=True)
    least = torch.where(values > 1e-13 * top, values, top).amin(-1)
    ratio: Tensor = top[:, 0] / least
    return ratio


def judge_gradient(case: GradientProblem) -> Verdict:
    """The library's directional derivatives against differences."""
    q = case.problem
    rng = np.random.default_rng([q.seed, q.index, 3])
    params = {k: torch.tensor(p.value) for k, p in q.params.items()}
    directions = {k: _direction(rng, k, p, q) for k, p in q.params.items() if p.learned}

    def root(step: float, start: Tensor | None, steps: int) -> Root:
        moved = {
            k: p + step * torch.tensor(directions[k]) if k in directions else p
            for k, p in params.items()
        }
        return solve_on_face(case, moved, start, steps)

    n = case.x.shape[-1]
    base = root(0.0, None, 6)
    ends = [root(step, base.z, 3) for step in (STEP, -STEP, STEP / 2, -STEP / 2)]
    coarse, fine = (ends[0].z - ends[1].z) / (2 * STEP), (ends[2].z - ends[3].z) / STEP
    slope = ((4 * fine - coarse) / 3)[:, :n]
    size = slope.norm(dim=-1)
    ok = (coarse - fine)[:, :n].norm(dim=-1) <= 1e-3 * size + 1e-6
    # rounding that the condition makes more of than is tolerated tells nothing
    ok &= base.condition <= TOLERANCE[q.dtype] / (AMPLIFIED * np.finfo(q.dtype).eps)
    x = torch.tensor(case.x)
    for end in (base, *ends):
        ok &= end.residual <= 1e-9
        ok &= (end.z[:, :n] - x).abs().amax(-1) <= MARGIN * (1e-3 + x.abs().amax(-1))
        change = (end.z - base.z)[:, n:].abs()
        ok &= (change <= MARGIN * case.pull).all(-1)
    kept = torch.nonzero(ok)[:, 0].tolist()
    skipped = len(ok) - len(kept)
    if not kept:
        return Verdict(0, skipped, [])
    v = torch.tensor(rng.standard_normal(x.shape))[kept]
    slope, size, solved = slope[kept], size[kept], base.z[kept, :n]
    expected = q.units.variable * (v * slope).sum(-1)
    q = q.some(kept)
    directions = {k: d[kept] if q.params[k].batched else d for k, d in directions.items()}

    def failure(row: int | None, message: str, kind: str = "gradient") -> Failure:
        return Failure(kind, q.name, q.dtype, q.method, q.about, q.seed, q.index, row, message)

    tensors = q.tensors(learned=True)
    try:
        with limited(SECONDS):
            x = q.solve(tensors).x
            x.backward(v.to(x.dtype))
    except Exception as error:
        text = f"backward: {type(error).__name__}: {str(error)[:300]}"
        kind = "slow" if isinstance(error, TimeoutError) else "error"
        return Verdict(len(kept), skipped, [failure(None, text, kind)])
    found, shares = _directional(q, tensors, directions)
    tolerance = TOLERANCE[q.dtype]
    allowed = tolerance * (v.norm(dim=-1) * size + 1e-3)
    away = (x.detach().double() / q.units.variable - solved).abs().amax(-1)
    off = ~(away <= tolerance * (1 + solved.abs().amax(-1)))
    failures = [
        failure(kept[i], f"x is off by {away[i]:.2e}", "solution")
        for i in torch.nonzero(off)[:, 0].tolist()
    ]
    if all(q.params[k].batched for k in directions):
        for i in torch.nonzero(~((found - expected).abs() <= allowed))[:, 0].tolist():
            text = f"{float(found[i]):.6g}, differences {float(expected[i]):.6g}"
            failures.append(failure(kept[i], text))
    else:
        # a shared parameter has one gradient for all problems: only the sum can be compared
        sums = float(found.sum()), float(expected.sum())
        if not abs(sums[0] - sums[1]) <= float(allowed.sum()):
            text = f"sum {sums[0]:.6g}, differences {sums[1]:.6g}; by parameter {shares}"
            failures.append(failure(None, text))
    return Verdict(len(kept), skipped, failures)


def _direction(rng: np.random.Generator, name: str, p: Param, q: Problem) -> Array:
    """A direction in which the parameter may move."""
    d: Array = rng.standard_normal(p.value.shape) * (np.isfinite(p.value))
    if name == "P":
        return 0.1 * (d + np.swapaxes(d, -1, -2))
    if name == "A" and getattr(q.objective, "layout", "") in ("coo", "csr"):
        return np.where(p.value != 0, d, 0.0)
    if name in ("lower", "upper") and np.abs(p.value).max() > 1e6:
        return 0 * d
    return d


def _directional(
    q: Problem, tensors: dict[str, Tensor], directions: dict[str, Array]
) -> tuple[Tensor, dict[str, float]]:
    """Σ ⟨gradient, direction⟩ per problem (shared parameters in row 0), and by parameter."""
    total = torch.zeros(q.rows or 1, dtype=torch.float64)
    shares = {}
    scaled, plain = q.scaled, q.params
    for name, direction in directions.items():
        grad = tensors[name].grad
        if grad is None:
            continue
        unit = _unit(scaled[name], plain[name])
        product = grad.to_dense().double() * torch.tensor(direction) * unit
        if plain[name].batched:
            part = product.reshape(len(total), -1).sum(-1)
        else:
            part = torch.zeros_like(total)
            part[0] = product.sum()
        shares[name] = float(part.sum())
        total += part
    return total, shares


def _unit(scaled: Param, plain: Param) -> float:
    """The power of two between a parameter in the problem's units and in units of one."""
    at = np.isfinite(plain.value) & (plain.value != 0)
    return float(scaled.value[at][0] / plain.value[at][0]) if at.any() else 1.0


def gradient_reproducer(failure: Failure) -> str:
    """A script that shows the failure."""
    alone = ""
    if failure.row is not None:
        problem: Any = draw_gradient(failure.seed, failure.index).problem
        alone = problem.only(failure.row).source()
    judged = "judge_gradient(case).failures"
    return script_of(failure, "draw_gradient", "judge_gradient", judged, alone)
