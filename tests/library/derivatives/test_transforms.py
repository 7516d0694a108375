"""torch.func, forward mode and higher derivatives, around a call that solves.

The judge is a solution written apart from the library: Newton steps on the optimality conditions
from the known solution, with dense matrices. At that point they change no number, but each of them
doubles the order up to which autograd's derivatives of them are those of the solution.
"""

import itertools
import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import dfwlayer as dfw
from dfwlayer.engines import compiled
from helpers import F64, PS, close, make_case

# what torch itself does when forward mode is first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

NAMES = ("P", "q", "weight", "radius")
ALL = (0, 1, 2, 3)


def example(p, situation="active", rows=None, n=4, seed=71):
    """The case and its four tensors."""
    case = make_case("quadratic", p, situation, rows=rows, n=n, seed=seed)
    return case, tuple(case.params[name] for name in NAMES)


def solution(p, **settings):
    """x of (P, q, weight, radius); only the symmetric part of P counts."""

    def x(P, q, weight, radius):
        objective = dfw.Quadratic(0.5 * (P + P.mT), q)
        settings.setdefault("tol", 1e-14)
        return dfw.solve(objective, dfw.LpBall(p, radius, weight), **settings).x

    return x


def reference(p, x_star, inside=False):
    """The same function next to x_star, by Newton steps on the optimality conditions."""
    n = len(x_star)
    sign = torch.sign(x_star)

    def x(P, q, weight, radius):
        P, size = 0.5 * (P + P.mT), weight.abs()
        at_bound = (weight * x_star).abs() >= radius * (1 - 1e-9)
        free = torch.ones(n, dtype=torch.bool)
        if p == 1 and not inside:
            free = x_star != 0
        if p == math.inf:
            free = ~at_bound
        held = not inside and p < math.inf
        bound = sign * radius / size if p == math.inf else torch.zeros_like(q)

        def full(z):
            return bound.index_put((free.nonzero()[:, 0],), z[: int(free.sum())])

        def conditions(z):
            x = full(z)
            slope = P @ x + q
            if not held:
                return slope[free]
            part = (size * sign * x)[free]
            length = part.sum() if p == 1 else (part**p).sum() ** (1 / p)
            normal = (size * sign)[free] * (part / length) ** (p - 1)
            return torch.cat((slope[free] + z[-1] * normal, (length - radius)[None]))

        z = x_star[free]
        if held:
            multiplier = -((P @ x_star + q) * x_star).sum() / radius
            z = torch.cat((z, multiplier.detach()[None]))
        for _ in range(3):
            z = z - torch.linalg.solve(jacrev(conditions)(z), conditions(z))
        return full(z)

    return x


def curve(x, values, seed=5):
    """A number that depends on x along a line through the parameters, and the line's start."""
    gen = torch.Generator().manual_seed(seed)
    steps = [0.1 * torch.randn(v.shape, generator=gen, dtype=F64) for v in values]

    def along(s):
        y = x(*(v + s * step for v, step in zip(values, steps, strict=True)))
        return (y**2).sum() + y[0]

    return along, torch.zeros((), dtype=F64)


def compare(got, want, rtol=1e-6):
    """Nested tuples of derivatives, relative to the largest of them."""
    if isinstance(got, tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            compare(a, b, rtol)
    else:
        assert got.shape == want.shape
        close(got, want, rtol=0, atol=rtol * (1 + float(want.abs().max())))


@pytest.mark.parametrize("situation", ["active", "inside"])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians(transform, p, situation):
    case, values = example(p, situation)
    want = torch.autograd.functional.jacobian(
        reference(p, case.x_star, situation == "inside"), values
    )
    compare(transform(solution(p), argnums=ALL)(*values), want)


@pytest.mark.parametrize("situation", ["active", "inside"])
@pytest.mark.parametrize("p", PS)
def test_second_derivatives_in_every_way(p, situation):
    """Forward over reverse, the other ways, and autograd's own double backward."""
    case, values = example(p, situation, n=3)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=F64)

    def loss(x):
        return lambda *parameters: (weights * x(*parameters) ** 2).sum()

    expected = reference(p, case.x_star, situation == "inside")
    want = torch.autograd.functional.hessian(loss(expected), values)
    mine = loss(solution(p))
    compare(hessian(mine, argnums=ALL)(*values), want)
    compare(jacrev(jacrev(mine, argnums=ALL), argnums=ALL)(*values), want)
    compare(jacfwd(jacfwd(mine, argnums=ALL), argnums=ALL)(*values), want)
    compare(torch.autograd.functional.hessian(mine, values), want)


@pytest.mark.parametrize("p", PS)
def test_third_derivatives(p):
    case, values = example(p)
    want_along, start = curve(reference(p, case.x_star), values)
    along, start = curve(solution(p), values)
    want = grad(grad(grad(want_along)))(start)
    compare(grad(grad(grad(along)))(start), want)
    compare(jacfwd(jacrev(jacfwd(along)))(start), want)
    leaf = start.clone().requires_grad_()
    derivative = along(leaf)
    for _ in range(3):
        (derivative,) = torch.autograd.grad(derivative, leaf, create_graph=True)
    compare(derivative, want)


@pytest.mark.parametrize("constraint", ["p=1", "p=3", "p=inf"])
@pytest.mark.parametrize(
    "objective", ["quadratic", "shared quadratic", "identity", "least squares", "logistic"]
)
def test_gradgradcheck_of_batches(objective, constraint):
    """Against finite differences of the gradient, which has its own tests."""
    case = make_case(objective, constraint, "signed", rows=2, n=3, seed=72)
    names = list(case.params)

    def x(*leaves):
        params = dict(zip(names, leaves, strict=True))
        if "P" in params:
            params["P"] = 0.5 * (params["P"] + params["P"].mT)
        return dfw.solve(*case.build(params), tol=1e-14).x

    leaves = [v.clone().requires_grad_() for v in case.params.values()]
    settings = {"eps": 1e-4, "atol": 1e-4, "rtol": 1e-3, "fast_mode": True}
    assert torch.autograd.gradcheck(x, leaves, check_forward_ad=True, **settings)
    assert torch.autograd.gradgradcheck(x, leaves, check_fwd_over_rev=True, **settings)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("situation", ["active", "zero weight"])
def test_create_graph_does_not_change_the_gradient(p, situation):
    """And second derivatives are finite, also at radius 0 and far inside."""
    case, (P, q, weight, _) = example(p, situation)
    v = torch.arange(1.0, 5.0, dtype=F64)
    for radius in (0.0, float(case.params["radius"]), 100.0):
        t = torch.tensor(radius, dtype=F64)
        leaves = [a.clone().requires_grad_() for a in (P, q, weight, t)]
        x = solution(p)(*leaves)
        first = torch.autograd.grad((v * x).sum(), leaves, retain_graph=True)
        again = torch.autograd.grad((v * x).sum(), leaves, create_graph=True)
        for a, b in zip(first, again, strict=True):
            close(a, b, rtol=1e-12, atol=1e-12)
        second = torch.autograd.grad(sum((g**2).sum() for g in again), leaves)
        assert all(torch.isfinite(g).all() for g in second)


@pytest.mark.parametrize("chosen", range(4))
def test_create_graph_for_one_parameter_of_four(chosen):
    case, values = example(1.5)
    leaves = [v.clone().requires_grad_() for v in values]
    derivatives = []
    for x in (solution(1.5), reference(1.5, case.x_star)):
        loss = (x(*leaves) ** 3).sum()
        (first,) = torch.autograd.grad(loss, leaves[chosen], create_graph=True)
        derivatives.append((first.detach(), *torch.autograd.grad((first**2).sum(), leaves)))
    compare(*derivatives)


@pytest.mark.parametrize("p", PS)
def test_vmap_over_any_of_the_arguments(p):
    batched = example(p, rows=3)[1]
    single = tuple(v[1] for v in batched)
    x = solution(p)
    for chosen in itertools.product((False, True), repeat=4):
        if not any(chosen):
            continue
        values = [b if c else s for b, s, c in zip(batched, single, chosen, strict=True)]
        dims = tuple(0 if c else None for c in chosen)
        got = vmap(x, in_dims=dims)(*values)
        rows = [[v[k] if c else v for v, c in zip(values, chosen, strict=True)] for k in range(3)]
        close(got, torch.stack([x(*row) for row in rows]), rtol=1e-7, atol=1e-9)


def test_vmap_is_one_batched_solve(monkeypatch):
    """Not a loop: the method runs once, on all the problems, and never on more than asked for."""
    seen = []
    run = dfw.ProjectedNewton.run

    def counted(self, problem, x, settings):
        seen.append(tuple(x.shape))
        return run(self, problem, x, settings)

    monkeypatch.setattr(dfw.ProjectedNewton, "run", counted)
    monkeypatch.setattr(compiled, "_loaded", {"cpu": None, "cuda": None})
    _, (P, q, weight, radius) = example(1.0, rows=5, n=6)
    x = vmap(solution(1.0), in_dims=(0, 0, 0, 0))(P, q, weight, radius)
    assert seen == [(5, 6)]
    seen.clear()
    jacobian = vmap(jacrev(solution(1.0), argnums=1))(P, q, weight, radius)
    assert seen == [(5, 6)]
    assert x.shape == (5, 6)
    assert jacobian.shape == (5, 6, 6)


def test_vmap_inside_vmap_and_over_batches():
    _, (P, q, weight, radius) = example(1.5, rows=3)
    x = solution(1.5)
    want = torch.stack(
        [torch.stack([x(P[i], q[j], weight[i], radius[j]) for j in range(3)]) for i in range(3)]
    )
    inner = vmap(x, in_dims=(None, 0, None, 0))
    close(vmap(inner, in_dims=(0, None, 0, None))(P, q, weight, radius), want, rtol=1e-7)

    def many(P, weight):  # itself a batch of problems
        return x(P, q, weight, radius)

    close(vmap(many)(P, weight), want, rtol=1e-7)
    columns = vmap(x, in_dims=(2, 1, None, None), out_dims=1)(
        P.permute(1, 2, 0), q.mT, weight[0], radius[0]
    )
    rows = [x(P[k], q[k], weight[0], radius[0]) for k in range(3)]
    close(columns, torch.stack(rows, 1), rtol=1e-7)


@pytest.mark.parametrize("p", [1.0, 1.5, math.inf])
@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian])
def test_vmap_of_derivatives_and_derivatives_of_batches(transform, p):
    _, values = example(p, rows=3, n=3)

    def each(*parameters):
        x = solution(p)(*parameters)
        return (x**3).sum() if transform is hessian else x

    rows = [transform(each, argnums=(1, 2, 3))(*(v[k] for v in values)) for k in range(3)]
    got = vmap(transform(each, argnums=(1, 2, 3)))(*values)
    compare(got, _stacked(rows))
    if transform is hessian:
        return
    together = transform(each, argnums=(0, 3))(*values)
    for k, m in itertools.product(range(3), repeat=2):
        alone = transform(each, argnums=(0, 3))(*(v[k] for v in values))
        for block, row in zip(together, alone, strict=True):
            expected = row if k == m else torch.zeros_like(row)
            close(block[k, :, m], expected, rtol=1e-6, atol=1e-8)


def _stacked(rows):
    if isinstance(rows[0], tuple):
        return tuple(_stacked(parts) for parts in zip(*rows, strict=True))
    return torch.stack(rows)


def test_the_whole_solution_is_mapped():
    _, (P, q, weight, radius) = example(1.0, rows=4)

    def fields(P, q, weight, radius):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1.0, radius, weight))
        return sol.x, sol.value, sol.gap, sol.num_steps, sol.status

    got, want = vmap(fields)(P, q, weight, radius), fields(P, q, weight, radius)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        close(a, b, rtol=1e-12, atol=1e-15)


def test_a_bad_problem_stays_alone_inside_vmap():
    _, (P, q, weight, radius) = example(1.0, rows=3)
    q[1, 0] = math.nan

    def solve(q):
        return dfw.solve(dfw.Quadratic(P[0], q), dfw.LpBall(1.0, radius[0], weight[0]))

    status = vmap(lambda q: solve(q).status)(q)
    assert status.tolist() == [dfw.Status.CONVERGED, dfw.Status.NONFINITE, dfw.Status.CONVERGED]
    slopes = vmap(grad(lambda q: torch.nan_to_num(solve(q).x).sum()))(q)
    assert (slopes[1] == 0).all()
    assert (slopes[[0, 2]] != 0).any(1).all()


@pytest.mark.parametrize("calling", ["single", "rows"])
def test_functions_written_in_torch(calling):
    """`Smooth` is mapped one problem after the other, whatever fn expects."""
    gen = torch.Generator().manual_seed(3)
    F = torch.randn(5, 3, generator=gen, dtype=F64)
    c = torch.randn(*(() if calling == "single" else (2,)), 3, generator=gen, dtype=F64)
    radii = torch.tensor([0.1, 0.3], dtype=F64)

    def fn(x, F, c):
        return torch.logsumexp(x @ F.mT, -1) + (x * x).sum(-1) + (c * x).sum(-1)

    def x(F, c, radius):
        return dfw.solve(dfw.Smooth(fn, F, c, shape=3), dfw.LpBall(1.5, radius), tol=1e-14).x

    got = vmap(x, in_dims=(None, 0, 0))(F, torch.stack((c, -c)), radii)
    close(got, torch.stack((x(F, c, radii[0]), x(F, -c, radii[1]))), rtol=1e-9)
    values = (F, c, radii[1])
    want = torch.autograd.functional.jacobian(x, values)
    compare(jacrev(x, argnums=(0, 1, 2))(*values), want)
    compare(jacfwd(x, argnums=(0, 1, 2))(*values), want)


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_unrolled_solves(p):
    """They are differentiated as they are, by running them again."""
    _, values = example(p, rows=2)
    x = solution(p, method="dfw", tol=0.0, max_steps=6)
    single = tuple(v[0] for v in values)
    want = torch.autograd.functional.jacobian(x, single)
    compare(jacrev(x, argnums=ALL)(*single), want)
    compare(jacfwd(x, argnums=ALL)(*single), want)
    close(vmap(x)(*values), x(*values), rtol=1e-12)


def test_forward_mode():
    _, (P, q, weight, radius) = example(1.5)
    x = solution(1.5)
    direction = torch.arange(1.0, 5.0, dtype=F64)
    want = torch.autograd.functional.jacobian(lambda q: x(P, q, weight, radius), q) @ direction
    with torch.no_grad():  # which is for the other mode
        point, moved = jvp(lambda q: x(P, q, weight, radius), (q,), (direction,))
    close(point, x(P, q, weight, radius), rtol=1e-14)
    close(moved, want, rtol=1e-9)
    with forward_ad.dual_level():
        dual = x(P, forward_ad.make_dual(q, direction), weight, radius)
        close(forward_ad.unpack_dual(dual).tangent, want, rtol=1e-9)


def test_forward_mode_through_a_backward_pass_from_before():
    _, (P, q, weight, radius) = example(1.5)
    leaf = q.clone().requires_grad_()
    x = solution(1.5)(P, leaf, weight, radius)
    v = torch.arange(1.0, 5.0, dtype=F64)
    with forward_ad.dual_level():
        (pulled,) = torch.autograd.grad(x, leaf, forward_ad.make_dual(torch.ones_like(v), v))
        tangent = forward_ad.unpack_dual(pulled).tangent
    (want,) = torch.autograd.grad(solution(1.5)(P, leaf, weight, radius), leaf, v)
    close(tangent, want, rtol=1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("p", [1.0, 3.0])
def test_transforms_on_a_gpu(p):
    """The second and later calls there come from recordings."""
    _, values = example(p, rows=3)

    def loss(*parameters):
        return (solution(p)(*parameters) ** 3).sum()

    def derivatives(values):
        x = vmap(solution(p))(*values)
        return x, vmap(jacrev(solution(p), argnums=ALL))(*values), vmap(hessian(loss))(*values)

    want = derivatives(values)
    for _ in range(3):
        compare(derivatives([v.cuda() for v in values]), want)


def test_gradients_of_each_sample():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4, dtype=F64)
            self.layer = dfw.DFWLayer(1.5, tol=1e-13)

        def forward(self, features):
            return self.layer(None, self.linear(features), radius=0.4)

    model = Model()
    features, targets = torch.randn(2, 5, 4, dtype=F64)

    def loss(parameters, features, target):
        return (functional_call(model, parameters, (features,)) - target).square().sum()

    parameters = dict(model.named_parameters())
    got = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features, targets)
    for k in range(5):
        model.zero_grad()
        loss(parameters, features[k], targets[k]).backward()
        for name, parameter in parameters.items():
            close(got[name][k], parameter.grad, rtol=1e-8, atol=1e-12)
