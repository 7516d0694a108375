"""Unrolled gradients by gradcheck, implicit ones by finite differences of a converged solve."""

import math

import pytest
import torch

import dfwlayer as dfw
from helpers import DEVICES, F64, METHODS, PS, SETS, SITUATIONS, close, make_case, solved


def symmetric(params):
    """Gradients in P are for symmetric changes."""
    return {k: 0.5 * (v + v.mT) if k == "P" else v for k, v in params.items()}


@pytest.mark.parametrize("situation", ["signed", "inside", "zero weight"])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", ["dfw", "frank-wolfe"])
def test_unroll_gradcheck(method, p, situation):
    case = make_case("quadratic", p, situation, rows=None, n=4, seed=41)
    names = list(case.params)

    def x(*leaves):
        params = symmetric(dict(zip(names, leaves, strict=True)))
        return dfw.solve(
            *case.build(params), method=method, differentiate="unroll", tol=0.0, max_steps=7
        ).x

    leaves = [v.clone().requires_grad_() for v in case.params.values()]
    if situation == "zero weight":  # |w| has a kink at 0: weights are held
        leaves[names.index("weight")].requires_grad_(False)
    assert torch.autograd.gradcheck(x, leaves, atol=1e-6)


@pytest.mark.parametrize("objective", ["identity", "least squares", "logistic", "log-sum-exp"])
@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, math.inf])
def test_unroll_gradcheck_of_objectives(p, objective):
    case = make_case(objective, p, "signed", rows=2, n=3, seed=42)
    names = list(case.params)

    def x(*leaves):
        return dfw.solve(
            *case.build(dict(zip(names, leaves, strict=True))),
            method="dfw",
            tol=0.0,
            max_steps=4,
        ).x

    assert torch.autograd.gradcheck(x, [v.clone().requires_grad_() for v in case.params.values()])


@pytest.mark.parametrize("rule", [dfw.ExactStep(), dfw.OpenLoop(2), dfw.ShortStep(5.0)], ids=repr)
def test_unroll_gradcheck_of_rules(rule):
    case = make_case("quadratic", 1.0, "signed", rows=None, n=3, seed=43)
    names = list(case.params)

    def x(*leaves):
        params = symmetric(dict(zip(names, leaves, strict=True)))
        return dfw.solve(*case.build(params), method="dfw", tol=0.0, max_steps=6, step_size=rule).x

    assert torch.autograd.gradcheck(x, [v.clone().requires_grad_() for v in case.params.values()])


def test_unroll_gradcheck_beyond_small_n():
    """L comes from Lanczos there, and its gradient with it; in q, weight and radius it has none."""
    case = make_case("shared quadratic", 1.0, "signed", rows=None, n=66, seed=44)
    leaves = [case.params[k].clone().requires_grad_() for k in ("q", "radius")]

    def x(q, radius):
        return dfw.solve(*case.problem(q=q, radius=radius), method="dfw", tol=0.0, max_steps=3).x

    assert torch.autograd.gradcheck(x, leaves, fast_mode=True)


def direction_like(params, gen):
    return symmetric(
        {k: torch.randn(v.shape, generator=gen, dtype=F64).to(v) for k, v in params.items()}
    )


def check_implicit(case, solve, names=None, rtol=1e-3, atol=1e-6, h=1e-3):
    """⟨gradient, direction⟩ against central differences, each parameter on its own.

    A gap at the rounding floor 1e-16 leaves x uncertain by 1e-8, so h is not small; the curvature
    of x* in h costs 1e-6.
    """
    gen = torch.Generator().manual_seed(0)
    leaves = {k: v.clone().requires_grad_() for k, v in case.params.items()}
    x = solve(leaves)
    v = torch.randn(x.shape, generator=gen, dtype=F64).to(x)
    grads = torch.autograd.grad((v * x).sum(), list(leaves.values()))
    gradient = dict(zip(leaves, grads, strict=True))
    directions = direction_like(case.params, gen)
    directions["weight"] = torch.where(case.params["weight"] == 0, 0, directions["weight"])
    names = names or tuple(case.params)
    moved = [
        case.params | {name: case.params[name] + sign * h * directions[name]}
        for name in names
        for sign in (1, -1)
    ]
    if all(len(value) == len(x) for value in case.params.values()):  # one batch of all of them
        stacked = {k: torch.cat([params[k] for params in moved]) for k in case.params}
        points = solve(stacked).reshape(len(moved), *x.shape)
    else:
        points = torch.stack([solve(params) for params in moved])
    for name, ahead, behind in zip(names, points[::2], points[1::2], strict=True):
        assert torch.isfinite(gradient[name]).all(), name
        want = (v * (ahead - behind)).sum().item() / (2 * h)
        got = (gradient[name] * directions[name]).sum().item()
        scale = (v * (ahead - behind)).abs().sum().item() / (2 * h)
        assert got == pytest.approx(want, abs=rtol * scale + atol), name


def solver(case, method, tol=0.0, max_steps=400):
    def solve(params):
        return dfw.solve(
            *case.build(params),
            method=method,
            differentiate="implicit",
            tol=tol,
            max_steps=max_steps,
        ).x

    return solve


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("constraint", SETS)
@pytest.mark.parametrize("method", ["auto", "frank-wolfe"])
def test_implicit_against_finite_differences(method, constraint, situation):
    case = make_case("quadratic", constraint, situation, rows=2, n=5, seed=45)
    if not METHODS[method].exact(case.p) or (method == "frank-wolfe" and situation == "inside"):
        pytest.skip("does not converge far enough for finite differences")
    check_implicit(case, solver(case, method))


@pytest.mark.parametrize("constraint", ["p=1", "p=2", "p=3", "p=inf"])
@pytest.mark.parametrize(
    "objective",
    [
        "shared quadratic",
        "identity",
        "least squares",
        "COO least squares",
        "logistic",
        "log-sum-exp",
    ],
)
def test_implicit_of_objectives(objective, constraint):
    case = make_case(objective, constraint, "signed", rows=2, n=5, seed=46)
    names = None if objective != "COO least squares" else ("b", "weight", "radius")
    check_implicit(case, solver(case, "auto"), names)


@pytest.mark.parametrize("p", PS)
def test_implicit_is_the_derivative_of_the_optimality_conditions(p):
    """Against −F_x⁻¹F_θ of the conditions at the known solution, written out densely here."""
    case = make_case("quadratic", p, "active", rows=None, n=5, seed=47)
    P, q, w, t = (case.params[k] for k in ("P", "q", "weight", "radius"))
    x = case.x_star
    free = torch.ones(5, dtype=torch.bool)
    if p == 1:
        free = x != 0
    if p == math.inf:
        free = (w * x).abs() < t * (1 - 1e-9)
    index = free.nonzero()[:, 0]
    k = len(index)
    curved = p != math.inf
    slope = P @ x + q

    def conditions(z, P, q, w, t):
        full = torch.sign(x) * t / w if p == math.inf else torch.zeros_like(q)
        full = full.index_put((index,), z[:k])
        residual = (P @ full + q)[index]
        if not curved:
            return residual
        size = torch.linalg.vector_norm((w * full)[index], p)
        part = (w * full).abs()[index] / size
        normal = w[index] * torch.sign(x[index]) * part ** (p - 1)
        return torch.cat((residual + z[k] * normal, (size - t)[None]))

    z = x[index]
    if curved:
        multiplier = -(slope * x).sum() / t
        z = torch.cat((z, multiplier[None]))
    jacobians = torch.autograd.functional.jacobian(conditions, (z, P, q, w, t))
    v = torch.randn(5, dtype=F64)
    rhs = torch.zeros(len(z), dtype=F64)
    rhs[:k] = v[index]
    adjoint = torch.linalg.solve(jacobians[0].T, rhs)
    want = [-torch.tensordot(adjoint, j, dims=([0], [0])) for j in jacobians[1:]]
    if p == math.inf:  # pinned coordinates move by themselves: ±t/w
        bound = ~free
        want[2] = want[2] + torch.where(bound, -v * torch.sign(x) * t / w**2, 0)
        want[3] = want[3] + (v * torch.sign(x) / w)[bound].sum()
    want[0] = 0.5 * (want[0] + want[0].T)
    leaves = [a.clone().requires_grad_() for a in (P, q, w, t)]
    got_x = dfw.solve(
        dfw.Quadratic(leaves[0], leaves[1]), dfw.LpBall(p, leaves[3], leaves[2]), tol=1e-14
    ).x
    close(got_x, x, rtol=0, atol=1e-6)
    got = torch.autograd.grad((v * got_x).sum(), leaves)
    for name, a, b in zip(("P", "q", "weight", "radius"), got, want, strict=True):
        close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max() + 1)), name


def gradients(case, **settings):
    leaves = {k: v.clone().requires_grad_() for k, v in case.params.items()}
    x = dfw.solve(*case.build(leaves), **settings).x
    v = torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    return torch.autograd.grad((v * x).sum(), list(leaves.values()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_unrolled_tends_to_implicit(p, device):
    """Both differentiate the same thing once the steps have converged.

    With open-loop steps: the derivative through a step size that looks at x does not converge.
    """
    case = make_case("quadratic", p, "signed", rows=3, seed=48).to(device)
    steps = {"method": "frank-wolfe", "tol": 0.0, "max_steps": 400, "step_size": dfw.OpenLoop(2)}
    unrolled = gradients(case, differentiate="unroll", **steps)
    for a, b in zip(unrolled, gradients(case, method="auto", tol=0.0), strict=True):
        close(a, b, rtol=0, atol=0.03 * float(b.abs().max()))


def test_published_method_has_a_useful_gradient():
    """On problems like the paper's, where the constraint is mostly inactive, as the paper says."""
    n, cosines = 100, []
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        R = torch.randn(n, n, generator=gen, dtype=F64)
        P = R.mT @ R + n * torch.eye(n, dtype=F64)
        q = torch.randn(n, generator=gen, dtype=F64).requires_grad_()
        weight = torch.rand(n, generator=gen, dtype=F64) + 0.5
        ball = dfw.LpBall(1.0, float(torch.randn((), generator=gen).abs()), weight)
        both = [
            torch.autograd.grad(dfw.solve(dfw.Quadratic(P, q), ball, **how).x.sum(), q)[0]
            for how in ({"method": "dfw", "tol": 1e-4}, {"tol": 1e-12})
        ]
        cosines.append(torch.cosine_similarity(*both, dim=0))
    assert torch.stack(cosines).median() > 0.9


@pytest.mark.parametrize("layout", ["COO", "CSR"])
@pytest.mark.parametrize("mode", ["unroll", "implicit"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_gradient_is_the_dense_one_on_its_pattern(layout, mode):
    case = make_case(f"{layout} least squares", "p=1", "signed", rows=2, seed=49)
    dense = case.params["A"].clone().requires_grad_()
    sparse = case.params["A"].to_sparse() if layout == "COO" else case.params["A"].to_sparse_csr()
    sparse = sparse.detach().requires_grad_()
    grads = []
    for A in (dense, sparse):
        x = dfw.solve(
            dfw.LeastSquares(A, case.params["b"]),
            case.problem()[1],
            method="frank-wolfe",
            differentiate=mode,
            tol=1e-10,
            max_steps=300 if mode == "implicit" else 10,
            step_size=dfw.ShortStep(case.smooth),
        ).x
        x[:, ::2].sum().backward()
        grads.append(A.grad)
    pattern = case.params["A"] != 0
    got = grads[1].to_dense() if grads[1].layout != torch.strided else grads[1]
    close(got[pattern], grads[0][pattern], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wanted", ["P", "q", "weight", "radius"])
def test_only_what_asks_gets_a_gradient(wanted, method):
    case = make_case("quadratic", "p=1", "signed", rows=2, seed=50)
    leaves = {k: v.clone().requires_grad_(k == wanted) for k, v in case.params.items()}
    everything = {k: v.clone().requires_grad_() for k, v in case.params.items()}
    for params in (leaves, everything):
        sol = dfw.solve(*case.build(params), method=METHODS[method].method, max_steps=20)
        sol.x.pow(2).sum().backward()
    assert all(v.grad is None for k, v in leaves.items() if k != wanted)
    close(leaves[wanted].grad, everything[wanted].grad, rtol=1e-9, atol=1e-12)
    assert leaves[wanted].grad.abs().max() > 0


@pytest.mark.parametrize("method", METHODS)
def test_x_and_the_value_carry_gradients_and_nothing_else(method):
    case = make_case("quadratic", "p=1", rows=2, seed=51)
    leaves = {k: v.clone().requires_grad_() for k, v in case.params.items()}
    sol = dfw.solve(*case.build(leaves), method=METHODS[method].method, max_steps=10)
    assert sol.x.requires_grad
    assert sol.value.requires_grad
    assert not sol.gap.requires_grad
    with torch.no_grad():
        quiet = dfw.solve(*case.build(leaves), method=METHODS[method].method, max_steps=10)
    assert not quiet.x.requires_grad
    assert not quiet.value.requires_grad
    close(quiet.x, sol.x, rtol=1e-13, atol=1e-15)
    constant = dfw.solve(*case.problem(), method=METHODS[method].method, max_steps=10)
    assert not constant.x.requires_grad
    assert not constant.value.requires_grad


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("mode", ["unroll", "implicit"])
def test_gradient_in_the_matrix_is_symmetric(mode, p):
    case = make_case("quadratic", p, "signed", rows=2, seed=52)
    P = case.params["P"].clone().requires_grad_()
    x = dfw.solve(*case.problem(P=P), method="dfw", differentiate=mode, max_steps=10).x
    (grad,) = torch.autograd.grad(x[:, 0].sum(), P)
    close(grad, grad.mT, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["unroll", "implicit"])
def test_gradients_are_finite_everywhere(mode, method, p):
    """Zero data, ties, zero radius, singular P, start at the solution: never NaN."""
    if mode not in METHODS[method].modes:
        pytest.skip("the method does not offer this mode")
    zeros, ones = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
    eye = torch.eye(4, dtype=F64)
    rank1 = torch.outer(ones, ones)
    for P in (eye, torch.zeros_like(eye), rank1):
        for q in (zeros, ones, torch.tensor([1.0, 0, 0, 0], dtype=F64)):
            for t in (0.0, 1.0):
                for w in (ones, torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=F64)):
                    leaves = [a.clone().requires_grad_() for a in (P, q, w)]
                    radius = torch.tensor(t, dtype=F64, requires_grad=True)
                    sol = solved(
                        METHODS[method],
                        dfw.Quadratic(leaves[0], leaves[1]),
                        dfw.LpBall(p, radius, leaves[2]),
                        differentiate=mode,
                        max_steps=4,
                    )
                    if sol is None:
                        continue
                    assert torch.isfinite(sol.x).all()
                    for grad in torch.autograd.grad(
                        sol.x.sum(), [*leaves, radius], allow_unused=True
                    ):
                        assert grad is None or torch.isfinite(grad).all(), (P, q, t, w)


def test_unrolling_the_default_means_the_published_method():
    case = make_case("quadratic", "p=1", rows=3, seed=12)
    got = gradients(case, method="auto", differentiate="unroll", max_steps=20)
    want = gradients(case, method="dfw", max_steps=20)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="differentiate"):
        gradients(case, method="projected-newton", differentiate="unroll")
