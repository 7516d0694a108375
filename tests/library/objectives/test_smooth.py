"""Smooth: any convex function written in torch, single, batched, mapped, with matrix variables."""

import math

import pytest
import torch
from scipy.optimize import minimize

import dfwlayer as dfw
from dfwlayer import Status
from helpers import F64, SMOOTH, close, draw, huber, log_sum_exp, logistic, lp_norm, make_case

FUNCTIONS = {"logistic": logistic, "log-sum-exp": log_sum_exp, "huber": huber}


@pytest.mark.parametrize("objective", SMOOTH)
def test_batch_is_read_off_the_output(objective):
    case = make_case(objective, "p=1", rows=3)
    fn, F, c = FUNCTIONS[objective], case.params["F"], case.params["c"]
    batched = dfw.Smooth(fn, F, c, shape=(6,))
    single = dfw.Smooth(fn, F, c[0], shape=(6,))
    assert batched.batch == 3
    assert single.batch is None
    ball = dfw.LpBall(1.0, 1.0)
    assert dfw.solve(batched, ball, max_steps=3).x.shape == (3, 6)
    assert dfw.solve(single, ball, max_steps=3).x.shape == (6,)
    assert dfw.solve(single, ball, max_steps=3).value.shape == ()


@pytest.mark.parametrize("method", ["auto", "dfw", "frank-wolfe"])
def test_single_function_meets_a_batched_constraint(method):
    """vmap over the radii gives what a loop over the radii gives."""
    gen = torch.Generator().manual_seed(0)
    F = torch.randn(7, 4, generator=gen, dtype=F64)

    def fn(x, F):  # torch.dot works for one problem only
        return torch.nn.functional.softplus(F @ x - 1).sum() + torch.dot(x, x)

    radii = torch.tensor([0.1, 0.5, 3.0], dtype=F64)
    F.requires_grad_()
    objective = dfw.Smooth(fn, F, shape=(4,))
    whole = dfw.solve(objective, dfw.LpBall(1.0, radii), method=method, tol=1e-8, max_steps=200)
    loss = (whole.x * torch.arange(12, dtype=F64).reshape(3, 4)).sum()
    (got,) = torch.autograd.grad(loss, F)
    total = torch.zeros_like(F)
    for i, radius in enumerate(radii):
        one = dfw.solve(objective, dfw.LpBall(1.0, radius), method=method, tol=1e-8, max_steps=200)
        close(whole.x[i], one.x, rtol=1e-6, atol=1e-7)
        loss = (one.x * torch.arange(12, dtype=F64).reshape(3, 4)[i]).sum()
        total += torch.autograd.grad(loss, F)[0]
    close(got, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_matrix_variable(p, batch):
    """A variable of shape (m, k) is the flattened problem in another shape."""
    m, k = 3, 2
    lead = () if batch is None else (batch,)
    gen = torch.Generator().manual_seed(1)
    target = torch.randn(*lead, m, k, generator=gen, dtype=F64)
    weight = torch.rand(m, k, generator=gen, dtype=F64) + 0.5

    def fn(X, Y):
        return 0.5 * ((X - Y) ** 2).sum((-2, -1))

    objective = dfw.Smooth(fn, target, shape=(m, k), lipschitz=1.0)
    sol = dfw.solve(objective, dfw.LpBall(p, 0.8, weight), tol=1e-9)
    assert sol.x.shape == (*lead, m, k)
    flat = dfw.solve(
        dfw.Quadratic(None, -target.reshape(*lead, m * k)),
        dfw.LpBall(p, 0.8, weight.reshape(-1)),
        tol=1e-9,
    )
    close(sol.x.reshape(flat.x.shape), flat.x, rtol=0, atol=2e-4)
    assert (lp_norm((weight * sol.x).reshape(*lead, -1), p) <= 0.8 * (1 + 1e-15)).all()


@pytest.mark.parametrize("objective", SMOOTH)
def test_against_scipy(objective):
    """Random data, nothing designed; SLSQP on x = u − v, u, v ≥ 0 for the ℓ1 ball."""
    gen = torch.Generator().manual_seed(3)
    n, t = 5, 0.6
    F = torch.randn(9, n, generator=gen, dtype=F64)
    c = torch.randn(n, generator=gen, dtype=F64)
    fn = FUNCTIONS[objective]

    def split(z):
        z = torch.from_numpy(z).requires_grad_()
        value = fn(z[:n] - z[n:], F, c)
        (grad,) = torch.autograd.grad(value, z)
        return value.item(), grad.numpy()

    best = minimize(
        split,
        torch.full((2 * n,), 0.01, dtype=F64).numpy(),
        jac=True,
        method="SLSQP",
        bounds=[(0, None)] * (2 * n),
        constraints={"type": "ineq", "fun": lambda z: t - z.sum()},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    sol = dfw.solve(dfw.Smooth(fn, F, c, shape=(n,)), dfw.LpBall(1.0, t), tol=1e-10)
    assert float(sol.value) == pytest.approx(best.fun, rel=1e-8)
    close(sol.x, torch.from_numpy(best.x[:n] - best.x[n:]), rtol=0, atol=1e-4)


def test_entropy_like_needs_no_params():
    """x with the least Σ exp(x) + exp(−2x) on a ball: separable, found coordinate by coordinate."""
    objective = dfw.Smooth(lambda x: (torch.exp(x) + torch.exp(-2 * x)).sum(-1), shape=(3,))
    assert objective.dtype == torch.float32
    sol = dfw.solve(objective, dfw.LpBall(2.0, 10.0), tol=1e-6)
    # interior: exp(x) = 2 exp(−2x)
    close(sol.x, torch.full((3,), math.log(2) / 3), rtol=0, atol=5e-3)


def test_params_that_are_not_tensors_are_passed_on():
    target = torch.randn(4, dtype=F64)
    half = dfw.Smooth(lambda x, y, s: s * (x - y).pow(2).sum(-1), target, 0.5, shape=4)
    sol = dfw.solve(half, dfw.LpBall(2.0, 0.3), tol=1e-10)
    close(sol.x, 0.3 * target / target.norm(), rtol=0, atol=1e-5)


def test_two_params_of_one_batch():
    """One parameter per problem, another shared; the shared one gets the summed gradient."""
    gen = torch.Generator().manual_seed(4)
    F = torch.randn(6, 3, generator=gen, dtype=F64, requires_grad=True)
    c = torch.randn(4, 3, generator=gen, dtype=F64, requires_grad=True)
    v = torch.randn(4, 3, generator=gen, dtype=F64)
    x = dfw.solve(dfw.Smooth(logistic, F, c, shape=(3,)), dfw.LpBall(1.0, 0.4), tol=1e-11).x
    gF, gc = torch.autograd.grad((v * x).sum(), (F, c))
    total = torch.zeros_like(F)
    for i in range(4):
        one = dfw.solve(
            dfw.Smooth(logistic, F, c[i], shape=(3,)), dfw.LpBall(1.0, 0.4), tol=1e-11
        ).x
        a, b = torch.autograd.grad((v[i] * one).sum(), (F, c))
        total += a
        close(gc[i], b[i], rtol=1e-5, atol=1e-7)
    close(gF, total, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [None, 2, "vmap"])
@pytest.mark.parametrize("method", ["auto", "dfw"])
def test_tensors_in_a_closure_get_their_gradient(method, rows):
    """Such as the parameters of a module, although no tensor among the arguments asks for one."""
    gen = torch.Generator().manual_seed(6)
    F = torch.randn(7, 4, generator=gen, dtype=F64)
    c = torch.randn(4, generator=gen, dtype=F64)
    c = torch.stack((c, -2 * c)) if rows == 2 else c
    radius = torch.tensor([0.3, 0.5], dtype=F64) if rows == "vmap" else 0.4
    v = torch.randn(4, generator=gen, dtype=F64)

    def loss(F):
        objective = dfw.Smooth(lambda x, c: logistic(x, F, c), c, shape=(4,))
        steps = {"max_steps": 3} if method == "dfw" else {}  # of which each is smooth
        x = dfw.solve(objective, dfw.LpBall(2.0, radius), method=method, tol=1e-14, **steps).x
        return (x @ v).sum()

    at = F.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(at), at)
    d, step = torch.randn(7, 4, generator=gen, dtype=F64), 1e-6
    with torch.no_grad():
        slope = (loss(F + step * d) - loss(F - step * d)) / (2 * step)
    assert abs(slope) > 1e-3
    close((got * d).sum(), slope, rtol=1e-4)


# ---------------------------------------------------------------------------------------------
# parameters that are no real numbers, functions of nothing, and what is not to be differentiated

CLASSES = 4


def labelled(x, label, c):
    """Cross entropy of a label per problem."""
    return torch.nn.functional.cross_entropy(x - c, label, reduction="none") + x.square().sum(-1)


@pytest.mark.parametrize("shape", ["labels alone", "labels and centres"])
def test_integer_parameters_are_per_problem(shape):
    label = torch.tensor([3, 0, 1, 1, 2])
    c = torch.randn(len(label), CLASSES, dtype=F64)
    if shape == "labels alone":
        c = torch.zeros(CLASSES, dtype=F64)
    c.requires_grad_()
    f = dfw.Smooth(labelled, label, c, shape=(CLASSES,))
    assert f.batch_sizes == {"fn": 5}
    sol = dfw.solve(f, dfw.LpBall(2, 0.1), tol=1e-12)
    (slope,) = torch.autograd.grad(sol.x[:, 0].sum(), c)
    alone = []
    for i in range(len(label)):
        own = c if c.dim() == 1 else c[i]
        g = dfw.Smooth(labelled, label[i : i + 1], own, shape=(CLASSES,))
        alone.append(dfw.solve(g, dfw.LpBall(2, 0.1), tol=1e-12).x[0])
    close(sol.x, torch.stack(alone), rtol=1e-9, atol=1e-11)
    (want,) = torch.autograd.grad(torch.stack(alone)[:, 0].sum(), c)
    close(slope, want, rtol=1e-7, atol=1e-9)


def test_a_bad_row_takes_its_label_along():
    label = torch.tensor([3, 0, 1])
    c = torch.randn(3, CLASSES, dtype=F64)
    spoilt = c.clone()
    spoilt[1, 2] = torch.nan
    spoilt.requires_grad_()
    sol = dfw.solve(dfw.Smooth(labelled, label, spoilt, shape=(CLASSES,)), dfw.LpBall(2, 0.1))
    assert sol.status.tolist() == [0, dfw.Status.NONFINITE, 0]
    others = [0, 2]
    sound = dfw.Smooth(labelled, label[others], c[others], shape=(CLASSES,))
    close(sol.x[others], dfw.solve(sound, dfw.LpBall(2, 0.1)).x, rtol=1e-9, atol=1e-11)
    (slope,) = torch.autograd.grad(sol.x.nansum(), spoilt)
    assert (slope[1] == 0).all()
    assert torch.isfinite(slope).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, for forward mode
def test_integer_parameters_inside_of_transforms():
    label, c = torch.tensor([3, 0, 1]), torch.randn(3, CLASSES, dtype=F64)

    def x(c):
        f = dfw.Smooth(labelled, label, c, shape=(CLASSES,))
        return dfw.solve(f, dfw.LpBall(2, 0.1), tol=1e-13).x

    want = torch.autograd.functional.jacobian(x, c)
    close(torch.func.jacrev(x)(c), want, rtol=1e-7, atol=1e-9)
    close(torch.func.jacfwd(x)(c), want, rtol=1e-7, atol=1e-9)
    torch.autograd.gradgradcheck(x, c.requires_grad_())


@pytest.mark.parametrize("method", ["auto", "dfw", "frank-wolfe", "active-set"])
@pytest.mark.parametrize("rows", [None, 3])
def test_a_function_that_leaves_out_x(method, rows):
    """Every point is a solution; the start is one."""
    lead = () if rows is None else (rows,)
    c = torch.ones(*lead, 4, requires_grad=True)
    settings = {"method": method, "max_steps": 20}
    sol = dfw.solve(dfw.Smooth(lambda _, c: c.sum(-1), c, shape=4), dfw.Simplex(), **settings)
    assert sol.x.shape == (*lead, 4)
    close(sol.x.sum(-1), torch.ones(lead), rtol=1e-6)
    assert (sol.gap == 0).all()
    (slope,) = torch.autograd.grad(sol.x.sum(), c, allow_unused=True)
    assert slope is None or (slope == 0).all()


@pytest.mark.parametrize("mode", ["implicit", "unroll"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_x_requires_a_gradient_only_if_something_does(mode, shape):
    c = torch.randn(shape, dtype=F64)
    radius = torch.tensor(0.3, dtype=F64)

    def x(fn, *params, radius=radius):
        return dfw.solve(
            dfw.Smooth(fn, *params, shape=4), dfw.LpBall(2, radius), differentiate=mode
        ).x

    def distance(x, c):
        return ((x - c) ** 2).sum(-1)

    def hidden(x, _):
        return ((x - held) ** 2).sum(-1)

    held = c
    assert not x(distance, c).requires_grad
    assert not x(hidden, c).requires_grad
    assert x(distance, c.clone().requires_grad_()).requires_grad
    assert x(distance, c, radius=radius.clone().requires_grad_()).requires_grad
    held = c.clone().requires_grad_()
    found = x(hidden, c)
    assert found.requires_grad
    (slope,) = torch.autograd.grad(found[..., 0].sum(), held)
    assert slope.abs().sum() > 0
    with torch.no_grad():
        assert not x(hidden, c).requires_grad


def test_lipschitz_per_problem_is_a_batch():
    c = torch.randn(4, dtype=F64)
    f = dfw.Smooth(lambda x, c: ((x - c) ** 2).sum(-1), c, shape=4, lipschitz=2 * torch.ones(3))
    sol = dfw.solve(f, dfw.LpBall(1, 0.5), method="frank-wolfe")
    assert sol.x.shape == (3, 4)
    with pytest.raises(
        ValueError, match="radius: batch of 2 problems does not go with the 3 of lip"
    ):
        dfw.solve(f, dfw.LpBall(1, torch.ones(2, dtype=F64)))
    rule = dfw.ShortStep(torch.ones(3))
    with pytest.raises(ValueError, match="lipschitz: expected a number or one for each of"):
        dfw.solve(dfw.Quadratic(None, c.expand(2, 4)), dfw.LpBall(1), step_size=rule, method="dfw")


def spoiled_alone(fn, params, place, n=4, **settings):
    """The solutions beside a bad problem, and those without it."""
    bad = [p.clone() if isinstance(p, torch.Tensor) else p for p in params]
    bad[place][1] = torch.nan
    box = dfw.Box(-torch.ones(4, n, dtype=F64), 1.0)
    sound = dfw.solve(dfw.Smooth(fn, *params, shape=(n,)), box, **settings)
    return dfw.solve(dfw.Smooth(fn, *bad, shape=(n,)), box, **settings), sound


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, F, d: 0.5 * (x @ F.mT - d).square().sum(-1),
        lambda x, F, d: torch.nn.functional.softplus(d * (x @ F.mT)).sum(-1) + x.square().sum(-1),
        lambda x, F, d: torch.relu(x @ F.mT - d).square().sum(-1) + x.square().sum(-1),
        lambda x, F, d: torch.where(d > 0, x @ F.mT - d, x).square().sum(-1),
    ],
)
def test_a_matrix_that_all_share_may_have_as_many_rows_as_there_are_problems(fn):
    F, d = draw(4, 4), draw(4, 4, seed=1).mT  # which is not contiguous
    beside, alone = spoiled_alone(fn, (F, d), 1)
    assert beside.status.tolist().count(int(Status.NONFINITE)) == 1
    rest = [0, 2, 3]
    torch.testing.assert_close(beside.x[rest], alone.x[rest], rtol=0, atol=1e-12)


def test_the_parts_of_a_parameter_may_be_matrices_in_any_layout():
    F, W = draw(4, 4), draw(4, 4, 4, seed=1).mT

    def fn(x, F, W):
        return (x @ F.mT - (W @ x.unsqueeze(-1)).squeeze(-1) - 1).square().sum(-1)

    beside, alone = spoiled_alone(fn, (F, W), 1)
    rest = [0, 2, 3]
    torch.testing.assert_close(beside.x[rest], alone.x[rest], rtol=0, atol=1e-12)


def test_integers_that_all_share_may_be_as_many_as_the_problems():
    """Indices of coordinates are shared; labels of problems are not."""
    weights, places, labels = (
        draw(4, 4).abs(),
        torch.tensor([3, 2, 1, 0]),
        torch.tensor([0, 1, 2, 0]),
    )

    def fn(x, weights, places, labels):
        scores = (weights * x)[:, places]
        return torch.nn.functional.cross_entropy(scores, labels, reduction="none") + x.square().sum(
            -1
        )

    beside, alone = spoiled_alone(fn, (weights, places, labels), 0)
    rest = [0, 2, 3]
    torch.testing.assert_close(beside.x[rest], alone.x[rest], rtol=0, atol=1e-12)


def test_what_all_share_may_not_be_bad():
    F, d = draw(4, 4), draw(4, 4, seed=1)
    F[2, 0] = torch.nan
    objective = dfw.Smooth(lambda x, F, d: 0.5 * (x @ F.mT - d).square().sum(-1), F, d, shape=(4,))
    with pytest.raises(ValueError, match=r"params\[0\]: 1 of 16 values are NaN"):
        dfw.solve(objective, dfw.Box(-1.0, 1.0))


def test_a_bad_set_leaves_a_function_without_a_batch_as_it_is():
    """Its vector of four numbers is no batch of four problems."""
    d, radius = draw(4), torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=F64)
    for fn in (lambda x, d: (x - d).square().sum(-1), lambda x, d: (x - d) @ (x - d)):
        sol = dfw.solve(dfw.Smooth(fn, d, shape=(4,)), dfw.LpBall(2, radius))
        for i in (0, 2, 3):
            own = dfw.solve(dfw.Smooth(fn, d, shape=(4,)), dfw.LpBall(2, radius[i]))
            torch.testing.assert_close(sol.x[i], own.x, rtol=0, atol=1e-9)
