"""The theorems as tests: bounds along the whole trajectory x_1, x_2, … of a solve.

All bounds start at k = 1: nothing is promised about the start itself.
"""

import itertools
import math

import pytest
import torch

import dfwlayer as dfw
from helpers import F64, PS, close, make_case

STEPS = 120
HARD = {"pairwise": dfw.FrankWolfe(), "plain": dfw.FrankWolfe(pairwise=False)}


def trajectory(case, steps, step_size=None, **settings):
    """f(x_k) − f* for k = 1 … steps, (steps, B)."""
    points = []
    settings |= {"step_size": step_size or dfw.ShortStep(), "callback": points.append}
    last = dfw.solve(*case.problem(), tol=0.0, max_steps=steps, **settings).x
    seen = [at.x.detach() for at in points[1:steps]]
    seen += [last] * (steps - len(seen))  # all have ended
    return torch.stack([case.error(x) for x in seen])


@pytest.mark.parametrize("method", ["dfw", *HARD.values()], ids=str)
def test_recorded_points_are_the_points(method):
    """x_k of the record is what max_steps=k returns."""
    case = make_case("quadratic", 1.0, "signed", rows=4, seed=10)
    errors = trajectory(case, 20, method=method)
    for k in (1, 2, 7, 19, 20):
        x = dfw.solve(*case.problem(), tol=0.0, max_steps=k, method=method).x
        close(case.error(x), errors[k - 1], rtol=1e-6, atol=1e-12)


def bounds(case, numerator, denominator):
    """numerator · LM² / denominator(k) for k = 1 … STEPS, (STEPS, B)."""
    k = torch.arange(1, STEPS + 1, dtype=F64)[:, None]
    return numerator * case.smooth * case.diameter() ** 2 / denominator(k)


# at pull 1 the start is better than the bound for long; at 100 f(x₀) − f* is far above LM², so
# that the bound at k = 1 asks for a full step
PULLS = (1.0, 100.0)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("objective", ["quadratic", "least squares"])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", HARD)
def test_hard_vertices(method, p, objective, pull):
    """f(x_k) − f* ≤ 2LM²/(k + 3) with the short step."""
    case = make_case(objective, p, "signed", rows=16, seed=11, pull=pull)
    errors = trajectory(case, STEPS, method=HARD[method])
    bound = bounds(case, 2, lambda k: k + 3)
    assert (errors <= bound).all(), (errors / bound).max()


def delta(tau: float, n: int, p: float) -> float:
    """How far the soft vertex may fall short of the hard one, ⟨g, ŝ⟩ − ⟨g, s⟩ ≤ δ(τ).

    With a = |g_tw| and σ = softmax(a/τ), ⟨g, s⟩ = −max a and ⟨g, ŝ⟩ = −⟨a, σ⟩. Softmax maximises
    ⟨a, σ⟩ + τ·entropy(σ) over the simplex, so max a ≤ ⟨a, σ⟩ + τ·entropy(σ) ≤ ⟨a, σ⟩ + τ log n.
    For p > 1 the vertex is exact.
    """
    return tau * math.log(n) if p == 1 else 0.0


SCHEDULES = [dfw.Anneal(), dfw.Constant(0.5), dfw.Constant(0.05), dfw.Anneal(0.5, 0.5, 5)]


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("p", PS)
def test_soft_vertices(p, schedule, pull):
    """Theorem 1: f(x̂_k) − f* ≤ δ(τ_k) + 5LM²/(2k + 4)."""
    case = make_case("quadratic", p, "signed", rows=16, seed=12, pull=pull)
    errors = trajectory(case, STEPS, method="dfw", temperature=schedule)
    short = [delta(schedule(k), 6, p) for k in range(1, STEPS + 1)]
    bound = torch.tensor(short, dtype=F64)[:, None] + bounds(case, 5, lambda k: 2 * k + 4)
    assert (errors <= bound).all(), (errors / bound).max()


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", ["dfw", *HARD.values()], ids=str)
def test_every_step_makes_the_progress_of_the_proof(method, p, pull):
    """f(x_{k+1}) − f* ≤ min over γ of (1 − γ)h_k + γδ + ½γ²LM², step for step.

    The lemma behind both bounds; it leaves a slow method no slack to hide in.
    """
    tau = 0.1
    case = make_case("quadratic", p, "signed", rows=16, seed=13, pull=pull)
    errors = trajectory(case, STEPS, method=method, temperature=tau)
    short = delta(tau, 6, p) if method == "dfw" else 0.0
    bend = case.smooth * case.diameter() ** 2
    for before, after in itertools.pairwise(errors):
        gamma = ((before - short) / bend).clamp(0, 1)
        allowed = (1 - gamma) * before + gamma * short + 0.5 * gamma**2 * bend
        assert (after <= allowed + 1e-12 * case.value.abs()).all()


@pytest.mark.parametrize("offset", [2, 3])
def test_open_loop(offset):
    """γ_k = 2/(k + 2) gives f(x_k) − f* ≤ 2LM²/(k + 2) (Jaggi, 2013); 2/(k + 3) a bit more."""
    case = make_case("quadratic", 1.0, "signed", rows=16, seed=14)
    errors = trajectory(
        case, STEPS, method=dfw.FrankWolfe(pairwise=False), step_size=dfw.OpenLoop(offset)
    )
    k = torch.arange(1, STEPS + 1, dtype=F64)[:, None]
    bound = bounds(case, 2, lambda k: k + 2)
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
        errors = trajectory(case, STEPS, method=method)
        assert (errors.diff(dim=0) <= 1e-13).all()
