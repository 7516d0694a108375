"""The theorems as tests: bounds along the whole trajectory, never after the fact.

x_k is what a solve with max_steps=k and tol=0 returns. All bounds start at k = 1: nothing is
promised about the start itself.
"""

import math

import pytest
import torch
from helpers import PS, F64, make_case

import dfwlayer as dfw

STEPS = 45
HARD = {"pairwise": dfw.FrankWolfe(), "plain": dfw.FrankWolfe(pairwise=False)}


def trajectory(case, steps, **settings):
    """f(x_k) − f* for k = 1 … steps, (steps, B)."""
    errors = [
        case.error(dfw.solve(*case.problem(), tol=0.0, max_steps=k, **settings).x)
        for k in range(1, steps + 1)
    ]
    return torch.stack(errors)


@pytest.mark.parametrize("objective", ["quadratic", "least squares"])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", HARD)
def test_hard_vertices(method, p, objective):
    """f(x_k) − f* ≤ 2LM²/(k + 3) with the short step."""
    case = make_case(objective, p, "signed", rows=16, seed=11)
    errors = trajectory(case, STEPS, method=HARD[method], step_size=dfw.ShortStep())
    k = torch.arange(1, STEPS + 1, dtype=F64)[:, None]
    bound = 2 * case.smooth * case.diameter() ** 2 / (k + 3)
    assert (errors <= bound).all(), (errors / bound).max()


def delta(tau: float, n: int, p: float) -> float:
    """How far the soft vertex may fall short of the hard one, ⟨g, ŝ⟩ − ⟨g, s⟩ ≤ δ(τ).

    With a = |g_tw| and σ = softmax(a/τ), ⟨g, s⟩ = −max a and ⟨g, ŝ⟩ = −⟨a, σ⟩. Softmax maximises
    ⟨a, σ⟩ + τ·entropy(σ) over the simplex, so max a ≤ ⟨a, σ⟩ + τ·entropy(σ) ≤ ⟨a, σ⟩ + τ log n.
    For p > 1 the vertex is exact.
    """
    return tau * math.log(n) if p == 1 else 0.0


@pytest.mark.parametrize("schedule", [None, 0.5, 0.05, dfw.Anneal(0.5, 0.5, 5)], ids=str)
@pytest.mark.parametrize("p", PS)
def test_soft_vertices(p, schedule):
    """Theorem 1: f(x̂_k) − f* ≤ δ(τ_k) + 5LM²/(2k + 4)."""
    n = 6
    case = make_case("quadratic", p, "signed", rows=16, n=n, seed=12)
    errors = trajectory(case, STEPS, method="dfw", temperature=schedule)
    tau = schedule if callable(schedule) else dfw.Anneal() if schedule is None else lambda k: schedule
    short = torch.tensor([delta(tau(k), n, p) for k in range(1, STEPS + 1)], dtype=F64)[:, None]
    k = torch.arange(1, STEPS + 1, dtype=F64)[:, None]
    bound = short + 5 * case.smooth * case.diameter() ** 2 / (2 * k + 4)
    assert (errors <= bound).all(), (errors / bound).max()


@pytest.mark.parametrize("tau", [0.3, 0.03])
def test_soft_vertices_recursion(tau):
    """h_{k+1} ≤ min over γ of (1 − γ)h_k + γδ + ½γ²LM², step for step; no slack to hide in."""
    case = make_case("quadratic", 1.0, "signed", rows=16, seed=13)
    errors = trajectory(case, STEPS, method="dfw", temperature=tau)
    short = delta(tau, 6, 1.0)
    bend = case.smooth * case.diameter() ** 2
    for before, after in zip(errors[:-1], errors[1:], strict=True):
        gamma = ((before - short) / bend).clamp(0, 1)
        allowed = (1 - gamma) * before + gamma * short + 0.5 * gamma**2 * bend
        assert (after <= allowed + 1e-12).all()


@pytest.mark.parametrize("offset", [2, 3])
def test_open_loop(offset):
    """γ_k = 2/(k + 2) gives 2LM²/(k + 2) for x_k (Jaggi, 2013); 2/(k + 3) no more than twice that."""
    case = make_case("quadratic", 1.0, "signed", rows=16, seed=14)
    errors = trajectory(
        case, STEPS, method=dfw.FrankWolfe(pairwise=False), step_size=dfw.OpenLoop(offset)
    )
    k = torch.arange(1, STEPS + 1, dtype=F64)[:, None]
    bound = 2 * case.smooth * case.diameter() ** 2 / (k + 2)
    first = errors[0] if offset == 3 else torch.zeros_like(errors[0])
    assert (errors <= bound + 6 * first / ((k + 1) * (k + 2))).all()


@pytest.mark.parametrize("n", [10, 30])
def test_pairwise_converges_linearly(n):
    """Each three digits cost about the same number of steps, where plain Frank-Wolfe is stuck."""
    case = make_case("shared quadratic", 1.0, "active", rows=4, n=n, seed=15)
    tols = (1e-3, 1e-6, 1e-9, 1e-12)
    steps = []
    for tol in tols:
        sol = dfw.solve(*case.problem(), method="frank-wolfe", tol=tol, max_steps=3000)
        assert sol.converged.all(), sol
        assert (sol.gap <= tol * sol.value.abs()).all()
        steps.append(sol.num_steps.double())
    increments = torch.stack(steps).diff(dim=0)
    assert (increments[1:] <= 3 * increments[0] + 20).all(), steps
    plain = dfw.solve(
        *case.problem(),
        method=dfw.FrankWolfe(pairwise=False),
        tol=1e-12,
        max_steps=int(steps[-1].max()),
    )
    assert not plain.converged.any()


@pytest.mark.parametrize("p", [1.0, 3.0])
def test_short_steps_descend(p):
    """With a true L every step of every method lowers f."""
    case = make_case("quadratic", p, "signed", rows=16, seed=16)
    for method in ("dfw", *HARD.values()):
        errors = trajectory(case, 25, method=method)
        assert (errors.diff(dim=0) <= 1e-13).all()
