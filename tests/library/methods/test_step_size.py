"""Every step rule against what defines it, and the temperature schedules."""

import pytest
import torch
from scipy.optimize import minimize_scalar

import dfwlayer as dfw
from dfwlayer.step_size import Query
from helpers import F64, PS, close, logistic, make_case

RULES = {
    "short": dfw.ShortStep(),
    "exact": dfw.ExactStep(),
    "open loop 2": dfw.OpenLoop(2),
    "open loop 3": dfw.OpenLoop(3),
    "backtracking": dfw.Backtracking(),
}


def query_at(objective, x, s, step=0, limit=1.0):
    value, gradient = objective.value_and_gradient(x)
    return Query(step, x, value, gradient, s - x, limit, None)


def segments(rows=12, n=5):
    case = make_case("quadratic", "p=1", rows=rows, n=n, seed=21)
    objective = case.problem()[0].bind(rows)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(rows, n, generator=gen, dtype=F64)
    s = x - objective.gradient(x) * torch.logspace(-2, 2, rows, dtype=F64)[:, None]
    return case, objective, x, s


def test_exact_step_is_brute_force_line_search():
    case, objective, x, s = segments()
    gamma = dfw.ExactStep().start(objective, x)(query_at(objective, x, s))
    for i in range(len(x)):

        def f(t, i=i):
            rows = x.clone()
            rows[i] += t * (s[i] - x[i])
            return float(case.f(rows, case.params)[i])

        best = minimize_scalar(f, bounds=(0, 1), method="bounded", options={"xatol": 1e-12})
        want = best.x if best.fun < min(f(0.0), f(1.0)) else float(f(1.0) < f(0.0))
        assert float(gamma[i]) == pytest.approx(want, abs=2e-6)
    assert ((gamma > 0) & (gamma < 1)).any()
    assert (gamma == 1).any()


def test_short_step_formula():
    _, objective, x, s = segments()
    g, d = objective.gradient(x), x - s
    want = ((g * d).sum(-1) / (3.0 * (d * d).sum(-1))).clamp(0, 1)
    rule = dfw.ShortStep(lipschitz=3.0).start(objective, x)
    close(rule(query_at(objective, x, s)), want, rtol=1e-12)
    uphill = rule(query_at(objective, x, 2 * x - s))
    assert (uphill == 0).all()  # the lower clip
    limit = torch.full((len(x),), 0.01, dtype=F64)
    assert (rule(query_at(objective, x, s, limit=limit)) <= 0.01).all()
    assert (rule(query_at(objective, x, x)) <= 1).all()  # no direction at all: any γ, no NaN


def test_short_step_takes_one_constant_per_problem():
    _, objective, x, s = segments()
    own = torch.linspace(1, 100, len(x), dtype=F64)
    got = dfw.ShortStep(own).start(objective, x)(query_at(objective, x, s))
    for i, L in enumerate(own.tolist()):
        single = dfw.ShortStep(L).start(objective, x)(query_at(objective, x, s))
        assert got[i] == single[i]


@pytest.mark.parametrize("offset", [2, 3, 4.5])
def test_open_loop_formula(offset):
    _, objective, x, s = segments()
    rule = dfw.OpenLoop(offset).start(objective, x)
    for k in (0, 1, 7, 100):
        assert torch.equal(
            rule(query_at(objective, x, s, step=k)),
            torch.full((len(x),), 2 / (k + offset), dtype=F64),
        )


@pytest.mark.parametrize("offset", [2, 3])
def test_open_loop_trajectory(offset):
    """Two steps by hand: x₁ = (1 − 2/o) x₀ + 2/o s₀ and so on, p = ∞ so that vertices are easy."""
    case = make_case("quadratic", "p=inf", "signed", seed=22)
    P, q, w, t = (case.params[k] for k in ("P", "q", "weight", "radius"))
    x = torch.zeros_like(q)
    for k in range(3):
        got = dfw.solve(
            *case.problem(),
            method=dfw.FrankWolfe(),
            tol=0.0,
            max_steps=k,
            step_size=dfw.OpenLoop(offset),
        ).x
        close(got, x, rtol=1e-12, atol=1e-14)
        s = -t[:, None] / w.abs() * torch.sign((P @ x[..., None])[..., 0] + q)
        gamma = 2 / (k + offset)
        x = (1 - gamma) * x + gamma * s


@pytest.mark.parametrize("objective", ["quadratic", "logistic", "log-sum-exp", "huber"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_backtracking_descends(p, objective):
    case = make_case(objective, p, "signed", rows=6, seed=23)
    for method in ("dfw", "frank-wolfe"):
        values = [
            dfw.solve(
                *case.problem(),
                method=method,
                tol=0.0,
                max_steps=k,
                step_size=dfw.Backtracking(),
            ).value
            for k in range(12)
        ]
        values = torch.stack(values)
        assert (values.diff(dim=0) <= 1e-12 * values.abs().max()).all()
        assert (values[-1] < values[0]).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_backtracking_finds_any_size_of_curvature(scale):
    case = make_case("logistic", "p=1", "signed", seed=24)

    def scaled(x, F, c):
        return scale * logistic(x, F, c)

    objective = dfw.Smooth(scaled, case.params["F"], case.params["c"], shape=(6,))
    sol = dfw.solve(objective, case.problem()[1], method="frank-wolfe", tol=1e-8)
    assert sol.converged.all(), sol
    assert (case.error(sol.x) <= 1e-7 * case.value.abs()).all()


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_in_every_method(rule, p):
    """The gap falls and the certificate holds with each of them."""
    case = make_case("quadratic", p, "signed", seed=25)
    start = dfw.solve(*case.problem(), method="frank-wolfe", max_steps=0)
    for method in ("dfw", "frank-wolfe", dfw.FrankWolfe(pairwise=False)):
        sol = dfw.solve(
            *case.problem(),
            method=method,
            step_size=RULES[rule],
            temperature=1e-3,
            max_steps=60,
            tol=0.0,
        )
        assert (case.error(sol.x) <= sol.gap + 1e-12).all()
        assert (sol.gap < 0.5 * start.gap).all()


def test_backtracking_and_exact_reach_the_solution():
    case = make_case("quadratic", "p=1", "signed", seed=26)
    for rule in (dfw.Backtracking(), dfw.ExactStep(), dfw.ShortStep()):
        sol = dfw.solve(*case.problem(), method="frank-wolfe", step_size=rule, tol=1e-8)
        assert sol.converged.all()
        close(sol.x, case.x_star, rtol=0, atol=1e-4)


def test_rules_that_need_more_than_smooth_gives():
    case = make_case("logistic", "p=1")
    for rule in (dfw.ExactStep(), dfw.ShortStep()):
        with pytest.raises(ValueError, match=r"step_size.*Backtracking"):
            dfw.solve(*case.problem(), method="frank-wolfe", step_size=rule)
    known = dfw.Smooth(
        logistic, case.params["F"], case.params["c"], shape=(6,), lipschitz=case.smooth
    )
    sol = dfw.solve(known, case.problem()[1], method="frank-wolfe", step_size=dfw.ShortStep())
    assert sol.converged.all()


def test_anneal_is_the_papers_schedule():
    tau = dfw.Anneal()
    assert [tau(k) for k in (0, 29, 30, 59, 60, 300)] == [1, 1, 0.5, 0.5, 0.25, 2**-10]
    other = dfw.Anneal(start=3.0, factor=0.1, period=2)
    assert [other(k) for k in range(5)] == pytest.approx([3, 3, 0.3, 0.3, 0.03])
    assert dfw.Constant(0.2)(99) == 0.2


def test_temperatures_reach_the_method():
    """A number, a schedule and a function that say the same give the same x; others do not."""
    case = make_case("quadratic", "p=1", seed=27)
    seen = []

    def schedule(k):
        seen.append(k)
        return 0.25

    def x(temperature):
        return dfw.solve(
            *case.problem(), method="dfw", temperature=temperature, tol=0.0, max_steps=20
        ).x

    assert torch.equal(x(0.25), x(schedule))
    assert torch.equal(x(0.25), x(dfw.Constant(0.25)))
    assert seen == list(range(20))
    assert not torch.allclose(x(0.25), x(0.5))
    assert torch.equal(x(None), x(dfw.Anneal()))


def test_dfw_to_the_letter():
    """The published iteration, transcribed in a few lines, gives the same iterates and steps."""
    case = make_case("quadratic", "p=1", "active", rows=None, n=8, seed=28)
    P, q, w, t = (case.params[k] for k in ("P", "q", "weight", "radius"))
    L = torch.linalg.eigvalsh(P)[-1]
    tol, x, f = 1e-6, torch.zeros_like(q), torch.zeros((), dtype=F64)
    for k in range(200):
        g = P @ x + q
        g_tw = t / w * g
        s = -(t / w) * torch.sign(g_tw) * torch.softmax(g_tw.abs() / 2.0 ** -(k // 30), -1)
        gamma = ((g @ (x - s)) / (L * ((x - s) @ (x - s)))).clamp(0, 1)
        x = (1 - gamma) * x + gamma * s
        before, f = f, 0.5 * x @ P @ x + q @ x
        if abs(f - before) <= tol * abs(before):
            break
    sol = dfw.solve(*case.problem(), method="dfw", tol=tol)
    assert sol.num_steps == k + 1
    assert sol.status == dfw.Status.CONVERGED
    close(sol.x, x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("unit", [2.0**-80, 2.0**80])
@pytest.mark.parametrize("method", ["frank-wolfe", "dfw"])
def test_backtracking_in_any_units_of_the_variable(method, unit):
    """Powers of two change no digit: the same steps, also where f is flat or bent at the start."""
    gen = torch.Generator().manual_seed(27)
    F, d = (torch.randn(*size, generator=gen, dtype=F64) for size in ((20, 5, 4), (20, 5)))

    def quartic(x, F, d, u):
        return 0.25 * ((F @ (x / u).unsqueeze(-1)).squeeze(-1) - d).pow(4).sum(-1)

    def huber(x, F, d, u):
        r = (F @ (x / u).unsqueeze(-1)).squeeze(-1) - 4 * d
        return torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15)).sum(-1)

    def solved(fn, u):
        objective = dfw.Smooth(fn, F, d, u, shape=4)
        # the noise of a soft vertex has a size that the units of its cost change
        heat = 0.1 / u if method == "dfw" else None
        return dfw.solve(objective, dfw.LpBall(2, u), method=method, max_steps=60, temperature=heat)

    for fn in (quartic, huber):
        sol, plain = solved(fn, unit), solved(fn, 1.0)
        close(sol.x / unit, plain.x, rtol=0, atol=1e-9)
        assert torch.equal(sol.num_steps, plain.num_steps)


@pytest.mark.parametrize("method", ["frank-wolfe", "active-set"])
def test_a_rounding_floor_is_one(method):
    """Where f no longer shows a decrease, its slopes do: quartics, whose minima are flat."""
    gen = torch.Generator().manual_seed(26)
    rows, n = 300, 4
    F = torch.randn(rows, 5, n, generator=gen)
    d, c = torch.randn(rows, 5, generator=gen), torch.randn(rows, n, generator=gen)

    def quartic(x, F, d, c):
        r = (F @ x.unsqueeze(-1)).squeeze(-1) - d
        return 0.25 * r.pow(4).sum(-1) + (c * x).sum(-1)

    def solved(dtype, **options):
        objective = dfw.Smooth(quartic, *(v.to(dtype) for v in (F, d, c)), shape=n)
        return dfw.solve(objective, dfw.Box(-0.5, 0.5), **options)

    sol = solved(torch.float32, method=method, tol=0.0, max_steps=200)
    best = quartic(solved(F64, tol=1e-10).x, F.double(), d.double(), c.double())
    x, F, d, c = (v.double() for v in (sol.x, F, d, c))
    r, inner = (F @ x[..., None])[..., 0] - d, (F.abs() @ x.abs()[..., None])[..., 0] + d.abs()
    bend = r.abs() ** 3 + 3 * r**2 * inner
    size = (F.mT.abs() @ bend[..., None])[..., 0] + c.abs()
    floor = torch.finfo(torch.float32).eps * (size * (x.abs() + 0.5)).sum(-1)
    ended = sol.status == dfw.Status.ROUNDING_FLOOR
    assert ended.any()
    lost = quartic(x, F, d, c) - best
    assert (lost <= 4 * floor)[ended].all()
