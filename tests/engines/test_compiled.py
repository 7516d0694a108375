"""Compiled code against tensor operations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dfwlayer as dfw
from compiled_cases import (
    F32,
    F64,
    OBJECTIVES,
    SETS,
    N,
    answers,
    attempted,
    close,
    leaf,
    normal,
    terms_of,
)
from dfwlayer.engines import compiled
from dfwlayer.methods import METHODS
from dfwlayer.methods.base import Ability
from dfwlayer.ops.tensors import filled, tensors_in


@pytest.mark.parametrize("lead", [(), (1,), (6,)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("constraint", SETS)
def test_agrees_with_tensor_operations(constraint, objective, dtype, lead):
    """The data are exact in float64, so that both solve the same problem to the last digits."""
    given = OBJECTIVES[objective](lead, dtype), SETS[constraint](lead, dtype)
    found = attempted(*given)
    assert found is not None
    assert found.left is None or not bool(found.left.all())
    sol, gradients = answers(*given)
    wide = [leaf(t.detach().double()) for t in tensors_in(given) if t.is_floating_point()]
    with compiled.using(False):
        expected, right = answers(*filled(given, iter(wide)), tol=1e-13)
    eps = torch.finfo(dtype).eps
    assert (sol.status == 0).all()
    close(sol.x.double(), expected.x, max(8 * eps, 1e-8))
    for own, other in zip(gradients, right, strict=True):
        close(own.double(), other, max(500 * eps, 1e-7))
    value, best = sol.value.detach(), expected.value.detach()
    assert float((value - best).abs().max()) <= 64 * eps * (1 + float(best.abs().max()))
    assert (value - best <= sol.gap + 8 * eps * terms_of(given[0], sol.x)).all()
    # as feasible as the dtype allows
    with torch.no_grad():
        assert float(given[1].violation(sol.x).max()) <= 4 * eps


@pytest.mark.parametrize(
    "constraint",
    ["l1", "l2", "box", "simplex", "l1 in a plane", "l1 around a centre", "l3", "l1.3"],
)
def test_second_derivatives(constraint):
    objective, body = OBJECTIVES["quadratic"]((), F64), SETS[constraint]((), F64)
    tensors = [objective.q, *(t for t in tensors_in(body) if t.requires_grad)]

    def gradient():
        x = dfw.solve(objective, body).x
        return torch.autograd.grad(x.square().sum(), tensors, create_graph=True)

    second = torch.autograd.grad(gradient()[0].sum(), tensors, allow_unused=True)
    with compiled.using(False):
        expected = torch.autograd.grad(gradient()[0].sum(), tensors, allow_unused=True)
    for own, other in zip(second, expected, strict=True):
        close(own, other, 1e-7)


def test_problems_that_are_left_are_solved_by_others():
    """A row of NaN, one whose solution is at a kink, and one like any other."""
    P = leaf(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64)) + 1)
    at_a_kink = -P.detach() @ torch.tensor([1.0, 0.5, -0.25], dtype=F64)
    q = torch.stack((at_a_kink * torch.nan, at_a_kink, at_a_kink * 1.5)).requires_grad_()
    body = dfw.Box(-1.0, 1.0)
    found = attempted(dfw.Quadratic(P, q), body)
    assert found is not None
    assert found.left.tolist() == [True, True, False]
    sol = dfw.solve(dfw.Quadratic(P, q), body)
    assert sol.status.tolist() == [dfw.Status.NONFINITE, 0, 0]
    assert sol.x[0].isnan().all()
    torch.autograd.backward(sol.x[1:].sum())
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P.detach(), q.detach()), body)
    torch.testing.assert_close(sol.x.detach()[1:], other.x[1:])
    assert (q.grad[0] == 0).all()
    assert torch.isfinite(P.grad).all()


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 5),
    name=st.sampled_from(["l1", "l2", "l3", "l1.5", "box", "simplex", "caps", "cut", "centre"]),
    f32=st.booleans(),
)
def test_whole_numbers(seed, n, name, f32):
    """Degenerate problems: what is not beyond doubt is left, and nothing is infeasible or wrong."""
    dtype = F32 if f32 else F64
    make = torch.Generator().manual_seed(seed)

    def numbers(*shape, low=-2, high=3):
        return torch.randint(low, high, shape, generator=make).to(dtype)

    root = numbers(7, n, n)
    P, q = root.mT @ root + torch.eye(n, dtype=dtype), numbers(7, n, low=-6, high=7)
    body = {
        "l1": lambda: dfw.LpBall(1, numbers(7, low=1)),
        "l2": lambda: dfw.LpBall(2, numbers(7, low=1)),
        "l3": lambda: dfw.LpBall(3, numbers(7, low=1)),
        "l1.5": lambda: dfw.LpBall(1.5, numbers(7, low=1)),
        "centre": lambda: dfw.LpBall(1, numbers(7, low=1), centre=numbers(7, n)),
        "box": lambda: dfw.Box(numbers(7, n, low=-2, high=1), numbers(7, n, low=0, high=3)),
        "simplex": lambda: dfw.Simplex(numbers(7, low=1)),
        "caps": lambda: dfw.CappedSimplex(1.0, numbers(7, n, low=1)),
        "cut": lambda: dfw.PlaneCut(dfw.Box(-1.0, 1.0), numbers(7, n), 0.0),
    }[name]()
    sol = dfw.solve(dfw.Quadratic(P, q), body)
    eps = torch.finfo(dtype).eps
    assert float(body.violation(sol.x).max()) <= 16 * eps
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P, q), body)
    size = 1 + float(other.x.abs().max())
    torch.testing.assert_close(sol.x, other.x, atol=max(1e3 * eps, 1e-8) * size, rtol=0)
    # in float64 a gap can be told from zero where it cannot in float32
    assert ((sol.status == other.status) | sol.converged).all()


def test_what_is_not_for_it():
    """Settings, dtypes and values that only tensor operations have an answer for."""
    q = torch.randn(4, dtype=F64)
    P = torch.eye(4, dtype=F64)
    body = dfw.LpBall(1.0)
    assert attempted(dfw.Quadratic(P, q), body) is not None
    for options in ({"method": "dfw"}, {"differentiate": "unroll"}, {"max_steps": 0}):
        assert attempted(dfw.Quadratic(P, q), body, **options) is None
    assert attempted(dfw.Quadratic(P, q), body, method=dfw.ProjectedNewton(inner=3)) is None
    assert attempted(dfw.Quadratic(P.half(), q.half()), body) is None
    assert attempted(dfw.Quadratic(P, q), dfw.LpBall(1.01)) is None
    assert (
        attempted(dfw.Quadratic(P, q), dfw.Product([dfw.LpBall(3.0), dfw.Box(0.0, 1.0)], [2, 2]))
        is None
    )
    assert attempted(dfw.Quadratic(-P, q), body) is None
    assert attempted(dfw.Quadratic(P + torch.ones(4, 4).triu(1), q), body) is None
    own = torch.eye(700, dtype=F64).expand(2, 700, 700)
    assert attempted(dfw.Quadratic(own, torch.ones(2, 700, dtype=F64)), body) is None
    assert Ability.COMPILED in METHODS["auto"].abilities


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("k", lambda bad: dfw.KSparse(torch.tensor([2.0, bad], dtype=F64))),
        ("radius", lambda bad: dfw.LpBall(1, torch.tensor([1.0, bad - 1], dtype=F64))),
        (
            "cap",
            lambda bad: dfw.CappedSimplex(1.0, torch.tensor([[1.0] * 4, [bad - 1] * 4]).double()),
        ),
        (
            "upper",
            lambda bad: dfw.L1Box(
                1.0, None, -1.0, torch.tensor([[1.0] * 4, [bad - 1] * 4]).double()
            ),
        ),
    ],
)
def test_values_out_of_range_have_the_same_status(name, body):
    q = torch.randn(2, 4, dtype=F64)
    sol = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), body(0.5))
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), body(0.5))
    assert sol.status.tolist() == other.status.tolist()
    assert sol.status[1] != 0


def test_changed_in_place():
    q = torch.randn(4, dtype=F64, requires_grad=True)
    P = torch.eye(4, dtype=F64)
    x = dfw.solve(dfw.Quadratic(P, q * 1), dfw.LpBall(1.0, 0.5)).x
    P.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_x_changed_in_place():
    """The gradient is that of the solution, whatever becomes of the tensor that was returned."""
    P = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64)).requires_grad_()
    q = torch.tensor([-1.0, 0.5, -3.0], dtype=F64)
    expected = torch.autograd.grad(dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 0.7)).x.sum(), P)
    x = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 0.7)).x
    found = torch.autograd.grad(x.mul_(1.0).add_(5.0).sum(), P)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tensor_that_another_one_is_derived_from(create_graph):
    P, q = torch.eye(3, dtype=F64), torch.tensor([3.0, -2.0, 0.1], dtype=F64)
    t = torch.tensor(1.0, dtype=F64, requires_grad=True)
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Box(-t, t))
    f = (sol.x * torch.tensor([1.0, 2.0, 3.0], dtype=F64)).sum() + sol.value
    (slope,) = torch.autograd.grad(f, t, create_graph=create_graph)
    # x is (−t, t, −0.1): 1 · (−1) + 2 · 1, and df/dt = 2t − 5
    assert slope.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tensor_in_two_places(create_graph):
    """As q and as the weights, whose gradients add up."""
    q = torch.tensor([-1.0, 0.5, -3.0, 2.0], dtype=F64, requires_grad=True)

    def gradient():
        x = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), dfw.LpBall(1, 0.7, q)).x
        return torch.autograd.grad(x.square().sum(), q, create_graph=create_graph)[0]

    found = gradient()
    with compiled.using(False):
        close(found, gradient(), 1e-9)


@pytest.mark.parametrize("kind", [dfw.Quadratic, dfw.LeastSquares])
@pytest.mark.parametrize("p", [1, 2, 3, float("inf")])
@given(seed=st.integers(0, 2**32), n=st.integers(1, 4), shift=st.sampled_from([0.0, 1.0]))
def test_the_value_is_that_of_x_where_the_centre_costs_far_more(kind, p, seed, n, shift):
    torch.manual_seed(seed)
    centre = 10 * torch.randn(8, n, dtype=torch.float64)
    A = torch.randn(8, n + 1, n, dtype=torch.float64)
    if kind is dfw.LeastSquares:
        objective = kind(A, shift * torch.randn(8, n + 1, dtype=torch.float64))
    else:
        objective = kind(A.mT @ A, shift * torch.randn(8, n, dtype=torch.float64))
    sol = dfw.solve(objective, dfw.Shifted(dfw.LpBall(p, 200.0), centre))
    # the rounding of the terms of f at x, not that of the terms at the centre
    x = sol.x.abs()
    if kind is dfw.LeastSquares:
        terms = 0.5 * ((A.abs() @ x.unsqueeze(-1)).squeeze(-1) + objective.b.abs()) ** 2
    else:
        curved = (objective.P.abs() @ x.unsqueeze(-1)).squeeze(-1)
        terms = x * (0.5 * curved + objective.q.abs())
    off = (sol.value - objective.value(sol.x)).abs()
    assert (off <= 1e-14 * terms.sum(-1)).all()


def test_far_from_the_centre():
    """What is lost in q + P c is not for compiled code."""
    q = torch.randn(4, dtype=F64)
    near, far = (
        attempted(dfw.Quadratic(None, q), dfw.LpBall(1, 0.1, centre=c)) for c in (1.0, 1e6)
    )
    assert near is not None
    assert far is None


def test_a_matrix_from_float32():
    """P = RᵀR as float32 rounds it is not symmetric in float64, and averaged."""
    R = torch.randn(N, N)
    P = (R.T @ R / N + torch.eye(N)).double()
    P[0, 1] += 1e-7
    P.requires_grad_()
    q = normal(N, dtype=F64)
    assert attempted(dfw.Quadratic(P, q), dfw.Simplex()) is not None
    sol, gradients = answers(dfw.Quadratic(P, q), dfw.Simplex())
    with compiled.using(False):
        other, expected = answers(dfw.Quadratic(P, q), dfw.Simplex(), tol=1e-13)
    close(sol.x, other.x, 1e-8)
    for own, right in zip(gradients, expected, strict=True):
        close(own, right, 1e-6)


@pytest.mark.parametrize("tol", [1e-5, 1.0, True, 1, "x", None, float("nan")])
def test_settings_are_checked_every_time(tol):
    """Although those that were seen before are known: 1, 1.0 and True are not the same."""
    f, body = dfw.Quadratic(None, torch.ones(2)), dfw.LpBall(1, 0.5)
    for _ in range(3):
        if type(tol) in (int, float) and tol == tol:
            dfw.solve(f, body, tol=tol)
        else:
            with pytest.raises(ValueError, match="tol"):
                dfw.solve(f, body, tol=tol)


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e8, 1e20])
@pytest.mark.parametrize(
    "constraint", ["l1", "l1.3", "l2", "l3", "box", "capped simplex", "l1 around a centre"]
)
def test_units(constraint, scale):
    """In other units of x the solution is the same, in those units, and so are its gradients."""
    q, body = normal(N, dtype=F64), SETS[constraint]((), F64)
    P = OBJECTIVES["quadratic"]((), F64).P
    x = dfw.solve(dfw.Quadratic(P, q), body).x
    larger = {
        name: getattr(body, name)
        for name in ("radius", "lower", "upper", "cap", "centre")
        if isinstance(getattr(body, name, None), torch.Tensor)
    }
    grown = body.changed(**{name: value * scale for name, value in larger.items()})
    if hasattr(body, "constraint"):
        inner = body.constraint
        grown = grown.changed(constraint=inner.changed(radius=inner.radius * scale))
    other = dfw.solve(dfw.Quadratic(P, q * scale), grown).x
    close(other / scale, x, 1e-9)
    found, expected = (torch.autograd.grad(y.square().sum(), P)[0] for y in (other, x))
    close(found / scale**2, expected, 1e-7)


@pytest.mark.parametrize("p", [1.1, 1.7, 2.2, 6.0, 30.0])
@pytest.mark.parametrize("inside", [False, True])
def test_balls_of_any_p(p, inside):
    """Also where the solution is inside of the ball, or with coordinates that are next to zero."""
    root = torch.randn(5, N, N, dtype=F64)
    P = leaf(root.mT @ root / N + 0.1 * torch.eye(N, dtype=F64))
    q = torch.randn(5, N, dtype=F64)
    q[:, 3] = 1e-7
    f, body = dfw.Quadratic(P, leaf(q)), dfw.LpBall(p, 1e3 if inside else 0.4)
    assert attempted(f, body).left is None
    sol, gradients = answers(f, body)
    with compiled.using(False):
        other, expected = answers(f, body, tol=1e-13)
    assert float(body.violation(sol.x).detach().max()) <= 1e-15 * (1e3 if inside else 1.0)
    close(sol.x, other.x, 1e-8)
    for own, right in zip(gradients, expected, strict=True):
        close(own, right, 1e-5)


@pytest.mark.parametrize("family", ["low rank", "many at once"])
@pytest.mark.parametrize("n", [20, 60])
def test_ill_conditioned(family, n):
    """Faces whose minimisers are far outside, so that it takes many of them."""
    make = torch.Generator().manual_seed(n)
    R = torch.randn(n // 10, n, dtype=F64, generator=make)
    P = R.T @ R + 1e-3 * n * torch.eye(n, dtype=F64)
    q = n**0.5 * torch.randn(n, dtype=F64, generator=make)
    free = torch.linalg.solve(P, -q)
    body = {
        "low rank": dfw.LpBall(1, 0.1 * float(free.abs().sum())),
        "many at once": dfw.Box(-0.1 * float(free.abs().max()), 0.02 * float(free.abs().max())),
    }[family]
    assert attempted(dfw.Quadratic(P, q), body, tol=1e-10) is not None
    sol = dfw.solve(dfw.Quadratic(P, q), body, tol=1e-10)
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P, q), body, tol=1e-13)
    close(sol.x, other.x, 1e-6)


@pytest.mark.parametrize(
    "constraint",
    [
        *(dfw.LpBall(p) for p in (1, 1.5, 2, 3)),
        dfw.Box(0.0, 1.0),
        dfw.Simplex(),
        dfw.PlaneCut(dfw.Box(0.0, 1.0), 1.0, 0.0),
    ],
    ids=repr,
)
def test_a_face_does_not_hide_what_bends_down(constraint):
    """f may be convex along the face of a solution and not elsewhere: that is no certificate."""
    torch.manual_seed(0)
    R = torch.randn(100, 4, 4, dtype=F64)
    values, vectors = torch.linalg.eigh(R @ R.mT)
    values[:, 0] = -0.3 * values[:, 1]
    P, q = vectors * values.unsqueeze(-2) @ vectors.mT, torch.randn(100, 4, dtype=F64)
    assert attempted(dfw.Quadratic(0.5 * (P + P.mT), q), constraint) is None
    values[:, 0] = 0.0  # flat is not down
    P = vectors * values.unsqueeze(-2) @ vectors.mT
    sol = dfw.solve(dfw.Quadratic(0.5 * (P + P.mT), q), constraint)
    assert (sol.status != dfw.Status.NOT_CONVEX).all()
