"""Fully corrective Frank-Wolfe where a quadratic model is flat, bad or out of range.

What is right is said by the vertices themselves: for every x of a polytope with vertices V,
f(x) − f* ≤ max over V of ⟨∇f(x), x − v⟩, in NumPy and double precision.
"""

import itertools

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from helpers import F64

N = 6


def _vertices(name):
    eye = np.eye(N)
    if name == "simplex":
        return eye
    if name == "l1":
        return np.concatenate((eye, -eye))
    if name == "box":
        return np.array(list(itertools.product((-1.0, 1.0), repeat=N)))
    if name == "two of six":
        pairs = itertools.combinations(range(N), 2)
        return np.array(
            [a * eye[i] + b * eye[j] for i, j in pairs for a in (1, -1) for b in (1, -1)]
        )
    if name == "birkhoff":
        orders = itertools.permutations(range(3))
        return np.array([np.eye(3)[list(order)].ravel() for order in orders])
    return np.random.default_rng(7).standard_normal((20, N))


SETS = ("simplex", "l1", "box", "two of six", "birkhoff", "random")


def _function(vertices, size, dtype):
    """The polytope as a function from costs to vertices."""
    rows = torch.tensor(size * vertices, dtype=dtype)
    return dfw.CustomSet(lambda cost: rows[(cost @ rows.mT).argmin(-1)], batched=True)


def _sets(name, size, dtype):
    yield _function(_vertices(name), size, dtype)
    if name != "random":
        yield {
            "simplex": lambda: dfw.Simplex(size),
            "l1": lambda: dfw.LpBall(1, size),
            "box": lambda: dfw.Box(-size, size),
            "two of six": lambda: dfw.KSparse(2, size),
            "birkhoff": lambda: _function(_vertices(name), size, dtype),
        }[name]()


def _gap(gradient, x, vertices):
    """max over the vertices of ⟨∇f(x), x − v⟩, and the size of its terms."""
    g, x = (t.detach().double().numpy() for t in (gradient, x))
    sizes = np.abs(g).max(-1) * np.abs(vertices).max() * g.shape[-1]
    return (g * x).sum(-1) - (g @ vertices.T).min(-1), sizes


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_a_linear_function_ends_at_a_vertex(name, dtype, scale):
    vertices = _vertices(name)
    gen = torch.Generator().manual_seed(1)
    q = (scale * torch.randn(12, vertices.shape[-1], generator=gen, dtype=F64)).to(dtype)
    best = vertices[(q.double().numpy() @ vertices.T).argmin(-1)]
    zero = torch.zeros(q.shape[-1], q.shape[-1], dtype=dtype)
    written = dfw.Smooth(lambda x, q: (q * x).sum(-1), q, shape=(q.shape[-1],))
    for objective in (dfw.Quadratic(zero, q), written):
        for constraint in _sets(name, 1.0, dtype):
            sol = dfw.solve(objective, constraint, method="active-set")
            np.testing.assert_allclose(sol.x.double().detach().numpy(), best, rtol=0, atol=1e-6)
            assert (sol.num_steps <= 2).all()
            assert sol.converged.all()


def _curved(kind, scale, size, dtype):
    """Functions of x/size times a scale, and what float32 leaves of the gap's terms."""
    gen = torch.Generator().manual_seed(2)

    def make(n):
        R = torch.randn(12, n, n, generator=gen, dtype=F64)
        q = torch.randn(12, n, generator=gen, dtype=F64)
        P = R @ R.mT if kind == "definite" else R[:, :2].mT @ R[:, :2]
        a = (R if kind == "logistic" else q).to(dtype)
        t, f = (torch.tensor(v, dtype=dtype) for v in (size, scale))
        if kind in ("definite", "semidefinite"):
            return dfw.Quadratic((scale / size * P).to(dtype), (scale * q).to(dtype))
        functions = {
            "huber": lambda x, a: torch.nn.functional.huber_loss(
                x, 2 * a.expand_as(x), reduction="none", delta=0.1
            ).sum(-1),
            "quartic": lambda x, a: (x**4 + a * x).sum(-1),
            "logistic": lambda x, a: torch.nn.functional.softplus(
                4 * (x.unsqueeze(-2) * a).sum(-1)
            ).sum(-1),
        }
        fn = functions[kind]
        return dfw.Smooth(lambda x, a, t, f: f * fn(x / t, a), a, t, f, shape=(n,))

    return make


@pytest.mark.parametrize(
    ("scale", "size"), [(1.0, 1.0), (1e-20, 1.0), (1e20, 1.0), (1e-10, 1e10), (1e10, 1e-10)]
)
@pytest.mark.parametrize("kind", ["definite", "semidefinite", "huber", "quartic", "logistic"])
def test_any_curvature_at_any_scale(kind, size, scale):
    for dtype, name in itertools.product((torch.float32, F64), ("simplex", "random")):
        vertices = size * _vertices(name)
        objective = _curved(kind, scale, size, dtype)(N)
        constraint = _function(_vertices(name), size, dtype)
        sol = dfw.solve(objective, constraint, method="active-set")
        with torch.no_grad():
            gradient = objective.bind(12).gradient(sol.x)
        gap, terms = _gap(gradient, sol.x, vertices)
        low = 2e-5 if dtype == torch.float32 else 1e-8
        value = sol.value.detach().double().abs().numpy()
        assert (gap <= np.maximum(low * terms, 1e-5 * value)).all()
        met = sol.converged.numpy()
        assert (gap[met] <= 1.1e-5 * value[met] + 1e-6 * low * terms[met]).all()
        # nothing is left to steps: either the gap is proven, or the dtype has no more to give
        assert (met | (sol.status == Status.ROUNDING_FLOOR).numpy()).all()
        assert met.all() or dtype == torch.float32


def test_an_exact_fit_inside():
    gen = torch.Generator().manual_seed(3)
    A = torch.randn(30, 8, N, generator=gen, dtype=F64)
    x = 0.1 * torch.randn(30, N, generator=gen, dtype=F64)
    b = (A @ x.unsqueeze(-1)).squeeze(-1)
    for name in ("l1", "box", "two of six"):
        for constraint in _sets(name, 1.0, F64):
            sol = dfw.solve(dfw.LeastSquares(A, b), constraint, method="active-set")
            torch.testing.assert_close(sol.x, x, rtol=0, atol=1e-11)
            assert sol.value.max() <= 1e-22


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("n", [2, 7, 30])
def test_functions_that_are_infinite_at_vertices(n, dtype):
    """−Σ a log x and Σ x log x + cx over the simplex: a / Σa and softmax(−c)."""
    gen = torch.Generator().manual_seed(n)
    a = (0.05 + torch.rand(5, n, generator=gen, dtype=F64)).to(dtype)
    simplex = dfw.CustomSet(
        lambda cost: torch.nn.functional.one_hot(cost.argmin(-1), n).to(cost), batched=True
    )
    entropy = dfw.Smooth(lambda x, a: (x * x.log() + a * x).sum(-1), a, shape=(n,))
    barrier = dfw.Smooth(lambda x, a: -(a * x.log()).sum(-1), a, shape=(n,))
    wanted = {entropy: torch.softmax(-a, -1), barrier: a / a.sum(-1, keepdim=True)}
    for objective, want in wanted.items():
        for tol in (1e-5, 1e-6):
            sol = dfw.solve(objective, simplex, tol=tol)
            torch.testing.assert_close(sol.x, want, rtol=0, atol=1e-5)
            assert (sol.gap <= 1e-5 * (1 + sol.value.abs())).all()


def test_outside_of_the_domain():
    """No point of the simplex has a finite f, and the other problem does not mind."""
    shift = torch.tensor([[2.0], [0.0]], dtype=F64)
    objective = dfw.Smooth(lambda x, s: -(x - s).log().sum(-1), shift, shape=(3,))
    simplex = dfw.CustomSet(lambda cost: torch.eye(3, dtype=F64)[cost.argmin()])
    sol = dfw.solve(objective, simplex)
    assert sol.status.tolist() == [Status.OUT_OF_RANGE, Status.CONVERGED]
    assert (sol.x >= 0).all()
    torch.testing.assert_close(sol.x.sum(-1), torch.ones(2, dtype=F64))
    torch.testing.assert_close(sol.x[1], torch.full((3,), 1 / 3, dtype=F64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_what_is_not_convex_is_told_from_rounding(scale):
    gen = torch.Generator().manual_seed(4)
    R = torch.randn(40, 2, N, generator=gen)
    singular = scale * (R.mT @ R)
    bent = singular - 1e-2 * scale * torch.eye(N)
    q = scale * torch.randn(40, N, generator=gen)
    for name in ("box", "simplex"):
        for constraint in _sets(name, 1.0, torch.float32):
            sound = dfw.solve(dfw.Quadratic(singular, q), constraint, method="active-set")
            assert not (sound.status == Status.NOT_CONVEX).any()
            other = dfw.solve(dfw.Quadratic(bent, q), constraint, method="active-set")
            assert (other.status == Status.NOT_CONVEX).all()
            assert (constraint.bind((N,), torch.float32, q.device).violation(other.x) <= 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_problems_of_a_batch_do_not_see_each_other(dtype):
    """Easy and hard, large and small ones together are what each is alone."""
    gen = torch.Generator().manual_seed(5)
    R = torch.randn(12, N, N, generator=gen, dtype=F64)
    factor = torch.logspace(-12, 12, 12, dtype=F64)[:, None]
    P = (factor[..., None] * (R @ R.mT) * (torch.arange(12) % 3)[:, None, None]).to(dtype)
    q = (factor * torch.randn(12, N, generator=gen, dtype=F64)).to(dtype)
    for name in ("l1", "random"):
        constraint = _function(_vertices(name), 1.0, dtype)
        together = dfw.solve(dfw.Quadratic(P, q), constraint)
        for i in range(12):
            alone = dfw.solve(dfw.Quadratic(P[i], q[i]), constraint)
            atol = 2e-4 if dtype == torch.float32 else 1e-9
            torch.testing.assert_close(together.x[i], alone.x, rtol=0, atol=atol)
            assert together.converged[i] == alone.converged


def test_too_few_steps_are_reported():
    gen = torch.Generator().manual_seed(6)
    R = torch.randn(N, N, generator=gen, dtype=F64)
    q = torch.randn(20, N, generator=gen, dtype=F64)
    sol = dfw.solve(
        dfw.Quadratic(R @ R.mT, q), dfw.Box(-1.0, 1.0), method="active-set", max_steps=1, tol=1e-12
    )
    assert ((sol.status == Status.MAX_STEPS) | sol.converged).all()
    assert (sol.status == Status.MAX_STEPS).any()


@pytest.mark.parametrize("power", [2, 4])
def test_sides_of_very_different_lengths(power):
    """The curvature along a side of length 1 is not lost beside one of length 10⁶."""
    gen = torch.Generator().manual_seed(8)
    F, d = (torch.randn(*size, generator=gen, dtype=F64) for size in ((40, 8, N), (40, 8)))
    c = torch.randn(40, N, generator=gen, dtype=F64)
    side = torch.tensor([1.0, 1e6, 1.0, 1e6, 1.0, 1e4], dtype=F64)

    def function(x, F, d, c):
        r = (F @ x.unsqueeze(-1)).squeeze(-1) - d
        return r.pow(power).sum(-1) / power + (c * x).sum(-1)

    objective = dfw.Smooth(function, F, d, c, shape=N)
    box = dfw.Box(-side, 0.8 * side)
    sol = dfw.solve(objective, box, method="active-set")
    best = dfw.solve(objective, box, tol=1e-9)
    assert (sol.num_steps < 100).all()
    torch.testing.assert_close(sol.value, best.value, rtol=1e-10, atol=1e-10)
