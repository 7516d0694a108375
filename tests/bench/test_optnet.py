from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dfwlayer_bench.baselines.altdiff import AltDiff
from dfwlayer_bench.baselines.optnet import OptNet, OptNetQP
from dfwlayer_bench.baselines.optnet_programs import Ball, Dense
from dfwlayer_bench.problems.families import FAMILIES, make
from dfwlayer_bench.problems.reference import solve_reference
from helpers import DEVICES

SHAPES = ((4, 3, 0), (5, 12, 0), (6, 4, 2), (8, 20, 3))  # d, m, k


def program(d, m, k, seed=0, *, slack=1.0, push=3.0):
    """Q, c, G, h, A, b with a strictly feasible point; slack 0 puts it on every inequality."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    R, inside = normal(d, d), normal(d)
    Q = R.mT @ R / d + 0.1 * torch.eye(d, dtype=torch.float64)
    c, G, A = push * normal(d), normal(m, d), normal(k, d)
    h = G @ inside + slack * torch.rand(m, generator=generator, dtype=torch.float64)
    return Q, c, G, h, A, A @ inside


def clarabel(Q, c, G, h, A, b):
    """The solution by an interior-point method that shares nothing with ours."""
    cp = pytest.importorskip("cvxpy")
    z = cp.Variable(len(c))
    objective = 0.5 * cp.quad_form(z, cp.psd_wrap(Q.numpy())) + c.numpy() @ z
    constraints = [G.numpy() @ z <= h.numpy()]
    if len(b):
        constraints.append(A.numpy() @ z == b.numpy())
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
    cp.Problem(cp.Minimize(objective), constraints).solve(solver=cp.CLARABEL, **tight)
    return torch.from_numpy(np.asarray(z.value))


def relative(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def symmetric(layer):
    """The layer as a function of a factor of Q, so that finite differences keep Q symmetric."""
    return lambda M, *rest: layer(M @ M.mT, *rest)


def factor(P):
    return torch.linalg.cholesky(P)


def ball_rows(w):
    """G of ±x ≤ y, ⟨w, y⟩ ≤ t."""
    eye = torch.eye(len(w), dtype=w.dtype)
    bottom = torch.cat([torch.zeros_like(w), w]).unsqueeze(0)
    return torch.cat([torch.cat([eye, -eye], 1), torch.cat([-eye, -eye], 1), bottom])


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("kind", ["dense", "ball"])
def test_the_eliminations_solve_the_newton_system(kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "dense":
        Q, c, G, h, A, b = program(5, 7, 2)
        qp = Dense(Q, c.expand(2, -1), G, h.expand(2, -1), A, b.expand(2, -1))
    else:
        p = make("active", 4, 1)
        qp = Ball(p.P, p.q.expand(2, -1), p.w.expand(2, -1), p.t.expand(2, 1))
        Q = torch.block_diag(p.P, torch.zeros_like(p.P))
        G, A = ball_rows(p.w), Q[:0]
    d, m, k = len(Q), len(G), len(A)
    E = torch.logspace(-6, 6, m, dtype=torch.float64)[torch.randperm(m, generator=generator)]
    E = torch.stack([E, torch.ones_like(E)])
    rhs = torch.randn(2, d + m + k, generator=generator, dtype=torch.float64)
    found = torch.cat(qp.eliminate()(E)(*rhs.split([d, m, k], -1)), -1)
    for i in range(2):
        top = torch.cat([Q, G.mT, A.mT], 1)
        middle = torch.cat([G, -E[i].diag(), torch.zeros(m, k, dtype=torch.float64)], 1)
        bottom = torch.cat([A, torch.zeros(k, m + k, dtype=torch.float64)], 1)
        exact = torch.linalg.solve(torch.cat([top, middle, bottom]), rhs[i])
        assert relative(found[i], exact) < 1e-8
        assert torch.allclose(found[i], exact, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_the_solution_is_clarabels(shape, seed, dtype):
    problem = program(*shape, seed)
    layer = OptNetQP()
    z = layer(*(tensor.to(dtype) for tensor in problem))
    assert layer.converged
    assert layer.steps < 20
    assert relative(z, clarabel(*problem)) < (1e-8 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_in_every_parameter_agree_with_finite_differences(shape):
    Q, *rest = program(*shape, seed=5)
    inputs = leaves(factor(Q), *rest)
    assert torch.autograd.gradcheck(symmetric(OptNetQP()), inputs, eps=1e-6, atol=1e-5, rtol=1e-4)


def test_the_test_problems_have_active_and_inactive_rows():
    for shape in SHAPES:
        Q, c, G, h, A, b = program(*shape, seed=5)
        slack = h - G @ OptNetQP()(Q, c, G, h, A, b)
        assert bool((slack < 1e-7).any())
        assert bool((slack > 1e-2).any())


def test_without_equations_they_may_be_left_out():
    Q, c, G, h, A, b = program(5, 6, 0)
    assert torch.equal(OptNetQP()(Q, c, G, h), OptNetQP()(Q, c, G, h, A, b))


def test_inactive_constraints_leave_the_unconstrained_solution_and_its_gradient():
    Q, c, G, h, _, _ = program(6, 9, 0)
    Q, c, G, h = leaves(Q, c, G, h.abs() + 1e3)
    z = OptNetQP()(Q, c, G, h)
    assert relative(z.detach(), -torch.linalg.solve(Q, c).detach()) < 1e-10
    in_c, in_h, in_G = torch.autograd.grad(z.sum(), (c, h, G))
    assert torch.allclose(in_c, -torch.linalg.solve(Q, torch.ones_like(c)), atol=1e-10)
    assert float(in_h.abs().max()) < 1e-10
    assert float(in_G.abs().max()) < 1e-10


def test_the_gradient_in_q_is_symmetric_and_only_the_symmetric_part_of_q_counts():
    Q, *rest = program(6, 8, 1)
    skew = torch.triu(torch.ones_like(Q), 1)
    skew = skew - skew.mT
    (tilted,) = leaves(Q + skew)
    z = OptNetQP()(tilted, *rest)
    assert torch.allclose(z.detach(), OptNetQP()(Q, *rest))
    (gradient,) = torch.autograd.grad(z.sum(), tilted)
    assert torch.equal(gradient, gradient.mT)


def test_redundant_rows_change_nothing():
    Q, c, G, h, A, b = program(5, 6, 1, seed=5)
    layer = OptNetQP()
    once, twice = layer(Q, c, G, h, A, b), layer(Q, c, G.repeat(3, 1), h.repeat(3), A, b)
    assert torch.allclose(once, twice, atol=1e-9)
    assert layer.converged

    def in_c(G, h):
        (linear,) = leaves(c)
        return torch.autograd.grad(OptNetQP()(Q, linear, G, h, A, b).sum(), linear)[0]

    assert torch.allclose(in_c(G, h), in_c(G.repeat(3, 1), h.repeat(3)), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_feasible_set_without_interior_is_solved(dtype):
    Q, c, G, h, _, _ = program(5, 4, 0)
    flat, level = torch.cat([G, -G[:1]]), torch.cat([h, -h[:1]])  # the first row is an equation
    z = OptNetQP()(*(tensor.to(dtype) for tensor in (Q, c, flat, level)))
    assert relative(z, clarabel(Q, c, G[1:], h[1:], G[:1], h[:1])) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["apex", "nothing to do", "infeasible"])
def test_extremes_give_finite_answers(kind, dtype):
    Q, c, G, h, _, _ = (tensor.to(dtype) for tensor in program(5, 4, 0))
    if kind == "apex":
        c, h = -(G.mT @ torch.ones_like(h)), torch.zeros_like(h)  # z = 0, with λ = 1
    elif kind == "nothing to do":
        c, h = torch.zeros_like(c), h.abs() + 1
    else:
        G, h = torch.stack([G[0], -G[0]]), -torch.ones_like(h[:2])
    layer = OptNetQP()
    Q, c, G, h = leaves(Q, c, G, h)
    z = layer(Q, c, G, h)
    assert layer.converged == (kind != "infeasible")
    assert bool(z.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(z.sum(), (Q, c, G, h)))
    if kind != "infeasible":
        assert float(z.detach().norm()) < 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_do_not_matter(scale, dtype):
    problem = program(6, 10, 1, seed=2)
    plain = OptNetQP()(*problem)
    Q, c, G, h, A, b = (tensor.to(dtype) for tensor in problem)
    layer = OptNetQP()
    z = layer(Q, scale * c, G, scale * h, A, scale * b) / scale
    assert layer.converged
    assert relative(z, plain) < (1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_its_problems_one_by_one(device):
    problems = [program(6, 9, 2, seed) for seed in range(4)]
    batch = leaves(*(torch.stack(tensors).to(device) for tensors in zip(*problems, strict=True)))
    z = OptNetQP()(*batch)
    gradients = torch.autograd.grad(z.square().sum(), batch)
    for i, problem in enumerate(problems):
        single = leaves(*problem)
        alone = OptNetQP()(*single)
        assert torch.allclose(z[i].detach().cpu(), alone.detach(), atol=1e-10)
        expected = torch.autograd.grad(alone.square().sum(), single)
        for found, exact in zip(gradients, expected, strict=True):
            assert torch.allclose(found[i].cpu(), exact, atol=1e-7)


@pytest.mark.parametrize("shared", ["Q", "G", "A", "c", "h", "b"])
def test_a_shared_argument_is_its_copies_with_the_gradients_summed(shared):
    names = ("Q", "c", "G", "h", "A", "b")
    problems = [program(5, 6, 1, seed) for seed in (1, 1, 1)]
    many = {
        name: torch.stack(tensors)
        for name, tensors in zip(names, zip(*problems, strict=True), strict=True)
    }
    many["c"] = many["c"] * torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64).unsqueeze(-1)
    if shared == "c":
        many["c"] = many["c"][:1].expand(3, -1)
    (one,) = leaves(many[shared][0])
    z = OptNetQP()(**{**many, shared: one})
    (found,) = torch.autograd.grad(z.square().sum(), one)
    (copies,) = leaves(many[shared])
    (expected,) = torch.autograd.grad(OptNetQP()(**{**many, shared: copies}).square().sum(), copies)
    assert torch.allclose(found, expected.sum(0), atol=1e-9)


def test_a_problem_stops_where_it_would_alone():
    problems = [program(6, 9, 2, seed) for seed in range(6)]
    layer, steps, errors = OptNetQP(tol=0.1), [], []
    z = layer(*(torch.stack(tensors) for tensors in zip(*problems, strict=True)))
    for i, problem in enumerate(problems):
        alone = layer(*problem)
        assert torch.allclose(z[i], alone, rtol=1e-9)
        steps.append(layer.steps)
        errors.append(relative(alone, OptNetQP()(*problem)))
    assert errors[steps.index(min(steps))] > 1e-6  # one more step would show
    assert min(steps) < max(steps)


def test_one_hard_problem_does_not_change_the_others():
    Q, c, G, h, _, _ = program(5, 6, 0)
    against = torch.cat([G[:3], -G[:3]])  # with these bounds infeasible
    z = OptNetQP()(Q, c, torch.stack([G, against]), torch.stack([h, -1e3 * torch.ones_like(h)]))
    assert torch.allclose(z[0], OptNetQP()(Q, c, G, h), atol=1e-12)
    assert bool(z.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ball_agrees_with_the_reference(family, dtype, device):
    problem = make(family, 40, 200, dtype=dtype, device=device, functional="random")
    reference = solve_reference(problem.to(dtype, "cpu"))
    layer = OptNet()
    (q,) = leaves(problem.q)
    x = layer(problem.P, q, problem.w, problem.t)
    (gradient,) = torch.autograd.grad(problem.v @ x, q)
    loose = 1e-4 if dtype == torch.float32 else 1e-9
    assert layer.converged
    assert relative(x.detach().cpu(), reference.x) < loose
    assert relative(gradient.cpu(), reference.gradient) < loose
    excess = float((problem.w * x.detach()).abs().sum() - problem.t)
    assert excess <= (1e-6 if dtype == torch.float32 else 1e-14) * float(problem.t)


@pytest.mark.parametrize("family", ["active", "loose"])
def test_the_ball_is_differentiated_in_every_parameter(family):
    problem = make(family, 4, 400)
    inputs = leaves(factor(problem.P), problem.q, problem.w, problem.t)
    assert torch.autograd.gradcheck(symmetric(OptNet()), inputs, eps=1e-6, atol=1e-6, rtol=1e-4)


def test_the_ball_and_alt_diff_have_the_same_gradients():
    problem = make("active", 8, 300, functional="random")
    found = leaves(problem.P, problem.q, problem.w, problem.t)
    other = leaves(problem.P, problem.q, problem.w, problem.t)
    ours = torch.autograd.grad(problem.v @ OptNet()(*found), found)
    x = AltDiff(tol=1e-12, max_steps=50_000)(*other)
    theirs = torch.autograd.grad(problem.v @ x, other)
    assert torch.allclose(ours[0], 0.5 * (theirs[0] + theirs[0].mT), atol=1e-7)
    for first, second in zip(ours[1:], theirs[1:], strict=True):
        assert torch.allclose(first, second, atol=1e-7)


def test_the_eliminated_ball_is_the_same_program_as_its_dense_rows():
    problem = make("active", 6, 100)
    n, G = problem.n, ball_rows(problem.w)
    h = torch.cat([torch.zeros(2 * n, dtype=torch.float64), problem.t.reshape(1)])
    Q = 1e-9 * torch.eye(2 * n, dtype=torch.float64)  # y has no curvature of its own
    Q[:n, :n] = problem.P
    z = OptNetQP()(Q, torch.cat([problem.q, torch.zeros_like(problem.q)]), G, h)
    assert relative(z[:n], OptNet()(problem.P, problem.q, problem.w, problem.t)) < 1e-7


def test_a_batch_of_balls_is_its_problems_one_by_one():
    problems = [make(family, 7, 100) for family in FAMILIES]
    P, q, w, t = (torch.stack([getattr(p, name) for p in problems]) for name in "Pqwt")
    batch = leaves(P, q, w, t)
    x = OptNet()(*batch)
    gradients = torch.autograd.grad(x.sum(), batch)
    for i, p in enumerate(problems):
        single = leaves(p.P, p.q, p.w, p.t)
        alone = OptNet()(*single)
        assert torch.allclose(x[i], alone, atol=1e-12)
        expected = torch.autograd.grad(alone.sum(), single)
        for found, exact in zip(gradients, expected, strict=True):
            assert relative(found[i], exact) < 1e-6 or float((found[i] - exact).abs().max()) < 1e-9


def test_defaults_signs_of_weights_and_coordinates_without_weight():
    problem = make("active", 5, 100)
    q = 10 * problem.P.diagonal() * problem.q.sign()  # far outside the unit ball
    layer = OptNet()
    x = layer(problem.P, q)
    assert float(x.abs().sum()) == pytest.approx(1.0)
    flipped = problem.w * torch.tensor([1.0, -1, 1, -1, -1], dtype=torch.float64)
    assert torch.equal(layer(problem.P, q, flipped), layer(problem.P, q, problem.w))
    none = torch.zeros_like(problem.w)
    assert torch.allclose(layer(problem.P, q, none), -torch.linalg.solve(problem.P, q))
    free = replace(problem, q=q, w=problem.w.clone(), t=torch.tensor(0.5, dtype=torch.float64))
    free.w[2] = 0
    x = layer(free.P, free.q, free.w, free.t)
    force = free.P @ x + free.q
    assert abs(float(force[2])) < 1e-8 * float(force.abs().max())
    assert float((free.w * x).abs().sum()) == pytest.approx(0.5)


def test_a_semidefinite_or_zero_matrix_in_the_ball_is_solved():
    q = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
    layer = OptNet()
    linear = layer(torch.zeros(3, 3, dtype=torch.float64), q, None, 2.0)
    assert torch.allclose(linear, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64), atol=1e-9)
    assert layer.converged
    still = layer(torch.eye(3, dtype=torch.float64), torch.zeros_like(q))
    assert float(still.abs().max()) < 1e-12
    assert layer.converged


def test_steps_end_at_the_cap_with_the_best_iterate():
    problem = program(6, 10, 1)
    exact, errors = OptNetQP()(*problem), []
    for most in (1, 3, 6):
        layer = OptNetQP(max_steps=most)
        errors.append(relative(layer(*problem), exact))
        assert layer.steps == most
        assert not layer.converged
    assert errors[0] > errors[1] > errors[2]


def test_no_gradient_is_recorded_where_none_is_asked_for():
    problem = program(4, 3, 1)
    assert not OptNetQP()(*problem).requires_grad
    with torch.no_grad():
        assert not OptNetQP()(*leaves(*problem)).requires_grad


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Q", lambda Q, c, G, h, A, b: (-Q, c, G, h, A, b)),
        ("Q", lambda Q, c, G, h, A, b: (Q[:3], c, G, h, A, b)),
        ("c", lambda Q, c, G, h, A, b: (Q, c[0], G, h, A, b)),
        ("c", lambda Q, c, G, h, A, b: (Q, c * torch.nan, G, h, A, b)),
        ("G", lambda Q, c, G, h, A, b: (Q, c, G.float(), h, A, b)),
        ("h", lambda Q, c, G, h, A, b: (Q, c.expand(2, -1), G, h.expand(3, -1), A, b)),
        ("h", lambda Q, c, G, h, A, b: (Q, c, G[:0], h[:0], A, b)),
        ("A", lambda Q, c, G, h, A, b: (Q, c, G, h, torch.cat([A, A]), torch.cat([b, b]))),
        ("A, b", lambda Q, c, G, h, A, _: (Q, c, G, h, A, None)),
        ("Q", lambda Q, c, G, h, A, b: (Q.half(), c.half(), G, h, A, b)),
    ],
)
def test_bad_arguments_are_refused_by_name(name, change):
    with pytest.raises(ValueError, match=f"^{name}:"):
        OptNetQP()(*change(*program(4, 3, 1)))


def test_bad_settings_and_radii_are_refused_by_name():
    problem = make("active", 4, 1)
    with pytest.raises(ValueError, match=r"^tol:"):
        OptNetQP(tol=0.0)
    with pytest.raises(ValueError, match=r"^max_steps:"):
        OptNetQP(max_steps=0)
    with pytest.raises(ValueError, match=r"^radius:"):
        OptNet()(problem.P, problem.q, problem.w, -1.0)
    with pytest.raises(ValueError, match=r"^weight:"):
        OptNet()(problem.P, problem.q, problem.w[:3])
