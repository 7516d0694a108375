"""Any batch dimensions, broadcast as in PyTorch, and variables of any shape."""

import pytest
import torch

import dfwlayer as dfw
from helpers import F64

M, N = 2, 3  # rows and columns of a variable that is a matrix


def randn(*shape):
    return torch.randn(shape, dtype=F64)


def matrix(*lead):
    root = randn(*lead, 4, 4)
    return root @ root.mT + torch.eye(4, dtype=F64)


def rand(*shape):
    return 0.2 + torch.rand(shape, dtype=F64)


# the tensors, and the problem they make; the leading dimensions are all there is to see
CASES = {
    "own P": (
        lambda: {"P": matrix(3, 1), "q": randn(2, 4), "t": rand(3, 2), "w": rand(4)},
        lambda P, q, t, w: (dfw.Quadratic(P, q), dfw.LpBall(1, t, w)),
        (3, 2),
    ),
    "shared P": (
        lambda: {"P": matrix(), "q": randn(3, 1, 2, 4), "t": rand(2, 1)},
        lambda P, q, t: (dfw.Quadratic(P, q), dfw.LpBall(2, t)),
        (3, 2, 2),
    ),
    "a batch of the set's": (
        lambda: {"q": randn(4), "cap": 0.3 + rand(3, 2, 4)},
        lambda q, cap: (dfw.Quadratic(None, q), dfw.CappedSimplex(1.0, cap)),
        (3, 2),
    ),
    "least squares": (
        lambda: {"A": randn(2, 5, 4), "b": randn(3, 1, 5), "low": -rand(2, 4), "up": rand()},
        lambda A, b, low, up: (dfw.LeastSquares(A, b), dfw.Box(low, up)),
        (3, 2),
    ),
    "a centre": (
        lambda: {"q": randn(3, 1, 4), "c": randn(2, 4), "t": rand(1, 1)},
        lambda q, c, t: (dfw.Quadratic(None, q), dfw.LpBall(1, t, centre=c)),
        (3, 2),
    ),
    "a cut": (
        lambda: {"q": randn(3, 1, 4), "level": rand(2), "up": 1 + rand(3, 1, 4)},
        lambda q, level, up: (
            dfw.Quadratic(None, q),
            dfw.PlaneCut(dfw.Box(0.0, up), 1.0, level),
        ),
        (3, 2),
    ),
    "a product": (
        lambda: {"q": randn(2, 4), "t": rand(3, 1), "up": rand(2, 2)},
        lambda q, t, up: (
            dfw.Quadratic(None, q),
            dfw.Product([dfw.LpBall(1, t), dfw.Box(0.0, up)], [2, 2]),
        ),
        (3, 2),
    ),
    "an ellipsoid": (
        lambda: {"q": randn(2, 4), "A": matrix(3, 1), "t": rand()},
        lambda q, A, t: (dfw.Quadratic(None, q), dfw.Ellipsoid(A, radius=t)),
        (3, 2),
    ),
    "groups": (
        lambda: {"q": randn(3, 1, 4), "w": rand(2, 2)},
        lambda q, w: (dfw.Quadratic(None, q), dfw.GroupBall([0, 0, 1, 1], 0.5, w)),
        (3, 2),
    ),
    "a polyhedron": (
        lambda: {"q": randn(3, 1, 4), "G": randn(2, 2, 4), "h": rand(2), "b": rand(3, 1, 1)},
        lambda q, G, h, b: (
            dfw.Quadratic(None, q),
            dfw.Polyhedron(G, h, torch.ones(1, 4, dtype=F64), b),
        ),
        (3, 2),
    ),
    "a function": (
        lambda: {"c": randn(3, 2, 4), "t": rand(2)},
        lambda c, t: (
            dfw.Smooth(lambda x, c: (torch.cosh(x - c) - 1).sum(-1), c, shape=(4,)),
            dfw.LpBall(2, t),
        ),
        (3, 2),
    ),
    "a function of one problem": (
        lambda: {"c": randn(4), "t": rand(3, 2)},
        lambda c, t: (
            dfw.Smooth(lambda x, c: (torch.cosh(x - c) - 1).sum(), c, shape=(4,)),
            dfw.LpBall(2, t),
        ),
        (3, 2),
    ),
    "images": (
        lambda: {"q": randn(3, M, N), "w": rand(M, N), "t": rand(3)},
        lambda q, w, t: (dfw.Quadratic(None, q), dfw.LpBall(1, t, w)),
        (3,),
    ),
    "a P for images": (
        lambda: {"P": torch.diag(rand(M * N)), "q": randn(2, 1, M, N), "up": rand(3, M, N)},
        lambda P, q, up: (dfw.Quadratic(P, q), dfw.Box(-1.0, up)),
        (2, 3),
    ),
    "matrices": (
        lambda: {"q": randn(2, 3, M, N), "t": rand(3)},
        lambda q, t: (dfw.Quadratic(None, q), dfw.NuclearBall(t)),
        (2, 3),
    ),
    "a function of matrices": (
        lambda: {"c": randn(2, 3, M, N), "t": rand(3)},
        lambda c, t: (
            dfw.Smooth(lambda x, c: (x - c).square().sum((-2, -1)), c, shape=(M, N)),
            dfw.NuclearBall(t),
        ),
        (2, 3),
    ),
    "assignments": (
        lambda: {"q": randn(2, 2, 3, 3)},
        lambda q: (dfw.Quadratic(None, q), dfw.Birkhoff(3)),
        (2, 2),
    ),
}
SHAPED = {"images": (M, N), "a P for images": (M, N)}  # what only the caller can tell
VARIABLES = SHAPED | {
    "matrices": (M, N),
    "a function of matrices": (M, N),
    "assignments": (3, 3),
}
# dimensions of one problem's tensors, where they are not those of vectors
RANKS = {"P": 2, "A": 2, "G": 2, "t": 0, "level": 0}


def rank(case, name, tensor):
    if name in RANKS:
        return RANKS[name]
    return min(tensor.dim(), len(VARIABLES.get(case, (4,))))


def one(case, name, tensor, at, lead):
    """The part of a tensor that belongs to one problem."""
    event = tensor.shape[tensor.dim() - rank(case, name, tensor) :]
    return tensor.expand(*lead, *event)[at]


@pytest.mark.parametrize("case", CASES)
def test_every_problem_is_the_one_it_is_alone(case):
    torch.manual_seed(0)
    make, build, lead = CASES[case]
    shape = VARIABLES.get(case, (4,))
    given = {k: v.requires_grad_() for k, v in make().items()}
    told = {"shape": SHAPED.get(case), "tol": 1e-10}
    sol = dfw.solve(*build(**given), **told)
    assert sol.x.shape == (*lead, *shape)
    for each in (sol.value, sol.gap, sol.num_steps, sol.status):
        assert each.shape == lead
    assert (sol.status == 0).all()
    pull = randn(*lead, *shape)
    found = torch.autograd.grad((sol.x * pull).sum(), list(given.values()))
    total = [torch.zeros_like(v) for v in given.values()]
    for at in torch.cartesian_prod(*(torch.arange(size) for size in lead)).reshape(-1, len(lead)):
        at = tuple(at.tolist())
        alone = dfw.solve(
            *build(**{k: one(case, k, v, at, lead) for k, v in given.items()}), **told
        )
        assert alone.x.shape == shape
        assert torch.allclose(alone.x, sol.x[at], atol=1e-7)
        assert torch.allclose(alone.value, sol.value[at], atol=1e-7)
        part = torch.autograd.grad((alone.x * pull[at]).sum(), list(given.values()))
        total = [a + b for a, b in zip(total, part, strict=True)]
    for name, a, b in zip(given, found, total, strict=True):
        assert a.shape == given[name].shape
        assert torch.allclose(a, b, atol=1e-5), name


def test_one_bad_problem_among_many():
    q = randn(2, 3, 4)
    q[1, 2, 0] = torch.nan
    q.requires_grad_()
    sol = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1))
    want = torch.zeros(2, 3, dtype=torch.long)
    want[1, 2] = dfw.Status.NONFINITE
    assert torch.equal(sol.status.long(), want)
    assert torch.equal(sol.x.isnan().all(-1), want != 0)
    sol.x.nansum().backward()
    assert q.grad.isfinite().all()
    assert (q.grad[1, 2] == 0).all()


def test_one_bad_problem_of_a_function():
    c = randn(2, 3, 4)
    c[0, 1, 0] = torch.inf
    f = dfw.Smooth(lambda x, c: (x - c).square().sum(-1), c, shape=(4,))
    sol = dfw.solve(f, dfw.LpBall(2))
    assert sol.status[0, 1] == dfw.Status.NONFINITE
    assert (sol.status == 0).sum() == 5


@pytest.mark.parametrize("lead", [(0, 3), (3, 0), (1, 1), (2, 1, 1)])
def test_sizes_of_none_and_one(lead):
    q = randn(*lead, 4).requires_grad_()
    sol = dfw.solve(dfw.Quadratic(matrix(), q), dfw.Simplex())
    assert sol.x.shape == (*lead, 4)
    assert sol.status.shape == lead
    sol.x.sum().backward()
    assert q.grad.shape == q.shape


def test_starts_callbacks_and_step_sizes_have_the_shapes_of_the_call():
    q, seen = randn(3, 1, 4), []
    sol = dfw.solve(
        dfw.Quadratic(None, q),
        dfw.LpBall(1, rand(2)),
        x0=randn(2, 4),
        method="frank-wolfe",
        step_size=dfw.ShortStep(1 + rand(3, 1)),
        max_steps=5,
        callback=seen.append,
    )
    assert sol.x.shape == (3, 2, 4)
    assert {progress.x.shape for progress in seen} == {(3, 2, 4)}
    assert {progress.gap.shape for progress in seen} == {(3, 2)}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_second_derivatives_and_transforms():
    q, t = randn(2, 3, 4), rand(3)

    def x(q, t):
        return dfw.solve(dfw.Quadratic(matrix_, q), dfw.LpBall(2, t), tol=1e-12).x

    torch.manual_seed(1)
    matrix_ = matrix()
    leaves = 3 * q.requires_grad_(), t.requires_grad_()
    assert torch.autograd.gradcheck(x, leaves, atol=1e-5)
    assert torch.autograd.gradgradcheck(x, leaves, atol=1e-4)
    want = x(q, t).detach()
    mapped = torch.func.vmap(x, in_dims=(0, None))(q.detach(), t.detach())
    assert torch.allclose(mapped, want)
    _, along = torch.func.jvp(
        x, (q.detach(), t.detach()), (torch.ones_like(q), torch.ones(3).double())
    )
    assert along.shape == want.shape


def test_layer_takes_them_too():
    q = randn(2, 3, 4)
    x = dfw.DFWLayer(1)(None, q, radius=rand(3))
    assert x.shape == (2, 3, 4)
    assert dfw.DFWLayer(2)(matrix(2, 1), q, weight=rand(3, 4)).shape == (2, 3, 4)


BAD = [
    ("radius", lambda: dfw.solve(dfw.Quadratic(None, randn(2, 3, 4)), dfw.LpBall(1, rand(2)))),
    ("weight", lambda: dfw.solve(dfw.Quadratic(None, randn(2, 3, 4)), dfw.LpBall(1, 1.0, rand(5)))),
    ("x0", lambda: dfw.solve(dfw.Quadratic(None, randn(2, 3, 4)), dfw.LpBall(1), x0=randn(5))),
    ("P", lambda: dfw.solve(dfw.Quadratic(matrix(5, 1), randn(2, 3, 4)), dfw.LpBall(1))),
    ("P", lambda: dfw.solve(dfw.Quadratic(torch.eye(12, dtype=F64), randn(2, 3, 4)), dfw.Box())),
    ("P", lambda: dfw.solve(dfw.Quadratic(torch.eye(8, dtype=F64), randn(2, 4)), dfw.Box())),
    ("q", lambda: dfw.solve(dfw.Quadratic(None, randn(2, 3, 4)), dfw.Box(), shape=(4, 3))),
    ("shape", lambda: dfw.solve(dfw.Quadratic(None, randn(2, 3, 4)), dfw.Box(), shape=(2.5,))),
    ("shape", lambda: dfw.solve(dfw.LeastSquares(randn(5, 4), randn(5)), dfw.Box(), shape=(3, 2))),
    (
        "shape",
        lambda: dfw.solve(
            dfw.Smooth(lambda x: x.square().sum((-2, -1)), shape=(2, 2)), dfw.Box(), shape=(4, 1)
        ),
    ),
    (
        "upper",
        lambda: dfw.solve(dfw.Quadratic(None, randn(3, 4)), dfw.Box(0.0, rand(4, 3)), shape=(3, 4)),
    ),
    ("b", lambda: dfw.LeastSquares(randn(2, 5, 4), randn(3, 1, 6))),
    ("A", lambda: dfw.LeastSquares(randn(2, 5, 4), randn(3, 3, 5))),
]


@pytest.mark.parametrize(("name", "call"), BAD, ids=[f"{i}-{n}" for i, (n, _) in enumerate(BAD)])
def test_what_does_not_fit_is_named(name, call):
    with pytest.raises(ValueError, match=rf"^{name}:"):
        call()


def test_matrices_may_share_the_linear_term():
    """A q of the variable's shape is no batch of vectors."""
    q, P = randn(2, 2), matrix(3)
    found = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 0.5), shape=(2, 2))
    for i in range(3):
        alone = dfw.solve(dfw.Quadratic(P[i], q), dfw.LpBall(1, 0.5), shape=(2, 2))
        torch.testing.assert_close(found.x[i], alone.x)
    with pytest.raises(ValueError, match="P: batch of 3 problems does not go with the 2 of q"):
        dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 0.5))


@pytest.mark.parametrize(
    "call",
    [
        lambda q, r: dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, r)).x,
        lambda q, r: dfw.DFWLayer(p=1)(torch.eye(3, dtype=F64), q, radius=r),
        lambda q, r: dfw.SetLayer(lambda r: dfw.LpBall(1, r))(q, r=r),
    ],
)
def test_a_column_beside_a_batch_makes_pairs_and_says_so(call):
    """What a linear layer with one output returns is seldom meant for all pairs."""
    q, r = randn(4, 3), rand(4, 1)
    with pytest.warns(UserWarning, match=r"radius: .* make 4 x 4 problems.*squeeze") as caught:
        assert call(q, r).shape == (4, 4, 3)
    assert caught[0].filename == __file__
    for pair in ((q, r[:3]), (q[:1], r[:1]), (q, r[:, 0]), (q[:, None], r)):
        call(*pair)  # warnings are errors in tests
