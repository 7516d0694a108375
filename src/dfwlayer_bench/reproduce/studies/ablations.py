"""What each part of the method contributes: one study a part."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer import (
    Anneal,
    Backtracking,
    DFWLayer,
    ExactStep,
    FrankWolfe,
    LpBall,
    OpenLoop,
    Quadratic,
    ShortStep,
    Solution,
    solve,
)
from dfwlayer.step_size import StepSize
from dfwlayer_bench.bench.measure import cosine, held_bytes, relative, typical_seconds
from dfwlayer_bench.problems.families import FAMILIES, Instance
from dfwlayer_bench.reproduce.studies.base import Case, Study, Values, Variant
from dfwlayer_bench.reproduce.studies.trajectory import PAPER_TOL, follow, marks
from dfwlayer_bench.systems.base import Answer

__all__ = ["METHODS", "ablation_studies"]

METHODS = {"dfw": "published", "auto": "default"}
NORMS = (1.0, 1.5, 2.0, 3.0, math.inf)
RULES: dict[str, StepSize] = {
    "short step": ShortStep(),
    "exact step": ExactStep(),
    "open loop": OpenLoop(),
    "backtracking": Backtracking(),
}
ANNEALING = {
    **{f"T = {period}": Anneal(period=period) for period in (5, 10, 30, 100)},
    **{f"start {start:g}": Anneal(start=start) for start in (0.25, 4.0)},
}
BATCH_STEPS = {"dfw": 200, "auto": 1000}  # unrolling keeps every step of every problem


def ablation_studies(steps: int, batches: tuple[int, ...]) -> list[Study]:
    """All of them, over so many steps and these batch sizes."""
    lengths = sorted({max(1, steps // part) for part in (30, 10, 3, 1)})
    modes = [(k, mode) for k in lengths for mode in ("unroll", "implicit")]
    return [
        Study("p", tuple(_norm_variant(p, m) for p in NORMS for m in METHODS)),
        Study("step-size", tuple(_rule_variant(name, steps) for name in RULES)),
        Study("annealing", tuple(_annealing_variant(name, steps) for name in ANNEALING)),
        Study("batch", tuple(_batch_variant(size, m) for m in METHODS for size in batches)),
        Study("gradient", (*(_mode_variant(k, mode) for k, mode in modes), _default_variant())),
        Study("theorem", (_bound_variant("soft", steps), _bound_variant("hard", steps))),
    ]


# the norm ------------------------------------------------------------------------------------


class Target(NamedTuple):
    """The exact answer for one p."""

    radius: Tensor  # ()
    x: Tensor  # (n,)
    gradient: Tensor  # (n,)
    gap: float  # relative, certified
    slope_error: float  # of the gradient along one direction, against a central difference


def _norm_variant(p: float, method: str) -> Variant:
    settings = {"p": f"{p:g}", "method": method, "tol": _tolerance(method)}
    label = f"p = {p:g}, {METHODS[method]}".replace("inf", "∞")
    return Variant(f"{p:g}-{method}", label, settings, partial(_with_norm, p, method))


def _tolerance(method: str) -> float:
    return PAPER_TOL if method == "dfw" else 1e-5


def _with_norm(p: float, method: str, case: Case) -> Values:
    problem, target = case.problem, _target(case, p)
    layer = DFWLayer(p=p, method=method, tol=_tolerance(method))
    radius = target.radius.to(problem.q)
    solution, answer, seconds = _solved(layer, problem, radius)
    x, gradient = _exactly(answer)
    size = float(torch.linalg.vector_norm(case.exact.w * x, p))
    return {
        "seconds": seconds,
        "steps": int(solution.num_steps),
        "error": relative(x, target.x),
        "cosine": cosine(gradient, target.gradient),
        "gradient_error": relative(gradient, target.gradient),
        "gap": float(solution.gap / solution.value.detach().abs()),
        "violation": max(0.0, size - float(target.radius)) / float(target.radius),
        "active": float(_norm(case, target.x, p) > (1 - 1e-9) * float(target.radius)),
        "reference_gap": target.gap,
        "reference_slope_error": target.slope_error,
    }


def _solved(layer: DFWLayer, problem: Instance, radius: Tensor) -> tuple[Solution, Answer, float]:
    last: list[Solution] = []

    def call() -> Answer:
        q = problem.q.detach().requires_grad_()
        solution = layer.solve(problem.P, q, problem.w, radius)
        (gradient,) = torch.autograd.grad(problem.v @ solution.x, q)
        last[:] = [solution]
        return Answer(solution.x.detach(), gradient)

    answer, seconds = typical_seconds(call, problem.device)
    return last[0], answer, seconds


def _exactly(answer: Answer) -> tuple[Tensor, Tensor]:
    return answer.x.to("cpu", torch.float64), answer.gradient.to("cpu", torch.float64)


def _norm(case: Case, x: Tensor, p: float) -> float:
    return float(torch.linalg.vector_norm(case.exact.w * x, p))


@lru_cache(maxsize=4)
def _target(case: Case, p: float) -> Target:
    """For p = 1 the benchmark's reference; otherwise the default method in float64, certified.

    Where a family takes the radius from the unconstrained solution, it is taken in the p-norm.
    """
    exact = case.exact
    fraction = FAMILIES[case.family].radius
    free = torch.linalg.solve(exact.P, -exact.q)
    radius = exact.t if fraction is None else exact.t.new_tensor(fraction * _norm(case, free, p))
    if p == 1:
        found = case.reference
        return Target(exact.t, found.x, found.gradient, found.residual, 0.0)

    def solution(q: Tensor) -> Solution:
        ball = LpBall(p, radius, exact.w)
        return solve(Quadratic(exact.P, q), ball, tol=1e-13, max_steps=100_000)

    q = exact.q.clone().requires_grad_()
    best = solution(q)
    (gradient,) = torch.autograd.grad(exact.v @ best.x, q)
    direction = torch.cos(torch.arange(case.n, dtype=torch.float64))
    step = 1e-5 * float(exact.q.norm() / direction.norm())
    with torch.no_grad():
        ahead, behind = solution(q + step * direction), solution(q - step * direction)
    slope = float(exact.v @ (ahead.x - behind.x)) / (2 * step)
    expected = float(gradient @ direction)
    size = float(gradient.norm() * direction.norm())
    return Target(
        radius,
        best.x.detach(),
        gradient,
        float(best.gap / best.value.detach().abs()),
        abs(slope - expected) / size,
    )


# step size and annealing ---------------------------------------------------------------------


def _rule_variant(name: str, steps: int) -> Variant:
    settings = {"step_size": str(RULES[name]), "steps": steps}
    return Variant(name.replace(" ", "-"), name, settings, partial(_with_rule, RULES[name], steps))


def _with_rule(rule: StepSize, steps: int, case: Case) -> Values:
    problem = case.problem
    trajectory = follow(problem, steps, step_size=rule)
    best = _value(case, case.reference.x)
    at = marks(steps)
    layer = DFWLayer(method="dfw", tol=PAPER_TOL, step_size=rule)
    solution, answer, seconds = _solved(layer, problem, problem.t)
    x, gradient = _exactly(answer)
    last = trajectory.at(len(trajectory.points) - 1, case.reference)
    return {
        "step": at,
        "suboptimality": [float(trajectory.values[k] - best) / abs(best) for k in at],
        "seconds": seconds,
        "steps": int(solution.num_steps),
        "error": relative(x, case.reference.x),
        "cosine": cosine(gradient, case.reference.gradient),
        "last_error": last["error"],
        "last_cosine": last["cosine"],
    }


def _value(case: Case, x: Tensor) -> float:
    return float(x @ (0.5 * case.exact.P @ x + case.exact.q))


def _annealing_variant(name: str, steps: int) -> Variant:
    schedule = ANNEALING[name]
    settings = {"temperature": str(schedule), "steps": steps}
    slug = name.replace(" = ", "").replace(" ", "-")
    return Variant(slug, name, settings, partial(_with_annealing, schedule, steps))


def _with_annealing(schedule: Anneal, steps: int, case: Case) -> Values:
    trajectory = follow(case.problem, steps, temperature=schedule)
    stop, last = trajectory.stop, len(trajectory.points) - 1
    first, final = (trajectory.at(k, case.reference) for k in (stop, last))
    return {
        "steps": stop,
        "error": first["error"],
        "cosine": first["cosine"],
        "last_error": final["error"],
        "last_cosine": final["cosine"],
    }


# batches -------------------------------------------------------------------------------------


def _batch_variant(size: int, method: str) -> Variant:
    settings = {"batch": size, "method": method, "max_steps": BATCH_STEPS[method]}
    label = f"{METHODS[method]}, batch of {size}"
    return Variant(f"{size}-{method}", label, settings, partial(_with_batch, size, method))


def _with_batch(size: int, method: str, case: Case) -> Values:
    """P and w shared, q and t their own; each q as the family draws it."""
    problem = case.problem
    recipe = FAMILIES[case.family]
    random = np.random.RandomState(case.seed + 1)
    draws = torch.from_numpy(random.standard_normal((size, case.n)))
    t = torch.from_numpy(np.abs(random.standard_normal(size)))
    q = case.n**recipe.power * draws
    if recipe.radius is not None:
        free = torch.linalg.solve(case.exact.P, -q.mT).mT
        t = recipe.radius * (case.exact.w * free).abs().sum(-1)
    layer = DFWLayer(method=method, tol=_tolerance(method), max_steps=BATCH_STEPS[method])
    linear, radius = q.to(problem.q).requires_grad_(), t.to(problem.q)
    last: list[Solution] = []

    def call() -> Answer:
        solution = layer.solve(problem.P, linear, problem.w, radius)
        (gradient,) = torch.autograd.grad((solution.x * problem.v).sum(), linear)
        last[:] = [solution]
        return Answer(solution.x.detach(), gradient)

    answer, seconds = typical_seconds(call, problem.device)
    norms = (answer.x.double() * problem.w.double()).abs().sum(-1).cpu()
    excess = (norms - radius.double().cpu()) / radius.double().cpu()
    return {
        "seconds": seconds,
        "seconds_each": seconds / size,
        "steps": float(last[0].num_steps.double().mean()),
        "gap": float((last[0].gap / last[0].value.detach().abs()).median()),
        "violation": max(0.0, float(excess.max())),
    }


# unrolled against implicit -------------------------------------------------------------------


def _mode_variant(steps: int, mode: str) -> Variant:
    layer = DFWLayer(
        method="dfw", differentiate=mode, tol=0.0, max_steps=steps, on_failure="ignore"
    )
    settings = {"steps": steps, "mode": mode}
    label = f"{'unrolled' if mode == 'unroll' else 'implicit'}, {steps} steps"
    return Variant(f"{mode}-{steps}", label, settings, partial(_with_layer, layer))


def _default_variant() -> Variant:
    settings = {"mode": "implicit", "method": "auto"}
    return Variant(
        "default", "default method, implicit", settings, partial(_with_layer, DFWLayer())
    )


def _with_layer(layer: DFWLayer, case: Case) -> Values:
    problem = case.problem
    solution, answer, seconds = _solved(layer, problem, problem.t)
    x, gradient = _exactly(answer)
    q = problem.q.detach().requires_grad_()
    _, held = held_bytes(
        lambda: layer(problem.P, q, problem.w, problem.t),
        own=(problem.P, q, problem.w, problem.t),
    )
    return {
        "seconds": seconds,
        "steps": int(solution.num_steps),
        "memory_mb": held / 2**20,
        "error": relative(x, case.reference.x),
        "cosine": cosine(gradient, case.reference.gradient),
        "gradient_error": relative(gradient, case.reference.gradient),
    }


# Theorem 1 -----------------------------------------------------------------------------------


def _bound_variant(vertices: str, steps: int) -> Variant:
    settings = {"vertices": vertices, "steps": steps}
    run = partial(_against_bound, vertices, steps)
    return Variant(vertices, f"{vertices} vertices", settings, run)


def _bound(vertices: str, k: Tensor, reach: float, n: int) -> Tensor:
    """The most that f(x_k) − f* may be, with LM² = ``reach``.

    Hard vertices: 2LM²/(k + 3). Soft ones: δ(τ_k) + 5LM²/(2k + 4), where δ(τ) = τ log n is the
    most by which a mean with softmax weights is short of the maximum.
    """
    if vertices == "hard":
        return 2 * reach / (k + 3)
    tau = torch.tensor([Anneal()(int(step)) for step in k], dtype=torch.float64)
    return tau * math.log(n) + 5 * reach / (2 * k + 4)


def _against_bound(vertices: str, steps: int, case: Case) -> Values:
    """In float64 with the exact L, so that rounding has no say."""
    lipschitz = float(torch.linalg.eigvalsh(case.exact.P)[-1]) * (1 + 1e-12)
    diameter = float(LpBall(1.0, case.exact.t, case.exact.w).diameter(case.n))
    method = "dfw" if vertices == "soft" else FrankWolfe(pairwise=False)
    with torch.no_grad():
        trajectory = follow(case.exact, steps, method=method, step_size=ShortStep(lipschitz))
    k = torch.arange(1, len(trajectory.points), dtype=torch.float64)
    gap = trajectory.values[1:] - _value(case, case.reference.x)
    most = _bound(vertices, k, lipschitz * diameter**2, case.n)
    at = [step - 1 for step in marks(len(k))]
    return {
        "step": [step + 1 for step in at],
        "gap": gap[at].tolist(),
        "bound": most[at].tolist(),
        "broken": int((gap > most).sum()),
        "checked": len(k),
        "closest": float((gap / most).max()),
    }
